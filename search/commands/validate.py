"""`search validate`: predicted against measured training steps."""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path

import spaces
from results.files import as_user_error
from results.report.validation import validation_table
from results.report.validation_page import Told, validation_page
from search.bands import quantile_table, table_text
from search.commands.answer import answer, check_writable, tell
from search.measured import Row, read_rows
from search.validate import Folds, examine

__all__ = ["run"]

ANCHORS = Path("tests", "anchors")


def run(args: argparse.Namespace) -> int:
    """Scores the rows of the tables together."""
    files = [Path(name) for name in args.tables] or _anchors()
    folds = Folds(args.cross_validate)
    if args.bands is not None and folds is not Folds.GROUP:
        raise ValueError("--bands is of rows that were left out by groups; add --cross-validate group")
    for name in (args.html, args.bands):
        if name is not None:
            check_writable(args, name)
    rows = [row for file in files for row in read_rows(file)]
    report, residuals = examine(rows, folds=folds, tell=tell)
    if args.bands is not None:
        scored = report["overall"]["n"]
        source = f"{', '.join(file.name for file in files)}, {scored} steps, {date.today().isoformat()}"
        time, memory = (quantile_table(kind) for kind in residuals)
        text = table_text(time, memory, source)
        with as_user_error(Path(args.bands), "write"):
            Path(args.bands).write_text(text, encoding="utf-8")
    answer(args, text=validation_table(report), data=report)
    if args.html is not None:
        page = validation_page(report, [_told(row) for row in rows], f"{', '.join(f.name for f in files)}, predicted")
        with as_user_error(Path(args.html), "write"):
            Path(args.html).write_text(page, encoding="utf-8")
    return 0


def _told(row: Row) -> Told:
    """What errors may follow. Cells that are no numbers belong to rows that are not scored."""

    def number(column: str) -> float | None:
        try:
            return float(row.cells[column])
        except ValueError:
            return None

    return Told(num_gpus=number("n_gpus"), seq=number("seq"), precision=row.cells["precision"])


def _anchors() -> list[Path]:
    files = sorted((spaces.SPACES.parent / ANCHORS).glob("*.csv"))
    if not files:
        raise ValueError(f"no table of measured steps in {ANCHORS} of a checkout; give a CSV: search validate FILE")
    return files
