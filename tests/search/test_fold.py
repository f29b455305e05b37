"""Axes without meaning on a model: folded and told, unless a single value is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search.fold import folded
from search.structures import enumerate_space
from tests.search.naive import space_of
from tests.search.small import swept


def test_experts_of_a_dense_model_are_folded_with_a_line_each():
    space, told = folded(space_of("ep: [1, 2, 4], etp: [2, 1], shared_expert_overlap: [true, false], tp: [1, 2]"))
    assert told == (
        "ep: 1, 2, 4 has no effect on llama3_8b, a dense model; folded to 1",
        "etp: 2, 1 has no effect on llama3_8b, a dense model; folded to 1",
        "shared_expert_overlap: true, false has no effect on llama3_8b, a dense model; folded to false",
    )
    assert space == space_of("tp: [1, 2]")


def test_a_single_wrong_value_stays_an_error():
    space, told = folded(space_of("ep: 2"))
    assert told == ()
    assert enumerate_space(space).by_rule["experts"] == 1


def test_single_values_without_effect_are_told_and_folded_too():
    space, told = folded(space_of("redundant_experts: 8, shared_expert_overlap: true, expert_bucket_bytes: [1e6, 1e7]"))
    assert told == (
        "redundant_experts: 8 has no effect on llama3_8b, a dense model; folded to 0",
        "shared_expert_overlap: true has no effect on llama3_8b, a dense model; folded to false",
        "expert_bucket_bytes: 1000000, 10000000 has no effect on llama3_8b, a dense model; folded to null",
    )
    assert space == space_of("tp: 1")


def test_routing_skew_of_a_dense_model_is_told_and_folded():
    space = space_of("tp: [1, 2]")
    skewed = replace(space, workload=replace(space.workload, routing_skew=0.5))
    told = ("workload.routing_skew: 0.5 has no effect on llama3_8b, a dense model; folded to 0",)
    assert folded(skewed) == (space, told)
    experts = space_of("ep: [1, 2]", model="mixtral")
    experts = replace(experts, workload=replace(experts.workload, routing_skew=0.5))
    assert folded(experts) == (experts, ())


def test_a_configuration_is_told_what_has_no_effect_on_it(search):
    words = ("estimate", "llama3_8b_small", "--reference", "fully_sharded")
    plain = search(*words)
    told = search(*words, "--set", "strategy.redundant_experts=4", "--set", "workload.routing_skew=0.3")
    assert (plain.code, plain.err) == (0, "")
    assert told.out == plain.out
    assert [line.split(": ")[0] for line in told.err.splitlines()] == ["redundant_experts", "workload.routing_skew"]


def test_a_list_of_wrong_values_stays_as_well():
    space, told = folded(space_of("ep: [2, 4]"))
    assert told == ()
    assert enumerate_space(space).legal == 0


@pytest.mark.parametrize("model", ["mixtral", "deepseek"])
def test_experts_of_a_model_that_has_them_stay(model):
    space = space_of("ep: [1, 2, 4], expert_bucket_bytes: [null, 1e7]", model=model)
    assert folded(space) == (space, ())


def test_shared_experts_are_folded_where_there_are_none():
    _, told = folded(space_of("shared_expert_overlap: [false, true]", model="mixtral"))
    assert told == (
        "shared_expert_overlap: false, true has no effect on mixtral_8x7b, a model without shared experts; folded to "
        "false",
    )


def test_folding_changes_no_front():
    space = space_of("ep: [1, 2], etp: [1, 2], tp: [1, 2], zero_stage: [0, 1]")
    assert [*swept(folded(space)[0]).values()] == [*swept(space).values()]
