"""Which shapes a schedule runs, where its chunks sit and in which order its ranks work: one row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from estimator.schedule.dualpipe import dualpipe
from estimator.schedule.one_way import gpipe, interleaved, one_f_one_b, zb_h1
from estimator.schedule.passes import Order, Pass
from estimator.strategy import Schedule

__all__ = ["check_conditions", "order", "placement"]


def check_conditions(schedule: Schedule, p: int, m: int, v: int) -> str | None:
    """Why (p, m, v) is illegal for the schedule: law, offence and remedy; None where it is legal.

    >>> check_conditions(Schedule.INTERLEAVED, 4, 6, 2)
    'interleaved needs micro-batches (6) divisible by pp (4); try 4 or 8'
    """
    for name, value in (("pp", p), ("vpp", v), ("micro-batches", m)):
        if value < 1:
            return f"{name} ({value}) must be at least 1; try 1"
    return _RULES[schedule].condition(schedule, p, m, v)


def order(schedule: Schedule, p: int, m: int, v: int = 1) -> Order:
    """The passes of each rank in order; ValueError where (p, m, v) is illegal.

    >>> [f"{x.kind.name}{x.micro_batch}" for x in order(Schedule.ONE_F_ONE_B, 2, 3)[0]]
    ['F0', 'F1', 'BW0', 'F2', 'BW1', 'BW2']
    """
    offence = check_conditions(schedule, p, m, v)
    if offence:
        raise ValueError(offence)
    return [list(_RULES[schedule].passes(p, m, v, rank)) for rank in range(p)]


def placement(schedule: Schedule, p: int, v: int = 1) -> np.ndarray:
    """Model chunk by rank and local chunk: int [p, local].

    >>> placement(Schedule.INTERLEAVED, 2, 3).tolist()
    [[0, 2, 4], [1, 3, 5]]
    >>> placement(Schedule.DUALPIPE, 4).tolist()
    [[0, 3], [1, 2], [2, 1], [3, 0]]
    """
    return _RULES[schedule].placement(p, v)


def _round_robin(p: int, v: int) -> np.ndarray:
    """Chunk j on rank j % p."""
    return np.arange(p * v).reshape(v, p).T.copy()


def _both_directions(p: int, v: int) -> np.ndarray:
    """Chunks i and p - 1 - i on rank i."""
    return np.stack([np.arange(p), np.arange(p)[::-1]], axis=1)


def _one_chunk(schedule: Schedule, p: int, m: int, v: int) -> str | None:
    if v != 1:
        return f"{schedule.value} runs one chunk a rank, but vpp is {v}; try vpp 1 or schedule interleaved"
    return None


def _whole_rounds(schedule: Schedule, p: int, m: int, v: int) -> str | None:
    if m % p:
        near = f"{m // p * p} or {(m // p + 1) * p}" if m > p else f"{p}"
        return f"{schedule.value} needs micro-batches ({m}) divisible by pp ({p}); try {near}"
    return None


def _two_directions(schedule: Schedule, p: int, m: int, v: int) -> str | None:
    if v != 1:
        return _one_chunk(schedule, p, m, v)
    if p % 2:
        return f"{schedule.value} needs an even pp, but pp is {p}; try {p + 1}"
    if m % 2 or m < 2 * p:
        least = max(2 * p, m + m % 2)
        return f"{schedule.value} needs an even number of micro-batches, at least 2 pp ({2 * p}), got {m}; try {least}"
    return None


class _Rule(NamedTuple):
    passes: Callable[[int, int, int, int], Iterator[Pass]]
    placement: Callable[[int, int], np.ndarray]
    condition: Callable[[Schedule, int, int, int], str | None]


_RULES: dict[Schedule, _Rule] = {
    Schedule.GPIPE: _Rule(gpipe, _round_robin, _one_chunk),
    Schedule.ONE_F_ONE_B: _Rule(one_f_one_b, _round_robin, _one_chunk),
    Schedule.INTERLEAVED: _Rule(interleaved, _round_robin, _whole_rounds),
    Schedule.ZB_H1: _Rule(zb_h1, _round_robin, _one_chunk),
    Schedule.DUALPIPE: _Rule(dualpipe, _both_directions, _two_directions),
}
