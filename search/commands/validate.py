"""`search validate`: predicted against measured training steps."""

from __future__ import annotations

import argparse
from pathlib import Path

import spaces
from search.commands.answer import answer, tell
from search.measured import read_rows
from search.validate import Folds, table, validate

__all__ = ["run"]

ANCHORS = Path("tests", "anchors")


def run(args: argparse.Namespace) -> int:
    """Scores the rows of the tables together."""
    files = [Path(name) for name in args.tables] or _anchors()
    report = validate([row for file in files for row in read_rows(file)], folds=Folds(args.cross_validate), tell=tell)
    answer(args, text=table(report) + "\n", data=report)
    return 0


def _anchors() -> list[Path]:
    files = sorted((spaces.SPACES.parent / ANCHORS).glob("*.csv"))
    if not files:
        raise ValueError(f"no table of measured steps in {ANCHORS} of a checkout; give a CSV: search validate FILE")
    return files
