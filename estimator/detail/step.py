"""A replayed step beside its estimate: one strategy, one price model, without the shortcuts of the estimate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator.detail.unroll import unroll_estimate
from estimator.model import ModelSpec
from estimator.replay import replay
from estimator.result import StepResult
from estimator.strategy import Strategy
from estimator.tables import fixed_host_s, jitter_share
from estimator.tasks import CATEGORIES, Category
from estimator.timeline import Timeline, memory
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["ReplayedStep", "replay_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """What a replay says. `peak_memory_bytes` [p]: allocated, per pipeline rank; `estimate`: what evaluate says."""

    timeline: Timeline
    estimate: StepResult
    step_time_s: float
    pipeline_s: float
    peak_memory_bytes: tuple[float, ...]

    @property
    def error(self) -> float:
        """The estimate's error against the replay: estimated / replayed - 1."""
        return float(self.estimate.step_time_s) / self.step_time_s - 1.0

    @property
    def overfull(self) -> tuple[int, ...]:
        """Pipeline ranks that hold more than their chip has room for."""
        devices = self.timeline.tasks.devices
        return tuple(rank for rank, peak in enumerate(self.peak_memory_bytes) if peak > devices[rank].capacity_bytes)


def replay_step(
    model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload, *, max_tasks: int | None = None
) -> ReplayedStep:
    """One step in detail. ValueError where the strategy is illegal, TooLarge above `max_tasks` (None: what fits)."""
    if system.segments:
        law = "a replay runs on chips of one kind, but got a system of segments"
        raise ValueError(f"{law} ({system.told_chips}); take its estimate, or replay one cluster")
    tasks, estimate = unroll_estimate(model, strategy, system, workload, max_tasks=max_tasks)
    timeline = replay(tasks)
    after = [CATEGORIES.index(c) for c in (Category.OPTIMIZER, Category.OPTIMIZER_COMM)]
    ends = timeline.end[~np.isin(tasks.category, after)]
    busy = timeline.span_s + fixed_host_s(strategy.cuda_graph)
    return ReplayedStep(
        timeline=timeline, estimate=estimate, step_time_s=busy * (1.0 + jitter_share(system)),
        pipeline_s=float(ends.max()), peak_memory_bytes=tuple(float(x) for x in memory(timeline).peak),
    )  # fmt: skip
