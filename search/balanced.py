"""Layout `auto` in a space: one layout per structure, balanced on the seconds of its price row without recompute.

Of variants of one structure (search/worlds.py) it is that of the first, for what tells them apart changes all layers
much alike.

Overlap of EP counts as on where the space offers it and the schedule allows it; other overlaps as off, for what they
hide is much the same for every layer. Memory is left to the sweep, which holds every candidate against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from estimator.auto_layout import pipeline_of
from estimator.cost.table import Base
from estimator.layout import even_layers
from estimator.model import ModelSpec
from estimator.rules import Case
from estimator.schedule.rules import VEES
from estimator.schedule_rules import paired
from estimator.segments import segment_of_ranks
from estimator.step import distinct
from estimator.strategy import LayoutRule, Schedule, Strategy
from estimator.tables import ROW_SIZES, TableBuilder
from hardware.system import SystemSpec
from search.axes import OPEN, axis_values, strategy_of
from search.legality import refusal_of
from search.space import Space
from search.worlds import VARIANT_AXES

__all__ = ["Admits", "LayoutFinder", "with_space_layout"]

Layers = tuple[int, ...]
Admits = Callable[[Mapping[str, Any]], np.ndarray]
"""Which points rules let through with other values of some fields of the strategy."""
COLUMNS = (
    Base.F_COMP, Base.F_HOST, Base.F_CP, Base.F_TP0, Base.B_COMP, Base.B_HOST, Base.B_CP, Base.B_TP0, Base.W_COMP,
    Base.W_HOST,
)  # fmt: skip


@dataclass(slots=True)
class LayoutFinder:
    """Layers per chunk of the structures of one world; prices each row once. `known`: the layouts found so far."""

    space: Space
    builder: TableBuilder
    known: list[Layers] = field(default_factory=list, init=False)
    _places: dict[Layers, int] = field(default_factory=dict, init=False)
    _seconds: dict[tuple[tuple[float, ...], bool], tuple[float, ...]] = field(default_factory=dict, init=False)

    def layers(self, strategy: Strategy, sizes: dict[str, np.ndarray]) -> np.ndarray:
        """What the strategy's layout means for each structure [S], as an index into `known`.

        `sizes` as in rules.Case, all of them legal.
        """
        model: ModelSpec = self.space.model
        if strategy.layout is LayoutRule.AUTO:
            where, places = distinct(sizes, (*ROW_SIZES, "pp", "vpp"))
            seconds = self._priced(strategy, {name: places[name] for name in ROW_SIZES})
            kinds, pipes = self.builder.graph.kinds, [*zip(places["pp"].tolist(), places["vpp"].tolist(), strict=True)]
            alike = _alike(strategy.schedule)
            system = self.builder.system
            of_rank = {p: segment_of_ranks(system, int(p)) if system.segments else () for p, _ in pipes}
            ways = {(p, v): pipeline_of(model, kinds, alike, int(p), int(v), of_rank[p]) for p, v in set(pipes)}
            found = [ways[pipe].layers(of_kind) for pipe, of_kind in zip(pipes, seconds, strict=True)]
        else:
            where, places = distinct(sizes, ("pp", "vpp"))
            named = strategy.layout
            chunks = (places["pp"] * places["vpp"]).astype(int).tolist()
            found = [named or even_layers(model.num_layers, num) for num in chunks]
        return np.array([self._index(layers) for layers in found], dtype=np.int64)[where]

    def made(self, strategy: Strategy, sizes: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Index of each structure's layout in the builder [S], and its deepest chunk's layers [S]."""
        pipes = {name: sizes[name] for name in ("pp", "vpp")}
        if strategy.layout is LayoutRule.AUTO:
            pipes["layers"] = self.layers(strategy, sizes)
        where, places = distinct(pipes, tuple(pipes))
        named = [self.known[i] for i in places["layers"]] if "layers" in places else [None] * len(places["pp"])
        rows = zip(places["pp"], places["vpp"], named, strict=True)
        made = [self.builder.layout(strategy.schedule, int(p), int(v), layers) for p, v, layers in rows]
        depths = [self.builder.depth(i) for i in made]
        return np.array(made, dtype=np.int64)[where], np.array(depths)[where]

    def repeats(self, case: Case, place: int, ok: np.ndarray, admits: Admits) -> np.ndarray:
        """Points, of those that are `ok` [S], whose layers per chunk an earlier value of the axis gives as well.

        `admits`: which points rules let through under another value [S].
        """
        repeats, earlier = np.zeros_like(ok), self.space.axes["layout"][:place]
        at = np.flatnonzero(ok)
        if not earlier or not len(at):
            return repeats
        case = case.take(at)
        own = self.layers(case.strategy, case.sizes)
        for value in earlier:
            other: dict[str, Any] = {"layout": value}
            strategy = replace(case.strategy, **other)
            legal = np.flatnonzero(admits(other)[at])
            if len(legal):
                repeats[at[legal]] |= self.layers(strategy, case.take(legal).sizes) == own[legal]
        return repeats

    def _index(self, layers: Layers) -> int:
        if layers not in self._places:
            self._places[layers] = len(self.known)
            self.known.append(layers)
        return self._places[layers]

    def _priced(self, strategy: Strategy, sizes: dict[str, np.ndarray]) -> list[tuple[float, ...]]:
        """Seconds of one micro-batch on each block kind, for each combination of sizes."""
        ep = paired(strategy.schedule) and 1 in self.space.axes["overlap_ep"]
        keys = [(tuple(map(float, row)), ep) for row in zip(*(sizes[n] for n in ROW_SIZES), strict=True)]
        new = list(dict.fromkeys(key for key in keys if key not in self._seconds))
        if new:
            rows = {name: np.array([key[0][i] for key in new]) for i, name in enumerate(ROW_SIZES)}
            x = self.builder.prices(rows).base
            total = sum(x[..., column] for column in COLUMNS) + (x[..., Base.F_EP0 + ep] + x[..., Base.B_EP0 + ep])
            self._seconds |= {key: tuple(map(float, row)) for key, row in zip(new, total, strict=True)}
        return [self._seconds[key] for key in keys]


def with_space_layout(space: Space, system: SystemSpec, strategy: Strategy) -> Strategy:
    """A candidate with the layout that the sweep gives its structure; None where that is the even one."""
    if strategy.layout is not LayoutRule.AUTO:
        return strategy
    builder = TableBuilder(space.model, system, space.workload, _first_variant(space, system, strategy))
    sizes = {name: np.atleast_1d(np.asarray(size, dtype=np.float64)) for name, size in strategy.sizes().items()}
    finder = LayoutFinder(space, builder)
    layers = finder.known[finder.layers(strategy, sizes)[0]]
    even = even_layers(space.model.num_layers, len(layers))
    return replace(strategy, layout=None if layers == even else layers)


def _first_variant(space: Space, system: SystemSpec, strategy: Strategy) -> Strategy:
    """A strategy with the first value on each axis of variants, where there is a list of them."""
    values = axis_values(strategy)
    for name in VARIANT_AXES:
        listed = (v for v in space.axes[name] if v is not OPEN and not refusal_of(space, system, name, v)[0])
        values[name] = next(listed, values[name])
    return strategy_of(values)


def _alike(schedule: Schedule) -> Schedule:
    """A schedule with the same placement, for these are balanced alike."""
    if schedule in VEES:
        return Schedule.ZB_V
    if schedule in {Schedule.INTERLEAVED, Schedule.BREADTH_FIRST}:
        return Schedule.INTERLEAVED
    return schedule if schedule is Schedule.DUALPIPE else Schedule.ONE_F_ONE_B
