"""What ties events of a profiler trace together: steps, and dependencies that recorded times bear out. Knows one rank.

A device's event depends on the call that launched it, or on the piece before that call where it started before the call
returned. A communication kernel depends on what was launched before it on the stream that computes: its library waits
there. A host thread that waited for a device goes on after what it waited for, a stream that was told to wait for
another after what ended there, and threads hand a backward pass over and back. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from capture.traces.host import Pieces
from capture.traces.kineto_events import Columns

__all__ = ["Marks", "edges", "steps"]

WAITS = ("Synchronize", "Memcpy")
"""In the names of calls that may return only when the device is done."""

WAITS_FOR = "StreamWaitEvent"
"""In the names of calls that make a stream wait for another."""
ENGINE = "autograd::engine::"

Spans = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # where, start, end, name


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Steps in order. A step goes on until the next starts, as what it launched may end after its mark."""

    names: tuple[str, ...]
    start: np.ndarray
    end: np.ndarray

    def of(self, at: np.ndarray) -> np.ndarray:
        """The step of each moment, -1 outside."""
        if not len(self.start):
            return np.full(len(at), -1)
        found = np.searchsorted(self.start, at, side="right") - 1
        return np.where((found == len(self.start) - 1) & (at > self.end[-1]), -1, found)


def steps(columns: Columns, notices: list[str]) -> Marks:
    """The profiler's marks; without them each step of an optimizer ends one."""
    marks = sorted(columns.steps, key=lambda mark: mark.start)
    if marks or not columns.optimizer_ends:
        return Marks(
            names=tuple(mark.name for mark in marks), start=np.array([mark.start for mark in marks], np.float64),
            end=np.array([mark.end for mark in marks], np.float64),
        )  # fmt: skip
    notices.append("no marks of the profiler's steps: iterations end with the optimizer")
    ends = np.sort(np.array(columns.optimizer_ends))
    first = min(float(np.min(spans.start)) for spans in (columns.operations, columns.device) if len(spans.start))
    return Marks(
        names=tuple(f"step {index}" for index in range(len(ends))), start=np.concatenate([[first], ends[:-1]]), end=ends
    )


def edges(
    pieces: Pieces, calls: Spans, names: Sequence[str], device: Spans, launched: np.ndarray,
    communicates: np.ndarray, posted: Sequence[tuple[int, int]],
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(before, after), rows of pieces and then of device events.

    launched, communicates: [device events], the row of the call of each, -1 unknown, and whether it is a collective.
    posted: of each collective on the host the row of the call that posted it, -1 unknown, and its own row.
    """
    parts = [
        *_launches(pieces, device, launched), *_streams(calls, device, launched, communicates, len(pieces.start)),
        *_returns(pieces, calls, names, device, launched), _posts(pieces, posted), *_backward(pieces, names),
        *_across(calls, names, device, launched, len(pieces.start)),
    ]  # fmt: skip
    before, after = (np.concatenate([part[side] for part in parts]).astype(np.int64) for side in (0, 1))
    both = (before >= 0) & (after >= 0)
    return before[both], after[both]


def _launches(pieces: Pieces, device: Spans, launched: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rows = np.flatnonzero(launched >= 0)
    if not len(rows):
        return
    _, start, _, _ = device
    piece = pieces.of_call[launched[rows]]
    earlier = pieces.previous(piece)
    before = np.where(pieces.end[piece] <= start[rows], piece, earlier)
    before[pieces.end[before] > start[rows]] = -1  # the device's clock runs ahead of the host's
    yield before, rows + len(pieces.start)


def _streams(
    calls: Spans, device: Spans, launched: np.ndarray, communicates: np.ndarray, offset: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The last event launched on the busiest stream of computation before each communication kernel."""
    where, start, end, _ = device
    compute = np.flatnonzero((launched >= 0) & ~communicates)
    if not len(compute):
        return
    compute = compute[where[compute] == np.bincount(where[compute]).argmax()]
    compute = compute[np.argsort(calls[1][launched[compute]], kind="stable")]
    asking = np.flatnonzero((launched >= 0) & communicates)
    place = np.searchsorted(calls[1][launched[compute]], calls[1][launched[asking]]) - 1
    before = np.where(place >= 0, compute[np.maximum(place, 0)], -1)
    holds = (before >= 0) & (end[before] <= start[asking])
    yield before[holds] + offset, asking[holds] + offset


def _returns(
    pieces: Pieces, calls: Spans, names: Sequence[str], device: Spans, launched: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What a call waited for: the device's last event that ended during it, launched before or by it."""
    waits = np.array([any(word in name for word in WAITS) for name in names], bool)
    _, c_start, c_end, c_name = calls
    rows = np.flatnonzero(waits[c_name]) if len(c_name) else np.zeros(0, np.int64)
    ends = device[2]
    if not len(rows) or not len(ends):
        return
    order = np.argsort(ends, kind="stable")
    last = order[np.maximum(np.searchsorted(ends[order], c_end[rows], side="right") - 1, 0)]
    asked = np.where(launched[last] >= 0, c_start[launched[last]], np.inf)
    goes_on = pieces.following(pieces.of_call[rows])
    holds = (ends[last] >= c_start[rows]) & (ends[last] <= c_end[rows]) & (asked <= c_start[rows]) & (goes_on >= 0)
    holds &= pieces.start[goes_on] >= ends[last]
    yield last[holds] + len(pieces.start), goes_on[holds]


def _backward(pieces: Pieces, names: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Between the thread that calls a backward pass and those that run it, whoever goes on waited for the other.

    PyTorch's engine runs the nodes of each device on a thread of its own while the caller waits for all of them. The
    caller is the busiest of the other threads.
    """
    of_engine = np.array([name.startswith(ENGINE) for name in names], bool)
    num = int(pieces.thread.max(initial=-1)) + 1
    operations = pieces.call < 0
    runs = np.bincount(pieces.thread[operations & of_engine[pieces.name]], minlength=num)
    engines = np.flatnonzero(2 * runs > np.bincount(pieces.thread[operations], minlength=num))  # hooks run there too
    busy = np.bincount(pieces.thread, weights=pieces.end - pieces.start, minlength=num)
    busy[engines] = 0.0
    if not len(engines) or not busy.any():
        return
    caller = np.flatnonzero(pieces.thread == int(busy.argmax()))
    for engine in engines.tolist():
        own = np.flatnonzero(pieces.thread == engine)
        yield _handed_over(pieces, caller, own, idle=True)
        yield _handed_over(pieces, own, caller, idle=False)


def _handed_over(pieces: Pieces, giver: np.ndarray, taker: np.ndarray, *, idle: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of `taker` in front of which it paused, and the last of `giver` to end in that pause, where any did.

    idle: only where the giver had nothing else to do when the taker went on.
    """
    start = pieces.start[taker]
    last = np.searchsorted(pieces.end[giver], start, side="right") - 1
    before = giver[np.maximum(last, 0)]
    paused_at = np.concatenate([[-np.inf], pieces.end[taker[:-1]]])
    holds = (last >= 0) & (pieces.end[before] > paused_at)
    if idle:
        after = np.minimum(last + 1, len(giver) - 1)
        holds &= (after == last) | (pieces.start[giver[after]] >= start)
    return before[holds], taker[holds]


def _across(
    calls: Spans, names: Sequence[str], device: Spans, launched: np.ndarray, offset: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What an event of the device waited for on another stream, where its thread asked a stream to wait.

    Recorders do not tell which streams; of what was launched before the asking, the last to end before the event began
    is taken, where that was after the launch and after what went before on the stream: there it was waiting.
    """
    asks = np.array([WAITS_FOR in name for name in names], bool)
    thread, asked, _, c_name = calls
    where, start, end, _ = device
    rows = np.flatnonzero(launched >= 0)
    if not len(rows) or not len(c_name) or not asks[c_name].any():
        return
    by_end = rows[np.argsort(end[rows], kind="stable")]
    before, after = [], []
    for each in np.unique(where[rows]).tolist():
        mine = rows[where[rows] == each]
        mine = mine[np.argsort(start[mine], kind="stable")]
        earlier = np.concatenate([[-1], mine[:-1]])
        since = np.where(earlier >= 0, asked[launched[earlier]], -np.inf)
        free = np.where(earlier >= 0, end[earlier], -np.inf)
        waits = np.flatnonzero(start[mine] > np.maximum(free, asked[launched[mine]]))
        moments = {t: np.sort(asked[asks[c_name] & (thread == t)]) for t in np.unique(thread[launched[mine]]).tolist()}
        for k in waits.tolist():
            row, call = int(mine[k]), int(launched[mine[k]])
            asking = moments[int(thread[call])]
            at = int(np.searchsorted(asking, asked[call])) - 1
            if at < 0 or asking[at] <= since[k]:
                continue
            place = int(np.searchsorted(end[by_end], start[row], side="right")) - 1
            while place >= 0 and end[by_end[place]] > max(free[k], asked[call]):
                other = int(by_end[place])
                if where[other] != each and asked[launched[other]] < asking[at]:
                    before.append(other + offset)
                    after.append(row + offset)
                    break
                place -= 1
    yield np.array(before, np.int64), np.array(after, np.int64)


def _posts(pieces: Pieces, posted: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """A collective on the host depends on what its thread did before it posted it."""
    known = [(call, row) for call, row in posted if call >= 0]
    calls, rows = (np.array([pair[side] for pair in known], np.int64) for side in (0, 1))
    return pieces.previous(pieces.of_call[calls]), rows
