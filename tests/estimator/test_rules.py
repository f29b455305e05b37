"""Which strategies are legal: every rule has an offender, and a scalar is told law, offence and remedy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.rules import RULES, Case, check, explain
from estimator.schedule import check_conditions
from estimator.schedule_rules import schedule_refusal, schedule_runs
from estimator.step import evaluate
from estimator.strategy import (
    ContextParallel,
    CudaGraph,
    LayoutRule,
    Offload,
    Optimizer,
    Overlap,
    RankOrder,
    Recompute,
    Schedule,
    Strategy,
)
from estimator.workload import Workload
from hardware import catalog
from hardware.mixed import mixed
from tests.estimator.cases import DEEPSEEK, LLAMA, MIXTRAL, SEQ, UNFUSED, WORK, h100
from tests.estimator.kinds import HYBRID, SPARSE

BLOCK = Recompute.parse("block")
OFFENDERS = {
    "sizes": (LLAMA, Strategy(tp=1.5), "whole numbers of at least 1"),
    "options": (LLAMA, Strategy(zero_stage=4), "zero_stage 0 to 3.*zero_stage 4"),
    "engine": (LLAMA, Strategy(precision="fp8"), "matrix engine"),
    "cuda_graph": (
        MIXTRAL,
        Strategy(cuda_graph=CudaGraph.FULL),
        "shapes that do not depend on where tokens are routed",
    ),
    "launches": (LLAMA, Strategy(cuda_graph=CudaGraph.FULL), "a step of tpu-v5p is one compiled program"),
    "world": (LLAMA, Strategy(pp=3), r"num_chips \(64\) must be divisible by tp \(1\) \* cp \(1\) \* pp \(3\)"),
    "segments": (LLAMA, Strategy(pp=1), r"pp \(1\) times the chips of each segment \(32 \+ 32\) .* divisible by 64"),
    "heads": (LLAMA, Strategy(tp=32), r"heads \(16\) must be divisible by tp \(32\)"),
    "kv_heads": (replace(LLAMA, num_heads=48, num_kv_heads=6), Strategy(tp=4), r"kv heads \(6\) and tp \(4\)"),
    "mixer_groups": (HYBRID, Strategy(tp=16), r"groups of mamba \(8\) must be divisible by tp \(16\)"),
    "scan_context": (HYBRID, Strategy(cp=64), r"must be divisible by tp \* cp \(1 \* 64\)"),
    "sparse_context": (SPARSE, Strategy(cp=2), r"needs cp \(2\) 1 or context_parallel all-gather"),
    "sparse_kernel": (SPARSE, Strategy(fusion=UNFUSED), "needs flash_attention in fusion"),
    "ffn": (replace(LLAMA, ffn=3001), Strategy(tp=2), r"ffn \(3001\).*tp \(2\)"),
    "experts": (MIXTRAL, Strategy(ep=16), r"experts \(8 and 0 copies\) must be divisible by ep \(16\)"),
    "redundant_experts": (
        MIXTRAL,
        Strategy(ep=3, redundant_experts=10),
        r"copies of experts \(10\) must be at most .* experts \(8\)",
    ),
    "expert_world": (MIXTRAL, Strategy(pp=4, ep=8, etp=4), r"tp \* cp \* dp .* must be divisible by ep \* etp"),
    "rank_order": (MIXTRAL, Strategy(ep=4, rank_order=RankOrder.TP_CP_PP_DP), r"1 \* 1 must be divisible by ep \* etp"),
    "moe_sequence_parallel": (MIXTRAL, Strategy(tp=2), "need sequence_parallel"),
    "sequence": (LLAMA, Strategy(cp=64), r"seq \(2000\) must be divisible by cp \(64\)"),
    "ulysses": (LLAMA, Strategy(cp=8, context_parallel=ContextParallel.ULYSSES), r"tp \* cp \(1 \* 8\)"),
    "batch": (
        LLAMA,
        Strategy(micro_batch=3),
        r"global_batch \(64\) must be divisible by dp \(64\) \* micro_batch \(3\)",
    ),
    "dp_replicate": (LLAMA, Strategy(dp_replicate=3), r"dp \(64\) and .* must be divisible by dp_replicate \(3\)"),
    "optimizer": (
        LLAMA,
        Strategy(optimizer=Optimizer.MUON, offload=Offload(states=0.5)),
        "muon needs momentum on the chip .* offload of states is 0.5",
    ),
    "offload": (LLAMA, Strategy(offload=Offload(states=0.5)), "host's memory are known, and of .* they are not"),
    "layers": (LLAMA, Strategy(pp=16), r"layers \(8\) must fill pp \* vpp = 16 \* 1 chunks"),
    "auto_layout": (LLAMA, Strategy(layout=LayoutRule.AUTO), r"balances the stages of a pipeline \(pp 1\)"),
    "schedule": (LLAMA, Strategy(schedule=Schedule.GPIPE), "gpipe needs a pipeline, but pp is 1; try"),
    "recompute_per_chunk": (
        LLAMA,
        Strategy(pp=2, recompute=Recompute.parse("block"), recompute_per_chunk=(4, 5)),
        "from 0 to its layers",
    ),
    "recompute": (LLAMA, Strategy(recompute=BLOCK), r"recompute_layers \(0\) must be at least 1"),
    "overlap_tp": (LLAMA, Strategy(tp=2, overlap=Overlap(tp=1)), "needs sequence_parallel"),
    "overlap_ep": (MIXTRAL, Strategy(ep=8, overlap=Overlap(ep=1)), "two micro-batches side by side"),
    "shared_expert_overlap": (
        DEEPSEEK,
        Strategy(tp=2, ep=8, sequence_parallel=True, overlap=Overlap(ep=1), shared_expert_overlap=True),
        "not behind both",
    ),
}


def system_and_work(name):
    system = catalog.cluster("dgx_a100", 64) if name == "engine" else h100(64)
    if name == "launches":
        system = catalog.cluster("tpu_v5p_pod", 64)
    if name == "offload":
        system = replace(system, chip=replace(system.chip, host_bytes_per_s=0.0))
    system = mixed("two", (h100(32), h100(32))) if name == "segments" else system
    return system, Workload(seq=2000, global_batch=64) if name == "sequence" else WORK


def first_rule(model, strategy, system, work):
    code = check(Case.of(model, strategy, system, work))
    return [RULES[c - 1].name if c else "" for c in code]


def test_every_rule_has_an_offender():
    assert [rule.name for rule in RULES] == list(OFFENDERS)


@pytest.mark.parametrize("name", OFFENDERS)
def test_an_offender_is_told_the_rule_it_breaks(name):
    model, strategy, message = OFFENDERS[name]
    assert first_rule(model, strategy, *system_and_work(name)) == [name]
    with pytest.raises(ValueError, match=rf"^{name}: .*{message}"):
        evaluate(model, strategy, *system_and_work(name))


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_every_rule_says_what_to_try(rule):
    assert rule.law
    assert rule.remedy


@pytest.mark.parametrize(("model", "strategy"), [
    (LLAMA, Strategy()),
    (LLAMA, Strategy(tp=16)),
    (LLAMA, Strategy(tp=8, pp=8, sequence_parallel=True, overlap=Overlap(tp=1))),
    (LLAMA, Strategy(pp=2, vpp=4, schedule=Schedule.INTERLEAVED, micro_batch=1)),
    (LLAMA, Strategy(pp=4, schedule=Schedule.DUALPIPE, tp=4)),
    (LLAMA, Strategy(cp=4, context_parallel=ContextParallel.ULYSSES)),
    (LLAMA, Strategy(recompute=BLOCK, recompute_layers=99)),
    (LLAMA, Strategy(pp=2, layout=(8, 0))),
    (LLAMA, Strategy(pp=2, vpp=5, schedule=Schedule.INTERLEAVED)),
    (MIXTRAL, Strategy(ep=8, etp=2)),
    (MIXTRAL, Strategy(tp=2, ep=8, etp=4, sequence_parallel=True)),
    (DEEPSEEK, Strategy(tp=2, ep=16, pp=2, schedule=Schedule.DUALPIPE, sequence_parallel=True, overlap=Overlap(ep=1))),
])  # fmt: skip
def test_legal_strategies_pass(model, strategy):
    assert first_rule(model, strategy, h100(64), WORK) == [""]


def test_two_chunks_may_hold_no_layer_for_they_have_the_embedding_and_the_head():
    """126 layers on 128 chunks: Llama 3, arXiv:2407.21783, section 3.3.2."""

    def at(num_layers, vpp):
        model = replace(LLAMA, num_layers=num_layers)
        return first_rule(model, Strategy(pp=2, vpp=vpp, schedule=Schedule.INTERLEAVED), h100(64), WORK)

    assert at(10, 5) == at(9, 5) == at(8, 5) == [""]
    assert at(7, 5) == ["layers"]


def test_expert_groups_may_span_more_than_data_parallel_ranks():
    """The law is etp * ep * edp = tp * cp * dp: here ep 8 with dp 2."""
    assert first_rule(MIXTRAL, Strategy(tp=4, pp=8, ep=8, sequence_parallel=True), h100(64), WORK) == [""]


def test_copies_count_as_experts_where_ranks_share_them():
    def at(ep, copies):
        s = Strategy(ep=ep, redundant_experts=copies)
        return first_rule(MIXTRAL, s, h100(64), WORK)[0]

    assert at(8, 8) == at(16, 8) == at(1, 3) == at(4, 4) == ""  # on one rank there is nothing to even out
    assert at(16, 0) == at(8, 4) == "experts"
    assert first_rule(LLAMA, Strategy(redundant_experts=99), h100(64), WORK) == [""]


def test_widths_that_no_layer_has_need_not_divide():
    odd = replace(MIXTRAL, ffn=3001)  # every layer has experts instead
    s = Strategy(tp=2, sequence_parallel=True)
    assert first_rule(odd, s, h100(64), WORK) == [""]
    shared = replace(odd, moe=replace(MIXTRAL.moe, num_shared_experts=1, shared_ffn=999))
    assert first_rule(shared, s, h100(64), WORK) == ["ffn"]


def test_only_ulysses_leaves_a_causal_sequence_in_one_piece():
    work = Workload(seq=SEQ + 4, global_batch=64)
    ruled = [first_rule(LLAMA, Strategy(cp=4, context_parallel=c), h100(64), work)[0] for c in ContextParallel]
    assert dict(zip(ContextParallel, ruled, strict=True)) == {
        ContextParallel.RING: "sequence", ContextParallel.ALL_GATHER: "sequence", ContextParallel.ULYSSES: ""
    }  # fmt: skip


@pytest.mark.parametrize("schedule", list(Schedule))
def test_the_schedule_rule_refuses_what_it_has_words_for_and_nothing_else(schedule):
    grid = [
        (pp, v, m, group)
        for pp in (1, 2, 3, 4, 6)
        for v in (1, 2, 4)
        for m in (1, 2, 4, 6, 9, 12, 16)
        for group in (0, 2, 4, 8)
    ]
    for pp, v, m, group in grid:
        s = Strategy(schedule=schedule, interleave_group=group)
        law, remedy = schedule_refusal(s, pp, v, m)
        assert bool(law) is bool(remedy) is not schedule_runs(s, *(np.array([float(x)]) for x in (pp, v, m)))[0]
        if not law:
            assert check_conditions(schedule, pp, m, v, group) is None  # the order generator has one


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize(("pp", "v", "batch"), [(1, 1, 16), (1, 2, 16), (3, 1, 2), (3, 2, 4), (4, 1, 4), (4, 4, 6)])
def test_a_schedule_is_refused_by_its_own_condition_alone(schedule, pp, v, batch):
    deep = replace(LLAMA, num_layers=48)
    work, system = Workload(seq=SEQ, global_batch=batch), h100(pp)
    case = Case.of(deep, Strategy(pp=pp, vpp=v, schedule=schedule), system, work)
    code = int(check(case)[0])
    if code:
        said = explain(case, code)
        assert said.startswith(f"schedule: {schedule.value} ")
        others = {s.value for s in Schedule} - {schedule.value, "1f1b", "interleaved"}  # which remedies name
        assert not others.intersection(said.replace(",", " ").replace(";", " ").split())
        assert "; try " in said


def test_the_remedy_of_a_schedule_is_legal():
    deep, work = replace(LLAMA, num_layers=48), Workload(seq=SEQ, global_batch=6)
    s = Strategy(pp=4, vpp=2, schedule=Schedule.INTERLEAVED)
    case = Case.of(deep, s, h100(4), work)
    said = explain(case, int(check(case)[0]))
    assert said == "schedule: interleaved needs micro-batches (6) divisible by pp (4); try 4 or 8"
    for batch in (4, 8):
        assert first_rule(deep, s, h100(4), replace(work, global_batch=batch)) == [""]


@pytest.mark.parametrize("scope", [scope for scope in CudaGraph if scope is not CudaGraph.NONE])
@pytest.mark.parametrize("cluster", ["tpu_v5p_pod", "tpu_v6e_pod", "trn2_ultraserver"])
def test_nothing_is_captured_where_a_step_is_one_compiled_program(cluster, scope):
    system = catalog.cluster(cluster, 64)
    assert first_rule(LLAMA, Strategy(cuda_graph=scope), system, WORK) == ["launches"]
    assert first_rule(LLAMA, Strategy(), system, WORK) == [""]


@pytest.mark.parametrize("cluster", ["dgx_h100", "mi300x_8x", "ascend_910b_pod"])
def test_launches_are_captured_where_a_host_makes_them(cluster):
    assert first_rule(LLAMA, Strategy(cuda_graph=CudaGraph.FULL), catalog.cluster(cluster, 64), WORK) == [""]


def test_rows_of_a_batch_are_marked_each_with_its_own_rule():
    tp = np.array([1.0, 3, 32, 8])
    result = evaluate(LLAMA, Strategy(tp=tp), h100(96), Workload(seq=SEQ, global_batch=96))
    assert result.reason == ("", "heads", "heads", "")
    assert result.feasible.tolist() == [True, False, False, True]
    assert np.isnan(result.step_time_s).tolist() == [False, True, True, False]


def test_an_explanation_names_the_row_it_is_about():
    case = Case.of(LLAMA, Strategy(tp=np.array([1.0, 32])), h100(64), WORK)
    assert "tp (32)" in explain(case, int(check(case)[1]), row=1)
