"""Candidates beside the front: all of them where a space keeps all, and the closest where nothing fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from estimator.memory import RESERVED_FACTOR
from estimator.rules import Case
from hardware.units import format_bytes
from results.schema import STRATEGY_NAMES, strategy_columns
from results.store import RunFolder
from results.table import Table
from search.candidates import batches, compose_ids, lean
from search.objective import Objective
from search.space import Keep, Space
from search.structures import strategy_at
from search.sweep import Plan, prepare, sweep_plan

__all__ = ["MAX_KEPT", "check_kept", "closest_of", "closest_to_feasible", "closest_tried", "just_missed",
           "missed_when_tried", "trial_parts"]  # fmt: skip

MAX_KEPT = 1_000_000  # candidates of a `keep: all` run: about 300 MB of Parquet
PART = 50_000
CLOSEST, NEAR_STRUCTURES = 3, 12
LOOKED_AT = 50_000  # candidates that are composed for what just missed: a quarter of a second
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


def just_missed(plan: Plan) -> list[dict[str, Any]]:
    """Of the structures that no option makes fit, those that lack the least memory; none where every structure fits.

    Looks at the structures whose lower bounds lie nearest to the capacity: in a large space one further below it, whose
    bound is that loose, may lack less.
    """
    constants = [world.tables.constants for world in plan.enumeration.worlds]
    world = plan.enumeration.structures.world
    if not len(world):
        return []
    context, capacity = (
        np.array([getattr(c, name) for c in constants], dtype=float) for name in ("context_bytes", "capacity_bytes")
    )
    over = plan.lows[:, 1] * RESERVED_FACTOR + context[world] - capacity[world]
    near = np.argsort(np.abs(over), kind="stable")
    never = near[over[near] > 0.0][:CLOSEST]  # what cannot fit comes first, so that there is an answer
    near = np.concatenate([never, near[~np.isin(near, never)]])
    missed = [row for row in _leanest(plan, near, LOOKED_AT) if row["short_by_bytes"] > 0.0]
    return _with_remedy(missed[:CLOSEST])


def _least_memory(plan: Plan) -> list[dict[str, Any]]:
    """What needs the least memory of all."""
    return _with_remedy(_leanest(plan, np.argsort(plan.lows[:, 1], kind="stable")[:NEAR_STRUCTURES])[:CLOSEST])


def _leanest(plan: Plan, among: np.ndarray, most: float = np.inf) -> list[dict[str, Any]]:
    """Of each of some structures what needs the least memory, by what it lacks, then by what it needs.

    Ends at the structure with which `most` candidates are composed.
    """
    structures, rows, composed = plan.enumeration.structures, [], 0
    for i in among:
        if composed >= most:
            break
        ids = lean(plan.enumeration.worlds[structures.world[i]], structures, int(i))
        composed += len(ids)
        columns = compose_ids(plan.space, plan.enumeration, ids)
        best = int(np.argmin(columns["device_memory_bytes"]))
        rows.append(_row(plan.space, int(ids[best]), {n: float(c[best]) for n, c in columns.items()}))
    return sorted(rows, key=lambda row: (row["short_by_bytes"], row["device_memory_bytes"], row["id"]))


def _with_remedy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row in rows:
        row["remedy"] = (f"needs {format_bytes(row['short_by_bytes'])} less on each chip: more chips, a chip with more "
                         "memory, or a shorter sequence")  # fmt: skip
    return rows


def _refused(plan: Plan, free: Plan) -> list[dict[str, Any]]:
    """The fastest of what fits without the constraints; none where there is no structure, or none fits."""
    found = sweep_plan(free)
    if not len(found.ids):
        return []
    ids = found.ids[np.argsort(found.values[:, 0], kind="stable")[:CLOSEST]]
    columns = compose_ids(free.space, free.enumeration, ids)
    rows = [_row(free.space, int(key), {n: float(c[i]) for n, c in columns.items()}) for i, key in enumerate(ids)]
    return _to_loosen(plan.space, rows)


def _to_loosen(space: Space, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = "; ".join(c.expression.text for c in space.constraints)
    for row in rows:
        row["remedy"] = f"fits, but the constraints refuse it ({texts}): loosen them"
    return rows


def closest_of(folder: RunFolder, space: Space) -> list[dict[str, Any]]:
    """As closest_to_feasible, of a finished run: a study knows only what it tried."""
    if folder.manifest.get("sampler") in (None, "exhaustive"):
        return closest_to_feasible(prepare(space))
    return closest_tried(folder.read_trials(), space)


def closest_tried(trials: Table, space: Space) -> list[dict[str, Any]]:
    """Of what a study tried and found not to be feasible: what constraints refuse, else what lacks the least memory."""
    by_name = {system.name: system.usable_hbm_bytes for system in space.systems}
    refused = trials.where(trials["reason"] == "constraint").sort("step_time_s")
    short = trials.where(trials["reason"] == "memory").sort("device_memory_bytes")
    rows = []
    for row in itertools.islice((refused if len(refused) else short).rows(), CLOSEST):
        need, capacity = row["device_memory_bytes"], by_name[row["system"]]
        told = {name: row[name] for name in ("id", "system", *STRATEGY_NAMES, "step_time_s", "device_memory_bytes")}
        rows.append(told | {"capacity_bytes": capacity, "short_by_bytes": max(need - capacity, 0.0)})
    return _to_loosen(space, rows) if len(refused) else _with_remedy(rows)


def missed_when_tried(trials: Table, space: Space) -> list[dict[str, Any]]:
    """Of what a study tried, what does not fit in memory and lacks the least."""
    return closest_tried(trials.where(trials["reason"] == "memory"), space)


def _row(space: Space, key: int, values: dict[str, float]) -> dict[str, Any]:
    system, strategy = strategy_at(space, key)
    case = Case.of(space.model, strategy, system, space.workload)
    flat = {name: column[0] for name, column in strategy_columns(strategy, int(case.dp[0])).items()}
    need, capacity = values["device_memory_bytes"], system.usable_hbm_bytes
    return {
        "id": key, "system": system.name, **flat, "step_time_s": values["step_time_s"], "device_memory_bytes": need,
        "capacity_bytes": capacity, "short_by_bytes": max(need - capacity, 0.0),
    }  # fmt: skip
