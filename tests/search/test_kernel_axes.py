"""Axes that decide which kernels run: the sweep's front over them is that of a loop over evaluate."""

from __future__ import annotations

import pytest

from tests.search.naive import candidates, front, space_of
from tests.search.small import swept

FUSED = "[flash_attention, fused_norm, fused_activation, fused_qkv, fused_gate_up, fused_residual_norm]"
SPACES = {
    "optimizers": space_of(
        "tp: [1, 2], pp: [1, 2], zero_stage: [0, 1, 3], optimizer: [adam, adam_8bit, sgd, muon], overlap: {dp: [0, 1]}"
    ),
    "optimizers of experts": space_of(
        "ep: [1, 4], pp: [1, 2], zero_stage: [0, 1], optimizer: [muon, adam]", model="mixtral", chips="32", seq=2048
    ),
    "formats": space_of(
        "tp: [1, 2], pp: [1, 2], precision: [bf16, bf16_grads, mxfp8, nvfp4, fp8_1x128]", cluster="dgx_b200"
    ),
    "fusion and graphs": space_of(
        f"tp: [1, 2], micro_batch: [1, 2], fusion: [[flash_attention], {FUSED}], cuda_graph: [none, layer, full], "
        "zero_stage: [0, 3]"
    ),
    "graphs of experts": space_of(
        "ep: [4, 8], pp: [2, 4], cuda_graph: [none, attention, layer, full], zero_stage: 1", model="mixtral", chips="32"
    ),
    "shared experts": space_of(
        "ep: [1, 64], pp: [1, 8], shared_expert_overlap: [false, true], zero_stage: [1, 3], recompute: [none, full], "
        "overlap: {ep: [0, 1]}",
        model="deepseek", chips="1024", batch=1024,
    ),
    "rings": space_of("cp: [2, 4], overlap: {cp: [1, 0]}, zero_stage: [0, 3], recompute: [none, full]", seq=16384),
}  # fmt: skip


@pytest.mark.parametrize("name", SPACES)
def test_the_front_is_that_of_a_loop_over_evaluate(name):
    space = SPACES[name]
    wanted = front(space, candidates(space))
    assert wanted
    assert swept(space) == wanted
    assert swept(space, prune=False, reverse=True) == wanted
