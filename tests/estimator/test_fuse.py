"""Fused kernels do the same arithmetic and keep less."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from estimator.cost.table import Again
from estimator.cost.work import work
from estimator.graph import BlockKind
from estimator.op import OpKind, Phase
from estimator.precision import Role, recipe
from estimator.strategy import Fusion, Strategy
from tests.estimator.cases import DEEPSEEK, GPT, LLAMA, MIXTRAL, SEQ, UNFUSED, again, block, lowered, named, saved

BF16 = recipe("bf16")
LOSS_CHUNKS = 16  # of rules.yaml
FOUR = (Fusion.FLASH_ATTENTION, Fusion.FUSED_NORM, Fusion.FUSED_ACTIVATION, Fusion.FUSED_LOSS)


def with_fusion(*fusions):
    return Strategy(fusion=frozenset(fusions))


def test_flash_attention_replaces_three_ops_by_one_that_skips_the_masked_half():
    plain, fused = (block(LLAMA, BlockKind.DENSE, s) for s in (with_fusion(), with_fusion(Fusion.FLASH_ATTENTION)))
    core = [op for op in plain.of_phase(Phase.FORWARD) if op.kind in {OpKind.SCORES, OpKind.SOFTMAX, OpKind.CONTEXT}]
    assert len(core) == 3
    assert not any(op.kind in {OpKind.SCORES, OpKind.SOFTMAX, OpKind.CONTEXT} for op in fused.ops)
    square = sum(work(op, plain, BF16).flops for op in core if op.kind is not OpKind.SOFTMAX)
    assert work(named(fused, "attention.core"), fused, BF16).flops == square / 2


def test_flash_attention_never_touches_the_square():
    fused = block(LLAMA, BlockKind.DENSE)
    op = named(fused, "attention.core")
    a, g, d = LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim
    assert work(op, fused, BF16).nbytes == SEQ * (2 * a + 2 * g) * d * 2
    assert fused.tensors["attention.lse"].elements == SEQ * a


def test_a_fused_norm_reads_once_and_keeps_no_fp32_copy():
    plain, fused = (block(LLAMA, BlockKind.DENSE, s) for s in (with_fusion(), with_fusion(Fusion.FUSED_NORM)))
    a, b = (work(named(x, "input_norm"), x, BF16).nbytes for x in (plain, fused))
    assert a == 3 * b
    roles = {s.role for s in named(fused, "input_norm").saves if s.tensor == "x"}
    assert roles == {Role.ACTIVATION}


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, DEEPSEEK], ids=lambda m: m.name)
def test_a_fused_gated_activation_drops_one_tensor_of_its_width(model):
    kind = BlockKind.DENSE if model.moe is None else BlockKind.MOE
    width = model.ffn if model.moe is None else model.moe.ffn * model.moe.top_k + model.moe.shared_ffn
    before, after = saved(model, kind, with_fusion()), saved(model, kind, with_fusion(Fusion.FUSED_ACTIVATION))
    assert before - after == 2 * width


def test_a_fused_loss_keeps_no_logits():
    before, after = (
        saved(LLAMA, BlockKind.HEAD, with_fusion()),
        saved(LLAMA, BlockKind.HEAD, with_fusion(Fusion.FUSED_LOSS)),
    )
    assert before - after == 4 * LLAMA.vocab


def test_a_fused_loss_works_on_one_chunk_of_logits_at_a_time():
    model = replace(LLAMA, vocab=64 * LLAMA.hidden)  # wide enough for a chunk to be the widest op still
    plain, fused = (
        again(model, BlockKind.HEAD, Again.LIVE_BYTES, s) / SEQ for s in (with_fusion(), with_fusion(Fusion.FUSED_LOSS))
    )
    assert plain == 2 * model.hidden + 2 * model.vocab
    assert fused == 2 * model.hidden + 2 * model.vocab / LOSS_CHUNKS


def test_a_fused_loss_does_the_same_matrix_products():
    for op in ("lm_head", "lm_head.grad", "lm_head.weight_grad"):
        assert (
            named(block(LLAMA, BlockKind.HEAD, with_fusion(Fusion.FUSED_LOSS)), op).dims
            == named(block(LLAMA, BlockKind.HEAD), op).dims
        )


@pytest.mark.parametrize("fusion", [Fusion.FUSED_ACTIVATION])
def test_a_gelu_has_nothing_to_fuse(fusion):
    assert block(GPT, BlockKind.DENSE, with_fusion(fusion)).ops == block(GPT, BlockKind.DENSE, with_fusion()).ops


@pytest.mark.parametrize("model", [LLAMA, GPT, MIXTRAL, DEEPSEEK], ids=lambda m: m.name)
def test_more_fusion_never_keeps_more(model):
    kinds = lowered(model).kinds
    sparing = set(Fusion) - {Fusion.FUSED_QKV}
    for chosen in [(), *itertools.combinations(FOUR, 2), FOUR, tuple(sparing)]:
        for one in sparing:
            for kind in kinds:
                less = saved(model, kind, with_fusion(*{*chosen, one}))
                without = saved(model, kind, with_fusion(*{*chosen} - {one}))
                assert less <= without + 4 * model.num_heads  # flash's statistics


def test_no_fusion_is_the_graph_as_written():
    assert lowered(LLAMA, Strategy(fusion=UNFUSED)).blocks[BlockKind.DENSE].tensors.keys() >= {"attention.scores"}
