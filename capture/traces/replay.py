"""A measured job replayed: each iteration with its own seconds, beside how long it really took. Changes no graph.

Averages before a maximum bias low, so nothing is averaged before the replay: mean and spread are those of whole
iterations. The loop itself is estimator/replay.py, the same that replays priced steps; links are queues that serve one
message at a time (dPRO, arXiv:2205.02473, section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from capture.traces.dfg import GlobalDfg
from capture.traces.lifetimes import sampled_peak
from capture.traces.lower import Lowered, lower
from capture.traces.operations import OPS, Op
from estimator.replay import replay
from estimator.timeline import Timeline, memory

__all__ = ["Iteration", "TraceReplay", "execution_graph", "replay_trace", "sync_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One iteration. rank_s [R]: replayed seconds of each rank, from its own begin to its own end.

    peak_bytes [R]: the most that each rank holds as replayed. sampled_bytes [R]: as recorded, NaN where not sampled.
    """

    number: int
    measured_s: float
    replayed_s: float
    rank_s: np.ndarray
    peak_bytes: np.ndarray
    sampled_bytes: np.ndarray
    lowered: Lowered
    timeline: Timeline

    @property
    def error(self) -> float:
        """Replayed over measured, less one."""
        return self.replayed_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplay:
    """All iterations, and what they come to."""

    iterations: tuple[Iteration, ...]

    @property
    def measured_s(self) -> np.ndarray:
        """[I] seconds that each iteration took."""
        return np.array([one.measured_s for one in self.iterations])

    @property
    def replayed_s(self) -> np.ndarray:
        """[I] seconds that each iteration takes when replayed."""
        return np.array([one.replayed_s for one in self.iterations])

    @property
    def mean_error(self) -> float:
        """Of the mean iteration: what a prediction of the job's speed is off by."""
        return float(self.replayed_s.mean() / self.measured_s.mean() - 1.0)

    @property
    def worst_error(self) -> float:
        """The largest of any iteration, with its sign."""
        errors = np.array([one.error for one in self.iterations])
        return float(errors[np.argmax(np.abs(errors))])

    @property
    def median(self) -> Iteration:
        """The iteration whose replayed time is in the middle: the one to look at."""
        order = np.argsort(self.replayed_s, kind="stable")
        return self.iterations[int(order[(len(order) - 1) // 2])]


def replay_trace(dfg: GlobalDfg) -> TraceReplay:
    """Replays every iteration. ValueError where a value cannot be run."""
    return TraceReplay(iterations=tuple(
        _replayed(dfg, number, float(seconds))
        for number, seconds in zip(dfg.iterations, dfg.iteration_s(), strict=True)
    ))  # fmt: skip


def _replayed(dfg: GlobalDfg, number: int, measured_s: float) -> Iteration:
    if not measured_s > 0.0:
        raise ValueError(
            f"an iteration must take time to be replayed, but iteration {number} takes {measured_s:g} s as recorded; "
            "record with times, or look at it with --measured"
        )
    lowered = lower(dfg, number)
    timeline = replay(lowered.tasks, ready=lowered.ready)
    ops = lowered.ops
    node, op = dfg.node[ops], dfg.op[ops]
    begin, end = np.full(len(dfg.ranks), np.inf), np.zeros(len(dfg.ranks))
    at, to = np.flatnonzero(op == OPS.index(Op.BEGIN)), np.flatnonzero(op == OPS.index(Op.END))
    np.minimum.at(begin, node[at], timeline.start[at])
    np.maximum.at(end, node[to], timeline.end[to])
    return Iteration(
        number=number, measured_s=measured_s, replayed_s=float(end.max() - begin.min()), rank_s=end - begin,
        peak_bytes=memory(timeline).peak, sampled_bytes=sampled_peak(dfg, number), lowered=lowered, timeline=timeline,
    )  # fmt: skip


def execution_graph(timeline: Timeline) -> np.ndarray:
    """(before, after) [?, 2]: the graph's own edges, and one from each task to the next on its queue as replayed.

    What a search for better orders looks at: an edge of the second kind is a choice of the queue, not a dependency.
    """
    tasks = timeline.tasks
    ran = np.flatnonzero(np.isfinite(timeline.start))
    order = ran[np.lexsort((ran, timeline.end[ran], timeline.start[ran], tasks.stream[ran]))]
    same = tasks.stream[order[:-1]] == tasks.stream[order[1:]]
    own = np.stack([tasks.before, tasks.after], axis=1)
    return np.unique(np.concatenate([own, np.stack([order[:-1][same], order[1:][same]], axis=1)]), axis=0)


def sync_s(dfg: GlobalDfg, tensor: int, iteration: int) -> float:
    """Partial replay: seconds to synchronise one tensor when nothing else runs, from the first In to the last Out.

    t_sync(s, k) of the paper: only the communication of the tensor runs, with its own lags; what its ranks did before
    is satisfied.
    """
    lowered = lower(dfg, iteration)
    mine = dfg.tensor[lowered.ops] == tensor
    moves = mine & dfg.is_op(Op.IN, Op.OUT, Op.MEETING, Op.COLLECTIVE, Op.SEND, Op.RECV)[lowered.ops]
    reduces = mine & dfg.is_op(Op.COMPUTE)[lowered.ops] & ~_makes(dfg, lowered, mine)
    chosen = np.concatenate([moves | reduces, np.zeros(len(lowered.tasks) - len(lowered.ops), np.bool_)])
    if not chosen.any():
        raise ValueError(f"a tensor must be communicated, but {dfg.tensors[tensor]!r} is not; choose another")
    leads = ~moves | dfg.is_op(Op.IN)[lowered.ops]  # what a rank did before it handed the tensor over is done
    tasks = lowered.tasks
    lag = np.arange(len(lowered.ops), len(tasks))
    before_lag = np.isin(tasks.before, lag) & chosen[tasks.after]
    inner = tasks.after[before_lag]
    chosen[tasks.before[before_lag][~leads[inner] | reduces[inner]]] = True
    return replay(tasks, only=chosen).span_s


def _makes(dfg: GlobalDfg, lowered: Lowered, mine: np.ndarray) -> np.ndarray:
    """[M] bool: compute on the tensor before its In: gradients and their copy into the bucket."""
    ops = lowered.ops
    first = np.full(len(dfg.ranks), np.inf)
    heads = mine & (dfg.op[ops] == OPS.index(Op.IN))
    np.minimum.at(first, dfg.node[ops[heads]], dfg.start_s[ops[heads]])
    before: np.ndarray = dfg.end_s[ops] <= first[dfg.node[ops]] + 1e-6
    return before
