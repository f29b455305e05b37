"""Axes that a study samples beside the structures: open ones, and closed ones that would swell its survey.

An open axis (`search` in a space file) has no list of values: `OPENED` says which small whole numbers make one. A new
open dimension is one entry there. Knows nothing of samplers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from estimator.strategy import Fusion, Strategy
from search.axes import OPEN, axis_values
from search.space import Space
from search.worlds import SIZES, WORLD_AXES

__all__ = ["MAX_GRID", "OPENED", "Free", "free_axes", "grid_size", "open_axes", "skeleton"]

MAX_GRID = 4_000_000
"""Points of the grid of structures that a study surveys: about ten seconds at 2 to 3 us each."""

NEUTRAL = ("fusion", "optimizer")
"""Closed axes that no rule looks at, so that a structure is legal under each of their values or under none."""

Value = Callable[[Space, Mapping[str, Any], tuple[int, ...]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """One axis by whole-number parameters: names with their numbers of levels, and what levels mean.

    `value` takes the space, the values of the structure by axis, and a level per parameter. `start`: the levels that
    are nearest to leaving the axis alone.
    """

    axis: str
    parameters: tuple[tuple[str, int], ...]
    start: tuple[int, ...]
    value: Value


def open_axes(space: Space) -> list[str]:
    """Names of the axes that no enumeration reaches."""
    return [name for name, values in space.axes.items() if values == (OPEN,)]


def grid_size(space: Space) -> int:
    """Points whose legality an enumeration of structures checks."""
    names = (*SIZES, *WORLD_AXES, "schedule")
    return len(space.systems) * math.prod(len(space.axes[name]) for name in names)


def free_axes(space: Space) -> tuple[Free, ...]:
    """Every open axis; of closed ones that no rule looks at, the longest first, as many as the survey needs rid of."""
    free = [OPENED[name](space) for name in open_axes(space)]
    left = sorted((n for n in NEUTRAL if space.axes[n] != (OPEN,)), key=lambda n: len(space.axes[n]))
    while left and _is_too_large(skeleton(space, free)):
        free.append(_closed(left.pop(), space))
    return tuple(free)


def skeleton(space: Space, free: tuple[Free, ...] | list[Free]) -> Space:
    """The space with each free axis at one value: Strategy's default where it is open, else its first."""
    defaults = axis_values(Strategy())
    fixed = {f.axis: (defaults[f.axis],) if space.axes[f.axis] == (OPEN,) else space.axes[f.axis][:1] for f in free}
    return replace(space, axes={**space.axes, **fixed})


def _is_too_large(space: Space) -> bool:
    return grid_size(space) > MAX_GRID or space.raw_size >= 2**62


def _closed(name: str, space: Space) -> Free:
    return Free(axis=name, parameters=((name, len(space.axes[name])),), start=(0,), value=partial(_member, name))


def _member(name: str, space: Space, structure: Mapping[str, Any], levels: tuple[int, ...]) -> object:
    return space.axes[name][levels[0]]


def _fusion(space: Space) -> Free:
    """Each fusion by itself, off or on."""
    defaults = Strategy().fusion
    names = tuple(Fusion)
    return Free(
        axis="fusion",
        parameters=tuple((f"fusion.{f.value}", 2) for f in names),
        start=tuple(int(f in defaults) for f in names),
        value=_fusion_set,
    )


def _fusion_set(space: Space, structure: Mapping[str, Any], levels: tuple[int, ...]) -> object:
    return frozenset(f for f, on in zip(Fusion, levels, strict=True) if on)


OPENED: dict[str, Callable[[Space], Free]] = {"fusion": _fusion}
"""How each axis is sampled where a space leaves it open."""
