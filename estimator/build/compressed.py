"""Attention of DeepSeek-V4: a window of tokens beside compressed entries, one head of keys that are the values too.

Shapes as its modelling code in transformers 5 has them: an entry is the weighted sum of its tokens, a weight for each
column; indexed layers sum twice as many tokens per entry and choose among entries. All heads read one head of keys.
"""

from __future__ import annotations

from estimator.build.indexer import choose
from estimator.build.scores import band, core, heads
from estimator.build.writer import Writer
from estimator.op import Axis, Component, Dim, OpKind, Save, Tensor
from estimator.parts import CompressedSpec
from estimator.precision import Role

__all__ = ["compressed_attention"]

PART = Component.ATTENTION


def compressed_attention(w: Writer, x: str, spec: CompressedSpec) -> str:
    """Queries from a latent, keys of one head, entries, core, outputs projected group by group."""
    model, layer = w.model, w.layer
    rank, q_dim = Dim(float(spec.q_lora_rank), Axis.LATENT), heads(model, model.head_dim)
    head = Dim(float(model.head_dim), Axis.LATENT)
    latent = w.norm("attention.q_a_norm", w.linear("attention.q_a_proj", x, w.hidden, rank, PART), rank, PART)
    q = w.norm("attention.q_b_norm", w.linear("attention.q_b_proj", latent, rank, q_dim, PART), q_dim, PART)
    w.ops[-1] = w.ops[-1].but(weights=())
    q = _rope(w, "q", q, q_dim)
    kv = w.norm("attention.kv_norm", w.linear("attention.kv_proj", x, w.hidden, head, PART), head, PART)
    kv = _rope(w, "kv", kv, head)
    seq, num = float(w.seq), 0.0
    seen = band(seq, layer.window) if layer.window else seq * seq / 2
    parts = [kv]
    if layer.compression:
        num = seq / layer.compression
        parts.append(_entries(w, "attention", x, model.head_dim, PART))
        share = 1.0
        if layer.indexed:
            assert model.indexer is not None
            k = _entries(w, "index", x, model.indexer.head_dim, Component.INDEXER)
            share = choose(w, x, latent, rank, k, model.indexer, keys=num, attended=model.head_dim)
        seen += share * seq * num / 2
    # One list of tokens and entries on every tensor-parallel rank, whose heads all read it.
    keys = "attention.keys.out"
    w.tensors[keys] = Tensor((Dim(seq + num, Axis.TOKENS), head._replace(axis=Axis.SHARED)))
    w.memory_op("attention.keys", OpKind.ELEMENTWISE, tuple(parts), (keys,), PART)
    context = core(w, q, keys, keys, qk=model.head_dim, value=model.head_dim, keys=seq + num,
                   visible=seen / (seq * (seq + num) / 2), selects=layer.indexed)  # fmt: skip
    context = _rope(w, "output", context, q_dim)  # back, for values were rotated as keys are
    groups = Dim(float(spec.o_groups), Axis.HEADS, units=spec.o_groups)
    inner = model.num_heads * model.head_dim / spec.o_groups
    out = w.blocked("attention.o_a_proj", context, groups, inner, float(spec.o_lora_rank), PART)
    width = Dim(float(spec.o_groups * spec.o_lora_rank), Axis.HEADS, units=spec.o_groups)
    return w.linear("attention.o_b_proj", out, width, w.hidden, PART)


def _entries(w: Writer, name: str, x: str, width: int, part: Component) -> str:
    """Compressed keys: a projection and its weights, summed over `compression` tokens, or over twice as many."""
    layer = w.layer
    columns = Dim(float(width * (2 if layer.indexed else 1)), Axis.LATENT)
    detached = part is Component.INDEXER
    kv, gate = (
        w.linear(f"{name}.entry_{n}_proj", x, w.hidden, columns, part, detached=detached) for n in ("kv", "gate")
    )
    one = Dim(float(width), Axis.LATENT)
    entries = Dim(w.seq / layer.compression, Axis.TOKENS)
    summed, scale, out = (f"{name}.entries.{n}" for n in ("sum", "rstd", "out"))
    w.tensors[summed] = w.tensors[out] = Tensor((entries, one))
    w.tensors[scale] = Tensor((entries,), Role.FULL)
    w.memory_op(f"{name}.entries.sum", OpKind.MIX, (kv, gate), (summed,), part,
                saves=(Save(kv, Role.ACTIVATION), Save(gate, Role.ACTIVATION)))  # fmt: skip
    w.weight(f"{name}.entries.position_bias", Dim(float(layer.compression), Axis.POSITIONS), columns)
    w.memory_op(f"{name}.entries.norm", OpKind.NORM, (summed,), (out,), part,
                saves=(Save(summed, Role.ACTIVATION), Save(scale, Role.FULL)))  # fmt: skip
    w.weight(f"{name}.entries.norm.weight", one)
    return out


def _rope(w: Writer, name: str, x: str, width: Dim) -> str:
    out = w.tensor(f"attention.{name}_rope.out", width)
    w.memory_op(f"attention.{name}_rope", OpKind.ROPE, (x,), (out,), PART)
    return out
