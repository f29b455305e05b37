"""The box that a study samples: parameters <-> configuration codes <-> spaces of one structure.

A *code* is a whole number that stands for one configuration of everything but the options under a structure: the
structure's id, and the level of each free parameter. Knows nothing of samplers or prices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from estimator.strategy import Strategy
from hardware.system import SystemSpec
from results.pareto import non_dominated
from search.axes import AXES, axis_values
from search.free import Free, free_axes, skeleton
from search.meshes import CHOICES, Meshes
from search.space import Space
from search.sweep import Plan, survey
from search.worlds import KEEP_AXES, OPTION_AXES, VARIANT_AXES, steps_of

__all__ = ["Dimensions"]

UNDER = frozenset({*OPTION_AXES, *VARIANT_AXES, *KEEP_AXES})
"""Axes that are swept under a structure."""

SHARE = 0
"""Levels of a parameter that is a share in [0, 1] instead of a level."""


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """What a study samples of `space`.

    `plan`: the space with every free axis at one value, surveyed. `free`: the axes that are not in it.
    """

    space: Space
    plan: Plan
    meshes: Meshes
    free: tuple[Free, ...]

    @classmethod
    def of(cls, space: Space) -> Dimensions:
        """Survey a space for sampling. ValueError where even its structures are too many."""
        free = free_axes(space)
        plan = survey(skeleton(space, free))
        return cls(space=space, plan=plan, meshes=Meshes.of(plan), free=free)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Name and number of levels of each parameter, SHARE for shares; what has one value is left out."""
        levels = {"mesh": len(self.meshes)}
        out = {name: n for name, n in levels.items() if n > 1}
        out |= {name: SHARE for name in CHOICES if len(self.plan.space.axes[name]) > 1}
        return out | {name: n for free in self.free for name, n in free.parameters if n > 1}

    @property
    def num_configurations(self) -> int:
        """Structures times the levels of free parameters: different levels may still mean the same."""
        return len(self.meshes.structures) * math.prod(n for free in self.free for _, n in free.parameters)

    def code(self, parameters: Mapping[str, float]) -> int:
        """The configuration that parameters mean."""
        shares = {name: float(parameters[name]) for name in CHOICES if name in parameters}
        structure = self.meshes.structure(int(parameters.get("mesh", 0)), shares)
        levels = [int(parameters.get(name, 0)) for free in self.free for name, _ in free.parameters]
        return self._code(structure, levels)

    def parameters_of(self, code: int) -> dict[str, float]:
        """Parameters that mean a configuration."""
        structure, levels = self._parts(code)
        mesh, shares = self.meshes.coordinates(structure)
        names = [name for free in self.free for name, _ in free.parameters]
        given: dict[str, float] = {"mesh": mesh, **shares, **dict(zip(names, levels, strict=True))}
        return {name: given[name] for name in self.parameters}

    def structure(self, code: int) -> int:
        """Index of its structure in the plan."""
        return self._parts(code)[0]

    def narrowed(self, code: int) -> Space:
        """The space of one structure, with every option of `space` under it."""
        structure, levels = self._parts(code)
        own, steps = self._structure_id(structure), steps_of(self.plan.space)
        axes: dict[str, tuple[Any, ...]] = {}
        for axis in AXES:
            values = self.plan.space.axes[axis.name]
            options = axis.name in UNDER
            axes[axis.name] = values if options else (values[own // steps[axis.name] % len(values)],)
        at = iter(levels)
        for free in self.free:
            mine = tuple(itertools.islice(at, len(free.parameters)))
            axes[free.axis] = (free.value(self.space, {n: v[0] for n, v in axes.items()}, mine),)
        return replace(self.space, axes=axes, systems=(self.space.systems[own // steps["system"]],))

    def canonical(self, code: int) -> tuple[Any, ...]:
        """Equal for codes that mean the same configuration."""
        if not self.free:
            return (code,)
        space, free = self.narrowed(code), {f.axis for f in self.free}
        values = (space.axes[axis.name][0] for axis in AXES if axis.name not in UNDER or axis.name in free)
        return (self._structure_id(self.structure(code)), *values)

    def code_of(self, system: SystemSpec, strategy: Strategy) -> int | None:
        """The configuration that a strategy of another run belongs to; None where it is not one of this space."""
        if system not in self.space.systems:
            return None
        values, own = axis_values(strategy), 0
        steps, free = steps_of(self.plan.space), {f.axis for f in self.free}
        for axis in AXES:
            known = self.plan.space.axes[axis.name]
            if axis.name in UNDER or axis.name in free:
                continue
            if values[axis.name] not in known:
                return None
            own += known.index(values[axis.name]) * steps[axis.name]
        own += self.space.systems.index(system) * steps["system"]
        found = np.flatnonzero(self.plan.enumeration.structures.id == own)
        if not len(found) or int(found[0]) not in self.meshes.structures:
            return None
        levels: list[int] = []
        for f in self.free:
            ways = itertools.product(*(range(n) for _, n in f.parameters))
            mine = next((way for way in ways if f.value(self.space, values, way) == values[f.axis]), None)
            if mine is None:
                return None
            levels += mine
        return self._code(int(found[0]), levels)

    def starts(self, most: int) -> list[int]:
        """Codes of structures that promise much: the front of lower corners, then the fastest of each mesh in turn."""
        index, lows = self.meshes.structures, self.plan.lows
        if not len(index):
            return []
        front = index[non_dominated(lows[index], index)]
        chosen = front[np.argsort(lows[front, 0], kind="stable")].tolist()
        for start, stop in itertools.pairwise(self.meshes.first.tolist()):
            own = index[start:stop]
            chosen.append(int(own[np.argmin(lows[own, 0])]))
        neutral = [level for free in self.free for level in free.start]
        return [self._code(i, neutral) for i in list(dict.fromkeys(chosen))[:most]]

    def _structure_id(self, structure: int) -> int:
        return int(self.plan.enumeration.structures.id[structure])

    def _code(self, structure: int, levels: list[int]) -> int:
        code = 0
        for (_, n), level in zip((p for free in self.free for p in free.parameters), levels, strict=True):
            code = code * n + level
        return code * self.plan.space.raw_size + self._structure_id(structure)

    def _parts(self, code: int) -> tuple[int, list[int]]:
        rest, own = divmod(code, self.plan.space.raw_size)
        levels: list[int] = []
        for _, n in reversed([p for free in self.free for p in free.parameters]):
            rest, level = divmod(rest, n)
            levels.append(level)
        return self._index[own], levels[::-1]

    @cached_property
    def _index(self) -> dict[int, int]:
        """Index of each structure by its id."""
        ids = self.plan.enumeration.structures.id[self.meshes.structures]
        return dict(zip(ids.tolist(), self.meshes.structures.tolist(), strict=True))
