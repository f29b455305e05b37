"""Graphs of nodes that depend on each other, as execution traces are, made into a RankTrace. Knows no file format.

Such graphs tell durations at best. Where no node has a start, each starts when all that it depends on has ended; one
without a duration takes none, and a notice counts them. Refuses a dependency on a node that is not there, and cycles.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from capture.traces.assemble import Rows, topological_order
from capture.traces.records import Group, Kind, RankTrace

__all__ = ["Node", "node_trace", "rank_of_name"]

NS_PER_US = 1000
RANK = re.compile(r"\.(\d+)\.\w+(?:\.gz)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node. `start_us`, `duration_us`: None where not told. `tag`: tells transfers between two ranks apart."""

    id: int
    name: str
    kind: Kind
    stream: str
    needs: Sequence[int] = ()
    start_us: float | None = None
    duration_us: float | None = None
    iteration: int = -1
    group: Group | None = None
    nbytes: float = float("nan")
    peer: int = -1
    tag: str = ""


def rank_of_name(source: str) -> tuple[int, str]:
    """The rank that a file NAME.RANK.et is of, and the notice of it: its content tells none."""
    match = RANK.search(PurePath(source).name)
    if match is None:
        return 0, "ranks are not recorded: taken for rank 0"
    return int(match[1]), "ranks are not recorded: taken from the names of the files"


def node_trace(source: str, nodes: Sequence[Node], *, rank: int, notices: list[str], **header: Any) -> RankTrace:  # noqa: ANN401
    """The nodes as events of a rank."""
    index = {node.id: number for number, node in enumerate(nodes)}
    if len(index) < len(nodes):
        twice = next(node for number, node in enumerate(nodes) if index[node.id] != number)
        raise ValueError(f"{source}: node {twice.id} ({twice.name!r}) must stand once, but stands twice")
    edges = [(_found(source, node, index, need), number) for number, node in enumerate(nodes) for need in node.needs]
    timed = any(node.start_us is not None for node in nodes)
    starts = [node.start_us or 0.0 for node in nodes] if timed else _earliest(nodes, edges)
    if timed:
        kept = [(a, b) for a, b in edges if starts[a] + (nodes[a].duration_us or 0.0) <= starts[b]]
        if len(kept) < len(edges):
            notices.append(f"{len(edges) - len(kept)} dependencies overlap in time and are left out")
        edges = kept
    else:
        told = sum(node.duration_us is not None for node in nodes)
        notices.append(f"no times: starts follow from dependencies, durations are told of {told} of {len(nodes)} nodes")
    rows = Rows()
    places = _places(nodes, rank)
    for number, node in enumerate(nodes):
        start_ns = round(starts[number] * NS_PER_US)
        sequence, transaction = places.get(number, (-1, None))
        rows.add(
            node.kind, node.stream, node.name, start_ns, start_ns + round((node.duration_us or 0.0) * NS_PER_US),
            iteration=node.iteration, group=node.group, sequence=sequence, nbytes=node.nbytes, peer=node.peer,
            transaction=transaction,
        )  # fmt: skip
    rows.edges = edges
    return rows.trace(source=source, rank=rank, notices=notices, **header)


def _found(source: str, node: Node, index: dict[int, int], need: int) -> int:
    if need not in index:
        raise ValueError(
            f"{source}: node {node.id} ({node.name!r}) must depend on nodes of the file, but {need} is none"
        )
    return index[need]


def _earliest(nodes: Sequence[Node], edges: Sequence[tuple[int, int]]) -> list[float]:
    """When each can start, in microseconds; 0 for those in a cycle, which is refused where traces are assembled."""
    pairs = np.array(edges, np.int64).reshape(-1, 2)
    follows: dict[int, list[int]] = defaultdict(list)
    for before, after in edges:
        follows[before].append(after)
    starts = [0.0] * len(nodes)
    for number in topological_order(len(nodes), pairs[:, 0], pairs[:, 1]).tolist():
        end = starts[number] + (nodes[number].duration_us or 0.0)
        for after in follows[number]:
            starts[after] = max(starts[after], end)
    return starts


def _places(nodes: Sequence[Node], rank: int) -> dict[int, tuple[int, str | None]]:
    """Sequence of each collective in its group and transaction of each transfer, in the order of the file."""
    counts: dict[object, int] = defaultdict(int)
    places: dict[int, tuple[int, str | None]] = {}
    for number, node in enumerate(nodes):
        if node.kind is Kind.COLLECTIVE:
            places[number] = (counts[node.group], None)
            counts[node.group] += 1
        elif node.kind in (Kind.SEND, Kind.RECV) and node.peer >= 0:
            pair = (rank, node.peer) if node.kind is Kind.SEND else (node.peer, rank)
            key = (node.kind, pair, node.tag)
            places[number] = (-1, f"{pair[0]}>{pair[1]}|{node.tag}|{counts[key]}")
            counts[key] += 1
    return places
