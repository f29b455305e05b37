"""What transfers and compute of one host cost each other, learned from a recording: both want its processor.

A host that sends and receives copies bytes, answers interrupts and adds up: compute beside takes longer by seconds per
byte (`host_s_per_byte`). That shows where the same operations ran with transfers and without, in a second recording of
the job that synchronises nothing. And a host attends to its transfers late, later still while it computes: messages are
*delayed* beyond what the link says.

Letters: K operations, T transfers. Knows no job and no wire (what_if.py), moves nothing in a recording.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from capture.traces.dfg import GlobalDfg
from capture.traces.operations import Op
from capture.traces.synthesise import Link, Synthetic
from estimator.tasks import CATEGORIES, Category
from estimator.timeline import Timeline

__all__ = ["Delays", "bytes_beside", "delayed", "delays_of", "host_s_per_byte", "left_of", "usual_messages"]

BUSY = 0.5  # of a transfer's time with compute on its hosts: above, it counts as beside compute (an assumption)
FASTEST = 0.1  # of what the link says: no drawn message is faster (an assumption)
SAME = 0.01  # by which bytes of messages of one size may differ
LEAST_LEFT = 0.1  # of a compute's seconds: so much is its own in any case (an assumption)


def bytes_beside(dfg: GlobalDfg) -> np.ndarray:
    """[K] bytes that each operation's rank received while it ran, a message's bytes spread evenly over its seconds."""
    beside, node = np.zeros(len(dfg)), dfg.node
    moves = np.flatnonzero(dfg.is_op(Op.RECV) & (dfg.nbytes > 0) & (dfg.end_s > dfg.start_s))
    computes = np.flatnonzero(dfg.is_op(Op.COMPUTE))
    for rank in range(len(dfg.ranks)):
        mine = moves[node[moves] == rank]
        ops = computes[node[computes] == rank]
        gone = _Gone(dfg.start_s[mine], dfg.end_s[mine], dfg.nbytes[mine])
        beside[ops] = gone.until(dfg.end_s[ops]) - gone.until(dfg.start_s[ops])
    return beside


class _Gone:
    """Amounts that flow evenly within intervals [T]: how much has gone until a second."""

    def __init__(self, start: np.ndarray, end: np.ndarray, amount: np.ndarray) -> None:
        times = np.unique(np.concatenate([start, end]))
        rate = np.zeros(len(times))
        each = amount / (end - start)
        np.add.at(rate, np.searchsorted(times, start), each)
        np.add.at(rate, np.searchsorted(times, end), -each)
        flows = np.cumsum(rate)[:-1] if len(times) else rate
        self.times = times
        self.total = np.concatenate([[0.0], np.cumsum(flows * np.diff(times))]) if len(times) else np.zeros(0)

    def until(self, second: np.ndarray) -> np.ndarray:
        """[?] of each second."""
        return np.interp(second, self.times, self.total) if len(self.times) else np.zeros(len(second))


def host_s_per_byte(dfg: GlobalDfg, alone: GlobalDfg) -> float:
    """Seconds of compute that a received byte (and the one sent for it) costs its rank.

    alone: the same job with nothing to synchronise, of whose operations the medians count. Those that had no transfer
    beside them in `dfg` tell by how much the machine was faster or slower; the median over ranks and iterations is
    given. ValueError where the two have no operation in common.
    """
    usual = {name: float(np.median(alone.seconds[rows])) for name, rows in _rows(alone).items()}
    expected = np.full(len(dfg), np.nan)
    for name, rows in _rows(dfg).items():
        expected[rows] = usual.get(name, np.nan)
    if np.isnan(expected).all():
        raise ValueError("a job alone must compute what the other does, but no operation has the same name; record it "
                         "with the same model")  # fmt: skip
    beside, node, found = bytes_beside(dfg), dfg.node, []
    for number in dfg.iterations:
        for rank in range(len(dfg.ranks)):
            mine = (dfg.iteration == number) & (node == rank) & ~np.isnan(expected)
            with_, without = mine & (beside > 0.0), mine & (beside == 0.0)
            if not with_.any():
                continue
            slept = expected[without].sum()
            pace = dfg.seconds[without].sum() / slept if slept > 0.0 else 1.0
            found.append((dfg.seconds[with_].sum() - pace * expected[with_].sum()) / beside[with_].sum())
    return max(0.0, float(np.median(found))) if found else 0.0


def _rows(dfg: GlobalDfg) -> dict[str, np.ndarray]:
    """Computes by name."""
    rows = np.flatnonzero(dfg.is_op(Op.COMPUTE))
    order = rows[np.argsort(dfg.name[rows], kind="stable")]
    names, first = np.unique(dfg.name[order], return_index=True)
    return {dfg.names[n]: part for n, part in zip(names.tolist(), np.split(order, first[1:]), strict=True)}


def left_of(seconds: np.ndarray, beside: np.ndarray, cost_s_per_byte: float) -> np.ndarray:
    """Seconds that computes would have taken alone."""
    return np.maximum(seconds - cost_s_per_byte * beside, LEAST_LEFT * seconds)


def usual_messages(dfg: GlobalDfg) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, median seconds) of messages beside no compute, or of all where there are none, one entry per message.

    Sizes that differ by less than a hundredth count as one.
    """
    moves = np.flatnonzero(dfg.is_op(Op.RECV) & (dfg.nbytes > 0))
    quiet = moves[~_busy_messages(dfg, moves)]
    chosen = quiet if len(quiet) else moves
    chosen = chosen[np.argsort(dfg.nbytes[chosen], kind="stable")]
    size, seconds = dfg.nbytes[chosen], (dfg.seconds + dfg.lag_s)[chosen]
    cuts = np.flatnonzero(np.diff(size) > SAME * size[1:]) + 1
    usual = [np.full(len(part), np.median(part)) for part in np.split(seconds, cuts)]
    return size, np.concatenate(usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Seconds of an iteration's messages beyond what the link says, [?] each: of those beside no compute, and others.

    A delay is the host's, so it is the same for small messages and large ones, on fast links and slow ones.
    """

    quiet_s: np.ndarray
    busy_s: np.ndarray

    def __len__(self) -> int:
        return len(self.quiet_s) + len(self.busy_s)

    @property
    def mean_s(self) -> float:
        """Of all; 0 where none is known."""
        return float(np.concatenate([self.quiet_s, self.busy_s]).mean()) if len(self) else 0.0


def delays_of(dfg: GlobalDfg, number: int, link: Link, seconds: np.ndarray) -> Delays:
    """Of an iteration. seconds [K]: of each message, with what it costs its ranks beside, but for adding up."""
    mine = np.flatnonzero(dfg.is_op(Op.RECV) & (dfg.nbytes > 0) & (dfg.iteration == number))
    beyond = seconds[mine] - link.latency_s - dfg.nbytes[mine] / link.bytes_per_s
    busy = _busy_messages(dfg, mine)
    return Delays(quiet_s=beyond[~busy], busy_s=beyond[busy])


def _busy_messages(dfg: GlobalDfg, messages: np.ndarray) -> np.ndarray:
    computes = np.flatnonzero(dfg.is_op(Op.COMPUTE))
    return _busy(dfg.start_s[messages], dfg.end_s[messages], dfg.start_s[computes], dfg.end_s[computes],
                 len(dfg.ranks))  # fmt: skip


def _busy(
    start: np.ndarray, end: np.ndarray, computes_start: np.ndarray, computes_end: np.ndarray, num_hosts: int
) -> np.ndarray:
    """[T] bool: transfers that had compute beside them for most of their time, on average over all hosts."""
    runs = computes_end > computes_start
    done = _Gone(computes_start[runs], computes_end[runs], (computes_end - computes_start)[runs])
    beside: np.ndarray = done.until(end) - done.until(start)
    return beside > BUSY * num_hosts * (end - start)


def delayed(made: Synthetic, delays: Delays, seed: int) -> Synthetic:
    """The same tasks, each transfer delayed as messages that were recorded in its place, drawn with a fixed seed.

    Which transfers run beside compute shows once they have been replayed with delays of those that do not. What a
    transfer takes of its worker's compute is given by its bytes: one that takes longer takes a smaller share of it.
    """
    transfers = np.flatnonzero(made.tasks.category == CATEGORIES.index(Category.DP))
    known = np.concatenate([delays.quiet_s, delays.busy_s])
    if not len(known) or not len(transfers):
        return made
    quiet_s, busy_s = (some if len(some) else known for some in (delays.quiet_s, delays.busy_s))
    draw = np.random.default_rng(seed)
    expected = made.tasks.seconds[transfers]
    quiet, busy = (np.maximum(expected + draw.choice(some, len(transfers)), FASTEST * expected)
                   for some in (quiet_s, busy_s))  # fmt: skip
    first = _lasting(made, transfers, quiet)
    return _lasting(first, transfers, np.where(_busy_tasks(first.run(), transfers), busy, quiet))


def _lasting(made: Synthetic, transfers: np.ndarray, seconds: np.ndarray) -> Synthetic:
    lasts, takes = made.tasks.seconds.copy(), made.tasks.takes.copy()
    takes[transfers] *= lasts[transfers] / seconds
    lasts[transfers] = seconds
    return replace(made, tasks=replace(made.tasks, seconds=lasts, takes=takes))


def _busy_tasks(timeline: Timeline, transfers: np.ndarray) -> np.ndarray:
    tasks = timeline.tasks
    on = np.array([stream.computes for stream in tasks.streams], dtype=np.bool_)[tasks.stream]
    hosts = len(np.unique(tasks.device[on]))
    return _busy(timeline.start[transfers], timeline.end[transfers], timeline.start[on], timeline.end[on], hosts)
