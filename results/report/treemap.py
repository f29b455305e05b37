"""Rectangles in proportion to sizes, as square as they can be. Draws nothing.

Bruls, Huizing and van Wijk 2000, "Squarified Treemaps" (doi:10.1007/978-3-7091-6783-0_4): rows of rectangles along the
shorter side, each as long as a further member would not make its worst one more square. The page of a run does the same
in its own language (page/point.js).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Box", "squarified"]


class Box(NamedTuple):
    """Where a rectangle lies, from its corner with the least coordinates."""

    x: float
    y: float
    width: float
    height: float


def squarified(sizes: Sequence[float], width: float, height: float) -> list[Box]:
    """A rectangle for each size, largest first; together they fill the whole.

    >>> squarified([6.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.0], 6.0, 4.0)[:2]
    [Box(x=0.0, y=0.0, width=3.0, height=2.0), Box(x=0.0, y=2.0, width=3.0, height=2.0)]
    """
    if not all(size > 0.0 for size in sizes) or list(sizes) != sorted(sizes, reverse=True):
        raise ValueError(f"sizes of a treemap must be positive, largest first, but got {list(sizes)}")
    whole = sum(sizes)
    areas = [size / whole * width * height for size in sizes]
    x, y, placed = 0.0, 0.0, list[Box]()
    while areas:
        side = min(width, height)
        count = _row(areas, side)
        area = sum(areas[:count])
        thick, along = area / side, 0.0
        for part in areas[:count]:
            length = part / thick
            upright = width >= height
            placed.append(Box(x, y + along, thick, length) if upright else Box(x + along, y, length, thick))
            along += length
        if width >= height:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
        areas = areas[count:]
    return placed


def _row(areas: Sequence[float], side: float) -> int:
    """How many of the areas stand in one row along a side."""
    count = 1
    while count < len(areas) and _worst(areas[: count + 1], side) <= _worst(areas[:count], side):
        count += 1
    return count


def _worst(row: Sequence[float], side: float) -> float:
    """The aspect ratio of the least square member."""
    area = sum(row)
    return max(side * side * row[0] / (area * area), area * area / (side * side * row[-1]))
