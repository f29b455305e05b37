"""Plain text that fits a terminal: wrapping, columns, bars and values in units. Knows nothing of what is reported."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from estimator.result import COLUMNS
from hardware.units import format_bytes, format_count, format_seconds
from results.schema import FRONT_FIELDS, REPLAY_FIELDS, SERVED_FIELDS

__all__ = ["WIDTH", "clip", "columns", "counted", "format_cell", "hanging", "title_lines", "wrap"]

WIDTH = 100

_UNITS = {field.name: field.unit for field in (*SERVED_FIELDS, *REPLAY_FIELDS, *FRONT_FIELDS)} | {
    column.name: column.unit for column in COLUMNS
}


def format_cell(name: str, value: Any) -> str:  # noqa: ANN401 - cells are of any plain type
    """The value of a named column for a reader; a missing number is a dash.

    >>> format_cell("mfu", 0.41237), format_cell("tp", 8), format_cell("bubble_s", float("nan"))
    ('0.4124', '8', '-')
    """
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else clip(value)
    number = float(value)
    if not math.isfinite(number):
        return "-"
    unit = _UNITS.get(name, "")
    if unit == "s":  # points of a front differ in the third digit
        return f"{number:.4g} s" if 1.0 <= number < 1000.0 else format_seconds(number)
    if unit == "B":
        return format_bytes(number)
    if number == int(number) and abs(number) < 1e15:
        return str(int(number))
    return format_count(number) if abs(number) >= 1e5 else f"{number:.4g}"


def counted(number: float, noun: str) -> str:
    """A number of things; one of them is told in the singular.

    >>> counted(1, "day"), counted(2.5, "day"), counted(15_360, "sequence")
    ('1 day', '2.5 days', '15360 sequences')
    """
    shown = str(int(number)) if number == int(number) else f"{number:g}"
    return f"{shown} {noun}{'' if number == 1 else 's'}"


def clip(text: str, width: int = 60) -> str:
    """One printable line of at most `width` characters.

    >>> clip("a very long name", 10)
    'a very ...'
    """
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= width else line[: width - 3] + "..."


class _Wrapper(textwrap.TextWrapper):
    """Takes a sum that is longer than a line for several words."""

    def _split(self, text: str) -> list[str]:
        chunks = super()._split(text)
        return [part for c in chunks for part in (re.split(r"(?<=\+)", c) if len(c) > self.width else [c]) if part]


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters, broken at spaces where there are any, but not between a word and its number.

    What is longer than a line is broken behind a `+` before it is cut anywhere else.

    >>> wrap("tp 1 x pp 16", 7), wrap("recompute norms+act", 7)
    (['tp 1 x', 'pp 16'], ['recompu', 'te', 'norms+', 'act'])
    """
    glued = re.sub(r"(?<=[a-z]) (?=\d)", "\N{NO-BREAK SPACE}", text)
    lines = _Wrapper(width=max(width, 1), break_on_hyphens=False).wrap(glued)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines] or [""]


def hanging(head: str, text: str, width: int = WIDTH) -> list[str]:
    """`head` and the wrapped text behind it, later lines indented below its start."""
    lines = wrap(text, width - len(head))
    return [(head if i == 0 else " " * len(head)) + line for i, line in enumerate(lines)]


def title_lines(name: str, width: int) -> list[str]:
    """A column name broken at underscores so that it fits above a narrow column, filled from the bottom.

    Cells of seconds and bytes carry their unit, so the title leaves it out.

    >>> title_lines("device_memory_bytes", 12), title_lines("tokens_per_s_per_gpu", 12)
    (['device', 'memory'], ['tokens per', 's per gpu'])
    """
    carried = {"s": "_s", "B": "_bytes"}.get(_UNITS.get(name, ""), "")
    words = name.removesuffix(carried).split("_") if carried else name.split("_")
    backwards = wrap(" ".join(reversed(words)), width)
    return [" ".join(reversed(line.split())) for line in reversed(backwards)]


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, width: int = WIDTH) -> list[str]:
    """A table: the first `left` columns to the left, the others to the right; what is cut at `width` ends in dots.

    Columns that do not fit two spaces apart stand one apart.
    """
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= width else 1

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        text = (" " * gap).join(padded).rstrip()
        return text if len(text) <= width else text[: width - 3] + "..."

    rule = "-" * min(width, sum(widths) + gap * (len(widths) - 1))
    return [line(header), rule, *(line(row) for row in rows)]
