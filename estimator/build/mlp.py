"""What a layer does to each token alone: a dense MLP, or routed and shared experts."""

from __future__ import annotations

from estimator.build.writer import Writer
from estimator.model import MoESpec
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor, Weight
from estimator.precision import Role
from estimator.strategy import Module

__all__ = ["experts", "mlp"]

MLP, MLP_ACT, MOE, MOE_ACT = (
    Module.MLP.value,
    Module.MLP_ACTIVATION.value,
    Module.MOE.value,
    Module.MOE_ACTIVATION.value,
)


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
    act = _activation(w, prefix, hidden, Component.MLP, modules | {MLP_ACT})
    return w.linear(f"{prefix}.down_proj", act, ffn, w.hidden, Component.MLP, modules=modules, bias=model.mlp_bias)


def _activation(w: Writer, prefix: str, x: list[str], component: Component, modules: frozenset[str]) -> str:
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
    module = frozenset({MOE})
    routed = _routed(w, x, moe, module)
    if not moe.num_shared_experts:
        return routed
    shared = mlp(w, x, "shared", Dim(float(moe.shared_ffn), Axis.FFN), module)
    out = w.tensor("experts.sum.out", w.hidden)
    if not moe.shared_expert_gate:
        w.memory_op("experts.sum", OpKind.ELEMENTWISE, (routed, shared), (out,), Component.EXPERTS, modules=module)
        return out
    one = Dim(1.0, Axis.ROUTER)
    gate = w.linear("shared.gate", x, w.hidden, one, Component.EXPERTS, modules=module, save_as=Role.ACTIVATION)
    saves = (Save(shared, Role.ACTIVATION), Save(gate, Role.ACTIVATION))
    w.memory_op("experts.sum", OpKind.MIX, (routed, shared, gate), (out,), Component.EXPERTS, saves, module)
    return out


def _routed(w: Writer, x: str, moe: MoESpec, module: frozenset[str]) -> str:
    """The routed path: router, dispatch, experts, combine. Latent experts have a projection before and behind.

    Combine weighs rows by router scores. The scores are applied inside the experts' activation, so that backward needs
    no copy of the experts' outputs (Megatron-Core's and DeepSeek's way).
    """
    experts = Dim(float(moe.num_experts), Axis.EXPERTS, units=moe.num_experts)
    scores_dim = Dim(float(moe.num_experts), Axis.ROUTER)
    scores = w.linear("router", x, w.hidden, scores_dim, Component.ROUTER, modules=module, save_as=Role.FULL,
                      bias=moe.router_bias)  # fmt: skip
    hashed = w.layer.hash_routed
    if moe.router_correction_bias and not hashed:
        w.weight("router.correction_bias", scores_dim)
    top = w.tensor("router.top.out", Dim(float(moe.top_k), Axis.ROUTER), role=Role.FULL)
    # A word's experts are looked up: no search among the scores, one pass over them.
    w.memory_op("router.top", OpKind.MIX if hashed else OpKind.TOPK, (scores,), (top,), Component.ROUTER,
                saves=(Save(scores, Role.FULL),), modules=module, passes=1.0 if hashed else 3.0)  # fmt: skip
    width = w.hidden
    if moe.latent:
        width = Dim(float(moe.latent), Axis.LATENT)
        x = w.linear("experts.latent_in", x, w.hidden, width, Component.EXPERTS, modules=module,
                     bias=w.model.mlp_bias)  # fmt: skip
    # With a capacity factor every expert has its fixed number of rows; without, routing decides how many there are.
    fixed = moe.num_experts if moe.capacity_factor else 0
    rows = Dim(w.seq * moe.top_k * (moe.capacity_factor or 1.0), Axis.ROUTED, units=fixed)
    inner = Dim(float(moe.ffn), Axis.EXPERT_FFN)

    def routed_tensor(name: str, dim: Dim, role: Role = Role.ACTIVATION) -> str:
        w.tensors[name] = Tensor((rows, dim), role)
        return name

    sent = routed_tensor("dispatch.out", width, Role.DISPATCH)
    w.ops.append(
        Op(name="dispatch", kind=OpKind.PERMUTE, component=Component.EXPERTS, inputs=(x,), outputs=(sent,),
           saves=(Save("router.top.out", Role.INDEX),), modules=module, fanout=float(moe.top_k),
           max_domains=moe.max_nodes_per_token or 0)
    )  # fmt: skip

    def grouped(name: str, a: str, k: Dim, n: Dim) -> str:
        out = routed_tensor(f"experts.{name}.out", n)
        weights = [Weight(f"experts.{name}.weight", (experts, k, n), expert=True)]
        if w.model.mlp_bias:
            weights.append(Weight(f"experts.{name}.bias", (experts, n), expert=True, linear=False))
        w.ops.append(
            Op(name=f"experts.{name}", kind=OpKind.GROUPED_MATMUL, component=Component.EXPERTS,
               dims=(experts, rows, k, n), inputs=(a,), outputs=(out,), saves=(Save(a, Role.LINEAR_INPUT),),
               weights=tuple(weights), modules=module)
        )  # fmt: skip
        return out

    hidden = [grouped(n, sent, width, inner) for n in (("gate", "up") if w.model.gated_mlp else ("up",))]
    act = _activation(w, "experts", hidden, Component.EXPERTS, module | {MOE_ACT})
    back = grouped("down", act, inner, width)
    w.tensors[back] = Tensor((rows, width), Role.COMBINE)
    out = w.tensor("combine.out", width)
    w.ops.append(
        Op(name="combine", kind=OpKind.PERMUTE, component=Component.EXPERTS, inputs=(back,), outputs=(out,),
           modules=module, fanout=float(moe.top_k), max_domains=moe.max_nodes_per_token or 0)
    )  # fmt: skip
    if moe.latent:
        return w.linear("experts.latent_out", out, width, w.hidden, Component.EXPERTS, modules=module,
                        bias=w.model.mlp_bias)  # fmt: skip
    return out
