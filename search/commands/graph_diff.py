"""`search graph diff`: two graphs op by op, as a model file against what was captured of its code."""

from __future__ import annotations

import argparse
import json
from typing import Any

from estimator.graph_diff import Changed, GraphDiff, diff
from estimator.hierarchy import GraphHierarchy
from hardware.units import format_bytes, format_count
from results.report.text import clip, columns, hanging
from search.commands.answer import answer
from search.commands.graph_subject import GraphSubject, read_subject

__all__ = ["run"]

TOTALS = ("ops", "flops", "read_bytes", "written_bytes", "link_bytes", "parameters")
WIDE = 300  # characters of a value


def run(args: argparse.Namespace) -> int:
    """Tells the differences from A to B; `equal` on a line of its own where there are none."""
    a, b = (_subject(args, letter) for letter in ("a", "b"))
    found = diff(a.graph, b.graph)
    answer(args, text=_text(a, b, found), data=_data(a, b, found))
    return 0


def _subject(args: argparse.Namespace, letter: str) -> GraphSubject:
    overrides = getattr(args, f"overrides_{letter}")
    one = argparse.Namespace(
        **{**vars(args), "overrides": overrides, "reference": None, "chip": None, "precision": None, "table": []}
    )
    return read_subject(one, getattr(args, letter))


def _text(a: GraphSubject, b: GraphSubject, found: GraphDiff) -> str:
    lines = [*hanging("A  ", f"{a.name}: {a.told}"), *hanging("B  ", f"{b.name}: {b.told}"), ""]
    if found.is_equal:
        number = sum(len(block.ops) for block in a.graph.blocks.values())
        lines.append(f"equal: {number} operations of {len(a.graph.blocks)} blocks, and the order in which they run")
        return "\n".join(lines) + "\n"
    sums = [_totals(subject) for subject in (a, b)]
    lines += [*columns(["", "A", "B"], [[m, *(_cell(m, total[m]) for total in sums)] for m in TOTALS]), ""]
    lines += [f"block     {name}: runs {old} times in A, {new} in B" for name, (old, new) in found.times.items()]
    for word, ops in (("removed", found.removed), ("added", found.added)):
        lines += [f"{word:<8}  {scope}: {kind}, {phase}" for scope, phase, kind in ops]
    lines += [f"renamed   {old} -> {new}" for old, new in found.renamed]
    for change in found.changed:
        lines += _change_lines(change)
    lines += [f"order     {name}: operations that both have stand in another order" for name in found.reordered]
    return "\n".join(lines) + "\n"


def _change_lines(change: Changed) -> list[str]:
    lines = [f"changed   {change.scope}, {change.phase}"]
    for name, (left, right) in change.fields.items():
        lines += hanging("            ", f"{name}: {_value(left)} -> {_value(right)}")
    return lines


def _value(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return "nothing" if value is None else clip(json.dumps(value), WIDE)


def _totals(subject: GraphSubject) -> dict[str, float]:
    tree = GraphHierarchy(subject.name, subject.entries)
    return {metric: tree.aggregate(tree.root, metric) for metric in TOTALS}


def _cell(metric: str, value: float) -> str:
    return format_bytes(value) if metric.endswith("_bytes") else format_count(value)


def _data(a: GraphSubject, b: GraphSubject, found: GraphDiff) -> dict[str, Any]:
    ops = ("scope", "phase", "kind")
    return {
        "equal": found.is_equal,
        "a": {"name": a.name, "of": a.told, **_totals(a)}, "b": {"name": b.name, "of": b.told, **_totals(b)},
        "times": found.times,
        "removed": [dict(zip(ops, op, strict=True)) for op in found.removed],
        "added": [dict(zip(ops, op, strict=True)) for op in found.added],
        "renamed": [{"from": old, "to": new} for old, new in found.renamed],
        "changed": [{"scope": c.scope, "phase": c.phase, "fields": c.fields} for c in found.changed],
        "reordered": list(found.reordered),
    }  # fmt: skip
