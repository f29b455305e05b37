"""Replay: when each task of a graph runs, on streams, links and hosts that influence each other. Knows no model.

What runs where and for how long is given (tasks.py); this finds out when. The same loop replays a step priced by the
estimator, where transfers slow each other and compute down, and measured seconds, where every link is a stream that
serves one message at a time (the replayer of dPRO, arXiv:2205.02473, section 4.3). timeline.py reads the result.

The rules:
- A task is ready once all its predecessors have ended, and not before its `ready` second. A stream runs one task at a
  time, first come first served by the second in which they became ready; within an instant, lowest index first.
- A stream takes a task at t. If it has a launch, the host clock h of the device becomes max(h, the second in which the
  task became ready, if it gates) + launch_s, and the task starts at max(t, h), its stream held meanwhile. Launches of a
  device go in the order in which its streams take the tasks.
- Compute runs at 1 - the sum of `takes` of the transfers that run on its device, at least LEAST_RATE. A transfer runs
  at 1 / max(1, the greatest total load among the links that it loads). Rates hold until a task of the device starts or
  ends.
Neglected: preemption, priorities of streams, links shared between devices.

Times are exact where nothing is shared: end = start + seconds to the bit. Work is O((N + E) log), a few hundred
nanoseconds a task.
"""

from __future__ import annotations

import numpy as np

from estimator.replay_events import run, successors
from estimator.tasks import CATEGORIES, SHIELDS, Tasks
from estimator.timeline import Timeline

__all__ = ["replay"]

NUM_NAMED = 3  # tasks that a message names at most


def replay(tasks: Tasks, *, only: np.ndarray | None = None, ready: np.ndarray | None = None) -> Timeline:
    """Run a graph. ValueError where a value cannot be run or where tasks wait for each other.

    only [N] bool: replay a part; the other tasks do not run and edges from them are satisfied. ready [N]: seconds
    before which a task does not start.

    >>> from estimator.tasks import Device, Stream
    >>> graph = Tasks.of(devices=[Device(name="rank 0")], streams=[Stream(device=0, name="compute", computes=True)],
    ...                  stream=[0, 0], seconds=[1.0, 2.0], edges=[(1, 0)])
    >>> replay(graph).start.tolist()
    [2.0, 0.0]
    """
    n = len(tasks)
    chosen = np.ones(n, np.bool_) if only is None else np.asarray(only)
    waits = np.zeros(n) if ready is None else np.asarray(ready, dtype=np.float64)
    if chosen.dtype != np.bool_ or chosen.shape != (n,):
        msg = f"only must be {n} booleans, one per task, but is {chosen.dtype} {list(chosen.shape)}; pass a mask"
        raise ValueError(msg)
    if waits.shape != (n,):
        raise ValueError(f"ready must be {n} seconds, one per task, but is {list(waits.shape)}; pass an array of them")
    _check(tasks, waits)

    owner = np.array([stream.device for stream in tasks.streams], dtype=np.int64)
    computes = np.array([stream.computes for stream in tasks.streams], dtype=np.bool_)
    streams_of = np.argsort(owner, kind="stable")
    first_stream = np.searchsorted(owner[streams_of], np.arange(len(tasks.devices) + 1))
    runs = _table(chosen, np.bool_)
    loads = _table(tasks.loads, np.float64)
    weighs = (tasks.takes > 0.0) & ~computes[tasks.stream] if n else np.zeros(0, np.bool_)
    for link in range(loads.shape[1]):
        weighs = weighs | (loads[:, link] > 0.0)

    first, to, waits_for = successors(_table(tasks.before, np.int64), _table(tasks.after, np.int64), runs)
    start, end, blame, host_s, done = run(
        _table(tasks.stream, np.int64), _table(tasks.seconds, np.float64), _table(tasks.launch_s, np.float64),
        _table(tasks.gates, np.bool_), _table(tasks.takes, np.float64), loads, _table(weighs, np.bool_),
        _table(owner, np.int64), _table(computes, np.bool_), _table(first_stream, np.int64),
        _table(streams_of, np.int64), first, to, waits_for, runs, _table(waits, np.float64),
    )  # fmt: skip
    if done < np.count_nonzero(chosen):
        names = ", ".join(repr(_name(tasks, i)) for i in _circle(tasks, chosen & np.isnan(end)))
        raise ValueError(f"tasks must not wait for each other in a circle, but {names} do; remove an edge among them")
    return Timeline(tasks=tasks, start=start, end=end, blame=blame, host_s=host_s)


def _table(values: np.ndarray, dtype: type) -> np.ndarray:
    """Read-only, C-contiguous and of one type, so that the loop is compiled once."""
    table: np.ndarray = np.ascontiguousarray(values, dtype=dtype).view()
    table.flags.writeable = False
    return table


def _check(tasks: Tasks, ready: np.ndarray) -> None:
    """ValueError that names the first task whose values cannot be run."""
    n, num_links = len(tasks), tasks.loads.shape[1] if tasks.loads.ndim == 2 else 0
    for s, stream in enumerate(tasks.streams):
        if not 0 <= stream.device < len(tasks.devices):
            msg = f"stream {stream.name!r} ({s}) must be of one of {len(tasks.devices)} devices, but is of "
            raise ValueError(f"{msg}{stream.device}; count devices from 0")
    if tasks.loads.shape != (n, num_links):
        raise ValueError(f"loads must be [{n} tasks, links], but is {list(tasks.loads.shape)}; pass a row per task")
    whole = {"category": len(CATEGORIES), "shield": len(SHIELDS)}
    whole |= {"name": len(tasks.names), "scope": len(tasks.scopes)}
    real = ("seconds", "launch_s", "takes", "alloc_bytes", "free_bytes")
    for column in ("stream", *whole, *real, "gates"):
        shape = getattr(tasks, column).shape
        if shape != (n,):
            raise ValueError(
                f"{column} must have a value for each of {n} tasks, but is {list(shape)}; pass one per task"
            )
    for column, bound in whole.items():
        _within(tasks, column, getattr(tasks, column), bound)
    for column in real:
        _finite(tasks, column, getattr(tasks, column))
    _finite(tasks, "ready", ready)
    for link in range(num_links):
        _finite(tasks, "loads", tasks.loads[:, link])
    if tasks.before.shape != tasks.after.shape or tasks.before.ndim != 1:
        msg = f"before and after must be one task each per edge, but are {list(tasks.before.shape)} and "
        raise ValueError(f"{msg}{list(tasks.after.shape)}; pass as many of one as of the other")
    for column, ends in (("before", tasks.before), ("after", tasks.after)):
        wrong = np.flatnonzero((ends < 0) | (ends >= n))
        if len(wrong):
            e = wrong[0]
            pair = f"{_name(tasks, tasks.before[e])!r} -> {_name(tasks, tasks.after[e])!r}"
            raise ValueError(
                f"{column} must be a task from 0 to {n - 1}, but is {ends[e]} on edge {pair}; mend the edge"
            )


def _finite(tasks: Tasks, column: str, values: np.ndarray) -> None:
    good = (values >= 0.0) & (values < np.inf)
    if not good.all():
        i = int(np.argmin(good))
        msg = f"{column} must be a number of at least 0, but is {values[i]} for task {_name(tasks, i)!r}"
        raise ValueError(f"{msg}; measure or price it anew")


def _within(tasks: Tasks, column: str, values: np.ndarray, bound: int) -> None:
    good = (values >= 0) & (values < bound)
    if not good.all():
        i = int(np.argmin(good))
        msg = f"{column} must be an index below {bound}, but is {values[i]} for task {i}"
        raise ValueError(f"{msg}; add the entry or mend the index")


def _circle(tasks: Tasks, stuck: np.ndarray) -> list[int]:
    """Up to NUM_NAMED tasks that wait for each other, each for the one before it."""
    inside = np.flatnonzero(stuck[tasks.before] & stuck[tasks.after])
    waits_on = np.full(len(tasks), -1)
    waits_on[tasks.after[inside]] = tasks.before[inside]
    at, met = int(np.argmax(stuck)), set[int]()
    while at not in met:
        met.add(at)
        at = int(waits_on[at])
    circle = [at]
    while (at := int(waits_on[at])) != circle[0]:
        circle.append(at)
    return circle[::-1][:NUM_NAMED]


def _name(tasks: Tasks, i: int) -> str:
    """What a task is called, with its micro-batch where it has one."""
    if not 0 <= i < len(tasks):
        return f"task {i}"
    batch = f" of micro-batch {tasks.micro_batch[i]}" if tasks.micro_batch[i] >= 0 else ""
    return f"{tasks.names[tasks.name[i]]}{batch}"
