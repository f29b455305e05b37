"""A front as an Excel workbook: its rows, waterfalls that sum, and every operation of one point as a formula.

Formulas stand on cells, so that another bandwidth or rate changes what is below it. Needs the `report` extra
(xlsxwriter). Works no price out.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from results.report.breakdown import TIME_TERMS
from results.schema import FRONT_FIELDS
from results.table import Table

__all__ = ["OP_COLUMNS", "workbook_bytes"]

OP_COLUMNS = ("block", "times", "name", "kind", "phase", "source", "flops", "reached_flops_per_s", "moved_bytes",
              "behind_bytes", "link_s", "kernel_s", "else_s")  # fmt: skip
"""What a row of operations holds; seconds follow from them by formula.

A kernel takes the longer of its arithmetic and its traffic, less what runs behind (`behind_bytes`), which comes on top;
then its ramp-up. `else_s` is what a mean over two formats leaves.
"""
_KNOBS = (("HBM bandwidth, bytes/s", "hbm_bytes_per_s"), ("share of it that streams reach", "hbm_efficiency"),
          ("rates of arithmetic, times", ""), ("links, times", ""))  # fmt: skip


def workbook_bytes(
    front: Table, marked: Sequence[tuple[str, int]], ops: Sequence[Mapping[str, Any]], chip: Mapping[str, float],
    about: Sequence[tuple[str, str]],
) -> bytes:  # fmt: skip
    """The workbook; `marked`: names and places of points with a waterfall; `ops`: rows of OP_COLUMNS of the first."""
    try:
        import xlsxwriter
    except ImportError as error:
        raise ValueError("a workbook needs xlsxwriter; pip install 'trainspace[report]'") from error
    sink = io.BytesIO()
    book = xlsxwriter.Workbook(sink, {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False})
    bold = book.add_format({"bold": True})
    _write_front(book.add_worksheet("front"), front, bold)
    _write_waterfalls(book.add_worksheet("waterfall"), front, marked, bold)
    if ops:
        _write_ops(book, ops, chip, bold)
    sheet = book.add_worksheet("about")
    for line, (head, text) in enumerate(about):
        sheet.write_string(line, 0, head, bold)
        sheet.write_string(line, 1, text)
    book.close()
    return sink.getvalue()


def _write_front(sheet: Any, front: Table, bold: Any) -> None:  # noqa: ANN401 - xlsxwriter's own
    """Names, units, rows; an id is text, for a number in a sheet has fifteen digits."""
    for column, field in enumerate(FRONT_FIELDS):
        sheet.write_string(0, column, field.name, bold)
        sheet.write_string(1, column, field.unit)
        sheet.write_comment(0, column, field.description)
        for line, value in enumerate(front[field.name].tolist(), start=2):
            if field.name == "id":
                sheet.write_string(line, column, str(value))
            elif isinstance(value, float) and not np.isfinite(value):
                sheet.write_blank(line, column, None)
            else:
                sheet.write(line, column, value)
    sheet.freeze_panes(2, 1)
    sheet.autofilter(1, 0, 1 + len(front), len(FRONT_FIELDS) - 1)


def _write_waterfalls(sheet: Any, front: Table, marked: Sequence[tuple[str, int]], bold: Any) -> None:  # noqa: ANN401
    """Terms down, points across; their sum, the step, and what lies between."""
    sheet.write_string(0, 0, "seconds of the rank that works most", bold)
    last = len(TIME_TERMS)
    for line, name in enumerate((*TIME_TERMS, "sum of the terms", "step_time_s", "difference"), start=1):
        sheet.write_string(line, 0, name, bold if line > last else None)
    for column, (name, place) in enumerate(marked, start=1):
        letter = _letter(column)
        sheet.write_string(0, column, name, bold)
        for line, term in enumerate(TIME_TERMS, start=1):
            sheet.write_number(line, column, float(front[term][place]))
        total, step = float(sum(front[term][place] for term in TIME_TERMS)), float(front["step_time_s"][place])
        sheet.write_formula(last + 1, column, f"=SUM({letter}2:{letter}{last + 1})", bold, total)
        sheet.write_number(last + 2, column, step, bold)
        sheet.write_formula(last + 3, column, f"={letter}{last + 2}-{letter}{last + 3}", None, total - step)
    sheet.set_column(0, 0, 32)
    sheet.freeze_panes(1, 1)


def _write_ops(book: Any, ops: Sequence[Mapping[str, Any]], chip: Mapping[str, float], bold: Any) -> None:  # noqa: ANN401
    """Inputs on a sheet of their own, then a formula an operation, and sums by phase."""
    knobs = book.add_worksheet("chip")
    for line, (text, name) in enumerate(_KNOBS):
        knobs.write_string(line, 0, text, bold)
        knobs.write_number(line, 1, chip[name] if name else 1.0)
    knobs.set_column(0, 0, 32)
    sheet = book.add_worksheet("ops")
    heads = (*OP_COLUMNS, "seconds", "of the model")
    for column, head in enumerate(heads):
        sheet.write_string(0, column, head, bold)
    at = {name: _letter(column) for column, name in enumerate(heads)}
    stream = "(chip!$B$1*chip!$B$2)"
    for line, op in enumerate(ops, start=1):
        for column, name in enumerate(OP_COLUMNS):
            sheet.write(line, column, op[name])
        cell = {name: f"{letter}{line + 1}" for name, letter in at.items()}
        work = f"{cell['flops']}/({cell['reached_flops_per_s']}*chip!$B$3)"
        behind = f"{cell['behind_bytes']}/{stream}"
        kernel = f"MAX({work},{cell['moved_bytes']}/{stream}-{behind})+{behind}+{cell['kernel_s']}+{cell['else_s']}"
        sheet.write_formula(line, len(OP_COLUMNS), f"={kernel}+{cell['link_s']}/chip!$B$4", None, op["seconds"])
        sheet.write_formula(
            line, len(OP_COLUMNS) + 1, f"={cell['times']}*{cell['seconds']}", None, op["times"] * op["seconds"]
        )
    end = len(ops) + 1
    for line, phase in enumerate(dict.fromkeys(op["phase"] for op in ops), start=end + 1):
        total = sum(op["times"] * op["seconds"] for op in ops if op["phase"] == phase)
        sheet.write_string(line, 0, f"all of {phase}", bold)
        where = f"${at['phase']}$2:${at['phase']}${end}"
        amounts = f"${at['of the model']}$2:${at['of the model']}${end}"
        sheet.write_formula(line, len(heads) - 1, f'=SUMIFS({amounts},{where},"{phase}")', bold, total)
    sheet.freeze_panes(1, 0)


def _letter(column: int) -> str:
    """Excel's name of a column below 676.

    >>> _letter(0), _letter(26)
    ('A', 'AA')
    """
    high, low = divmod(column, 26)
    return (chr(64 + high) if high else "") + chr(65 + low)
