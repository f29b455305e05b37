"""How many layers each pipeline chunk gets so that the busiest rank has least to do within its memory.

`balance` takes what chunks cost (balance_costs.py) and where they sit; auto_layout.py asks it for a configuration.
Knows nothing of schedules beyond their placement, and nothing of what a step takes: spans depend on order as well.

Exact by dynamic programming (balance_walk.py):
- one chunk a rank: over boundaries, in model order;
- chunks k and C - 1 - k on one rank (DualPipe; the V of ZB-V and DualPipeV): over pairs of boundaries;
- round-robin, several chunks a rank (interleaved): exact in the seconds of the busiest rank where all layers after a
  prefix are alike and their seconds add up (ZeRO-2 and 3 hide traffic behind a chunk's compute, so theirs do not
  quite); memory is that of chunks as even as they go. Where kinds of layers alternate, or the prefix is longer than
  MAX_PREFIX, it balances chunks in place of ranks and gives each an equal share of the memory.

Of layouts whose busiest rank is equally busy, the one whose chunks are most alike (least sum of squared seconds), then
the one that holds more in later chunks, which keep fewer micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from estimator.balance_costs import ChunkCosts
from estimator.balance_walk import BYTES, SECONDS, SQUARES, Room, one_each, pairs, rank_bytes, round_robin
from estimator.compose import Constants
from estimator.layout import even_layers

__all__ = ["MARGIN", "Balanced", "Shape", "balance", "fastest", "prefix_of", "rank_loads", "shape_of", "unlimited"]

SHADE = 1e-12  # what the same seconds or bytes may differ by where they are added in another order
MARGIN = 1e-9  # what a cut or a limit that was reckoned elsewhere may differ by
ANY_BYTES = 1e300  # a limit that is none, and yet has memory counted
MAX_PREFIX = 8  # layers before the alike ones, which are spread over chunks in every way: 2^8 of them


class Shape(Enum):
    """How chunks sit on ranks."""

    ONE_EACH = "one chunk a rank"
    PAIRS = "the k-th chunk and the k-th from the end"
    ROUND_ROBIN = "chunk c on rank c % p"
    BY_CHUNK = "round-robin, balanced by chunk: exact in chunks, not in ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """`layers` [C] in model order; seconds of one micro-batch and bytes of the worst rank (0: not asked).

    `fits`: within the memory limit; where nothing is, the layout that comes closest.
    """

    layers: tuple[int, ...]
    seconds: float
    nbytes: float
    fits: bool
    shape: Shape


def unlimited(num_chunks: int) -> Room:
    """Room without a limit."""
    none = Constants(**dict.fromkeys(Constants._fields, 0.0))._replace(expert_bucket=-1.0, matrix_bytes=-1.0)
    return Room(np.inf, 0.0, 0.0, 0, np.zeros(2), np.zeros(num_chunks), np.zeros((2, num_chunks)), none)


def prefix_of(kinds: Sequence[int] | np.ndarray) -> int:
    """Layers before the last run of alike ones.

    >>> prefix_of([0, 0, 1, 1, 1])
    2
    """
    last = len(kinds)
    while last and kinds[last - 1] == kinds[-1]:
        last -= 1
    return last


def shape_of(chunks: np.ndarray, prefix: int) -> Shape:
    """What a placement [p, local] calls for.

    >>> shape_of(np.array([[0, 3], [1, 2]]), 0)
    <Shape.PAIRS: 'the k-th chunk and the k-th from the end'>
    """
    ranks, local = chunks.shape
    if local == 1:
        return Shape.ONE_EACH
    num = int(chunks.max()) + 1
    if local == 2 and (chunks.sum(axis=1) == num - 1).all():
        return Shape.PAIRS
    assert (chunks == np.arange(num).reshape(local, ranks).T).all(), "a placement that balance does not know"
    return Shape.ROUND_ROBIN if prefix <= MAX_PREFIX else Shape.BY_CHUNK


def balance(
    costs: ChunkCosts, chunks: np.ndarray, room: Room, prefix: int = 0, *, thrifty: bool = False
) -> Balanced:  # fmt: skip
    """The best layout of L layers on the chunks of a placement [p, local]; C <= L + 2.

    `thrifty`: of those whose busiest rank is equally busy, one whose fullest rank is least full, then chunks most alike
    (not round-robin, where memory is that of chunks as even as they go).
    """
    walk = _Walk(costs, np.ascontiguousarray(chunks, dtype=np.int64), room, shape_of(chunks, prefix), prefix)
    even = np.array(even_layers(len(costs.floor) - 1, len(costs.slot)), dtype=np.int64)
    even_seconds, even_bytes = walk.loads(even)
    best = walk.fastest(even_seconds, np.inf)
    seconds, nbytes = walk.loads(best)
    if nbytes > room.limit:
        best = walk.within(even, room.limit)
        seconds, nbytes = walk.loads(best)
    if thrifty and walk.shape in {Shape.ONE_EACH, Shape.PAIRS}:
        cut = seconds * (1.0 + SHADE)
        least, _ = walk.walk(BYTES, cut, nbytes)
        best = walk.walk(SQUARES, cut, least)[1]
        seconds, nbytes = walk.loads(best)
    layers = tuple(best.tolist())
    return Balanced(
        layers=layers, seconds=seconds, nbytes=nbytes, fits=nbytes <= room.limit * (1.0 + SHADE), shape=walk.shape
    )


def fastest(costs: ChunkCosts, chunks: np.ndarray, prefix: int, cut: float) -> tuple[int, ...]:
    """The layout of `balance` without a memory limit, where some layout is known to keep within `cut` seconds."""
    walk = _Walk(costs, chunks, unlimited(len(costs.slot)), shape_of(chunks, prefix), prefix)
    return tuple(walk.fastest(cut, np.inf).tolist())


def rank_loads(costs: ChunkCosts, chunks: np.ndarray, room: Room, layers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of every rank [p] under a layout [C]; bytes are 0 where the room has no limit."""
    ends = np.cumsum(layers)
    of_chunk = costs.seconds[costs.slot, ends - layers, ends]
    limited = np.isfinite(room.limit)
    nbytes = [rank_bytes(costs, room, rank, layers) if limited else 0.0 for rank in chunks]
    return of_chunk[chunks].sum(axis=1), np.array(nbytes)


@dataclass(slots=True)
class _Walk:
    """One problem: its costs, its placement and the walk that suits it."""

    costs: ChunkCosts
    chunks: np.ndarray
    room: Room
    shape: Shape
    prefix: int

    def loads(self, layers: np.ndarray) -> tuple[float, float]:
        """Seconds and bytes of the worst rank."""
        seconds, nbytes = rank_loads(self.costs, self.chunks, self.room, layers)
        return float(seconds.max()), float(nbytes.max())

    def fastest(self, cut: float, limit: float) -> np.ndarray:
        """Least seconds of the busiest rank within `limit` bytes, then chunks most alike; within `cut` there is one."""
        least, layers = self.walk(SECONDS, cut * (1.0 + MARGIN), limit)
        assert np.isfinite(least), "the layout that gave the cut is one"
        return layers if self.shape is Shape.ROUND_ROBIN else self.walk(SQUARES, least * (1.0 + SHADE), limit)[1]

    def within(self, even: np.ndarray, limit: float) -> np.ndarray:
        """The fastest that fits; where none does, the fastest of those that take least on the worst rank."""
        even_seconds, even_bytes = self.loads(even)
        if self.shape is Shape.ROUND_ROBIN:
            return self._round_robin_within(even, even_bytes, limit)
        if even_bytes <= limit and self.shape is not Shape.BY_CHUNK:
            return self.fastest(even_seconds, limit)
        least, smallest = self.walk(BYTES, np.inf, ANY_BYTES if self.shape is Shape.BY_CHUNK else even_bytes)
        assert np.isfinite(least), "the even layout is one"
        if self.shape is Shape.BY_CHUNK:  # shares of chunks are a stricter limit than the rank's own
            return smallest if self.walk(SECONDS, np.inf, limit)[0] == np.inf else self.fastest(np.inf, limit)
        return self.fastest(self.loads(smallest)[0], max(limit, least))

    def _round_robin_within(self, even: np.ndarray, even_bytes: float, limit: float) -> np.ndarray:
        """The same, where the even layout may fit though no layout with chunks as even as they go does."""
        least, layers = self.walk(SECONDS, np.inf, limit)
        if np.isfinite(least):
            return layers
        _, smallest = self.walk(BYTES, np.inf, ANY_BYTES)
        return smallest if limit < even_bytes and self.loads(smallest)[1] < even_bytes else even

    def walk(self, goal: int, cut: float, limit: float) -> tuple[float, np.ndarray]:
        """Value and layers [C] of the best; the value is infinite where there is none."""
        layers = np.zeros(len(self.costs.slot), dtype=np.int64)
        room = self.room._replace(limit=limit * (1.0 + SHADE))
        if self.shape is Shape.PAIRS:
            return float(pairs(self.costs, room, goal, cut, layers)), layers
        if self.shape is Shape.ROUND_ROBIN:
            return float(round_robin(self.costs, room, len(self.chunks), self.prefix, goal, layers)), layers
        if self.shape is Shape.BY_CHUNK and np.isfinite(limit):
            room = room._replace(limit=(limit - room.fixed) / self.chunks.shape[1] + room.fixed)
        return float(one_each(self.costs, room, goal, cut, layers)), layers
