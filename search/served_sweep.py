"""Every deployment of a space of requests, priced one by one: rows, the front, what was rejected and why.

Exact, for such a space is small: every candidate is priced but those with a larger batch than one that does not fit.
Writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from estimator.inference import SERVED_COLUMNS, ServingPhase
from estimator.inference.laws import check_deployment
from estimator.inference.step import infer
from estimator.strategy import CudaGraph
from results.pareto import hypervolume, non_dominated, worst
from results.schema import REFERENCE_ID, SERVED_FIELDS
from search.expression import SERVED_TEXTS
from search.program import text_code
from search.served import ServedPoint, ServedSpace

__all__ = ["Found", "columns_of", "described", "priced_row", "reference_rows", "sweep_served", "volume"]

Row = dict[str, Any]
EVERY_S = 0.5  # between two words about how far it is


@dataclass(slots=True, kw_only=True)
class Found:
    """What a sweep found: rows of the front in order of id, counts, and the closest of what does not fit."""

    rows: list[Row] = field(default_factory=list)
    legal: int = 0
    priced: int = 0
    fits: int = 0
    by_rule: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    closest: Row | None = None

    def reject(self, rule: str, example: str) -> None:
        """One more that a rule refuses."""
        self.by_rule[rule] = self.by_rule.get(rule, 0) + 1
        self.examples.setdefault(rule, example)


def sweep_served(space: ServedSpace, tell: Callable[[int, Found], None]) -> Found:
    """Prices every point. `tell` hears now and then how many are done."""
    found, due = Found(), time.perf_counter() + EVERY_S
    done = 0
    for numbers in space.deployments():
        fits = True
        for number in numbers:
            fits = _one(space, number, found, fits=fits)
        done += len(numbers)
        if time.perf_counter() >= due:
            found.rows = _front(space, found.rows)
            tell(done, found)
            due = time.perf_counter() + EVERY_S
    found.rows = _front(space, found.rows)
    return found


def _one(space: ServedSpace, number: int, found: Found, *, fits: bool) -> bool:
    """Prices a candidate; whether larger batches may still fit. `fits`: whether smaller ones did."""
    point = space.point(number)
    try:
        if not fits:  # memory grows with the batch, laws may not allow for this one
            check_deployment(space.model, point.deployment, point.system, space.requests(point.batch))
            found.legal += 1
            found.reject("memory", "")
            return False
        row = priced_row(space, point) | {"id": number}
    except ValueError as error:
        law = " ".join(str(error).split())
        rule, colon, _ = law.partition(":")
        found.reject(rule if colon and rule.isidentifier() else "formats", law)
        return fits
    found.legal += 1
    found.priced += 1
    if not row["feasible"]:
        over = row["device_memory_bytes"] - point.system.usable_hbm_bytes
        found.reject("memory", f"{over / 1e9:.1f} GB too much at batch {row['batch']}, tp {row['tp']}, pp {row['pp']}")
        if found.closest is None or over < found.closest["short_by_bytes"]:
            found.closest = row | {"short_by_bytes": over}
        return False
    found.fits += 1
    values = {name: text_code(str(row[name])) if name in SERVED_TEXTS else float(row[name])
              for c in space.constraints for name in c.variables}  # fmt: skip
    for constraint in space.constraints:
        if not constraint.evaluate(values):
            found.reject("constraint", constraint.text)
            return True
    found.rows.append(row)
    return True


def _front(space: ServedSpace, rows: list[Row]) -> list[Row]:
    if not rows:
        return []
    values = np.array([[row[o.column] for o in space.objectives] for row in rows])
    ids = np.array([row["id"] for row in rows])
    kept = non_dominated(values, ids, [not o.minimise for o in space.objectives])
    return sorted((rows[i] for i in kept), key=lambda row: row["id"])


def priced_row(space: ServedSpace, point: ServedPoint) -> Row:
    """One candidate as a row, by field; ValueError where it is illegal."""
    result = infer(space.model, point.deployment, point.system, space.requests(point.batch))
    return described(space, point) | {"feasible": result.feasible, "reason": result.reason, **result.columns}


def described(space: ServedSpace, point: ServedPoint) -> Row:
    """Choices of a row, legal or not."""
    v = point.values
    graph = v["cuda_graph"] or (CudaGraph.FULL if space.phase is ServingPhase.DECODE else CudaGraph.NONE)
    plain = ("tp", "pp", "ep", "etp", "weights", "activations", "kv_cache", "overlap_ep", "absorb",
             "redundant_experts", "drafts", "chunk")  # fmt: skip
    return {
        "id": REFERENCE_ID, "name": "", "system": point.system.name, "phase": space.phase.value, "batch": point.batch,
        "context": space.context, "output": space.output, "routing_skew": space.routing_skew,
        "acceptance": space.acceptance, **{name: v[name] for name in plain},
        "dp": max(point.system.num_chips // (v["tp"] * v["pp"]), 1), "cuda_graph": graph.value,
        "fusion": "+".join(sorted(x.value for x in v["fusion"])) or "none",
    }  # fmt: skip


def reference_rows(space: ServedSpace) -> Iterator[Row]:
    """The named points on every system; an illegal one with the law that it breaks."""
    for name, (batch, values) in space.references.items():
        for system in space.systems:
            point = ServedPoint(system, batch, values)
            try:
                row = priced_row(space, point)
            except ValueError as error:
                absent = {c.name: np.nan for c in SERVED_COLUMNS} | {"num_gpus": float(system.num_chips)}
                row = described(space, point) | absent
                row |= {"feasible": False, "reason": " ".join(str(error).split())}
            yield row | {"name": name}


def columns_of(rows: list[Row]) -> dict[str, Any]:
    """Rows as the columns of a table."""
    return {f.name: [row[f.name] for row in rows] for f in SERVED_FIELDS}


def volume(space: ServedSpace, rows: list[Row]) -> dict[str, Any] | None:
    """Hypervolume of a front and its reference; None where an objective is not positive."""
    values = np.array([[row[o.column] for o in space.objectives] for row in rows])
    higher = [not o.minimise for o in space.objectives]
    if not len(rows) or (values <= 0).any():
        return None
    reference = worst(values, higher)
    return {"value": hypervolume(values, reference, higher), "reference": reference.tolist()}
