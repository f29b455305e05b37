"""Which shapes a schedule runs, where its chunks sit and in which order its ranks work: one row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from estimator.schedule.dualpipe import dualpipe, dualpipe_v
from estimator.schedule.one_way import breadth_first, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2
from estimator.schedule.passes import Order, Pass
from estimator.schedule.searched import zero_bubble
from estimator.schedule.vee import v_half, v_min, zb_v
from estimator.strategy import Schedule

__all__ = ["VEES", "check_conditions", "order", "placement"]


Orders = Callable[[int, int, int, int], Order]
"""From p, m, v and the group of interleaved to the passes of all ranks."""

VEES = frozenset({Schedule.ZB_V, Schedule.V_HALF, Schedule.V_MIN, Schedule.DUALPIPE_V})
"""Schedules over two chunks a rank in a V: both ends of the model are on rank 0."""


def check_conditions(schedule: Schedule, p: int, m: int, v: int, group: int = 0) -> str | None:
    """Why (p, m, v) is illegal for the schedule: law, offence and remedy; None where it is legal.

    `group`: micro-batches that interleaved sends through a chunk at a time, 0 for p; others have no use for it.

    >>> check_conditions(Schedule.INTERLEAVED, 4, 6, 2)
    'interleaved needs micro-batches (6) divisible by pp (4); try 4 or 8'
    """
    for name, value in (("pp", p), ("vpp", v), ("micro-batches", m)):
        if value < 1:
            return f"{name} ({value}) must be at least 1; try 1"
    return _RULES[schedule].condition(schedule, p, m, v, group or p)


def order(schedule: Schedule, p: int, m: int, v: int = 1, group: int = 0) -> Order:
    """The passes of each rank in order; ValueError where (p, m, v) is illegal. `group`: as in `check_conditions`.

    >>> [f"{x.kind.name}{x.micro_batch}" for x in order(Schedule.ONE_F_ONE_B, 2, 3)[0]]
    ['F0', 'F1', 'BW0', 'F2', 'BW1', 'BW2']
    """
    offence = check_conditions(schedule, p, m, v, group)
    if offence:
        raise ValueError(offence)
    return _RULES[schedule].passes(p, m, v, group or p)


def placement(schedule: Schedule, p: int, v: int = 1) -> np.ndarray:
    """Model chunk by rank and local chunk: int [p, local].

    >>> placement(Schedule.INTERLEAVED, 2, 3).tolist()
    [[0, 2, 4], [1, 3, 5]]
    >>> placement(Schedule.DUALPIPE, 4).tolist()
    [[0, 3], [1, 2], [2, 1], [3, 0]]
    >>> placement(Schedule.ZB_V, 2, 2).tolist()
    [[0, 3], [1, 2]]
    """
    return _RULES[schedule].placement(p, v)


def _round_robin(p: int, v: int) -> np.ndarray:
    """Chunk j on rank j % p."""
    return np.arange(p * v).reshape(v, p).T.copy()


def _both_directions(p: int, v: int) -> np.ndarray:
    """Chunks i and p - 1 - i on rank i."""
    return np.stack([np.arange(p), np.arange(p)[::-1]], axis=1)


def _vee(p: int, v: int) -> np.ndarray:
    """Chunks i and 2p - 1 - i on rank i."""
    return np.stack([np.arange(p), np.arange(p, 2 * p)[::-1]], axis=1)


def _one_chunk(schedule: Schedule, p: int, m: int, v: int, group: int) -> str | None:
    if v != 1:
        return f"{schedule.value} runs one chunk a rank, but vpp is {v}; try vpp 1 or schedule interleaved"
    return None


def _any_shape(schedule: Schedule, p: int, m: int, v: int, group: int) -> str | None:
    return None


def _whole_groups(schedule: Schedule, p: int, m: int, v: int, group: int) -> str | None:
    """Megatron-Core's rule: group in [pp, m], and a last, smaller group of at least pp."""
    if group < p:
        return f"{schedule.value} needs groups ({group}) of at least pp ({p}) micro-batches; try {p}"
    if p <= m < group:
        return f"{schedule.value} needs groups ({group}) of at most all micro-batches ({m}); try {m}"
    if m < p or 0 < m % group < p:
        near = f"{m // group * group} or {(m // group + 1) * group}" if m > group else f"{group}"
        if group == p:
            return f"{schedule.value} needs micro-batches ({m}) divisible by pp ({p}); try {near}"
        if m < p:
            return f"{schedule.value} in groups ({group}) needs at least as many micro-batches, got {m}; try {near}"
        return f"{schedule.value} in groups ({group}) needs none of {m} micro-batches left, or pp ({p}); try {near}"
    return None


def _two_directions(schedule: Schedule, p: int, m: int, v: int, group: int) -> str | None:
    if v != 1:
        return _one_chunk(schedule, p, m, v, group)
    if p % 2:
        return f"{schedule.value} needs an even pp, but pp is {p}; try {p + 1}"
    if m % 2 or m < 2 * p:
        least = max(2 * p, m + m % 2)
        return f"{schedule.value} needs an even number of micro-batches, at least 2 pp ({2 * p}), got {m}; try {least}"
    return None


def _two_chunks(schedule: Schedule, p: int, m: int, v: int, group: int) -> str | None:
    if v != 2:
        return f"{schedule.value} runs two chunks a rank in a V, but vpp is {v}; try vpp 2"
    if schedule is Schedule.DUALPIPE_V and m < 2 * p:
        return f"{schedule.value} needs at least 2 pp ({2 * p}) micro-batches, got {m}; try {2 * p}"
    return None


def _each(passes: Callable[[int, int, int, int], Iterator[Pass]]) -> Orders:
    """An order from one of each rank: (p, m, v, rank)."""
    return lambda p, m, v, group: [list(passes(p, m, v, rank)) for rank in range(p)]


def _interleaved(p: int, m: int, v: int, group: int) -> Order:
    return [list(interleaved(p, m, v, rank, group)) for rank in range(p)]


def _searched(times_p: int) -> Orders:
    """Searched for passes that are all equally long: `times_p` times p activations on each rank."""
    return lambda p, m, v, group: zero_bubble(p, m, [times_p * p] * p, *np.ones((3, p)))


class _Rule(NamedTuple):
    passes: Orders
    placement: Callable[[int, int], np.ndarray]
    condition: Callable[[Schedule, int, int, int, int], str | None]


_RULES: dict[Schedule, _Rule] = {
    Schedule.GPIPE: _Rule(_each(gpipe), _round_robin, _one_chunk),
    Schedule.ONE_F_ONE_B: _Rule(_each(one_f_one_b), _round_robin, _one_chunk),
    Schedule.INTERLEAVED: _Rule(_interleaved, _round_robin, _whole_groups),
    Schedule.BREADTH_FIRST: _Rule(_each(breadth_first), _round_robin, _any_shape),
    Schedule.ZB_H1: _Rule(_each(zb_h1), _round_robin, _one_chunk),
    Schedule.ZB_H2: _Rule(_each(zb_h2), _round_robin, _one_chunk),
    Schedule.ZB_1P: _Rule(_searched(1), _round_robin, _one_chunk),
    Schedule.ZB_2P: _Rule(_searched(2), _round_robin, _one_chunk),
    Schedule.ZB_V: _Rule(_each(zb_v), _vee, _two_chunks),
    Schedule.V_HALF: _Rule(lambda p, m, v, group: v_half(p, m), _vee, _two_chunks),
    Schedule.V_MIN: _Rule(lambda p, m, v, group: v_min(p, m), _vee, _two_chunks),
    Schedule.DUALPIPE: _Rule(_each(dualpipe), _both_directions, _two_directions),
    Schedule.DUALPIPE_V: _Rule(_each(dualpipe_v), _vee, _two_chunks),
}
