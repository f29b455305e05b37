"""Lifts attention: what queries, keys and values were made of, back to the products that read the layer's input."""

from __future__ import annotations

from dataclasses import dataclass

from capture.flow import PART, SAME, Region
from capture.lift import Lift
from capture.lift_indexer import choose
from capture.patterns import NormFound, Product, norm, product, rotation
from capture.records import Ref
from estimator.build.attention import UP, gated, keys_and_values, qk_norm, rope
from estimator.build.scores import core, heads
from estimator.op import Axis, Component, Dim
from estimator.parts import MLASpec
from estimator.precision import Role

__all__ = ["attention"]

PART_OF = Component.ATTENTION
TURNING = frozenset("neg sub view_as_complex".split())


@dataclass(frozen=True, slots=True)
class _Chain:
    """Steps from a product to a query, key or value, innermost first; `products` are two where keys are joined."""

    steps: tuple[NormFound | Region, ...]
    products: tuple[Product, ...]

    @property
    def rotates(self) -> bool:
        return any(isinstance(step, Region) and step.names & TURNING for step in self.steps)


@dataclass(frozen=True, slots=True)
class _Core:
    """The recorded core of attention with what it reads."""

    query: int
    key: int
    value: int
    out: int
    num_heads: int
    num_kv_heads: int
    qk: int
    v: int
    sinks: bool
    chosen: int | None  # numbers of the keys that each query reads


def attention(lift: Lift, branch: int) -> str:
    """Projections, core, output projection."""
    flow, w = lift.flow, lift.w
    output = lift.need(product(flow, branch), branch, "output projection of attention")
    context, gate = _context(lift, output.x)
    found = _core(lift, context)
    lift.facts.tell("attention_output_bias", output.bias is not None, lift.block)
    keys = _chain(lift, found.key)
    if len(keys.products) == 2:
        out, width = _latent(lift, found, keys)
    else:
        out, width = _grouped(lift, found, keys, gate)
    return lift.linear(output, "attention.o_proj", out, width, w.hidden, PART_OF, save_as=Role.ATTENTION_OUTPUT,
                       role=Role.LINEAR_INPUT)  # fmt: skip


def _context(lift: Lift, value: int) -> tuple[int, int | None]:
    """The core's output, and the value whose sigmoid it is multiplied with."""
    flow = lift.flow
    times = flow.made_by(value, "mul")
    if times is not None and len(times.inputs) == 2:
        for side, other in (times.inputs, times.inputs[::-1]):
            curve = flow.made_by(other, "sigmoid")
            if curve is not None and flow.made_by(side, "attention") is not None:
                lift.claim_values("attention.gated", times.outputs[0], curve.outputs[0])
                return flow.strip(side), curve.inputs[0]
    return flow.strip(value), None


def _core(lift: Lift, context: int) -> _Core:
    flow = lift.flow
    record = lift.need(flow.made_by(context, "attention"), context, "core of attention")
    named = {name: ref.value for name, ref in record.arguments if isinstance(ref, Ref)}
    if "dropout" in dict(record.arguments):
        lift.share("attention.core_dropout", "attention.scores")
    _, num_heads, _, qk = flow.values[named["query"]].shape
    _, num_kv_heads, _, _ = flow.values[named["key"]].shape
    lift.claim("attention.scores", flow.index_of(context))
    for part in ("softmax", "context"):
        lift.share(f"attention.{part}", "attention.scores")
    return _Core(named["query"], named["key"], named["value"], context, num_heads, num_kv_heads, qk,
                 flow.values[named["value"]].shape[-1], "s_aux" in named, named.get("indices"))  # fmt: skip


def _chain(lift: Lift, value: int) -> _Chain:
    """From a value back to the products behind it."""
    flow = lift.flow
    steps: list[NormFound | Region] = []
    while (found := product(flow, value)) is None:
        normed = norm(flow, value)
        if normed is not None and normed.gate is None:
            steps.append(normed)
            value = normed.x
            continue
        region = lift.need(rotation(flow, value), value, "rotation of queries or keys")
        if not region.records or not region.leaves or flow.strip(region.leaves[0]) == flow.strip(value):
            raise lift.refuse(value, "is neither a product with a weight, a norm nor a rotation before attention")
        if region.names - SAME - PART:
            steps.append(region)
        if len(region.leaves) == 2:
            both = tuple(lift.need(product(flow, leaf), leaf, "projection of keys") for leaf in region.leaves)
            return _Chain(tuple(reversed(steps)), both)
        if len(region.leaves) > 2:
            raise lift.refuse(value, "is joined of more than two projections")
        value = region.leaves[0]
    return _Chain(tuple(reversed(steps)), (found,))


def _grouped(lift: Lift, found: _Core, keys: _Chain, gate: int | None) -> tuple[str, Dim]:
    flow, w, model = lift.flow, lift.w, lift.model
    queries, values = _chain(lift, found.query), _chain(lift, found.value)
    _tell_heads(lift, found, found.qk)
    if found.chosen is not None:
        raise lift.refuse(found.chosen, "chooses keys of attention without latents, which has no canonical form yet")
    if found.qk != found.v:
        raise lift.refuse(found.out, f"has heads of {found.qk} for keys, but {found.v} for values")
    q_dim, kv_dim = heads(model, found.qk), heads(model, found.qk, kv=True)
    chains = {"q": queries, "k": keys, "v": values}
    biases = {chain.products[0].bias is not None for chain in chains.values()}
    if len(biases) != 1:
        raise lift.refuse(found.out, "has a bias on some of queries, keys and values only")
    lift.facts.tell("attention_bias", biases.pop(), lift.block)
    lift.facts.tell("attention_gate", gate is not None, lift.block)
    x = lift.normed(queries.products[0].x, "input_norm")
    names: dict[str, str] = {}
    gate_name = ""
    dims = {"q": q_dim, "k": kv_dim, "v": kv_dim}
    whole = len({chain.products[0].out for chain in chains.values()}) == 1
    if whole and (keys.products[0].n != q_dim.size + 2 * kv_dim.size or gate is not None):
        raise lift.refuse(keys.products[0].out, "projects to queries, keys and values and to something else")
    for name, chain in chains.items():
        found_one = chain.products[0]
        if whole:
            names[name] = lift.share_of(found_one, f"attention.{name}_proj", "attention.q_proj", x, dims[name], PART_OF)
        elif name == "q" and gate is not None:
            if flow.root(gate) != flow.strip(found_one.out):
                raise lift.refuse(gate, "gates attention, but is no part of the query projection")
            wide = heads(model, 2 * found.qk)
            lift.linear(found_one, "attention.q_proj", x, w.hidden, wide, PART_OF)
            names[name], gate_name = w.split(("attention.q", q_dim), ("attention.gate", q_dim))
        else:
            names[name] = lift.linear(found_one, f"attention.{name}_proj", x, w.hidden, dims[name], PART_OF)
    _steps(lift, {"q": (queries, q_dim), "k": (keys, kv_dim)}, names, found.qk)
    if values.steps:
        raise lift.refuse(found.value, "is no plain projection")
    lift.traits["rope"] = queries.rotates
    context = core(w, names["q"], names["k"], names["v"], qk=found.qk, value=found.v, **lift.seen())
    return (gated(w, context, gate_name, q_dim) if gate_name else context), q_dim


def _steps(lift: Lift, chains: dict[str, tuple[_Chain, Dim]], names: dict[str, str], qk: int) -> None:
    """Norms and rotations of queries and keys, step by step as they were run."""
    w, kind = lift.w, "none"
    depth = max(len(chain.steps) for chain, _ in chains.values())
    for i in range(depth):
        for name, (chain, dim) in chains.items():
            if i >= len(chain.steps):
                continue
            step = chain.steps[i]
            if isinstance(step, Region):
                lift.claim(f"attention.{name}_rope", *step.records)
                if step.names & TURNING:  # else scaled by position alone: one factor, left out
                    names[name] = rope(w, name, names[name], dim)
                continue
            lift.claim(f"attention.{name}_norm", *step.records)
            weight, kind = _norm_weight(lift, step, dim, qk)
            names[name] = qk_norm(w, name, names[name], dim, weight)
    if kind != "none":  # layers without rotation may have none (Llama 4)
        lift.facts.tell("qk_norm", kind, lift.block)


def _norm_weight(lift: Lift, step: NormFound, dim: Dim, qk: int) -> tuple[Dim | None, str]:
    if step.weight is None:
        return None, "unweighted"
    if step.width == qk and step.weight.elements == qk:
        return Dim(float(qk), Axis.HEAD), "head"
    if step.width == dim.size:
        return dim, "full"
    raise lift.refuse(step.x, f"has a norm over {step.width} of {dim.size:g} with {step.weight.elements} weights")


def _tell_heads(lift: Lift, found: _Core, head_dim: int) -> None:
    for name, value in (("num_heads", found.num_heads), ("num_kv_heads", found.num_kv_heads),
                        ("attention_sinks", found.sinks)):  # fmt: skip
        lift.facts.tell(name, value, lift.block)
    lift.facts.tell("head_dim", head_dim, lift.block)
    if (lift.model.num_heads, lift.model.num_kv_heads) != (found.num_heads, found.num_kv_heads):
        raise lift.refuse(found.out, "has other numbers of heads than the first layer; layers must agree")


def _latent(lift: Lift, found: _Core, keys: _Chain) -> tuple[str, Dim]:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""
    flow, w, model = lift.flow, lift.w, lift.model
    queries, values = _chain(lift, found.query), _chain(lift, found.value)
    kv_b = values.products[0]
    kv_a = next((p for p in keys.products if p.out != kv_b.out), None)
    latent_norm = norm(flow, kv_b.x)
    if kv_a is None or latent_norm is None or flow.root(latent_norm.x) != kv_a.out:
        raise lift.refuse(found.key, "is joined of two projections, but not as latent attention joins them")
    q_dim, value = heads(model, found.qk), heads(model, found.v)
    q, rank = _query(lift, queries.products[0], q_dim, bias_of=kv_a)
    lora, joint = (Dim(float(n), Axis.LATENT) for n in (latent_norm.width, kv_a.n))
    a = lift.linear(kv_a, "attention.kv_a_proj", lift.normed(kv_a.x, "input_norm"), w.hidden, joint, PART_OF)
    latent = lift.norm(latent_norm, "attention.kv_a_norm", a, lora, PART_OF)
    share = None
    if found.chosen is not None:
        given = flow.strip(queries.products[0].x)
        share = choose(lift, found.chosen, lift.normed(kv_a.x, "input_norm"), lift.names[given],
                       Dim(float(rank), Axis.LATENT))  # fmt: skip
    lift.traits["indexed"] = share is not None
    nope = kv_b.n // found.num_heads - found.v
    spec = MLASpec(q_lora_rank=rank, kv_lora_rank=latent_norm.width, qk_nope_head_dim=nope,
                   qk_rope_head_dim=kv_a.n - latent_norm.width, v_head_dim=found.v)  # fmt: skip
    lift.facts.tell("mla", spec, lift.block)
    _tell_heads(lift, found, found.v)
    b = lift.linear(kv_b, "attention.kv_b_proj", latent, lora, heads(model, nope + found.v), PART_OF, modules=UP,
                    rows=lift.rows + flow.recording.batch * flow.recording.context)  # fmt: skip
    lift.over_keys(b)
    for name, chain in (("q_rope", queries), ("k_concat", keys), ("v_split", values)):
        for step in chain.steps:
            if not isinstance(step, Region):
                raise lift.refuse(step.x, "has a norm between latents and heads")
            lift.claim(f"attention.{name}", *step.records)
    lift.claim("attention.v_split", *_parts_of(lift, found.value))
    lift.share("attention.v_split", "attention.k_concat")  # where both are parts of one split
    if not queries.rotates:
        raise lift.refuse(found.query, "latent attention without rotation has no canonical form yet")
    k, v = "", ""
    q = rope(w, "q", q, q_dim, UP)
    k, v = keys_and_values(w, b, a, q_dim, value)
    seen = lift.seen() if share is None else {**lift.seen(), "visible": share, "selects": True}
    lift.over_keys("attention.k.out", "attention.v.out")
    return core(w, q, k, v, qk=found.qk, value=found.v, **seen), value


def _parts_of(lift: Lift, value: int) -> list[int]:
    flow, found = lift.flow, []
    while (record := flow.record_of(value)) is not None and record.name in SAME | PART:
        found.append(flow.index_of(value))
        value = record.inputs[0]
    return found


def _query(lift: Lift, q_b: Product, q_dim: Dim, bias_of: Product) -> tuple[str, int]:
    """Queries, with or without a latent of their own; its rank, 0 for none."""
    flow, w = lift.flow, lift.w
    lift.facts.tell("attention_bias", bias_of.bias is not None, lift.block)
    inner = norm(flow, q_b.x)
    q_a = product(flow, inner.x) if inner is not None else None
    if inner is None or q_a is None:
        x = lift.normed(q_b.x, "input_norm")
        return lift.linear(q_b, "attention.q_b_proj", x, w.hidden, q_dim, PART_OF, modules=UP), 0
    rank = Dim(float(q_a.n), Axis.LATENT)
    q = lift.linear(q_a, "attention.q_a_proj", lift.normed(q_a.x, "input_norm"), w.hidden, rank, PART_OF)
    q = lift.norm(inner, "attention.q_a_norm", q, rank, PART_OF)
    lift.names[flow.strip(q_b.x)] = q
    return lift.linear(q_b, "attention.q_b_proj", q, rank, q_dim, PART_OF, modules=UP), q_a.n
