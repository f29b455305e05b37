"""Prices one configuration of a study: every option under its structure, exactly. Knows nothing of samplers.

What a worker of the pool does: a code in, the structure's own front out, or, where nothing of it is feasible, the
candidate that comes closest with how much it lacks. The answer depends on the code alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from results.pareto import non_dominated
from search.candidates import compose_ids, known_values, lean
from search.dimensions import Dimensions
from search.nest import COUNTS
from search.space import Space
from search.structures import structure_filters
from search.sweep import Plan, SweepWorker, survey

__all__ = ["Priced", "Pricer", "objectives_of"]

PRICED = COUNTS.index("priced")
MEMORY, CONSTRAINTS = "memory", "constraints"


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """What one configuration comes to.

    `ids` [N] in the narrowed space and their result `columns`; the first is its representative. `slack`: by how much it
    fails each gate, at most 0 where it passes: memory as a share of capacity, constraints as the number that fail.
    Feasible: N non-dominated candidates; else the one that comes closest. No id: no candidate is legal. `counts` as
    nest.COUNTS, `rules`: candidates that rules reject, `capacity_bytes` of a chip within the headroom.
    """

    ids: np.ndarray
    columns: dict[str, np.ndarray]
    slack: dict[str, float]
    counts: np.ndarray
    rules: dict[str, int]
    capacity_bytes: float

    @property
    def is_feasible(self) -> bool:
        """Whether the representative passes every gate."""
        return bool(len(self.ids)) and all(value <= 0 for value in self.slack.values())


def objectives_of(space: Space, columns: dict[str, np.ndarray]) -> np.ndarray:
    """The objectives of candidates [N, K]."""
    return np.stack([columns[o.column] for o in space.objectives], axis=1)


class Pricer:
    """A worker: run(code, code + 1, ...) prices one configuration. Pickles as the dimensions it was made from."""

    def __init__(self, dimensions: Dimensions) -> None:
        self.dimensions = dimensions
        self.worker = SweepWorker(dimensions.plan)

    def run(self, start: int, stop: int, hint: Any) -> Priced:  # noqa: ANN401 - the pool's protocol
        """Price the configuration `start`; the protocol's block has one code."""
        assert stop == start + 1
        return self.price(start)

    def price(self, code: int) -> Priced:
        """Every option of one configuration."""
        if not self.dimensions.free:
            return _price(self.worker, self.dimensions.structure(code), {})
        plan = survey(self.dimensions.narrowed(code))
        rules = {name: int(n) for name, n in plan.enumeration.by_rule.items() if n}
        if not len(plan.enumeration.structures):
            nothing = np.zeros(0, np.int64)
            return Priced(ids=nothing, columns={}, slack={}, counts=np.zeros(len(COUNTS), np.int64), rules=rules,
                          capacity_bytes=0.0)  # fmt: skip
        return _price(SweepWorker(plan), 0, rules)


def _price(worker: SweepWorker, structure: int, rules: dict[str, int]) -> Priced:
    plan = _alone(worker.plan, structure)
    space, index = plan.space, np.array([structure])
    world = worker.worlds[worker.structures.world[structure]]
    capacity = float(world.tables.constants.capacity_bytes)
    found = worker.sweep(index, None) if plan.bounded else worker.enumerate(index)
    late = structure_filters(space)[1]
    ids, slack = found.ids, {CONSTRAINTS: 0.0} if late else {}
    if not len(ids) and found.counts[PRICED] and late:
        free = replace(worker.plan, space=replace(space, constraints=()))
        ids = _best(SweepWorker(free), index, plan.bounded)
        known = {**compose_ids(space, plan.enumeration, ids), **known_values(space, plan.enumeration, ids)}
        slack[CONSTRAINTS] = float(sum(not np.all(expression.evaluate(known)) for expression in late))
    elif not len(ids):
        ids = _smallest(plan)
        slack |= {CONSTRAINTS: 0.0} if late else {}
    columns = compose_ids(space, plan.enumeration, ids)
    values = objectives_of(space, columns)
    keep = non_dominated(values, ids, space.higher)
    at = int(np.argmin(_scalar(space, values[keep])))
    keep = np.concatenate([keep[at : at + 1], np.delete(keep, at)])
    columns = {name: column[keep] for name, column in columns.items()}
    need = float(columns["device_memory_bytes"][0]) / capacity - 1.0
    return Priced(ids=ids[keep], columns=columns, slack={MEMORY: need, **slack}, counts=found.counts, rules=rules,
                  capacity_bytes=capacity)  # fmt: skip


def _alone(plan: Plan, structure: int) -> Plan:
    """A plan of one structure, for looking its candidates up in no time."""
    one = replace(plan.enumeration, structures=plan.enumeration.structures.take(np.array([structure])))
    return replace(plan, enumeration=one)


def _best(worker: SweepWorker, index: np.ndarray, bounded: bool) -> np.ndarray:
    return worker.sweep(index, None).ids if bounded else worker.enumerate(index).ids


def _smallest(plan: Plan) -> np.ndarray:
    """The candidate that needs the least memory [1]."""
    structures = plan.enumeration.structures
    ids = lean(plan.enumeration.worlds[structures.world[0]], structures, 0)
    at = int(np.argmin(compose_ids(plan.space, plan.enumeration, ids)["device_memory_bytes"]))
    return ids[at : at + 1]


def _scalar(space: Space, values: np.ndarray) -> np.ndarray:
    """One number to rank candidates by: the sum of the objectives' logarithms; the first where one is not positive."""
    signs = np.array([objective.sign for objective in space.objectives])
    if (values <= 0).any():
        return np.asarray(values[:, 0] * signs[0])
    return np.asarray((np.log(values) * signs).sum(axis=1))
