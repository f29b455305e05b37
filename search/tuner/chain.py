"""A Markov chain over the same decisions: joins toggled at random, taken where faster, and at times where not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from search.tuner.climb import seen_of
from search.tuner.decisions import Decisions
from search.tuner.judge import Judge
from search.tuner.moves import Move, Pass

__all__ = ["STEPS", "walk"]

STEPS = 4000
WARM, COLD = 1e-2, 1e-5  # shares of an iteration that are lost with probability 1/e, at the start and at the end


def walk(judge: Judge, start: Decisions, passes: Sequence[Pass], *, seed: int, steps: int = STEPS) -> Decisions:
    """The best decisions met (Metropolis et al. 1953, cooled geometrically). The same seed walks the same way."""
    rng = np.random.default_rng(seed)
    names = frozenset(one.name for one in passes)
    seen = seen_of(judge, start, passes, 1)
    ops, tensors = np.flatnonzero(seen.free_ops), np.flatnonzero(seen.free_tensors)
    others = [
        move
        for one in passes
        if not one.saves_memory and one.name not in ("op_fusion", "tensor_fusion")
        for alternatives in one.propose(seen)
        for move in alternatives
    ]
    num = len(ops) + len(tensors) + len(others)
    at = best = start
    at_s = best_s = begin_s = judge.seconds(start)
    if not num or not names:
        return start
    for step in range(steps):
        moved = _toggled(at, int(rng.integers(num)), ops, tensors, others)
        seconds = judge.seconds(moved)
        warmth = begin_s * WARM * (COLD / WARM) ** (step / steps)
        if seconds <= at_s or rng.random() < np.exp((at_s - seconds) / warmth):
            at, at_s = moved, seconds
        if at_s < best_s:
            best, best_s = at, at_s
    return best


def _toggled(
    decisions: Decisions, which: int, ops: np.ndarray, tensors: np.ndarray, others: Sequence[Move]
) -> Decisions:
    if which < len(ops):
        k = int(ops[which])
        return decisions.with_op(k, not decisions.ops[k])
    which -= len(ops)
    if which < len(tensors):
        j = int(tensors[which])
        return decisions.with_tensor(j, not decisions.tensors[j])
    return others[which - len(tensors)].applied(decisions)
