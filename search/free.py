"""Axes that a study samples beside the structures: open ones, and closed ones that would swell its survey.

An open axis (`search` in a space file) has no list of values; `OPENED` (search/opened.py) says which small whole
numbers make one. Knows nothing of samplers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from estimator.strategy import Strategy
from search.axes import axis_values
from search.legality import MESH, meshes
from search.opened import OPENED, Free
from search.space import Space
from search.worlds import SIZES, VARIANT_AXES, WORLD_AXES

__all__ = ["MAX_GRID", "STRUCTURAL", "Free", "free_axes", "grid_size", "skeleton"]

MAX_GRID = 4_000_000
"""Points of the grid of structures that a study surveys: about ten seconds at 2 to 3 us each."""

STRUCTURAL = (*SIZES, *WORLD_AXES, "schedule")
"""Axes that make a structure: their product is the grid whose legality is checked."""

NEUTRAL = ("fusion", "tp_chunks", "expert_bucket_bytes", "optimizer")
"""Closed axes that no rule holds against another, so that a structure is legal under each of their values or none."""


def grid_size(space: Space) -> int:
    """Points whose legality an enumeration of structures checks: those whose tp, cp and pp share out the chips."""
    under = (name for name in STRUCTURAL if name not in MESH)
    return sum(len(meshes(space, system)) for system in space.systems) * math.prod(len(space.axes[n]) for n in under)


def free_axes(space: Space) -> tuple[Free, ...]:
    """Every open axis; of closed ones that no rule looks at, the longest first, as many as the survey needs rid of."""
    free = [opened(space) for name, opened in OPENED.items() if name in space.open_axes]
    left = sorted((n for n in NEUTRAL if n not in space.open_axes), key=lambda n: len(space.axes[n]))
    while left and _is_too_large(skeleton(space, free)):
        free.append(_closed(left.pop(), space))
    return tuple(free)


def skeleton(space: Space, free: tuple[Free, ...] | list[Free]) -> Space:
    """The space with each free axis at one value: Strategy's default where it is open, else its first."""
    defaults = axis_values(Strategy())
    is_open = space.open_axes
    fixed = {f.axis: (defaults[f.axis],) if f.axis in is_open else space.axes[f.axis][:1] for f in free}
    return replace(space, axes={**space.axes, **fixed})


def _is_too_large(space: Space) -> bool:
    # Each structure is legal under all of its variants or none, but their rows are priced one by one.
    variants = math.prod(len(space.axes[name]) for name in VARIANT_AXES)
    return grid_size(space) * variants > MAX_GRID or space.raw_size >= 2**62


def _closed(name: str, space: Space) -> Free:
    return Free(axis=name, parameters=((name, len(space.axes[name])),), start=(0,), value=partial(_member, name))


def _member(name: str, space: Space, structure: Mapping[str, Any], levels: tuple[int, ...]) -> object:
    return space.axes[name][levels[0]]
