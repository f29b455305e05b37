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
from estimator.cost.table import PriceTable
from estimator.span_codes import CODES
from estimator.step import distinct
from estimator.strategy import RankOrder, Recompute, Schedule, Strategy
from estimator.tables import NET_SIZES, ROW_FLAGS, ROW_SIZES, TableBuilder
from hardware.system import SystemSpec
from search.axes import strategy_of
from search.balanced import LayoutFinder
from search.idle import IDLE_VARIANTS, NEEDS, idle_variants
from search.space import Space
from search.worlds import KEEP_AXES, PRICE_AXES, SIZES, Choices, Keeps, Variants, World

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
    priced = [name for name in axes if name in PRICE_AXES]
    price = np.ravel_multi_index([at[n] for n in priced], [len(places[n]) for n in priced]) if priced else [0] * num
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
        price=np.array(price, dtype=np.int64), constants=_constants(space, system, strategies),
        needs=np.stack([at.get(n, np.zeros(num, np.int64)) > 0 for n in NEEDS], axis=1).astype(np.int64),
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
    """The numbers of each variant [V + 1, Constants]; the last row is on each column the cheapest."""
    known: dict[Any, Constants] = {}
    rows = []
    for s in strategies:
        key = (s.precision, s.optimizer, s.expert_bucket_bytes, s.cuda_graph)
        if key not in known:
            known[key] = TableBuilder(space.model, system, space.workload, s, ()).constants
        rows.append([float(x) for x in known[key]])
    table = np.array(rows)
    return np.concatenate([table, table.min(axis=0, keepdims=True)])


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

    @property
    def strategy(self) -> Strategy:
        """With the first value on each axis of variants."""
        return self.variants.strategies[0]

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
        idle = idle_variants(self.space.model, s)
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
        prices, table = self._prices(rows)
        pack = next(iter(self._finders.values())).builder.pack
        least = Constants(*self.variants.constants[-1].tolist())
        world = World(
            system=self.system, strategy=self.strategy, tables=pack(table, np.concatenate(nets), least), prices=prices,
            variants=self.variants, keeps=self.keeps, pairs=self.pairs, choices=choices,
        )  # fmt: skip
        return world, {**joined, "row": row_of, "net": net_of}

    def _builder(self, strategy: Strategy) -> TableBuilder:
        return TableBuilder(self.space.model, self.system, self.space.workload, strategy, self.choices)

    def _prices(self, rows: Columns) -> tuple[np.ndarray, PriceTable]:
        """Where each variant's prices of each row stand [R, P + 1], in the last column the cheapest; and the prices."""
        priced = [name for name in self.places if name in PRICE_AXES]
        lengths, num = [len(self.places[name]) for name in priced], len(rows["tp"])
        idle = idle_variants(self.space.model, rows)
        prices = np.full((num, math.prod(lengths) + 1), -1, dtype=np.int64)
        together: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
        repeated: list[tuple[int, int, np.ndarray]] = []
        for column in range(math.prod(lengths)):
            at = [int(i) for i in np.unravel_index(column, lengths)]
            own = np.ones(num, dtype=bool)
            for axis, (name, place) in enumerate(zip(priced, at, strict=True)):
                if place and name in idle:
                    same = int(np.ravel_multi_index([*at[:axis], 0, *at[axis + 1 :]], lengths))
                    repeated.append((column, same, idle[name]))
                    own &= ~idle[name]
            key = tuple(i for name, i in zip(priced, at, strict=True) if name not in ROW_FLAGS)
            together.setdefault(key, []).append((column, np.flatnonzero(own)))
        parts: list[PriceTable] = []
        start = 0
        for columns in together.values():  # what rows tell by themselves is priced at once
            strategies = [
                self.variants.strategies[int(np.argmax(self.variants.price == column))] for column, _ in columns
            ]
            where = np.concatenate([own for _, own in columns])
            if not len(where):
                continue
            asked = {name: rows[name][where] for name in ROW_SIZES}
            for flag in ROW_FLAGS:
                asked[flag] = np.concatenate([
                    np.full(len(own), float(np.asarray(s.sizes()[flag])))
                    for s, (_, own) in zip(strategies, columns, strict=True)
                ])  # fmt: skip
            parts.append(self._builder(strategies[0]).prices(asked))
            for column, own in columns:
                prices[own, column] = start + np.arange(len(own))
                start += len(own)
        for column, same, mask in repeated:  # in order: what an earlier column repeats is known by then
            prices[mask, column] = prices[mask, same]
        return prices, _with_corners(prices, parts)


def _with_corners(prices: np.ndarray, parts: list[PriceTable]) -> PriceTable:
    """All prices, then a row for each group that is on each column the cheapest; `prices` learns where these are.

    One more recompute choice, the last, is on each column the cheapest.
    """
    names = ("base", "hop_bytes", "buffer_bytes")
    made = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    first, num = parts[0].again, len(made["base"])
    again = np.empty((num, first.shape[1] + 1, *first.shape[2:]))
    start = 0
    for part in parts:
        again[start : start + len(part.again), :-1] = part.again
        start += len(part.again)
    np.min(again[:, :-1], axis=1, out=again[:, -1])
    made["again"] = again
    if prices.shape[1] > 2:
        prices[:, -1] = num + np.arange(len(prices))
        for name, values in made.items():
            corner = values[prices[:, 0]]
            for column in range(1, prices.shape[1] - 1):
                np.minimum(corner, values[prices[:, column]], out=corner)
            made[name] = np.concatenate([values, corner])
    else:
        prices[:, -1] = prices[:, 0]
    return PriceTable(kinds=parts[0].kinds, recomputes=parts[0].recomputes, **made)
