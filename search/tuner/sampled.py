"""An Optuna study over the same decisions, by a few numbers: what a bucket holds, what runs as one, into what parts.

Joins by the hundred are no parameters that a sampler learns from, so trials choose rules: a cap for the first bucket
and one for the others, how long a fused compute may take, in the forward and the backward pass, and the bytes of a
part. What a rule says is judged as any other decision.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from estimator.tasks import Category
from search.space import Sampler
from search.tuner.baselines import capped
from search.tuner.decisions import Decisions, fusible
from search.tuner.judge import Judge
from search.tuner.moves import Pass
from search.tuner.passes import PART_BYTES

__all__ = ["TRIALS", "sample"]

TRIALS, BATCH = 256, 16
LEAST_BYTES = 1e5
SIZES = (None, *PART_BYTES)


def sample(judge: Judge, start: Decisions, passes: Sequence[Pass], *, seed: int, trials: int = TRIALS) -> Decisions:
    """The best of the trials and the start."""
    from search.study import Study

    names = {one.name for one in passes}
    best, best_s = start, judge.seconds(start)
    total = sum(g.nbytes for g in judge.shown.gradients)
    levels = {"first": 0, "cap": 0, "forward": 0, "backward": 0, "parts": len(SIZES)}
    with tempfile.TemporaryDirectory() as folder:
        study = Study(Path(folder, "study.log"), name="tune", fingerprint="", sampler=Sampler.TPE, seed=seed,
                      levels=levels, higher=(False,))  # fmt: skip
        for _ in range(0, trials, BATCH):
            for trial, asked in study.ask(BATCH):
                decisions = _ruled(judge, start, names, asked, total)
                seconds = judge.seconds(decisions)
                study.tell(trial, [min(seconds, 1e30)], {}, {})
                if seconds < best_s:
                    best, best_s = decisions, seconds
    return best


def _ruled(judge: Judge, start: Decisions, names: set[str], asked: Mapping[str, float], total: float) -> Decisions:
    """What the rules of a trial say. Shares are of a logarithm: of bytes, and of the seconds of a pass."""
    decisions = start
    if "tensor_fusion" in names:
        span = np.log(max(total / LEAST_BYTES, 1.0))
        first, cap = (float(LEAST_BYTES * np.exp(span * asked[key])) for key in ("first", "cap"))
        decisions = capped(judge, replace(decisions, cycle_s=0.0), cap, first_bytes=first)
    if "op_fusion" in names:
        decisions = replace(decisions, ops=_ops(judge, asked))
    if "tensor_partition" in names:
        decisions = replace(decisions, part_bytes=SIZES[int(asked["parts"])])
    return decisions


def _ops(judge: Judge, asked: Mapping[str, float]) -> np.ndarray:
    """Joins of computes until what runs as one takes so long."""
    job = judge.shown
    seconds, allowed = (job.seconds + job.lag_s).max(axis=0), fusible(job)
    joins = np.zeros(len(allowed), np.bool_)
    for key, category in (("forward", Category.FORWARD), ("backward", Category.BACKWARD)):
        whole = float(seconds[[c is category for c in job.category]].sum())
        limit, held = whole * 10.0 ** (-4.0 * (1.0 - asked[key])), 0.0
        for k in np.flatnonzero(allowed & np.array([c is category for c in job.category[:-1]])).tolist():
            held = held if k and joins[k - 1] else float(seconds[k])
            joins[k] = held + seconds[k + 1] <= limit
            held += float(seconds[k + 1])
    return joins
