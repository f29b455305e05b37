"""Reads systems that a space file describes in place. Refuses unknown keys and wrong types, naming the key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hardware._errors import reject, reject_unknown
from hardware._library import CURVE, HEAD_DIMS, HOST, SCALARS, TABLES, chip, chip_names
from hardware._sites import grid, usual_site
from hardware.chip import ChipSpec
from hardware.dtype import DType
from hardware.link import Collective, LinkSpec
from hardware.mixed import mixed
from hardware.site import Site
from hardware.software import software, software_names
from hardware.system import UNBOUNDED, SystemSpec, Tier
from hardware.topology import SWITCHED, Shape
from hardware.units import parse_quantity

__all__ = ["system_from_mapping"]

_GIVEN = "given in the system's description"
_ADJUSTABLE = ("headroom", "price_usd_per_hour", "failures_per_hour")
_SITE = ("host_w_per_chip", "network_w_per_chip", "pue", "grid_kg_co2_per_kwh", "electricity_usd_per_kwh")
_CLUSTER_KEYS = ("cluster", "name", "num_chips", "chip", "software", *_ADJUSTABLE, *_SITE, "grid")
_FULL_KEYS = ("name", "chip", "tiers", "chips_per_node", "num_chips", "software", *_ADJUSTABLE, *_SITE, "grid")
_MIXED_KEYS = ("name", "segments", "link")
_TIER_KEYS = ("name", "span", "bytes_per_s", "latency_s", "setup_s", "efficiency", "by_collective", "pair_loss",
              "source", "shape")  # fmt: skip
MAX_NAME = 100  # characters
_CHIP_KEYS = ("like", "name", "vendor", *TABLES, HEAD_DIMS, *SCALARS, "sources", "measured")
_OPTIONAL = (*HOST, *CURVE, "step_attention", "step_gemm", "gemm_ramp_k")

_BASES = {
    "_bytes": "B",
    "flops_per_s": "FLOPS",
    "bytes_per_s": "B/s",
    "_s": "s",
    "_w": "W",
    "_w_per_chip": "W",
    "kg_co2_per_kwh": "kg/kWh",
    "usd_per_kwh": "USD/kWh",
    "price_usd_per_hour": "USD/h",
    "failures_per_hour": "1/h",
}
"""What a field measures, by the first ending of its name that fits."""

ClusterOf = Callable[[str, int | None], SystemSpec]


def system_from_mapping(mapping: str | Mapping[str, Any], cluster: ClusterOf) -> SystemSpec:
    """Build the system of a description; `cluster` looks up names."""
    if isinstance(mapping, str):
        return cluster(mapping, None)
    given = _mapping("system", mapping)
    if "segments" in given:
        return _mixed(given, cluster)
    if "tiers" in given:
        return _full(given)
    return _changed(given, cluster)


def _changed(given: Mapping[str, Any], cluster: ClusterOf) -> SystemSpec:
    """A cluster of the catalogue, with changes."""
    _check_keys("system", given, _CLUSTER_KEYS)
    if ("cluster" in given) == ("name" in given):
        law = "a system names one cluster (cluster: NAME), or lists its tiers"
        reject(law, f"the keys {', '.join(given) or 'none'}", "add `cluster: dgx_h100` or `tiers:`")
    name = given.get("cluster", given.get("name"))
    if not isinstance(name, str):
        reject("system.cluster must be a name", repr(name), "see `search catalog clusters`")
    count = _whole("system.num_chips", given["num_chips"]) if "num_chips" in given else None
    system = cluster(name, count)
    if "chip" in given:
        system = replace(system, chip=_chip(given["chip"], system.chip))
    return _adjusted(system, given)


def _mixed(given: Mapping[str, Any], cluster: ClusterOf) -> SystemSpec:
    """Several systems in the order in which one pipeline runs through them."""
    _check_keys("system", given, _MIXED_KEYS)
    raw = given["segments"]
    if not isinstance(raw, list):
        reject("system.segments must be a list of systems", repr(raw), "list at least two")
    segments = tuple(system_from_mapping(item, cluster) for item in raw)
    link = _tier("system.link", {"name": "link", **_mapping("system.link", given["link"])}) if "link" in given else None
    name = _name("system", given, "+".join(segment.name for segment in segments))
    return mixed(name, segments, link.link if link else None)


def _full(given: Mapping[str, Any]) -> SystemSpec:
    """A system whose every part is described."""
    _check_keys("system", given, _FULL_KEYS)
    for key in ("chip", "chips_per_node", "num_chips"):
        if key not in given:
            reject(f"a system described by its tiers needs {key}", "none", f"add system.{key}")
    spec = _chip(given["chip"], None)
    tiers = given["tiers"]
    if not isinstance(tiers, list) or not tiers:
        reject("system.tiers must be a list of tiers from the inside out", repr(tiers), "list at least one")
    joined = tuple(_tier(f"system.tiers[{i}]", raw) for i, raw in enumerate(tiers))
    known = spec.name if spec.name in chip_names() else None
    system = SystemSpec(
        name=_name("system", given, f"{spec.name} system"),
        chip=spec,
        num_chips=_whole("system.num_chips", given["num_chips"]),
        chips_per_node=_whole("system.chips_per_node", given["chips_per_node"]),
        tiers=joined,
        site=usual_site(known, spec.tdp_w, joined[-1].link),
    )
    return _adjusted(system, given)


def _adjusted(system: SystemSpec, given: Mapping[str, Any]) -> SystemSpec:
    changes: dict[str, Any] = {key: _number(f"system.{key}", given[key]) for key in _ADJUSTABLE if key in given}
    changes["site"] = _site(system, given)
    system = replace(system, **changes)
    if "software" not in given:
        return system
    if not isinstance(given["software"], str):
        reject("system.software must be a name", repr(given["software"]), f"have {', '.join(software_names())}")
    return system.running(software(given["software"]))


def _site(system: SystemSpec, given: Mapping[str, Any]) -> Site:
    """The system's site with the given fields; `grid` names one of the catalogue."""
    if "grid" in given and "grid_kg_co2_per_kwh" in given:
        law = "a system states its grid by name (grid) or by its CO2 (grid_kg_co2_per_kwh)"
        reject(law, "both", "drop one of the two")
    fields: dict[str, Any] = {key: _number(f"system.{key}", given[key]) for key in _SITE if key in given}
    sources = {**system.site.sources, **dict.fromkeys(fields, _GIVEN)}
    if "grid" in given:
        fields["grid_kg_co2_per_kwh"], sources["grid_kg_co2_per_kwh"] = grid(given["grid"])
    return replace(system.site, **fields, sources=sources) if fields else system.site


def _tier(where: str, raw: object) -> Tier:
    given = _mapping(where, raw)
    _check_keys(where, given, _TIER_KEYS)
    for key in ("name", "bytes_per_s", "latency_s", "efficiency"):
        if key not in given:
            reject(f"{where} needs {key}", "none", "give rate one way per chip, latency and achieved / wire")
    name = _name(where, given, "")
    by_collective = _known(f"{where}.by_collective", given.get("by_collective", {}), [c.value for c in Collective])
    shares = {Collective(key): _number(f"{where}.by_collective.{key}", value) for key, value in by_collective}
    wire = LinkSpec(
        name=name,
        source=str(given.get("source", _GIVEN)),
        by_collective=shares,
        setup_s=_number(f"{where}.setup_s", given.get("setup_s", 0.0)),
        pair_loss=_number(f"{where}.pair_loss", given.get("pair_loss", 0.0)),
        **{key: _number(f"{where}.{key}", given[key]) for key in ("bytes_per_s", "latency_s", "efficiency")},
    )
    span = given.get("span")  # a tier without a span reaches every chip
    return Tier(
        name=name,
        span=UNBOUNDED if span is None else _whole(f"{where}.span", span),
        link=wire,
        shape=Shape.parse(str(given.get("shape", SWITCHED))),
    )


def _chip(raw: object, base: ChipSpec | None) -> ChipSpec:
    """A chip by name, or by fields laid over a base (of the cluster, or `like: NAME`)."""
    if isinstance(raw, str):
        return chip(raw)
    given = dict(_mapping("system.chip", raw))
    _check_keys("system.chip", given, _CHIP_KEYS)
    if "like" in given:
        base = chip(str(given["like"]))
    fields = _chip_fields(given, base)
    own = [key for key in given if key in {*TABLES, HEAD_DIMS, *SCALARS}]
    told = _mapping("system.chip.sources", given.get("sources", {}))
    _check_keys("system.chip.sources", told, tuple(own))
    sources = {**(base.sources if base else {}), **dict.fromkeys(own, _GIVEN), **{k: str(v) for k, v in told.items()}}
    fields["measured"] = _measured(given, base)
    if base is not None:
        kept = tuple(a for a in base.assumptions if a.partition(":")[0].split()[-1] not in fields)
        return replace(base, **fields, sources=sources, assumptions=kept)
    missing = [key for key in ("name", *TABLES, *SCALARS) if key not in fields and key not in _OPTIONAL]
    if missing:
        law = "a chip described in full has every field"
        reject(law, f"none of {', '.join(missing)}", "add them, or start from a known chip with `like: NAME`")
    return ChipSpec(**{"vendor": "unstated", **fields}, sources=sources)


def _measured(given: Mapping[str, Any], base: ChipSpec | None) -> tuple[str, ...]:
    """What rests on measurements of the chip: what is said to, and of the base's what stays as it was."""
    raw = given.get("measured", [])
    if not isinstance(raw, list) or not all(isinstance(item, str) for item in raw):
        reject("system.chip.measured must be a list of fields", repr(raw), "such as [gemm_efficiency.bf16]")
    for item in raw:
        name, _, form = item.partition(".")
        if name not in given or (form and form not in given[name]):
            reject("system.chip.measured lists fields that the chip gives", repr(item), "give it, or take it out")
    renamed = base is None or "name" in given  # another chip: what was measured of the base is a relative's
    kept = () if renamed or base is None else tuple(m for m in base.measured if m.partition(".")[0] not in given)
    return (*kept, *raw)


def _chip_fields(given: Mapping[str, Any], base: ChipSpec | None) -> dict[str, Any]:
    fields: dict[str, Any] = {key: _name("system.chip", given, "", key) for key in ("name", "vendor") if key in given}
    for key in TABLES:
        if key in given:
            known = _known(f"system.chip.{key}", given[key], [d.value for d in DType])
            table = {DType(k): _number(f"system.chip.{key}.{k}", v) for k, v in known}
            fields[key] = {**(getattr(base, key) if base else {}), **table}
    if HEAD_DIMS in given:
        shares = _mapping(f"system.chip.{HEAD_DIMS}", given[HEAD_DIMS])
        fields[HEAD_DIMS] = {_whole(f"{HEAD_DIMS} key", k): _number(f"{HEAD_DIMS}.{k}", v) for k, v in shares.items()}
    for key in SCALARS:
        if key in given:
            read = _whole if key == "num_sms" else _number
            fields[key] = read(f"system.chip.{key}", given[key])
    return fields


def _name(where: str, given: Mapping[str, Any], usual: str, key: str = "name") -> str:
    """What tables and errors call a part: one short line of text."""
    raw = given.get(key, usual)
    if not isinstance(raw, str) or not raw or not raw.isprintable() or len(raw) > MAX_NAME:
        shown = repr(raw) if len(repr(raw)) <= MAX_NAME else f"{repr(raw)[:MAX_NAME]}..."
        reject(f"{where}.{key} must be a line of 1 to {MAX_NAME} characters", shown, "such as my_cluster")
    return raw


def _mapping(where: str, raw: object) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        reject(f"{where} must be a mapping of keys to values", repr(raw), "indent its keys under it")
    return raw


def _check_keys(where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            reject_unknown(f"key of {where}:", key, known)


def _known(where: str, raw: object, known: list[str]) -> list[tuple[str, Any]]:
    given = _mapping(where, raw)
    _check_keys(where, given, tuple(known))
    return list(given.items())


def _number(where: str, raw: object) -> float:
    """A number, or a string with a unit; YAML 1.1 reads 1e12 without a point and a sign as a string, too."""
    if isinstance(raw, str):
        try:
            return parse_quantity(raw, _base(where))
        except ValueError as error:
            msg = f"{where}: {error}"
            raise ValueError(msg) from None
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        reject(f"{where} must be a number", repr(raw), "write it like 80e+9 or '80 GB'")
    return float(raw)


def _base(where: str) -> str:
    """The unit of the field at `where`: its own name decides, or its table's where a format follows."""
    parts = where.split(".")
    field = next((part for part in parts if part in TABLES), parts[-1])
    return next((base for ending, base in _BASES.items() if field.endswith(ending)), "")


def _whole(where: str, raw: object) -> int:
    value = _number(where, raw)
    if not value.is_integer() or value < 1:
        reject(f"{where} must be a whole number of at least 1", repr(raw), "count it")
    return int(value)
