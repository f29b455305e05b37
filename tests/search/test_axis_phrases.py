"""Every choice of a strategy shows in the text of a configuration wherever it acts."""

from __future__ import annotations

from dataclasses import fields

import pytest

from estimator.strategy import (
    Chunks,
    ContextParallel,
    CudaGraph,
    Fusion,
    Offload,
    Optimizer,
    RankOrder,
    Recompute,
    Schedule,
)
from results.report import arithmetic, settings
from results.schema import strategy_columns
from search.axes import AXES, OVERLAPS, strategy_of

ACTIVE = {
    "tp": 2, "cp": 2, "pp": 2, "ep": 2, "vpp": 2, "schedule": Schedule.INTERLEAVED, "zero_stage": 3,
    "recompute": Recompute.parse("block"), "recompute_layers": 1, **{f"overlap_{name}": 1 for name in OVERLAPS},
}  # fmt: skip
OTHER = {
    "tp": 4, "cp": 4, "pp": 4, "ep": 4, "etp": 2, "vpp": 4, "micro_batch": 2, "dp_replicate": 2,
    "schedule": Schedule.BREADTH_FIRST, "interleave_group": 4, "sequence_parallel": True,
    "context_parallel": ContextParallel.ULYSSES,
    "rank_order": next(order for order in RankOrder if order is not RankOrder.TP_CP_DP_PP), "precision": "fp8",
    "fusion": frozenset({Fusion.FLASH_ATTENTION}), "recompute": Recompute.parse("full"), "recompute_layers": 2,
    "recompute_per_chunk": (1, 0, 1, 0), "zero_stage": 2, "reshard_after_forward": 0, "prefetch_blocks": 2,
    **{f"offload_{part.name}": 0.5 for part in fields(Offload)}, **{f"overlap_{name}": 0 for name in OVERLAPS},
    "tp_chunks": Chunks.parse("2"), "bucket_bytes": 2**20, "expert_bucket_bytes": 2**20, "layout": (9, 8, 8, 7),
    "optimizer": Optimizer.MUON, "cuda_graph": CudaGraph.FULL, "shared_expert_overlap": True, "redundant_experts": 8,
}  # fmt: skip


def text_of(values):
    row = {name: column[0] for name, column in strategy_columns(strategy_of(values), 8).items()}
    row |= {"num_gpus": 64.0, "num_micro_batches": 16, "system": "dgx_h100"}
    return [arithmetic(row), *settings(row)]


BELOW_3 = {"bucket_bytes": {"zero_stage": 2}, "expert_bucket_bytes": {"zero_stage": 2}}


@pytest.mark.parametrize("axis", [axis.name for axis in AXES])
def test_every_axis_shows_where_it_acts(axis):
    active = ACTIVE | BELOW_3.get(axis, {})
    assert text_of(active | {axis: OTHER[axis]}) != text_of(active)


IDLE = {
    "dp_replicate": {"zero_stage": 0},
    "reshard_after_forward": {"zero_stage": 2},
    "prefetch_blocks": {"overlap_dp": 0},
    "bucket_bytes": {"zero_stage": 3},
    "expert_bucket_bytes": {"zero_stage": 3},
    "overlap_cp": {"context_parallel": ContextParallel.ALL_GATHER},
    "interleave_group": {"schedule": Schedule.BREADTH_FIRST},
}


@pytest.mark.parametrize("axis", IDLE)
def test_an_axis_that_does_not_act_is_not_told(axis):
    idle = ACTIVE | IDLE[axis]
    assert text_of(idle | {axis: OTHER[axis]}) == text_of(idle)


def test_what_lies_on_the_host_and_how_weights_are_gathered_is_told_in_words():
    told = {"offload_states": 1, "offload_activations": 0.25, "reshard_after_forward": 0, "prefetch_blocks": 2}
    phrases = text_of(ACTIVE | told | {"dp_replicate": 4, "interleave_group": 8})
    for phrase in (
        "zero 3 in 4 replicas",
        "weights kept after forward",
        "2 blocks gathered ahead",
        "on the host: 25% of activations, states",
        "turns of 8 micro-batches",
    ):
        assert phrase in phrases
