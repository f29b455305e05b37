"""Refines a priced training configuration on its replayed step: fused kernels, gradient buckets, pieces of traffic.

What a space leaves at its defaults or tries on a coarse grid, the replay of one finalist decides: kernels that fuse
more or fewer operations, found by the estimate and held to the replay; how large buckets of overlapped gradients are,
by doubling and halving; into how many pieces overlapped tensor-parallel traffic is cut. Degrees, schedules and
recompute stay. What does not fit its chips is never taken, and the refined step is never slower than the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from estimator.detail.step import ReplayedStep, replay_step
from estimator.model import ModelSpec
from estimator.step import evaluate
from estimator.strategy import Chunks, Fusion, Strategy
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["Refined", "changes", "refine"]

LEAST = 1e-4  # share of a step by which a change must gain
DOUBLINGS = 3  # of buckets, in either direction
LEAST_BUCKET = 1_000_000
PIECES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """A configuration before and after, both replayed. replays: how many steps were."""

    before: Strategy
    after: Strategy
    before_s: float
    after_s: float
    replays: int

    @property
    def gain(self) -> float:
        """Share by which a step gets shorter."""
        return 1.0 - self.after_s / self.before_s


def changes(refined: Refined) -> dict[str, str]:
    """What differs, by the keys of a space, as `--set` takes them."""
    before, after = refined.before, refined.after
    found = {}
    if before.fusion != after.fusion:
        found["strategy.fusion"] = "[" + ",".join(sorted(one.value for one in after.fusion)) + "]"
    for name in ("bucket_bytes", "expert_bucket_bytes", "tp_chunks"):
        if getattr(before, name) != getattr(after, name):
            found[f"strategy.{name}"] = str(getattr(after, name))
    return found


def refine(
    model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload, *, step: ReplayedStep | None = None,
    max_tasks: int | None = None,
) -> Refined:  # fmt: skip
    """The configuration refined. ValueError where it cannot be replayed. step: its own replay, where there is one."""
    return _Refiner(model, strategy, system, workload, max_tasks).refined(step)


class _Refiner:
    def __init__(
        self, model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload, max_tasks: int | None
    ) -> None:
        self.model, self.start, self.system, self.workload = model, strategy, system, workload
        self.max_tasks, self.replays = max_tasks, 0

    def refined(self, step: ReplayedStep | None) -> Refined:
        before_s = self._replayed(self.start) if step is None else step.step_time_s
        assert before_s is not None
        best, best_s = self.start, before_s
        for knob in (self._kernels, self._buckets, self._expert_buckets, self._pieces):
            best, best_s = knob(best, best_s)
        return Refined(before=self.start, after=best, before_s=before_s, after_s=best_s, replays=self.replays)

    def _kernels(self, best: Strategy, best_s: float) -> tuple[Strategy, float]:
        """Kernels toggled one by one as long as the estimate gains; all of them are held to one replay."""
        at, at_s = best, self._estimated(best)
        if at_s is None:
            return best, best_s
        for kernel in Fusion:
            toggled = replace(at, fusion=at.fusion ^ {kernel})
            seconds = self._estimated(toggled)
            if seconds is not None and seconds < at_s * (1.0 - LEAST):
                at, at_s = toggled, seconds
        return self._if_faster(at, best, best_s)

    def _buckets(self, best: Strategy, best_s: float) -> tuple[Strategy, float]:
        if not best.overlap.dp or not best.bucket_bytes:
            return best, best_s
        return self._climbed(best, best_s, int(best.bucket_bytes), lambda s, n: replace(s, bucket_bytes=n))

    def _expert_buckets(self, best: Strategy, best_s: float) -> tuple[Strategy, float]:
        if not best.overlap.dp or self.model.moe is None or not best.bucket_bytes:
            return best, best_s
        now = best.expert_bucket_bytes or int(best.bucket_bytes)
        return self._climbed(best, best_s, now, lambda s, n: replace(s, expert_bucket_bytes=n))

    def _climbed(
        self, best: Strategy, best_s: float, now: int, change: Callable[[Strategy, int], Strategy]
    ) -> tuple[Strategy, float]:
        """Doubled as long as it gains, and where that gains nothing halved."""
        for factor in (2.0, 0.5):
            size, moved = now, False
            for _ in range(DOUBLINGS):
                size = int(size * factor)
                if size < LEAST_BUCKET:
                    break
                tried, tried_s = self._if_faster(change(best, size), best, best_s)
                if tried is best:
                    break
                best, best_s, moved = tried, tried_s, True
            if moved:
                break
        return best, best_s

    def _pieces(self, best: Strategy, best_s: float) -> tuple[Strategy, float]:
        if not best.overlap.tp or int(best.tp) == 1:
            return best, best_s
        for number in PIECES:
            best, best_s = self._if_faster(replace(best, tp_chunks=Chunks.parse(str(number))), best, best_s)
        return best, best_s

    def _if_faster(self, tried: Strategy, best: Strategy, best_s: float) -> tuple[Strategy, float]:
        if tried == best or self._estimated(tried) is None:
            return best, best_s
        seconds = self._replayed(tried)
        return (tried, seconds) if seconds is not None and seconds < best_s * (1.0 - LEAST) else (best, best_s)

    def _estimated(self, strategy: Strategy) -> float | None:
        """Seconds by the estimate; None where the strategy is illegal or does not fit."""
        try:
            result = evaluate(self.model, strategy, self.system, self.workload)
        except ValueError:
            if strategy is self.start:
                raise
            return None
        return float(result.step_time_s) if result.feasible else None

    def _replayed(self, strategy: Strategy) -> float | None:
        """Seconds by the replay; None where it does not fit by it."""
        self.replays += 1
        step = replay_step(self.model, strategy, self.system, self.workload, max_tasks=self.max_tasks)
        return None if step.overfull and strategy is not self.start else step.step_time_s
