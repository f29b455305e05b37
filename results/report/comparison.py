"""Two configurations side by side, as plain text: seconds, bytes and ranks with what B has more. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hardware.units import format_bytes, format_seconds
from results.report.breakdown import TIME_TERMS
from results.report.text import columns

__all__ = ["item_table", "rank_table", "signed", "step_table"]

_BAR = 20
_NOISE = 1e-13  # of a step: what rounding leaves of a remainder that is zero


def signed(value: float, text: Callable[[float], str]) -> str:
    """A difference with its sign; nothing is a dash.

    >>> signed(-0.25, format_seconds), signed(0.0, format_seconds)
    ('-250.0 ms', '-')
    """
    return "-" if value == 0.0 else f"{'+' if value > 0.0 else '-'}{text(abs(value))}"


def step_table(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The terms of two steps; the differences sum to that of the steps. Terms that both lack are left out."""
    whole = max(float(a["step_time_s"]), float(b["step_time_s"]))
    told = [(name, float(a[name]), float(b[name])) for name in TIME_TERMS]
    told = [(name, x, y) for name, x, y in told if max(abs(x), abs(y)) > _NOISE * whole]
    widest = max([abs(y - x) for _, x, y in told], default=0.0)
    rows = [_seconds(name, x, y, widest) for name, x, y in told]
    total = _seconds("step_time_s", float(a["step_time_s"]), float(b["step_time_s"]), 0.0)
    return _table(["term", "A", "B", "B - A", ""], rows, total)


def item_table(a: Mapping[str, float], b: Mapping[str, float]) -> str:
    """Bytes of two ranks item by item."""
    items = [item for item in dict.fromkeys([*a, *b]) if a.get(item) or b.get(item)]
    rows = [_bytes(item, a.get(item, 0.0), b.get(item, 0.0)) for item in items]
    return _table(["item", "A", "B", "B - A"], rows, _bytes("allocated", sum(a.values()), sum(b.values())))


def rank_table(a: Sequence[tuple[str, float, float]], b: Sequence[tuple[str, float, float]]) -> str:
    """Layers, seconds of a micro-batch and allocated bytes of each rank; a rank that one side lacks has dashes.

    Equal neighbours share a line; a star marks the busiest and the fullest of each side.
    """
    sides = [_cells(side) for side in (a, b)]
    count = max(len(a), len(b))
    lines = [[cell for side in sides for cell in (side[i] if i < len(side) else ["-"] * 3)] for i in range(count)]
    starts = [i for i in range(count) if i == 0 or lines[i] != lines[i - 1]]
    ends = [start - 1 for start in starts[1:]] + [count - 1]
    ranks = [str(i) if i == j else f"{i}-{j}" for i, j in zip(starts, ends, strict=True)]
    header = ["rank", "layers A", "seconds A", "memory A", "layers B", "seconds B", "memory B"]
    return "\n".join(columns(header, [[rank, *lines[i]] for rank, i in zip(ranks, starts, strict=True)])) + "\n"


def _cells(side: Sequence[tuple[str, float, float]]) -> list[list[str]]:
    busiest, fullest = max(s for _, s, _ in side), max(n for _, _, n in side)
    return [
        [layers, format_seconds(s) + "* "[s < busiest], format_bytes(n) + "* "[n < fullest]] for layers, s, n in side
    ]


def _seconds(name: str, x: float, y: float, widest: float) -> list[str]:
    length = max(round(abs(y - x) / widest * _BAR), int(y != x)) if widest else 0
    return [name, format_seconds(x), format_seconds(y), signed(y - x, format_seconds), "+-"[y < x] * length]


def _bytes(name: str, x: float, y: float) -> list[str]:
    return [name, format_bytes(x) if x else "-", format_bytes(y) if y else "-", signed(y - x, format_bytes)]


def _table(header: list[str], rows: list[list[str]], total: list[str]) -> str:
    bars = [row[4] for row in rows] if len(header) == 5 else [""] * len(rows)
    head, rule, *lines = columns(header[:4], [*(row[:4] for row in rows), total[:4]])
    body = [f"{line}  {bar}".rstrip() for line, bar in zip(lines[:-1], bars, strict=True)]
    return "\n".join([head, rule, *body, rule, lines[-1]]) + "\n"
