"""ModelSpec -> logical OpGraph: the operations of one micro-batch of one sequence, before any split or fusion.

Ops are written as Hugging Face's modules write them (separate q, k, v, gate and up projections; attention as scores,
softmax, context), so that a captured graph meets this one. Dropout is left out: large-model recipes train without it.
Biases count as parameters; their arithmetic is left out (one add per output against 2k of the GEMM).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from estimator.graph import Block, BlockKind, OpGraph
from estimator.model import MLASpec, ModelSpec, MoESpec, Norm, QKNorm
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor, Weight
from estimator.precision import Role
from estimator.strategy import Module

__all__ = ["build"]

CORE, NORMS, UP_PROJ = Module.CORE_ATTENTION.value, Module.LAYERNORM.value, Module.MLA_UP_PROJ.value
MLP, MLP_ACT, MOE, MOE_ACT = (
    Module.MLP.value,
    Module.MLP_ACTIVATION.value,
    Module.MOE.value,
    Module.MOE_ACTIVATION.value,
)


@lru_cache(maxsize=64)
def build(model: ModelSpec, seq: int) -> OpGraph:
    """The logical graph of `model` at sequence length `seq`."""
    layers = tuple(BlockKind.of(layer) for layer in model.layer_specs)
    entry = (BlockKind.EMBEDDING, BlockKind.POSITIONS) if model.max_positions else (BlockKind.EMBEDDING,)
    sequence = (
        *entry,
        *layers,
        BlockKind.HEAD,
        *(BlockKind.MTP, BlockKind.of(model.mtp_layer_spec)) * model.num_mtp_layers,
    )
    make = {
        BlockKind.EMBEDDING: _embedding,
        BlockKind.POSITIONS: _positions,
        BlockKind.DENSE: _dense_layer,
        BlockKind.MOE: _moe_layer,
        BlockKind.HEAD: _head,
        BlockKind.MTP: _mtp,
    }
    for kind in dict.fromkeys(sequence):
        if kind not in make:
            raise ValueError(f"layers of kind {kind.value!r} can be counted, but their work is not modelled yet")
    if any((model.attention_sinks, model.attention_gate, model.parallel_block, model.hyper, model.compressed)):
        raise ValueError(f"{model.name} can be counted, but the work of its blocks is not modelled yet")
    blocks = {kind: make[kind](model, seq) for kind in dict.fromkeys(sequence)}
    return OpGraph(name=model.name, blocks=blocks, sequence=sequence)


@dataclass(slots=True)
class _Writer:
    """Collects the ops and tensors of one block."""

    model: ModelSpec
    seq: int
    ops: list[Op] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, name: str, *dims: Dim, role: Role = Role.ACTIVATION) -> str:
        self.tensors[name] = Tensor((self.tokens, *dims), role)
        return name

    @property
    def tokens(self) -> Dim:
        return Dim(float(self.seq), Axis.TOKENS)

    @property
    def centred(self) -> bool:
        return self.model.norm is Norm.LAYER

    @property
    def hidden(self) -> Dim:
        return Dim(float(self.model.hidden), Axis.HIDDEN)

    def linear(
        self, name: str, x: str, k: Dim, n: Dim, component: Component, *, modules: frozenset[str] = frozenset(),
        bias: bool = False, save_as: Role = Role.LINEAR_INPUT, role: Role | None = None,
    ) -> str:  # fmt: skip
        """A product y = x W (+ b): keeps x for the weight gradient."""
        out = self.tensor(f"{name}.out", n, role=Role.LOGITS if component is Component.HEAD else Role.ACTIVATION)
        role = role or save_as
        weights = [Weight(f"{name}.weight", (k, n), linear=role is Role.LINEAR_INPUT)]
        if bias:
            weights.append(Weight(f"{name}.bias", (n,), linear=False))
        self.ops.append(
            Op(name=name, kind=OpKind.MATMUL, component=component, dims=(self.tokens, k, n), inputs=(x,),
               outputs=(out,), saves=(Save(x, save_as),), weights=tuple(weights), modules=modules, role=role)
        )  # fmt: skip
        return out

    def norm(
        self, name: str, x: str, width: Dim, component: Component = Component.NORM, *, centred: bool = False
    ) -> str:
        """RMSNorm, or LayerNorm where centred, as Hugging Face writes it: fp32 inside. Fusion has its kernel."""
        out = self.tensor(f"{name}.out", width)
        scale = self.tensor(f"{name}.rstd", role=Role.FULL)
        weights = [Weight(f"{name}.weight", (width,), linear=False)]
        if centred:
            weights.append(Weight(f"{name}.bias", (width,), linear=False))
        self.ops.append(
            Op(name=name, kind=OpKind.NORM, component=component, inputs=(x,), outputs=(out,),
               saves=(Save(x, Role.FULL), Save(x, Role.ACTIVATION), Save(scale, Role.FULL)), weights=tuple(weights),
               modules=frozenset({NORMS}), passes=3.0)
        )  # fmt: skip
        return out

    def memory_op(
        self, name: str, kind: OpKind, inputs: tuple[str, ...], outputs: tuple[str, ...], component: Component,
        saves: tuple[Save, ...] = (), modules: frozenset[str] = frozenset(), passes: float = 1.0,
    ) -> None:  # fmt: skip
        """An op that streams its tensors."""
        self.ops.append(Op(name=name, kind=kind, component=component, inputs=inputs, outputs=outputs, saves=saves,
                           modules=modules, passes=passes))  # fmt: skip

    def residual(self, name: str, x: str, y: str) -> str:
        out = self.tensor(f"{name}.out", self.hidden)
        self.memory_op(name, OpKind.ELEMENTWISE, (x, y), (out,), Component.RESIDUAL)
        return out

    def block(self, kind: BlockKind, entry: str) -> Block:
        return Block(kind=kind, ops=tuple(self.ops), tensors=self.tensors, input=entry)


def _embedding(model: ModelSpec, seq: int) -> Block:
    w = _Writer(model, seq)
    w.tensors["ids"] = Tensor((w.tokens,), Role.INDEX)
    out = w.tensor("embed.out", w.hidden)
    table = Weight("embed.weight", (_vocab(model), w.hidden), linear=False)
    w.ops.append(
        Op(name="embed", kind=OpKind.EMBEDDING, component=Component.EMBEDDING, inputs=("ids",), outputs=(out,),
           saves=(Save("ids", Role.INDEX),), weights=(table,))
    )  # fmt: skip
    return w.block(BlockKind.EMBEDDING, "ids")


def _positions(model: ModelSpec, seq: int) -> Block:
    """Learned positions, added to the embedding.

    A block of their own, for a head tied to the embedding shares the table of words but not that of positions.
    """
    w = _Writer(model, seq)
    x, out = w.tensor("x", w.hidden), w.tensor("positions.out", w.hidden)
    table = Weight("positions.weight", (Dim(float(model.max_positions), Axis.POSITIONS), w.hidden), linear=False)
    w.ops.append(
        Op(name="positions", kind=OpKind.ELEMENTWISE, component=Component.EMBEDDING, inputs=(x,), outputs=(out,),
           weights=(table,))
    )  # fmt: skip
    return w.block(BlockKind.POSITIONS, "x")


def _vocab(model: ModelSpec) -> Dim:
    return Dim(float(model.vocab), Axis.VOCAB, units=model.vocab_multiple)


def _dense_layer(model: ModelSpec, seq: int) -> Block:
    return _layer(_Writer(model, seq), BlockKind.DENSE, _mlp)


def _moe_layer(model: ModelSpec, seq: int) -> Block:
    return _layer(_Writer(model, seq), BlockKind.MOE, _experts)


def _layer(w: _Writer, kind: BlockKind, half: Callable[[_Writer, str], str]) -> Block:
    x = _attention(w, w.tensor("x", w.hidden))
    w.residual("mlp.residual", x, half(w, w.norm("post_attention_norm", x, w.hidden, centred=w.centred)))
    return w.block(kind, "x")


def _attention(w: _Writer, x: str) -> str:
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


def _grouped_qkv(w: _Writer, x: str) -> tuple[str, str, str, Dim]:
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


def _head_norm(w: _Writer, name: str, x: str, width: Dim) -> str:
    """A norm over each head, with one weight vector of the head's width."""
    out = w.norm(f"attention.{name}_norm", x, width, Component.ATTENTION)
    head = Dim(float(w.model.head_dim), Axis.HEAD)
    w.ops[-1] = w.ops[-1].but(weights=(Weight(f"attention.{name}_norm.weight", (head,), linear=False),))
    return out


def _rope(w: _Writer, name: str, x: str, width: Dim, modules: frozenset[str] = frozenset()) -> str:
    out = w.tensor(f"attention.{name}_rope.out", width)
    w.memory_op(f"attention.{name}_rope", OpKind.ROPE, (x,), (out,), Component.ATTENTION, modules=modules)
    return out


def _latent_qkv(w: _Writer, x: str, mla: MLASpec) -> tuple[str, str, str, Dim]:
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


def _core(w: _Writer, q: str, k: str, v: str) -> str:
    """softmax(q k^T) v with its s x s scores; flash attention is a fusion (passes/fuse.py)."""
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


def _mlp(w: _Writer, x: str, prefix: str = "mlp", ffn: Dim | None = None, modules: frozenset[str] | None = None) -> str:
    """Gated (SwiGLU, Shazeer 2020, arXiv:2002.05202) or plain two-matrix MLP."""
    model = w.model
    ffn = ffn or Dim(float(model.ffn), Axis.FFN)
    modules = frozenset({MLP}) if modules is None else modules
    names = ("gate", "up") if model.gated_mlp else ("up",)
    hidden = [
        w.linear(f"{prefix}.{n}_proj", x, w.hidden, ffn, Component.MLP, modules=modules, bias=model.mlp_bias)
        for n in names
    ]
    act = _activation(w, prefix, hidden, Component.MLP, modules | {MLP_ACT})
    return w.linear(f"{prefix}.down_proj", act, ffn, w.hidden, Component.MLP, modules=modules, bias=model.mlp_bias)


def _activation(w: _Writer, prefix: str, x: list[str], component: Component, modules: frozenset[str]) -> str:
    """GELU of one input, or silu(gate) * up in two ops; their fusion drops silu(gate) (passes/fuse.py)."""
    shape = w.tensors[x[0]].dims
    out = f"{prefix}.act.out"
    w.tensors[out] = Tensor(shape)
    keep = [Save(name, Role.GATE_INPUT) for name in x]
    if len(x) == 1:
        w.memory_op(f"{prefix}.act", OpKind.ACTIVATION, tuple(x), (out,), component, tuple(keep), modules)
        return out
    silu = f"{prefix}.silu.out"
    w.tensors[silu] = Tensor(shape)
    w.memory_op(f"{prefix}.silu", OpKind.ACTIVATION, (x[0],), (silu,), component, (keep[0],), modules)
    saves = (Save(silu, Role.GATE_INPUT), keep[1])
    w.memory_op(f"{prefix}.act", OpKind.ACTIVATION, (silu, x[1]), (out,), component, saves, modules)
    return out


def _experts(w: _Writer, x: str) -> str:
    """Router, dispatch, routed experts, combine, shared experts."""
    moe = w.model.moe
    assert moe is not None
    module = frozenset({MOE})
    routed = _routed(w, x, moe, module)
    if not moe.num_shared_experts:
        return routed
    shared = _mlp(w, x, "shared", Dim(float(moe.shared_ffn), Axis.FFN), module)
    out = w.tensor("experts.sum.out", w.hidden)
    w.memory_op("experts.sum", OpKind.ELEMENTWISE, (routed, shared), (out,), Component.EXPERTS, modules=module)
    return out


def _routed(w: _Writer, x: str, moe: MoESpec, module: frozenset[str]) -> str:
    """The routed path: router, dispatch, experts, combine.

    Combine weighs rows by router scores. The scores are applied inside the experts' activation, so that backward needs
    no copy of the experts' outputs (Megatron-Core's and DeepSeek's way).
    """
    experts = Dim(float(moe.num_experts), Axis.EXPERTS, units=moe.num_experts)
    scores_dim = Dim(float(moe.num_experts), Axis.ROUTER)
    scores = w.linear("router", x, w.hidden, scores_dim, Component.ROUTER, modules=module, save_as=Role.FULL)
    if moe.router_correction_bias:
        bias = Weight("router.correction_bias", (scores_dim,), linear=False)
        w.ops[-1] = w.ops[-1].but(weights=(*w.ops[-1].weights, bias))
    top = w.tensor("router.top.out", Dim(float(moe.top_k), Axis.ROUTER), role=Role.FULL)
    w.memory_op("router.top", OpKind.TOPK, (scores,), (top,), Component.ROUTER, saves=(Save(scores, Role.FULL),),
                modules=module, passes=3.0)  # fmt: skip
    rows = Dim(w.seq * moe.top_k * (moe.capacity_factor or 1.0), Axis.ROUTED)
    inner = Dim(float(moe.ffn), Axis.EXPERT_FFN)

    def routed_tensor(name: str, dim: Dim, role: Role = Role.ACTIVATION) -> str:
        w.tensors[name] = Tensor((rows, dim), role)
        return name

    sent = routed_tensor("dispatch.out", w.hidden, Role.DISPATCH)
    w.ops.append(
        Op(name="dispatch", kind=OpKind.PERMUTE, component=Component.EXPERTS, inputs=(x,), outputs=(sent,),
           saves=(Save("router.top.out", Role.INDEX),), modules=module, fanout=float(moe.top_k),
           max_domains=moe.max_nodes_per_token or 0)
    )  # fmt: skip

    def grouped(name: str, a: str, k: Dim, n: Dim) -> str:
        out = routed_tensor(f"experts.{name}.out", n)
        weight = Weight(f"experts.{name}.weight", (experts, k, n), expert=True)
        w.ops.append(
            Op(name=f"experts.{name}", kind=OpKind.GROUPED_MATMUL, component=Component.EXPERTS,
               dims=(experts, rows, k, n), inputs=(a,), outputs=(out,), saves=(Save(a, Role.LINEAR_INPUT),),
               weights=(weight,), modules=module)
        )  # fmt: skip
        return out

    hidden = [grouped(n, sent, w.hidden, inner) for n in (("gate", "up") if w.model.gated_mlp else ("up",))]
    act = _activation(w, "experts", hidden, Component.EXPERTS, module | {MOE_ACT})
    back = grouped("down", act, inner, w.hidden)
    w.tensors[back] = Tensor((rows, w.hidden), Role.COMBINE)
    out = w.tensor("combine.out", w.hidden)
    w.ops.append(
        Op(name="combine", kind=OpKind.PERMUTE, component=Component.EXPERTS, inputs=(back,), outputs=(out,),
           modules=module, fanout=float(moe.top_k), max_domains=moe.max_nodes_per_token or 0)
    )  # fmt: skip
    return out


def _head_ops(w: _Writer, x: str) -> None:
    """Final norm, vocabulary projection (never in fp8), cross entropy."""
    vocab = _vocab(w.model)
    normed = w.norm("final_norm", x, w.hidden, centred=w.centred)
    logits = w.linear("lm_head", normed, w.hidden, vocab, Component.HEAD, save_as=Role.ACTIVATION)
    w.tensors["loss.out"] = Tensor((w.tokens,), Role.FULL)
    w.memory_op("loss", OpKind.LOSS, (logits,), ("loss.out",), Component.HEAD, saves=(Save(logits, Role.FULL),),
                passes=4.0)  # fmt: skip


def _head(model: ModelSpec, seq: int) -> Block:
    w = _Writer(model, seq)
    _head_ops(w, w.tensor("x", w.hidden))
    if model.tied_embeddings:
        shared = Weight("embed.weight", (_vocab(model), w.hidden), linear=False)
        w.ops = [op.but(weights=(shared,)) if op.name == "lm_head" else op for op in w.ops]
    return w.block(BlockKind.HEAD, "x")


def _mtp(model: ModelSpec, seq: int) -> Block:
    """What multi-token prediction adds to a layer (DeepSeek-V3, arXiv:2412.19437, Eqs. 21 to 24).

    Norms and projection before it, the head again behind it; the layer itself follows in the sequence. Embedding and
    head weights are shared with the main model; a pipeline rank without them keeps a copy (layout.py).
    """
    w = _Writer(model, seq)
    x, ahead = w.tensor("x", w.hidden), w.tensor("ahead", w.hidden)
    both = Dim(2.0 * model.hidden, Axis.HIDDEN)
    h = w.norm("mtp.hidden_norm", x, w.hidden, centred=w.centred)
    e = w.norm("mtp.embed_norm", ahead, w.hidden, centred=w.centred)
    joined = w.tensor("mtp.concat.out", both)
    w.memory_op("mtp.concat", OpKind.ELEMENTWISE, (h, e), (joined,), Component.MTP)
    w.linear("mtp.proj", joined, both, w.hidden, Component.MTP)
    _head_ops(w, w.tensor("mtp.layer.out", w.hidden))
    w.ops = [op.but(weights=()) if op.name == "lm_head" else op for op in w.ops]
    return w.block(BlockKind.MTP, "x")
