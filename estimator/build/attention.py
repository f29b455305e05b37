"""Attention: its projections, grouped or latent. Its core is in scores.py, flash attention in passes/fuse.

Sinks are one logit per head: a parameter, no work.
"""

from __future__ import annotations

from estimator.build.compressed import compressed_attention
from estimator.build.indexer import choose_keys, latent_context, reads_latents
from estimator.build.scores import core, heads
from estimator.build.writer import Writer
from estimator.model import MLASpec, QKNorm
from estimator.op import Axis, Component, Dim, OpKind, Save, Weight
from estimator.precision import Role
from estimator.strategy import Module

__all__ = ["UP", "attention", "gated", "keys_and_values", "qk_norm", "rope"]

UP = frozenset({Module.MLA_UP_PROJ.value})


def attention(w: Writer, x: str) -> str:
    """Projections, core, output projection."""
    model = w.model
    if model.compressed is not None:
        return compressed_attention(w, x, model.compressed)
    context, value = _grouped(w, x) if model.mla is None else _latent(w, x, model.mla)
    return w.linear(
        "attention.o_proj", context, value, w.hidden, Component.ATTENTION, bias=model.attention_output_bias,
        save_as=Role.ATTENTION_OUTPUT, role=Role.LINEAR_INPUT,
    )  # fmt: skip


def _grouped(w: Writer, x: str) -> tuple[str, Dim]:
    """Multi-head and grouped-query attention (Ainslie 2023, arXiv:2305.13245)."""
    model, part = w.model, Component.ATTENTION
    q_dim, kv_dim = heads(model, model.head_dim), heads(model, model.head_dim, kv=True)
    if model.attention_gate:
        w.linear("attention.q_proj", x, w.hidden, heads(model, 2 * model.head_dim), part, bias=model.attention_bias)
        q, gate = w.split(("attention.q", q_dim), ("attention.gate", q_dim))
    else:
        q, gate = w.linear("attention.q_proj", x, w.hidden, q_dim, part, bias=model.attention_bias), ""
    k, v = (
        w.linear(f"attention.{name}_proj", x, w.hidden, kv_dim, part, bias=model.attention_bias) for name in ("k", "v")
    )
    if model.qk_norm is not QKNorm.NONE:
        each: dict[QKNorm, Dim | None] = {QKNorm.HEAD: Dim(float(model.head_dim), Axis.HEAD), QKNorm.UNWEIGHTED: None}
        q, k = (
            qk_norm(w, name, t, dim, each.get(model.qk_norm, dim))
            for name, t, dim in (("q", q, q_dim), ("k", k, kv_dim))
        )
    if not model.max_positions and w.layer.rope:
        q, k = rope(w, "q", q, q_dim), rope(w, "k", k, kv_dim)
    context = core(w, q, k, v, qk=model.head_dim, value=model.head_dim)
    return (gated(w, context, gate, q_dim) if gate else context), q_dim


def qk_norm(w: Writer, name: str, x: str, width: Dim, weight: Dim | None) -> str:
    """A norm over each head, with one weight vector of the head's width or none; or over all heads, each its own."""
    out = w.norm(f"attention.{name}_norm", x, width, Component.ATTENTION)
    weights = () if weight is None else (Weight(f"attention.{name}_norm.weight", (weight,), linear=False),)
    w.ops[-1] = w.ops[-1].but(weights=weights)
    return out


def rope(w: Writer, name: str, x: str, width: Dim, modules: frozenset[str] = frozenset()) -> str:
    """Rotary position embedding of all heads."""
    out = w.tensor(f"attention.{name}_rope.out", width)
    w.memory_op(f"attention.{name}_rope", OpKind.ROPE, (x,), (out,), Component.ATTENTION, modules=modules)
    return out


def gated(w: Writer, context: str, gate: str, width: Dim) -> str:
    """The output times the sigmoid of its gate (Qwen3.5)."""
    out = w.tensor("attention.gated.out", width)
    saves = (Save(context, Role.ATTENTION_OUTPUT), Save(gate, Role.ACTIVATION))
    w.memory_op("attention.gated", OpKind.MIX, (context, gate), (out,), Component.ATTENTION, saves=saves)
    return out


def _latent(w: Writer, x: str, mla: MLASpec) -> tuple[str, Dim]:
    """Multi-head latent attention: down-projections are replicated over tp, up-projections split by head."""
    model, up = w.model, UP
    q_dim = heads(model, model.qk_head_dim)
    q, width = x, w.hidden
    if mla.q_lora_rank:
        width = Dim(float(mla.q_lora_rank), Axis.LATENT)
        q = w.linear("attention.q_a_proj", x, w.hidden, width, Component.ATTENTION, bias=model.attention_bias)
        q = w.norm("attention.q_a_norm", q, width, Component.ATTENTION)
    query_latent = q
    q = w.linear("attention.q_b_proj", q, width, q_dim, Component.ATTENTION, modules=up)
    latent = Dim(float(mla.kv_lora_rank), Axis.LATENT)
    joint = Dim(float(mla.kv_lora_rank + mla.qk_rope_head_dim), Axis.LATENT)
    kv_a = w.linear("attention.kv_a_proj", x, w.hidden, joint, Component.ATTENTION, bias=model.attention_bias)
    kv = w.norm("attention.kv_a_norm", kv_a, latent, Component.ATTENTION)
    value = heads(model, mla.v_head_dim)
    if w.layer.indexed:
        assert model.indexer is not None
        chosen = choose_keys(w, x, query_latent, width, model.indexer)
        if reads_latents(w.seq, mla, model.indexer):
            return latent_context(w, rope(w, "q", q, q_dim, up), kv, kv_a, mla, chosen), value
    kv_dim = heads(model, mla.qk_nope_head_dim + mla.v_head_dim)
    kv_b = w.linear("attention.kv_b_proj", kv, latent, kv_dim, Component.ATTENTION, modules=up)
    q = rope(w, "q", q, q_dim, up)
    # The rotary part of k is one head's width, copied to every head beside the up-projected part.
    k, v = keys_and_values(w, kv_b, kv_a, q_dim, value)
    return core(w, q, k, v, qk=model.qk_head_dim, value=model.v_head_dim), value


def keys_and_values(w: Writer, kv_b: str, kv_a: str, keys: Dim, values: Dim) -> tuple[str, str]:
    """Keys and values of all heads from their latents: what was projected up, and the rotary part that heads share."""
    up, (k, v) = UP, (w.tensor("attention.k.out", keys), w.tensor("attention.v.out", values))
    w.memory_op("attention.k_concat", OpKind.ELEMENTWISE, (kv_b, kv_a), (k,), Component.ATTENTION, modules=up)
    w.memory_op("attention.v_split", OpKind.ELEMENTWISE, (kv_b,), (v,), Component.ATTENTION, modules=up)
    return k, v
