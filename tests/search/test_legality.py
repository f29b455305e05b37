"""Rules that are checked once for each value they look at say what the rules say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from estimator.rules import RULES, Case, Rule, check
from search.axes import strategy_of
from search.free import grid_size
from search.legality import Slab, meshes, refusal_of, slabs, told_of
from search.worlds import SIZES, WORLD_AXES
from tests.search.naive import space_of
from tests.search.small import SMALL

SOME = ("tensor and context", "rank orders", "every schedule", "several layouts", "replicas and what is gathered when",
        "skewed routing and copies of experts")  # fmt: skip


def strategies(space):
    names = (*WORLD_AXES, "schedule")
    for values in itertools.product(*(space.axes[name] for name in names)):
        yield strategy_of(dict(zip(names, values, strict=True)))


@pytest.mark.parametrize("name", SOME)
def test_legal_points_are_those_that_check_lets_through(name):
    space = SMALL[name]
    num = int(np.prod([len(space.axes[size]) for size in SIZES]))
    slab = Slab.of(space, space.system, np.arange(num))
    for strategy in strategies(space):
        rejected = {}
        alive = slab.legal(strategy, rejected)
        case = Case.of(space.model, strategy.with_sizes(slab.sizes), space.system, space.workload)
        code = check(case)
        assert alive.tolist() == (code == 0).tolist()
        assert {rule: n for rule, (n, _) in rejected.items()} == {
            RULES[i - 1].name: int((code == i).sum()) for i in np.unique(code) if i
        }


@pytest.mark.parametrize("name", SOME)
def test_points_that_no_strategy_makes_legal_are_left_out_once(name):
    space = SMALL[name]
    rejected = {}
    first = next(strategies(space))
    kept = [slab.flat for slab in slabs(space, space.system, first, rejected)]
    num = int(np.prod([len(space.axes[size]) for size in SIZES]))
    assert sum(map(len, kept)) + sum(n for n, _ in rejected.values()) == num
    whole = Slab.of(space, space.system, np.arange(num))
    for strategy in strategies(space):
        assert set(np.flatnonzero(whole.legal(strategy, {}))) <= set(np.concatenate(kept))


def test_a_rule_that_looks_at_a_variant_is_refused_by_name():
    space = space_of("tp: [1, 2]")
    slab = Slab.of(space, space.system, np.arange(2))
    rule = Rule("graphs_and_tp", lambda c: (c.tp == 1) | (c.strategy.cuda_graph is not None), "", "")
    strategy = next(strategies(space))
    with pytest.raises(AssertionError, match="graphs_and_tp looks at cuda_graph.*move it from VARIANT_AXES"):
        slab.ok(rule, strategy, told_of(strategy))


def test_an_engine_is_looked_at_before_all_else():
    space = space_of("precision: [fp8, bf16]", cluster="dgx_a100")
    assert refusal_of(space, space.system, "precision", "fp8")[0] == "engine"
    assert refusal_of(space, space.system, "precision", "bf16") == ("", "")


@pytest.mark.parametrize("name", SOME)
def test_meshes_are_all_degrees_whose_product_divides_the_chips(name):
    space = SMALL[name]
    degrees = np.array([*itertools.product(*(space.axes[size] for size in ("tp", "cp", "pp")))], dtype=float)
    assert (
        meshes(space, space.system).tolist()
        == np.flatnonzero(space.system.num_chips % degrees.prod(axis=1) == 0).tolist()
    )


def test_ranges_of_hundreds_of_degrees_cost_what_their_divisors_cost():
    space = space_of("tp: {range: [1, 600]}, cp: {range: [1, 600]}, pp: {range: [1, 600]}")
    kept = meshes(space, space.system)
    chips = space.system.num_chips
    known = [
        (tp - 1) * 600**2 + (cp - 1) * 600 + pp - 1
        for tp, cp, pp in itertools.product(*[[n for n in range(1, 601) if chips % n == 0]] * 3)
        if chips % (tp * cp * pp) == 0
    ]
    assert kept.tolist() == sorted(known)
    assert grid_size(space) == len(known)


def test_what_shares_out_no_chips_is_counted_and_told_by_example():
    space = space_of("tp: [3, 5]")
    rejected = {}
    assert not [*slabs(space, space.system, next(strategies(space)), rejected)]
    assert rejected == {"world": (2, rejected["world"][1])}
    assert "must be divisible by tp (3) * cp (1) * pp (1)" in rejected["world"][1]
