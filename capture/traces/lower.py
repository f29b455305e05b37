"""From one iteration of a global graph to tasks that estimator/replay.py runs, and to its timeline as measured.

One task per operation and queue. An operation's lag is a task of the host before it, on a queue of its own, so that it
counts neither as compute nor as communication. What operations allocate, lifetimes.py says. Runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from capture.traces.assemble import topological_order
from capture.traces.dfg import GlobalDfg
from capture.traces.lifetimes import lifetimes
from capture.traces.operations import OPS, Op
from estimator.tasks import CATEGORIES, Category, Device, Stream, Tasks
from estimator.timeline import Timeline

__all__ = ["Lowered", "lower", "measured"]

PREFIXES = (
    ("FW", Category.FORWARD),
    ("BW.again", Category.RECOMPUTE),
    ("BW", Category.BACKWARD),
    ("UPD", Category.OPTIMIZER),
)
"""How our own recorder names compute of a pass; other compute is OTHER."""
MOVES = {Op.COLLECTIVE: Category.DP, Op.SEND: Category.DP, Op.RECV: Category.DP, Op.COPY: Category.OFFLOAD,
         Op.HOST: Category.HOST}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """Tasks of an iteration: one for each of `ops` [M] in their order, then those of lags. ready: see replay."""

    tasks: Tasks
    ops: np.ndarray
    ready: np.ndarray


def lower(dfg: GlobalDfg, iteration: int, *, lags: bool = True) -> Lowered:
    """One iteration to run. lags: with the host's time between operations."""
    ops = np.flatnonzero(dfg.iteration == iteration)
    num = len(ops)
    before, after = _inner(dfg, ops)
    late = np.flatnonzero(dfg.lag_s[ops] > 0.0) if lags else np.zeros(0, np.int64)
    # What goes before an operation with a lag goes before the lag.
    waits = np.arange(num)
    waits[late] = num + np.arange(len(late))
    streams = [Stream(device=q.node, name=q.name, computes=q.computes) for q in dfg.queues]
    at = _host_streams(dfg, ops[late], streams)
    host = CATEGORIES.index(Category.HOST)
    names = (*dfg.names, "lag")
    held = lifetimes(dfg, ops, before, after)
    tasks = _tasks(
        dfg, streams=streams, names=names, base=held.base, stream=np.concatenate([dfg.queue[ops], at]),
        seconds=np.concatenate([dfg.seconds[ops], dfg.lag_s[ops[late]]]),
        category=np.concatenate([_categories(dfg, ops), np.full(len(late), host)]),
        before=np.concatenate([before, num + np.arange(len(late))]), after=np.concatenate([waits[after], late]),
        name=np.concatenate([dfg.name[ops], np.full(len(late), len(names) - 1)]),
        alloc=np.concatenate([held.alloc, np.zeros(len(late))]), free=np.concatenate([held.free, np.zeros(len(late))]),
    )  # fmt: skip
    return Lowered(tasks=tasks, ops=ops, ready=np.concatenate([dfg.release_s[ops], np.zeros(len(late))]))


def _host_streams(dfg: GlobalDfg, late: np.ndarray, streams: list[Stream]) -> np.ndarray:
    """The stream of each lag, new ones added: lags that overlapped as measured do not wait for each other."""
    rows: dict[int, list[tuple[float, int]]] = {}  # of a queue: the end of each row's last lag, and its stream
    at = np.zeros(len(late), dtype=np.int64)
    begin, end, queue = (dfg.start_s - dfg.lag_s)[late], dfg.start_s[late].tolist(), dfg.queue[late].tolist()
    for k in np.argsort(begin, kind="stable").tolist():
        free = rows.setdefault(queue[k], [])
        row = next((r for r, (until, _) in enumerate(free) if until <= begin[k]), len(free))
        if row == len(free):
            of = dfg.queues[queue[k]]
            free.append((0.0, len(streams)))
            streams.append(Stream(device=of.node, name=f"host before {of.name}" + (f" ({row + 1})" if row else "")))
        at[k] = free[row][1]
        free[row] = end[k], free[row][1]
    return at


def measured(dfg: GlobalDfg, iteration: int) -> Timeline:
    """One iteration as it was recorded, on seconds from its first begin, transfers clipped."""
    ops = np.flatnonzero(dfg.iteration == iteration)
    before, after = _inner(dfg, ops)
    held = lifetimes(dfg, ops, before, after)
    streams = [Stream(device=q.node, name=q.name, computes=q.computes) for q in dfg.queues]
    zero = float(dfg.start_s[ops].min())
    start, end = dfg.start_s[ops] - zero, dfg.end_s[ops] - zero
    tasks = _tasks(
        dfg, streams=streams, names=dfg.names, stream=dfg.queue[ops], seconds=end - start,
        category=_categories(dfg, ops), before=before, after=after, name=dfg.name[ops], alloc=held.alloc,
        free=held.free, base=held.base,
    )  # fmt: skip
    return Timeline(tasks=tasks, start=start, end=end, blame=_blame(tasks, start, end), host_s=np.zeros(len(ops)))


def _blame(tasks: Tasks, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Of each task what ended last before it: a predecessor, or the one before it on its queue.

    Only what comes first in one order of all tasks counts, by start, end and dependencies: tasks of no length at one
    moment, or recorded edges that times contradict, would else blame each other in a circle.
    """
    waits = np.empty(len(tasks), np.int64)
    waits[topological_order(len(tasks), tasks.before, tasks.after)] = np.arange(len(tasks))
    order = np.lexsort((waits, end, start))
    place = np.empty(len(tasks), np.int64)
    place[order] = np.arange(len(tasks))
    order = order[np.argsort(tasks.stream[order], kind="stable")]
    same = tasks.stream[order[:-1]] == tasks.stream[order[1:]]
    forward = place[tasks.before] < place[tasks.after]
    before = np.concatenate([tasks.before[forward], order[:-1][same]])
    after = np.concatenate([tasks.after[forward], order[1:][same]])
    blame = np.full(len(tasks), -1)
    rank = np.lexsort((-before, end[before]))  # the last assignment wins: the latest end, ties the lowest index
    blame[after[rank]] = before[rank]
    return blame


def _inner(dfg: GlobalDfg, ops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Edges among these operations, numbered within them."""
    place = np.full(len(dfg), -1)
    place[ops] = np.arange(len(ops))
    before, after = place[dfg.before], place[dfg.after]
    inside = (before >= 0) & (after >= 0)
    return before[inside], after[inside]


def _categories(dfg: GlobalDfg, ops: np.ndarray) -> np.ndarray:
    of_op = np.array([CATEGORIES.index(MOVES.get(op, Category.OTHER)) for op in OPS])
    of_name = np.array([CATEGORIES.index(_of_name(name)) for name in dfg.names], dtype=np.int64)
    computes = dfg.op[ops] == OPS.index(Op.COMPUTE)
    return np.where(computes, of_name[dfg.name[ops]], of_op[dfg.op[ops]])


def _of_name(name: str) -> Category:
    return next((category for prefix, category in PREFIXES if name.startswith(prefix)), Category.OTHER)


def _tasks(
    dfg: GlobalDfg, *, streams: list[Stream], names: tuple[str, ...], stream: np.ndarray, seconds: np.ndarray,
    category: np.ndarray, before: np.ndarray, after: np.ndarray, name: np.ndarray, alloc: np.ndarray, free: np.ndarray,
    base: np.ndarray,
) -> Tasks:  # fmt: skip
    n = len(seconds)
    nothing, none = np.zeros(n), np.full(n, -1)
    return Tasks(
        devices=tuple(
            Device(name=f"rank {rank}", base_bytes=float(nbytes)) for rank, nbytes in zip(dfg.ranks, base, strict=True)
        ), streams=tuple(streams), names=names,
        scopes=("",), stream=stream.astype(np.int64), seconds=seconds, category=category, before=before, after=after,
        name=name, scope=np.zeros(n, np.int64), micro_batch=none, chunk=none, shield=np.zeros(n, np.int64),
        launch_s=nothing, gates=np.zeros(n, np.bool_), takes=nothing, loads=np.zeros((n, 0)), alloc_bytes=alloc,
        free_bytes=free,
    )  # fmt: skip
