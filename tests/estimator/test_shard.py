"""Splits: shares of weights, tensors and work add up to the whole."""

from __future__ import annotations

import pytest

from estimator.cost.table import Base
from estimator.cost.work import work
from estimator.graph import BlockKind
from estimator.op import Axis, OpKind, Phase
from estimator.precision import recipe
from estimator.strategy import ContextParallel, Strategy
from tests.estimator.cases import DEEPSEEK, GPT, LLAMA, MIXTRAL, SEQ, TINY, base, block, lowered, named, published

SPLIT_BY_TP = {Axis.HEADS, Axis.KV_HEADS, Axis.FFN}


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (4, 1), (2, 2)])
def test_shares_of_weights_add_up(model, tp, ep, etp):
    if model.moe is None and ep * etp > 1:
        ep = etp = 1
    whole = lowered(model)
    part = lowered(model, Strategy(tp=tp, ep=ep, etp=etp, sequence_parallel=True))
    for kind, b in part.blocks.items():
        for mine, all_of_it in zip(b.weights, whole.blocks[kind].weights, strict=True):
            axes = {d.axis for d in all_of_it.dims}
            ranks = (ep if Axis.EXPERTS in axes else 1) * (etp if Axis.EXPERT_FFN in axes else 1)
            ranks *= tp if axes & (SPLIT_BY_TP | {Axis.VOCAB}) else 1
            if Axis.VOCAB in axes:
                assert mine.elements * ranks == model.padded_vocab(tp) * model.hidden
            else:
                assert mine.elements * ranks == all_of_it.elements


def test_norms_and_latent_projections_are_replicated():
    b = block(DEEPSEEK, BlockKind.MOE, Strategy(tp=4, sequence_parallel=True))
    held = {w.name: w.elements for w in b.weights}
    mla = DEEPSEEK.mla
    assert held["input_norm.weight"] == DEEPSEEK.hidden
    assert held["attention.q_a_proj.weight"] == DEEPSEEK.hidden * mla.q_lora_rank
    assert held["attention.kv_a_proj.weight"] == DEEPSEEK.hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    assert held["attention.q_b_proj.weight"] == mla.q_lora_rank * 16 * (64 + 32) / 4
    assert held["router.weight"] == DEEPSEEK.hidden * 16


def test_more_ranks_than_kv_heads_leave_one_head_on_each():
    b = block(LLAMA, BlockKind.DENSE, Strategy(tp=16))
    held = {w.name: w.elements for w in b.weights}
    assert held["attention.k_proj.weight"] == LLAMA.hidden * LLAMA.head_dim
    assert held["attention.q_proj.weight"] == LLAMA.hidden * LLAMA.head_dim


def test_a_padded_vocabulary_is_a_multiple_of_128_tp():
    b = block(GPT, BlockKind.HEAD, Strategy(tp=4))
    assert named(b, "lm_head").dims[2].size * 4 == GPT.padded_vocab(4)
    gpt3 = published("gpt3_175b")
    assert named(block(gpt3, BlockKind.HEAD, Strategy(tp=8)), "lm_head").dims[2].size == 51200 / 8


def test_sequence_parallelism_splits_tokens_where_nothing_else_is_split():
    for on, share in ((False, 1), (True, 4)):
        tensors = block(LLAMA, BlockKind.DENSE, Strategy(tp=4, sequence_parallel=on)).tensors
        assert tensors["input_norm.out"].elements == SEQ * LLAMA.hidden / share
        assert tensors["attention.q_proj.out"].elements == SEQ * LLAMA.num_heads * LLAMA.head_dim / 4


@pytest.mark.parametrize("kind", list(ContextParallel))
def test_context_parallel_ranks_share_the_attention_evenly(kind):
    r = recipe("bf16")
    whole = block(LLAMA, BlockKind.DENSE)
    part = block(LLAMA, BlockKind.DENSE, Strategy(cp=2, context_parallel=kind))
    a, b = (work(named(x, "attention.core"), x, r).flops for x in (whole, part))
    assert b == a / 2


def test_ulysses_holds_whole_sequences_of_fewer_heads():
    core = named(
        block(LLAMA, BlockKind.DENSE, Strategy(cp=2, context_parallel=ContextParallel.ULYSSES)), "attention.core"
    )
    sizes = {d.axis: d.size for d in core.dims[:4]}
    assert (sizes[Axis.QUERY], sizes[Axis.KEY], sizes[Axis.HEADS]) == (SEQ, SEQ, LLAMA.num_heads / 2)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"ep": 4}, {"ep": 2, "etp": 2}, {"tp": 2, "ep": 4, "etp": 2}])
def test_expert_flops_of_a_rank_depend_on_its_tokens_only(sizes):
    """Balanced routing: whatever ep and etp, a rank's experts do its own tokens' share of the work."""
    r = recipe("bf16")

    def flops(strategy):
        b = block(MIXTRAL, BlockKind.MOE, strategy)
        ops = (op for op in b.of_phase(Phase.FORWARD) if op.kind is OpKind.GROUPED_MATMUL)
        return sum(work(op, b, r).flops for op in ops)

    s = Strategy(sequence_parallel=True, **sizes)
    assert flops(s) == flops(Strategy()) / (s.tp * s.cp)


def test_a_rank_of_the_published_deepseek_layout_holds_four_experts_a_layer():
    model = published("deepseek_v3")
    s = Strategy(ep=64, precision="fp8_block")
    expert = 3 * 7168 * 2048
    assert base(model, BlockKind.MOE, Base.EXPERT_PARAMS, s) == 4 * expert
    dense = 7168 * (1536 + 1) - 7168 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    router, norms = 256 * 7168 + 256, 2 * 7168
    assert base(model, BlockKind.MOE, Base.DENSE_PARAMS, s) == dense + router + norms + expert
    assert base(model, BlockKind.DENSE, Base.EXPERT_PARAMS, s) == 0


def test_micro_batches_scale_tokens_and_leave_weights():
    one, four = block(LLAMA, BlockKind.DENSE), block(LLAMA, BlockKind.DENSE, Strategy(micro_batch=4))
    assert four.tensors["input_norm.out"].elements == 4 * one.tensors["input_norm.out"].elements
    assert [w.elements for w in four.weights] == [w.elements for w in one.weights]
