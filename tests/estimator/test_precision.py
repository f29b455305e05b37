"""Recipes: bytes by role, and what low-precision products add to a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.cost.price import price
from estimator.cost.table import Base
from estimator.cost.work import work
from estimator.detail.step import replay_step
from estimator.graph import BlockKind
from estimator.op import Group, OpKind, Phase, Traffic
from estimator.precision import RECIPES, Role, apart, recipe
from estimator.step import evaluate
from estimator.strategy import Strategy
from hardware import catalog
from hardware.dtype import DType
from tests.estimator.cases import DEEPSEEK, LLAMA, MIXTRAL, SEQ, WORK, base, block, compute_ops, named, saved, step

WIDE = replace(LLAMA, hidden=4096, ffn=14336, num_heads=32, num_kv_heads=8, head_dim=128)


def casts(model, kind, precision):
    b = block(model, kind, Strategy(precision=precision))
    return [op.name.removesuffix(".quantize") for op in b.of_phase(Phase.FORWARD) if op.kind is OpKind.QUANTIZE]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_keeps_fp32_master_and_moments(name):
    r = recipe(name)
    assert (r.linear_weight_bytes, r.grad_bytes, r.state_bytes) == (2, 4, 12)
    assert {r.nbytes(role) for role in Role if role is not Role.MASK} == {2, 4}
    assert r.nbytes(Role.MASK) == 1


def test_plain_fp32_is_its_own_master_copy_and_doubles_what_bf16_keeps():
    r = recipe("fp32")
    trained = set(Role) - {Role.MASK, Role.CACHE}  # a cache is of models that answer, whose formats say its width
    assert {r.nbytes(role) for role in trained} == {4}
    assert (r.linear_weight_bytes, r.grad_bytes, r.state_bytes, r.updated_bytes) == (4, 4, 8, 8)
    assert recipe("bf16").updated_bytes == 2  # the master copy is a state; its cast is written
    half, full = saved(LLAMA, BlockKind.DENSE), saved(LLAMA, BlockKind.DENSE, Strategy(precision="fp32"))
    assert half < full <= 2 * half


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


def test_weight_gradients_are_added_up_in_fp32():
    b = block(LLAMA, BlockKind.DENSE)
    m, k, n = SEQ, LLAMA.hidden, LLAMA.ffn
    assert work(named(b, "mlp.up_proj.weight_grad"), b, recipe("bf16")).nbytes == 2 * (m * k + m * n) + 2 * 4 * k * n


def test_latents_are_cast_before_they_are_projected_up():
    assert {"attention.q_b_proj", "attention.kv_b_proj"} <= set(casts(DEEPSEEK, BlockKind.MOE, "fp8"))


BLACKWELL = catalog.cluster("dgx_b200", 64)


def seconds(name, phase, chip=BLACKWELL.chip, kind=OpKind.MATMUL):
    """Of all products of linear layers of a dense layer's phase."""
    b, r = block(WIDE, BlockKind.DENSE, Strategy(precision=name)), recipe(name)
    ops = [op for op in compute_ops(b, phase) if op.kind is kind]
    return sum(float(price(op, b, chip, r).seconds) for op in ops)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_block_formats_of_blackwell_are_refused_elsewhere(name):
    law = f"engine: {name} needs a matrix engine for {name} and bf16; h100-80g-sxm has .*bf16.*; choose another"
    with pytest.raises(ValueError, match=law):
        step(LLAMA, Strategy(precision=name), 16)
    assert evaluate(LLAMA, Strategy(precision=name), BLACKWELL, WORK).step_time_s > 0


def test_transformer_engines_recipes_keep_both_layouts_of_a_weight_and_one_of_an_input():
    """Bytes with their scales: 32 elements to one byte, 16 to one, 128 x 128 and 128 to four."""
    block_scaled = {"mxfp8": (1 + 1 / 32, 1 + 1 / 32), "fp8_1x128": (1 + 4 / 128**2, 1 + 4 / 128)}
    for name, (weight, kept) in block_scaled.items():
        r = recipe(name)
        assert r.linear_weight_bytes == 2 + 2 * weight
        assert r.nbytes(Role.LINEAR_INPUT) == kept
        assert r.nbytes(Role.ATTENTION_OUTPUT) == 2 + kept
        assert (r.nbytes(Role.DISPATCH), r.nbytes(Role.GATE_INPUT), r.state_bytes) == (2, 2, 12)


def test_blockwise_fp8_of_transformer_engine_is_not_deepseeks_recipe():
    te, deepseek = recipe("fp8_1x128"), recipe("fp8_block")
    assert te.gemm is deepseek.gemm is DType.FP8
    assert te.linear_weight_bytes > 3.9 * deepseek.linear_weight_bytes
    assert not te.remake_activation


def test_a_share_of_the_layers_stays_in_bf16_under_nvfp4():
    r = recipe("nvfp4")
    assert r.sensitive == 0.15
    assert r.linear_weight_bytes == 2 + 2 * 0.85 * (0.5 + 1 / 16)
    assert r.nbytes(Role.LINEAR_INPUT) == 0.85 * (0.5 + 1 / 16) + 0.15 * 2
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD):
        b = block(WIDE, BlockKind.DENSE, Strategy(precision="nvfp4"))
        op = next(op for op in b.of_phase(phase) if op.kind is OpKind.MATMUL)
        narrow, wide = (price(op, b, BLACKWELL.chip, one) for one in apart(r))
        mixed = price(op, b, BLACKWELL.chip, r)
        assert mixed.seconds == 0.85 * narrow.seconds + 0.15 * wide.seconds
        assert mixed.work.nbytes == 0.85 * narrow.work.nbytes + 0.15 * wide.work.nbytes
        assert wide.seconds == price(op, b, BLACKWELL.chip, recipe("bf16")).seconds
        assert (narrow.work.dtype, wide.work.dtype) == (DType.NVFP4, DType.BF16)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD])
def test_narrower_formats_multiply_faster(phase):
    bf16, mxfp8, nvfp4 = (seconds(name, phase) for name in ("bf16", "mxfp8", "nvfp4"))
    assert nvfp4 < mxfp8 < bf16
    assert nvfp4 > 0.15 * bf16  # the sensitive layers alone


def test_casts_to_four_bits_read_their_tensor_twice_where_there_is_one():
    b8, b4 = (block(WIDE, BlockKind.DENSE, Strategy(precision=name)) for name in ("mxfp8", "nvfp4"))
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        moved = [
            sum(work(op, b, recipe(name)).nbytes for op in b.of_phase(phase) if op.kind is OpKind.QUANTIZE)
            for b, name in ((b8, "mxfp8"), (b4, "nvfp4"))
        ]
        assert moved[1] == pytest.approx(2 * 0.85 * moved[0], rel=1e-12)


def test_attention_router_and_head_know_nothing_of_four_bits():
    b = block(MIXTRAL, BlockKind.MOE, Strategy(precision="nvfp4"))
    for name in ("router", "attention.core"):
        assert price(named(b, name), b, BLACKWELL.chip, recipe("nvfp4")).work.dtype is DType.BF16
    assert base(LLAMA, BlockKind.HEAD, Base.F_COMP, Strategy(precision="nvfp4"), system=BLACKWELL) == base(
        LLAMA, BlockKind.HEAD, Base.F_COMP, system=BLACKWELL
    )


def test_gradients_in_bf16_take_half_the_room_and_half_the_wire():
    whole, half = (step(LLAMA, Strategy(precision=name), 16) for name in ("bf16", "bf16_grads"))
    assert half.stages[0].memory["gradients"] * 2 == whole.stages[0].memory["gradients"]
    assert half.exposed_comm_dp_s < whole.exposed_comm_dp_s
    b = block(LLAMA, BlockKind.DENSE)
    op = named(b, "mlp.up_proj.weight_grad")
    k, n = LLAMA.hidden, LLAMA.ffn
    assert work(op, b, recipe("bf16")).nbytes - work(op, b, recipe("bf16_grads")).nbytes == 2 * 2 * k * n


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_1x128"])
def test_a_replay_agrees_with_the_estimate(name):
    replayed = replay_step(LLAMA, Strategy(precision=name, pp=2), BLACKWELL, WORK)
    assert replayed.error == pytest.approx(0.0, abs=0.02)  # hops of a small model wait a little differently
    told = max(sum(stage.memory.values()) for stage in replayed.estimate.stages)
    assert max(replayed.peak_memory_bytes) == pytest.approx(told, rel=0.02)  # both peaks at once


@pytest.mark.parametrize(("name", "share"), [("fp8", 0.5), ("mxfp8", 0.515625), ("nvfp4", 0.85 * 0.28125 + 0.15)])
def test_gathers_of_what_linear_layers_read_travel_in_their_format_and_reductions_in_bf16(name, share):
    scattered = Strategy(tp=8, sequence_parallel=True)
    for kind in (BlockKind.DENSE, BlockKind.HEAD):
        half = {op.name: op for op in block(LLAMA, kind, scattered).ops if op.collective}
        narrow = {op.name: op for op in block(LLAMA, kind, replace(scattered, precision=name)).ops if op.collective}
        assert narrow.keys() == half.keys()
        told = {key: float(narrow[key].payload / op.payload) for key, op in half.items() if op.group is Group.TP}
        gathers = {key for key, op in half.items() if op.partners and op.collective is Traffic.ALL_GATHER}
        assert len(gathers) == {BlockKind.DENSE: 6, BlockKind.HEAD: 2}[kind]
        linear = gathers if kind is BlockKind.DENSE else set()  # the head multiplies in bf16
        assert told == {key: pytest.approx(share if key in linear else 1.0) for key in told}


def test_narrow_gathers_take_less_time_and_replicated_activations_are_reduced_as_before():
    scattered, replicated = Strategy(tp=8, sequence_parallel=True), Strategy(tp=8)
    took = {
        (s.sequence_parallel, name): base(WIDE, BlockKind.DENSE, Base.F_TP0, replace(s, precision=name))
        for s in (scattered, replicated) for name in ("bf16", "fp8")
    }  # fmt: skip
    assert took[True, "fp8"] < took[True, "bf16"]
    assert took[False, "fp8"] == took[False, "bf16"]
