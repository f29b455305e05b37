"""Axes without meaning on a model: folded and told, unless a single value is wrong."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from estimator.strategy import Recompute, Strategy
from search.fold import folded, folded_point
from search.idle_axes import DEGREES, idle_axes
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
    search(*words)  # which may have to compile
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
    space = space_of("ep: [1, 2, 4], expert_bucket_bytes: [null, 1e7], overlap: {dp: 1}", model=model)
    assert folded(space) == (space, ())


def test_shared_experts_are_folded_where_there_are_none():
    _, told = folded(space_of("ep: 8, shared_expert_overlap: [false, true]", model="mixtral"))
    assert told == (
        "shared_expert_overlap: false, true has no effect on mixtral_8x7b, a model without shared experts; folded to "
        "false",
    )


def test_folding_changes_no_front():
    space = space_of("ep: [1, 2], etp: [1, 2], tp: [1, 2], zero_stage: [0, 1]")
    assert [*swept(folded(space)[0]).values()] == [*swept(space).values()]


def test_recompute_of_what_a_model_lacks_is_folded_to_the_rest():
    space, told = folded(space_of("recompute: [full, mla_up_proj, layernorm+moe, layernorm]"))
    assert told == ("recompute: mla_up_proj, moe has no effect on llama3_8b, which has no such part; folded to none",)
    assert space == space_of("recompute: [full, none, layernorm]")
    assert folded(space_of("recompute: [moe, moe_act, mla_up_proj, none]", model="deepseek"))[1] == ()


def test_recompute_of_a_part_is_folded_into_that_of_the_whole():
    space, told = folded(space_of("recompute: [mlp, mlp+mlp_act, mlp_act]"))
    assert told == ("recompute: mlp_act has no effect beside modules that it lies inside; folded to mlp, mlp_act",)
    assert space == space_of("recompute: [[mlp], [mlp_act]]")
    # Shared experts have activations outside `mlp`.
    assert folded(space_of("recompute: [mlp+mlp_act, mlp]", model="deepseek"))[1] == ()
    assert folded(space_of("recompute: mlp+mlp_act+moe", model="deepseek"))[0].strategy().recompute == Recompute.parse(
        "mlp+moe"
    )


def test_kernels_that_merge_nothing_are_left_out_of_every_set():
    space, told = folded(space_of("fusion: [[flash_attention], [flash_attention, fused_permute, fused_rope]]"))
    assert told == (
        "fusion: fused_permute has no effect on llama3_8b, which has nothing left for it to merge; folded to "
        "flash_attention+fused_rope",
    )
    assert space == space_of("fusion: [[flash_attention], [flash_attention, fused_rope]]")


def test_sets_of_kernels_that_come_to_the_same_are_one():
    space, told = folded(space_of("fusion: [[fused_norm, fused_dropout], [fused_norm]]"))
    assert space == space_of("fusion: [[fused_norm]]")
    assert [line.split(" has ")[0] for line in told] == ["fusion: fused_dropout"]
    casts = "fusion: [[flash_attention], [flash_attention, fused_quantize]], precision: [bf16%s]"
    assert len(folded(space_of(casts % ""))[0].axes["fusion"]) == 1
    assert len(folded(space_of(casts % ", fp8"))[0].axes["fusion"]) == 2


def test_what_the_default_holds_beyond_a_model_is_no_news():
    """Nemotron-H has no gated activation to fuse."""
    assert (
        folded(space_of("fusion: [[fused_activation], [flash_attention, fused_activation]]", model="hybrid"))[1] == ()
    )
    assert folded(space_of("tp: 1", model="hybrid"))[1] == ()


@pytest.mark.parametrize(("strategy", "line"), [
    ("sequence_parallel: [true, false]", "sequence_parallel: true, false has no effect where tp is 1; folded to true"),
    ("schedule: [1f1b, gpipe, zb-h1], pp: 4, interleave_group: [0, 8]",
     "interleave_group: 0, 8 has no effect where no schedule is interleaved; folded to 0"),
    ("interleave_group: 8, pp: 4", "interleave_group: 8 has no effect where no schedule is interleaved"),
    ("cp: 2, context_parallel: all-gather, overlap: {cp: [1, 0]}",
     "overlap_cp: 1, 0 has no effect where no ring passes keys and values; folded to 1"),
    ("overlap: {pp: 1}", "overlap_pp: 1 has no effect where pp is 1"),
    ("tp: 16, zero_stage: [1, 0]",
     "zero_stage: 1, 0 has no effect where a dense model has dp and cp 1; folded to 1"),
    ("dp_replicate: [2, 1]", "dp_replicate: 2, 1 has no effect where zero_stage is 0; folded to 1"),
    ("dp_replicate: [2, 4]", "dp_replicate: 2, 4 has no effect where zero_stage is 0"),
    ("zero_stage: [1, 2], prefetch_blocks: [0, 2]",
     "prefetch_blocks: 0, 2 has no effect where zero_stage is below 3; folded to 0"),
    ("zero_stage: 3, overlap: {dp: 1}, bucket_bytes: 5e7", 
     "bucket_bytes: 50000000 has no effect where zero_stage is 3"),
])  # fmt: skip
def test_what_the_other_choices_leave_no_room_for_is_told(strategy, line):
    assert folded(space_of(strategy))[1] == (line,)


@pytest.mark.parametrize("strategy", [
    "tp: [1, 2], sequence_parallel: [true, false]",
    "pp: 4, vpp: [1, 2], schedule: [1f1b, interleaved], interleave_group: [0, 8]",
    "cp: [1, 2], overlap: {cp: [0, 1]}",
    "zero_stage: [2, 3], reshard_after_forward: [0, 1]",
    "overlap: {dp: [0, 1]}, bucket_bytes: [25e6, 50e6]",
    "tp: 8, pp: 2, schedule: [1f1b, dualpipe], zero_stage: [0, 1]",
])  # fmt: skip
def test_what_has_an_effect_somewhere_in_a_space_stays(strategy):
    space = space_of(strategy)
    assert folded(space) == (space, ())


def test_zero_means_nothing_where_every_expert_is_on_one_rank():
    space = space_of("tp: 2, pp: 8, etp: 2, sequence_parallel: true, zero_stage: [0, 1]", model="mixtral")
    line = "zero_stage: 0, 1 has no effect where no two ranks hold the same weights; folded to 0"
    assert folded(space)[1] == (line,)
    assert folded(replace(space, axes={**space.axes, "etp": (1,)}))[1] == ()  # two ranks have each expert


def test_the_order_of_ranks_means_nothing_inside_one_domain():
    both = "pp: [2, 4], rank_order: [tp-cp-pp-dp, tp-cp-dp-pp]"
    line = "rank_order: tp-cp-pp-dp, tp-cp-dp-pp has no effect where all chips are in one domain of links; folded to "
    assert folded(space_of(both, chips="8"))[1] == (f"{line}tp-cp-dp-pp",)
    assert folded(space_of(both, chips="16"))[1] == ()


def test_routing_skew_is_told_where_experts_are_not_spread():
    alone = space_of("ep: 1", model="mixtral", skew=0.5)
    assert folded(alone) == (alone, ("workload.routing_skew: 0.5 has no effect where ep is 1",))
    spread = replace(alone, references={"mine": Strategy(ep=8)})
    assert folded(spread)[1] == ()


def test_what_a_point_has_beside_its_other_choices_is_told_and_kept_for_remedies():
    space = space_of("tp: 1")
    point, told = folded_point(space, Strategy(sequence_parallel=True, recompute=Recompute.parse("moe+layernorm")))
    assert [line.split(":")[0] for line in told] == ["recompute", "sequence_parallel"]
    assert point.strategy() == Strategy(sequence_parallel=True, recompute=Recompute.parse("layernorm"))


def test_an_estimate_says_what_has_no_effect_on_it(search):
    words = ("estimate", "llama3_8b_small", "--reference", "fully_sharded")
    told = search(*words, "--set", "strategy.interleave_group=4", "--set", "strategy.recompute=moe")
    assert told.code == 0
    assert told.err.splitlines() == [
        "recompute: moe has no effect on llama3_8b, which has no such part; folded to none",
        "interleave_group: 4 has no effect where no schedule is interleaved",
    ]


def test_an_illegal_configuration_is_told_its_rule_alone(search):
    words = ("estimate", "llama3_8b_small", "--reference", "fully_sharded", "--set", "strategy.interleave_group=4")
    said = search(*words, "--set", "strategy.tp=3")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "num_chips (64) must be divisible by tp (3)" in said.err


def test_structures_that_differ_in_what_has_no_effect_are_one_candidate():
    """Where an axis has an effect on some structures only, the others are counted once."""

    def legal(strategy):
        return enumerate_space(space_of(strategy)).legal

    both = "cp: 2, context_parallel: [ring, all-gather], overlap: {cp: %s}"
    assert legal(both % "[0, 1]") == legal(both % "0") + 1  # of the ring alone
    assert legal("recompute: [mlp, mlp+mlp_act, moe, none]") == 2
    groups = "pp: 2, vpp: [1, 2], schedule: [1f1b, interleaved], interleave_group: %s"
    assert legal(groups % "[0, 4]") == legal(groups % "0") + 1


@pytest.mark.parametrize("strategy", [
    "recompute: [mlp, mlp+mlp_act, moe, none], sequence_parallel: [true, false], zero_stage: [0, 1]",
    "fusion: [[flash_attention, fused_dropout], [flash_attention]], pp: [1, 2], interleave_group: [0, 4]",
])  # fmt: skip
def test_no_front_has_a_point_twice_and_folding_leaves_it_alone(strategy):
    space = space_of(strategy)
    front = [*swept(space).values()]
    assert len(front) == len(set(front))
    assert [*swept(folded(space)[0]).values()] == front


@pytest.mark.parametrize(("strategy", "model", "told"), [
    ("tp: {range: [1000, 60000]}, cp: {range: [1000, 60000]}, pp: {range: [1000, 60000]}", "llama", 0),
    ("tp: {range: [16, 60000]}, pp: {range: [1, 60000]}, zero_stage: [0, 1]", "llama", 2),
    ("tp: 8, pp: 2, sequence_parallel: true, ep: {range: [1, 50000]}, etp: {range: [1, 50000]}", "mixtral", 1),
    ("tp: 8, pp: 2, sequence_parallel: true, ep: {range: [2, 50000]}, etp: {range: [4, 50000]}, zero_stage: [0, 1]",
     "mixtral", 2),
])  # fmt: skip
def test_degrees_far_beyond_the_chips_are_folded_as_soon_as_few(strategy, model, told):
    """2e14 meshes: whether a thing holds on all of them is known without going through them."""
    lines = folded(space_of(strategy + ", rank_order: [tp-cp-dp-pp, tp-cp-pp-dp]", model=model))[1]
    assert [line.split(":")[0] for line in lines] == ["rank_order", "zero_stage"][:told]


def test_a_line_names_a_dozen_values_and_counts_the_others():
    space, (line,) = folded(space_of("ep: {range: [1, 50000]}"))
    head = ", ".join(map(str, range(1, 13)))
    assert line == f"ep: {head}, 49988 more has no effect on llama3_8b, a dense model; folded to 1"
    assert space == space_of("ep: 1")
    assert " more " not in folded(space_of("ep: {range: [1, 12]}"))[1][0]


def test_what_holds_on_every_mesh_is_what_a_loop_over_all_of_them_says():
    """Replicas and shared weights of random degrees."""
    draw = random.Random(0)
    answers = set()
    for _ in range(200):
        degrees = {name: sorted(draw.sample((1, 2, 3, 4, 8, 16), draw.choice((1, 1, 2)))) for name in DEGREES}
        text = ", ".join(f"{name}: {values}" for name, values in degrees.items())
        space = space_of(text + ", zero_stage: [0, 1, 3], overlap: {dp: [0, 1]}, sequence_parallel: true",
                         model="mixtral", chips="[8, 16]")  # fmt: skip
        meshes = [
            (tp, cp, chips // (tp * cp * pp), ep * etp)
            for chips in (8, 16)
            for tp, cp, pp, ep, etp in itertools.product(*degrees.values())
            if tp * cp * pp <= chips
        ]
        alone = all(dp * cp == 1 and tp * cp * dp // e <= 1 for tp, cp, dp, e in meshes)
        wanted = {
            "dp is 1": bool(meshes) and all(dp == 1 for _, _, dp, _ in meshes) and degrees["pp"] != [1],
            "no two ranks hold the same weights": bool(meshes) and alone,
        }
        told = {where for _, where in idle_axes(space)}
        assert {where: where in told for where in wanted} == wanted
        answers |= {*wanted.items()}
    assert len(answers) == 4
