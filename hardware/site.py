"""States where a cluster stands: power beside the chips, what a building adds, and the grid that feeds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hardware._errors import reject

__all__ = ["JOULES_PER_KWH", "LARGEST", "Site"]

JOULES_PER_KWH = 3.6e6

LARGEST = 1e9
"""Assumption: no chip draws more watts, costs more an hour or fails more often. Sums over any cluster stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a chip's watt turns into. Made without arguments it counts the chips alone, on a grid that is unknown.

    Attributes:
        host_w_per_chip: a chip's share of its node's rated power: CPUs, memory, fans, NICs, switches inside the node.
        network_w_per_chip: its share of switches and transceivers between nodes.
        pue: power of the building over power of what computes in it.
        grid_kg_co2_per_kwh: CO2 equivalent of a kilowatt-hour; 0: unknown.
        electricity_usd_per_kwh: what is paid beside the chip's hourly price, which usually includes electricity.
        sources: where each field comes from, with its date.
    """

    host_w_per_chip: float = 0.0
    network_w_per_chip: float = 0.0
    pue: float = 1.0
    grid_kg_co2_per_kwh: float = 0.0
    electricity_usd_per_kwh: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("host_w_per_chip", "network_w_per_chip", "grid_kg_co2_per_kwh", "electricity_usd_per_kwh"):
            value = getattr(self, name)
            if not 0 <= value <= LARGEST:  # false for what is no number
                reject(
                    f"{name} must be at least 0 and at most {LARGEST:g}",
                    value,
                    "give watts per chip, kg and USD per kWh",
                )
        if not 1 <= self.pue <= LARGEST:
            reject(
                f"pue must be at least 1 and at most {LARGEST:g}",
                self.pue,
                "give power of the building / power of its computers",
            )

    def power_w(self, chip_w: float) -> float:
        """Power drawn from the grid for one chip of `chip_w` watts.

        >>> Site(host_w_per_chip=500, network_w_per_chip=100, pue=1.25).power_w(400)
        1250.0
        """
        return (chip_w + self.host_w_per_chip + self.network_w_per_chip) * self.pue
