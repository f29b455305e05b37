"""The core of attention as scores, softmax and context, and how much of the causal scores a layer's mask leaves."""

from __future__ import annotations

from estimator.build.writer import Writer
from estimator.layers import LayerSpec
from estimator.model import ModelSpec
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor, Weight
from estimator.precision import Role
from estimator.strategy import Module

__all__ = ["band", "core", "heads", "visible_share"]

CORE = frozenset({Module.CORE_ATTENTION.value})


def heads(model: ModelSpec, width: int, *, kv: bool = False) -> Dim:
    """Heads of that width, next to one another."""
    count = model.num_kv_heads if kv else model.num_heads
    return Dim(float(count * width), Axis.KV_HEADS if kv else Axis.HEADS, units=count)


def band(seq: float, window: float) -> float:
    """Scores of `seq` queries that each see `window` keys, the first ones fewer. Never more than the causal half.

    >>> band(4, 2), band(4, 4)
    (7.0, 8.0)
    """
    window = min(window, seq)
    return min(seq * window - window * (window - 1) / 2, seq * seq / 2)


def visible_share(seq: int, layer: LayerSpec) -> float:
    """Of the causal half, s^2/2, what a layer's window or chunks leave."""
    if layer.window:
        return band(seq, layer.window) / (seq * seq / 2)
    if layer.chunk:
        whole, rest = divmod(seq, layer.chunk)
        entries = (whole * layer.chunk * (layer.chunk + 1) + rest * (rest + 1)) / 2
        return min(entries / (seq * seq / 2), 1.0)
    return 1.0


def core(
    w: Writer, q: str, k: str, v: str, *, qk: int, value: int, keys: float = 0.0, visible: float | None = None,
    selects: bool = False,
) -> str:  # fmt: skip
    """softmax(q k^T) v with its s x s scores (or s x `keys`), of heads `qk` and `value` wide.

    `visible`: the share of the causal half that counts (None: what the layer's mask leaves); `selects`: queries read
    keys of their own, whose numbers are kept.
    """
    model, act = w.model, Role.ACTIVATION
    num = Dim(float(model.num_heads), Axis.HEADS, units=model.num_heads)
    shape = (Dim(1.0, Axis.BATCH), Dim(float(w.seq), Axis.QUERY), Dim(keys or float(w.seq), Axis.KEY), num)
    w.tensors["attention.scores"] = w.tensors["attention.probabilities"] = Tensor(shape)
    out = w.tensor("attention.context.out", heads(model, value))
    probabilities = "attention.dropped" if model.attention_dropout else "attention.probabilities"
    sinks = (Weight("attention.sinks", (num,), linear=False),) if model.attention_sinks else ()
    chosen = (Save("index.chosen.out", Role.INDEX),) if selects else ()
    if visible is None:
        visible = visible_share(w.seq, w.layer)
    reach = float(min(w.layer.window or w.layer.chunk, w.seq))
    w.ops += [
        Op(name="attention.scores", kind=OpKind.SCORES, component=Component.ATTENTION,
           dims=(*shape, Dim(float(qk), Axis.HEAD)), inputs=(q, k), outputs=("attention.scores",),
           saves=(Save(q, act), Save(k, act), *chosen), modules=CORE, role=act, weights=sinks, visible=visible,
           reach=reach, selects=selects),
        Op(name="attention.softmax", kind=OpKind.SOFTMAX, component=Component.ATTENTION, inputs=("attention.scores",),
           outputs=("attention.probabilities",), saves=(Save("attention.probabilities", act),), modules=CORE,
           passes=2.0),
    ]  # fmt: skip
    if model.attention_dropout:
        w.dropout("attention.core_dropout", "attention.probabilities", probabilities, Component.ATTENTION, CORE)
    w.ops.append(
        Op(name="attention.context", kind=OpKind.CONTEXT, component=Component.ATTENTION,
           dims=(*shape, Dim(float(value), Axis.HEAD)), inputs=(probabilities, v), outputs=(out,),
           saves=(Save(probabilities, act), Save(v, act)), modules=CORE, role=act)
    )  # fmt: skip
    return out
