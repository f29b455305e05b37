"""Where the time of a timeline went, by the names that people know from profilers: measured or replayed alike.

*Temporal breakdown*: each device computes, does something else while it does not compute, or idles. *Overlap*: the
share of its transfers that compute hides. *Idle time by cause*: between two computes of a device, what let the second
go. *Stragglers*: whose compute the others wait for. *Diff*: two timelines, operation name by operation name.

Reads times and blames only (estimator/timeline.py); knows neither models nor traces. Letters: D devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np

from estimator.tasks import CATEGORIES, Category
from estimator.timeline import Timeline, busy, critical_path

__all__ = [
    "Breakdown", "Cause", "Difference", "Straggler", "breakdown", "differences", "stragglers", "totals",
]  # fmt: skip

LATE = 0.05  # compute beyond the median of all devices by which one is called a straggler (an assumption)


class Cause(Enum):
    """What a device that does not compute waits for."""

    COMMUNICATION = "communication"  # a transfer let the next compute go
    COMPUTE = "compute elsewhere"  # compute of another stream or device did
    HOST = "host"  # nothing was left to wait for but the launch
    BEGIN = "begin"  # the device had not begun, or nothing explains it
    END = "end"  # its last compute is done


CAUSES = tuple(Cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """[D] seconds each: compute + non_compute + idle = span. overlap: transfers under compute; communication: all.

    idle_by [causes, D]: the time in which a device does not compute, by cause. A cause may be a transfer that runs, so
    they sum to non_compute + idle.
    """

    span_s: float
    compute_s: np.ndarray
    non_compute_s: np.ndarray
    idle_s: np.ndarray
    communication_s: np.ndarray
    overlap_s: np.ndarray
    waits_s: dict[Cause, np.ndarray]

    @property
    def overlap_share(self) -> np.ndarray:
        """[D] share of transfers that compute hides; 0 where there are none."""
        return np.divide(
            self.overlap_s, self.communication_s, out=np.zeros_like(self.overlap_s), where=self.communication_s > 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A device: its seconds of compute, those beyond the median device, and its seconds on the critical path."""

    device: int
    compute_s: float
    beyond_s: float
    critical_s: float
    late: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One operation name in two timelines: how often it runs and for how long, of a device on average."""

    name: str
    category: str
    count_a: float
    count_b: float
    seconds_a: float
    seconds_b: float

    @property
    def seconds(self) -> float:
        """What B takes more than A."""
        return self.seconds_b - self.seconds_a


def breakdown(timeline: Timeline) -> Breakdown:
    """Seconds of each device by what it did and by what it waited for."""
    told = busy(timeline)
    num = len(timeline.tasks.devices)
    waits = {cause: np.zeros(num) for cause in CAUSES}
    for device, cause, seconds in _waits(timeline):
        waits[cause][device] += seconds
    return Breakdown(
        span_s=timeline.span_s, compute_s=told.compute, non_compute_s=told.communication - told.overlap,
        idle_s=told.idle, communication_s=told.communication, overlap_s=told.overlap, waits_s=waits,
    )  # fmt: skip


def _waits(timeline: Timeline) -> Iterator[tuple[int, Cause, float]]:
    """(device, cause, seconds) of each stretch of time in which a device computes nothing."""
    tasks, host = timeline.tasks, CATEGORIES.index(Category.HOST)
    computes = np.array([stream.computes for stream in tasks.streams], dtype=np.bool_)
    ran = np.flatnonzero(timeline.end > timeline.start)
    ran = ran[computes[tasks.stream[ran]]] if len(ran) else ran
    order = ran[np.lexsort((timeline.start[ran], tasks.device[ran]))].tolist()
    start, end, blame = timeline.start.tolist(), timeline.end.tolist(), timeline.blame.tolist()
    category, stream, device = tasks.category.tolist(), tasks.stream.tolist(), tasks.device.tolist()
    is_host = [kind == host for kind in category]
    last: dict[int, float] = {}
    for i in order:
        until = last.get(device[i], 0.0)
        last[device[i]] = max(until, end[i])
        if start[i] <= until:
            continue
        before, let_go = blame[i], start[i]
        # Behind launches and operations of no length: the one that took time.
        while before >= 0 and (is_host[before] or end[before] <= start[before]):
            let_go = min(let_go, start[before])
            before = blame[before]
        let_go = max(until, min(let_go, end[before] if before >= 0 else let_go))
        if start[i] > let_go:
            yield device[i], Cause.HOST, start[i] - let_go
        if let_go > until:
            cause = Cause.BEGIN if before < 0 else Cause.COMPUTE if computes[stream[before]] else Cause.COMMUNICATION
            yield device[i], cause, let_go - until
    for d in range(len(tasks.devices)):
        yield d, Cause.END, timeline.span_s - last.get(d, 0.0)


def stragglers(timeline: Timeline) -> list[Straggler]:
    """Every device, those first whose compute the critical path runs through most."""
    tasks, compute = timeline.tasks, busy(timeline).compute
    path = critical_path(timeline).tasks
    computes = np.array([stream.computes for stream in tasks.streams], dtype=np.bool_)
    own = path[computes[tasks.stream[path]]] if len(path) else path
    critical = np.bincount(
        tasks.device[own], weights=timeline.end[own] - timeline.start[own], minlength=len(tasks.devices)
    )
    usual = float(np.median(compute)) if len(compute) else 0.0
    found = [
        Straggler(
            device=d, compute_s=float(compute[d]), beyond_s=float(compute[d] - usual), critical_s=float(critical[d]),
            late=bool(compute[d] > (1.0 + LATE) * usual),
        )
        for d in range(len(tasks.devices))
    ]  # fmt: skip
    return sorted(found, key=lambda one: (-one.critical_s, -one.compute_s, one.device))


def totals(timeline: Timeline) -> dict[tuple[str, str], tuple[float, float]]:
    """Count and seconds of each (name, category) that took time, of a device on average."""
    tasks = timeline.tasks
    ran = np.flatnonzero(timeline.end > timeline.start)
    key = tasks.name[ran] * len(CATEGORIES) + tasks.category[ran]
    keys, which = np.unique(key, return_inverse=True)
    seconds = np.bincount(which, weights=timeline.end[ran] - timeline.start[ran], minlength=len(keys))
    counts, found = np.bincount(which, minlength=len(keys)), dict[tuple[str, str], tuple[float, float]]()
    num = max(len(tasks.devices), 1)
    for k, count, total in zip(keys.tolist(), counts.tolist(), seconds.tolist(), strict=True):
        name = tasks.names[k // len(CATEGORIES)], CATEGORIES[k % len(CATEGORIES)].value
        before = found.get(name, (0.0, 0.0))
        found[name] = before[0] + count / num, before[1] + total / num
    return found


def differences(a: Timeline, b: Timeline) -> list[Difference]:
    """Every operation name of two timelines, those first whose seconds differ most."""
    left, right = totals(a), totals(b)
    found = [
        Difference(
            name=name, category=category, count_a=left.get((name, category), (0.0, 0.0))[0],
            count_b=right.get((name, category), (0.0, 0.0))[0], seconds_a=left.get((name, category), (0.0, 0.0))[1],
            seconds_b=right.get((name, category), (0.0, 0.0))[1],
        )
        for name, category in dict.fromkeys([*left, *right])
    ]  # fmt: skip
    return sorted(found, key=lambda one: (-abs(one.seconds), one.name))
