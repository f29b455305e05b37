"""Writes calibrations as the system of a space: what `system:` takes, each figure with where it comes from.

What tables do not show (memory size, power, price, network) is the catalogue's for a known chip; for an unknown device
what it said of itself where it was measured here, else an assumption, said to be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capture.calibrate import Calibration, chip_fields, link_fields
from capture.fits import Fit
from hardware.catalog import cluster, usual_clusters
from hardware.link import Collective
from hardware.system import UNBOUNDED, Tier
from hardware.topology import SWITCHED
from hardware.units import GB, GIB, TFLOPS, US

__all__ = ["description", "provenance"]

ASSUMED_MEMORY_BYTES = 16 * GIB
MAX_NAME = 100  # characters that a system's description may give a name: hardware/_inline.py
ASSUMED = "assumption: no table shows it; set your own"


def provenance(fit: Fit, date: str) -> str:
    """Where a fitted figure comes from: tables, who measured, points, held-out error, date."""
    error = fit.error
    by = f" by {', '.join(fit.measured_by)}" if fit.measured_by else ""
    return (
        f"{fit.table}: {fit.subject}, {fit.num_rows:,} rows{by}; error on {error.num_held_out:,} "
        f"held-out shapes {error.mean:.1%} mean, {error.median:.1%} median ({date})"
    )


def description(found: Calibration, *, name: str, date: str) -> dict[str, Any]:
    """The mapping that `system:` takes."""
    chip: dict[str, Any] = {"name": f"{name} {found.name}" if found.spec else found.name}
    chip |= {"like": found.name} if found.spec else _assumed_chip(found)
    sources = {} if found.spec else _assumed_sources(found, date)
    measured: list[str] = []
    fitted: set[str] = set()
    for key, (value, fit) in chip_fields(found).items():
        field, _, form = key.partition(".")
        if form:
            chip.setdefault(field, {})[form] = value
        else:
            chip[field] = f"{value} us" if field.endswith("_s") else value
        text = provenance(fit, date)
        again = form and field in fitted
        sources[field] = f"{sources[field]}; {text}" if again else text
        fitted.add(field)
        if field in {"gemm_efficiency", "attention_efficiency", "hbm_efficiency"}:
            measured.append(key)
    chip["sources"], chip["measured"] = sources, measured
    return {"name": name, "chip": chip, **_joined(found, date)}


def _joined(found: Calibration, date: str) -> dict[str, Any]:
    """Chips and tiers: the usual cluster's, with the innermost link as fitted, of as many chips as were measured."""
    fields = link_fields(found)
    if found.spec is None:
        wire, ranks = _own_tier(found, fields, date), found.about.ranks if found.about else 1
        if ranks > 1 and not fields:
            raise ValueError(
                f"{found.name}: a system of {ranks} ranks needs collectives, but too few were measured to fit them; "
                f"run search measure with more --seconds, or with --ranks 1"
            )
        return {"num_chips": ranks, "chips_per_node": ranks, "tiers": [wire]}
    names = usual_clusters(found.name)
    usual = cluster(names[0]) if names else cluster("dgx_h100")
    tiers = [_tier(tier) for tier in usual.tiers]
    if fields:
        fit = found.of("collectives ")
        assert fit is not None
        tiers[0] |= _link(fields, provenance(fit, date))
    num_chips = found.about.ranks if found.about else usual.num_chips
    return {"num_chips": num_chips, "chips_per_node": usual.chips_per_node, "tiers": tiers}


def _tier(tier: Tier) -> dict[str, Any]:
    wire = tier.link
    told: dict[str, Any] = {"name": tier.name}
    if tier.span != UNBOUNDED:
        told["span"] = tier.span
    told |= {
        "bytes_per_s": f"{wire.bytes_per_s / GB:g} GB/s", "latency_s": f"{wire.latency_s / US:g} us",
        "setup_s": f"{wire.setup_s / US:g} us", "efficiency": wire.efficiency,
        "by_collective": {c.value: share for c, share in wire.by_collective.items()}, "source": wire.source,
    }  # fmt: skip
    if wire.pair_loss:
        told["pair_loss"] = wire.pair_loss
    if tier.shape != SWITCHED:
        told["shape"] = str(tier.shape)
    return told


def _link(fields: Mapping[str, float], source: str) -> dict[str, Any]:
    known = {c.value for c in Collective}
    return {
        "latency_s": f"{fields['latency_us']} us", "setup_s": f"{fields['setup_us']} us",
        "pair_loss": fields["pair_loss"], "efficiency": fields["efficiency"],
        "by_collective": {key: value for key, value in fields.items() if key in known}, "source": source,
    }  # fmt: skip


def _own_tier(found: Calibration, fields: Mapping[str, float], date: str) -> dict[str, Any]:
    """One tier that reaches all: fitted, else memory's own bandwidth, which one chip never uses."""
    fit = found.of("collectives ")
    if fit is None:
        rate = found.chip.hbm_bytes_per_s
        return {"name": "local", "bytes_per_s": f"{rate / GB:.4g} GB/s", "latency_s": "1 us", "efficiency": 1.0,
                "source": ASSUMED}  # fmt: skip
    rate = float(fit.values["wire_bytes_per_s"])
    return {"name": "own", "bytes_per_s": f"{rate / GB:.4g} GB/s"} | _link(fields, provenance(fit, date))


def _assumed_chip(found: Calibration) -> dict[str, Any]:
    """Every field of a device of which only tables are known; what they show stands over these."""
    flops = {form: f"{rate / TFLOPS:.5g} TFLOPS" for form, rate in found.chip.flops_per_s.items()}
    slowest = min(found.chip.flops_per_s.values())
    memory = found.about.memory_bytes if found.about else ASSUMED_MEMORY_BYTES
    return {
        "vendor": found.about.hardware[:MAX_NAME] if found.about else "unstated",
        "matrix_flops_per_s": flops,
        "vector_flops_per_s": {"fp32": f"{slowest / TFLOPS:.5g} TFLOPS"},
        "num_sms": found.chip.num_sms,
        "hbm_bytes": f"{memory / GB:.5g} GB",
        "hbm_bytes_per_s": f"{found.chip.hbm_bytes_per_s / GB:.5g} GB/s",
        "tdp_w": 100, "price_usd_per_hour": 0.1, "failures_per_hour": 0.0, "launch_s": "0 us", "context_bytes": "0 GB",
        "attention_efficiency": 0.5, "hbm_efficiency": 0.88, "gemm_slowdown": 1.0, "gemm_efficiency": {},
    }  # fmt: skip


def _assumed_sources(found: Calibration, date: str) -> dict[str, str]:
    """Where the fields of `_assumed_chip` come from: what was seen, what the device said, and what is assumed."""
    sources = dict.fromkeys(set(_assumed_chip(found)) - {"vendor"}, ASSUMED)
    seen = "what the fastest {} of the tables reached ({})"
    sources["matrix_flops_per_s"] = seen.format("product", date)
    sources["hbm_bytes_per_s"] = seen.format("stream", date)
    if found.about:
        by = f"{found.about.framework} {found.about.version} on {found.about.hardware}, {date}"
        sources["hbm_bytes"] = f"memory of the machine over its {found.about.ranks} ranks: {by}"
        sources["num_sms"] = f"multiprocessors, of a CPU 1: {by}"
        sources["launch_s"] = "host time is part of every measured call"
    return {field: sources[field] for field in _assumed_chip(found) if field in sources}
