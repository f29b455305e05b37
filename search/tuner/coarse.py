"""The coarsened view: joins that a search need not try (dPRO, arXiv:2205.02473, section 5.3), and blocks that repeat.

A compute without a gradient joins the one behind it, and gradients of one compute travel together: the first is
theorem 3 with nothing to send on one side, the second with nothing to compute.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from capture.traces.synthesise import Job
from search.tuner.decisions import Decisions, fusible

__all__ = ["classes", "coarsened", "open_joins"]


def open_joins(job: Job, *, coarse: bool, ops: bool, tensors: bool) -> tuple[np.ndarray, np.ndarray]:
    """Joins [K - 1], [G - 1] that a search may change."""
    free_ops = fusible(job) & ops
    free_tensors = np.full(max(len(job.gradients) - 1, 0), tensors)
    if coarse:
        forced = _forced(job)
        free_ops &= ~forced[0]
        free_tensors &= ~forced[1]
    return free_ops, free_tensors


def coarsened(job: Job, decisions: Decisions, *, ops: bool, tensors: bool) -> Decisions:
    """Decisions with the coarsened view's joins set."""
    forced = _forced(job)
    return replace(decisions, ops=decisions.ops | (forced[0] & ops), tensors=decisions.tensors | (forced[1] & tensors))


def _forced(job: Job) -> tuple[np.ndarray, np.ndarray]:
    makes = np.zeros(len(job.names), np.bool_)
    makes[[g.op for g in job.gradients]] = True
    saves = np.zeros(len(job.names)) if job.saves_s is None else np.nan_to_num(job.saves_s)
    op = np.array([g.op for g in job.gradients], dtype=np.int64)
    return fusible(job) & ~makes[:-1] & (saves[:-1] > 0.0), op[1:] == op[:-1]


def classes(job: Job) -> np.ndarray:
    """[K - 1]: joins between computes whose names differ in numbers alone have one number."""
    plain = [re.sub(r"\d+", "#", name) for name in job.names]
    known: dict[tuple[str, str], int] = {}
    pairs = zip(plain[:-1], plain[1:], strict=True)
    return np.array([known.setdefault(pair, len(known)) for pair in pairs], dtype=np.int64)
