"""Jobs of the size of well-known models, where no trace of them is at hand: ResNet-50, VGG-16, Inception-v3, BERT-Base.

Tensors and their sizes are those of the published architectures, exactly. Seconds are FLOPs over a rate that the caller
assumes; with a `Chip` they are those of a roofline, kernel by kernel (convolution, norm, activation apart), beside what
running two kernels as one saves. For tests and what-ifs of communication and fusion, not predictions of a chip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from capture.traces.synthesise import Gradient, Job
from estimator.tasks import Category

__all__ = ["MODELS", "Chip", "bert_base", "inception_v3", "resnet50", "vgg16"]

FP32 = 4
UPDATE_SHARE = 0.05  # of the backward's seconds that the update takes (an assumption)
STATES = 3  # weights and two moments of Adam: bytes that live all the time, in multiples of the parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What kernels are priced by: FLOPs and bytes a second that a kernel reaches, and what launching one costs.

    The defaults are assumptions: about 80 % of a V100's datasheet in FP32 (15.7 TFLOP/s, 900 GB/s), and 5 us for a
    framework to launch a kernel.
    """

    flops_per_s: float = 12.5e12
    bytes_per_s: float = 720e9
    launch_s: float = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One forward kernel: its parameters by name, multiply-adds, what it keeps and what it hands on, of one sample.

    joins: counts to the layer before it where kernels are not told apart.
    """

    name: str
    parameters: tuple[tuple[str, int], ...]
    macs: float
    activations: float
    hands: float = 0.0
    joins: bool = False


def resnet50(*, workers: int, batch: int = 32, flops_per_s: float = 30e12, chip: Chip | None = None) -> Job:
    """He et al. 2016 (arXiv:1512.03385), 224 x 224: 25,557,032 parameters in 161 tensors."""
    return _job(list(_resnet50()), workers, batch, flops_per_s, chip)


def vgg16(*, workers: int, batch: int = 32, flops_per_s: float = 30e12, chip: Chip | None = None) -> Job:
    """Simonyan & Zisserman 2015 (arXiv:1409.1556), configuration D: 138,357,544 parameters in 32 tensors."""
    return _job(list(_vgg16()), workers, batch, flops_per_s, chip)


def inception_v3(*, workers: int, batch: int = 32, flops_per_s: float = 30e12, chip: Chip | None = None) -> Job:
    """Szegedy et al. 2016 (arXiv:1512.00567), 299 x 299, no auxiliary head: 23,834,568 parameters in 284 tensors."""
    return _job(list(_inception_v3()), workers, batch, flops_per_s, chip)


def bert_base(
    *, workers: int, batch: int = 32, sequence: int = 128, flops_per_s: float = 30e12, chip: Chip | None = None
) -> Job:
    """Devlin et al. 2019 (arXiv:1810.04805), with its pooler: 109,482,240 parameters in 199 tensors."""
    return _job(list(_bert_base(sequence)), workers, batch, flops_per_s, chip)


MODELS: dict[str, Callable[..., Job]] = {
    "bert_base": bert_base, "resnet50": resnet50, "vgg16": vgg16, "inception_v3": inception_v3,
}  # fmt: skip
"""By name."""


def _convolution(
    name: str, size: int, kernel: tuple[int, int], inputs: int, outputs: int, *, ends: bool = True
) -> Iterator[_Layer]:
    """Convolution without bias, batch norm and, where it `ends` so, an activation in place."""
    weights, pixels = kernel[0] * kernel[1] * inputs * outputs, size * size
    made = float(outputs * pixels)
    yield _Layer(name=name, parameters=((f"{name}.weight", weights),), macs=weights * pixels, activations=made,
                 hands=made)  # fmt: skip
    yield _Layer(name=f"{name}.norm", parameters=((f"{name}.norm.weight", outputs), (f"{name}.norm.bias", outputs)),
                 macs=0.0, activations=made, hands=made, joins=True)  # fmt: skip
    if ends:
        yield _Layer(name=f"{name}.relu", parameters=(), macs=0.0, activations=0.0, hands=made, joins=True)


def _classifier(name: str, inputs: int, outputs: int) -> _Layer:
    parameters = ((f"{name}.weight", inputs * outputs), (f"{name}.bias", outputs))
    return _Layer(name=name, parameters=parameters, macs=inputs * outputs, activations=outputs, hands=float(outputs))


def _resnet50() -> Iterator[_Layer]:
    yield from _convolution("stem", 112, (7, 7), 3, 64)
    inputs = 64
    for stage, (blocks, width, size) in enumerate(((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))):
        for block in range(blocks):
            before = size * 2 if stage and not block else size  # the 3 x 3 of a stage's first block has stride 2
            name = f"stage{stage + 1}.{block}"
            yield from _convolution(f"{name}.conv1", before, (1, 1), inputs, width)
            yield from _convolution(f"{name}.conv2", size, (3, 3), width, width)
            yield from _convolution(f"{name}.conv3", size, (1, 1), width, 4 * width, ends=False)
            if not block:
                yield from _convolution(f"{name}.shortcut", size, (1, 1), inputs, 4 * width, ends=False)
            made = float(4 * width * size * size)
            yield _Layer(name=f"{name}.add", parameters=(), macs=0.0, activations=0.0, hands=made, joins=True)
            inputs = 4 * width
    yield _classifier("fc", 2048, 1000)


def _vgg16() -> Iterator[_Layer]:
    inputs, number = 3, 0
    for size, widths in ((224, (64, 64)), (112, (128, 128)), (56, (256,) * 3), (28, (512,) * 3), (14, (512,) * 3)):
        for width in widths:
            name, made = f"conv{number}", float(width * size * size)
            weights = 9 * inputs * width
            parameters = ((f"{name}.weight", weights), (f"{name}.bias", width))
            yield _Layer(name=name, parameters=parameters, macs=weights * size * size, activations=made, hands=made)
            yield _Layer(name=f"{name}.relu", parameters=(), macs=0.0, activations=0.0, hands=made, joins=True)
            inputs, number = width, number + 1
    for k, (rows, columns) in enumerate(((512 * 49, 4096), (4096, 4096), (4096, 1000))):
        yield _classifier(f"fc{k}", rows, columns)


def _inception_v3() -> Iterator[_Layer]:
    for name, size, kernel, inputs, outputs in (
        ("stem.1", 149, 3, 3, 32), ("stem.2", 147, 3, 32, 32), ("stem.3", 147, 3, 32, 64), ("stem.4", 73, 1, 64, 80),
        ("stem.5", 71, 3, 80, 192),
    ):  # fmt: skip
        yield from _convolution(name, size, (kernel, kernel), inputs, outputs)
    one, three, five, flat, tall = (1, 1), (3, 3), (5, 5), (1, 7), (7, 1)
    wide, high = (1, 3), (3, 1)
    a = [(i, [(35, one, i, 64), (35, one, i, 48), (35, five, 48, 64), (35, one, i, 64), (35, three, 64, 96),
              (35, three, 96, 96), (35, one, i, pool)]) for i, pool in ((192, 32), (256, 64), (288, 64))]  # fmt: skip
    b = [(17, three, 288, 384), (35, one, 288, 64), (35, three, 64, 96), (17, three, 96, 96)]
    c = [[(17, one, 768, 192), (17, one, 768, n), (17, flat, n, n), (17, tall, n, 192), (17, one, 768, n),
          (17, tall, n, n), (17, flat, n, n), (17, tall, n, n), (17, flat, n, 192), (17, one, 768, 192)]
         for n in (128, 160, 160, 192)]  # fmt: skip
    d = [(17, one, 768, 192), (8, three, 192, 320), (17, one, 768, 192), (17, flat, 192, 192), (17, tall, 192, 192),
         (8, three, 192, 192)]  # fmt: skip
    e = [[(8, one, i, 320), (8, one, i, 384), (8, wide, 384, 384), (8, high, 384, 384), (8, one, i, 448),
          (8, three, 448, 384), (8, wide, 384, 384), (8, high, 384, 384), (8, one, i, 192)]
         for i in (1280, 2048)]  # fmt: skip
    for number, block in enumerate((*(rows for _, rows in a), b, *c, d, *e)):
        for k, (size, sides, inputs, outputs) in enumerate(block):
            yield from _convolution(f"mixed{number}.{k}", size, sides, inputs, outputs)
    yield _classifier("fc", 2048, 1000)


def _bert_base(sequence: int) -> Iterator[_Layer]:
    hidden, ffn, vocab, positions = 768, 3072, 30522, 512

    def dense(name: str, inputs: int, outputs: int, tokens: int = sequence) -> _Layer:
        parameters = ((f"{name}.weight", inputs * outputs), (f"{name}.bias", outputs))
        made = float(outputs * tokens)
        return _Layer(name=name, parameters=parameters, macs=inputs * outputs * tokens, activations=made, hands=made)

    def norm(name: str) -> _Layer:
        parameters = ((f"{name}.weight", hidden), (f"{name}.bias", hidden))
        made = hidden * sequence
        return _Layer(name=name, parameters=parameters, macs=made, activations=made, hands=made)

    def light(name: str, hands: float) -> _Layer:
        return _Layer(name=name, parameters=(), macs=0.0, activations=0.0, hands=hands, joins=True)

    tables = (("words", vocab), ("positions", positions), ("types", 2))
    yield _Layer(name="embeddings", parameters=tuple((f"embeddings.{n}", rows * hidden) for n, rows in tables),
                 macs=hidden * sequence, activations=3 * hidden * sequence, hands=hidden * sequence)  # fmt: skip
    yield norm("embeddings.norm")
    for layer in range(12):
        for name in ("query", "key", "value"):
            yield dense(f"{layer}.{name}", hidden, hidden)
        # Scores and their product with the values; softmax is left out: about 5 FLOPs a score against 2 * 64.
        scores = 12.0 * sequence * sequence
        products = sequence * sequence * hidden
        yield _Layer(name=f"{layer}.attention", parameters=(), macs=products, activations=scores, hands=scores)
        yield light(f"{layer}.softmax", scores)
        yield _Layer(name=f"{layer}.context", parameters=(), macs=products, activations=0.0, hands=hidden * sequence,
                     joins=True)  # fmt: skip
        yield dense(f"{layer}.output", hidden, hidden)
        yield light(f"{layer}.add", hidden * sequence)
        yield norm(f"{layer}.attention.norm")
        yield dense(f"{layer}.up", hidden, ffn)
        yield light(f"{layer}.gelu", ffn * sequence)
        yield dense(f"{layer}.down", ffn, hidden)
        yield light(f"{layer}.down.add", hidden * sequence)
        yield norm(f"{layer}.norm")
    yield dense("pooler", hidden, hidden, tokens=1)


def _coarse(layers: Sequence[_Layer]) -> list[_Layer]:
    """Layers without their kernels: what joins counts to the one before."""
    found: list[_Layer] = []
    for layer in layers:
        if not layer.joins:
            found.append(layer)
            continue
        last = found[-1]
        found[-1] = replace(
            last, parameters=last.parameters + layer.parameters, macs=last.macs + layer.macs, hands=layer.hands,
            activations=last.activations + layer.activations,
        )  # fmt: skip
    return found


def _job(fine: list[_Layer], workers: int, batch: int, flops_per_s: float, chip: Chip | None) -> Job:
    """Forward, backward in reverse (twice the work: by inputs and by weights) and the update, which waits for all."""
    layers = fine if chip else _coarse(fine)
    work = np.array([2.0 * layer.macs * batch / (chip.flops_per_s if chip else flops_per_s) for layer in layers])
    forward, saves = work, None
    if chip:
        forward, saves = _roofline(layers, work, batch, chip)
    backward = 2.0 * forward[::-1] - (chip.launch_s if chip else 0.0)
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
        waits=2 * num, gradients=tuple(gradients), keeps=keeps, frees=frees, saves_s=saves,
        base_bytes=STATES * float(made.sum()) if chip else 0.0,
    )  # fmt: skip


def _roofline(layers: Sequence[_Layer], work: np.ndarray, batch: int, chip: Chip) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [K] of each forward kernel, and [2 K + 1] what running an operation with the next one as one saves.

    A kernel reads what the one before hands on and its weights, writes what it hands on, and takes the longer of its
    FLOPs and its bytes. As one, two kernels save a launch, and the tensor between them is neither written nor read; a
    kernel saves no more than its bytes take beyond its FLOPs. A backward kernel does twice the work, and saves twice.
    """
    hands = np.array([FP32 * layer.hands * batch for layer in layers]) / chip.bytes_per_s
    reads = np.concatenate([hands[:1], hands[:-1]])
    weights = np.array([FP32 * sum(size for _, size in layer.parameters) for layer in layers]) / chip.bytes_per_s
    traffic = reads + hands + weights
    slack = np.maximum(traffic - work, 0.0)
    without_read = np.minimum(reads, slack)
    without_write = np.minimum(hands, slack - without_read)
    inner = without_write[:-1] + without_read[1:]
    forward = np.concatenate([inner + chip.launch_s, [np.nan]])
    backward = np.concatenate([2.0 * inner[::-1] + chip.launch_s, [np.nan]])
    return np.maximum(work, traffic) + chip.launch_s, np.concatenate([forward, backward, [np.nan]])
