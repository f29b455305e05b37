"""A front drawn in characters on log axes. Prints nothing."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from estimator.result import column
from results.pareto import knee
from results.report.text import format_cell
from results.table import Table

__all__ = ["scatter"]

_MARGIN = 11  # characters left of the axis, for its labels


def scatter(front: Table, x: str, y: str, *, reference: Table | None = None, width: int = 80, height: int = 16) -> str:
    """`o` a point, `8` several, `K` the knee of these two axes, `R` a reference point. At most `width` + 11 columns.

    An axis with a value of zero or less is linear, and says so.
    """
    drawn = None if reference is None else reference.where(np.isfinite(reference[x]) & np.isfinite(reference[y]))
    if not len(front):
        return "no points to draw\n"
    tables = [front, *([drawn] if drawn is not None else [])]
    across = _Axis(x, np.concatenate([table[x] for table in tables]), width)
    upward = _Axis(y, np.concatenate([table[y] for table in tables]), height)
    grid = [[" "] * width for _ in range(height)]
    for i in range(len(front)):
        line, cell = height - 1 - upward.cell(front[y][i]), across.cell(front[x][i])
        grid[line][cell] = "o" if grid[line][cell] == " " else "8"
    directions = [column(name).better == "higher" for name in (x, y)]
    centre = knee(np.stack([front[x], front[y]], axis=1), directions)
    if len(front) > 1:
        grid[height - 1 - upward.cell(front[y][centre])][across.cell(front[x][centre])] = "K"
    for i in range(0 if drawn is None else len(drawn)):
        assert drawn is not None
        grid[height - 1 - upward.cell(drawn[y][i])][across.cell(drawn[x][i])] = "R"
    return _framed(grid, across, upward, has_reference=bool(drawn is not None and len(drawn)))


class _Axis:
    """Maps values to cells 0 .. size - 1."""

    def __init__(self, name: str, values: NDArray[np.float64], size: int) -> None:
        self.name, self.size = name, size
        self.low, self.high = float(values.min()), float(values.max())
        self.is_log = self.low > 0

    def cell(self, value: float) -> int:
        if self.low == self.high:
            return self.size // 2
        position = _log(value / self.low, self.high / self.low) if self.is_log else self._linear(value)
        return min(int(position * self.size), self.size - 1)

    def at(self, fraction: float) -> float:
        """The value at a fraction of the axis."""
        if self.is_log:
            return self.low * math.pow(self.high / self.low, fraction)
        return self.low + fraction * (self.high - self.low)

    def label(self) -> str:
        return f"{self.name} ({'log' if self.is_log else 'linear'})"

    def _linear(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def _log(ratio: float, span: float) -> float:
    return math.log(ratio) / math.log(span)


def _framed(grid: list[list[str]], across: _Axis, upward: _Axis, *, has_reference: bool) -> str:
    height, width = len(grid), across.size
    ticks = {0: upward.high, height // 2: upward.at(0.5), height - 1: upward.low}
    lines = [upward.label()]
    for number, cells in enumerate(grid):
        tick = format_cell(upward.name, ticks[number]) if number in ticks else ""
        lines.append(f"{tick:>{_MARGIN - 2}} |{''.join(cells)}".rstrip())
    lines.append(" " * (_MARGIN - 1) + "+" + "-" * width)
    left, middle, right = (format_cell(across.name, value) for value in (across.low, across.at(0.5), across.high))
    gap = width - len(left) - len(right)
    lines.append(" " * _MARGIN + left + middle.center(gap) + right)
    lines.append(" " * _MARGIN + across.label().center(width).rstrip())
    legend = "o a point, 8 several, K knee" + (", R reference" if has_reference else "")
    return "\n".join([*lines, " " * _MARGIN + legend]) + "\n"
