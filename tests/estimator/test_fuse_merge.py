"""Kernels that stand for several ops of one kind, or carry a small op along: what they read, write, launch and keep."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from estimator.build import build
from estimator.cost.price import price
from estimator.cost.table import Again, Base
from estimator.cost.work import work
from estimator.graph import BlockKind
from estimator.op import Component, OpKind, Phase
from estimator.passes.fuse import fuse
from estimator.precision import recipe
from estimator.strategy import DEFAULT_FUSION, Fusion, Recompute, Strategy
from tests.estimator.cases import (
    DEEPSEEK,
    GPT,
    LLAMA,
    MIXTRAL,
    SEQ,
    TINY,
    again,
    base,
    block,
    compute_ops,
    h100,
    lowered,
    named,
    saved,
)

BF16 = recipe("bf16")
DENSE, MOE = BlockKind.DENSE, BlockKind.MOE
QKV = "attention.q_proj+k_proj+v_proj"


def plus(*fusions, **more):
    return Strategy(fusion=DEFAULT_FUSION | frozenset(fusions), **more)


def nbytes(b, *phases, component=None):
    ops = (op for op in compute_ops(b, *phases) if component in {None, op.component})
    return sum(float(work(op, b, BF16).nbytes) for op in ops)


def kernels(b, *phases):
    return sum(not op.rides for op in compute_ops(b, *phases))


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_rules_commute(model):
    graph = build(model, SEQ)
    for one, other in itertools.combinations(Fusion, 2):
        rest = fuse(graph, frozenset(Fusion) - {one, other})
        for start in (graph, rest):
            ahead = fuse(fuse(start, frozenset({one})), frozenset({other}))
            assert ahead.blocks == fuse(fuse(start, frozenset({other})), frozenset({one})).blocks, (one, other)


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_any_order_of_all_rules_gives_the_same_graph(model):
    graph = build(model, SEQ)
    want = fuse(graph, frozenset(Fusion)).blocks
    rng = random.Random(0)
    for _ in range(20):
        shuffled = graph
        for name in rng.sample(list(Fusion), len(Fusion)):
            shuffled = fuse(shuffled, frozenset({name}))
        assert shuffled.blocks == want


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
@pytest.mark.parametrize("fusion", list(Fusion))
def test_fusion_changes_neither_parameters_nor_products(model, fusion):
    plain, fused = (lowered(model, s) for s in (Strategy(fusion=DEFAULT_FUSION - {fusion}), plus(fusion)))
    assert plain.num_parameters() == fused.num_parameters()
    if fusion is not Fusion.FLASH_ATTENTION:
        for kind in plain.kinds:
            products = [
                sum(work(op, g.blocks[kind], BF16).flops for op in compute_ops(g.blocks[kind], *Phase)
                    if op.kind in {OpKind.MATMUL, OpKind.GROUPED_MATMUL})
                for g in (plain, fused)
            ]  # fmt: skip
            assert products[0] == products[1]


def test_one_projection_of_q_k_and_v_reads_its_input_once():
    plain, fused = block(LLAMA, DENSE), block(LLAMA, DENSE, plus(Fusion.FUSED_QKV))
    x = 2 * SEQ * LLAMA.hidden
    for phase, saved_reads in ((Phase.FORWARD, 2), (Phase.BACKWARD, 2), (Phase.WEIGHT_GRAD, 2)):
        assert nbytes(plain, phase) - nbytes(fused, phase) == saved_reads * x
        assert kernels(plain, phase) - kernels(fused, phase) == 2
    heads = LLAMA.num_heads + 2 * LLAMA.num_kv_heads
    assert [d.size for d in named(fused, QKV).dims] == [SEQ, LLAMA.hidden, heads * LLAMA.head_dim]


def test_one_buffer_of_q_k_and_v_stays_whole_for_v():
    a, g, d = LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim
    assert saved(LLAMA, DENSE, plus(Fusion.FUSED_QKV)) - saved(LLAMA, DENSE) == 2 * (a + g) * d


def test_the_gather_of_a_split_projection_runs_beside_the_one_gemm():
    split = {"tp": 4, "sequence_parallel": True}
    fused = block(LLAMA, DENSE, plus(Fusion.FUSED_QKV, Fusion.FUSED_GATE_UP, **split))
    names = {op.name for op in fused.ops}
    partners = [name for op in fused.ops for name in op.partners]
    assert set(partners) <= names
    assert QKV in partners
    heads = (LLAMA.num_heads + 2 * LLAMA.num_kv_heads) / 4
    assert named(fused, QKV).dims[2].size == heads * LLAMA.head_dim


@pytest.mark.parametrize(("model", "kind", "pairs"), [(LLAMA, DENSE, 1), (MIXTRAL, MOE, 1), (DEEPSEEK, MOE, 2)])
def test_gate_and_up_become_one_product_of_experts_as_well(model, kind, pairs):
    plain, fused = block(model, kind), block(model, kind, plus(Fusion.FUSED_GATE_UP))
    assert kernels(plain, Phase.FORWARD) - kernels(fused, Phase.FORWARD) == pairs
    assert saved(model, kind, plus(Fusion.FUSED_GATE_UP)) == saved(model, kind)


def test_down_projections_of_latent_attention_become_one_product():
    plain, fused = block(DEEPSEEK, DENSE), block(DEEPSEEK, DENSE, plus(Fusion.FUSED_MLA_PROJECTIONS))
    assert nbytes(plain, Phase.FORWARD) - nbytes(fused, Phase.FORWARD) == 2 * SEQ * DEEPSEEK.hidden
    mla = DEEPSEEK.mla
    width = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
    assert named(fused, "attention.q_a_proj+kv_a_proj").dims[2].size == width


def test_split_backwards_owe_every_gradient_of_a_merged_product():
    for fusion in (Fusion.FUSED_QKV, Fusion.FUSED_GATE_UP):
        assert base(LLAMA, DENSE, Base.OWED_BYTES, plus(fusion)) == base(LLAMA, DENSE, Base.OWED_BYTES)


def test_rotations_of_q_and_k_take_one_kernel():
    plain, fused = block(LLAMA, DENSE), block(LLAMA, DENSE, plus(Fusion.FUSED_ROPE))
    assert kernels(plain, Phase.FORWARD) - kernels(fused, Phase.FORWARD) == 1
    assert nbytes(plain, *Phase) == nbytes(fused, *Phase)


def test_latent_keys_and_values_are_read_once_by_their_copies():
    plain, fused = block(DEEPSEEK, DENSE), block(DEEPSEEK, DENSE, plus(Fusion.FUSED_ROPE))
    once = 2 * SEQ * DEEPSEEK.num_heads * (DEEPSEEK.mla.qk_nope_head_dim + DEEPSEEK.mla.v_head_dim)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert nbytes(plain, phase) - nbytes(fused, phase) == once


def test_a_norm_inside_its_addition_reads_the_sum_no_more():
    """Forward reads two and writes two tensors instead of five; backward moves four instead of six."""
    plain, fused = block(LLAMA, DENSE), block(LLAMA, DENSE, plus(Fusion.FUSED_RESIDUAL_NORM))
    x = 2 * SEQ * LLAMA.hidden
    assert nbytes(plain, Phase.FORWARD) - nbytes(fused, Phase.FORWARD) == x
    assert nbytes(plain, Phase.BACKWARD) - nbytes(fused, Phase.BACKWARD) == 2 * x
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert kernels(plain, phase) - kernels(fused, phase) == 1
    assert saved(LLAMA, DENSE, plus(Fusion.FUSED_RESIDUAL_NORM)) == saved(LLAMA, DENSE)


def test_a_norm_that_runs_again_without_its_addition_is_a_kernel_of_its_own():
    alone = Recompute.parse("layernorm")
    for model in (LLAMA, GPT):
        fused = plus(Fusion.FUSED_RESIDUAL_NORM)
        again_s = (again(model, DENSE, Again.R_COMP, s, alone) for s in (Strategy(), fused))
        assert next(again_s) == next(again_s)
    whole = Recompute.parse("full")
    assert again(LLAMA, DENSE, Again.R_COMP, fused, whole) < again(LLAMA, DENSE, Again.R_COMP, Strategy(), whole)


@pytest.mark.parametrize("model", [MIXTRAL, DEEPSEEK], ids=lambda m: m.name)
def test_rows_that_come_back_add_up_in_one_kernel(model):
    """Their sum is neither written nor read before what it is added to; in backward the addition is nothing at all."""
    plain, fused = block(model, MOE), block(model, MOE, plus(Fusion.FUSED_PERMUTE))
    x = 2 * SEQ * model.hidden
    assert nbytes(plain, Phase.FORWARD) - nbytes(fused, Phase.FORWARD) == 2 * x
    assert nbytes(plain, Phase.BACKWARD) - nbytes(fused, Phase.BACKWARD) == 3 * x


def test_a_fused_router_streams_its_logits_once():
    plain, fused = (block(MIXTRAL, MOE, s) for s in (Strategy(), plus(Fusion.FUSED_ROUTER)))
    router = Component.ROUTER
    moved = [sum(work(op, b, BF16).nbytes for op in b.ops if op.kind is OpKind.TOPK) for b in (plain, fused)]
    assert moved[0] == 3 * moved[1]
    assert kernels(plain, Phase.FORWARD) == kernels(fused, Phase.FORWARD)
    assert nbytes(plain, *Phase) - nbytes(fused, *Phase) == 2 * moved[1]
    assert nbytes(plain, *Phase, component=router) > nbytes(fused, *Phase, component=router)


@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
def test_casts_inside_norms_and_activations_cost_nothing(name):
    r, chip = recipe(name), h100(8).chip
    plain, fused = (
        block(LLAMA, DENSE, s) for s in (Strategy(precision=name), plus(Fusion.FUSED_QUANTIZE, precision=name))
    )
    casts = [op for op in fused.of_phase(Phase.FORWARD) if op.kind is OpKind.QUANTIZE and op.rides]
    assert {op.inputs[0] for op in casts} == {"input_norm.out", "post_attention_norm.out", "mlp.act.out"}
    for op in casts:
        assert price(op, fused, chip, r).seconds == 0.0
        assert price(named(plain, op.name), plain, chip, r).seconds > chip.kernel_s
    back = [sum(float(price(op, b, chip, r).seconds) for op in compute_ops(b, Phase.BACKWARD)) for b in (plain, fused)]
    assert back[0] == back[1]


def test_there_is_nothing_to_cast_in_bf16():
    assert block(LLAMA, DENSE, plus(Fusion.FUSED_QUANTIZE)).ops == block(LLAMA, DENSE).ops


@pytest.mark.parametrize(("model", "fusions"), [
    (LLAMA, {Fusion.FUSED_ROUTER, Fusion.FUSED_PERMUTE, Fusion.FUSED_MLA_PROJECTIONS}),
    (GPT, {Fusion.FUSED_ROUTER, Fusion.FUSED_PERMUTE, Fusion.FUSED_MLA_PROJECTIONS, Fusion.FUSED_ROPE,
           Fusion.FUSED_GATE_UP}),
    (DEEPSEEK, {Fusion.FUSED_QKV}),
])  # fmt: skip
def test_what_a_model_lacks_is_not_fused(model, fusions):
    for fusion in fusions:
        assert lowered(model, plus(fusion)).blocks == lowered(model).blocks


def test_more_small_kernels_wait_for_the_host():
    """A model so narrow that the device waits for launches: two fewer of them, two launches less to wait for."""
    tiny = replace(LLAMA, hidden=128, ffn=128, num_heads=2, num_kv_heads=2)
    waits = [base(tiny, DENSE, Base.F_HOST, s, seq=128) for s in (Strategy(), plus(Fusion.FUSED_QKV))]
    works = [base(tiny, DENSE, Base.F_COMP, s, seq=128) for s in (Strategy(), plus(Fusion.FUSED_QKV))]
    assert waits[0] > 0
    assert waits[0] + works[0] - waits[1] - works[1] == pytest.approx(2 * h100(64).chip.launch_s, rel=1e-9)
