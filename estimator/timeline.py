"""What a replay came to, and what it says: the critical path, exposed transfers, busy seconds, memory over time.

Everything is measured off the times alone, so a replayed step and a recorded trace are read alike. Letters as in
tasks.py: N tasks, D devices. A *transfer* is a task beside compute that is not the host's own. Tasks that did not run
(partial replay) count nowhere. Seconds and bytes are those of one rank of a device, not times `num_ranks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum

import numpy as np

from estimator.tasks import CATEGORIES, SHIELDS, Category, Shield, Tasks

__all__ = [
    "CONTENTION", "IDLE", "Busy", "CriticalPath", "Exposed", "MemoryCurve", "Timeline",
    "busy", "critical_path", "exposed", "memory",
]  # fmt: skip

CONTENTION = "contention"
IDLE = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each task ran. start, end [N]: seconds from 0, NaN where it did not run.

    blame [N]: the task whose end let it start, a predecessor or the one before it on its stream; -1 where nothing did.
    host_s [N]: seconds it waited for its launch alone, its inputs there and its stream free.
    """

    tasks: Tasks
    start: np.ndarray
    end: np.ndarray
    blame: np.ndarray
    host_s: np.ndarray

    @property
    def span_s(self) -> float:
        """The last end; the clock starts at 0."""
        return float(np.fmax.reduce(self.end, initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The chain of blame that ends last. tasks [K] in order of time; seconds by category sum to the span.

    Keys of `seconds`: the values of the categories that occur; "host" (host tasks, and waiting for a launch);
    "contention" (what links and compute that are shared add to a task's own seconds); "idle" (a wait nobody caused).
    """

    tasks: np.ndarray
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """Transfers by category and shield, each [D] seconds: `seconds` while the device computed nothing, `total` in all.

    Transfers at the same time share an instant in equal parts, so the sum over `seconds` is the time in which a device
    had transfers and no compute; `total` counts each in full.
    """

    seconds: dict[tuple[Category, Shield], np.ndarray]
    total: dict[tuple[Category, Shield], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """[D] seconds in which a device computes, has a transfer, both (`overlap`), or neither of them (`idle`)."""

    compute: np.ndarray
    communication: np.ndarray
    overlap: np.ndarray
    idle: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Bytes held per device, a step function: `bytes[d][k]` from `times[d][k]` on. times[d][0] is 0.

    What happens in one instant counts together: what is freed where something starts is room for it. peak, when,
    capacity [D]: the most bytes, the first second at which they are held, what may be held.
    """

    times: tuple[np.ndarray, ...]
    bytes: tuple[np.ndarray, ...]
    peak: np.ndarray
    when: np.ndarray
    capacity: np.ndarray


def critical_path(timeline: Timeline) -> CriticalPath:
    """Who is to blame for the span: from the last task to end (ties: lowest index) back along `blame`.

    A task's own seconds go to its category and what it ran beyond them to contention; a gap between its start and the
    end of its blame goes to the host as far as it waited for its launch, and else to idle.
    """
    tasks, start, end = timeline.tasks, timeline.start, timeline.end
    path: list[int] = []
    if np.isfinite(end).any():
        blame, at = timeline.blame.tolist(), int(np.nanargmax(end))
        while at >= 0:
            path.append(at)
            at = blame[at]
    chain = np.array(path[::-1], dtype=np.int64)
    begin, stop, own = start[chain], end[chain], tasks.seconds[chain]
    whole = stop - begin
    own = np.where(begin + own == stop, whole, np.minimum(own, whole))  # what rounding adds is no contention
    gap = begin - np.concatenate([np.zeros(min(1, len(chain))), stop[:-1]])
    host = np.minimum(timeline.host_s[chain], gap)
    seconds = {
        category.value: fsum(own[tasks.category[chain] == code])
        for code, category in enumerate(CATEGORIES)
        if (tasks.category[chain] == code).any()
    }
    waits = ((Category.HOST.value, host), (CONTENTION, whole - own), (IDLE, gap - host))
    for key, parts in waits:
        seconds[key] = seconds.get(key, 0.0) + fsum(parts)
    return CriticalPath(tasks=chain, seconds=seconds)


def exposed(timeline: Timeline) -> Exposed:
    """How much of each kind of transfer no compute of its device hides: [D] seconds by (category, shield)."""
    tasks, sweep = timeline.tasks, _Sweep.of(timeline)
    num_devices, num_shields = len(tasks.devices), len(SHIELDS)
    alone = (sweep.computing == 0) & (sweep.sending > 0)
    ticks = np.where(alone, sweep.lasts / np.maximum(sweep.sending, 1), 0.0)
    passed = np.concatenate([[0.0], np.cumsum(ticks)])
    chosen = sweep.transfer
    ran = sweep.tasks[chosen]
    bare = passed[sweep.close[chosen]] - passed[sweep.open[chosen]]
    kind = (tasks.category[ran] * num_shields + tasks.shield[ran]) * num_devices + tasks.device[ran]
    shape = (len(CATEGORIES), num_shields, num_devices)
    room = len(CATEGORIES) * num_shields * num_devices
    seconds = np.bincount(kind, weights=bare, minlength=room).reshape(shape)
    total = np.bincount(kind, weights=timeline.end[ran] - timeline.start[ran], minlength=room).reshape(shape)
    keys = [(int(c), int(s)) for c, s in np.argwhere(total.any(axis=2))]
    return Exposed(
        seconds={(CATEGORIES[c], SHIELDS[s]): seconds[c, s] for c, s in keys},
        total={(CATEGORIES[c], SHIELDS[s]): total[c, s] for c, s in keys},
    )


def busy(timeline: Timeline) -> Busy:
    """What each device does all the time, [D] seconds; compute + communication - overlap + idle is the span."""
    sweep = _Sweep.of(timeline)

    def seconds(chosen: np.ndarray) -> np.ndarray:
        told = np.bincount(sweep.device[chosen], weights=sweep.lasts[chosen], minlength=len(timeline.tasks.devices))
        return told.astype(np.float64)  # of nothing, bincount makes whole numbers

    computes, sends = sweep.computing > 0, sweep.sending > 0
    compute, communication, overlap = seconds(computes), seconds(sends), seconds(computes & sends)
    idle = np.maximum(timeline.span_s - seconds(computes | sends), 0.0)
    return Busy(compute=compute, communication=communication, overlap=overlap, idle=idle)


def memory(timeline: Timeline) -> MemoryCurve:
    """Bytes over time on each device: what always lives, and what its tasks allocate at their start and free at end."""
    tasks = timeline.tasks
    ran = np.flatnonzero(np.isfinite(timeline.end))
    born, dead = ran[tasks.alloc_bytes[ran] != 0.0], ran[tasks.free_bytes[ran] != 0.0]
    time = np.concatenate([timeline.start[born], timeline.end[dead]])
    change = np.concatenate([tasks.alloc_bytes[born], -tasks.free_bytes[dead]])
    device = np.concatenate([tasks.device[born], tasks.device[dead]])
    order = _by_device_and_time(device, time)
    edges = np.searchsorted(device[order], np.arange(len(tasks.devices) + 1))
    times, curves = [], []
    for d, spec in enumerate(tasks.devices):
        mine = order[edges[d] : edges[d + 1]]
        moments = np.concatenate([[0.0], time[mine]])
        held = np.cumsum(np.concatenate([[spec.base_bytes], change[mine]]))
        last = np.flatnonzero(np.append(moments[1:] != moments[:-1], True))  # the last change of each instant
        times.append(moments[last])
        curves.append(held[last])
    tops = [int(np.argmax(curve)) for curve in curves]
    return MemoryCurve(
        times=tuple(times),
        bytes=tuple(curves),
        peak=np.array([curve[k] for curve, k in zip(curves, tops, strict=True)], dtype=np.float64),
        when=np.array([moments[k] for moments, k in zip(times, tops, strict=True)], dtype=np.float64),
        capacity=np.array([spec.capacity_bytes for spec in tasks.devices], dtype=np.float64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """Time of every device cut where a task starts or ends: K = 2R pieces for R tasks that ran for a while.

    lasts, device, computing, sending [K]: seconds of the piece where anything runs, whose it is, how many compute tasks
    and transfers run in it. tasks [R]; transfer [R]: whether it is one; open, close [R]: its first piece and the one
    after its last.
    """

    lasts: np.ndarray
    device: np.ndarray
    computing: np.ndarray
    sending: np.ndarray
    tasks: np.ndarray
    transfer: np.ndarray
    open: np.ndarray
    close: np.ndarray

    @classmethod
    def of(cls, timeline: Timeline) -> _Sweep:
        tasks = timeline.tasks
        computes = np.array([stream.computes for stream in tasks.streams], dtype=np.bool_)
        beside = tasks.category != CATEGORIES.index(Category.HOST)
        own = computes[tasks.stream] if len(tasks) else np.zeros(0, np.bool_)
        ran = np.flatnonzero((timeline.end > timeline.start) & (own | beside))  # NaN: did not run
        num, own = len(ran), own[ran]
        time = np.concatenate([timeline.start[ran], timeline.end[ran]])
        device = np.tile(tasks.device[ran], 2)
        order = _by_device_and_time(device, time)
        sign = np.repeat(np.array([1, -1], dtype=np.int32), num)
        time, device = time[order], device[order]
        lasts = np.diff(time, append=time[-1:])  # from one device to the next nothing runs, so no sum has it
        place = np.empty(2 * num, dtype=np.int64)
        place[order] = np.arange(2 * num)
        return cls(
            lasts=lasts,
            device=device,
            computing=np.cumsum((sign * np.tile(own, 2))[order]),
            sending=np.cumsum((sign * ~np.tile(own, 2))[order]),
            tasks=ran,
            transfer=~own,
            open=place[:num],
            close=place[num:],
        )


def _by_device_and_time(device: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Indices in order of (device, time). Faster than lexsort: small integers are sorted by their bytes."""
    order = np.argsort(time)
    whose = device[order]
    if len(whose) and whose.max() <= np.iinfo(np.int16).max:
        whose = whose.astype(np.int16)
    return order[np.argsort(whose, kind="stable")]
