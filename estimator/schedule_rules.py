"""What a schedule asks of a pipeline: the predicate for the table in rules.py, and which of its conditions is broken.

Stricter than the order generator (estimator/schedule/rules.py), which also runs what another schedule's name is for: a
pipeline of one stage, interleaving of one chunk.
"""

from __future__ import annotations

import numpy as np

from estimator.schedule.rules import VEES, check_conditions
from estimator.strategy import Schedule, Strategy

__all__ = ["paired", "schedule_refusal", "schedule_runs"]

CHUNKED = frozenset({Schedule.INTERLEAVED, Schedule.BREADTH_FIRST})
"""Schedules that cut a rank's layers into two chunks or more."""


def paired(schedule: Schedule) -> bool:
    """Whether forward and backward of different micro-batches run side by side.

    Then the all-to-all of one can hide behind the compute of the other.
    """
    return schedule in {Schedule.INTERLEAVED, Schedule.DUALPIPE, Schedule.DUALPIPE_V}


def schedule_runs(strategy: Strategy, pp: np.ndarray, v: np.ndarray, m: np.ndarray) -> np.ndarray:
    """Whether the schedule runs on pp ranks of v chunks with m micro-batches."""
    schedule = strategy.schedule
    if schedule is Schedule.INTERLEAVED:
        group = np.maximum(pp, 1) if strategy.interleave_group == 0 else strategy.interleave_group
        left = m % group
        return np.asarray((pp >= 2) & (v >= 2) & (group >= pp) & (m >= group) & ((left == 0) | (left >= pp)))
    if schedule is Schedule.BREADTH_FIRST:
        return (pp >= 2) & (v >= 2)
    if schedule in VEES:
        return (pp >= 2) & (v == 2) & ((schedule is not Schedule.DUALPIPE_V) | (m >= 2 * pp))
    if schedule is Schedule.DUALPIPE:
        return (v == 1) & (pp >= 2) & (pp % 2 == 0) & (m % 2 == 0) & (m >= 2 * pp)
    if schedule is Schedule.ONE_F_ONE_B:
        return np.asarray(v == 1)
    return (v == 1) & (pp >= 2)


def schedule_refusal(strategy: Strategy, pp: int, v: int, m: int) -> tuple[str, str]:
    """Law and remedy of the condition that is broken, of this schedule alone; empty where none is.

    >>> schedule_refusal(Strategy(schedule=Schedule.ZB_V), 4, 1, 8)
    ('zb-v runs two chunks a rank in a V, but vpp is 1', 'try vpp 2')
    """
    schedule = strategy.schedule
    if pp < 2 and schedule is not Schedule.ONE_F_ONE_B:
        return f"{schedule.value} needs a pipeline, but pp is {pp}", "try schedule 1f1b, or pp 2 and more"
    if v < 2 and schedule in CHUNKED:
        return f"{schedule.value} needs at least two chunks a rank, but vpp is {v}", "try schedule 1f1b, or vpp 2"
    law, _, remedy = (check_conditions(schedule, pp, m, v, strategy.interleave_group) or "").partition("; ")
    return law, remedy
