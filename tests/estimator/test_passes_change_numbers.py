"""Each pass, and each dimension of a strategy, moves the numbers it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.cost.collective import collective
from estimator.op import Traffic
from estimator.step import evaluate
from estimator.strategy import (
    Chunks,
    ContextParallel,
    CudaGraph,
    Fusion,
    Module,
    Offload,
    Optimizer,
    Overlap,
    Recompute,
    RecomputeKind,
    Schedule,
    Strategy,
)
from tests.estimator.cases import DEEPSEEK, FULL, GPT, LLAMA, MIXTRAL, SEQ, UNFUSED, WORK, h100, step

ALL = frozenset({Fusion.FLASH_ATTENTION, Fusion.FUSED_NORM, Fusion.FUSED_ACTIVATION})
MIB = 1024**2
MEMORY = "peak_memory_bytes"
LONG = {"tp": 4, "sequence_parallel": True, "micro_batch": 16}
SMALL = replace(LLAMA, hidden=128, ffn=256, num_heads=4, num_kv_heads=4, head_dim=32)
MOE_BASE = {"ep": 8, "sequence_parallel": True}


def pair(model, a, b, chips=16, **options):
    """Columns of two strategies; of SMALL on a host that is slower than it."""
    system = h100(chips)
    if model is SMALL:
        system = replace(system, chip=replace(system.chip, launch_s=10e-6))
    first, second = (evaluate(model, Strategy(**choices), system, WORK, **options) for choices in (a, b))
    return first, second


SKEWED = replace(WORK, routing_skew=0.6)
# what, model, without, with, columns that must grow, columns that must shrink
CASES = {
    "tp": (LLAMA, {}, {"tp": 4}, ["exposed_comm_tp_s"], [MEMORY]),
    "sequence parallelism": (
        LLAMA, {"tp": 4}, {"tp": 4, "sequence_parallel": True}, [], [MEMORY, "compute_s"]),
    "ring": (LLAMA, {}, {"cp": 4, "context_parallel": ContextParallel.RING}, [], [MEMORY]),
    "all-gather": (
        LLAMA, {}, {"cp": 4, "context_parallel": ContextParallel.ALL_GATHER}, ["exposed_comm_cp_s"], [MEMORY]),
    "ulysses": (
        LLAMA, {}, {"cp": 4, "context_parallel": ContextParallel.ULYSSES}, ["exposed_comm_cp_s"], [MEMORY]),
    "pp": (LLAMA, {}, {"pp": 4}, ["bubble_s", "exposed_comm_pp_s"], [MEMORY]),
    "vpp": (
        LLAMA, {"pp": 4}, {"pp": 4, "vpp": 2, "schedule": Schedule.INTERLEAVED},
        ["exposed_comm_pp_s", MEMORY], ["bubble_s"]),
    "ep": (MIXTRAL, {}, {"ep": 8}, ["exposed_comm_ep_s"], [MEMORY]),
    "etp": (MIXTRAL, {"ep": 4}, {"ep": 4, "etp": 2}, ["exposed_comm_ep_s"], [MEMORY]),
    "layout": (LLAMA, {"pp": 2}, {"pp": 2, "layout": (7, 1)}, ["step_time_s", MEMORY], []),
    "micro-batch": (LLAMA, {"pp": 4}, {"pp": 4, "micro_batch": 4}, ["bubble_s", MEMORY], []),
    "gpipe": (LLAMA, {"pp": 4}, {"pp": 4, "schedule": Schedule.GPIPE}, [MEMORY], []),
    "zb-h1": (LLAMA, {"pp": 4}, {"pp": 4, "schedule": Schedule.ZB_H1}, [], ["bubble_s"]),
    "dualpipe": (LLAMA, {"pp": 4}, {"pp": 4, "schedule": Schedule.DUALPIPE}, [MEMORY], ["bubble_s"]),
    "ZeRO-1": (LLAMA, {}, {"zero_stage": 1}, ["optimizer_comm_s"],
               [MEMORY, "optimizer_s", "exposed_comm_dp_s"]),
    "ZeRO-2": (LLAMA, {"zero_stage": 1}, {"zero_stage": 2}, ["exposed_comm_dp_s"], [MEMORY]),
    "ZeRO-3": (LLAMA, {"zero_stage": 2}, {"zero_stage": 3}, ["exposed_comm_dp_s"], [MEMORY, "optimizer_comm_s"]),
    "HSDP": (LLAMA, {"zero_stage": 3}, {"zero_stage": 3, "dp_replicate": 2}, [MEMORY, "optimizer_s"], []),
    "weights kept after forward": (
        LLAMA, {"zero_stage": 3}, {"zero_stage": 3, "reshard_after_forward": 0}, [MEMORY], ["exposed_comm_dp_s"]),
    "nothing gathered ahead": (
        LLAMA, {"zero_stage": 3, "overlap": Overlap(dp=1)},
        {"zero_stage": 3, "overlap": Overlap(dp=1), "prefetch_blocks": 0}, ["exposed_comm_dp_s"], [MEMORY]),
    "activations on the host": (
        LLAMA, {}, {"offload": Offload(activations=1)}, ["exposed_offload_s", "host_memory_bytes"], [MEMORY]),
    "parameters on the host": (LLAMA, {}, {"offload": Offload(parameters=1)}, ["host_memory_bytes"], [MEMORY]),
    "gradients on the host": (
        LLAMA, {"zero_stage": 2}, {"zero_stage": 2, "offload": Offload(gradients=1)}, ["host_memory_bytes"], [MEMORY]),
    "states on the host": (
        LLAMA, {}, {"offload": Offload(states=1)}, ["optimizer_s", "host_memory_bytes"], [MEMORY]),
    "full recompute": (LLAMA, {}, {"recompute": FULL}, ["recompute_s", "hfu", "step_time_s"], [MEMORY, "mfu"]),
    "block recompute": (
        LLAMA, {}, {"recompute": Recompute.parse("block"), "recompute_layers": 2}, ["recompute_s"], [MEMORY]),
    "more layers recomputed": (
        LLAMA, {"recompute": Recompute.parse("block"), "recompute_layers": 2},
        {"recompute": Recompute.parse("block"), "recompute_layers": 3}, ["recompute_s"], [MEMORY]),
    "overlap of tp": (
        LLAMA, LONG, {**LONG, "overlap": Overlap(tp=1)}, [], ["exposed_comm_tp_s", "step_time_s"]),
    "more pieces of tp": (
        LLAMA, {**LONG, "overlap": Overlap(tp=1)},
        {**LONG, "overlap": Overlap(tp=1), "tp_chunks": Chunks.parse("64")}, ["exposed_comm_tp_s", "step_time_s"], []),
    "overlap of ep": (
        MIXTRAL, MOE_BASE, {**MOE_BASE, "overlap": Overlap(ep=1)}, [], ["exposed_comm_ep_s", "step_time_s"]),
    "overlap of pp": (LLAMA, {"pp": 4}, {"pp": 4, "overlap": Overlap(pp=1)}, [], ["exposed_comm_pp_s", "step_time_s"]),
    "overlap of dp": (
        LLAMA, {"bucket_bytes": 40 * MIB}, {"bucket_bytes": 40 * MIB, "overlap": Overlap(dp=1)}, [MEMORY],
        ["exposed_comm_dp_s", "step_time_s"]),
    "overlap of gathered weights": (
        LLAMA, {"zero_stage": 3}, {"zero_stage": 3, "overlap": Overlap(dp=1)}, [],
        ["exposed_comm_dp_s", "step_time_s"]),
    "buckets": (
        LLAMA, {"overlap": Overlap(dp=1), "bucket_bytes": 0}, {"overlap": Overlap(dp=1), "bucket_bytes": 40 * MIB},
        [MEMORY], ["exposed_comm_dp_s"]),
    "flash attention": (
        LLAMA, {"fusion": UNFUSED}, {"fusion": frozenset({Fusion.FLASH_ATTENTION})}, [], [MEMORY, "compute_s"]),
    "fused norm": (
        LLAMA, {"fusion": UNFUSED}, {"fusion": frozenset({Fusion.FUSED_NORM})}, [], [MEMORY, "compute_s"]),
    "fused activation": (
        LLAMA, {"fusion": UNFUSED}, {"fusion": frozenset({Fusion.FUSED_ACTIVATION})}, [], [MEMORY, "compute_s"]),
    "fused loss": (LLAMA, {}, {"fusion": ALL | {Fusion.FUSED_LOSS}}, [], [MEMORY, "compute_s"]),
    "one product of q, k and v": (LLAMA, {}, {"fusion": ALL | {Fusion.FUSED_QKV}}, [MEMORY], ["compute_s"]),
    "one product of gate and up": (MIXTRAL, {}, {"fusion": ALL | {Fusion.FUSED_GATE_UP}}, [], ["compute_s"]),
    "one down-projection": (DEEPSEEK, {}, {"fusion": ALL | {Fusion.FUSED_MLA_PROJECTIONS}}, [], ["compute_s"]),
    "fused rope": (LLAMA, {}, {"fusion": ALL | {Fusion.FUSED_ROPE}}, [], ["compute_s"]),
    "norm inside the residual": (GPT, {}, {"fusion": ALL | {Fusion.FUSED_RESIDUAL_NORM}}, [], ["compute_s"]),
    "fused permute": (MIXTRAL, {}, {"fusion": ALL | {Fusion.FUSED_PERMUTE}}, [], ["compute_s"]),
    "fused router": (MIXTRAL, {}, {"fusion": ALL | {Fusion.FUSED_ROUTER}}, [], ["compute_s"]),
    "fused casts": (
        LLAMA, {"precision": "fp8"}, {"precision": "fp8", "fusion": ALL | {Fusion.FUSED_QUANTIZE}}, [], ["compute_s"]),
    "graph of attention": (
        SMALL, {}, {"cuda_graph": CudaGraph.ATTENTION}, [MEMORY], ["exposed_host_s", "step_time_s"]),
    "graph of layers": (
        SMALL, {}, {"cuda_graph": CudaGraph.LAYER}, [MEMORY], ["exposed_host_s", "step_time_s"]),
    "graph of the iteration": (
        SMALL, {"cuda_graph": CudaGraph.LAYER}, {"cuda_graph": CudaGraph.FULL}, [],
        [MEMORY, "fixed_host_s", "exposed_host_s", "step_time_s"]),
    "shared experts beside their all-to-all": (
        DEEPSEEK, {"ep": 16}, {"ep": 16, "shared_expert_overlap": True}, [], ["exposed_comm_ep_s", "step_time_s"]),
    "8-bit Adam": (LLAMA, {}, {"optimizer": Optimizer.ADAM_8BIT}, [], [MEMORY, "optimizer_s"]),
    "SGD": (LLAMA, {}, {"optimizer": Optimizer.SGD}, [], [MEMORY, "optimizer_s"]),
    "Muon": (LLAMA, {"optimizer": Optimizer.SGD}, {"optimizer": Optimizer.MUON}, [MEMORY, "optimizer_s"], []),
    "ring beside attention": (
        LLAMA, {"cp": 4, "overlap": Overlap(cp=0)}, {"cp": 4}, [], ["exposed_comm_cp_s", "step_time_s"]),
    "fp8": (LLAMA, {"micro_batch": 4}, {"micro_batch": 4, "precision": "fp8"}, [], ["step_time_s", "mfu"]),
    "fp8_block": (
        LLAMA, {"micro_batch": 4, "precision": "fp8"}, {"micro_batch": 4, "precision": "fp8_block"}, ["recompute_s"],
        [MEMORY]),
}  # fmt: skip


def test_routing_skew_costs_time_and_memory_and_no_model_flops():
    even, uneven = (step(MIXTRAL, Strategy(ep=8), 16, work) for work in (WORK, SKEWED))
    for name in ("step_time_s", "compute_s", "exposed_comm_ep_s", MEMORY):
        assert uneven.columns[name] > even.columns[name], name
    assert uneven.mfu * uneven.step_time_s == pytest.approx(even.mfu * even.step_time_s, rel=1e-12)


def test_copies_of_experts_cost_memory_and_traffic_and_even_out_a_skewed_router():
    s, copied = Strategy(ep=8), Strategy(ep=8, redundant_experts=8)
    even, even_copied = step(MIXTRAL, s, 16), step(MIXTRAL, copied, 16)
    for name in (MEMORY, "exposed_comm_dp_s", "optimizer_s", "step_time_s"):
        assert even_copied.columns[name] > even.columns[name], name
    assert even_copied.exposed_comm_ep_s == even.exposed_comm_ep_s
    uneven, evened = step(MIXTRAL, s, 16, SKEWED), step(MIXTRAL, copied, 16, SKEWED)
    for name in ("step_time_s", "compute_s", "exposed_comm_ep_s"):
        assert evened.columns[name] < uneven.columns[name], name


def test_skew_and_copies_change_nothing_where_no_rank_has_other_experts():
    for model, s in ((LLAMA, Strategy()), (MIXTRAL, Strategy()), (MIXTRAL, Strategy(tp=2, sequence_parallel=True))):
        plain = step(model, s, 16)
        assert step(model, replace(s, redundant_experts=3), 16, SKEWED).columns == plain.columns


def test_experts_padded_to_a_capacity_drop_what_is_above_it():
    padded = replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity_factor=1.25))
    assert step(padded, Strategy(ep=8), 16, SKEWED).columns == step(padded, Strategy(ep=8), 16).columns


@pytest.mark.parametrize("what", CASES)
def test_it_changes_the_numbers_it_should(what):
    model, without, with_it, grow, shrink = CASES[what]
    before, after = pair(model, without, with_it)
    for name in grow:
        assert after.columns[name] > before.columns[name], name
    for name in shrink:
        assert after.columns[name] < before.columns[name], name
    assert after.step_time_s != before.step_time_s or grow or shrink


@pytest.mark.parametrize(("model", "module"), [
    (LLAMA, Module.LAYERNORM), (LLAMA, Module.MLP), (LLAMA, Module.MLP_ACTIVATION), (GPT, Module.MLP),
    (DEEPSEEK, Module.MLA_UP_PROJ), (MIXTRAL, Module.MOE), (MIXTRAL, Module.MOE_ACTIVATION),
    (LLAMA, Module.CORE_ATTENTION), (GPT, Module.LAYERNORM), (DEEPSEEK, Module.MOE),
])  # fmt: skip
@pytest.mark.parametrize("fusion", [UNFUSED, ALL], ids=["unfused", "fused"])
def test_every_recompute_module_trades_time_for_activations(model, module, fusion):
    choice = Recompute(kind=RecomputeKind.SELECTIVE, modules=frozenset({module}))
    before, after = pair(model, {"fusion": fusion}, {"fusion": fusion, "recompute": choice})
    assert after.recompute_s > before.recompute_s == 0
    assert after.stages[0].memory["activations"] < before.stages[0].memory["activations"]


def test_modules_that_a_model_lacks_change_nothing():
    for model, module in ((LLAMA, Module.MOE), (LLAMA, Module.MLA_UP_PROJ), (GPT, Module.MOE_ACTIVATION)):
        choice = Recompute(kind=RecomputeKind.SELECTIVE, modules=frozenset({module}))
        before, after = pair(model, {}, {"recompute": choice})
        assert after.columns == before.columns


def test_full_recompute_repeats_tensor_parallel_traffic():
    before, after = pair(LLAMA, {"tp": 4}, {"tp": 4, "recompute": FULL})
    assert after.exposed_comm_tp_s > before.exposed_comm_tp_s


def test_block_recompute_leaves_the_other_layers_as_they_are():
    """Their activation outputs are still formed again in block-scaled fp8."""
    fp8 = {"precision": "fp8_block", "pp": 2}
    plain, one, all_four, full = (
        step(LLAMA, Strategy(**fp8, **more), 16)
        for more in (
            {}, {"recompute": Recompute.parse("block"), "recompute_layers": 1},
            {"recompute": Recompute.parse("block"), "recompute_layers": 4}, {"recompute": FULL},
        )
    )  # fmt: skip
    added = one.recompute_s - plain.recompute_s
    assert plain.recompute_s > 0
    assert all_four.recompute_s - plain.recompute_s == pytest.approx(4 * added, rel=1e-9)
    seconds = [r.stages[0].backward_s for r in (plain, one, all_four)]
    assert seconds[2] - seconds[0] == pytest.approx(4 * (seconds[1] - seconds[0]), rel=1e-9)
    assert all_four.step_time_s == pytest.approx(full.step_time_s, rel=1e-12)


def test_zero_2_scatters_gradients_for_every_micro_batch():
    """One reduce-scatter for each of m micro-batches, block by block, against the one of stage 1."""
    one, two = pair(LLAMA, {"zero_stage": 1}, {"zero_stage": 2})
    m = WORK.global_batch // 16
    assert two.exposed_comm_dp_s > 0.99 * m * one.exposed_comm_dp_s


def test_zero_3_gathers_every_weight_forward_and_backward_of_every_micro_batch():
    """Two bf16 gathers move the bytes of the one fp32 scatter of stage 2, and start twice for each of ten blocks."""
    two, three = pair(LLAMA, {"zero_stage": 2}, {"zero_stage": 3}, chips=64)  # one micro-batch
    gathers = three.exposed_comm_dp_s - two.exposed_comm_dp_s
    latency = collective(Traffic.REDUCE_SCATTER, h100(64), 64.0, 1.0).latency_s
    assert gathers - two.exposed_comm_dp_s == pytest.approx((LLAMA.num_layers + 2) * latency, rel=1e-9)


def test_dualpipe_pays_for_its_second_copy_in_memory_traffic_and_update():
    one, two = pair(LLAMA, {"pp": 4}, {"pp": 4, "schedule": Schedule.DUALPIPE})
    for item in ("weights", "gradients", "optimizer_states"):
        assert sum(s.memory[item] for s in two.stages) == 2 * sum(s.memory[item] for s in one.stages)
    assert two.optimizer_s > one.optimizer_s
    assert two.exposed_comm_dp_s > one.exposed_comm_dp_s


def test_uneven_stages_wait_for_the_slowest():
    even, uneven = pair(replace(LLAMA, vocab=1024), {"pp": 4}, {"pp": 4, "layout": (1, 1, 5, 1)})
    assert uneven.step_time_s > 1.5 * even.step_time_s


def test_experts_over_more_nodes_wait_longer():
    near, far = pair(DEEPSEEK, {"ep": 8}, {"ep": 16})
    assert far.exposed_comm_ep_s > near.exposed_comm_ep_s


def test_node_limited_routing_saves_traffic_between_nodes():
    free = replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, max_nodes_per_token=None))
    narrow = replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, max_nodes_per_token=1))
    s = Strategy(ep=16)
    assert step(narrow, s, 32).exposed_comm_ep_s < step(free, s, 32).exposed_comm_ep_s


def test_a_longer_sequence_costs_more_a_token():
    near, far = (
        step(LLAMA, Strategy(), 16, replace(WORK, seq=seq, global_batch=64 * SEQ // seq)) for seq in (SEQ, 4 * SEQ)
    )
    assert far.step_time_s > near.step_time_s


def test_capacity_scales_expert_work():
    tight = replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity_factor=2.0))
    a, b = step(MIXTRAL, Strategy(), 16), step(tight, Strategy(), 16)
    assert b.step_time_s > a.step_time_s
    assert b.peak_memory_bytes > a.peak_memory_bytes
