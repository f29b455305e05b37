"""Reads catalog/sites.yaml: the usual site of a chip's cluster, and grids by name."""

from __future__ import annotations

from typing import Any

from hardware._errors import reject_unknown
from hardware._library import host_power, read, source_text
from hardware.link import LinkSpec
from hardware.site import Site
from hardware.units import GBIT, UNITS

__all__ = ["grid", "grid_names", "usual_site"]


def grid_names() -> tuple[str, ...]:
    """The names of known grids, in catalogue order."""
    return tuple(read("sites")["grids"])


def grid(name: str) -> tuple[float, str]:
    """Kilograms of CO2 equivalent per kWh of the grid of that name, and the source."""
    grids = read("sites")["grids"]
    key = str(name).strip().lower()
    if key not in grids:
        reject_unknown("grid", name, grids)
    entry = grids[key]
    return entry["value"] * UNITS[entry["unit"]], f"{key}: {source_text('sites', entry['source'])}"


def usual_site(base: str | None, chip_w: float, network: LinkSpec) -> Site:
    """The site of a cluster of the chip named `base` (None: of a chip that is not in the catalogue), by its network."""
    host, host_source = host_power(base) if base else _default("host_share", chip_w)
    switches, network_source = _default("network_w_per_gbit", network.bytes_per_s / GBIT)
    pue, pue_source = _default("pue")
    co2, grid_source = grid(read("sites")["defaults"]["grid"])
    return Site(
        host_w_per_chip=host, network_w_per_chip=switches, pue=pue, grid_kg_co2_per_kwh=co2,
        sources={"host_w_per_chip": host_source, "network_w_per_chip": network_source, "pue": pue_source,
                 "grid_kg_co2_per_kwh": grid_source},
    )  # fmt: skip


def _default(name: str, times: float = 1.0) -> tuple[float, str]:
    entry: dict[str, Any] = read("sites")["defaults"][name]
    return entry["value"] * times, source_text("sites", entry["source"])
