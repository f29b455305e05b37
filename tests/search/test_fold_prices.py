"""Folding held against prices: what is told to have no effect prices alike to the bit, and what stays does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.rules import Case, check
from estimator.step import evaluate
from estimator.strategy import (
    Chunks,
    ContextParallel,
    CudaGraph,
    Fusion,
    Module,
    Optimizer,
    RankOrder,
    Recompute,
    RecomputeKind,
    Schedule,
    Strategy,
)
from search.axes import axis_values, strategy_of
from search.fold import folded
from search.space import parse_space

MODELS = ("llama3_8b", "gpt3_175b", "mixtral_8x7b", "deepseek_v3", "gpt_oss_20b", "nemotron_3_nano")
CLUSTERS = ("dgx_h100", "tpu_v5p_pod")
USUAL = Strategy().fusion
OTHERS = {
    "etp": [2], "dp_replicate": [2], "interleave_group": [8], "sequence_parallel": [True, False],
    "context_parallel": [*ContextParallel], "rank_order": [*RankOrder], "precision": ["fp16", "fp8"],
    "fusion": [USUAL ^ {kernel} for kernel in Fusion],
    "recompute": [Recompute(kind=RecomputeKind.SELECTIVE, modules=frozenset({module})) for module in Module],
    "zero_stage": [0, 1, 2, 3], "reshard_after_forward": [0], "prefetch_blocks": [0, 2],
    "offload_activations": [0.5], "offload_parameters": [0.5], "offload_gradients": [0.5], "offload_states": [0.5],
    "overlap_tp": [0, 1], "overlap_cp": [0, 1], "overlap_ep": [0, 1], "overlap_pp": [0, 1], "overlap_dp": [0, 1],
    "tp_chunks": [Chunks.parse("2")], "bucket_bytes": [25_000_000], "expert_bucket_bytes": [25_000_000],
    "optimizer": [*Optimizer], "cuda_graph": [*CudaGraph], "shared_expert_overlap": [True], "redundant_experts": [8],
}  # fmt: skip
"""Of each axis values that a strategy could have instead. Degrees, micro-batch, schedule and layout always matter."""
SPLIT = {"tp": 2, "sequence_parallel": True, "overlap_tp": 1, "overlap_dp": 1}
STRATEGIES = {
    "alone": {},
    "gathered": {**SPLIT, "cp": 2, "zero_stage": 3, "ep": 8, "overlap_ep": 1},
    "all keys at once": {**SPLIT, "cp": 2, "context_parallel": ContextParallel.ALL_GATHER, "zero_stage": 2},
    "pipeline": {"pp": 4, "ep": 8, "zero_stage": 1, "overlap_pp": 1},
    "one replica": {"tp": 8, "pp": 8, "etp": 8, "sequence_parallel": True, "overlap_dp": 1, "zero_stage": 1},
    "interleaved": {"pp": 4, "vpp": 2, "schedule": Schedule.INTERLEAVED, "ep": 8, "overlap_dp": 1, "zero_stage": 1},
}  # fmt: skip


def priced(space, strategy):
    """Every column and every stage; None where a rule refuses it."""
    (system,) = space.systems
    if check(Case.of(space.model, strategy, system, space.workload))[0]:
        return None
    result = evaluate(space.model, strategy, system, space.workload)
    stages = [(s.memory, s.forward_s, s.backward_s) for s in result.stages]
    return {name: np.asarray(values).tolist() for name, values in result.columns.items()}, stages


def around(model, cluster, values):
    """The space of one strategy."""
    text = (
        f"name: s\nmodel: {model}\nsystem: {{cluster: {cluster}, num_chips: 64}}\nworkload: {{seq: 4096, "
        "global_batch: 256}\nstrategy: {tp: 1}\n"
    )
    space = parse_space(text)
    if space.model.moe is None:
        values = {**values, "ep": 1, "etp": 1, "overlap_ep": 0}
    return replace(space, axes={name: (value,) for name, value in axis_values(strategy_of(values)).items()})


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
def test_values_that_price_alike_on_a_model_are_folded_with_a_notice_and_no_others(model, cluster):
    compared = 0
    for values in STRATEGIES.values():
        space = around(model, cluster, values)
        own = {name: value for name, (value,) in space.axes.items()}
        here = priced(space, strategy_of(own))
        assert here is not None
        for name, others in OTHERS.items():
            for other in others:
                if other == own[name]:
                    continue
                there = priced(space, strategy_of({**own, name: other}))
                opened = replace(space, axes={**space.axes, name: (own[name], other)})
                left, told = folded(opened)
                is_folded = len(left.axes[name]) == 1
                assert is_folded is any(line.startswith(f"{name}: ") for line in told), (name, told)
                if there is not None:
                    assert (here == there) is is_folded, (values, name, own[name], other, told)
                    compared += 1
    assert compared > 240
