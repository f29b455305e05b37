"""Chips and systems as rows of text: field, value with its unit, source. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hardware._library import HEAD_DIMS, HOST, SCALARS, TABLES, chip
from hardware.chip import GEMM_RAMP_K
from hardware.dtype import DType
from hardware.link import LinkSpec
from hardware.system import UNBOUNDED, SystemSpec
from hardware.topology import SWITCHED
from hardware.units import GB, GBIT, HOUR, TFLOPS, format_bytes, format_seconds

__all__ = ["Row", "describe_chip", "describe_system"]


class Row(NamedTuple):
    """One line of a description."""

    field: str
    value: str
    source: str


def describe_chip(name: str) -> tuple[Row, ...]:
    """What is known of a chip: field, value with its unit, source."""
    spec = chip(name)
    rows = [Row("name", spec.name, ""), Row("vendor", spec.vendor, "")]
    for key in TABLES:
        rows.append(Row(key, _table(key, getattr(spec, key)), spec.sources[key]))
    shares = ", ".join(f"{head_dim} {share:.3g}" for head_dim, share in spec.attention_head_dims.items())
    rows.append(Row(HEAD_DIMS, f"{shares} of head dim 128" if shares else "as 128", spec.sources[HEAD_DIMS]))
    rows.extend(Row(key, _scalar(key, getattr(spec, key)), spec.sources[key]) for key in SCALARS)
    return tuple(rows)


def describe_system(system: SystemSpec, *, source: str) -> tuple[Row, ...]:
    """What is known of a system; `source` is where its make-up comes from."""
    rows = [
        Row("name", system.name, ""),
        Row("chip", system.chip.name, source),
        Row("num_chips", str(system.num_chips), source),
        Row("chips_per_node", str(system.chips_per_node), source),
        Row("num_nodes", str(system.num_nodes), "num_chips / chips_per_node"),
    ]
    for i, tier in enumerate(system.tiers):
        span = "all chips" if tier.span == UNBOUNDED else f"{tier.span} chips"
        shape = "" if tier.shape == SWITCHED else f" ({tier.shape})"
        rows.append(Row(f"tiers[{i}]", f"{tier.name}{shape}, {span}: {_link(tier.link)}", tier.link.source))
    rows.append(Row("headroom", f"{system.headroom:.0%}", "share of memory left free"))
    price = system.price_usd_per_s * HOUR
    rows.append(Row("price", f"{price:,.2f} USD/h", system.chip.sources.get("price_usd_per_hour", "")))
    rows += _site_rows(system)
    mean_s = 1.0 / system.failures_per_s if system.failures_per_s else float("inf")
    failures = system.chip.sources.get("failures_per_hour", "")
    rows.append(Row("mean time between failures", format_seconds(mean_s), failures))
    rows.extend(Row("assumed", text, "") for text in system.assumptions)
    return tuple(rows)


def _site_rows(system: SystemSpec) -> list[Row]:
    """Power from the chip to the grid, and the grid's CO2."""
    site, sources = system.site, system.site.sources
    rows = [
        Row("host", f"{site.host_w_per_chip:,.0f} W a chip", sources.get("host_w_per_chip", "")),
        Row("network", f"{site.network_w_per_chip:,.0f} W a chip", sources.get("network_w_per_chip", "")),
        Row("pue", f"{site.pue:g}", sources.get("pue", "")),
        Row("power", f"{system.power_w / 1e3:,.1f} kW", "chips, hosts and network at their rated power, times PUE"),
        Row("grid", f"{site.grid_kg_co2_per_kwh:g} kg CO2 per kWh", sources.get("grid_kg_co2_per_kwh", "")),
    ]
    if site.electricity_usd_per_kwh:
        paid = f"{site.electricity_usd_per_kwh:g} USD/kWh beside the price"
        rows.append(Row("electricity", paid, sources.get("electricity_usd_per_kwh", "")))
    return rows


def _link(wire: LinkSpec) -> str:
    rate = f"{wire.bytes_per_s / GB:.4g} GB/s one way per chip ({wire.bytes_per_s / GBIT:.4g} Gb/s)"
    return f"{rate}, {wire.efficiency:.0%} achieved, {format_seconds(wire.latency_s)} a hop"


def _table(key: str, values: Mapping[DType, float]) -> str:
    if key in {"gemm_ramp_k", "step_gemm"}:
        unsaid = GEMM_RAMP_K if key == "gemm_ramp_k" else 1.0
        return ", ".join(f"{d.value} {v:g}" for d, v in values.items()) or f"{unsaid:g}"
    if key == "gemm_efficiency":
        return ", ".join(f"{d.value} {v:.3g}" for d, v in values.items()) + " of peak"
    return ", ".join(f"{d.value} {v / TFLOPS:.6g}" for d, v in values.items()) + " TFLOPS"


def _scalar(key: str, value: float) -> str:
    if key in HOST and not value:
        return "unknown"
    if key.endswith("efficiency"):
        return f"{value:.3g} of peak"
    if key.endswith("_bytes"):
        return f"{format_bytes(value)} ({value / GB:.1f} GB)"
    if key.endswith("bytes_per_s"):
        return f"{value / GB:,.4g} GB/s"
    if key.endswith("_s") and not key.endswith("per_s"):
        return format_seconds(value)
    unit = {"tdp_w": " W", "price_usd_per_hour": " USD/h", "failures_per_hour": " per hour"}.get(key, "")
    return f"{value:g}{unit}"
