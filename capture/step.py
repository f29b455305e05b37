"""Runs training steps of a small transformer for real, in plain torch, and times them: what predictions are held to.

The model is what a ModelSpec says, of plain attention layers: RMSNorm, rotary positions, gated MLP, untied head.
Weights are random, so are tokens; AdamW updates in one fused kernel, gradients go through DistributedDataParallel where
there are ranks. Half precision keeps fp32 master copies, gradients in half precision, as the recipe `bf16_grads` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from capture.device import Device, torch_dtype
from capture.ranks import agreed, in_ranks
from capture.samples import Sample, others_share, watch
from estimator.model import ModelSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Task", "Timed", "num_parameters", "run_steps"]

WARM_UP, STEPS, TRIES = 2, 7, 3
PARTS = ("forward", "backward", "optimizer")
GRACE_S = 120.0  # of ranks, beyond the seconds that their steps may take
ROTARY_BASE = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one rank trains: micro-batches of `batch` sequences, one a step."""

    name: str
    model: ModelSpec
    seq: int
    batch: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Medians of steps: the whole, and its parts in seconds."""

    step: Sample
    parts: dict[str, float]


def run_steps(task: Task, device: Device, *, limit_s: float = 600.0) -> Timed:
    """Steps of a task on this machine, on all ranks of the device at once."""
    if device.ranks == 1:
        return _steps(None, task, device.kind, 1)
    found: Timed = in_ranks(
        _steps, task, device.kind, device.ranks, ranks=device.ranks, kind=device.kind, threads=device.threads,
        limit_s=limit_s + GRACE_S,
    )  # fmt: skip
    return found


def _steps(rank: int | None, task: Task, kind: str, ranks: int) -> Timed:
    """Steps until repeats agree and the machine was left alone, three times at most; the quietest of them."""
    import torch

    torch.manual_seed(0)
    step, agree = _trainer(task, kind, parallel=rank is not None), agreed(rank)
    for _ in range(WARM_UP):
        step()
    best: Timed | None = None
    load = watch(kind, ranks)
    for _ in range(TRIES):
        before = load()
        seconds = np.array([step() for _ in range(STEPS)])
        others = others_share(before, load())
        low, middle, high = np.quantile(seconds.sum(axis=1), (0.25, 0.5, 0.75))
        sample = Sample(seconds=float(middle), spread=float((high - low) / middle), others=others)
        found = Timed(step=sample, parts=dict(zip(PARTS, map(float, np.median(seconds, axis=0)), strict=True)))
        if best is None or (sample.others, sample.spread) < (best.step.others, best.step.spread):
            best = found
        if agree(int(best.step.trusted)):
            break
    assert best is not None
    return best


def _trainer(task: Task, kind: str, *, parallel: bool) -> Callable[[], tuple[float, float, float]]:
    """A function that trains one step and tells the seconds of forward, backward and update."""
    import torch
    from torch.nn import functional

    model = _model(task.model, task.seq).to(device=kind, dtype=torch_dtype(task.dtype))
    run: nn.Module = torch.nn.parallel.DistributedDataParallel(model) if parallel else model
    update = _update(model)
    tokens = torch.randint(task.model.vocab, (task.batch, task.seq + 1), device=kind)
    wait: Callable[[], object] = torch.cuda.synchronize if kind == "cuda" else bool

    def step() -> tuple[float, float, float]:
        marks = [time.perf_counter()]
        logits = run(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        wait()
        marks.append(time.perf_counter())
        loss.backward()
        wait()
        marks.append(time.perf_counter())
        update()
        wait()
        marks.append(time.perf_counter())
        forward, backward, optimizer = np.diff(marks)
        return float(forward), float(backward), float(optimizer)

    return step


def _update(model: nn.Module) -> Callable[[], None]:
    """AdamW on the weights themselves, or on fp32 copies of weights in half precision."""
    import torch

    weights = list(model.parameters())
    half = weights[0].dtype != torch.float32
    masters = [w.detach().float() for w in weights] if half else weights
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

    def update() -> None:
        if half:
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.float()
        optimizer.step()
        if half:
            with torch.no_grad():
                for master, weight in zip(masters, weights, strict=True):
                    weight.copy_(master)
        for weight in weights:
            weight.grad = None

    return update


def _model(spec: ModelSpec, seq: int) -> nn.Module:
    """The transformer that a spec says. ValueError for parts that this does not run."""
    import torch
    from torch import nn
    from torch.nn import functional

    if spec.moe or spec.mla or spec.layers or not spec.gated_mlp or spec.num_kv_heads != spec.num_heads:
        raise ValueError(f"{spec.name}: a checked model has plain attention, as many key heads as heads and gated MLPs")
    linear = partial(nn.Linear, bias=False)
    wide, inner, heads, dim = spec.hidden, spec.ffn, spec.num_heads, spec.head_dim

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (linear(wide, heads * dim) for _ in range(3))
            self.out = linear(heads * dim, wide)
            self.gate, self.up, self.down = linear(wide, inner), linear(wide, inner), linear(inner, wide)
            self.norms = nn.ModuleList(nn.RMSNorm(wide) for _ in range(2))

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            h = self.norms[0](x)
            q, k, v = (part(h).unflatten(-1, (heads, dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
            q, k = (_rotated(part, cos, sin) for part in (q, k))
            core = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(core.transpose(1, 2).flatten(2))
            h = self.norms[1](x)
            done: torch.Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
            return done

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(spec.vocab, wide)
            self.layers = nn.ModuleList(Layer() for _ in range(spec.num_layers))
            self.norm, self.head = nn.RMSNorm(wide), linear(wide, spec.vocab)
            angles = torch.outer(torch.arange(seq), ROTARY_BASE ** (-torch.arange(0, dim, 2) / dim))
            self.register_buffer("cos", angles.cos().repeat(1, 2))
            self.register_buffer("sin", angles.sin().repeat(1, 2))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x, self.cos, self.sin)
            logits: torch.Tensor = self.head(self.norm(x))
            return logits

    return Model()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves against each other (Su 2021, arXiv:2104.09864)."""
    import torch

    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def num_parameters(spec: ModelSpec, seq: int) -> int:
    """Parameters of the model that is run."""
    return sum(p.numel() for p in _model(spec, seq).parameters())
