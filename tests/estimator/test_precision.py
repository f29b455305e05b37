"""Recipes: bytes by role, and what low-precision products add to a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.cost.table import Base
from estimator.cost.work import work
from estimator.graph import BlockKind
from estimator.op import OpKind, Phase
from estimator.precision import RECIPES, Role, recipe
from estimator.strategy import Strategy
from hardware.dtype import DType
from tests.estimator.cases import DEEPSEEK, LLAMA, MIXTRAL, SEQ, base, block, named, saved


def casts(model, kind, precision):
    b = block(model, kind, Strategy(precision=precision))
    return [op.name.removesuffix(".quantize") for op in b.of_phase(Phase.FORWARD) if op.kind is OpKind.QUANTIZE]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_keeps_fp32_master_and_moments(name):
    r = recipe(name)
    assert (r.linear_weight_bytes, r.grad_bytes, r.state_bytes) == (2, 4, 12)
    assert {r.nbytes(role) for role in Role} == {2, 4}


def test_fp8_keeps_linear_inputs_in_one_byte_and_attention_outputs_in_both_formats():
    r = recipe("fp8")
    assert (r.nbytes(Role.LINEAR_INPUT), r.nbytes(Role.ATTENTION_OUTPUT), r.nbytes(Role.DISPATCH)) == (1, 3, 2)


def test_block_scaled_fp8_dispatches_in_one_byte_and_combines_in_two():
    """DeepSeek-V3, arXiv:2412.19437, section 3.3.3."""
    r = recipe("fp8_block")
    assert (r.nbytes(Role.DISPATCH), r.nbytes(Role.COMBINE), r.nbytes(Role.ATTENTION_OUTPUT)) == (1, 2, 1.5)
    assert r.state_bytes == 4 + 2 * 2


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_role_has_a_width(name):
    r = recipe(name)
    assert set(r.widths) == set(Role)
    assert replace(r, activation=DType.FP32).nbytes(Role.ACTIVATION) == 4


def test_an_unknown_recipe_is_an_error():
    with pytest.raises(ValueError, match="precision must be one of .*bf16.* but got 'int4'"):
        recipe("int4")


def test_half_precision_casts_nothing():
    assert casts(LLAMA, BlockKind.DENSE, "bf16") == []


def test_fp8_casts_every_distinct_input_of_a_linear_layer_once():
    """q, k, v share an input, gate and up share one; the projection's and the down-projection's have their own."""
    want = ["attention.q_proj", "attention.o_proj", "mlp.gate_proj", "mlp.down_proj"]
    assert casts(LLAMA, BlockKind.DENSE, "fp8") == want


def test_router_and_head_stay_in_half_precision():
    b = block(MIXTRAL, BlockKind.MOE, Strategy(precision="fp8"))
    assert work(named(b, "router"), b, recipe("fp8")).dtype is DType.BF16
    assert work(named(b, "experts.gate"), b, recipe("fp8")).dtype is DType.FP8
    assert casts(LLAMA, BlockKind.HEAD, "fp8") == []


def test_rows_that_travel_in_fp8_are_not_cast_again():
    assert "experts.gate" in casts(MIXTRAL, BlockKind.MOE, "fp8")
    assert "experts.gate" not in casts(MIXTRAL, BlockKind.MOE, "fp8_block")


def test_casts_are_differentiated_like_other_ops():
    b = block(LLAMA, BlockKind.DENSE, Strategy(precision="fp8"))
    assert sum(op.kind is OpKind.QUANTIZE for op in b.of_phase(Phase.BACKWARD)) == 4


def test_fp8_halves_what_linear_layers_keep():
    """Inputs of q, k, v; gate and up; down at one byte, attention's output at two and one."""
    h, f, a, d = LLAMA.hidden, LLAMA.ffn, LLAMA.num_heads, LLAMA.head_dim
    difference = saved(LLAMA, BlockKind.DENSE) - saved(LLAMA, BlockKind.DENSE, Strategy(precision="fp8"))
    assert difference == 2 * h + f - a * d


def test_block_scaled_fp8_forms_activation_outputs_again():
    """Gate and up at one byte each and no output at all, against three of two bytes."""
    b = block(LLAMA, BlockKind.DENSE, Strategy(precision="fp8_block"))
    assert [op.name for op in b.of_phase(Phase.RECOMPUTE)] == ["mlp.act"]
    h, f, a, d = LLAMA.hidden, LLAMA.ffn, LLAMA.num_heads, LLAMA.head_dim
    difference = saved(LLAMA, BlockKind.DENSE) - saved(LLAMA, BlockKind.DENSE, Strategy(precision="fp8_block"))
    assert difference == 2 * h + 4 * f + a * d / 2


def test_low_precision_weights_count_working_copies_of_linear_layers_only():
    params = base(LLAMA, BlockKind.DENSE, Base.DENSE_PARAMS)
    norms = 2 * LLAMA.hidden
    assert base(LLAMA, BlockKind.DENSE, Base.DENSE_WEIGHT_BYTES) == 2 * params
    fp8 = base(LLAMA, BlockKind.DENSE, Base.DENSE_WEIGHT_BYTES, Strategy(precision="fp8"))
    assert fp8 == 4 * (params - norms) + 2 * norms
    head = base(LLAMA, BlockKind.HEAD, Base.DENSE_WEIGHT_BYTES, Strategy(precision="fp8"))
    assert head == 2 * (LLAMA.vocab + 1) * LLAMA.hidden


def test_fp8_products_read_half_the_operand_bytes():
    r8, r16 = recipe("fp8"), recipe("bf16")
    b8, b16 = block(LLAMA, BlockKind.DENSE, Strategy(precision="fp8")), block(LLAMA, BlockKind.DENSE)
    m, k, n = SEQ, LLAMA.hidden, LLAMA.ffn
    assert work(named(b16, "mlp.up_proj"), b16, r16).nbytes == 2 * (m * k + k * n + m * n)
    assert work(named(b8, "mlp.up_proj"), b8, r8).nbytes == m * k + k * n + 2 * m * n


def test_weight_gradients_leave_in_fp32():
    b = block(LLAMA, BlockKind.DENSE)
    m, k, n = SEQ, LLAMA.hidden, LLAMA.ffn
    assert work(named(b, "mlp.up_proj.weight_grad"), b, recipe("bf16")).nbytes == 2 * (m * k + m * n) + 4 * k * n


def test_latents_are_cast_before_they_are_projected_up():
    assert {"attention.q_b_proj", "attention.kv_b_proj"} <= set(casts(DEEPSEEK, BlockKind.MOE, "fp8"))
