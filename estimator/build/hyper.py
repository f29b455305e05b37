"""Hyper-connections: several residual streams, mixed around each branch (mHC, arXiv:2512.24880, section 4).

The projection reads all streams once, their norm divides its output (section 4.3.1: kernels fused so); Sinkhorn's
iterations stay inside one kernel. Streams are kept as they are, in the residual's dtype.
"""

from __future__ import annotations

from estimator.build.writer import Writer
from estimator.op import Axis, Component, Dim, OpKind, Save, Tensor
from estimator.parts import HyperSpec
from estimator.precision import Role

__all__ = ["gathered", "joined", "spread"]


def gathered(w: Writer, name: str, x: str, hyper: HyperSpec) -> tuple[str, str]:
    """A branch's input, and the weights of its output and of the streams."""
    weights = _weights(w, name, x, hyper.num_weights, 3)
    out = w.tensor(f"{name}.entry", w.hidden)
    w.memory_op(f"{name}.collapse", OpKind.MIX, (x, weights), (out,), Component.HYPER,
                saves=(Save(x, Role.ACTIVATION), Save(weights, Role.FULL)))  # fmt: skip
    return out, weights


def spread(w: Writer, name: str, x: str, y: str, weights: str) -> str:
    """The streams behind a branch: mixed among themselves, the branch's output added to each by its weight."""
    out = w.tensor(f"{name}.out", w.stream)
    saves = (Save(x, Role.ACTIVATION), Save(y, Role.ACTIVATION), Save(weights, Role.FULL))
    w.memory_op(f"{name}.mix", OpKind.MIX, (x, y, weights), (out,), Component.HYPER, saves=saves)
    return out


def joined(w: Writer, x: str, hyper: HyperSpec) -> str:
    """One stream for the last norm."""
    weights = _weights(w, "hyper_head", x, hyper.streams, 1)
    out = w.tensor("hyper_head.out", w.hidden)
    w.memory_op("hyper_head.collapse", OpKind.MIX, (x, weights), (out,), Component.HYPER,
                saves=(Save(x, Role.ACTIVATION), Save(weights, Role.FULL)))  # fmt: skip
    return out


def _weights(w: Writer, name: str, x: str, num: int, num_scales: int) -> str:
    """Projection of all streams, with biases and scales; then sigmoids and the doubly stochastic matrix."""
    columns = Dim(float(num), Axis.ROUTER)
    raw = w.linear(f"{name}.proj", x, w.stream, columns, Component.HYPER, bias=True, save_as=Role.ACTIVATION)
    w.weight(f"{name}.scale", Dim(float(num_scales), Axis.ROUTER))
    w.tensors[raw] = Tensor(w.tensors[raw].dims, Role.FULL)
    out = w.tensor(f"{name}.weights", columns, role=Role.FULL)
    w.memory_op(f"{name}.sinkhorn", OpKind.MIX, (raw,), (out,), Component.HYPER, saves=(Save(raw, Role.FULL),))
    return out
