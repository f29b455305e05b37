"""Which points nothing beats: dominance, hypervolume and the knee. Knows nothing of what the objectives mean.

`values: [N, K]` are objectives in their own units, K from 1 to 4; `higher: [K]` says which are better when larger
(all are minimised by default). Nothing depends on the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["hypervolume", "knee", "merge", "non_dominated", "spread", "worst"]

_MAX_OBJECTIVES = 4  # cost of exact hypervolume and of a reader's attention


def non_dominated(values: ArrayLike, ids: ArrayLike, higher: Sequence[bool] | None = None) -> NDArray[np.intp]:
    """Positions of the rows that no other row strictly dominates, in order of id.

    A row dominates another when it is nowhere worse and somewhere better. Of rows that are equal everywhere the one
    with the lowest id stays.

    >>> non_dominated([[1.0, 2.0], [2.0, 1.0], [2.0, 2.0], [1.0, 2.0]], ids=[9, 3, 1, 5]).tolist()
    [1, 3]
    """
    points = _oriented(_checked(values), higher)
    keys = np.asarray(ids)
    if keys.shape != (len(points),):
        raise ValueError(f"there must be one id a row, but got {keys.shape} ids for {len(points)} rows")
    order: NDArray[np.intp] = np.argsort(keys, kind="stable")
    if not len(points):
        return order
    ordered = np.ascontiguousarray(points[order])
    if ordered.shape[1] == 1:
        first_best = int(np.argmin(ordered[:, 0]))  # the first of equal rows has the lowest id
        return order[first_best : first_best + 1]
    unbeaten: NDArray[np.intp] = order[_unbeaten(ordered)]
    return unbeaten


def merge(
    fronts: Iterable[tuple[ArrayLike, ArrayLike]], higher: Sequence[bool] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The front of several `(ids [N], values [N, K])`, in order of id. A point given twice stays once."""
    parts = [(np.asarray(ids, dtype=np.int64), _checked(values)) for ids, values in fronts]
    if not parts:
        raise ValueError("at least one front is needed to merge")
    ids = np.concatenate([part[0] for part in parts])
    values = np.concatenate([part[1] for part in parts])
    kept = non_dominated(values, ids, higher)
    return ids[kept], values[kept]


def worst(values: ArrayLike, higher: Sequence[bool] | None = None) -> NDArray[np.float64]:
    """The worst value of each objective over the rows, `[K]`: the usual reference of the hypervolume."""
    points = _checked(values)
    if not len(points):
        raise ValueError("the worst of no points is undefined; give at least one row")
    largest = _signs(points, higher) > 0
    corner: NDArray[np.float64] = np.where(largest, points.max(axis=0), points.min(axis=0))
    return corner


def hypervolume(values: ArrayLike, reference: ArrayLike, higher: Sequence[bool] | None = None) -> float:
    """Volume between the points and the reference on log10 axes, in decades to the power K.

    Points that are worse than the reference in some objective add nothing. Log axes need positive values.

    >>> hypervolume([[1.0, 10.0], [10.0, 1.0]], reference=[100.0, 100.0])
    3.0
    """
    points, corner = _checked(values), _checked(np.atleast_2d(np.asarray(reference, dtype=np.float64)))
    if points.shape[1] != corner.shape[1]:
        raise ValueError(f"reference must have {points.shape[1]} objectives, but got {corner.shape[1]}")
    if (points <= 0).any() or (corner <= 0).any():
        raise ValueError(
            "hypervolume has log10 axes, so values must be positive; leave out objectives that can be zero"
        )
    axes, limit = _oriented(np.log10(points), higher), _oriented(np.log10(corner), higher)[0]
    if not len(axes):
        return 0.0
    if axes.shape[1] == 1:
        return max(0.0, float(limit[0] - axes[:, 0].min()))
    import moocore

    return float(moocore.hypervolume(axes, ref=limit))


def knee(values: ArrayLike, higher: Sequence[bool] | None = None) -> int:
    """Position of the row that bulges most towards the ideal: farthest from the plane through the extremes.

    With every objective scaled to 0 (best) .. 1 (worst) of the front on a log10 axis, the plane through the unit
    points is sum(x) = 1, and for two objectives it is the line between the front's ends; the distance is
    (1 - sum(x)) / sqrt(K). Source: Das 1999, "On characterizing the knee of the Pareto curve based on
    normal-boundary intersection", Structural Optimization 18; here the plane goes through the corners of the scaled
    box, which the individual optima of three and more objectives need not span. An objective with values of zero or
    less is scaled linearly. Equal rows: the first.

    >>> knee([[1.0, 100.0], [2.0, 2.0], [100.0, 1.0]])
    1
    """
    points = _checked(values)
    if not len(points):
        raise ValueError("no point of no points is the knee; give at least one row")
    return int(np.argmin(_scaled(points, higher).sum(axis=1)))


def spread(values: ArrayLike, chosen: Sequence[int], count: int) -> list[int]:
    """`count` rows that stand for all: `chosen` first, then always the row farthest from those taken.

    Distances are on the scaled axes of `knee` (farthest-first traversal, Gonzalez 1985, doi:10.1016/0304-3975(85)
    90224-5). Equal distances: the first.

    >>> spread([[1.0, 100.0], [1.01, 99.0], [10.0, 10.0], [100.0, 1.0]], chosen=[0, 3], count=3)
    [0, 3, 2]
    """
    axes = _scaled(_checked(values), None)
    taken = list(dict.fromkeys(chosen))[:count] or [0]
    distance = np.min([np.linalg.norm(axes - axes[i], axis=1) for i in taken], axis=0)
    while len(taken) < min(count, len(axes)):
        distance[taken] = -1.0
        taken.append(int(np.argmax(distance)))
        distance = np.minimum(distance, np.linalg.norm(axes - axes[taken[-1]], axis=1))
    return taken


def _scaled(points: NDArray[np.float64], higher: Sequence[bool] | None) -> NDArray[np.float64]:
    """Objectives from 0 (best) to 1 (worst of the rows), on log10 axes where all are positive."""
    positive = (points > 0).all(axis=0)
    axes = _oriented(np.where(positive, np.log10(np.where(positive, points, 1.0)), points), higher)
    span = np.ptp(axes, axis=0)
    scaled: NDArray[np.float64] = (axes - axes.min(axis=0)) / np.where(span > 0, span, 1.0)
    return scaled


def _checked(values: ArrayLike) -> NDArray[np.float64]:
    points: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    if points.ndim != 2 or not 1 <= points.shape[1] <= _MAX_OBJECTIVES:
        raise ValueError(f"objectives must be [N, K] with 1 <= K <= {_MAX_OBJECTIVES}, but got shape {points.shape}")
    bad = ~np.isfinite(points).all(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"objectives must be finite, but row {row} is {points[row].tolist()}")
    return points


def _signs(points: NDArray[np.float64], higher: Sequence[bool] | None) -> NDArray[np.float64]:
    num_objectives = points.shape[1]
    flags = [False] * num_objectives if higher is None else list(higher)
    if len(flags) != num_objectives:
        raise ValueError(f"there must be one direction per objective ({num_objectives}), but got {flags}")
    return np.where(flags, -1.0, 1.0)


def _oriented(points: NDArray[np.float64], higher: Sequence[bool] | None) -> NDArray[np.float64]:
    return points * _signs(points, higher)


def _unbeaten(ordered: NDArray[np.float64]) -> NDArray[Any]:
    import moocore

    # keep_weakly=False keeps the first of equal rows, and rows come in order of id.
    mask: NDArray[Any] = moocore.is_nondominated(ordered, keep_weakly=False)
    return mask
