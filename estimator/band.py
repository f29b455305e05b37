"""How far a step may come out from its estimate: P10 and P90 of its time and of its memory.

Covers what differs from step to step and from machine to machine of one kind: how far the fullest rank of experts is
above the mean under a skewed router, and how much slower than the others the slowest of all chips is. Says nothing of
how wrong the model may be, which only measured steps can tell, nor of failures and other jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from estimator.imbalance import MEDIAN, Routing
from estimator.model import ModelSpec
from estimator.result import BAND_COLUMNS, StepResult, Value
from estimator.step import evaluate, with_layout
from estimator.strategy import LayoutRule, Strategy
from estimator.tables import jitter_share
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["HIGH", "LOW", "Band", "evaluate_band", "straggler_share"]

LOW, HIGH = 0.1, 0.9

# Standard deviation of chips' speeds at the same work; assumption. Llama 3 (arXiv:2407.21783, section 3.3.4) saw 1 to 2
# percent between noon and night on 16,384 H100; Sinha 2022 (arXiv:2208.11035) 8 percent between V100s of a cluster,
# from end to end and each by itself.
CHIP_SPREAD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """P10 and P90 of a result: numbers, or `[N]` for a batch. `device_memory_p90_bytes` is what the gate compares."""

    step_time_p10_s: Value
    step_time_p90_s: Value
    peak_memory_p10_bytes: Value
    peak_memory_p90_bytes: Value
    device_memory_p90_bytes: Value

    def columns(self) -> dict[str, Value]:
        """By the names of BAND_COLUMNS."""
        return {c.name: getattr(self, c.name) for c in BAND_COLUMNS}


def straggler_share(system: SystemSpec, quantile: float) -> float:
    """Share of a step that waiting for the slowest of all chips adds, at a quantile over machines.

    The median is the estimate's own (`jitter_share`). Around it the slowest of n independent normal speeds, whose
    distribution is that of one to the power n; negative where all are faster than their kind.

    >>> from hardware.catalog import cluster
    >>> f"{straggler_share(cluster('dgx_h100', 1024), 0.9) - straggler_share(cluster('dgx_h100', 1024), 0.5):.3f}"
    '0.005'
    """
    n = system.num_chips
    if quantile == MEDIAN:
        return jitter_share(system)
    slowest, middle = (NormalDist().inv_cdf(q ** (1.0 / n)) for q in (quantile, MEDIAN))
    return jitter_share(system) + CHIP_SPREAD * (slowest - middle)


def evaluate_band(
    model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload, result: StepResult | None = None
) -> Band:
    """The band around one strategy or `[N]`; `result` where `evaluate` has answered already.

    All layers are taken at the same quantile of their load at once, and chips with them: nothing evens out, so the band
    is wide rather than narrow. Low and high are never on the wrong side of the estimate.
    """
    strategy = _settled(model, strategy, system, workload)
    middle = result or evaluate(model, strategy, system, workload)
    ends = [middle, middle]
    if Routing.of(model, workload).skew:
        ends = [evaluate(model, strategy, system, workload, quantile=q) for q in (LOW, HIGH)]
    own = 1.0 + jitter_share(system)
    step, peak, device = ("step_time_s", "peak_memory_bytes", "device_memory_bytes")
    low, high = ((1.0 + straggler_share(system, q)) / own for q in (LOW, HIGH))
    return Band(
        step_time_p10_s=_least(ends[0].columns[step] * low, middle.columns[step]),
        step_time_p90_s=_most(ends[1].columns[step] * high, middle.columns[step]),
        peak_memory_p10_bytes=_least(ends[0].columns[peak], middle.columns[peak]),
        peak_memory_p90_bytes=_most(ends[1].columns[peak], middle.columns[peak]),
        device_memory_p90_bytes=_most(ends[1].columns[device], middle.columns[device]),
    )


def _settled(model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> Strategy:
    """A layout that is a rule is that of the median: a run does not change it from step to step."""
    if strategy.layout is not LayoutRule.AUTO:
        return strategy
    if strategy.num_rows > 1:
        raise ValueError("layout auto has a layout for each row; ask for the band of one row, or give the layouts")
    return with_layout(model, strategy, system, workload)


def _least(a: Value, b: Value) -> Value:
    return np.minimum(a, b) if isinstance(b, np.ndarray) else min(a, b)


def _most(a: Value, b: Value) -> Value:
    return np.maximum(a, b) if isinstance(b, np.ndarray) else max(a, b)
