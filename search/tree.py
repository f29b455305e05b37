# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Variants of a structure as a tree: what no variant under a node can undercut rules all of them out at once.

From the root, which stands for all, each level fixes one axis, those first that change most; a leaf is a variant. A
node's price row is on each column the cheapest of its leaves'. `grown` makes the tree, jitted code walks it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from estimator.cost.table import CHANGED_BY
from estimator.jit import kernel, njit
from search.worlds import PriceColumns, Variants

__all__ = ["NODE_FIELDS", "Node", "Tree", "grown", "row_of_node"]


class Node(IntEnum):
    """Columns of Tree.nodes."""

    SKIP = 0  # the next node that is not under this one
    DEPTH = 1
    VARIANT = 2  # -1 where several are left
    NUMBERS = 3  # row of Tree.constants
    AXIS = 4  # what the node fixes: ALL, RECIPE, or 2 and the place in CHANGED_BY; ELSE: nothing that prices see
    COLUMN = 5  # of World.prices
    OPEN = 6  # of a recipe: a bit for each choice that has several values under it


NODE_FIELDS: Final = len(Node)
ALL, RECIPE = 0, 1
ELSE = 2 + len(CHANGED_BY)
SKIP, DEPTH, VARIANT, NUMBERS, AXIS, COLUMN, OPEN = (int(n) for n in Node)


class Tree(NamedTuple):
    """Nodes of every kit, each tree in preorder: kit k is nodes[starts[k]] to nodes[starts[k + 1]].

    `further` [choices, 2]: first column beyond a recipe's own, and how many there are. `height`: most levels.
    """

    nodes: np.ndarray
    starts: np.ndarray
    constants: np.ndarray
    further: np.ndarray
    height: int


def grown(variants: Variants, columns: PriceColumns) -> Tree:
    """The trees of all kits."""
    nodes: list[list[int]] = []
    constants = [*variants.constants]
    starts = [0]
    names: list[str | None] = [None, *CHANGED_BY, "expert_bucket_bytes"]

    def branch(members: np.ndarray, level: int, axis: int, column: int, depth: int) -> None:
        """A node over some variants, which agree on all levels above."""
        own = len(nodes)
        leaf = len(members) == 1
        if not leaf:
            constants.append(variants.constants[members].min(axis=0))
        is_open = 0
        for c, choice in enumerate(CHANGED_BY):
            if choice in variants.at and len(np.unique(variants.at[choice][members])) > 1:
                is_open |= 1 << c
        numbers = int(members[0]) if leaf else len(constants) - 1
        nodes.append([0, depth, int(members[0]) if leaf else -1, numbers, axis, column, is_open])
        while not leaf:
            name = names[level]
            keys = variants.price[members, 0] if name is None else variants.at.get(name, np.zeros(0))[members]
            kept = list(dict.fromkeys(keys.tolist()))
            if name is None or len(kept) > 1:
                break
            level += 1
        for key in kept if not leaf else []:
            mine = members[keys == key]
            if name is None:
                branch(mine, level + 1, RECIPE, int(key), depth + 1)
            elif name in CHANGED_BY:
                branch(mine, level + 1, 1 + level, int(variants.price[mine[0], level]), depth + 1)
            else:
                branch(mine, level + 1, ELSE, 0, depth + 1)
        nodes[own][SKIP] = len(nodes)

    for kit in range(len(variants.kits) - 1):
        members = variants.of(kit)
        alone = len(members) == 1  # at the first value of every axis, so a row by itself
        branch(members, 0, RECIPE if alone else ALL, int(variants.price[members[0], 0]) if alone else -1, 0)
        starts.append(len(nodes))
    offsets = np.concatenate([[0], np.cumsum([num - 1 for num in columns.choices])[:-1]]) + 1
    return Tree(
        nodes=np.array(nodes, dtype=np.int64), starts=np.array(starts, dtype=np.int64), constants=np.array(constants),
        further=np.stack([offsets, np.array(columns.choices) - 1], axis=1).astype(np.int64),
        height=1 + max(node[DEPTH] for node in nodes),
    )  # fmt: skip


def _flat(which: int) -> tuple[np.ndarray, np.ndarray]:
    """Columns of each choice one after the other, and where each begins."""
    columns = [[int(column) for column in pair[which]] for pair in CHANGED_BY.values()]
    return np.array(sum(columns, []), dtype=np.int64), np.cumsum([0, *map(len, columns)])


BASE_COLUMNS, BASE_STARTS = _flat(0)
AGAIN_COLUMNS, AGAIN_STARTS = _flat(1)


@njit(cache=True)
def row_of_node(t, tree, prices, node, rows, bases, agains):
    """Price row of a node, into its place by depth in `bases` [D, K, Base] and `agains` [D, choices, K, Again].

    Nodes above are there already. `prices` [P + 1]: of the group; `rows` [D]: which row tells hop and buffers.
    """
    axis, depth = node[AXIS], node[DEPTH]
    base, again = bases[depth], agains[depth]
    if axis == ALL:
        row = prices[prices.size - 1]
        rows[depth] = row
        base[:], again[:] = t.base[row], t.again[row]
    elif axis == RECIPE:
        row = prices[node[COLUMN]]
        rows[depth] = row
        base[:], again[:] = t.base[row], t.again[row]
        for choice in range(tree.further.shape[0]):
            if (node[OPEN] >> choice) & 1:
                start = node[COLUMN] + tree.further[choice, 0]
                for column in range(start, start + tree.further[choice, 1]):
                    _change(t, choice, prices[column], True, base, again)
    else:
        rows[depth] = rows[depth - 1]
        base[:], again[:] = bases[depth - 1], agains[depth - 1]
        if axis != ELSE:
            _change(t, axis - 2, prices[node[COLUMN]], False, base, again)


@kernel
def _change(t, choice, row, least, base, again):
    """Columns that a choice changes: those of `row`, or with `least` the cheaper of these and what is there."""
    for n in range(BASE_STARTS[choice], BASE_STARTS[choice + 1]):
        column = BASE_COLUMNS[n]
        for k in range(base.shape[0]):
            value = t.base[row, k, column]
            base[k, column] = min(base[k, column], value) if least else value
    for n in range(AGAIN_STARTS[choice], AGAIN_STARTS[choice + 1]):
        column = AGAIN_COLUMNS[n]
        for other in range(again.shape[0]):
            for k in range(base.shape[0]):
                value = t.again[row, other, k, column]
                again[other, k, column] = min(again[other, k, column], value) if least else value
