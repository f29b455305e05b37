"""The enumeration of legal structures: what it counts is what there is, and every id leads back to its candidate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.rules import RULES, Case, check
from estimator.step import evaluate
from estimator.strategy import Recompute, RecomputeKind
from search.axes import strategy_of
from search.candidates import batches
from search.expression import Expression
from search.objective import Constraint
from search.space import Space, load_space, shipped_spaces
from search.structures import enumerate_space, strategy_at, structure_filters
from search.sweep import prepare
from search.worlds import SIZES, Enumeration, steps_of
from tests.search.naive import legal, raw_points, space_of
from tests.search.small import SMALL, any_space

SOME = [*SMALL, *range(8)]
WIDE = {"capacity_deepseek_v3"}
"""Spaces whose rows take long to price."""
HUGE = {"llama3_70b_wide", "deepseek_v3_wide"}  # a structure of theirs has more candidates than a test can list


def named(name: str | int) -> Space:
    return SMALL[name] if isinstance(name, str) else any_space(name)


def expanded(space: Space) -> tuple[Enumeration, np.ndarray]:
    enumeration = enumerate_space(space)
    parts = list(batches(enumeration, np.arange(len(enumeration.structures)), 1 << 16))
    return enumeration, np.concatenate(parts) if parts else np.zeros(0, np.int64)


@pytest.mark.parametrize("name", SOME)
def test_every_point_is_legal_or_counted_under_one_rule(name):
    space = named(name)
    enumeration, ids = expanded(space)
    assert enumeration.legal == len(ids) == len(set(ids.tolist()))
    assert space.raw_size == enumeration.legal + sum(enumeration.by_rule.values())
    assert all(count > 0 for count in enumeration.by_rule.values())
    assert set(enumeration.examples) == set(enumeration.by_rule) - {"no_effect"}


@pytest.mark.parametrize("name", SOME)
def test_legal_candidates_are_those_of_a_loop_over_all_points(name):
    space = replace(named(name), constraints=())
    enumeration, ids = expanded(space)
    strategies = dict(members[0] for _, members in legal(space))
    assert sorted(ids.tolist()) == sorted(strategies)
    for number in ids.tolist():
        assert strategy_at(space, number)[1] == strategies[number]


@pytest.mark.parametrize(
    "name", ["no data parallelism", "every schedule", "latent attention and prediction", "two copies"]
)
def test_rules_are_counted_as_a_loop_over_all_points_counts_them(name):
    """A point is counted under the first rule that refuses it (where no value of an axis repeats another)."""
    space = replace(named(name), constraints=())
    enumeration = enumerate_space(space)
    counted = dict.fromkeys((rule.name for rule in RULES), 0)
    for _, system, values in raw_points(space):
        if values["recompute"].kind is not RecomputeKind.BLOCK:
            values = {**values, "recompute_layers": 0}
        code = check(Case.of(space.model, strategy_of(values), system, space.workload))[0]
        if code:
            counted[RULES[code - 1].name] += 1
    told = {rule: n for rule, n in enumeration.by_rule.items() if rule != "no_effect"}
    assert told == {rule: n for rule, n in counted.items() if n}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in WIDE else n for n in shipped_spaces() if n not in HUGE]
)
def test_shipped_spaces_add_up_and_their_ids_are_legal(name):
    space = load_space(name)
    enumeration = enumerate_space(space)
    s = enumeration.structures
    assert space.raw_size == enumeration.legal + sum(enumeration.by_rule.values())
    assert len(np.unique(s.id)) == len(s)
    draw = np.random.default_rng(1)
    for i in draw.choice(len(s), min(len(s), 25), replace=False):
        ids = next(batches(enumeration, np.array([i]), 1))
        assert len(ids) == s.legal[i]
        assert len(np.unique(ids)) == len(ids)
        for number in draw.choice(ids, min(len(ids), 20), replace=False):
            system, strategy = strategy_at(space, int(number))
            case = Case.of(space.model, strategy, system, space.workload)
            assert not check(case)[0]
            sizes = [*(getattr(strategy, size) for size in SIZES), case.dp[0]]
            assert sizes == s.sizes[i].tolist()


def test_an_id_is_the_place_in_the_product_of_all_axes_with_the_system_first():
    space = SMALL["two systems"]
    points = list(raw_points(space))
    assert points[-1][0] == space.raw_size - 1
    assert steps_of(space)["system"] * len(space.systems) == space.raw_size
    for number, system, values in points:
        told_system, told = strategy_at(space, number)
        assert told_system == system
        assert (told.tp, told.pp, told.recompute) == (values["tp"], values["pp"], values["recompute"])


def test_each_system_has_its_own_legality():
    space = SMALL["two systems"]  # 48 sequences on 8, 12 and 16 chips
    enumeration, ids = expanded(space)
    of = [str(space.systems[i // steps_of(space)["system"]].num_chips) for i in ids.tolist()]
    assert {chips: of.count(chips) for chips in ("8", "12", "16")} == {
        chips: len(expanded(replace(space, systems=tuple(s for s in space.systems if s.num_chips == int(chips))))[1])
        for chips in ("8", "12", "16")
    }
    s = enumeration.structures
    chips = np.array([enumeration.worlds[w].system.num_chips for w in s.world])
    assert (s.sizes[:, [0, 1, 2, 7]].prod(axis=1) == chips).all()


def test_the_first_kind_of_context_parallelism_stands_for_all_at_cp_1_and_the_legal_ones_beyond():
    space = SMALL["more ranks than kv heads"]  # at cp 2, ulysses wants 8 kv heads to divide by tp * cp = 16
    _, ids = expanded(space)
    found = {(s.tp, s.cp, s.context_parallel.value) for _, s in (strategy_at(space, int(i)) for i in ids)}
    assert found == {(8, 1, "ulysses"), (16, 1, "ulysses"), (8, 2, "ring")}


def test_an_option_that_nothing_can_use_leaves_no_structure():
    for text in ("tp: 2, overlap: {tp: 1}", "recompute: block, recompute_layers: 0"):
        space = space_of(text)
        enumeration, ids = expanded(space)
        assert len(enumeration.structures) == len(ids) == enumeration.legal == 0
        assert set(enumeration.by_rule) <= {"overlap_tp", "recompute"}
        assert prepare(space).blocks == []


def test_recompute_of_absent_modules_is_written_as_what_it_does():
    space = space_of("recompute: [mla_up_proj, none, layernorm+mla_up_proj, layernorm]")
    _, ids = expanded(space)
    assert [str(strategy_at(space, int(i))[1].recompute) for i in ids] == ["none", "layernorm"]


def test_full_recompute_stands_for_blocks_that_cover_except_beside_prediction():
    text = "pp: 8, recompute: [block, full], recompute_layers: [3, 4, 5, 9]"
    _, dense = expanded(space_of(text))
    told = [strategy_at(space_of(text), int(i))[1] for i in dense]
    assert [(str(s.recompute), s.recompute_layers) for s in told] == [("full", 0), ("block", 3)]
    more = {"model": "deepseek", "chips": "512", "cluster": "dgx_h800", "batch": 1024}
    deep = space_of("ep: 64, " + text.replace("[3, 4, 5, 9]", "[7, 8, 9, 20]"), **more)
    _, ids = expanded(deep)
    told = [strategy_at(deep, int(i))[1] for i in ids]
    assert [(str(s.recompute), s.recompute_layers) for s in told] == [("full", 0), ("block", 7), ("block", 8)]
    seconds = [evaluate(deep.model, s, deep.system, deep.workload).step_time_s for s in told]
    assert seconds[0] > seconds[2] > seconds[1]


def test_constraints_on_structures_are_taken_out_of_mixed_ones():
    def filters(*texts: str) -> tuple[list[Expression], list[Expression]]:
        return structure_filters(replace(space_of("tp: [1, 2]"), constraints=tuple(map(Constraint.parse, texts))))

    mixed = "tp * cp <= 8 and zero_stage >= 1 and step_time_s < 9"
    early, late = filters(mixed, "schedule == '1f1b'", "tp > 1 or zero_stage > 1")
    assert [e.variables for e in early] == [("tp", "cp"), ("schedule",)]
    assert [e.variables for e in late] == [("zero_stage",), ("step_time_s",), ("tp", "zero_stage")]


def test_mixed_constraints_drop_structures_before_they_are_priced():
    space = space_of("tp: [1, 2, 4], sequence_parallel: true, zero_stage: [0, 1]")
    mixed = replace(space, constraints=(Constraint.parse("tp <= 2 and zero_stage == 1"),))
    enumeration = enumerate_space(mixed)
    assert sorted(enumeration.structures.sizes[:, 0]) == [1, 2]
    assert enumeration.by_rule["constraint"] == 2
    assert enumeration.examples["constraint"] == "tp <= 2 and zero_stage == 1"


def test_the_tables_carry_a_lower_corner_of_every_recompute_choice():
    (world,) = enumerate_space(SMALL["blocks without full"]).worlds
    again = world.tables.again
    assert (again[:, -1] == again[:, :-1].min(axis=1)).all()
    assert not again.flags.writeable
    assert Recompute.parse("block") not in world.choices.plain_recomputes


def test_a_product_beyond_the_range_of_ids_is_refused():
    wide = {name: tuple(range(10**5)) for name in ("recompute_layers", "bucket_bytes", "micro_batch")}
    space = load_space("llama3_70b")
    with pytest.raises(ValueError, match=r"must stay below 2\^62, but is .*; shorten an axis"):
        enumerate_space(replace(space, axes={**space.axes, **wide}))
