"""Rows of a front for people and for JSON: which columns, in which order. Computes no prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from estimator.layout import even_layers
from estimator.model import ModelSpec
from estimator.result import BAND_COLUMNS, COLUMNS
from estimator.strategy import LayoutRule
from results.report import arithmetic, settings
from results.report.text import WIDTH, columns, format_cell, hanging
from results.schema import STRATEGY_NAMES, layout_at, strategy_json
from results.table import Table
from search.expression import KNOWN_NAMES, TEXT_NAMES, Expression, text_code
from search.layout import layout_string

__all__ = ["json_row", "json_rows", "megatron_layout", "ordered", "ordered_table", "select", "summary"]


def json_row(row: Mapping[str, Any], model: ModelSpec) -> dict[str, Any]:
    """One row as `search show --json` has it: id, strategy, layout string, then the other columns."""
    rest = {name: value for name, value in row.items() if name != "id" and name not in STRATEGY_NAMES}
    layout = {"megatron_layout": megatron_layout(row, model)}
    return {"id": row["id"], "strategy": strategy_json(row), **layout, **rest}


def json_rows(table: Table, model: ModelSpec) -> list[dict[str, Any]]:
    """Every row of a table."""
    return [json_row(row, model) for row in table.rows()]


def megatron_layout(row: Mapping[str, Any], model: ModelSpec) -> str | None:
    """What Megatron's --pipeline-model-parallel-layout takes for a row; None where there is no pipeline."""
    layers, num_chunks = layout_at(row), int(row["pp"]) * int(row["vpp"])
    if num_chunks == 1 or isinstance(layers, LayoutRule):
        return None
    return layout_string(layers or even_layers(model.num_layers, num_chunks), model.num_mtp_layers)


def summary(row: Mapping[str, Any]) -> str:
    """A configuration in one line."""
    return "; ".join([arithmetic(row), *settings(row)])


def select(table: Table, where: str) -> Table:
    """The rows for which an expression over numbers and texts of the table holds."""
    names = [name for name in ("id", "feasible", *KNOWN_NAMES, *(c.name for c in BAND_COLUMNS)) if name in table]
    expression = Expression.parse(where, names)
    if not expression.is_logical:
        raise ValueError(f"--where must compare, but got {where!r}; write one such as 'tp <= 4 and pp == 16'")
    values = {name: _numbers(table, name) for name in expression.variables}
    holds = np.broadcast_to(np.asarray(expression.evaluate(values), dtype=bool), (len(table),))
    return table.where(holds)


def _numbers(table: Table, name: str) -> np.ndarray:
    column = table[name]
    if name in TEXT_NAMES:
        return np.array([text_code(text) for text in column], dtype=np.float64)
    return column.astype(np.float64)


def ordered(table: Table, by: str) -> Table:
    """Rows by one column, best first where the column knows a better."""
    better = next((c.better for c in COLUMNS if c.name == by), "lower")
    return table.sort("id").sort(by, descending=better == "higher")


def ordered_table(table: Table, shown: list[str]) -> str:
    """Rows as they come: id, the named columns, the configuration."""
    cells = [[str(row["id"]), *(format_cell(name, row[name]) for name in shown)] for row in table.rows()]
    header, rule, *lines = columns(["id", *shown], cells, left=0)
    start = len(rule) + 2
    out = [f"{header:<{start}}configuration", "-" * WIDTH]
    for line, row in zip(lines, table.rows(), strict=True):
        out += hanging(f"{line:<{start}}", summary(row))
    return "\n".join(out) + "\n"
