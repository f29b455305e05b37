"""What a layer does to each token alone: a dense MLP, or routed and shared experts."""

from __future__ import annotations

from estimator.build.writer import Writer
from estimator.model import MoESpec
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor, Weight
from estimator.precision import Role
from estimator.strategy import Module

__all__ = ["activation", "add_shared", "combine", "dispatch", "experts", "grouped", "mlp", "route", "shared_gate"]

MLP, MLP_ACT, MOE, MOE_ACT = (
    Module.MLP.value,
    Module.MLP_ACTIVATION.value,
    Module.MOE.value,
    Module.MOE_ACTIVATION.value,
)
MODULE = frozenset({MOE})


def mlp(w: Writer, x: str, prefix: str = "mlp", ffn: Dim | None = None, modules: frozenset[str] | None = None) -> str:
    """Gated (SwiGLU, Shazeer 2020, arXiv:2002.05202) or plain two-matrix MLP."""
    model = w.model
    ffn = ffn or Dim(float(model.ffn), Axis.FFN)
    modules = frozenset({MLP}) if modules is None else modules
    names = ("gate", "up") if model.gated_mlp else ("up",)
    hidden = [
        w.linear(f"{prefix}.{n}_proj", x, w.hidden, ffn, Component.MLP, modules=modules, bias=model.mlp_bias)
        for n in names
    ]
    act = activation(w, prefix, hidden, Component.MLP, modules | {MLP_ACT})
    return w.linear(f"{prefix}.down_proj", act, ffn, w.hidden, Component.MLP, modules=modules, bias=model.mlp_bias)


def activation(w: Writer, prefix: str, x: list[str], component: Component, modules: frozenset[str]) -> str:
    """GELU of one input, or silu(gate) * up in two ops; their fusion drops silu(gate) (passes/fuse)."""
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


def experts(w: Writer, x: str) -> str:
    """Router, dispatch, routed experts, combine, shared experts."""
    moe = w.model.moe
    assert moe is not None
    routed = _routed(w, x, moe)
    if not moe.num_shared_experts:
        return routed
    shared = mlp(w, x, "shared", Dim(float(moe.shared_ffn), Axis.FFN), MODULE)
    gate = shared_gate(w, x) if moe.shared_expert_gate else ""
    return add_shared(w, routed, shared, gate)


def shared_gate(w: Writer, x: str) -> str:
    """The share of the shared experts' output, one score per token."""
    one = Dim(1.0, Axis.ROUTER)
    return w.linear("shared.gate", x, w.hidden, one, Component.EXPERTS, modules=MODULE, save_as=Role.ACTIVATION)


def add_shared(w: Writer, routed: str, shared: str, gate: str = "") -> str:
    """The outputs of routed and shared experts added up, the shared ones times their gate if they have one."""
    out = w.tensor("experts.sum.out", w.hidden)
    if not gate:
        w.memory_op("experts.sum", OpKind.ELEMENTWISE, (routed, shared), (out,), Component.EXPERTS, modules=MODULE)
        return out
    saves = (Save(shared, Role.ACTIVATION), Save(gate, Role.ACTIVATION))
    w.memory_op("experts.sum", OpKind.MIX, (routed, shared, gate), (out,), Component.EXPERTS, saves, MODULE)
    return out


def _routed(w: Writer, x: str, moe: MoESpec) -> str:
    """The routed path: router, dispatch, experts, combine. Latent experts have a projection before and behind."""
    hashed = w.layer.hash_routed
    route(w, x, moe, bias=moe.router_bias, corrected=moe.router_correction_bias and not hashed, hashed=hashed)
    width = w.hidden
    if moe.latent:
        width = Dim(float(moe.latent), Axis.LATENT)
        x = w.linear("experts.latent_in", x, w.hidden, width, Component.EXPERTS, modules=MODULE,
                     bias=w.model.mlp_bias)  # fmt: skip
    sent = dispatch(w, x, moe, width)
    inner = Dim(float(moe.ffn), Axis.EXPERT_FFN)
    bias = w.model.mlp_bias
    hidden = [
        grouped(w, n, sent, moe, width, inner, bias=bias) for n in (("gate", "up") if w.model.gated_mlp else ("up",))
    ]
    act = activation(w, "experts", hidden, Component.EXPERTS, MODULE | {MOE_ACT})
    out = combine(w, grouped(w, "down", act, moe, inner, width, bias=bias), moe, width)
    if moe.latent:
        return w.linear("experts.latent_out", out, width, w.hidden, Component.EXPERTS, modules=MODULE,
                        bias=w.model.mlp_bias)  # fmt: skip
    return out


def route(w: Writer, x: str, moe: MoESpec, *, bias: bool, corrected: bool, hashed: bool = False) -> str:
    """Scores of all experts, and the best of them. A word's experts may be looked up: one pass over the scores."""
    scores_dim = Dim(float(moe.num_experts), Axis.ROUTER)
    scores = w.linear("router", x, w.hidden, scores_dim, Component.ROUTER, modules=MODULE, save_as=Role.FULL, bias=bias)
    if corrected:
        w.weight("router.correction_bias", scores_dim)
    top = w.tensor("router.top.out", Dim(float(moe.top_k), Axis.ROUTER), role=Role.FULL)
    w.memory_op("router.top", OpKind.MIX if hashed else OpKind.TOPK, (scores,), (top,), Component.ROUTER,
                saves=(Save(scores, Role.FULL),), modules=MODULE, passes=1.0 if hashed else 3.0)  # fmt: skip
    return top


def _routed_tensor(w: Writer, name: str, moe: MoESpec, width: Dim, role: Role = Role.ACTIVATION) -> str:
    # With a capacity factor every expert has its fixed number of rows; without, routing decides how many there are.
    fixed = moe.num_experts if moe.capacity_factor else 0
    w.tensors[name] = Tensor(
        (Dim(w.seq * moe.top_k * (moe.capacity_factor or 1.0), Axis.ROUTED, units=fixed), width), role
    )
    return name


def dispatch(w: Writer, x: str, moe: MoESpec, width: Dim) -> str:
    """Rows in the order of the experts that they go to."""
    sent = _routed_tensor(w, "dispatch.out", moe, width, Role.DISPATCH)
    w.ops.append(
        Op(name="dispatch", kind=OpKind.PERMUTE, component=Component.EXPERTS, inputs=(x,), outputs=(sent,),
           saves=(Save("router.top.out", Role.INDEX),), modules=MODULE, fanout=float(moe.top_k),
           max_domains=moe.max_nodes_per_token or 0)
    )  # fmt: skip
    return sent


def grouped(w: Writer, name: str, a: str, moe: MoESpec, k: Dim, n: Dim, *, bias: bool) -> str:
    """The product of every expert with its rows."""
    experts = Dim(float(moe.num_experts), Axis.EXPERTS, units=moe.num_experts)
    out = _routed_tensor(w, f"experts.{name}.out", moe, n)
    weights = [Weight(f"experts.{name}.weight", (experts, k, n), expert=True)]
    if bias:
        weights.append(Weight(f"experts.{name}.bias", (experts, n), expert=True, linear=False))
    w.ops.append(
        Op(name=f"experts.{name}", kind=OpKind.GROUPED_MATMUL, component=Component.EXPERTS,
           dims=(experts, w.tensors[out].dims[0], k, n), inputs=(a,), outputs=(out,),
           saves=(Save(a, Role.LINEAR_INPUT),), weights=tuple(weights), modules=MODULE)
    )  # fmt: skip
    return out


def combine(w: Writer, back: str, moe: MoESpec, width: Dim) -> str:
    """Rows of a token weighed by router scores and added up.

    The scores are applied inside the experts' activation, so that backward needs no copy of the experts' outputs
    (Megatron-Core's and DeepSeek's way).
    """
    _routed_tensor(w, back, moe, width, Role.COMBINE)
    out = w.tensor("combine.out", width)
    w.ops.append(
        Op(name="combine", kind=OpKind.PERMUTE, component=Component.EXPERTS, inputs=(back,), outputs=(out,),
           modules=MODULE, fanout=float(moe.top_k), max_domains=moe.max_nodes_per_token or 0)
    )  # fmt: skip
    return out
