"""Turns names of links into tiers, and rows of measured tables into systems, listing every default it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hardware._errors import reject, reject_unknown
from hardware._library import NodeDefaults, chip, link, link_names, network_link, node_defaults, port_gbit, read
from hardware._sites import usual_site
from hardware.chip import ChipSpec
from hardware.fabric import Fabric, FabricKind, parse
from hardware.link import LinkSpec
from hardware.system import UNBOUNDED, SystemSpec, Tier
from hardware.topology import SWITCHED, Shape
from hardware.units import GB

__all__ = ["build", "packed_span", "system_of"]

Cell = str | int | float | None


@dataclass(slots=True)
class _Node:
    """A node under construction: what is known, and what was assumed on the way."""

    chip: ChipSpec
    defaults: NodeDefaults
    chips_per_node: int
    assumed: list[str] = field(default_factory=list)


def build(
    *, name: str, chip_spec: ChipSpec, base: str, num_chips: int, chips_per_node: int, intra: str, inter: str | None
) -> SystemSpec:
    """Join chips by an intra-node and an inter-node link, both in the grammar of hardware/fabric.py.

    `base` names the catalogue chip whose usual node answers for what the links leave open; an empty `inter` is that
    node's network.
    """
    node = _Node(chip_spec, node_defaults(base), chips_per_node)
    tiers = _scale_up(node, parse(intra), num_chips)
    usual_network = "-".join(filter(None, (node.defaults.fabric, node.defaults.generation)))
    if inter is None:
        inter = usual_network
    outer, fabric = _link(node, parse(inter)), parse(inter)
    if not fabric.kind.is_network and fabric.domain is not None and fabric.domain > tiers[-1].span:
        tiers = (*tiers, Tier(name=fabric.kind.value, span=fabric.domain, link=outer, shape=_shape(node, fabric)))
        fabric = parse(usual_network)
        outer = _link(node, fabric)
    tiers = (*tiers, Tier(name=fabric.kind.value, span=UNBOUNDED, link=outer))
    return SystemSpec(
        name=name,
        chip=chip_spec,
        num_chips=num_chips,
        tiers=tiers,
        chips_per_node=chips_per_node,
        site=usual_site(base, chip_spec.tdp_w, tiers[-1].link),
        assumptions=tuple(dict.fromkeys(node.assumed)),
    )


def system_of(
    *, gpu: str, gpus_per_node: Cell = None, n_gpus: Cell = None, intra_node: Cell = None, inter_node: Cell = None
) -> tuple[SystemSpec, tuple[str, ...]]:
    """The system of a measured row, and what was assumed for its empty cells and for parts its names leave open."""
    spec = chip(gpu)
    defaults = node_defaults(spec.name)
    assumed = []
    per_node = _count("gpus_per_node", gpus_per_node)
    if per_node is None:
        per_node = defaults.chips_per_node
        assumed.append(f"gpus_per_node: {per_node}, {spec.name}'s usual node ({defaults.source})")
    total = _count("n_gpus", n_gpus)
    if total is None:
        total = per_node
        assumed.append(f"n_gpus: {total}, one node")
    intra, inter = _text(intra_node), _text(inter_node)
    if intra is None:
        intra = defaults.intra
        assumed.append(f"intra_node: {intra}, {spec.name}'s usual node ({defaults.source})")
    if inter is None:
        assumed.append(f"inter_node: empty; {spec.name}'s usual network ({defaults.source})")
    system = build(
        name=f"{spec.name} x {total}", chip_spec=spec, base=spec.name, num_chips=total, chips_per_node=per_node,
        intra=intra, inter=inter,
    )  # fmt: skip
    return system, tuple(assumed) + system.assumptions


def packed_span(domain: int, chips_per_node: int, num_chips: int) -> int:
    """How many chips of each domain a job uses: all of them, or fewer where that fills every domain alike.

    Jobs whose size is a power of two take 64 of the 72 chips of a rack, whole nodes only, so that groups stay inside
    a rack.

    >>> packed_span(72, 4, 512), packed_span(72, 4, 576), packed_span(72, 4, 16)
    (64, 72, 72)
    """
    if num_chips <= domain or num_chips % domain == 0 or domain % chips_per_node:
        return domain
    fits = [d for d in range(domain, domain // 2, -chips_per_node) if num_chips % d == 0]
    return fits[0] if fits else domain


def _scale_up(node: _Node, fabric: Fabric, num_chips: int) -> tuple[Tier, ...]:
    """The tiers inside a scale-up domain: one, or a bridge and the host's PCIe."""
    inner, name = _link(node, fabric), fabric.kind.value
    bridge = node.defaults.bridge_span
    if fabric.kind is FabricKind.NVLINK and bridge and fabric.domain is None and node.chips_per_node > bridge:
        node.assumed.append(f"{fabric.text}: bridges join {bridge} {node.chip.name} each; others meet over PCIe")
        host = _link(node, parse(node.defaults.intra))
        return (Tier(name="bridge", span=bridge, link=inner), Tier(name="pcie", span=node.chips_per_node, link=host))
    domain = fabric.domain
    usual = parse(node.defaults.intra)
    if domain is None and usual.domain is not None and usual.kind is fabric.kind:
        domain = usual.domain
        node.assumed.append(f"{fabric.text}: a domain of {domain} chips, as in {node.chip.name}'s usual system")
    shape = _shape(node, fabric)
    if domain is None:
        return (Tier(name=name, span=node.chips_per_node, link=inner, shape=shape),)
    used = packed_span(domain, node.chips_per_node, num_chips)
    if used != domain:
        node.assumed.append(f"{used} of the {domain} chips of each {name} domain are used, to fill all domains alike")
    return (Tier(name=name, span=used, link=inner, shape=shape),)


def _shape(node: _Node, fabric: Fabric) -> Shape:
    """How a scale-up fabric joins its chips: as named, else as in the chip's usual node, else by switches."""
    usual = parse(node.defaults.intra)
    if fabric.shape is None and usual.shape is not None and usual.kind is fabric.kind:
        node.assumed.append(f"{fabric.text}: a {usual.shape.topology.value}, as in {node.chip.name}'s usual node")
        return usual.shape
    return fabric.shape or SWITCHED


def _link(node: _Node, fabric: Fabric) -> LinkSpec:
    node.assumed.extend(fabric.remarks)
    if fabric.kind.is_network or fabric.node_gbit is not None:
        return _network(node, fabric)
    usual = parse(node.defaults.intra)
    generation = fabric.generation
    if generation is None and fabric.kind in (FabricKind.NVLINK, FabricKind.PCIE):
        generation = _usual_generation(node, fabric)
    rate = fabric.both_ways_gb_per_s
    if rate is None and usual.kind is fabric.kind and usual.generation == generation:
        rate = usual.both_ways_gb_per_s
        if rate is not None:
            node.assumed.append(f"{fabric.text}: {rate:g} GB/s both ways, {node.chip.name}'s usual link")
    entry = _entry(node, fabric, f"{fabric.kind.value}{generation or ''}", rate)
    return link(entry, bytes_per_s=None if rate is None else rate * GB / 2, label=fabric.text)


def _usual_generation(node: _Node, fabric: Fabric) -> str:
    """The generation of a link that does not state it: that of the chip's usual node."""
    if fabric.kind is FabricKind.PCIE:
        generation: str | None = node.defaults.pcie_generation
    else:
        usual = parse(node.defaults.bridge or node.defaults.intra)
        generation = usual.generation if usual.kind is fabric.kind else None
    if generation is None:
        law = f"a link without a generation takes the chip's own, and {node.chip.name} has no {fabric.kind.value}"
        reject(law, repr(fabric.text), f"name the generation, or use {node.defaults.intra}")
    node.assumed.append(f"{fabric.text}: generation {generation}, {node.chip.name}'s own")
    return generation


def _entry(node: _Node, fabric: Fabric, stem: str, rate: float | None) -> str:
    """The catalogue entry that answers for a link: the exact one, else its generation's, noted."""
    known = [name for name in link_names() if name == stem or name.startswith(f"{stem}-")]
    if not known:
        reject_unknown(f"generation of link {fabric.text!r}:", stem, link_names())
    exact = f"{stem}-{rate:g}" if rate is not None else stem
    usual = parse(node.defaults.intra)
    domain = fabric.domain or (usual.domain if usual.kind is fabric.kind else None)
    if domain is not None and f"{exact}-nvl{domain}" in known:
        return f"{exact}-nvl{domain}"
    if exact in known:
        return exact
    node.assumed.append(f"{fabric.text}: efficiency and latency of {known[-1]}")
    return known[-1] if rate is not None or len(known) == 1 else max(known, key=lambda name: link(name).bytes_per_s)


def _network(node: _Node, fabric: Fabric) -> LinkSpec:
    """A chip's share of the node's NICs; scale-up kinds written as NxRATEg count the same way."""
    kind = fabric.kind.value
    source = "as named"
    gbit = fabric.node_gbit
    if gbit is None:
        port, ports, source = _default_ports(node, fabric)
        gbit = port * ports
        node.assumed.append(f"{fabric.text}: {ports:g} x {port:g} Gb/s a node ({source})")
    elif fabric.kind is FabricKind.IB and fabric.generation is None and fabric.nic_gbit is not None:
        node.assumed.append(f"{fabric.text}: generation open; its {fabric.nic_gbit:g} Gb/s ports say all that counts")
    if not fabric.kind.is_network:
        node.assumed.append(f"{fabric.text}: {gbit:g} Gb/s a node one way; efficiency and latency of RoCE")
        kind = FabricKind.ROCE.value
    return network_link(kind, node_gbit=gbit, chips_per_node=node.chips_per_node, label=fabric.text, wire_source=source)


def _default_ports(node: _Node, fabric: Fabric) -> tuple[float, float, str]:
    """Gb/s of a port and ports a node, where the name does not give NxRATEg."""
    entry = read("links")["networks"][fabric.kind.value]
    ports = max(1.0, math.floor(node.defaults.nics_per_chip * node.chips_per_node))
    ports = float(entry.get("ports_per_node", ports))
    if fabric.generation in read("links")["generations"]["values"]:
        assert fabric.generation is not None
        return port_gbit(fabric.generation), ports, f"{fabric.generation.upper()} ports, as many as usual"
    if fabric.nic is not None:
        return port_gbit(fabric.nic), ports, f"{fabric.nic} ports, as many as usual"
    if "port_gbit" in entry:
        return port_gbit(fabric.kind.value), ports, f"default of {fabric.kind.value}"
    return node.defaults.port_gbit, ports, node.defaults.source


def _text(cell: Cell) -> str | None:
    """A cell's text; None where it is empty (NaN included: tables read by pandas have it)."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return None
    return str(cell).strip() or None


def _count(name: str, cell: Cell) -> int | None:
    text = _text(cell)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value.is_integer() or value < 1:
        reject(f"{name} must be a whole number of at least 1", repr(cell), "count chips, or leave it empty")
    return int(value)
