"""Price rows of all variants of a world: each recipe whole, then what a choice changes by itself, and the cheapest.

No variant is priced: a row of any combination of choices is put together from rows that differ in one of them
(estimator/cost/table.py: CHANGED_BY), here for batches, in search/tree.py for the sweep.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from estimator.compose import Tables
from estimator.cost.table import CHANGED_BY, PriceTable
from estimator.model import ModelSpec
from estimator.strategy import Strategy
from estimator.tables import ROW_FLAGS, ROW_SIZES, TableBuilder, read_only
from search.idle import idle_variants
from search.worlds import RECIPE_AXES, PriceColumns, World

__all__ = ["priced", "with_rows_of"]


def priced(
    model: ModelSpec, places: Mapping[str, Sequence[int]], rows: Mapping[str, np.ndarray],
    strategy_at: Callable[[Mapping[str, int]], Strategy], builder: Callable[[Strategy], TableBuilder],
) -> tuple[np.ndarray, PriceTable]:  # fmt: skip
    """World.prices of some rows [R], and the table into which they point; where a choice is idle, its first stands.

    `strategy_at`: what a place on each axis means; axes left out are at their first.
    """
    columns, num = PriceColumns.of(places), len(rows["tp"])
    idle = idle_variants(model, strategy_at({}), dict(rows))
    prices = np.zeros((num, columns.recipes * columns.per + 1), dtype=np.int64)
    parts: list[PriceTable] = []
    start = 0
    recipes = itertools.product(*(range(len(places.get(name, (0,)))) for name in RECIPE_AXES))
    for recipe, chosen in enumerate(recipes):
        at = {name: place for name, place in zip(RECIPE_AXES, chosen, strict=True) if name in places}
        # What rows tell by themselves is priced at once with the recipe.
        asks = [[(recipe * columns.per, np.arange(num), strategy_at(at))]]
        for c, name in enumerate(CHANGED_BY):
            for place in range(1, columns.choices[c]):
                column = int(columns.column(np.array(recipe), c, np.array(place)))
                own = np.flatnonzero(~idle[name]) if name in idle else np.arange(num)
                ask = (column, own, strategy_at({**at, name: place}))
                if name in ROW_FLAGS:
                    asks[0].append(ask)
                else:
                    asks.append([ask])
        for together in asks:
            where = np.concatenate([own for _, own, _ in together])
            if len(where):
                asked = {name: rows[name][where] for name in ROW_SIZES}
                for flag in ROW_FLAGS:
                    told = [np.full(len(own), float(np.asarray(s.sizes()[flag]))) for _, own, s in together]
                    asked[flag] = np.concatenate(told)
                parts.append(builder(together[0][2]).prices(asked))
            for column, own, _ in together:
                prices[:, column] = prices[:, recipe * columns.per]
                prices[own, column] = start + np.arange(len(own))
                start += len(own)
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


def with_rows_of(world: World, variant: int, groups: np.ndarray) -> tuple[Tables, np.ndarray]:
    """Tables with the rows of one variant of some groups of price rows [N], and which row is each one's [N]."""
    kept, where = np.unique(groups, return_inverse=True)
    t, (recipe, *columns) = world.tables, world.variants.price[variant].tolist()
    rows = world.prices[kept, recipe]
    base, again = t.base[rows], t.again[rows]
    for (of_base, of_again), column in zip(CHANGED_BY.values(), columns, strict=True):
        if column != recipe:
            other = world.prices[kept, column]
            for name in of_base:
                base[..., name] = t.base[other, :, name]
            for again_name in of_again:
                again[..., again_name] = t.again[other, :, :, again_name]
    made = {"base": base, "again": again, "hop_bytes": t.hop_bytes[rows], "buffer_bytes": t.buffer_bytes[rows]}
    return read_only(t._replace(**made)), where
