"""Capacity planning: what a training run of so many tokens takes at each point of a front.

Wall time is that of the steps over the share of time that goes into steps that count (results/goodput.py); without
goodput steps run back to back. Chips that wait as spares are paid for; what they draw while they wait is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hardware.site import JOULES_PER_KWH
from hardware.units import DAY, HOUR
from results.table import Table

__all__ = [
    "Plan",
    "co2_kg",
    "cost_usd",
    "energy_kwh",
    "gpu_hours",
    "num_steps",
    "plan",
    "plan_front",
    "training_days",
    "within",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What each point takes, `[N]` each. GPU-hours and cost are of spare chips too."""

    num_steps: Floats
    goodput: Floats
    days: Floats
    spare_gpus: Floats
    gpu_hours: Floats
    cost_usd: Floats
    energy_kwh: Floats
    co2_kg: Floats


def num_steps(tokens: ArrayLike, tokens_per_step: ArrayLike) -> Floats:
    """ceil(tokens / tokens_per_step): the last step is a whole one.

    >>> float(num_steps(1001, 100))
    11.0
    """
    return np.ceil(_floats(tokens) / _floats(tokens_per_step))


def training_days(steps: ArrayLike, step_time_s: ArrayLike, goodput: ArrayLike = 1.0) -> Floats:
    """Steps * step_time_s / goodput / 86400; forever where nothing gets through."""
    with np.errstate(divide="ignore"):
        return _floats(steps) * _floats(step_time_s) / _floats(goodput) / DAY


def gpu_hours(days: ArrayLike, num_gpus: ArrayLike) -> Floats:
    """Days * 24 * num_gpus."""
    return _floats(days) * (DAY / HOUR) * _floats(num_gpus)


def cost_usd(hours: ArrayLike, price_usd_per_gpu_hour: ArrayLike) -> Floats:
    """GPU-hours * price_usd_per_gpu_hour."""
    return _floats(hours) * _floats(price_usd_per_gpu_hour)


def energy_kwh(steps: ArrayLike, tokens_per_step: ArrayLike, energy_j_per_token: ArrayLike) -> Floats:
    """Steps * tokens_per_step * energy_j_per_token / 3.6e6. What counts is what energy_j_per_token counts.

    Chips that wait for a restart draw their rated power as well: `plan` divides by the goodput.
    """
    return _floats(steps) * _floats(tokens_per_step) * _floats(energy_j_per_token) / JOULES_PER_KWH


def co2_kg(steps: ArrayLike, tokens_per_step: ArrayLike, co2_kg_per_mtoken: ArrayLike) -> Floats:
    """Steps * tokens_per_step * co2_kg_per_mtoken / 1e6."""
    return _floats(steps) * _floats(tokens_per_step) * _floats(co2_kg_per_mtoken) / 1e6


def plan(
    *,
    tokens: float,
    tokens_per_step: ArrayLike,
    step_time_s: ArrayLike,
    num_gpus: ArrayLike,
    price_usd_per_gpu_hour: ArrayLike,
    energy_j_per_token: ArrayLike,
    co2_kg_per_mtoken: ArrayLike,
    goodput: ArrayLike = 1.0,
    spare_gpus: ArrayLike = 0.0,
) -> Plan:
    """The plan of `[N]` points; scalars count for all of them."""
    if not (np.isfinite(tokens) and tokens > 0):
        raise ValueError(f"tokens must be a positive number, but got {tokens}; write 15 trillion as 15e12")

    def each(values: ArrayLike) -> Floats:
        return np.broadcast_to(_floats(values), np.shape(step_time_s)).astype(np.float64)

    steps, share, spares = each(num_steps(tokens, tokens_per_step)), each(goodput), each(spare_gpus)
    days = training_days(steps, step_time_s, share)
    hours = gpu_hours(days, _floats(num_gpus) + spares)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Plan(
            num_steps=steps,
            goodput=share,
            days=days,
            spare_gpus=spares,
            gpu_hours=hours,
            cost_usd=cost_usd(hours, price_usd_per_gpu_hour),
            energy_kwh=energy_kwh(steps, tokens_per_step, energy_j_per_token) / share,
            co2_kg=co2_kg(steps, tokens_per_step, co2_kg_per_mtoken) / share,
        )


def plan_front(table: Table, tokens: float, *, goodput: ArrayLike = 1.0, spare_gpus: ArrayLike = 0.0) -> Plan:
    """The plan of every row of a front.

    tokens_per_step = tokens_per_s * step_time_s, a whole number; the price follows from the front's own cost:
    price = cost_usd_per_mtoken * tokens_per_s * 3600 / (1e6 * num_gpus).
    """
    price = table["cost_usd_per_mtoken"] * table["tokens_per_s"] * HOUR / (1e6 * table["num_gpus"])
    return plan(
        tokens=tokens,
        tokens_per_step=np.rint(table["tokens_per_s"] * table["step_time_s"]),
        step_time_s=table["step_time_s"],
        num_gpus=table["num_gpus"],
        price_usd_per_gpu_hour=price,
        energy_j_per_token=table["energy_j_per_token"],
        co2_kg_per_mtoken=table["co2_kg_per_mtoken"],
        goodput=goodput,
        spare_gpus=spare_gpus,
    )


def within(points: Plan, *, days: float | None = None, budget_usd: float | None = None) -> NDArray[np.bool_]:
    """Which points end in time and in budget, `[N]`; None is no limit."""
    for name, limit in (("days", days), ("budget", budget_usd)):
        if limit is not None and not limit > 0:
            raise ValueError(f"{name} must be a positive number, but got {limit}")
    in_time = points.days <= (np.inf if days is None else days)
    in_budget = points.cost_usd <= (np.inf if budget_usd is None else budget_usd)
    return np.asarray(in_time & in_budget)


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)
