"""Candidates and named points as rows of a run's tables, and the hypervolume of a front. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from estimator.result import BAND_COLUMNS, COLUMNS, StepResult
from estimator.rules import Case
from estimator.step import evaluate, with_layout
from estimator.strategy import Strategy
from hardware.system import SystemSpec
from results.pareto import hypervolume, worst
from results.schema import FRONT_FIELDS, REFERENCE_ID, strategy_columns
from search.bands import predicted_band
from search.space import Space
from search.structures import strategy_at

__all__ = ["columns_of_rows", "front_columns", "hypervolume_of", "reference_columns", "row_of", "with_band"]


def front_columns(
    space: Space, ids: Sequence[int] | np.ndarray, columns: dict[str, np.ndarray], *, band: bool = True
) -> dict[str, Any]:
    """Rows of a front, or with `band` False of trials, as results/schema.py stores them."""
    rows: list[dict[str, Any]] = []
    for i, key in enumerate(np.asarray(ids).tolist()):
        system, strategy = strategy_at(space, key)
        values = {n: float(c[i]) for n, c in columns.items()}
        told = with_band(space, system, strategy, values) if band else values
        rows.append(row_of(space, system, strategy, told) | {"id": key})
    return columns_of_rows(rows)


def with_band(space: Space, system: SystemSpec, strategy: Strategy, values: dict[str, float]) -> dict[str, float]:
    """Results of a legal candidate with its P10 and P90, which a search does not price."""
    result = StepResult(columns={**values}, feasible=True, reason="")
    band = predicted_band(space.model, strategy, system, space.workload, result)
    return values | {name: float(np.asarray(value)) for name, value in band.columns().items()}


def row_of(space: Space, system: SystemSpec, strategy: Strategy, values: dict[str, float]) -> dict[str, Any]:
    """One candidate as a row, by field; results that are not in `values` are NaN."""
    case = Case.of(space.model, strategy, system, space.workload)
    dp = int(case.dp[0])
    flat = {name: column[0] for name, column in strategy_columns(strategy, dp).items()}
    results = {c.name: values.get(c.name, np.nan) for c in (*COLUMNS, *BAND_COLUMNS)}
    return {
        "id": REFERENCE_ID, "name": "", "system": system.name, **flat,
        "num_micro_batches": int(case.num_micro_batches[0]), "feasible": True, "reason": "", **results,
    }  # fmt: skip


def columns_of_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows as the columns of a table."""
    return {f.name: [row[f.name] for row in rows] for f in FRONT_FIELDS}


def reference_columns(space: Space) -> dict[str, Any]:
    """The named points of the space, priced on every system whatever the pruning."""
    rows: list[dict[str, Any]] = []
    for name, strategy in space.references.items():
        for system in space.systems:
            chosen = strategy
            try:
                chosen = with_layout(space.model, strategy, system, space.workload)
                result = evaluate(space.model, chosen, system, space.workload)
                values = {n: float(np.asarray(v)) for n, v in result.columns.items()}
                values = with_band(space, system, chosen, values)
                verdict = {"feasible": bool(result.feasible), "reason": str(result.reason)}
            except ValueError as error:  # an illegal point is shown with its rule
                values, verdict = {}, {"feasible": False, "reason": str(error)}
            rows.append(row_of(space, system, chosen, values) | {"name": name, **verdict})
    return columns_of_rows(rows)


def hypervolume_of(space: Space, columns: dict[str, np.ndarray]) -> dict[str, Any] | None:
    """Hypervolume of a front and its reference, the worst of each objective; None where one is not positive."""
    values = np.stack([columns[o.column] for o in space.objectives], axis=1)
    higher = space.higher
    if (values <= 0).any():
        return None
    reference = worst(values, higher)
    return {"value": hypervolume(values, reference, higher), "reference": reference.tolist()}
