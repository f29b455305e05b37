"""Lifts what a layer does to each token alone: a dense MLP, or a router with experts, and shared ones."""

from __future__ import annotations

from dataclasses import dataclass

from capture.flow import Region
from capture.lift import Lift
from capture.patterns import Activation, Grouped, Product, activation, grouped, product
from capture.records import Record
from estimator.build import mlp as written
from estimator.op import Axis, Component, Dim
from estimator.parts import MoESpec
from estimator.strategy import Module

__all__ = ["experts", "mlp"]

ROUTING = frozenset(
    """sigmoid _softmax softmax softplus sqrt add sub mul div div_ topk sort sum gather scatter scatter_
masked_fill bitwise_not zeros_like where eq ne floor_divide clamp clamp_min max log exp pow relu alias_of index copy_
logical_not ge le lt gt masked_fill_ fill_ amax neg""".split()
)
ORDERING = frozenset("histc bincount cumsum index_put index_put_ scatter_ sort argsort alias_of topk".split())
DENSE = frozenset({Module.MLP.value})


def mlp(lift: Lift, branch: int, prefix: str = "mlp", modules: frozenset[str] = DENSE) -> str:
    """Gate, up, activation, down; or up, activation, down."""
    flow, w = lift.flow, lift.w
    down = lift.need(product(flow, branch), branch, "last projection of an MLP")
    found = lift.need(activation(flow, down.x), down.x, "activation of an MLP")
    ffn = Dim(float(down.k), Axis.FFN)
    lift.facts.tell("gated_mlp", found.up is not None, lift.block)
    lift.facts.tell("mlp_bias", down.bias is not None, lift.block)
    sides = {"up": found.gate} if found.up is None else {"gate": found.gate, "up": found.up}
    hidden = []
    roots = {flow.root(value) for value in sides.values()}
    whole = product(flow, roots.copy().pop()) if len(roots) == 1 < len(sides) else None
    if whole is not None and whole.n != 2 * down.k:
        raise lift.refuse(whole.out, f"projects to {whole.n} columns, not to a gate and as many of {down.k}")
    for name, value in sides.items():
        side = lift.need(whole or product(flow, value), value, f"{name} projection of an MLP")
        x = lift.normed(side.x, "post_attention_norm")
        op = f"{prefix}.{name}_proj"
        if whole is not None:
            owner = f"{prefix}.gate_proj"
            hidden.append(lift.share_of(side, op, owner, x, ffn, Component.MLP, modules=modules))
        else:
            hidden.append(lift.linear(side, op, x, w.hidden, ffn, Component.MLP, modules=modules))
    act = _activation(lift, found, prefix, hidden, Component.MLP, modules | {written.MLP_ACT})
    if prefix == "mlp":
        lift.facts.tell("ffn", down.k, lift.block)
    return lift.linear(down, f"{prefix}.down_proj", act, ffn, w.hidden, Component.MLP, modules=modules)


def _activation(
    lift: Lift, found: Activation, prefix: str, hidden: list[str], part: Component, modules: frozenset[str]
) -> str:  # fmt: skip
    lift.claim(f"{prefix}.silu" if found.up is not None else f"{prefix}.act", *found.curved)
    lift.claim(f"{prefix}.act", *found.rest)
    return written.activation(lift.w, prefix, hidden, part, modules)


@dataclass(frozen=True, slots=True)
class _Routed:
    """The routed path as it was recorded."""

    sent: Record  # rows in the order of the experts
    tokens: int  # the value that they are taken from
    scores: int  # what rows are weighed by
    chosen: int  # which experts
    down: Grouped
    act: Activation
    sides: dict[str, Grouped]
    back: Record  # rows in the order of their tokens again
    records: tuple[int, ...]


def experts(lift: Lift, branch: int) -> str:
    """Router, dispatch, routed experts, combine; shared experts beside them."""
    flow = lift.flow
    record = flow.made_by(branch, "add", "add_")
    routed, shared = branch, None
    if record is not None:
        sides = [v for v in record.inputs if _reaches_experts(lift, v)]
        routed, shared = sides[0], next(v for v in record.inputs if v != sides[0])
    behind = product(flow, routed)  # of latent experts: back to the width of the stream
    found = _routed(lift, routed if behind is None else behind.x)
    moe = _spec(lift, found, shared, behind)
    out = _write_routed(lift, found, moe, behind)
    if shared is None or record is None:
        return out
    lift.claim_values("experts.sum", record.outputs[0])
    outcome, gate = _shared_gate(lift, shared)
    name = mlp(lift, outcome, "shared", written.MODULE)
    if gate is None:
        return written.add_shared(lift.w, out, name)
    times, curve, score = gate
    lift.claim_values("experts.sum", times, curve)
    one = lift.need(product(flow, score), score, "gate of shared experts")
    lift.claim("shared.gate", *one.records)
    return written.add_shared(lift.w, out, name, written.shared_gate(lift.w, lift.normed(one.x, "post_attention_norm")))


def _reaches_experts(lift: Lift, value: int) -> bool:
    return any(lift.flow.records[i].name == "_grouped_mm" for i in lift.flow.live([value], frozenset(lift.names)))


def _shared_gate(lift: Lift, value: int) -> tuple[int, tuple[int, int, int] | None]:
    """The shared experts' output, and (product, sigmoid, score) where a score of each token weighs it."""
    flow = lift.flow
    times = flow.made_by(value, "mul")
    if times is None or len(times.inputs) != 2:
        return value, None
    for side, other in (times.inputs, times.inputs[::-1]):
        curve = flow.made_by(other, "sigmoid")
        if curve is not None:
            return side, (times.outputs[0], curve.outputs[0], curve.inputs[0])
    return value, None


def _routed(lift: Lift, value: int) -> _Routed:
    """From the sum over a token's experts back to the rows that were sent."""
    flow = lift.flow
    total = lift.need(flow.made_by(value, "sum"), value, "sum over the experts of a token")
    back = lift.need(flow.made_by(total.inputs[0], "index"), total.inputs[0], "return of rows to their tokens")
    rows, records = back.inputs[0], [flow.index_of(total.outputs[0]), flow.index_of(back.outputs[0])]
    scores = None
    weighed = flow.made_by(rows, "mul")
    if weighed is not None and len(weighed.inputs) == 2:
        rows, scores = sorted(weighed.inputs, key=lambda v: -flow.values[v].elements)
        records.append(flow.index_of(weighed.outputs[0]))
    down = lift.need(grouped(flow, rows), rows, "last product of experts")
    act = lift.need(activation(flow, down.x), down.x, "activation of experts")
    names = {"up": act.gate} if act.up is None else {"gate": act.gate, "up": act.up}
    sides = {name: lift.need(grouped(flow, flow.root(side)), side, f"{name} product") for name, side in names.items()}
    entry = next(iter(sides.values())).x
    weighed = flow.made_by(entry, "mul")
    if weighed is not None and len(weighed.inputs) == 2:  # weighed by their scores before the experts (Llama 4)
        entry, scores = sorted(weighed.inputs, key=lambda v: -flow.values[v].elements)
        records.append(flow.index_of(weighed.outputs[0]))
    sent = lift.need(flow.made_by(entry, "index"), entry, "dispatch of rows to experts")
    order = _sorted_by(lift, sent.inputs[1])
    if scores is None:
        raise lift.refuse(value, "experts whose rows no score weighs have no canonical form")
    return _Routed(sent, sent.inputs[0], scores, order.inputs[0], down, act, sides, back, tuple(records))


def _sorted_by(lift: Lift, order: int) -> Record:
    """The sort that orders rows by expert."""
    flow = lift.flow
    found = flow.region(order, lambda record: record.name in {"floor_divide", "div"})
    record = flow.record_of(found.leaves[0]) if len(found.leaves) == 1 else None
    if record is None or record.name not in {"sort", "argsort"}:
        raise lift.refuse(order, "rows go to experts, but are not sorted by them")
    lift.claim("dispatch", *found.records, flow.index_of(found.leaves[0]))
    return record


def _spec(lift: Lift, found: _Routed, shared: int | None, latent_out: Product | None) -> MoESpec:
    """Sizes of the experts, and what routing does."""
    flow = lift.flow
    num_rows = flow.values[found.sent.outputs[0]].shape[0]
    router = _router(lift, found)
    added = [v for i in router.records for v in flow.records[i].inputs if not flow.is_data(v)]
    corrected = any(p is not None and p.elements == found.down.experts for p in map(flow.parameter, added))
    choices = [flow.records[i] for i in router.records if flow.records[i].name == "topk"]
    shapes = [(flow.values[r.inputs[0]].shape, flow.values[r.outputs[0]].shape) for r in choices]
    # Of groups of experts, which are fewer than experts, a few.
    limits = [out[-1] for given, out in shapes if len(given) == 2 and out[-1] < given[-1] < found.down.experts]
    score = lift.need(product(flow, router.leaves[0]), router.leaves[0], "product of a router")
    shared_ffn = 0
    gate = False
    if shared is not None:
        behind, gated = _shared_gate(lift, shared)
        last = lift.need(product(flow, behind), behind, "last projection of shared experts")
        shared_ffn, gate = last.k, gated is not None
    moe = MoESpec(
        num_experts=found.down.experts, top_k=num_rows // lift.rows, ffn=found.down.k,
        num_shared_experts=_how_many(shared_ffn, found.down.k), shared_ffn=shared_ffn, shared_expert_gate=gate,
        router_correction_bias=corrected, router_bias=score.bias is not None,
        max_nodes_per_token=limits[0] if limits else None, latent=0 if latent_out is None else latent_out.k,
    )  # fmt: skip
    lift.facts.tell("moe", moe, lift.block)
    return moe


def _how_many(shared_ffn: int, ffn: int) -> int:
    """Shared experts of the routed ones' width; one where it is no multiple."""
    return 0 if not shared_ffn else max(shared_ffn // ffn, 1) if shared_ffn % ffn == 0 else 1


def _router(lift: Lift, found: _Routed) -> Region:
    """Everything between the router's product and what it decides, which is one op."""
    flow = lift.flow
    both = [flow.region(v, lambda record: record.name in ROUTING) for v in (found.chosen, found.scores)]
    region = Region(leaves=[], records=[i for part in both for i in part.records])
    for leaf in (leaf for part in both for leaf in part.leaves):
        score = product(flow, leaf)
        if score is None:
            raise lift.refuse(leaf, "stands between a router and its choice of experts")
        if score.out not in region.leaves:
            region.leaves.append(score.out)
    if len(region.leaves) != 1:
        raise lift.refuse(found.chosen, "has a router of several products")
    if not any(flow.records[i].name == "topk" for i in both[0].records):
        raise lift.refuse(found.chosen, "is a router's choice, but not of the best scores")
    return region


def _bookkeeping(lift: Lift, found: _Routed) -> list[int]:
    """Counts of rows per expert and the way back of rows to tokens: integers, part of the permutation."""
    flow = lift.flow
    products = [flow.records[flow.index_of(g.out)] for g in (found.down, *found.sides.values())]
    used = [v for record in products for v in record.inputs[2:]] + list(found.back.inputs[1:])
    regions = [flow.region(v, lambda record: record.name in ORDERING) for v in used]
    return [i for region in regions for i in region.records if i not in flow.claims]


def _write_routed(lift: Lift, found: _Routed, moe: MoESpec, behind: Product | None) -> str:
    flow, w = lift.flow, lift.w
    router = _router(lift, found)
    score = lift.need(product(flow, router.leaves[0]), router.leaves[0], "product of a router")
    x = lift.normed(score.x, "post_attention_norm")
    before = None if behind is None else lift.need(product(flow, found.tokens), found.tokens, "projection to latents")
    if lift.normed(found.tokens if before is None else before.x, "post_attention_norm") != x:
        raise lift.refuse(found.tokens, "goes to the experts, but the router reads something else")
    if (score.k, score.n) != (lift.model.hidden, moe.num_experts):
        raise lift.refuse(score.out, f"scores {score.n} experts, but there are {moe.num_experts}")
    lift.claim("router", *score.records)
    lift.claim("router.top", *(i for i in router.records if i not in flow.claims))
    written.route(w, x, moe, bias=moe.router_bias, corrected=moe.router_correction_bias)
    lift.claim("dispatch", flow.index_of(found.sent.outputs[0]), *_bookkeeping(lift, found))
    width = Dim(float(moe.latent), Axis.LATENT) if moe.latent else w.hidden
    if before is not None:
        x = lift.linear(before, "experts.latent_in", x, w.hidden, width, Component.EXPERTS, modules=written.MODULE)
    sent = written.dispatch(w, x, moe, width)
    inner = Dim(float(moe.ffn), Axis.EXPERT_FFN)
    hidden = []
    for name, side in found.sides.items():
        wide = side.n if len({s.out for s in found.sides.values()}) == len(found.sides) else side.n // 2
        if (side.k, wide) != (width.size, moe.ffn) or side.x != next(iter(found.sides.values())).x:
            raise lift.refuse(side.out, f"is {side.k} x {wide} of an expert, not {width.size:g} x {moe.ffn}")
        lift.claim(f"experts.{name}", *side.records)
        if wide != side.n and name == "up":
            lift.share("experts.up", "experts.gate")
        hidden.append(written.grouped(w, name, sent, moe, width, inner, bias=side.bias is not None))
    lift.facts.tell("gated_mlp", len(hidden) == 2, lift.block)
    lift.facts.tell("mlp_bias", found.down.bias is not None, lift.block)
    act = _activation(lift, found.act, "experts", hidden, Component.EXPERTS, written.MODULE | {written.MOE_ACT})
    if found.down.n != width.size:
        raise lift.refuse(found.down.out, f"experts give {found.down.n} of {width.size:g} columns")
    lift.claim("experts.down", *found.down.records)
    back = written.grouped(w, "down", act, moe, inner, width, bias=found.down.bias is not None)
    lift.claim("combine", *found.records)
    out = written.combine(w, back, moe, width)
    if behind is None:
        return out
    return lift.linear(behind, "experts.latent_out", out, width, w.hidden, Component.EXPERTS, modules=written.MODULE)
