"""Ids, and what is beside the front: every candidate of a small space, and the closest where nothing is feasible."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import search.trials as trials
from estimator.step import evaluate
from hardware.system import SystemSpec
from search.candidates import batches, compose_ids, known_values, locate
from search.expression import strategy_values
from search.objective import Constraint, Objective
from search.space import Space
from search.structures import strategy_at
from search.sweep import prepare
from search.trials import closest_to_feasible, trial_parts
from tests.search.naive import candidates, space_of
from tests.search.small import SMALL, any_space


def all_ids(plan) -> np.ndarray:
    return np.concatenate(list(batches(plan.enumeration, np.arange(len(plan.enumeration.structures)), 1000)))


@pytest.mark.parametrize(
    "name",
    ["every schedule", "walked schedules", "groups of micro-batches", "experts", "two systems", "no data parallelism"],
)
def test_composed_columns_are_those_of_evaluate_bit_for_bit(name):
    space = SMALL[name]
    plan = prepare(space)
    ids = np.random.default_rng(2).permutation(all_ids(plan))[:150]
    columns = compose_ids(space, plan.enumeration, ids)
    for at, number in enumerate(ids.tolist()):
        system, strategy = strategy_at(space, number)
        result = evaluate(space.model, strategy, system, space.workload)
        np.testing.assert_equal({name: values[at] for name, values in columns.items()}, dict(result.columns))


@pytest.mark.parametrize("seed", range(6))
def test_constraints_see_of_a_candidate_what_its_strategy_says(seed):
    space = any_space(seed)
    plan = prepare(replace(space, constraints=()))
    ids = all_ids(plan)
    known = known_values(space, plan.enumeration, ids)
    for at, number in enumerate(ids.tolist()):
        system, strategy = strategy_at(space, number)
        dp = system.num_chips / (strategy.tp * strategy.cp * strategy.pp)
        wanted = {**strategy_values(strategy), "dp": dp, "num_gpus": system.num_chips}
        wanted["num_micro_batches"] = space.workload.global_batch / dp / strategy.micro_batch
        assert {name: values[at] for name, values in known.items()} == wanted


def test_an_id_of_no_structure_is_refused():
    plan = prepare(space_of("tp: [1, 3], zero_stage: [0, 1]"))
    assert locate(plan.space, plan.enumeration, all_ids(plan)).tolist() == [0, 0]
    with pytest.raises(KeyError, match=r"no such candidates: \[2\]"):
        locate(plan.space, plan.enumeration, np.array([0, 2]))


def test_batches_hold_every_candidate_once_in_order_of_structures():
    plan = prepare(SMALL["constraints"])
    index = np.arange(len(plan.enumeration.structures))
    whole = all_ids(plan)
    for size in (1, 7, 10**6):
        parts = list(batches(plan.enumeration, index, size))
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert all(len(part) >= size for part in parts[:-1])


def test_trials_are_every_candidate_that_fits(monkeypatch):
    monkeypatch.setattr(trials, "PART", 50)
    space = SMALL["tensor and context"]
    parts = list(trial_parts(prepare(space)))
    fitting = {c.id: c.values["step_time_s"] for c in candidates(space) if c.fits}
    told = {int(i): float(s) for ids, columns in parts for i, s in zip(ids, columns["step_time_s"], strict=True)}
    assert told == fitting
    assert len(parts) > 2


def narrow(space: Space, share: float) -> Space:
    """The same with chips of a share of the memory."""
    system = space.systems[0]
    chip = replace(system.chip, hbm_bytes=system.chip.hbm_bytes * share)
    small: SystemSpec = replace(system, chip=chip)
    return replace(space, systems=(small,))


def test_the_closest_need_the_least_memory_where_nothing_fits():
    space = narrow(space_of("tp: [1, 2], pp: [1, 2], zero_stage: [0, 1, 3], recompute: [none, full]"), 0.1)
    least = min(c.values["device_memory_bytes"] for c in candidates(space))
    closest = closest_to_feasible(prepare(space))
    assert len(closest) == 3
    assert closest[0]["device_memory_bytes"] == least
    assert closest[0]["short_by_bytes"] == least - space.systems[0].usable_hbm_bytes > 0
    needs = [row["device_memory_bytes"] for row in closest]
    assert needs == sorted(needs)
    assert all("less on each chip" in row["remedy"] for row in closest)


FASTER = "step_time_s < 1e-3"


@pytest.mark.parametrize("text", [FASTER, "zero_stage > 3", "tp > 64", "bubble_s < 0", "tp > 1 and overlap_dp == 5"])
@pytest.mark.parametrize("column", ["step_time_s", "bubble_s"])
def test_the_closest_are_the_fastest_that_the_constraints_refuse(text, column):
    space = space_of("tp: [1, 2], pp: [1, 2], zero_stage: [0, 1, 3], recompute: [none, full]")
    best = min(c.values["step_time_s"] for c in candidates(space) if c.fits)
    asked = replace(space, constraints=(Constraint.parse(text),), objectives=(Objective(column=column, minimise=True),))
    closest = closest_to_feasible(prepare(asked))
    assert closest[0]["step_time_s"] == best
    assert all(row["short_by_bytes"] == 0 and f"({text})" in row["remedy"] for row in closest)


def test_memory_comes_before_constraints_where_neither_lets_through():
    space = narrow(space_of("tp: [1, 2], zero_stage: [0, 1]"), 0.1)
    for text in (FASTER, "tp > 64"):
        closest = closest_to_feasible(prepare(replace(space, constraints=(Constraint.parse(text),))))
        assert closest
        assert all("less on each chip" in row["remedy"] for row in closest)


def test_nothing_is_close_where_the_rules_refuse_everything():
    assert closest_to_feasible(prepare(space_of("tp: [3, 5]"))) == []
