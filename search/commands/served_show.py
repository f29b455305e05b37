"""What show and why tell of runs of models that answer. Computes no prediction, and loads nothing that prices."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from estimator.inference import SERVED_COLUMNS
from results.report import csv_text, rejection_table
from results.report.served import served_order, served_table
from results.report.text import columns, counted, format_cell
from results.store import RunFolder
from results.table import Table
from search.commands.answer import answer, write
from search.expression import SERVED_TEXTS, Expression
from search.program import text_code
from search.served import SERVED_NAMES, ServedSpace, parse_served

__all__ = ["counts_line", "objectives_of", "served_space", "show_served", "why_served"]


def served_space(folder: RunFolder) -> ServedSpace:
    """The space that a run searches."""
    return parse_served(folder.space_yaml, str(folder.path / "space.yaml"), folder.path)


def objectives_of(space: ServedSpace) -> dict[str, bool]:
    """Columns, and whether each is minimised."""
    return {o.column: o.minimise for o in space.objectives}


def counts_line(counts: dict[str, Any]) -> str:
    """How many deployments passed each gate."""
    return (f"{counted(counts['raw'], 'point')}, {counts['legal']} legal, {counts['fits']} fit in memory, "
            f"{counts['front']} on the front")  # fmt: skip


def why_served(args: argparse.Namespace, folder: RunFolder) -> int:
    """What rejected deployments of a run."""
    rejections, counts = folder.read_rejections(), folder.manifest["counts"]
    lines = [f"run {folder.path}, {folder.state}", counts_line(counts), "", rejection_table(rejections).rstrip()]
    data = {"run": str(folder.path), "counts": counts, "rejections": list(rejections.rows())}
    answer(args, text="\n".join(lines) + "\n", data=data)
    return 0


def show_served(args: argparse.Namespace, folder: RunFolder) -> int:
    """The front or the reference points of a run."""
    refused = {"--exact": args.exact, "--picture": args.picture}
    if given := [name for name, value in refused.items() if value is not None]:
        raise ValueError(f"{given[0]} is for runs of training, but {folder.path} answers; leave it out")
    if args.tables not in {"front", "reference"}:
        raise ValueError(f"--tables {args.tables} is for runs of training; accepted front, reference")
    space, front = served_space(folder), args.tables == "front"
    table = folder.read_front() if front else folder.read_reference()
    if args.where is not None:
        table = _where(table, args.where)
    objectives = objectives_of(space)
    order = _by(table, args.by) if args.by is not None else served_order(table, objectives)[0]
    rows = table.take(order[: args.top])
    if args.csv:
        write(args, csv_text(rows))
        return 0
    reference = folder.read_reference() if front else None
    shown = {args.by: True, **objectives} if args.by is not None else objectives
    if args.by is not None:
        text = _plain(rows, list(shown), len(table))
    else:
        text = served_table(table if front else table.take([]), objectives,
                            reference=reference if front else table, top=args.top)  # fmt: skip
    data = {"run": str(folder.path), "rows": list(rows.rows())}
    answer(args, text=text, data=data | ({"reference": list(reference.rows())} if reference is not None else {}))
    return 0


def _plain(rows: Table, shown: list[str], number: int) -> str:
    names = ["id", *shown, "batch", "tp", "pp", "dp", "ep"]
    cells = [[format_cell(name, row[name]) for name in names] for row in rows.rows()]
    return "\n".join([*columns(names, cells, left=0), f"{len(rows)} of {number} rows"]) + "\n"


def _by(table: Table, column: str) -> list[int]:
    """Rows by one column, best first."""
    if column not in table.names:
        raise ValueError(f"--by must name a column, but got {column!r}; have {', '.join(table.names)}")
    higher = next((c.better == "higher" for c in SERVED_COLUMNS if c.name == column), False)
    values = table[column]
    order = np.argsort(values, kind="stable")
    return [int(i) for i in (order[::-1] if higher else order)]


def _where(table: Table, text: str) -> Table:
    expression = Expression.parse(text, ["id", *SERVED_NAMES])
    if not expression.is_logical:
        raise ValueError(f"--where must compare, but got {text!r}; write one such as 'tp <= 4 and batch == 64'")
    values: dict[str, Any] = {}
    for name in expression.variables:
        cells = table[name]
        values[name] = (np.array([text_code(str(cell)) for cell in cells], dtype=np.float64)
                        if name in SERVED_TEXTS else cells.astype(np.float64))  # fmt: skip
    return table.where(np.broadcast_to(np.asarray(expression.evaluate(values), dtype=bool), (len(table),)))
