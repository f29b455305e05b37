"""Candidates beside the front: all of them where a space keeps all, and the closest where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from estimator.rules import Case
from hardware.units import format_bytes
from results.schema import strategy_columns
from search.candidates import batches, compose_ids, expand
from search.objective import Objective
from search.space import Keep, Space
from search.structures import strategy_at
from search.sweep import Plan, prepare, sweep_plan

__all__ = ["MAX_KEPT", "check_kept", "closest_row", "closest_to_feasible", "trial_parts", "with_remedy"]

MAX_KEPT = 1_000_000  # candidates of a `keep: all` run: about 300 MB of Parquet
PART = 50_000
CLOSEST, NEAR_STRUCTURES = 3, 12
STEP_AND_MEMORY = (
    Objective(column="step_time_s", minimise=True),
    Objective(column="peak_memory_bytes", minimise=True),
)


def check_kept(plan: Plan) -> None:
    """ValueError where a run is to keep more than it can."""
    legal = plan.enumeration.legal
    if plan.space.options.keep is Keep.ALL and legal > MAX_KEPT:
        raise ValueError(f"search.keep: all holds up to {MAX_KEPT} legal candidates, but the space has {legal}; "
                         "shorten axes or keep the front only")  # fmt: skip


def trial_parts(plan: Plan) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
    """Ids and columns of every legal candidate that fits, part by part; constraints refuse none."""
    check_kept(plan)
    for ids in batches(plan.enumeration, np.arange(len(plan.enumeration.structures)), PART):
        columns = compose_ids(plan.space, plan.enumeration, ids, gate=True)
        fits = ~np.isnan(columns["step_time_s"])
        yield ids[fits], {name: column[fits] for name, column in columns.items()}


def closest_to_feasible(plan: Plan) -> list[dict[str, Any]]:
    """Candidates that come closest where nothing is feasible.

    Those that the constraints refuse, the fastest first; where nothing would fit either, those that need the least
    memory. None where the rules reject everything.
    """
    if not plan.space.constraints:
        return _least_memory(plan)
    free = prepare(replace(plan.space, constraints=(), objectives=STEP_AND_MEMORY))
    return _refused(plan, free) or _least_memory(plan) or _least_memory(free)


def _least_memory(plan: Plan) -> list[dict[str, Any]]:
    structures, rows = plan.enumeration.structures, []
    for i in np.argsort(plan.lows[:, 1], kind="stable")[:NEAR_STRUCTURES]:
        ids = expand(plan.enumeration.worlds[structures.world[i]], structures, int(i))
        columns = compose_ids(plan.space, plan.enumeration, ids)
        best = int(np.argmin(columns["device_memory_bytes"]))
        rows.append(closest_row(plan.space, int(ids[best]), {n: float(c[best]) for n, c in columns.items()}))
    rows.sort(key=lambda row: (row["device_memory_bytes"], row["id"]))
    return with_remedy(rows[:CLOSEST])


def with_remedy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What would make candidates fit that lack memory."""
    for row in rows:
        row["remedy"] = (f"needs {format_bytes(row['short_by_bytes'])} less on each chip: more chips, a chip with more "
                         "memory, or a shorter sequence")  # fmt: skip
    return rows


def _refused(plan: Plan, free: Plan) -> list[dict[str, Any]]:
    """The fastest of what fits without the constraints."""
    found = sweep_plan(free)
    ids = found.ids[np.argsort(found.values[:, 0], kind="stable")[:CLOSEST]]
    columns = compose_ids(free.space, free.enumeration, ids)
    rows = [
        closest_row(free.space, int(key), {n: float(c[i]) for n, c in columns.items()}) for i, key in enumerate(ids)
    ]
    texts = "; ".join(c.expression.text for c in plan.space.constraints)
    for row in rows:
        row["remedy"] = f"fits, but the constraints refuse it ({texts}): loosen them"
    return rows


def closest_row(space: Space, key: int, values: dict[str, float]) -> dict[str, Any]:
    """A candidate that is not feasible, and how much memory it needs of how much."""
    system, strategy = strategy_at(space, key)
    case = Case.of(space.model, strategy, system, space.workload)
    flat = {name: column[0] for name, column in strategy_columns(strategy, int(case.dp[0])).items()}
    need, capacity = values["device_memory_bytes"], system.usable_hbm_bytes
    return {
        "id": key, "system": system.name, **flat, "step_time_s": values["step_time_s"], "device_memory_bytes": need,
        "capacity_bytes": capacity, "short_by_bytes": max(need - capacity, 0.0),
    }  # fmt: skip
