"""Reads catalog/*.yaml into chips and links, each number with its source. Cached; knows no clusters and no grammar."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hardware._errors import reject_unknown
from hardware.chip import ChipSpec
from hardware.dtype import DType
from hardware.link import Collective, LinkSpec
from hardware.units import GBIT, UNITS, US

__all__ = [
    "CURVE",
    "HEAD_DIMS",
    "HOST",
    "SCALARS",
    "TABLES",
    "NodeDefaults",
    "chip",
    "chip_names",
    "host_power",
    "link",
    "link_names",
    "network_link",
    "node_defaults",
    "port_gbit",
    "read",
    "source_text",
]

TABLES = ("matrix_flops_per_s", "vector_flops_per_s", "gemm_efficiency", "gemm_ramp_k", "step_gemm")
HEAD_DIMS = "attention_head_dims"
CURVE = ("kernel_s", "gemm_kernel_s", "attention_kernel_s", "attention_ramp_keys", "attention_tail",
         "attention_backward")  # fmt: skip
HOST = ("host_bytes_per_s", "host_memory_bytes", "host_memory_bytes_per_s")
SCALARS = (
    "num_sms", "hbm_bytes", "hbm_bytes_per_s", "tdp_w", "price_usd_per_hour", "failures_per_hour", "launch_s",
    "context_bytes", "attention_efficiency", "hbm_efficiency", "gemm_slowdown", *HOST, *CURVE, "step_attention",
)  # fmt: skip
_MEASURED = ("gemm_efficiency", "attention_efficiency", "hbm_efficiency", HEAD_DIMS, "gemm_ramp_k", *CURVE)
EFFICIENCIES = ("gemm_efficiency", "attention_efficiency", "hbm_efficiency")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def read(name: str) -> Mapping[str, Any]:
    """The parsed content of catalog/`name`.yaml."""
    path = Path(__file__).parent / "catalog" / f"{name}.yaml"
    data: Mapping[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)
    return data


def source_text(file: str, key: str) -> str:
    """A source with its date, as people read it."""
    entry = read(file)["sources"][key]
    return f"{entry['text']} ({entry['date']})"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDefaults:
    """The node that a chip usually ships in: what an empty cell of a measured row means.

    Attributes:
        intra: the scale-up link, in the grammar of hardware/fabric.py.
        nics_per_chip: ports of the scale-out network per chip.
        port_gbit: Gb/s of one such port.
        pcie_generation: of the host.
        bridge, bridge_span: the NVLink bridge of PCIe cards and how many chips it joins; None and 0 without one.
    """

    intra: str
    fabric: str
    generation: str | None
    port_gbit: float
    chips_per_node: int
    nics_per_chip: float
    pcie_generation: str
    bridge: str | None
    bridge_span: int
    source: str


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of a chip: its value in SI, where it comes from, and whether that is an assumption."""

    value: Any
    source: str
    assumed: bool
    measured: tuple[str, ...] = ()  # of an efficiency: what of it was measured on this very chip


def chip_names() -> tuple[str, ...]:
    """The names of known chips, in catalogue order."""
    return tuple(read("chips")["chips"])


def _canonical(name: str) -> str:
    key = str(name).strip().lower()
    key = str(read("chips")["aliases"].get(key, key))
    if key not in read("chips")["chips"]:
        reject_unknown("chip", name, (*chip_names(), *read("chips")["aliases"]))
    return key


@cache
def _chip(name: str) -> ChipSpec:
    found = {key: _field(name, key) for key in (*TABLES, HEAD_DIMS, *SCALARS)}
    return ChipSpec(
        name=name,
        vendor=_raw(name, "vendor")[0],
        sources={key: f.source for key, f in found.items()},
        assumptions=tuple(f"{name} {key}: {f.source}" for key, f in found.items() if f.assumed and f.value != {}),
        measured=tuple(item for key in EFFICIENCIES for item in found[key].measured),
        **{key: f.value for key, f in found.items()},
    )


def chip(name: str) -> ChipSpec:
    """The chip of that name; ValueError with the nearest known name otherwise."""
    return _chip(_canonical(name))


@cache
def node_defaults(name: str) -> NodeDefaults:
    """The node that the chip of that name usually ships in."""
    raw, _ = _raw(_canonical(name), "node")
    rate = raw.get("rate_gbit") or port_gbit(raw["generation"])
    return NodeDefaults(
        intra=raw["intra"],
        fabric=raw["fabric"],
        generation=raw.get("generation"),
        port_gbit=float(rate),
        chips_per_node=raw["chips_per_node"],
        nics_per_chip=raw["nics_per_chip"],
        pcie_generation=str(raw["pcie"]),
        bridge=raw.get("bridge"),
        bridge_span=raw.get("bridge_span", 0),
        source=source_text("chips", raw["source"]),
    )


def host_power(name: str) -> tuple[float, str]:
    """Watts of the usual node of the chip of that name beside its chips, per chip, and their source."""
    raw, owner = _raw(_canonical(name), "host_w")
    text = source_text("chips", raw["source"])
    return raw["value"] * UNITS[raw["unit"]], text if owner == _canonical(name) else f"as {owner}: {text}"


def _raw(name: str, key: str) -> tuple[Any, str]:
    """The block of a field, and the chip on whose entry it stands (following `like`); the chip's own if on none."""
    owner = name
    while key not in (entry := read("chips")["chips"][owner]):
        if "like" not in entry:
            return read("chips")["every_chip"][key], name
        owner = entry["like"]
    return entry[key], owner


def _field(name: str, key: str) -> _Field:
    raw, owner = _raw(name, key)
    if isinstance(raw, dict) and "inherit" in raw:
        found, owner = _field(raw["inherit"], key), raw["inherit"]
    elif key in TABLES:
        found = _table(raw, key)
    elif key == HEAD_DIMS:
        shares = {int(head_dim): float(share) for head_dim, share in raw["values"].items()}
        found = _Field(shares, source_text("chips", raw["source"]), bool(raw.get("assumed")))
    else:
        value = raw["value"] * UNITS[raw.get("unit", "FLOPS")]
        value = int(value) if key == "num_sms" else float(value)
        assumed = bool(raw.get("assumed"))
        found = _Field(value, source_text("chips", raw["source"]), assumed, () if assumed else (key,))
    if owner == name:
        return found
    # An efficiency measured on a relative is an assumption here; a peak of the same silicon is not.
    return _Field(found.value, f"as {owner}: {found.source}", found.assumed or key in _MEASURED)


def _table(raw: object, key: str) -> _Field:
    """Values per format from one block, or from several with a source each."""
    blocks: list[Any] = raw if isinstance(raw, list) else [raw]
    values: dict[DType, float] = {}
    texts, measured = [], []
    for block in blocks:
        factor = UNITS[block.get("unit", "FLOPS")]
        values.update({DType(key): value * factor for key, value in block["values"].items()})
        measured += [] if block.get("assumed") else [f"{key}.{form}" for form in block["values"]]
        texts.append(f"{', '.join(block['values'])}: {source_text('chips', block['source'])}")
    text = "; ".join(texts) if len(blocks) > 1 else source_text("chips", blocks[0]["source"])
    return _Field(values, text, any(block.get("assumed") for block in blocks), tuple(measured))


def link_names() -> tuple[str, ...]:
    """The names of known scale-up links."""
    return tuple(read("links")["scale_up"])


def _link_of(name: str, bytes_per_s: float, fit: Mapping[str, Any], wire_source: str) -> LinkSpec:
    return LinkSpec(
        name=name,
        bytes_per_s=bytes_per_s,
        latency_s=fit["latency_us"] * US,
        setup_s=fit["setup_us"] * US,
        efficiency=fit["efficiency"],
        by_collective={c: fit[c.value] for c in Collective if c.value in fit},
        pair_loss=fit.get("pair_loss", 0.0),
        source=f"wire: {wire_source}; share and latency: {source_text('links', fit['source'])}",
    )


def link(name: str, *, bytes_per_s: float | None = None, label: str | None = None) -> LinkSpec:
    """The scale-up link of that name, with another wire rate and label where given."""
    links = read("links")["scale_up"]
    if name not in links:
        reject_unknown("link", name, links)
    raw = links[name]
    wire, text = raw["bytes_per_s"], source_text("links", raw["bytes_per_s"]["source"])
    rate = wire["value"] * UNITS[wire["unit"]]
    if bytes_per_s is not None and not math.isclose(bytes_per_s, rate):
        rate, text = bytes_per_s, "as named"
    return _link_of(label or name, rate, raw["fit"], text)


def network_link(kind: str, *, node_gbit: float, chips_per_node: int, label: str, wire_source: str) -> LinkSpec:
    """A chip's share of its node's NICs, which together carry `node_gbit` Gb/s one way."""
    return _link_of(label, node_gbit * GBIT / chips_per_node, read("links")["networks"][kind], wire_source)


def port_gbit(name: str) -> float:
    """Gb/s of one port of a generation, a NIC, or a network's usual port."""
    links = read("links")
    for table in (links["generations"]["values"], links["nics"]["values"]):
        if name in table:
            return float(table[name])
    return float(links["networks"][name]["port_gbit"])
