"""Algorithm 1 of dPRO (arXiv:2205.02473): along the critical path, take what a judge says is faster, replay, repeat."""

from __future__ import annotations

from collections.abc import Sequence

from search.tuner.coarse import classes, coarsened, open_joins
from search.tuner.decisions import Decisions
from search.tuner.judge import Judge
from search.tuner.moves import Move, Pass, Seen

__all__ = ["ROUNDS", "climb", "seen_of"]

ROUNDS = 8  # at most; the paper's searches end where five change little
LEAST = 1e-9  # share of an iteration by which a move must gain
STALE = 1e-4  # share by which a round must gain for another to be worth while


def seen_of(judge: Judge, decisions: Decisions, passes: Sequence[Pass], number: int) -> Seen:
    """What passes may look at, decisions replayed in full."""
    names = frozenset(one.name for one in passes)
    free_ops, free_tensors = open_joins(
        judge.shown, coarse=judge.ups.coarse, ops="op_fusion" in names, tensors="tensor_fusion" in names
    )
    return Seen(
        judge=judge, decisions=decisions, look=judge.look(decisions), replayed=judge.replayed(decisions),
        enabled=names, free_ops=free_ops, free_tensors=free_tensors, classes=classes(judge.shown), number=number,
    )  # fmt: skip


def climb(judge: Judge, start: Decisions, passes: Sequence[Pass]) -> Decisions:
    """The best decisions found from a start; never worse than it by a full replay."""
    best, best_s = start, judge.replayed(start).seconds
    at = start
    if judge.ups.coarse:
        names = {one.name for one in passes}
        at = coarsened(judge.shown, start, ops="op_fusion" in names, tensors="tensor_fusion" in names)
    for number in range(ROUNDS):
        at = _round(judge, at, passes, number)
        found_s = judge.replayed(at).seconds
        gained = best_s - found_s
        if gained > 0.0:
            best, best_s = at, found_s
        if gained <= STALE * best_s and number:
            break
    return best


def _round(judge: Judge, decisions: Decisions, passes: Sequence[Pass], number: int) -> Decisions:
    """Each pass once along the critical path; what it proposes is judged against what was taken so far."""
    for one in passes:
        if one.saves_memory:
            continue
        seen = seen_of(judge, decisions, passes, number)
        for alternatives in one.propose(seen):
            decisions = _better(judge, decisions, alternatives)
    return decisions


def _better(judge: Judge, decisions: Decisions, alternatives: Sequence[Move]) -> Decisions:
    """The best of the alternatives, or the decisions as they are; what a theorem promises is not tried further."""
    now_s = best_s = judge.seconds(decisions)
    best = decisions
    for move in alternatives:
        moved = move.applied(decisions)
        seconds = judge.seconds(moved)
        if seconds < best_s - LEAST * now_s:
            best, best_s = moved, seconds
            if move.sure:
                break
    return best
