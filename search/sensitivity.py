"""What a configuration comes to where one number of its system or workload is another: links, memory, peaks, routing.

The configuration stays as it is, so that a shift tells what its prediction rests on, not what would be best there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from estimator.model import ModelSpec
from estimator.step import evaluate
from estimator.strategy import Strategy
from estimator.workload import Workload
from hardware.chip import ChipSpec
from hardware.system import SystemSpec
from results.report.run_page import Shift

__all__ = ["FACTORS", "shifts_of", "varied"]

FACTORS = (0.8, 1.2)
Work = TypeVar("Work", Workload, None)


def shifts_of(model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> list[Shift]:
    """The configuration on every changed system, and under changed routing where routing is skewed."""
    shifts = []
    for what, factor, changed, work in varied(model, system, workload):
        result = evaluate(model, strategy, changed, work)
        shifts.append(
            Shift(
                what=what, factor=factor, step_time_s=float(result.step_time_s),
                peak_memory_bytes=float(result.peak_memory_bytes), feasible=bool(result.feasible),
            )
        )  # fmt: skip
    return shifts


def varied(model: ModelSpec, system: SystemSpec, workload: Work) -> Iterator[tuple[str, float, SystemSpec, Work]]:
    """What is changed by which factor, and what the system and the workload are then; None has no routing to change."""
    for factor in FACTORS:
        for tier in system.tiers:
            yield f"link of {tier.name}", factor, _with_tier(system, tier.name, factor), workload
    for factor in FACTORS:
        yield "HBM bandwidth", factor, _with_chips(system, hbm=factor), workload
    for factor in FACTORS:
        yield "peak FLOP/s", factor, _with_chips(system, peak=factor), workload
    if model.moe is not None and workload is not None and workload.routing_skew:
        for factor in FACTORS:
            yield "routing skew", factor, system, replace(workload, routing_skew=factor * workload.routing_skew)


def _with_tier(system: SystemSpec, name: str, factor: float) -> SystemSpec:
    tiers = tuple(
        replace(tier, link=replace(tier.link, bytes_per_s=factor * tier.link.bytes_per_s))
        if tier.name == name
        else tier
        for tier in system.tiers
    )
    return replace(system, tiers=tiers, segments=tuple(_with_tier(part, name, factor) for part in system.segments))


def _with_chips(system: SystemSpec, *, hbm: float = 1.0, peak: float = 1.0) -> SystemSpec:
    return replace(
        system, chip=_scaled(system.chip, hbm, peak),
        segments=tuple(_with_chips(part, hbm=hbm, peak=peak) for part in system.segments),
    )  # fmt: skip


def _scaled(chip: ChipSpec, hbm: float, peak: float) -> ChipSpec:
    return replace(
        chip, hbm_bytes_per_s=hbm * chip.hbm_bytes_per_s,
        matrix_flops_per_s={dtype: peak * flops for dtype, flops in chip.matrix_flops_per_s.items()},
        vector_flops_per_s={dtype: peak * flops for dtype, flops in chip.vector_flops_per_s.items()},
    )  # fmt: skip
