"""What refining finalists on their replayed steps came to, as lines. Refines nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from results.report.text import hanging

__all__ = ["refined_lines"]

Row = Mapping[str, Any]


def refined_lines(rows: Sequence[Row], target: str) -> list[str]:
    """A line for each finalist, and how to price the one that comes out fastest. target: what a row's name follows."""
    lines = []
    for row in rows:
        head = f"tuned {row['name']}: "
        if not row["changes"]:
            lines += hanging(head, f"nothing gains on {row['before_s']:.4g} s ({row['replays']} replays)")
            continue
        told = {key.removeprefix("strategy."): value.strip("[]") for key, value in row["changes"].items()}
        what = "; ".join(f"{key} {value.replace(',', ', ')}" for key, value in told.items())
        spent = f"{row['before_s']:.4g} s to {row['after_s']:.4g} s a step ({row['gain']:.1%} less)"
        lines += hanging(head, f"{spent} by {what}")
    best = min(rows, key=lambda row: float(row["after_s"]), default=None)
    if best is not None and best["changes"]:
        words = " ".join(f"--set {shlex.quote(f'{key}={value}')}" for key, value in best["changes"].items())
        lines.append(f"  search estimate {target.format(name=best['name'])} {words}")
    return lines
