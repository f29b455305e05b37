"""Attention: its projections and its core, grouped or latent. Flash attention is a fusion (passes/fuse)."""

from __future__ import annotations

from estimator.build.writer import Writer
from estimator.model import MLASpec, ModelSpec, QKNorm
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor, Weight
from estimator.precision import Role
from estimator.strategy import Module

__all__ = ["attention"]

CORE, UP_PROJ = Module.CORE_ATTENTION.value, Module.MLA_UP_PROJ.value


def attention(w: Writer, x: str) -> str:
    """Norm, projections, core, output projection, residual."""
    model = w.model
    normed = w.norm("input_norm", x, w.hidden, centred=w.centred)
    q, k, v, value = _latent_qkv(w, normed, model.mla) if model.mla else _grouped_qkv(w, normed)
    context = _core(w, q, k, v)
    y = w.linear("attention.o_proj", context, value, w.hidden, Component.ATTENTION, bias=model.attention_output_bias,
                 save_as=Role.ATTENTION_OUTPUT, role=Role.LINEAR_INPUT)  # fmt: skip
    return w.residual("attention.residual", x, y)


def _heads(model: ModelSpec, width: int, *, kv: bool = False) -> Dim:
    count = model.num_kv_heads if kv else model.num_heads
    return Dim(float(count * width), Axis.KV_HEADS if kv else Axis.HEADS, units=count)


def _grouped_qkv(w: Writer, x: str) -> tuple[str, str, str, Dim]:
    """Multi-head and grouped-query attention (Ainslie 2023, arXiv:2305.13245)."""
    model = w.model
    q_dim, kv_dim = _heads(model, model.head_dim), _heads(model, model.head_dim, kv=True)
    q, k, v = (
        w.linear(f"attention.{name}_proj", x, w.hidden, dim, Component.ATTENTION, bias=model.attention_bias)
        for name, dim in (("q", q_dim), ("k", kv_dim), ("v", kv_dim))
    )
    if model.qk_norm is QKNorm.HEAD:
        q, k = (_head_norm(w, name, t, dim) for name, t, dim in (("q", q, q_dim), ("k", k, kv_dim)))
    if not model.max_positions:
        q, k = _rope(w, "q", q, q_dim), _rope(w, "k", k, kv_dim)
    return q, k, v, q_dim


def _head_norm(w: Writer, name: str, x: str, width: Dim) -> str:
    """A norm over each head, with one weight vector of the head's width."""
    out = w.norm(f"attention.{name}_norm", x, width, Component.ATTENTION)
    head = Dim(float(w.model.head_dim), Axis.HEAD)
    w.ops[-1] = w.ops[-1].but(weights=(Weight(f"attention.{name}_norm.weight", (head,), linear=False),))
    return out


def _rope(w: Writer, name: str, x: str, width: Dim, modules: frozenset[str] = frozenset()) -> str:
    out = w.tensor(f"attention.{name}_rope.out", width)
    w.memory_op(f"attention.{name}_rope", OpKind.ROPE, (x,), (out,), Component.ATTENTION, modules=modules)
    return out


def _latent_qkv(w: Writer, x: str, mla: MLASpec) -> tuple[str, str, str, Dim]:
    """Multi-head latent attention: down-projections are replicated over tp, up-projections split by head."""
    model, up = w.model, frozenset({UP_PROJ})
    q_dim = _heads(model, model.qk_head_dim)
    q, width = x, w.hidden
    if mla.q_lora_rank:
        width = Dim(float(mla.q_lora_rank), Axis.LATENT)
        q = w.linear("attention.q_a_proj", x, w.hidden, width, Component.ATTENTION, bias=model.attention_bias)
        q = w.norm("attention.q_a_norm", q, width, Component.ATTENTION)
    q = w.linear("attention.q_b_proj", q, width, q_dim, Component.ATTENTION, modules=up)
    latent = Dim(float(mla.kv_lora_rank), Axis.LATENT)
    joint = Dim(float(mla.kv_lora_rank + mla.qk_rope_head_dim), Axis.LATENT)
    kv_a = w.linear("attention.kv_a_proj", x, w.hidden, joint, Component.ATTENTION, bias=model.attention_bias)
    kv = w.norm("attention.kv_a_norm", kv_a, latent, Component.ATTENTION)
    kv_dim = _heads(model, mla.qk_nope_head_dim + mla.v_head_dim)
    kv_b = w.linear("attention.kv_b_proj", kv, latent, kv_dim, Component.ATTENTION, modules=up)
    q = _rope(w, "q", q, q_dim, up)
    # The rotary part of k is one head's width, copied to every head beside the up-projected part.
    k = w.tensor("attention.k.out", q_dim)
    w.memory_op("attention.k_concat", OpKind.ELEMENTWISE, (kv_b, kv_a), (k,), Component.ATTENTION, modules=up)
    value = _heads(model, mla.v_head_dim)
    v = w.tensor("attention.v.out", value)
    w.memory_op("attention.v_split", OpKind.ELEMENTWISE, (kv_b,), (v,), Component.ATTENTION, modules=up)
    return q, k, v, value


def _core(w: Writer, q: str, k: str, v: str) -> str:
    """softmax(q k^T) v with its s x s scores; flash attention is a fusion (passes/fuse)."""
    model, core = w.model, frozenset({CORE})
    heads = Dim(float(model.num_heads), Axis.HEADS, units=model.num_heads)
    shape = (Dim(1.0, Axis.BATCH), Dim(float(w.seq), Axis.QUERY), Dim(float(w.seq), Axis.KEY), heads)
    qk, value = Dim(float(model.qk_head_dim), Axis.HEAD), Dim(float(model.v_head_dim), Axis.HEAD)
    w.tensors["attention.scores"] = w.tensors["attention.probabilities"] = Tensor(shape)
    out = w.tensor("attention.context.out", _heads(model, model.v_head_dim))
    act = Role.ACTIVATION
    w.ops += [
        Op(name="attention.scores", kind=OpKind.SCORES, component=Component.ATTENTION, dims=(*shape, qk),
           inputs=(q, k), outputs=("attention.scores",), saves=(Save(q, act), Save(k, act)), modules=core, role=act),
        Op(name="attention.softmax", kind=OpKind.SOFTMAX, component=Component.ATTENTION, inputs=("attention.scores",),
           outputs=("attention.probabilities",), saves=(Save("attention.probabilities", act),), modules=core,
           passes=2.0),
        Op(name="attention.context", kind=OpKind.CONTEXT, component=Component.ATTENTION, dims=(*shape, value),
           inputs=("attention.probabilities", v), outputs=(out,),
           saves=(Save("attention.probabilities", act), Save(v, act)), modules=core, role=act),
    ]  # fmt: skip
    return out
