"""The exact sweep: its front is brute force's, bit for bit, in any order, with and without bounds."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

import search.nest
from estimator.batch import compose_rows
from estimator.step import evaluate
from search.axes import AXES, axis_values
from search.candidates import batches, compose_ids
from search.pool import BlockDone, RayPool
from search.space import load_space
from search.structures import strategy_at
from search.sweep import SweepWorker, merge, prepare, sweep_plan
from search.worlds import KEEP_AXES, OPTION_AXES, SIZES, VARIANT_AXES, WORLD_AXES
from tests.found import sweep
from tests.search.naive import candidates, front, space_of
from tests.search.small import MIDDLE, SMALL, any_space, enumerated, swept


@pytest.mark.parametrize("name", SMALL)
def test_the_front_is_that_of_a_loop_over_evaluate(name):
    space = SMALL[name]
    every = candidates(space, thorough=True)
    wanted = front(space, every)
    assert wanted
    assert swept(space) == wanted
    assert swept(space, prune=False, reverse=True) == wanted
    assert enumerated(space) == wanted


@pytest.mark.parametrize("seed", [n if n < 40 else pytest.param(n, marks=pytest.mark.slow) for n in range(100)])
def test_the_front_of_a_random_space_is_that_of_a_loop_over_evaluate(seed):
    space = any_space(seed)
    wanted = front(space, candidates(space))
    assert swept(space) == wanted
    assert swept(space, prune=False, reverse=True) == wanted


def test_random_spaces_are_not_trivial():
    spaces = [any_space(seed) for seed in range(40)]
    fronts = [swept(space) for space in spaces]
    assert sum(len(found) > 1 for found in fronts) >= 12
    assert sum(len(found) > 5 for found in fronts) >= 5
    assert 6 <= sum(not prepare(space).bounded for space in spaces) <= 36
    assert sum(len(space.systems) > 1 for space in spaces) >= 8


@pytest.mark.parametrize("name", MIDDLE)
def test_the_nest_finds_the_front_of_the_enumeration(name):
    space = MIDDLE[name]
    wanted = enumerated(space)
    assert len(wanted) > 10
    assert swept(space) == wanted


@pytest.mark.parametrize(
    "name",
    ["every schedule", "latent attention and prediction", "experts", "tensor and context", "layers recomputed by chunk",
     "pieces of tensor-parallel traffic", "buckets of experts"],
)  # fmt: skip
def test_the_nest_prices_a_candidate_as_evaluate_does(name):
    """A front shows only its best, so each candidate is swept in a space of its own."""
    space = SMALL[name]
    plan = prepare(space)
    every = np.concatenate(list(batches(plan.enumeration, np.arange(len(plan.enumeration.structures)), 1 << 16)))
    told = compose_ids(space, plan.enumeration, every)
    for at in np.random.default_rng(0).choice(len(every), 60, replace=False):
        system, strategy = strategy_at(space, int(every[at]))
        result = evaluate(space.model, strategy, system, space.workload)
        composed = {column: values[at] for column, values in told.items()}
        np.testing.assert_equal(composed, dict(result.columns))
        axes = {axis: (value,) for axis, value in axis_values(strategy).items()}
        alone = prepare(replace(space, systems=(system,), axes=axes), prune=False)
        found = sweep_plan(alone)
        nest = found.values.tolist()
        assert nest == ([[result.step_time_s, result.peak_memory_bytes]] if result.feasible else [])


def test_lower_corners_are_below_every_candidate():
    for name in (
        "every schedule",
        "latent attention and prediction",
        "layers recomputed by chunk",
        "buckets of experts",
    ):
        plan = prepare(SMALL[name])
        for i in range(len(plan.enumeration.structures)):
            ids = next(batches(plan.enumeration, np.array([i]), 1))
            told = compose_ids(plan.space, plan.enumeration, ids)
            assert plan.lows[i, 0] <= told["step_time_s"].min()
            assert plan.lows[i, 1] <= told["peak_memory_bytes"].min()


def test_a_found_front_only_prunes():
    """A block told of a front returns what is new; merged, it is the front without the hint."""
    plan = prepare(MIDDLE["dense"])
    plan.order = np.arange(len(plan.enumeration.structures))
    num = len(plan.order)
    whole = SweepWorker(plan).run(0, num, None)
    assert not len(SweepWorker(plan).run(0, num, whole).ids)
    found = SweepWorker(plan).run(num // 2, num, None)
    hinted, unhinted = SweepWorker(plan).run(0, num // 2, found), SweepWorker(plan).run(0, num // 2, None)
    assert hinted.counts[3] < unhinted.counts[3]
    for part in (hinted, unhinted):
        merged = merge([found, part], plan.space, bounded=True)
        assert sorted(merged.ids) == sorted(whole.ids)
        assert np.unique(merged.values, axis=0).tolist() == np.unique(whole.values, axis=0).tolist()


def test_a_worker_prunes_with_what_it_found_and_tells_it_until_a_hint_has_it():
    """Whichever of its answers is lost, one that comes later makes up for it."""
    plan = prepare(MIDDLE["dense"])
    plan.order = np.arange(len(plan.enumeration.structures))
    worker, num = SweepWorker(plan), len(plan.order)
    first = worker.run(num // 2, num, None)
    second = worker.run(0, num // 2, None)
    whole = SweepWorker(plan).run(0, num, None)
    assert second.counts[3] < SweepWorker(plan).run(0, num // 2, None).counts[3]
    assert set(second.ids) & set(first.ids)
    assert sorted(second.ids) == sorted(whole.ids)
    assert not len(worker.run(0, num, whole).ids)


def test_a_warm_up_finds_candidates_of_the_space_and_counts_none_of_them():
    plan = prepare(MIDDLE["dense"])
    assert len(plan.warm.ids) > 10
    told = compose_ids(plan.space, plan.enumeration, plan.warm.ids)
    assert plan.warm.values.tolist() == np.stack([told["step_time_s"], told["peak_memory_bytes"]], axis=1).tolist()
    assert plan.warm.counts[2:].tolist() == [0, 0, 0]
    counts = sweep_plan(plan).counts
    assert counts[:2].tolist() == [len(plan.enumeration.structures), plan.enumeration.legal]


def test_how_far_a_corner_lies_ahead_of_a_front_is_what_it_must_grow_by_to_meet_it():
    plan = prepare(MIDDLE["dense"])
    worker, every = SweepWorker(plan), np.arange(len(plan.enumeration.structures))
    ahead = worker.ahead(every, plan.warm)
    system = worker.system_of_world[plan.enumeration.structures.world]
    for i in every[::17]:
        front = plan.warm.values[plan.warm.systems == system[i]]
        wanted = np.log(front / plan.lows[i]).max(axis=1).min()
        np.testing.assert_allclose(ahead[i], wanted, rtol=1e-9, atol=1e-12)  # a difference of logs, not a log of shares
    assert (ahead[worker.beaten(every, plan.warm)] <= 1e-12).all()


def test_of_equal_candidates_the_lowest_id_stays_whatever_the_order():
    space = space_of("fusion: [[flash_attention], [flash_attention, fused_loss]], zero_stage: [0, 1]", chips="8")
    plan = prepare(space, prune=False)
    found = sweep_plan(plan)
    for order in (found, sweep_plan(plan, reverse=True)):
        assert order.ids.tolist() == found.ids.tolist()
    twice = merge([replace(found, ids=found.ids + 1000), found], space, bounded=True)
    assert twice.ids.tolist() == found.ids.tolist()


@pytest.mark.slow
def test_two_search_orders_find_one_front_on_a_whole_space():
    """The check that catches a corner that is not one: a single candidate lost in 24 million shows."""
    space = load_space("llama3_70b")
    pruned = sweep("llama3_70b").front
    assert len(pruned) > 100
    assert swept(space, reverse=True) == pruned
    assert swept(space, prune=False) == pruned


@pytest.mark.slow
def test_two_search_orders_find_one_front_on_a_billion_candidates():
    forward = sweep("deepseek_v3")
    assert forward.legal >= 10**9
    assert swept(forward.space, reverse=True) == forward.front


@pytest.mark.slow
@pytest.mark.parametrize(("name", "at_least"), [("llama3_70b_wide", 10**12), ("deepseek_v3_wide", 10**13)])
def test_two_search_orders_find_one_front_of_a_space_of_every_dimension(name, at_least):
    forward = sweep(name)
    assert forward.legal >= at_least
    assert swept(forward.space, shuffled=True) == forward.front  # backwards, little prunes for a quarter of an hour


def test_every_axis_of_a_space_is_one_of_sizes_worlds_variants_keeps_or_options():
    kinds = (SIZES, ("schedule",), WORLD_AXES, VARIANT_AXES, KEEP_AXES, OPTION_AXES)
    assert sorted(name for kind in kinds for name in kind) == sorted(axis.name for axis in AXES)


def test_one_machine_code_serves_every_space_recipe_and_read_only_plan():
    for name in ("every schedule", "latent attention and prediction", "constraints", "two systems", "not bounded"):
        plan = prepare(SMALL[name])
        for array in _arrays(plan):
            array.setflags(write=False)
        again = pickle.loads(pickle.dumps(plan, protocol=5, buffer_callback=None))
        for one in (plan, again):
            sweep_plan(one)
    assert len(search.nest.sweep.signatures) == 1
    assert len(search.nest.corners.signatures) == 1


def test_one_machine_code_composes_every_recipe():
    for name in ("every schedule", "latent attention and prediction"):
        candidates(SMALL[name])
        sweep_plan(replace(prepare(SMALL[name]), bounded=False))
    assert len(compose_rows.signatures) == 1


def _arrays(plan):
    s = plan.enumeration.structures
    yield from (getattr(s, name) for name in s.__dataclass_fields__)
    yield from (plan.lows, plan.order)
    for world in plan.enumeration.worlds:
        yield from (world.choices.plain, world.choices.block_layers, world.choices.buckets)


@pytest.mark.slow
def test_a_worker_of_the_largest_space_stays_small():
    plan = prepare(load_space("deepseek_v3"))
    blocks = plan.blocks[:8]
    with RayPool(SweepWorker, plan, num_workers=1) as pool:
        done = list(pool.map(blocks, lambda: plan.warm))
    peaks = [result.peak_rss_bytes for result in done if isinstance(result, BlockDone)]
    assert len(peaks) == len(blocks)
    print(f"peak memory of a worker: {max(peaks) / 1e6:.0f} MB")
    assert max(peaks) < 2e9
