"""Capacity planning: what a training run of so many tokens takes at each point of a front.

Steps run back to back: failures, checkpoints and restarts (goodput) are not part of this plan.
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
    """What each point takes, `[N]` each."""

    num_steps: Floats
    days: Floats
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


def training_days(steps: ArrayLike, step_time_s: ArrayLike) -> Floats:
    """Steps * step_time_s / 86400."""
    return _floats(steps) * _floats(step_time_s) / DAY


def gpu_hours(days: ArrayLike, num_gpus: ArrayLike) -> Floats:
    """Days * 24 * num_gpus."""
    return _floats(days) * (DAY / HOUR) * _floats(num_gpus)


def cost_usd(hours: ArrayLike, price_usd_per_gpu_hour: ArrayLike) -> Floats:
    """GPU-hours * price_usd_per_gpu_hour."""
    return _floats(hours) * _floats(price_usd_per_gpu_hour)


def energy_kwh(steps: ArrayLike, tokens_per_step: ArrayLike, energy_j_per_token: ArrayLike) -> Floats:
    """Steps * tokens_per_step * energy_j_per_token / 3.6e6. What counts is what energy_j_per_token counts."""
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
) -> Plan:
    """The plan of `[N]` points; scalars count for all of them."""
    if not (np.isfinite(tokens) and tokens > 0):
        raise ValueError(f"tokens must be a positive number, but got {tokens}; write 15 trillion as 15e12")
    steps = np.broadcast_to(num_steps(tokens, tokens_per_step), np.shape(step_time_s)).astype(np.float64)
    days = training_days(steps, step_time_s)
    hours = gpu_hours(days, num_gpus)
    return Plan(
        num_steps=steps,
        days=days,
        gpu_hours=hours,
        cost_usd=cost_usd(hours, price_usd_per_gpu_hour),
        energy_kwh=energy_kwh(steps, tokens_per_step, energy_j_per_token),
        co2_kg=co2_kg(steps, tokens_per_step, co2_kg_per_mtoken),
    )


def plan_front(table: Table, tokens: float) -> Plan:
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
