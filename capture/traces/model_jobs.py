"""Jobs of the size of well-known models, where no trace of them is at hand: ResNet-50 and BERT-Base.

Tensors and their sizes are those of the published architectures, exactly; seconds are FLOPs over a rate that the caller
assumes. For tests and what-ifs of communication, not predictions of a chip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from capture.traces.synthesise import Gradient, Job
from estimator.tasks import Category

__all__ = ["bert_base", "resnet50"]

FP32 = 4
UPDATE_SHARE = 0.05  # of the backward's seconds that the update takes (an assumption)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One forward operation: its parameters by name, multiply-adds and activations of one sample."""

    name: str
    parameters: tuple[tuple[str, int], ...]
    macs: float
    activations: float


def resnet50(*, workers: int, batch: int = 32, flops_per_s: float = 30e12) -> Job:
    """He et al. 2016 (arXiv:1512.03385), 224 x 224: 25,557,032 parameters in 161 tensors."""
    return _job(list(_resnet50()), workers, batch, flops_per_s)


def bert_base(*, workers: int, batch: int = 32, sequence: int = 128, flops_per_s: float = 30e12) -> Job:
    """Devlin et al. 2019 (arXiv:1810.04805), with its pooler: 109,482,240 parameters in 199 tensors."""
    return _job(list(_bert_base(sequence)), workers, batch, flops_per_s)


def _resnet50() -> Iterator[_Layer]:
    def convolution(name: str, size: int, kernel: int, inputs: int, outputs: int) -> _Layer:
        weights, pixels = kernel * kernel * inputs * outputs, size * size
        return _Layer(
            name=name, parameters=((f"{name}.weight", weights), (f"{name}.norm.weight", outputs),
            (f"{name}.norm.bias", outputs)), macs=weights * pixels, activations=2 * outputs * pixels,
        )  # fmt: skip

    yield convolution("stem", 112, 7, 3, 64)
    inputs = 64
    for stage, (blocks, width, size) in enumerate(((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))):
        for block in range(blocks):
            before = size * 2 if stage and not block else size  # the 3 x 3 of a stage's first block has stride 2
            name = f"stage{stage + 1}.{block}"
            yield convolution(f"{name}.conv1", before, 1, inputs, width)
            yield convolution(f"{name}.conv2", size, 3, width, width)
            yield convolution(f"{name}.conv3", size, 1, width, 4 * width)
            if not block:
                yield convolution(f"{name}.shortcut", size, 1, inputs, 4 * width)
            inputs = 4 * width
    yield _Layer(
        name="fc", parameters=(("fc.weight", 2048 * 1000), ("fc.bias", 1000)), macs=2048 * 1000, activations=1000
    )


def _bert_base(sequence: int) -> Iterator[_Layer]:
    hidden, ffn, vocab, positions = 768, 3072, 30522, 512

    def dense(name: str, inputs: int, outputs: int, tokens: int = sequence) -> _Layer:
        parameters = ((f"{name}.weight", inputs * outputs), (f"{name}.bias", outputs))
        return _Layer(name=name, parameters=parameters, macs=inputs * outputs * tokens, activations=outputs * tokens)

    def norm(name: str) -> _Layer:
        parameters = ((f"{name}.weight", hidden), (f"{name}.bias", hidden))
        return _Layer(name=name, parameters=parameters, macs=hidden * sequence, activations=hidden * sequence)

    tables = (("words", vocab), ("positions", positions), ("types", 2))
    yield _Layer(name="embeddings", parameters=tuple((f"embeddings.{n}", rows * hidden) for n, rows in tables),
                 macs=hidden * sequence, activations=3 * hidden * sequence)  # fmt: skip
    yield norm("embeddings.norm")
    for layer in range(12):
        for name in ("query", "key", "value"):
            yield dense(f"{layer}.{name}", hidden, hidden)
        # Scores and their product with the values; softmax is left out: about 5 FLOPs a score against 2 * 64.
        yield _Layer(name=f"{layer}.attention", parameters=(), macs=2 * sequence * sequence * hidden,
                     activations=12 * sequence * sequence)  # fmt: skip
        yield dense(f"{layer}.output", hidden, hidden)
        yield norm(f"{layer}.attention.norm")
        yield dense(f"{layer}.up", hidden, ffn)
        yield dense(f"{layer}.down", ffn, hidden)
        yield norm(f"{layer}.norm")
    yield dense("pooler", hidden, hidden, tokens=1)


def _job(layers: list[_Layer], workers: int, batch: int, flops_per_s: float) -> Job:
    """Forward, backward in reverse (twice the work: by inputs and by weights) and the update, which waits for all."""
    forward = np.array([2.0 * layer.macs * batch / flops_per_s for layer in layers])
    backward = 2.0 * forward[::-1]
    seconds = np.concatenate([forward, backward, [UPDATE_SHARE * backward.sum()]])
    num = len(layers)
    names = [f"FW.{layer.name}" for layer in layers] + [f"BW.{layer.name}" for layer in layers[::-1]] + ["UPD"]
    gradients = [
        Gradient(name=name, nbytes=float(FP32 * size), op=num + k)
        for k, layer in enumerate(layers[::-1])
        for name, size in layer.parameters[::-1]
    ]
    kept = np.array([float(FP32 * layer.activations * batch) for layer in layers])
    made = np.array([float(FP32 * sum(size for _, size in layer.parameters)) for layer in layers[::-1]])
    keeps = np.concatenate([kept, made, [0.0]])
    frees = np.concatenate([np.zeros(num), kept[::-1], [made.sum()]])
    return Job(
        names=tuple(names),
        category=(*[Category.FORWARD] * num, *[Category.BACKWARD] * num, Category.OPTIMIZER),
        seconds=np.tile(seconds, (workers, 1)), lag_s=np.zeros((workers, len(seconds))), release_s=np.zeros(workers),
        waits=2 * num, gradients=tuple(gradients), keeps=keeps, frees=frees,
    )  # fmt: skip
