"""A graph as an Excel workbook: a row per op with its formulas in letters, in numbers, and worked out.

Sizes stand once, as names, on a sheet of their own; FLOPs and bytes of an op are live formulas over them, so that a
changed size changes the sums. Needs the `report` extra (xlsxwriter).
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from estimator.formulas import FORMULAS, Formulas
from estimator.hierarchy import METRICS, GraphHierarchy
from estimator.inventory import Entry
from results.colours import PART_COLOURS, on
from results.graph_export.view import GraphView, kind_of, require, shape_of

__all__ = ["workbook_bytes"]

TITLES = {
    "flops": "FLOPs", "read_bytes": "bytes read", "written_bytes": "bytes written", "link_bytes": "bytes sent",
    "parameters": "parameters", "seconds": "seconds", "ops": "ops",
}  # fmt: skip
WORDS = ("scope", "block", "times", "op", "kind", "part", "phase", "dims")
BEHIND = ("parameters", "seconds", "bound", "price source", "source")
MAX_FORMULA = 8000  # Excel takes 8,192 characters
DEPTH = 3  # of the sheet of scopes


def workbook_bytes(view: GraphView) -> bytes:
    """The file's content; of equal graphs equal bytes."""
    require("xlsxwriter", "an Excel workbook")
    from datetime import datetime

    import xlsxwriter

    sink, told = io.BytesIO(), view.formulas()
    book = xlsxwriter.Workbook(sink, {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False})
    book.set_properties({"title": view.name, "subject": view.told, "created": datetime(2000, 1, 1)})  # not the time
    bold = book.add_format({"bold": True, "text_wrap": True, "valign": "top"})
    _write_ops(book, view, told, bold)
    _write_sizes(book, told.sizes, bold)
    _write_scopes(book, view, bold)
    book.close()
    return sink.getvalue()


def _write_ops(book: Any, view: GraphView, told: Formulas, bold: Any) -> None:  # noqa: ANN401 - xlsxwriter's own
    sheet = book.add_worksheet("ops")
    fills = {
        part: book.add_format({"bg_color": colour, "font_color": on(colour)}) for part, colour in PART_COLOURS.items()
    }
    shown = [name for name in FORMULAS if any(getattr(entry, name) for entry in view.entries)]
    heads = [*WORDS, *(f"{TITLES[n]}{kind}" for n in shown for kind in (" in letters", " in numbers", "")), *BEHIND]
    sheet.write_row(0, 0, heads, bold)
    for row, (entry, formula) in enumerate(zip(view.entries, told.of, strict=True), start=1):
        op = entry.op
        words = ("/".join(entry.scope), entry.block.kind.value, entry.times, op.name, kind_of(op), entry.part.value,
                 op.phase.value, shape_of(op))  # fmt: skip
        sheet.write_row(row, 0, words)
        sheet.write_string(row, WORDS.index("part"), entry.part.value, fills[entry.part])
        column = len(WORDS)
        for name in shown:
            letters, numbers = formula[name].written(), formula[name].written(told.sizes)
            sheet.write_string(row, column, letters)
            sheet.write_string(row, column + 1, numbers)
            value = getattr(entry, name)
            if len(letters) > MAX_FORMULA:
                sheet.write_number(row, column + 2, value)
            else:
                sheet.write_formula(row, column + 2, f"={letters}", None, value)
            column += 3
        _write_cells(sheet, row, column, _behind(entry, view))
    sheet.freeze_panes(1, WORDS.index("op") + 1)
    sheet.autofilter(0, 0, len(view.entries), len(heads) - 1)
    sheet.set_column(0, 0, 36)


def _behind(entry: Entry, view: GraphView) -> Sequence[Any]:
    return (entry.parameters, entry.seconds, entry.bound, entry.source, view.source_of(entry))


def _write_cells(sheet: Any, row: int, column: int, cells: Sequence[Any]) -> None:  # noqa: ANN401 - xlsxwriter's own
    """What is no number stays empty."""
    for i, cell in enumerate(cells):
        if not (isinstance(cell, float) and math.isnan(cell)):
            sheet.write(row, column + i, cell)


def _write_sizes(book: Any, sizes: Mapping[str, float], bold: Any) -> None:  # noqa: ANN401 - xlsxwriter's own
    sheet = book.add_worksheet("sizes")
    sheet.write_row(0, 0, ["size", "value"], bold)
    for row, (name, size) in enumerate(sizes.items(), start=1):
        sheet.write_row(row, 0, [name, size])
        book.define_name(name, f"=sizes!$B${row + 1}")


def _write_scopes(book: Any, view: GraphView, bold: Any) -> None:  # noqa: ANN401 - xlsxwriter's own
    """Sums of all runs of each scope."""
    sheet = book.add_worksheet("scopes")
    tree = GraphHierarchy(view.name, view.entries)
    sheet.write_row(0, 0, ["scope", "depth", "times", *(TITLES[metric] for metric in METRICS)], bold)
    for row, node in enumerate(tree.root.walk(DEPTH), start=1):
        sheet.write_row(row, 0, ["/".join(node.path), node.depth])
        _write_cells(sheet, row, 2, [node.times or math.nan, *(tree.aggregate(node, metric) for metric in METRICS)])
        sheet.set_row(row, None, None, {"level": node.depth})
    sheet.set_column(0, 0, 40)
