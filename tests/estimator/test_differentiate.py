"""Backward ops follow from forward ops."""

from __future__ import annotations

import pytest

from estimator.cost.work import work
from estimator.graph import BlockKind
from estimator.op import OpKind, Phase, Traffic
from estimator.passes.differentiate import DUALS
from estimator.precision import recipe
from estimator.strategy import Strategy
from tests.estimator.cases import DEEPSEEK, GPT, LLAMA, MIXTRAL, TINY, UNFUSED, block, compute_ops, lowered, named

BF16 = recipe("bf16")
GEMMS = {OpKind.MATMUL, OpKind.GROUPED_MATMUL}


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_every_matrix_product_has_two_gradients_of_its_own_size(model):
    for b in lowered(model, Strategy(tp=2, sequence_parallel=True)).blocks.values():
        for op in compute_ops(b, Phase.FORWARD):
            if op.kind in GEMMS:
                flops = work(op, b, BF16).flops
                assert work(named(b, f"{op.name}.grad"), b, BF16).flops == flops
                assert work(named(b, f"{op.name}.weight_grad"), b, BF16).flops == flops


def test_gradients_of_a_matrix_product_are_its_transposed_shapes():
    b = block(LLAMA, BlockKind.DENSE)
    m, k, n = (d.size for d in named(b, "mlp.gate_proj").dims)
    assert [d.size for d in named(b, "mlp.gate_proj.grad").dims] == [m, n, k]
    assert [d.size for d in named(b, "mlp.gate_proj.weight_grad").dims] == [k, m, n]


def test_gradients_of_grouped_products_keep_their_groups():
    b = block(MIXTRAL, BlockKind.MOE)
    groups, m, k, n = work(named(b, "experts.gate"), b, BF16).gemm
    assert work(named(b, "experts.gate.grad"), b, BF16).gemm == (groups, m, n, k)
    assert work(named(b, "experts.gate.weight_grad"), b, BF16).gemm == (groups, k, m, n)


def test_flash_attention_costs_two_and_a_half_forwards_in_backward():
    b = block(LLAMA, BlockKind.DENSE)
    forward, back = (work(named(b, name), b, BF16).flops for name in ("attention.core", "attention.core.grad"))
    assert back == 2.5 * forward


def test_unfused_attention_costs_two_forwards_in_backward():
    b = block(LLAMA, BlockKind.DENSE, Strategy(fusion=UNFUSED))
    for name in ("attention.scores", "attention.context"):
        forward, back = (work(named(b, n), b, BF16).flops for n in (name, f"{name}.grad"))
        assert back == 2 * forward


@pytest.mark.parametrize(("model", "name", "more"), [
    (LLAMA, "input_norm", 3 / 2), (LLAMA, "mlp.act", 5 / 3), (GPT, "mlp.act", 3 / 2), (LLAMA, "attention.residual", 1),
    (MIXTRAL, "dispatch", 1), (LLAMA, "attention.q_rope", 1),
])  # fmt: skip
def test_backward_of_a_streaming_op_moves_the_tensors_that_its_gradient_needs(model, name, more):
    b = block(model, BlockKind.MOE if model.moe else BlockKind.DENSE)
    forward, back = (work(named(b, n), b, BF16).nbytes for n in (name, f"{name}.grad"))
    assert back == pytest.approx(more * forward, rel=1e-15)  # 5/3 rounds


def test_gather_and_scatter_are_duals():
    assert DUALS[Traffic.ALL_GATHER][0] is Traffic.REDUCE_SCATTER
    assert DUALS[Traffic.REDUCE_SCATTER] == (Traffic.ALL_GATHER,)
    assert DUALS[Traffic.COPY] == (Traffic.ALL_REDUCE,)
    assert DUALS[Traffic.ALL_REDUCE] == ()
    assert DUALS[Traffic.ALL_TO_ALL] == (Traffic.ALL_TO_ALL,)
    assert DUALS.keys() == set(Traffic)


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_backward_runs_in_reverse_order(model):
    for b in lowered(model).blocks.values():
        forward = [op.name for op in compute_ops(b, Phase.FORWARD)]
        back = [op.name.removesuffix(".grad") for op in compute_ops(b, Phase.BACKWARD)]
        assert back == forward[::-1]


def test_only_weighted_products_have_weight_gradients_apart():
    b = block(DEEPSEEK, BlockKind.MOE)
    apart = {op.name.removesuffix(".weight_grad") for op in b.of_phase(Phase.WEIGHT_GRAD)}
    assert apart == {op.name for op in compute_ops(b, Phase.FORWARD) if op.kind in GEMMS}
