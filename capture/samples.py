"""One measured time: the median of repeats, and whether to trust it. Knows neither torch nor operators.

A sample is trusted where its repeats agree and other processes left the machine alone meanwhile; else it is taken
again, once these are quiet or patience is at its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

__all__ = [
    "LEAST_S",
    "MOST_OTHERS",
    "MOST_SPREAD",
    "REPEATS",
    "Load",
    "Sample",
    "Patience",
    "others_share",
    "sampled",
    "watch",
]

REPEATS = 5
LEAST_S = 0.02  # of a repeat: thousands of ticks of any clock, and two of the jiffies that tell who computed
TRIES = 2
MOST_OTHERS = 0.1  # of the machine's cores that others may have used; an assumption: medians stand a tenth
MOST_SPREAD = 0.2  # of the middle half of repeats around their median; an assumption
PATIENCE_S = 4.0  # for which a sample waits for others to end, at most; an assumption
GLANCE_S = 0.2  # 20 jiffies a core
PROC_STAT = "/proc/stat"
IDLE = (3, 4)  # idle and iowait of its columns: proc(5)
GUESTS = 8  # columns before those that are counted within others


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Seconds of cores since the machine started: of all processes, and of this one; None where nobody tells."""

    busy_s: float
    own_s: float
    total_s: float

    @classmethod
    def now(cls, ranks: int = 1) -> Load | None:
        """What the kernel has counted. `ranks` processes like this one are no others."""
        try:
            with open(PROC_STAT, encoding="ascii") as file:
                jiffies = [int(word) for word in file.readline().split()[1 : 1 + GUESTS]]
        except (OSError, ValueError):
            return None
        tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        times = os.times()
        total, idle = sum(jiffies) * tick_s, sum(jiffies[i] for i in IDLE) * tick_s
        return cls(busy_s=total - idle, own_s=ranks * (times.user + times.system), total_s=total)


def watch(kind: str, ranks: int) -> Callable[[], Load | None]:
    """What tells of others beside `ranks` processes on a kind of device. A GPU does not mind what its host does."""
    return partial(Load.now, ranks) if kind == "cpu" else _nobody_tells


def _nobody_tells() -> None:
    return None


def others_share(before: Load | None, after: Load | None) -> float:
    """Which share of the machine's cores other processes used in between; 0 where nobody tells.

    >>> others_share(Load(busy_s=0, own_s=0, total_s=0), Load(busy_s=3, own_s=2, total_s=4))
    0.25
    """
    if before is None or after is None or after.total_s <= before.total_s:
        return 0.0
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(others, 0.0) / (after.total_s - before.total_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Seconds of one call: the median of repeats; `spread` is the middle half of them over that."""

    seconds: float
    spread: float
    others: float

    @property
    def trusted(self) -> bool:
        """Whether repeats agree and others were quiet."""
        return self.spread <= MOST_SPREAD and self.others <= MOST_OTHERS


@dataclass(slots=True, kw_only=True)
class Patience:
    """Seconds that are left for waiting until others leave the machine alone."""

    left_s: float
    load: Callable[[], Load | None] = Load.now
    sleep: Callable[[float], None] = time.sleep

    def wait(self) -> None:
        """Until others are quiet, four seconds at most, and none once patience is at its end."""
        for _ in range(int(min(PATIENCE_S, self.left_s) / GLANCE_S)):
            before = self.load()
            self.sleep(GLANCE_S)
            self.left_s -= GLANCE_S
            if others_share(before, self.load()) <= MOST_OTHERS:
                return


def sampled(
    run: Callable[[], object], clock: Callable[[Callable[[], object], int], float], patience: Patience, *,
    agree: Callable[[int], int] = int, least_s: float = LEAST_S,
) -> Sample:  # fmt: skip
    """Times `run`, and once more where that cannot be trusted: the better of the two.

    `agree` makes several ranks do the same: it gives every rank the first one's number.
    """
    clock(run, 1)  # caches, pages, compiled kernels
    calls = max(1, agree(int(least_s / max(clock(run, 1), 1e-9)) + 1))
    best: Sample | None = None
    for _ in range(TRIES):
        before = patience.load()
        repeats = np.array([clock(run, calls) / calls for _ in range(REPEATS)])
        low, middle, high = np.quantile(repeats, (0.25, 0.5, 0.75))
        sample = Sample(
            seconds=float(middle), spread=float((high - low) / middle), others=others_share(before, patience.load())
        )
        if best is None or (sample.others, sample.spread) < (best.others, best.spread) or sample.trusted:
            best = sample
        if agree(int(best.trusted)):
            break
        if best.others > MOST_OTHERS:
            patience.wait()
    assert best is not None
    return best
