"""A hundred published training steps that predictions are held to: their rows, today's errors, and ceilings of these.

`steps.csv` holds figures of papers and public repositories, each with its `source`; its columns are those of
`search validate`. They are spread evenly over each of eleven families of sources, ordered by chip, model, size and
format; nobody looked at an error to choose. `ceilings.tsv` holds what an error was when ceilings were renewed, rounded
up to whole percents: `python -m tests.anchors.renew`.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path

from search.cases import case_of, predict_case
from search.cores import remembered
from search.measured import read_rows

__all__ = ["CEILINGS", "KINDS", "STEPS", "ceiling_of", "ceilings", "errors", "write_ceilings"]

STEPS = Path(__file__).with_name("steps.csv")
CEILINGS = Path(__file__).with_name("ceilings.tsv")
KINDS = ("step_time", "memory")
LEAST_ROOM = 0.05  # percent between an error and its ceiling: machines differ in the last digits of a float


@cache
def errors() -> dict[tuple[str, str], float]:
    """Signed errors of the shipped catalogue, by case and kind. A row that is skipped is a defect of the table."""
    found: dict[tuple[str, str], float] = {}
    for row in read_rows(STEPS):
        case = case_of(row)
        predict_case(case, remembered)
        assert case.skipped is None, f"{case.name}: {case.skipped}"
        for kind, error in zip(KINDS, (case.error, case.memory_error), strict=True):
            if error is not None:
                found[case.name, kind] = error
    return found


def ceiling_of(error: float) -> int:
    """Whole percents that hold an error.

    >>> ceiling_of(-0.0621), ceiling_of(0.03)
    (7, 4)
    """
    return math.ceil(100.0 * abs(error) + LEAST_ROOM)


def ceilings() -> dict[tuple[str, str], int]:
    """Percents by case and kind."""
    with CEILINGS.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t")
        return {(row["case_id"], row["kind"]): int(row["ceiling_percent"]) for row in rows}


def write_ceilings(of: dict[tuple[str, str], int]) -> None:
    """Replaces the file."""
    with CEILINGS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["case_id", "kind", "ceiling_percent"])
        writer.writerows([name, kind, percent] for (name, kind), percent in of.items())
