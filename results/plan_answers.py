"""What a plan answers: fewest chips in time, the cheapest, the quickest within a budget, and where scaling bends.

Points are rows of a front, or the fastest layout of each cluster. Computes no seconds: those are the plan's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from results.pareto import knee
from results.plan import Plan
from results.table import Table

__all__ = ["Answers", "Curve", "answers", "curves"]

FEW = 3  # sizes of a cluster from which a curve has a bend


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A cluster over its sizes, smallest first: places of the fastest point of each size, and of the knee if any.

    `efficiency`: work per GPU-hour against that of the smallest size.
    """

    system: str
    places: tuple[int, ...]
    efficiency: tuple[float, ...]
    knee: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Places of points within the limits; None where there is no such point. `cheapest_by_system`: cheapest first."""

    fewest_gpus: int | None
    cheapest: int | None
    quickest: int | None
    cheapest_by_system: tuple[int, ...]


def answers(front: Table, points: Plan, within: NDArray[np.bool_]) -> Answers:
    """The best of the points that keep the limits, `within` [N]; ties go to the cheaper, then to the quicker."""
    kept = np.flatnonzero(within)
    gpus = front["num_gpus"]

    def first(*keys: NDArray[np.float64]) -> int | None:
        """By the first key, then by the others, then by the order of rows."""
        return None if not len(kept) else int(kept[np.lexsort([key[kept] for key in reversed(keys)])[0]])

    systems = front["system"]
    by_system = []
    for name in dict.fromkeys(systems[kept].tolist()):
        mine = kept[systems[kept] == name]
        by_system.append(int(mine[np.lexsort((points.days[mine], points.cost_usd[mine]))[0]]))
    by_system.sort(key=lambda place: (points.cost_usd[place], points.days[place]))
    return Answers(
        fewest_gpus=first(gpus, points.cost_usd, points.days), cheapest=first(points.cost_usd, points.days),
        quickest=first(points.days, points.cost_usd), cheapest_by_system=tuple(by_system),
    )  # fmt: skip


def curves(front: Table, points: Plan) -> list[Curve]:
    """Each cluster that has several sizes: days against chips, on log axes, and the point that bulges most."""
    found = []
    systems, gpus = front["system"], front["num_gpus"]
    for name in dict.fromkeys(systems.tolist()):
        mine = np.flatnonzero(systems == name)
        best = [mine[gpus[mine] == size] for size in np.unique(gpus[mine])]
        places = [int(group[np.lexsort((points.cost_usd[group], points.days[group]))[0]]) for group in best]
        if len(places) > 1:
            found.append(_curve(name, places, gpus, points))
    return found


def _curve(name: str, places: Sequence[int], gpus: NDArray[np.float64], points: Plan) -> Curve:
    hours = points.gpu_hours[list(places)]
    falls = np.minimum.accumulate(points.days[list(places)]) == points.days[list(places)]  # a slower size bends nothing
    useful = [place for place, is_faster in zip(places, falls, strict=True) if is_faster]
    bend = None
    if len(useful) >= FEW:
        bend = useful[knee(np.stack([gpus[useful], points.days[useful]], axis=1))]
    return Curve(system=name, places=tuple(places), efficiency=tuple(float(hours[0] / one) for one in hours), knee=bend)
