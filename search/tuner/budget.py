"""Memory first: decisions that fit a budget, by the passes that save memory, the faster of those that do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hardware.units import format_bytes
from search.tuner.climb import seen_of
from search.tuner.decisions import Decisions
from search.tuner.judge import Judge
from search.tuner.moves import Pass

__all__ = ["fitted", "with_memory_of"]


def fitted(judge: Judge, start: Decisions, passes: Sequence[Pass]) -> Decisions:
    """The start where it fits, else with the memory passes' least change that does. ValueError tells the least bytes.

    Each pass goes on until it fits, and the fastest is taken; where none does alone, they go on one after the other.
    """
    if judge.replayed(start).peak_bytes <= judge.budget_bytes:
        return start
    savers = [one for one in passes if one.saves_memory]
    alone = [_fits(judge, start, one) for one in savers]
    good = [found for found in alone if _peak(judge, found) <= judge.budget_bytes]
    if not good:
        together = [start]
        for one in savers:
            together += [_fits(judge, decisions, one) for decisions in together]
        good = [found for found in together if _peak(judge, found) <= judge.budget_bytes]
        if not good:
            least = min(_peak(judge, found) for found in (*alone, *together))
            how = ", ".join(one.name for one in savers) or "no memory pass"
            raise ValueError(
                f"--memory-budget must be at least {format_bytes(least)} ({least:.0f} bytes), the least that {how} "
                f"can reach, but is {format_bytes(judge.budget_bytes)}; give more, or a smaller batch"
            )
    return min(good, key=lambda decisions: judge.replayed(decisions).seconds)


def _peak(judge: Judge, decisions: Decisions) -> float:
    return judge.look(decisions).peak_bytes


def _fits(judge: Judge, start: Decisions, one: Pass) -> Decisions:
    """The first proposal that fits, else the one that takes least."""
    least = start
    for alternatives in one.propose(seen_of(judge, start, (one,), 0)):
        for move in alternatives:
            moved = move.applied(start)
            if _peak(judge, moved) <= judge.budget_bytes:
                return moved
            if _peak(judge, moved) < _peak(judge, least):
                least = moved
    return least


def with_memory_of(decisions: Decisions, other: Decisions) -> Decisions:
    """Decisions that save memory as others do."""
    return replace(decisions, recompute=other.recompute, accumulate=other.accumulate)
