"""Measured operators looked up: the seconds of a table's own row, or those between its rows; beyond them, no answer.

Between rows seconds follow straight lines in logarithms of sizes and seconds, and every row that a line needs must be
there: nothing is extrapolated. Products go by m, n and k; fused causal attention of whole sequences by batch and length
among rows of its heads. A content is looked up once. Knows no files.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from estimator.cost.work import Work
from estimator.graph import Block
from estimator.op import Array, Op, OpKind, Phase
from estimator.precision import PrecisionRecipe
from hardware.chip import ChipSpec
from hardware.op_times import OpTimes

__all__ = ["Looked", "MeasuredTable", "Rows", "rows_of"]

Key = tuple[float, ...]
NONE = math.nan
WHOLE = 1.0  # visible: all of the causal half


class Looked(NamedTuple):
    """Seconds (NaN where the table has none), and 1 where they are those of a row, 0 where they are between rows."""

    seconds: Array
    exact: Array


@dataclass(slots=True)
class Rows:
    """Rows of one part of a table: `curves` by their outer sizes, each the last size and the seconds, ascending."""

    curves: dict[Key, tuple[list[float], list[float]]]
    outer: list[list[float]]
    found: dict[Key, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: np.ndarray) -> Rows:
        """From rows [N, sizes and seconds], the last size along a curve."""
        curves: dict[Key, tuple[list[float], list[float]]] = {}
        for *sizes, last, seconds in sorted(rows.tolist()):
            along, taken = curves.setdefault(tuple(sizes), ([], []))
            along.append(last)
            taken.append(seconds)
        return cls(curves, [sorted({key[i] for key in curves}) for i in range(rows.shape[1] - 2)])

    def seconds(self, sizes: Key) -> tuple[float, float]:
        """Of one operator, and whether a row has it; NaN where there are no rows around it."""
        if sizes not in self.found:
            self.found[sizes] = self._between(sizes)
        return self.found[sizes]

    def _between(self, sizes: Key) -> tuple[float, float]:
        *outer, last = sizes
        if tuple(outer) in self.curves:
            return self._along(tuple(outer), last)
        sides = [_around(known, size) for known, size in zip(self.outer, outer, strict=True)]
        total = 0.0
        for corner in itertools.product(*sides):
            key = tuple([known for known, _ in corner])
            seconds, _ = self._along(key, last) if key in self.curves else (NONE, 0.0)
            total += math.prod(weight for _, weight in corner) * math.log(seconds)
        return (math.exp(total), 0.0) if sides and all(sides) else (NONE, 0.0)

    def _along(self, key: Key, size: float) -> tuple[float, float]:
        along, taken = self.curves[key]
        total = 0.0
        for known, weight in (around := _around(along, size)):
            seconds = taken[bisect_left(along, known)]
            if weight == 1.0:
                return seconds, 1.0
            total += weight * math.log(seconds)
        return (math.exp(total), 0.0) if around else (NONE, 0.0)


def _around(known: Sequence[float], size: float) -> tuple[tuple[float, float], ...]:
    """The known sizes next to one, with their weights; itself alone where it is known, nothing beyond the ends."""
    i = bisect_left(known, size)
    if i < len(known) and known[i] == size:
        return ((size, 1.0),)
    if i in {0, len(known)}:
        return ()
    low, high = known[i - 1], known[i]
    above = math.log(size / low) / math.log(high / low)
    return (low, 1.0 - above), (high, above)


@lru_cache(maxsize=64)
def rows_of(times: OpTimes) -> dict[tuple[str, ...], Rows]:
    """Rows by kind and part; those of attention by its heads, key heads and head dim as well."""
    found: dict[tuple[str, ...], Rows] = {}
    for kind, parts in times.tables().items():
        for part, rows in parts.items():
            if kind == "gemm":
                found[kind, part] = Rows.of(rows[:, [1, 2, 0, 3]])  # a weight's sizes, and along m
                continue
            heads = rows[:, 2:5]
            for one in np.unique(heads, axis=0):
                mine = np.all(heads == one, axis=1)
                found[kind, part, *(f"{size:g}" for size in one)] = Rows.of(rows[mine][:, [0, 1, 5]])
    return found


class MeasuredTable:
    """The backend of chips that bring a table. Answers with whole seconds; what it lacks, the next backend prices.

    Ahead of the tile model, whose rates are those of measured products as well, but on average (CONTRIBUTING.md).
    Gradients that are added to those of earlier micro-batches pay for that traffic besides.
    """

    name = "table"
    priority = 120

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """Products, and causal attention in one kernel."""
        if chip.times is None:
            return False
        return op.kind is OpKind.MATMUL or (op.kind is OpKind.ATTENTION and not op.reach and not op.selects)

    def look_up(self, op: Op, block: Block, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Looked:
        """Seconds of each row of the sizes."""
        assert chip.times is not None
        known = rows_of(chip.times)
        if op.kind is OpKind.MATMUL:
            _, m, k, n = amount.gemm
            rows = known.get(("gemm", amount.dtype.value))
            found = Looked(NONE, 0.0) if rows is None else _each(rows.seconds, (n, k, m))
            behind = amount.behind / (chip.hbm_bytes_per_s * chip.hbm_efficiency)
            return found._replace(seconds=found.seconds + behind)
        batch, query, key, heads, qk, value = (d.size for d in op.dims)
        back = op.phase is Phase.BACKWARD  # whose outputs are the gradients of what forward reads
        kv = block.tensors[(op.outputs if back else op.inputs)[1]].dims[-1].size / qk
        part = f"{recipe.attention.value} {'backward' if back else 'forward'}"

        def attention(sizes: Key) -> tuple[float, float]:
            b, q, keys, num, num_kv, wide, narrow, seen = sizes
            if q != keys or wide != narrow or seen != WHOLE:
                return NONE, 0.0
            rows = known.get(("attention", part, f"{num:g}", f"{num_kv:g}", f"{wide:g}"))
            return (NONE, 0.0) if rows is None else rows.seconds((b, q))

        return _each(attention, (batch, query, key, heads, kv, qk, value, op.visible))


def _each(ask: Callable[[Key], tuple[float, float]], sizes: Sequence[Array]) -> Looked:
    num = max(np.size(size) for size in sizes)
    if num == 1:
        return Looked(*ask(tuple([float(np.asarray(size).reshape(-1)[0]) for size in sizes])))
    rows = np.stack([np.broadcast_to(np.asarray(size, dtype=np.float64), (num,)) for size in sizes], axis=1)
    found = np.array([ask(tuple(row)) for row in rows.tolist()])
    return Looked(found[:, 0], found[:, 1])
