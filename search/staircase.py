# mypy: disallow-untyped-decorators=False
"""A two-objective front kept as a staircase: x ascending, y strictly descending. Both are minimised.

Only strictly dominated points are dropped; of equal ones the lowest id stays, so the front does not depend on the
order in which candidates come.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from estimator.jit import kernel

__all__ = ["Staircase", "beater", "insert", "is_beaten", "last_at_most", "new_staircase"]

CAPACITY = 1 << 17  # points; a front of 10^4 is large, and 3 MB are cheap


class Staircase(NamedTuple):
    """Points `x`, `y`, `id` [CAPACITY], of which the first `size[0]` are in use."""

    x: np.ndarray
    y: np.ndarray
    id: np.ndarray
    size: np.ndarray

    def points(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies of the points in use: x, y, id."""
        n = int(self.size[0])
        return self.x[:n].copy(), self.y[:n].copy(), self.id[:n].copy()


def new_staircase() -> Staircase:
    """An empty front."""
    return Staircase(np.empty(CAPACITY), np.empty(CAPACITY), np.empty(CAPACITY, np.int64), np.zeros(1, np.int64))


@kernel
def last_at_most(xs: np.ndarray, n: int, x: float) -> int:
    """Index of the last point whose x is at most `x`, or -1."""
    low, high = 0, n
    while low < high:
        middle = (low + high) >> 1
        if xs[middle] <= x:
            low = middle + 1
        else:
            high = middle
    return low - 1


@kernel
def beater(xs: np.ndarray, ys: np.ndarray, n: int, x: float, y: float) -> int:
    """Index of a point of a staircase that is nowhere worse than (x, y) and somewhere better, or -1."""
    i = last_at_most(xs, n, x)
    return i if i >= 0 and (ys[i] < y or (ys[i] == y and xs[i] < x)) else -1


@kernel
def is_beaten(front: Staircase, x: float, y: float) -> bool:
    """Whether a point of the front is nowhere worse than (x, y) and somewhere better."""
    return bool(beater(front.x, front.y, front.size[0], x, y) >= 0)


@kernel
def insert(front: Staircase, x: float, y: float, candidate: int) -> None:
    """Offer a point that `is_beaten` has let through."""
    n = front.size[0]
    i = last_at_most(front.x, n, x)
    if i >= 0 and front.x[i] == x and front.y[i] == y:
        front.id[i] = min(front.id[i], candidate)
        return
    start = i if i >= 0 and front.x[i] == x else i + 1
    stop = start
    while stop < n and front.y[stop] >= y:
        stop += 1
    shift = 1 - (stop - start)
    if n + shift > front.x.size:
        raise ValueError("a front must stay within its capacity of 131072 points; constrain or coarsen the space")
    if shift > 0:
        for j in range(n - 1, stop - 1, -1):
            front.x[j + 1], front.y[j + 1], front.id[j + 1] = front.x[j], front.y[j], front.id[j]
    elif shift < 0:
        for j in range(stop, n):
            front.x[j + shift], front.y[j + shift], front.id[j + shift] = front.x[j], front.y[j], front.id[j]
    front.x[start], front.y[start], front.id[start] = x, y, candidate
    front.size[0] = n + shift
