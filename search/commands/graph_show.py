"""`search graph show`: a graph as a tree of scopes, with what each does and takes."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from estimator.captured import CapturedModel, Origin
from estimator.hierarchy import GraphHierarchy
from results.colours import PART_COLOURS
from results.report import csv_text
from results.report.graph_tree import part_rows, rows_table, scope_rows, tree_lines
from results.report.text import hanging
from search.commands.answer import answer, write
from search.commands.graph_subject import GraphSubject, read_subject
from search.commands.ops import listed, ops_table
from search.commands.point import model_line

__all__ = ["run"]

DEPTH = 3


def run(args: argparse.Namespace) -> int:
    """Prints the tree, the parts, or where each op of a captured graph comes from."""
    subject = read_subject(args, args.config)
    if args.source:
        for name in ("csv", "metric", "depth"):
            if getattr(args, name) not in (None, False):
                raise ValueError(f"--{name} is for amounts, but --source tells places; leave one of them out")
        return _show_sources(args, subject)
    if args.ops:
        return _show_ops(args, subject)
    tree = GraphHierarchy(subject.name, subject.entries)
    if args.by == "part" and args.depth is not None:
        raise ValueError("--depth is for scopes, but --by part has none; leave one of them out")
    rows = part_rows(tree) if args.by == "part" else scope_rows(tree, DEPTH if args.depth is None else args.depth)
    lines = tree_lines(subject.name, rows, args.metric)
    if args.csv:
        write(args, csv_text(rows_table(rows)))
        return 0
    data: dict[str, Any] = {
        "name": subject.name, "of": subject.told, "rows": rows,
        "colours": {part.value: colour for part, colour in PART_COLOURS.items()},
    }  # fmt: skip
    answer(args, text="\n".join([*_head(subject), "", *lines]) + "\n", data=data)
    return 0


def _show_ops(args: argparse.Namespace, subject: GraphSubject) -> int:
    """Every op with its price, as `search estimate --ops` lists them."""
    if not any(entry.bound for entry in subject.entries):
        raise ValueError(f"--ops lists what operations take, but {args.config} has no prices; name a --chip")
    if args.csv:
        raise ValueError("--ops is a table or --json, but got --csv; search graph export writes the operations as CSV")
    ops = listed(subject.entries)
    data = {"name": subject.name, "of": subject.told, "ops": [asdict(op) for op in ops]}
    answer(args, text="\n".join([*_head(subject)[:1], "", ops_table(ops, subject.told)]), data=data)
    return 0


def _head(subject: GraphSubject) -> list[str]:
    name = subject.name if subject.model is None else model_line(subject.model)
    return [name, *hanging("", f"{subject.told}; amounts are of all runs of a scope")]


def _show_sources(args: argparse.Namespace, subject: GraphSubject) -> int:
    model = subject.captured
    if model is None:
        law = "--source tells where captured operations come from"
        raise ValueError(f"{law}, but {args.config} is no capture; search capture makes one of a config.json")
    rows, others = _source_rows(model)
    lines: list[str] = []
    for row in rows:
        lines.append(row["op"])
        for place in row["places"]:
            lines += _place_lines(place)
        for place in row["backward"]:
            lines += _place_lines(place, "backward: ")
    if others:
        lines += ["", "backward of no operation above, such as casts and sums of gradients"]
        lines += [line for place in others for line in _place_lines(place)]
    data = {"name": subject.name, "sources": rows, "other_backward": others}
    answer(args, text="\n".join([*_head(subject), "", *lines]) + "\n", data=data)
    return 0


def _place_lines(place: dict[str, Any], told: str = "") -> list[str]:
    ops = ", ".join(f"{times} {name}" if times > 1 else name for name, times in place["ops"].items())
    where = f"{place['module']} {place['scope']}".strip() or "the engine of gradients"
    return hanging("    ", f"{told}{where}{', ' if place['line'] else ''}{place['line']}: {ops}")


def _source_rows(model: CapturedModel) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Per op its places in the model's code, forward and backward; and what ran backward of none of them."""
    captured = model.captured
    told: set[Origin] = set()
    rows = []
    for name, origins in captured.origins.items():
        places = {(origin.scope, origin.line) for origin in origins}
        backward = [origin for origin in captured.gradients if (origin.scope, origin.line) in places]
        told.update(backward)
        rows.append({"op": name, "places": [_place(o) for o in origins], "backward": [_place(o) for o in backward]})
    return rows, [_place(origin) for origin in captured.gradients if origin not in told]


def _place(origin: Origin) -> dict[str, Any]:
    return {"ops": dict(origin.ops), "scope": origin.scope, "module": origin.module, "line": origin.line}
