"""The ops of a graph as a tree of scopes, from the model down to single ops: any metric, summed at any depth.

Depth 0 is the model, 1 its ends and `layers`, 2 each distinct layer, 3 attention, MLP and norms, and so on down. A
layer that the model runs many times stands once and counts so often. Prices nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import fsum

from estimator.inventory import AMOUNTS, Entry
from estimator.part import Part

__all__ = ["METRICS", "GraphHierarchy", "Node"]

METRICS = (*AMOUNTS, "ops")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A scope: what stands under it, or the ops of a leaf (an op and its gradients)."""

    path: tuple[str, ...]
    children: tuple[Node, ...] = ()
    own: tuple[Entry, ...] = ()

    @property
    def depth(self) -> int:
        """0 for the model."""
        return len(self.path) - 1

    @property
    def entries(self) -> Iterator[Entry]:
        """Every op under it."""
        yield from self.own
        for child in self.children:
            yield from child.entries

    @property
    def times(self) -> int:
        """How often the model runs it; 0 where its ops are of several blocks."""
        found = {entry.block.kind: entry.times for entry in self.entries}
        return next(iter(found.values())) if len(found) == 1 else 0

    @property
    def part(self) -> Part | None:
        """The part of the model that all its ops are of; None where they are of several."""
        found = {entry.part for entry in self.entries}
        return found.pop() if len(found) == 1 else None

    def walk(self, depth: int | None = None) -> Iterator[Node]:
        """It and what is under it, parents first, down to a depth of the tree."""
        yield self
        if depth is None or self.depth < depth:
            for child in self.children:
                yield from child.walk(depth)


class GraphHierarchy:
    """The tree of one graph's entries."""

    def __init__(self, name: str, entries: Sequence[Entry]) -> None:
        self.root = _node((name,), entries, 0)

    def at_depth(self, depth: int) -> tuple[Node, ...]:
        """Scopes at that depth, and leaves above it: every op is under exactly one."""
        return tuple(node for node in self.root.walk(depth) if node.depth == depth or not node.children)

    def find(self, *path: str) -> Node:
        """The scope of that path below the model; ValueError names what there is."""
        node = self.root
        for name in path:
            below = {child.path[-1]: child for child in node.children}
            if name not in below:
                raise ValueError(f"{'/'.join(node.path)} has no scope {name!r}; have {list(below)}")
            node = below[name]
        return node

    @staticmethod
    def aggregate(node: Node, metric: str | Callable[[Entry], float]) -> float:
        """A metric summed over the ops of a scope, each as often as the model runs it.

        One of METRICS, or any number that one run of an op has.
        """
        if callable(metric):
            return fsum(metric(entry) * entry.times for entry in node.entries)
        if metric not in METRICS:
            raise ValueError(f"metric must be one of {list(METRICS)}, but got {metric!r}")
        return fsum(entry.times if metric == "ops" else entry.amount(metric) for entry in node.entries)

    def by_part(self, metric: str | Callable[[Entry], float]) -> dict[Part, float]:
        """The same summed by the part of the model, in the order of `Part`."""
        found: dict[Part, list[Entry]] = {part: [] for part in Part}
        for entry in self.root.entries:
            found[entry.part].append(entry)
        nodes = {part: Node(path=(part.value,), own=tuple(mine)) for part, mine in found.items() if mine}
        return {part: self.aggregate(node, metric) for part, node in nodes.items()}


def _node(path: tuple[str, ...], entries: Sequence[Entry], depth: int) -> Node:
    """The scope of entries that share `depth` names. An op that is named like a scope is a leaf inside it."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.scope[min(depth, len(entry.scope) - 1)], []).append(entry)
    children = []
    for name, mine in groups.items():
        is_leaf = all(len(entry.scope) <= depth + 1 for entry in mine)
        below = (*path, name)
        children.append(Node(path=below, own=tuple(mine)) if is_leaf else _node(below, mine, depth + 1))
    return Node(path=path, children=tuple(children))
