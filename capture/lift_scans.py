"""Lifts mixers that carry a state: the gated delta net and Mamba-2, whose recurrence is recorded in one piece."""

from __future__ import annotations

from capture.lift import Lift
from capture.patterns import Product, norm, product
from capture.records import Record, Ref
from estimator.build import scans
from estimator.op import Axis, Component, Dim
from estimator.parts import LinearAttentionSpec, MambaSpec

__all__ = ["gated_delta_net", "mamba"]

SOFT = frozenset("softplus mul add sigmoid neg exp".split())


def gated_delta_net(lift: Lift, branch: int) -> str:
    """Four projections, convolution, scan, gated norm, output (Yang 2024, arXiv:2412.06464, section 3.3)."""
    flow, w, part = lift.flow, lift.w, Component.LINEAR_ATTENTION
    output = lift.need(product(flow, branch), branch, "output projection of linear attention")
    normed = lift.need(norm(flow, output.x), output.x, "gated norm of linear attention")
    record = lift.need(flow.made_by(normed.x, "gated_delta_rule"), normed.x, "gated delta rule")
    named = _named(record)
    options = dict(record.arguments)
    query, value = flow.values[named["query"]].shape, flow.values[named["value"]].shape
    conv, qkv = _convolved(lift, named["query"], "linear.conv")
    for name in ("key", "value"):
        if _convolved(lift, named[name], "linear.conv")[0].outputs != conv.outputs:
            raise lift.refuse(named[name], "comes from another convolution than the queries")
    spec = LinearAttentionSpec(
        num_key_heads=query[2], num_value_heads=value[2], key_head_dim=query[3], value_head_dim=value[3],
        conv=flow.values[conv.inputs[1]].shape[-1], chunk=options["chunk"],
    )  # fmt: skip
    lift.facts.tell("linear", spec, lift.block)
    keys = spec.num_key_heads
    wide, narrow = _heads(spec.value_width, keys), _heads(spec.num_value_heads, keys)
    convolved = _heads(2 * spec.key_width + spec.value_width, keys)
    x = lift.normed(qkv.x, "input_norm")
    owners: dict[int, str] = {}
    mixed = _side(lift, qkv, "linear.qkv_proj", x, convolved, owners)
    gate_found = lift.need(product(flow, flow.root(_gate(lift, normed.gate, output.x))), output.x, "gate projection")
    gate = _side(lift, gate_found, "linear.gate_proj", x, wide, owners)
    rest = {}
    for name, given in (("beta", named["beta"]), ("decay", named["decay"])):
        found = flow.region(given, lambda record: record.name in SOFT)
        side = _one_product(lift, found.leaves, given)
        lift.claim("linear.scan", *found.records)
        rest[name] = _side(lift, side, f"linear.{name}_proj", x, narrow, owners)
    mixed = scans.conv(w, "linear.conv", mixed, convolved, spec.conv, part)
    lift.claim("linear.scan", flow.index_of(record.outputs[0]))
    y = scans.delta_scan(w, spec, mixed, rest["beta"], rest["decay"])
    lift.claim("linear.norm", *normed.records)
    y = scans.gated_norm(w, "linear.norm", y, gate, wide, Dim(float(spec.value_head_dim), Axis.HEAD), part)
    return lift.linear(output, "linear.out_proj", y, wide, w.hidden, part)


def mamba(lift: Lift, branch: int) -> str:
    """One projection, convolution, scan, gated norm, output (Dao and Gu 2024, arXiv:2405.21060, section 7)."""
    flow, w, part = lift.flow, lift.w, Component.MAMBA
    output = lift.need(product(flow, branch), branch, "output projection of Mamba")
    normed = lift.need(norm(flow, output.x), output.x, "gated norm of Mamba")
    record = lift.need(flow.made_by(normed.x, "mamba2_scan", "mamba2_step"), normed.x, "scan of Mamba-2")
    named = _named(record)
    chunk = int(dict(record.arguments).get("chunk", 1))
    heads, state = flow.values[named["x"]].shape[-2:], flow.values[named["B"]].shape[-2:]
    conv, entry = _convolved(lift, named["x"], "mamba.conv")
    for name in ("B", "C"):
        if _convolved(lift, named[name], "mamba.conv")[0].outputs != conv.outputs:
            raise lift.refuse(named[name], "comes from another convolution than x")
    spec = MambaSpec(
        num_heads=heads[0], head_dim=heads[1], state=state[1], groups=state[0], chunk=chunk,
        conv=flow.values[conv.inputs[1]].shape[-1], conv_bias=len(conv.inputs) == 3,
    )  # fmt: skip
    lift.facts.tell("mamba", spec, lift.block)
    number = spec.num_heads
    inner, convolved, steps = (_heads(n, number) for n in (spec.inner, spec.conv_width, number))
    for value in (named["dt"], _gate(lift, normed.gate, output.x)):
        if flow.root(value) != entry.out:
            raise lift.refuse(value, "comes from another projection than x, B and C")
    lift.linear(entry, "mamba.in_proj", lift.normed(entry.x, "input_norm"), w.hidden,
                _heads(spec.inner + spec.conv_width + number, number), part)  # fmt: skip
    gate, xbc, dt = w.split(("mamba.gate", inner), ("mamba.xbc", convolved), ("mamba.dt", steps))
    xbc = scans.conv(w, "mamba.conv", xbc, convolved, spec.conv, part, bias=spec.conv_bias)
    lift.claim("mamba.scan", flow.index_of(record.outputs[0]))
    y = scans.mamba_scan(w, spec, xbc, dt)
    lift.claim("mamba.norm", *normed.records)
    y = scans.gated_norm(w, "mamba.norm", y, gate, inner, inner, part)
    return lift.linear(output, "mamba.out_proj", y, inner, w.hidden, part)


def _named(record: Record) -> dict[str, int]:
    return {name: ref.value for name, ref in record.arguments if isinstance(ref, Ref)}


def _gate(lift: Lift, gate: int | None, value: int) -> int:
    if gate is None:
        raise lift.refuse(value, "is a norm without a gate behind a scan")
    return gate


def _convolved(lift: Lift, value: int, name: str) -> tuple[Record, Product]:
    """The convolution (with its curve) that a value is a part of, and the projection before it."""
    flow = lift.flow
    found = flow.region(value, lambda record: record.name in {"silu"})
    record = flow.record_of(found.leaves[0]) if len(found.leaves) == 1 else None
    if record is None or record.name != "convolution":
        raise lift.refuse(value, "is no part of a convolution")
    lift.claim(name, *found.records, flow.index_of(found.leaves[0]))
    before = flow.region(record.inputs[0], lambda other: other.name == "cat")
    lift.claim(name, *before.records)
    return record, _one_product(lift, before.leaves, record.inputs[0])


def _one_product(lift: Lift, leaves: list[int], value: int) -> Product:
    """The product that all these are parts of."""
    roots = {lift.flow.root(leaf) for leaf in leaves}
    if len(roots) != 1:
        raise lift.refuse(value, "is made of several projections")
    found = lift.need(product(lift.flow, roots.pop()), value, "projection")
    assert isinstance(found, Product)
    return found


def _side(lift: Lift, found: Product, name: str, x: str, width: Dim, owners: dict[int, str]) -> str:
    """A projection, or its share of one that gives several."""
    part = Component.LINEAR_ATTENTION
    if found.n == width.size:
        return lift.linear(found, name, x, lift.w.hidden, width, part)
    return lift.share_of(found, name, owners.setdefault(found.out, name), x, width, part)


def _heads(size: int, units: int) -> Dim:
    return Dim(float(size), Axis.HEADS, units=units)
