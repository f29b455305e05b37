"""Worlds in the making: legal structures of one family are collected, then their distinct rows are priced once.

A family shares its price rows: one system, and one value of every axis that decides which rows there are. Variants
(search/worlds.py) are priced side by side; where an axis has no effect on a row, its first value stands for the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from estimator.compose import Constants
from estimator.cost.table import CHANGED_BY
from estimator.span_codes import CODES
from estimator.step import distinct
from estimator.strategy import RankOrder, Recompute, Schedule, Strategy
from estimator.tables import NET_SIZES, ROW_SIZES, TableBuilder
from hardware.system import SystemSpec
from search.axes import strategy_of
from search.balanced import LayoutFinder
from search.idle import IDLE_VARIANTS, NEEDS, idle_variants, refuses_ep
from search.prices import priced
from search.space import Space
from search.worlds import KEEP_AXES, RECIPE_AXES, SIZES, Choices, Keeps, PriceColumns, Variants, World

__all__ = ["Columns", "Family", "keeps_of", "variants_of"]

Columns = dict[str, np.ndarray]


def variants_of(
    space: Space, system: SystemSpec, values: Mapping[str, object], places: Mapping[str, Sequence[int]],
    steps: Mapping[str, int],
) -> Variants:  # fmt: skip
    """Every combination of some places on the axes of variants, the last axis varying fastest; `values` of the rest."""
    axes, lengths = tuple(places), [len(some) for some in places.values()]
    num = math.prod(lengths)
    at = dict(zip(axes, np.unravel_index(np.arange(num), lengths), strict=True))
    on_axis = {name: np.array(places[name])[i] for name, i in at.items()}
    strategies = tuple(
        strategy_of({**values, **{name: space.axes[name][on_axis[name][v]] for name in axes}}) for v in range(num)
    )
    columns, first = PriceColumns.of(places), np.zeros(num, dtype=np.int64)
    recipe = first
    for name in RECIPE_AXES:
        recipe = recipe * len(places.get(name, (0,))) + at.get(name, first)
    price = [recipe * columns.per, *(columns.column(recipe, c, at.get(n, first)) for c, n in enumerate(CHANGED_BY))]
    needs = [at.get(name, first) > 0 for name in NEEDS]
    needs.append(np.array([refuses_ep(space.model, s) for s in strategies]))
    kits = []
    for code in range(1 << len(IDLE_VARIANTS)):
        kept = np.ones(num, dtype=bool)
        for bit, name in enumerate(IDLE_VARIANTS):
            if (code >> bit) & 1 and name in at:
                kept &= at[name] == 0
        kits.append(np.flatnonzero(kept))
    return Variants(
        strategies=strategies,
        ids=sum((on_axis[n].astype(np.int64) * steps[n] for n in axes), np.zeros(num, dtype=np.int64)),
        at=at, price=np.stack(price, axis=1), constants=_constants(space, system, strategies),
        needs=np.stack(needs, axis=1).astype(np.int64),
        kits=np.concatenate([[0], np.cumsum([len(kit) for kit in kits])]).astype(np.int64),
        members=np.concatenate(kits).astype(np.int64),
    )  # fmt: skip


def keeps_of(space: Space, places: Mapping[str, Sequence[int]], steps: Mapping[str, int]) -> Keeps:
    """Every combination of some places on KEEP_AXES."""
    lengths = [len(places[name]) for name in KEEP_AXES]
    at = np.stack(np.unravel_index(np.arange(math.prod(lengths)), lengths), axis=1)
    chosen = [np.array(places[name])[at[:, i]] for i, name in enumerate(KEEP_AXES)]
    values = [np.array(space.axes[n], dtype=np.float64)[i] for n, i in zip(KEEP_AXES, chosen, strict=True)]
    ahead = at[:, KEEP_AXES.index("prefetch_blocks")] > 0
    return Keeps(
        ids=np.asarray(sum(i.astype(np.int64) * steps[n] for n, i in zip(KEEP_AXES, chosen, strict=True))),
        values=np.stack(values, axis=1),
        needs=np.stack([(at[:, KEEP_AXES.index("reshard_after_forward")] > 0) | ahead, ahead], axis=1).astype(np.int64),
    )


def _constants(space: Space, system: SystemSpec, strategies: tuple[Strategy, ...]) -> np.ndarray:
    """The numbers of each variant [V, Constants]."""
    known: dict[Any, Constants] = {}
    rows = []
    for s in strategies:
        key = (s.precision, s.optimizer, s.expert_bucket_bytes, s.cuda_graph)
        if key not in known:
            known[key] = TableBuilder(space.model, system, space.workload, s, ()).constants
        rows.append([float(x) for x in known[key]])
    return np.array(rows)


@dataclass(slots=True, kw_only=True)
class Family:
    """What is known of a world while its structures are found. `places`: of the axes of variants, which values."""

    space: Space
    system: SystemSpec
    places: Mapping[str, Sequence[int]]
    variants: Variants
    keeps: Keeps
    pairs: np.ndarray  # as World has them
    choices: tuple[Recompute, ...]
    found: list[Columns] = field(default_factory=list)
    _finders: dict[tuple[Any, ...], LayoutFinder] = field(default_factory=dict)
    _ways: np.ndarray | None = None

    @property
    def strategy(self) -> Strategy:
        """With the first value on each axis of variants."""
        return self.variants.strategies[0]

    @property
    def ways(self) -> np.ndarray:
        """Pairs of a variant and a way to keep by what they need, of each kit [kits, 2, 2, 2, 3].

        Needed: overlap of TP; of DP, below ZeRO-3; none of EP; no stage, ZeRO-3, or ZeRO-3 with overlap of DP.
        """
        if self._ways is None:
            v, keeps = self.variants, self.keeps.needs.sum(axis=1)
            self._ways = np.zeros((len(v.kits) - 1, 2, 2, 2, 3), dtype=np.int64)
            for kit in range(len(self._ways)):
                members = v.of(kit)
                for need in range(3):
                    each = self.pairs[members][:, keeps == need].sum(axis=1)
                    np.add.at(self._ways[kit, ..., need], tuple(v.needs[members].T), each)
        return self._ways

    def finder(self, strategy: Strategy) -> LayoutFinder:
        """What finds the layouts of a strategy; those of one rule share what they have found."""
        key = (strategy.layout, strategy.recompute_per_chunk, strategy.interleave_group)
        if key not in self._finders:
            first = next(iter(self._finders.values()), None)
            builder = self._builder(strategy) if first is None else first.builder.beside(strategy)
            self._finders[key] = LayoutFinder(self.space, builder)
        return self._finders[key]

    def kits(self, s: Columns) -> np.ndarray:
        """The kit of variants of each structure [S]; `s`: sizes as rules.Case has them."""
        idle = idle_variants(self.space.model, self.strategy, s)
        return np.asarray(sum(idle[name].astype(np.int64) << bit for bit, name in enumerate(IDLE_VARIANTS)))

    def world(self, choices: Choices) -> tuple[World, Columns]:
        """The world of all structures found, and their columns."""
        joined = {name: np.concatenate([part[name] for part in self.found]) for name in self.found[0]}
        sizes = {name: joined["sizes"][:, i] for i, name in enumerate((*SIZES, "dp"))}
        row_of, rows = distinct(sizes, ROW_SIZES)
        sizes["copies"] = np.where(joined["schedule"] == CODES[Schedule.DUALPIPE], 2.0, 1.0)  # as rules.Case has it
        sizes["dp_replicate"] = joined["replicas"].astype(np.float64)
        order = joined.pop("order")
        net_of, nets, num = np.zeros(len(order), dtype=np.int64), [], 0
        for code in np.unique(order):
            mine = np.flatnonzero(order == code)
            of, own = distinct({name: v[mine] for name, v in sizes.items()}, NET_SIZES)
            nets.append(self._builder(replace(self.strategy, rank_order=[*RankOrder][code])).nets(own))
            net_of[mine], num = of + num, num + len(nets[-1])
        prices, table = priced(self.space.model, self.places, rows, self._strategy_at, self._builder)
        pack = next(iter(self._finders.values())).builder.pack
        least = Constants(*self.variants.constants.min(axis=0).tolist())
        world = World(
            system=self.system, strategy=self.strategy, tables=pack(table, np.concatenate(nets), least), prices=prices,
            columns=PriceColumns.of(self.places),
            variants=self.variants, keeps=self.keeps, pairs=self.pairs, choices=choices,
        )  # fmt: skip
        return world, {**joined, "row": row_of, "net": net_of}

    def _builder(self, strategy: Strategy) -> TableBuilder:
        return TableBuilder(self.space.model, self.system, self.space.workload, strategy, self.choices)

    def _strategy_at(self, at: Mapping[str, int]) -> Strategy:
        """The variant at some places, and at the first of the axes that are left out."""
        where = [at.get(name, 0) for name in self.places]
        return self.variants.strategies[int(np.ravel_multi_index(where, [len(some) for some in self.places.values()]))]
