"""Host threads as pieces in a row: an operation is cut where it calls into a device or posts a collective.

Recorders nest operations in operations. Kept is the outermost, so that pieces of a thread never overlap and what each
call depends on is the piece before it. Times are microseconds. Knows arrays, no file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Pieces", "cut", "outermost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Pieces of all threads, by thread and start.

    start, end, thread, name [P]. call [P]: row of the call that a piece is, -1 where it is of an operation.
    of_call [C]: the piece of each call, that around it for one within another call.
    """

    start: np.ndarray
    end: np.ndarray
    thread: np.ndarray
    name: np.ndarray
    call: np.ndarray
    of_call: np.ndarray

    def previous(self, pieces: np.ndarray) -> np.ndarray:
        """The piece before each on its thread, -1 for the first."""
        before = np.maximum(pieces - 1, 0)
        return np.where((pieces > 0) & (self.thread[before] == self.thread[pieces]), before, -1)

    def following(self, pieces: np.ndarray) -> np.ndarray:
        """The piece after each on its thread, -1 for the last."""
        after = np.minimum(pieces + 1, len(self.start) - 1)
        return np.where((after > pieces) & (self.thread[after] == self.thread[pieces]), after, -1)


def outermost(thread: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Rows of intervals that lie in no other of their thread, by thread and start. All arrays: [N].

    >>> outermost(np.zeros(3), np.array([0.0, 1.0, 5.0]), np.array([4.0, 2.0, 6.0]))
    array([0, 2])
    """
    order = np.lexsort((-end, start, thread))
    kept = np.ones(len(order), bool)
    if len(order):
        bounds = np.flatnonzero(np.diff(thread[order])) + 1
        for rows in np.split(np.arange(len(order)), bounds):
            latest = np.maximum.accumulate(end[order[rows]])
            kept[rows[1:]] = start[order[rows[1:]]] >= latest[:-1]
    return order[kept]


def cut(
    ops: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    calls: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> Pieces:
    """Cuts operations at calls. Both: (thread, start, end, name), [N] and [C].

    >>> one = np.zeros(1, int)
    >>> pieces = cut((one, np.array([0.0]), np.array([9.0]), one), (one, np.array([3.0]), np.array([4.0]), one + 1))
    >>> pieces.start.tolist(), pieces.end.tolist(), pieces.name.tolist()
    ([0.0, 3.0, 4.0], [3.0, 4.0, 9.0], [0, 1, 0])
    """
    around, within = outermost(*ops[:3]), outermost(*calls[:3])
    o_thread, o_start, o_end, o_name = (column[around] for column in ops)
    c_thread, c_start, c_end, c_name = (column[within] for column in calls)
    owner = _owner(o_thread, o_start, o_end, c_thread, c_start)
    inside = owner >= 0
    # Calls of one operation follow each other, and so do its pieces: sorted starts meet sorted ends.
    p_owner = np.concatenate([np.arange(len(o_start)), owner[inside]])
    start = np.concatenate([o_start, np.minimum(c_end[inside], o_end[owner[inside]])])
    end = np.concatenate([o_end, c_start[inside]])
    end_owner = p_owner
    p_start = start[np.lexsort((start, p_owner))]
    p_end = end[np.lexsort((end, end_owner))]
    p_owner = np.sort(p_owner)
    pieces = (p_end > p_start) | (np.bincount(p_owner, minlength=len(o_start))[p_owner] == 1)
    p_start, p_end, p_owner = p_start[pieces], p_end[pieces], p_owner[pieces]
    thread = np.concatenate([o_thread[p_owner], c_thread])
    start, end = np.concatenate([p_start, c_start]), np.concatenate([p_end, c_end])
    order = np.lexsort((end, start, thread))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    call = np.concatenate([np.full(len(p_owner), -1), within])[order]
    of_call = np.full(len(calls[0]), -1, np.int64)
    of_call[within] = place[len(p_owner) :]
    nested = np.flatnonzero(of_call < 0)
    of_call[nested] = of_call[within[_owner(c_thread, c_start, c_end, calls[0][nested], calls[1][nested])]]
    return Pieces(
        start=start[order], end=end[order], thread=thread[order],
        name=np.concatenate([o_name[p_owner], c_name])[order], call=call, of_call=of_call,
    )  # fmt: skip


def _owner(thread: np.ndarray, start: np.ndarray, end: np.ndarray, of_thread: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Which of the intervals, by thread and start and disjoint on a thread, holds each moment of a thread; -1 none."""
    owner = np.full(len(at), -1, np.int64)
    for each in np.unique(of_thread):
        rows, asked = np.flatnonzero(thread == each), np.flatnonzero(of_thread == each)
        if len(rows):
            found = np.searchsorted(start[rows], at[asked], side="right") - 1
            holds = (found >= 0) & (at[asked] <= end[rows[np.maximum(found, 0)]])
            owner[asked[holds]] = rows[found[holds]]
    return owner
