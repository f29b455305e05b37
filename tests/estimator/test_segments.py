"""Pipelines over chips of several kinds: equal segments are one cluster, and unequal ones share out the work."""

from dataclasses import replace

import numpy as np
import pytest

import spaces
from estimator.detail.step import replay_step
from estimator.memory import RESERVED_FACTOR
from estimator.model_io import load_model
from estimator.segments import segment_of_ranks
from estimator.step import evaluate, with_layout
from estimator.strategy import LayoutRule, Overlap, RankOrder, Recompute, RecomputeKind, Schedule, Strategy
from estimator.workload import Workload
from hardware import catalog
from hardware.mixed import mixed
from hardware.system import SystemSpec
from search.plain import from_plain, plain
from tests.estimator.cases import LLAMA, MIXTRAL

FULL = Recompute(kind=RecomputeKind.FULL)
WORK = Workload(seq=2048, global_batch=64)


def cluster(name, num_chips=16):
    return catalog.cluster(name, num_chips)


def pair(first, second, num_chips=16):
    return mixed("pair", (cluster(first, num_chips), cluster(second, num_chips)))


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "s",
    [
        Strategy(pp=2),
        Strategy(tp=2, pp=4, sequence_parallel=True, zero_stage=1, recompute=FULL, overlap=Overlap(dp=1, tp=1)),
        Strategy(pp=4, schedule=Schedule.ZB_H1, zero_stage=3, overlap=Overlap(dp=1, pp=1)),
        Strategy(pp=2, vpp=2, schedule=Schedule.INTERLEAVED),
        Strategy(pp=4, layout=LayoutRule.AUTO),
    ],
    ids=lambda s: f"{s.schedule.value}-{s.pp}-{s.zero_stage}-{s.layout}",
)
def test_equal_segments_are_one_cluster(model, s):
    one = evaluate(model, s, cluster("dgx_h100", 32), WORK)
    two = evaluate(model, s, pair("dgx_h100", "dgx_h100"), WORK)
    for name, value in one.columns.items():
        # Sums over segments of what is a product over chips: a few roundings in money, watts and the mean peak.
        assert two.columns[name] == pytest.approx(value, rel=1e-14, nan_ok=True), name
    assert [s.memory for s in two.stages] == [s.memory for s in one.stages]


def test_auto_gives_the_faster_chips_more_layers_and_is_faster_for_it():
    system = pair("dgx_h100", "dgx_a100")
    s = Strategy(tp=2, pp=4, sequence_parallel=True, zero_stage=1)
    balanced = with_layout(LLAMA, replace(s, layout=LayoutRule.AUTO), system, WORK)
    layers = balanced.layout
    assert sum(layers) == LLAMA.num_layers
    assert min(layers[:2]) > max(layers[2:])
    even, auto = evaluate(LLAMA, s, system, WORK), evaluate(LLAMA, balanced, system, WORK)
    slow, fast = (evaluate(LLAMA, s, cluster(name, 32), WORK) for name in ("dgx_a100", "dgx_h100"))
    assert fast.step_time_s < auto.step_time_s < 0.9 * even.step_time_s
    assert even.step_time_s == pytest.approx(slow.step_time_s, rel=0.1)  # the slower half sets the pace
    assert auto.step_time_s == evaluate(LLAMA, replace(s, layout=LayoutRule.AUTO), system, WORK).step_time_s


@pytest.mark.parametrize("order", [("dgx_h200", "dgx_a100_40g"), ("dgx_a100_40g", "dgx_h200")])
def test_every_rank_is_held_against_its_own_chip(order):
    system = pair(*order)
    model, seen = load_model("llama3_8b", [spaces.MODELS]), set()
    for micro_batch in (1, 2, 4, 8):
        for layout in ((11, 9, 6, 6), (16, 14, 1, 1), (1, 1, 15, 15)):
            s = Strategy(pp=4, micro_batch=micro_batch, zero_stage=1, layout=layout)
            result = evaluate(model, s, system, Workload(seq=4096, global_batch=256))
            parts = [system.segments[i] for i in segment_of_ranks(system, 4)]
            fits = [
                sum(stage.memory.values()) * RESERVED_FACTOR + part.chip.context_bytes <= part.usable_hbm_bytes
                for stage, part in zip(result.stages, parts, strict=True)
            ]
            assert result.feasible == all(fits), (micro_batch, layout)
            alone = evaluate(model, s, cluster("dgx_h200", 32), Workload(seq=4096, global_batch=256))
            for mine, other in zip(result.stages, alone.stages, strict=True):  # tensors do not depend on chips
                assert mine.memory == pytest.approx(other.memory, rel=1e-9)  # the working set was raised and lowered
            seen.add((all(fits), all(fits[:2]), all(fits[2:])))
    assert {(True, True, True), (False, True, False), (False, False, True)} & seen >= {(True, True, True)}
    assert len(seen) > 1


def test_a_larger_chip_is_used_where_the_smaller_would_be_full():
    model, heavy = load_model("llama3_8b", [spaces.MODELS]), Strategy(pp=2, zero_stage=1, layout=(28, 4))
    work = Workload(seq=4096, global_batch=128)
    roomy_first, tight_first = pair("dgx_h200", "dgx_a100_40g"), pair("dgx_a100_40g", "dgx_h200")
    assert evaluate(model, heavy, roomy_first, work).feasible
    assert not evaluate(model, heavy, tight_first, work).feasible


def test_gradients_and_updates_are_those_of_the_slowest_segment():
    s = Strategy(pp=2, zero_stage=1)
    both = evaluate(LLAMA, s, pair("dgx_h100", "dgx_a100"), WORK)
    slow, fast = (evaluate(LLAMA, s, cluster(name, 32), WORK) for name in ("dgx_a100", "dgx_h100"))
    for name in ("optimizer_s", "optimizer_comm_s"):
        # Bytes go as slowly as on the one, hops take as long as on the other: never less than either alone.
        assert both.columns[name] >= slow.columns[name] > fast.columns[name]
        assert both.columns[name] == pytest.approx(slow.columns[name], rel=0.01)  # hops are so small a part


def test_the_link_between_segments_is_the_longest_hop():
    s, parts = Strategy(pp=2), (cluster("dgx_h100"), cluster("dgx_h100"))
    thin = replace(parts[0].tiers[-1].link, bytes_per_s=1e9)
    usual, slow = (evaluate(LLAMA, s, mixed("pair", parts, link), WORK) for link in (None, thin))
    # The slow link carries a fiftieth; part of a hop is latency, which stays.
    assert slow.exposed_comm_pp_s > 10 * usual.exposed_comm_pp_s
    assert slow.step_time_s > usual.step_time_s
    assert slow.forward_s == usual.forward_s


def test_stages_lie_in_proportion_to_chips():
    system = mixed("three", (cluster("dgx_h100", 32), cluster("dgx_a100", 16), cluster("dgx_h800", 16)))
    assert segment_of_ranks(system, 4) == (0, 0, 1, 2)
    assert segment_of_ranks(cluster("dgx_h100"), 4) == (0, 0, 0, 0)


def test_money_power_failures_and_peaks_add_up():
    system = pair("dgx_h100", "dgx_a100")
    for name in ("price_usd_per_s", "power_w", "co2_kg_per_s", "failures_per_s"):
        assert getattr(system, name) == sum(getattr(part, name) for part in system.segments)
    result = evaluate(LLAMA, Strategy(pp=2), system, WORK)
    flops = result.model_tflops_per_gpu * 1e12 * 32
    assert result.mfu == pytest.approx(flops / (16 * 989.4e12 + 16 * 312e12), rel=1e-14)
    assert result.energy_j_per_token == pytest.approx(system.power_w * result.step_time_s / WORK.tokens, rel=1e-14)


@pytest.mark.parametrize(
    "s",
    [
        Strategy(pp=1),
        Strategy(pp=3),
        Strategy(pp=2, schedule=Schedule.DUALPIPE),
        Strategy(pp=2, rank_order=RankOrder.TP_CP_PP_DP),
        Strategy(pp=2, vpp=2, schedule=Schedule.INTERLEAVED, layout=LayoutRule.AUTO),
    ],
    ids=["one stage", "an odd number", "two copies", "stages inside", "auto of chunks"],
)
def test_what_is_not_priced_is_refused(s):
    with pytest.raises(ValueError, match="segments|world"):
        evaluate(LLAMA, s, pair("dgx_h100", "dgx_a100"), WORK)


def test_a_recipe_needs_an_engine_on_every_chip():
    with pytest.raises(ValueError, match="matrix engine"):
        evaluate(LLAMA, Strategy(pp=2, precision="fp8"), pair("dgx_h100", "dgx_a100"), WORK)


def test_a_replay_says_that_it_knows_one_kind_of_chip():
    with pytest.raises(ValueError, match="one kind, but got a system of segments .16 x h100.* take its estimate"):
        replay_step(LLAMA, Strategy(pp=2), pair("dgx_h100", "dgx_a100"), WORK)


def test_simplifications_are_told_with_every_result():
    told = evaluate(LLAMA, Strategy(pp=2), pair("dgx_h100", "dgx_a100"), WORK).assumptions
    for part in ("slowest segment", "longest one", "roomiest", "slower of their outermost links", "a100-80g-sxm gemm"):
        assert any(part in text for text in told), part


def test_rows_of_a_batch_are_the_scalar_calls():
    system, sizes = pair("dgx_h100", "dgx_a100"), np.array([2.0, 4.0, 8.0])
    rows = evaluate(LLAMA, Strategy(pp=sizes, zero_stage=1), system, WORK)
    for i, pp in enumerate(sizes):
        one = evaluate(LLAMA, Strategy(pp=pp, zero_stage=1), system, WORK)
        assert rows.step_time_s[i] == one.step_time_s
        assert rows.device_memory_bytes[i] == one.device_memory_bytes


def test_a_mixed_system_is_written_and_read_back():
    system = pair("dgx_h100", "dgx_a100")
    assert from_plain(SystemSpec, plain(system)) == system
    assert system.with_chips(64).segments[1].num_chips == 32
    with pytest.raises(ValueError, match="grow and shrink alike, but got 33 chips; use a multiple of 32"):
        system.with_chips(33)


def test_it_is_described_as_a_list_of_systems():
    made = catalog.system_from_mapping(
        {"name": "both", "segments": [{"cluster": "dgx_h100", "num_chips": 16, "pue": 1.1}, "dgx_a100"],
         "link": {"bytes_per_s": "100 Gb/s", "latency_s": "10 us", "efficiency": 0.8}}
    )  # fmt: skip
    assert (made.name, made.num_chips, made.told_chips) == ("both", 528, "16 x h100-80g-sxm + 512 x a100-80g-sxm")
    assert made.tiers[0].link.bytes_per_s == 12.5e9
    assert made.segments[0].site.pue == 1.1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"segments": ["dgx_h100"]}, "at least two segments, but got 1"),
        ({"segments": "dgx_h100"}, "must be a list of systems"),
        ({"segments": ["dgx_h100", "dgx_a100"], "pue": 1.1}, "unknown key of system: 'pue'"),
        ({"segments": ["dgx_h100", {"segments": ["dgx_h100", "dgx_a100"]}]}, "one cluster of equal chips"),
        ({"segments": ["dgx_h100", "dgx_a100"], "link": {"latency_s": 1}}, "system.link needs bytes_per_s"),
    ],
)
def test_it_refuses_descriptions_that_are_none(given, message):
    with pytest.raises(ValueError, match=message):
        catalog.system_from_mapping(given)
