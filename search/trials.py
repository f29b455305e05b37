"""Candidates beside the front: all of them where a space keeps all, and the closest where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from estimator.rules import Case
from hardware.units import format_bytes
from results.schema import strategy_columns
from search.candidates import compose_ids, expand
from search.structures import strategy_at
from search.sweep import Plan, SweepWorker, merge, prepare

__all__ = ["MAX_KEPT", "closest_to_feasible", "trial_parts"]

MAX_KEPT = 1_000_000  # candidates of a `keep: all` run: about 300 MB of Parquet
PART = 50_000
CLOSEST, NEAR_STRUCTURES = 3, 12


def trial_parts(plan: Plan) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Ids and columns of every candidate that fits, part by part."""
    legal = plan.enumeration.legal
    if legal > MAX_KEPT:
        raise ValueError(f"search.keep: all holds up to {MAX_KEPT} legal candidates, but the space has {legal}; "
                         "shorten axes or keep the front only")  # fmt: skip
    held: list[np.ndarray] = []
    structures = plan.enumeration.structures
    for i in range(len(structures)):
        held.append(expand(plan.enumeration.worlds[structures.world[i]], structures, i))
        if sum(map(len, held)) >= PART or i == len(structures) - 1:
            ids = np.concatenate(held)
            columns = compose_ids(plan.space, plan.enumeration, ids, gate=True)
            fits = ~np.isnan(columns["step_time_s"])
            yield ids[fits], {name: column[fits] for name, column in columns.items()}
            held = []


def closest_to_feasible(plan: Plan) -> list[dict[str, Any]]:
    """Candidates that come closest where nothing is feasible: those that need the least memory or, where memory is not
    what stands in the way, the best that the constraints refuse."""
    if not len(plan.enumeration.structures):
        return []
    refused = _refused_by_constraints(plan)
    return refused or _least_memory(plan)


def _least_memory(plan: Plan) -> list[dict[str, Any]]:
    structures, rows = plan.enumeration.structures, []
    for i in np.argsort(plan.lows[:, 1], kind="stable")[:NEAR_STRUCTURES]:
        ids = expand(plan.enumeration.worlds[structures.world[i]], structures, int(i))
        columns = compose_ids(plan.space, plan.enumeration, ids)
        best = int(np.argmin(columns["device_memory_bytes"]))
        rows.append(_row(plan, int(ids[best]), {n: float(c[best]) for n, c in columns.items()}))
    rows.sort(key=lambda row: (row["device_memory_bytes"], row["id"]))
    for row in rows[:CLOSEST]:
        row["remedy"] = (f"needs {format_bytes(row['short_by_bytes'])} less on each chip: more chips, a chip with more "
                         "memory, or a shorter sequence")  # fmt: skip
    return rows[:CLOSEST]


def _refused_by_constraints(plan: Plan) -> list[dict[str, Any]]:
    """The fastest of what would fit without the constraints that look at results."""
    texts = [c.expression.text for c in plan.space.constraints]
    if not texts:
        return []
    free = prepare(replace(plan.space, constraints=()))
    if not free.bounded:
        return []
    worker, found = SweepWorker(free), free.warm
    for start, stop in free.blocks:
        found = merge([found, worker.run(start, stop, found)], free.space, bounded=True)
    if not len(found.ids):
        return []
    ids = np.sort(found.ids[np.argsort(found.values[:, 0], kind="stable")[:CLOSEST]])
    columns = compose_ids(free.space, free.enumeration, ids)
    rows = [_row(free, int(key), {n: float(c[i]) for n, c in columns.items()}) for i, key in enumerate(ids)]
    for row in rows:
        row["remedy"] = f"fits, but the constraints refuse it ({'; '.join(texts)}): loosen them"
    return rows


def _row(plan: Plan, key: int, values: dict[str, float]) -> dict[str, Any]:
    system, strategy = strategy_at(plan.space, key)
    case = Case.of(plan.space.model, strategy, system, plan.space.workload)
    flat = {name: column[0] for name, column in strategy_columns(strategy, int(case.dp[0])).items()}
    need, capacity = values["device_memory_bytes"], system.usable_hbm_bytes
    return {
        "id": key, "system": system.name, **flat, "step_time_s": values["step_time_s"], "device_memory_bytes": need,
        "capacity_bytes": capacity, "short_by_bytes": max(need - capacity, 0.0),
    }  # fmt: skip
