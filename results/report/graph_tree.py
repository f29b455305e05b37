"""A graph's tree of scopes, or its parts, as text, rows or CSV. Sums through GraphHierarchy alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from estimator.hierarchy import METRICS, GraphHierarchy, Node
from estimator.part import Part
from hardware.units import format_bytes, format_count, format_seconds
from results.report.text import clip, columns
from results.table import Table

__all__ = ["part_rows", "rows_table", "scope_rows", "tree_lines"]

TITLES = {
    "ops": "ops", "flops": "FLOPs", "read_bytes": "read", "written_bytes": "written", "link_bytes": "sent",
    "parameters": "parameters", "seconds": "seconds",
}  # fmt: skip
BAR = 30  # characters
NAME_WIDTH = 44


def scope_rows(tree: GraphHierarchy, depth: int) -> list[dict[str, Any]]:
    """A row per scope down to `depth`, parents first; amounts are of all runs."""
    return [_row(tree, node, "/".join(node.path[1:]), node.depth) for node in tree.root.walk(depth)]


def part_rows(tree: GraphHierarchy) -> list[dict[str, Any]]:
    """The model, and a row per part of it."""
    summed = {metric: tree.by_part(metric) for metric in METRICS}
    rows = [
        {"scope": part.value, "depth": 1, "times": None, "part": part.value, **{m: summed[m][part] for m in METRICS}}
        for part in summed["ops"]
    ]
    return [_row(tree, tree.root, "", 0), *rows]


def _row(tree: GraphHierarchy, node: Node, scope: str, depth: int) -> dict[str, Any]:
    part: Part | None = node.part
    return {
        "scope": scope, "depth": depth, "times": node.times or None, "part": "" if part is None else part.value,
        **{metric: tree.aggregate(node, metric) for metric in METRICS},
    }  # fmt: skip


def rows_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as columns."""

    def column(name: str) -> Any:  # noqa: ANN401 - an array
        values = [row[name] for row in rows]
        is_number = all(isinstance(value, int | float) for value in values)
        return np.asarray(values) if is_number else np.array(values, dtype=object)

    return Table(columns={name: column(name) for name in rows[0]})


def tree_lines(name: str, rows: Sequence[dict[str, Any]], metric: str | None) -> list[str]:
    """The rows for a terminal: every metric that has a value, or one of them with its share of the whole."""
    whole = rows[0]
    names = ["  " * row["depth"] + clip(row["scope"].rpartition("/")[2] or name, NAME_WIDTH) for row in rows]
    if metric is not None:
        if metric not in METRICS:
            raise ValueError(f"--metric must be one of {', '.join(METRICS)}, but got {metric!r}")
        if math.isnan(whole[metric]):
            raise ValueError("--metric seconds needs a price, but nothing is priced; name a chip with --chip")
        shares = [row[metric] / whole[metric] if whole[metric] else 0.0 for row in rows]
        cells = [
            [label, _cell(metric, row[metric]), f"{share:.1%}", "#" * round(BAR * share)]
            for label, row, share in zip(names, rows, shares, strict=True)
        ]
        return [line.rstrip() for line in _left_bars(columns(["scope", TITLES[metric], "share", ""], cells))]
    shown = [m for m in METRICS if m != "ops" and whole[m] and not math.isnan(whole[m])]
    cells = [
        [label, str(row["times"] or ""), f"{row['ops']:.0f}", *(_cell(m, row[m]) for m in shown)]
        for label, row in zip(names, rows, strict=True)
    ]
    return columns(["scope", "times", "ops", *(TITLES[m] for m in shown)], cells)


def _left_bars(lines: Sequence[str]) -> Iterator[str]:
    """Bars begin where the column does."""
    for line in lines:
        text = line.rstrip("#")
        bar = line[len(text) :]
        yield text.rstrip() + ("  " + bar if bar else "")


def _cell(metric: str, value: float) -> str:
    if not value:
        return "-"
    if metric == "seconds":
        return format_seconds(value)
    return format_bytes(value) if metric.endswith("_bytes") else format_count(value)
