"""CUDA graphs: which launches are left to the host, what stays outside, and what a captured layer keeps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.cost.table import Again, Base
from estimator.graph import BlockKind
from estimator.op import Component, Phase
from estimator.rules import Case, check
from estimator.step import evaluate
from estimator.strategy import CudaGraph, Overlap, Strategy
from estimator.tables import CAPTURED_HOST_S, FIXED_HOST_S
from tests.estimator.cases import (
    DEEPSEEK,
    LLAMA,
    MIXTRAL,
    WORK,
    again,
    base,
    block,
    compute_ops,
    h100,
    saved,
    step,
)

DENSE, MOE, HEAD = BlockKind.DENSE, BlockKind.MOE, BlockKind.HEAD
SCOPES = list(CudaGraph)
LAUNCH_S = h100(64).chip.launch_s
CAPPED = replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity_factor=1.25))


def graphed(scope, **more):
    return Strategy(cuda_graph=scope, **more)


def launches(model, kind, scope, phase=Phase.FORWARD):
    """Kernels of a phase that the host launches, by the definition: runs of captured kernels count once."""
    flags = [op.captured for op in compute_ops(block(model, kind, graphed(scope)), phase) if not op.rides]
    starts = [flag and not before for before, flag in zip([False, *flags], flags, strict=False)]
    return flags.count(False) + starts.count(True)


def waits(model, kind, scope, prefix="F", seq=64):
    """Seconds of host and device together: launches where the host is slower than the device."""
    columns = (Base[f"{prefix}_COMP"], Base[f"{prefix}_HOST"])
    return sum(base(model, kind, column, graphed(scope), seq=seq) for column in columns)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD])
def test_a_captured_layer_is_one_launch(phase):
    assert launches(LLAMA, DENSE, CudaGraph.LAYER, phase) == 1
    assert launches(LLAMA, DENSE, CudaGraph.NONE, phase) == len(compute_ops(block(LLAMA, DENSE), phase))


def test_the_host_is_waited_for_once_a_graph():
    """So small a layer that the device waits for every launch."""
    small = replace(LLAMA, hidden=128, ffn=128, num_heads=2, num_kv_heads=2)
    for prefix, phase in (("F", Phase.FORWARD), ("B", Phase.BACKWARD), ("W", Phase.WEIGHT_GRAD)):
        for scope in (CudaGraph.NONE, CudaGraph.ATTENTION):
            num = launches(small, DENSE, scope, phase)
            # One captured launch is shorter than its kernels, which then count.
            work = base(small, DENSE, Base[f"{prefix}_COMP"], seq=64)
            assert waits(small, DENSE, scope, prefix) == pytest.approx(max(num * LAUNCH_S, work), rel=1e-12)


def test_attention_is_captured_with_norms_and_residuals_and_nothing_else():
    captured = {op.component for op in block(LLAMA, DENSE, graphed(CudaGraph.ATTENTION)).ops if op.captured}
    assert captured == {Component.ATTENTION, Component.NORM, Component.RESIDUAL}


def test_experts_that_take_any_number_of_rows_stay_outside_a_captured_layer():
    layer = block(MIXTRAL, MOE, graphed(CudaGraph.LAYER))
    outside = [op.name for op in compute_ops(layer, Phase.FORWARD) if not op.captured]
    experts = [f"experts.{name}" for name in ("gate", "up", "act", "down")]
    assert outside == ["dispatch", *experts, "combine"]
    assert launches(MIXTRAL, MOE, CudaGraph.LAYER) == len(outside) + 2


def test_experts_with_a_capacity_are_captured_with_their_layer():
    assert launches(CAPPED, MOE, CudaGraph.LAYER) == 1


def test_shared_experts_are_captured():
    names = {op.name for op in block(DEEPSEEK, MOE, graphed(CudaGraph.LAYER)).ops if op.captured}
    assert {"router", "shared.down_proj"} <= names


def test_only_a_captured_iteration_leaves_the_head_to_no_host():
    small = replace(LLAMA, hidden=128, vocab=1024)  # its products take less than their launches
    waiting = base(small, HEAD, Base.F_HOST, seq=64)
    assert waiting > 0
    for scope in (CudaGraph.ATTENTION, CudaGraph.LAYER):
        assert base(small, HEAD, Base.F_HOST, graphed(scope), seq=64) == waiting
    assert base(small, HEAD, Base.F_HOST, graphed(CudaGraph.FULL), seq=64) == 0


@pytest.mark.parametrize("scope", SCOPES)
def test_graphs_change_no_kernel(scope):
    for column in (Base.F_COMP, Base.B_COMP, Base.W_COMP, Base.OWED_BYTES):
        assert base(LLAMA, DENSE, column, graphed(scope)) == base(LLAMA, DENSE, column)
    assert again(LLAMA, DENSE, Again.FLOPS, graphed(scope)) == again(LLAMA, DENSE, Again.FLOPS)


def test_a_captured_layer_keeps_a_buffer_for_the_gradient_that_arrives():
    for scope in (CudaGraph.ATTENTION, CudaGraph.LAYER):
        assert saved(LLAMA, DENSE, graphed(scope)) - saved(LLAMA, DENSE) == 2 * LLAMA.hidden
    assert saved(LLAMA, DENSE, graphed(CudaGraph.FULL)) == saved(LLAMA, DENSE)
    assert saved(LLAMA, HEAD, graphed(CudaGraph.LAYER)) == saved(LLAMA, HEAD)


def test_a_captured_iteration_launches_the_optimizer_too():
    assert step(LLAMA, graphed(CudaGraph.FULL), 16).fixed_host_s == CAPTURED_HOST_S
    assert step(LLAMA, graphed(CudaGraph.LAYER), 16).fixed_host_s == FIXED_HOST_S > CAPTURED_HOST_S


def test_an_iteration_with_open_shapes_cannot_be_captured():
    with pytest.raises(ValueError, match="cuda_graph: .*where tokens are routed; use cuda_graph: layer"):
        evaluate(MIXTRAL, graphed(CudaGraph.FULL), h100(16), WORK)
    for model, scope in ((CAPPED, CudaGraph.FULL), (LLAMA, CudaGraph.FULL), (MIXTRAL, CudaGraph.LAYER)):
        assert not check(Case.of(model, graphed(scope), h100(16), WORK)).any()


def test_hidden_rings_are_a_size_of_a_batch():
    """Rows of one batch may differ in whether the ring runs beside attention: each is priced as by itself."""
    flags = np.array([0.0, 1.0, 1.0, 0.0])
    batch = step(LLAMA, Strategy(cp=np.array([4.0, 4.0, 1.0, 1.0]), overlap=Overlap(cp=flags)), 16)
    for i, (cp, flag) in enumerate(zip((4, 4, 1, 1), (0, 1, 1, 0), strict=True)):
        one = step(LLAMA, Strategy(cp=cp, overlap=Overlap(cp=flag)), 16)
        assert float(batch.columns["step_time_s"][i]) == one.step_time_s
    assert batch.columns["step_time_s"][2] == batch.columns["step_time_s"][3]
