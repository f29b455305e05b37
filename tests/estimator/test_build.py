"""The logical graph: bytes and FLOPs of a layer against published formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.build import build
from estimator.graph import BlockKind
from estimator.op import OpKind, Phase
from estimator.strategy import Fusion, Strategy
from estimator.tables import model_flops_per_token
from tests.estimator.cases import DEEPSEEK, GPT, LLAMA, MIXTRAL, SEQ, TINY, UNFUSED, block, named, published, saved

FLASH = frozenset({Fusion.FLASH_ATTENTION})


def llama_rest(model):
    """Attention's part of a Llama layer's bytes per token: q, k, v, output, log-sum-exp, two norms' statistics."""
    a, g, d = model.num_heads, model.num_kv_heads, model.head_dim
    return 4 * (a + g) * d + 4 * a + 8


@pytest.mark.parametrize("name", ["tiny", "llama3_8b", "llama3_70b"])
def test_a_llama_layer_keeps_8h_6f_and_attention_when_fused(name):
    model = LLAMA if name == "tiny" else published(name)
    assert saved(model, BlockKind.DENSE) == 8 * model.hidden + 6 * model.ffn + llama_rest(model)


@pytest.mark.parametrize("name", ["tiny", "llama3_8b", "llama3_70b"])
def test_a_llama_layer_keeps_16h_8f_and_attention_as_hugging_face_writes_it(name):
    model = LLAMA if name == "tiny" else published(name)
    kept = saved(model, BlockKind.DENSE, Strategy(fusion=FLASH))
    assert kept == 16 * model.hidden + 8 * model.ffn + llama_rest(model)


def test_a_gpt_layer_keeps_korthikantis_bytes_less_the_dropout():
    """Of sbh(34 + 5as/h), arXiv:2205.05198, Eq. 1, dropout takes 2 sbh of masks, and 3 as^2b in the core.

    Masks after attention and MLP; a mask of one byte and an output of two in the core. Without dropout 32 sbh and
    2as^2b stay (with it: test_dropout.py); beside them 4 bytes of statistics per norm and token, which the paper
    neglects.
    """
    h, a = GPT.hidden, GPT.num_heads
    kept = saved(GPT, BlockKind.DENSE, Strategy(fusion=frozenset({Fusion.FUSED_NORM})))
    assert kept == (34 - 2) * h + (5 - 1 - 2) * a * SEQ + 2 * 4


def test_unfused_attention_keeps_its_probabilities_and_no_log_sum_exp():
    a = LLAMA.num_heads
    difference = saved(LLAMA, BlockKind.DENSE, Strategy(fusion=UNFUSED)) - saved(
        LLAMA, BlockKind.DENSE, Strategy(fusion=FLASH)
    )
    assert difference == 2 * a * SEQ - 4 * a


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, DEEPSEEK], ids=lambda m: m.name)
def test_a_token_takes_six_flops_a_matrix_parameter_and_the_causal_half_of_attention(model):
    model = replace(model, num_mtp_layers=0)
    norms = (2 * model.num_layers + 1) * model.hidden
    if model.mla:
        norms += model.num_layers * (model.mla.q_lora_rank + model.mla.kv_lora_rank)
    matrices = model.num_active_parameters(include_input_embedding=False) - norms - model.num_router_biases()
    scores = SEQ * model.num_heads * (model.qk_head_dim + model.v_head_dim)
    assert model_flops_per_token(model, SEQ) == 6 * matrices + 3 * model.num_layers * scores


def test_a_gpt_takes_narayanans_flops_with_the_causal_half_of_attention():
    """arXiv:2104.04473, Eq. 3: 96 Bslh^2 (1 + s/6h + V/16lh) with recompute.

    Without it 72 Bslh^2 (1 + s/6h + V/12lh), and s/12h where half of the square is skipped.
    """
    h, num_layers, s, vocab = GPT.hidden, GPT.num_layers, SEQ, GPT.vocab
    want = 72 * num_layers * h**2 * (1 + s / (12 * h) + vocab / (12 * num_layers * h))
    assert model_flops_per_token(GPT, SEQ) == pytest.approx(want, rel=1e-12)  # rounding of the quotients


def test_mtp_adds_a_projection_a_layer_and_a_head():
    model, without = DEEPSEEK, replace(DEEPSEEK, num_mtp_layers=0)
    deeper = replace(without, num_layers=model.num_layers + 1)
    layer = model_flops_per_token(deeper, SEQ) - model_flops_per_token(without, SEQ)
    rest = 6 * (2 * model.hidden**2 + model.hidden * model.vocab)
    assert model_flops_per_token(model, SEQ) - model_flops_per_token(without, SEQ) == layer + rest


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_every_op_reads_what_an_earlier_op_wrote_or_the_block_was_given(model):
    graph = build(model, SEQ)
    for kind, b in graph.blocks.items():
        # An MTP module is also given the next tokens' embeddings, and its layer runs between its own ops.
        known = {b.input} | ({"ahead", "mtp.layer.out"} if kind is BlockKind.MTP else set())
        for op in b.ops:
            assert set(op.inputs) <= known, op.name
            known |= set(op.outputs)
        assert known <= set(b.tensors)


def test_latent_attention_scores_over_192_and_mixes_over_128():
    core = named(block(published("deepseek_v3"), BlockKind.MOE), "attention.core")
    assert core.kind is OpKind.ATTENTION
    assert [d.size for d in core.dims[4:]] == [192, 128]


def test_the_router_keeps_an_fp32_copy_of_its_input():
    """4h for the copy and 2h for shared experts or dispatch behind the same norm."""
    model = MIXTRAL
    b = block(model, BlockKind.MOE)
    router = named(b, "router")
    assert [(s.tensor, s.role.value) for s in router.saves] == [(router.inputs[0], "full")]


def test_routed_rows_follow_top_k_and_capacity():
    tight = replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity_factor=1.5))
    for model, rows in ((MIXTRAL, 2 * SEQ), (tight, 3 * SEQ)):
        assert named(block(model, BlockKind.MOE), "experts.gate").dims[1].size == rows


def test_a_moe_layer_keeps_its_routed_rows():
    """Attention and its norm as in a dense layer, the second norm's input and statistics, router and experts.

    The router keeps its fp32 input, scores and row map; each visited expert its row, gate, up and activation's output.
    """
    model, moe = MIXTRAL, MIXTRAL.moe
    attention = 2 * model.hidden + 2 * model.hidden + llama_rest(model) - 4
    router = 4 * model.hidden + 4 * moe.num_experts + 4 * moe.top_k
    experts = moe.top_k * (2 * model.hidden + 3 * 2 * moe.ffn)
    assert saved(model, BlockKind.MOE) == attention + (2 * model.hidden + 4) + router + experts


def test_forward_ops_come_before_everything_else():
    phases = [op.phase for op in block(DEEPSEEK, BlockKind.MOE).ops]
    assert phases.index(Phase.BACKWARD) == phases.count(Phase.FORWARD)
