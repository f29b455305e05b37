"""A batch of runs as one table. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardware.units import format_count, format_seconds
from results.report.text import WIDTH, clip, columns, format_cell, hanging

__all__ = ["batch_table"]

_NAME, _SYSTEM = 22, 28  # characters
_OBJECTIVES = 3
_ANY = 1000  # characters, more than any table has


def batch_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a run (rows of `BatchIndex.rows`): where, how much, the best of its first objectives; then what failed.

    Objectives that only some runs have are shown for those, as many as there is room for.
    """
    objectives = list(dict.fromkeys(name for row in rows for name in row["best"]))[:_OBJECTIVES]
    lines = _lines(rows, objectives)
    while objectives and max(map(len, lines)) > WIDTH:
        objectives.pop()
        lines = _lines(rows, objectives)
    for row in rows:
        if row["error"]:
            lines += hanging(f"{row['run']}: ", row["error"])
    return "\n".join(lines) + "\n"


def _lines(rows: Sequence[Mapping[str, Any]], objectives: Sequence[str]) -> list[str]:
    """The table with some of the objectives, as wide as it comes."""
    cells = [
        [
            clip(row["run"], _NAME),
            clip(_systems(row), _SYSTEM),
            "-" if row["legal"] is None else format_count(row["legal"]),
            "-" if row["front"] is None else str(row["front"]),
            *(format_cell(name, row["best"][name]) if name in row["best"] else "-" for name in objectives),
            "-" if row["seconds"] is None else format_seconds(row["seconds"]),
            row["outcome"],
        ]
        for row in rows
    ]
    header = ["run", "system", "legal", "front", *map(_short, objectives), "took", "state"]
    return columns(header, cells, left=2, width=_ANY)


def _systems(row: Mapping[str, Any]) -> str:
    """`2048 x dgx_h800`, or how many systems there are."""
    if len(row["systems"]) == 1:
        return f"{row['num_gpus'][0]} x {row['systems'][0]}"
    least, most = min(row["num_gpus"]), max(row["num_gpus"])
    chips = str(least) if least == most else f"{least} to {most}"
    return f"{chips} on {len(row['systems'])} systems"


def _short(name: str) -> str:
    """A column's name without its unit, which the cells carry."""
    stem, _, unit = name.rpartition("_")
    return f"best {stem if unit in {'s', 'bytes'} else name}"
