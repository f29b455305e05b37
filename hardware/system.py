"""States a cluster: chips joined by tiers of links. Says which tiers a rank group spans; prices nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hardware._errors import reject
from hardware.chip import ChipSpec
from hardware.dtype import DType
from hardware.link import Collective, LinkSpec
from hardware.site import JOULES_PER_KWH, LARGEST, Site
from hardware.software import SoftwareSpec
from hardware.topology import SWITCHED, Shape, Topology
from hardware.units import HOUR

__all__ = ["UNBOUNDED", "SystemSpec", "Tier"]

UNBOUNDED = 2**40
"""Span of a tier that reaches every chip however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A level of the network: every `span` consecutive chips share one domain of it, joined as `shape` says."""

    name: str
    span: int
    link: LinkSpec
    shape: Shape = SWITCHED

    def __post_init__(self) -> None:
        if self.span < 1:
            reject(f"tier {self.name}: span must be at least 1", self.span, "give the chips of one domain")


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSpec:
    """`num_chips` equal chips, joined by `tiers` from the inside out; ranks are numbered along them.

    Attributes:
        headroom: share of memory that a plan leaves free.
        price_usd_per_hour: of one chip, where it differs from the chip's; the same for `failures_per_hour`.
        site: hosts, network, building and grid, which power and CO2 count.
        segments: clusters of different chips that share one pipeline, in its order (hardware/mixed.py); `chip` is then
            the roomiest, and tiers join the segments. Empty: one cluster of equal chips.
        assumptions: what was assumed to build the description.
        software: the generation of frameworks that runs on it (hardware/software.py); None: what the chip allows.
    """

    name: str
    chip: ChipSpec
    num_chips: int
    tiers: tuple[Tier, ...]
    chips_per_node: int
    headroom: float = 0.04
    price_usd_per_hour: float | None = None
    failures_per_hour: float | None = None
    site: Site = Site()
    assumptions: tuple[str, ...] = ()
    segments: tuple[SystemSpec, ...] = ()
    software: SoftwareSpec | None = None

    def __post_init__(self) -> None:
        for name in ("num_chips", "chips_per_node"):
            if getattr(self, name) < 1:
                reject(f"{self.name}: {name} must be at least 1", getattr(self, name), "count chips")
        if not 0 <= self.headroom < 1:
            reject(f"{self.name}: headroom must be in [0, 1)", self.headroom, "give the share to leave free")
        for name in ("price_usd_per_hour", "failures_per_hour"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= LARGEST:  # false for what is no number
                reject(
                    f"{self.name}: {name} must be at least 0 and at most {LARGEST:g}",
                    value,
                    "give it per chip and hour",
                )
        if self.segments and sum(segment.num_chips for segment in self.segments) != self.num_chips:
            counts = [segment.num_chips for segment in self.segments]
            reject(f"{self.name}: segments must add up to num_chips ({self.num_chips})", counts, "count all chips")
        self._check_tiers()

    def _check_tiers(self) -> None:
        if not self.tiers:
            reject(f"{self.name}: a system has at least one tier", "none", "describe how chips are joined")
        spans = [tier.span for tier in self.tiers]
        for inner, outer in zip(spans, spans[1:], strict=False):
            if inner >= outer:
                reject(f"{self.name}: tier spans must increase from the inside out", spans, "sort the tiers")
            # An unbounded tier simply counts chips; a last domain may then be partly filled.
            if outer < UNBOUNDED and outer % inner:
                law = f"{self.name}: each tier's span must divide the next ({inner} | {outer})"
                reject(law, spans, f"use a multiple of {inner}")
        if spans[-1] < self.num_chips:
            law = f"{self.name}: the last tier must reach all {self.num_chips} chips"
            reject(law, f"a span of {spans[-1]}", "widen it, or add a scale-out tier without a span")

    @property
    def num_tiers(self) -> int:
        """How many tiers there are."""
        return len(self.tiers)

    @property
    def num_nodes(self) -> int:
        """Hosts, the last of which may be partly used."""
        return -(-self.num_chips // self.chips_per_node)

    @property
    def parts(self) -> tuple[SystemSpec, ...]:
        """The clusters of equal chips that it is made of: its segments, or itself."""
        return self.segments or (self,)

    @property
    def told_chips(self) -> str:
        """How many of which chips, for people."""
        return " + ".join(f"{part.num_chips} x {part.chip.name}" for part in self.parts)

    def peak(self, dtype: DType) -> float:
        """Dense FLOP/s of a matrix engine, the mean over chips; NaN where one lacks the format."""
        if not self.segments:
            return self.chip.matrix_flops_per_s.get(dtype, math.nan)
        return sum(s.num_chips * s.peak(dtype) for s in self.segments) / self.num_chips

    @property
    def half_peak(self) -> float:
        """`peak` of bf16, else of fp16."""
        bf16 = self.peak(DType.BF16)
        return self.peak(DType.FP16) if math.isnan(bf16) else bf16

    @property
    def price_usd_per_s(self) -> float:
        """Price of the whole system per second: its chips by the hour, and electricity where that is paid apart."""
        if self.segments:
            return sum(segment.price_usd_per_s for segment in self.segments)
        own = self.price_usd_per_hour
        rent = self.num_chips * (self.chip.price_usd_per_hour if own is None else own) / HOUR
        return rent + self.power_w * self.site.electricity_usd_per_kwh / JOULES_PER_KWH

    @property
    def failures_per_s(self) -> float:
        """Interruptions of a job on the whole system per second."""
        if self.segments:
            return sum(segment.failures_per_s for segment in self.segments)
        own = self.failures_per_hour
        return self.num_chips * (self.chip.failures_per_hour if own is None else own) / HOUR

    @property
    def power_w(self) -> float:
        """Power that the system draws from the grid: chips, hosts and network at their rated power, times PUE.

        An upper bound: chips that wait for each other draw less.
        """
        if self.segments:
            return sum(segment.power_w for segment in self.segments)
        return self.num_chips * self.site.power_w(self.chip.tdp_w)

    @property
    def co2_kg_per_s(self) -> float:
        """CO2 equivalent of that power per second. Ignores what it took to make the system."""
        if self.segments:
            return sum(segment.co2_kg_per_s for segment in self.segments)
        return self.power_w * self.site.grid_kg_co2_per_kwh / JOULES_PER_KWH

    @property
    def usable_hbm_bytes(self) -> float:
        """Memory of one chip that a plan may fill."""
        return self.chip.hbm_bytes * (1.0 - self.headroom)

    def with_chips(self, num_chips: int) -> SystemSpec:
        """The same cluster with another number of chips; segments grow and shrink alike."""
        sizes = [segment.num_chips * num_chips for segment in self.segments]
        if any(size % self.num_chips for size in sizes):
            law = f"{self.name}: segments of {[s.num_chips for s in self.segments]} chips grow and shrink alike"
            reject(law, f"{num_chips} chips", f"use a multiple of {self.num_chips}")
        grown = [s.with_chips(n // self.num_chips) for s, n in zip(self.segments, sizes, strict=True)]
        return replace(self, num_chips=num_chips, segments=tuple(grown))

    def running(self, software: SoftwareSpec) -> SystemSpec:
        """The same system with a generation of software on all its chips."""
        chip, share = self.chip, software.attention_of(self.chip.name)
        if share is not None:
            told = f"software {software.name}: {software.sources.get('attention_share', 'given')}"
            sources = {**chip.sources, "attention_efficiency": told}
            chip = replace(chip, attention_efficiency=share, step_attention=1.0, sources=sources)  # seen in steps
        parts = tuple(segment.running(software) for segment in self.segments)
        return replace(self, chip=chip, software=software, segments=parts)

    def members(self, size: ArrayLike, stride: ArrayLike) -> NDArray[np.float64]:
        """How many members of a rank group share one domain of each tier.

        The group holds `size` ranks, `stride` apart. With n = size, s = stride and a domain of S chips, a domain that
        the group covers holds S // s members; exact where s divides S and n·s divides S or is a multiple of it,
        otherwise what every domain inside the group's range holds at least.

        Returns: [..., num_tiers], with the broadcast shape of size and stride in front; the last tier holds all.
        """
        n, s = np.broadcast_arrays(np.asarray(size, dtype=np.float64), np.asarray(stride, dtype=np.float64))
        if np.any(n < 1) or np.any(s < 1):
            reject("a rank group has size and stride of at least 1", f"{size!r} and {stride!r}", "count ranks")
        spans = np.array([tier.span for tier in self.tiers], dtype=np.float64)
        # s >= S leaves S // s at 0 or 1, so the maximum covers the case of one member a domain.
        held: NDArray[np.float64] = np.minimum(n[..., None], np.maximum(1.0, spans // s[..., None]))
        held[..., -1] = n
        return held

    def reach(self, t: int, members: ArrayLike, collective: Collective) -> NDArray[np.float64] | float:
        """Share of a chip's links of tier t that a group uses, of which so many members are joined by that tier.

        Members that a tier further in joins count as one; 1.0 where the tier is switched.
        """
        tier = self.tiers[t]
        if tier.shape.topology is Topology.SWITCH:
            return 1.0
        units = min(tier.span, self.num_chips) / (self.tiers[t - 1].span if t else 1)
        return tier.shape.reach(np.asarray(members, dtype=np.float64), units, collective)

    def tier_of(self, size: ArrayLike, stride: ArrayLike) -> NDArray[np.intp]:
        """Index of the innermost tier of which one domain holds the whole group; shape as size and stride broadcast."""
        held = self.members(size, stride)
        index: NDArray[np.intp] = np.argmax(held >= held[..., -1:], axis=-1)
        return index
