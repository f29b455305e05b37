"""Dropout: masks that backward reads, kernels that write them, and what fusion and flash attention leave of both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.cost.work import work
from estimator.graph import BlockKind
from estimator.model import ModelSpec
from estimator.op import OpKind, Phase
from estimator.passes import recompute
from estimator.precision import Role, recipe
from estimator.strategy import Fusion, Recompute, Strategy
from tests.estimator.cases import GPT, LLAMA, SEQ, TINY, block, compute_ops, lowered, named, saved, step

DROPPED = replace(GPT, attention_dropout=0.1, hidden_dropout=0.1)
NORMS = frozenset({Fusion.FUSED_NORM})
EAGER = NORMS | {Fusion.FUSED_SOFTMAX, Fusion.FUSED_DROPOUT}
FLASH = NORMS | {Fusion.FLASH_ATTENTION}
BF16, DENSE = recipe("bf16"), BlockKind.DENSE


def moved(b, *phases):
    return sum(float(work(op, b, BF16).nbytes) for op in compute_ops(b, *phases))


@pytest.mark.parametrize("fusion", [NORMS, EAGER], ids=["apart", "fused"])
def test_a_layer_keeps_what_korthikanti_counts(fusion):
    """Korthikanti 2022, arXiv:2205.05198, Eq. 1: sbh (34 + 5 a s / h), statistics of norms aside."""
    kept = saved(DROPPED, DENSE, Strategy(fusion=fusion))  # of a token
    assert kept - 2 * 4 == DROPPED.hidden * 34 + 5 * DROPPED.num_heads * SEQ


def test_masks_and_dropped_probabilities_are_all_that_it_adds():
    s = Strategy(fusion=EAGER)
    more = saved(DROPPED, DENSE, s) - saved(GPT, DENSE, s)
    assert more == 3 * DROPPED.num_heads * SEQ + 2 * DROPPED.hidden


def test_flash_attention_keeps_no_mask_of_its_scores():
    s = Strategy(fusion=FLASH)
    attention_only = replace(GPT, attention_dropout=0.1)
    assert block(attention_only, DENSE, s).ops == block(GPT, DENSE, s).ops


def test_recompute_of_attentions_core_drops_its_mask_and_full_recompute_all():
    graph = lowered(DROPPED, Strategy(fusion=EAGER))
    masks = {text: [name for name, role in recompute(graph, Recompute.parse(text)).blocks[DENSE].saved()
                    if role is Role.MASK] for text in ("core_attn", "full")}  # fmt: skip
    assert masks == {"core_attn": ["attention.dropout.mask", "mlp.dropout.mask"], "full": []}


def test_a_dropout_moves_its_tensor_twice_and_a_byte_an_element():
    b = block(DROPPED, DENSE, Strategy(fusion=NORMS))
    elements = SEQ * DROPPED.hidden
    for name in ("mlp.dropout", "mlp.dropout.grad"):
        assert work(named(b, name), b, BF16).nbytes == 5 * elements
    scores = DROPPED.num_heads * SEQ * SEQ
    all_of_them = sum(work(op, b, BF16).nbytes for op in b.ops if op.kind is OpKind.DROPOUT)
    assert all_of_them == 2 * 5 * (scores + 2 * elements)


def test_fused_with_the_sum_it_writes_a_mask_alone():
    apart, fused = (block(DROPPED, DENSE, Strategy(fusion=f)) for f in (NORMS, NORMS | {Fusion.FUSED_DROPOUT}))
    elements = SEQ * DROPPED.hidden
    assert moved(apart, Phase.FORWARD) - moved(fused, Phase.FORWARD) == 2 * 4 * elements  # neither written nor read
    assert moved(apart, Phase.BACKWARD) == moved(fused, Phase.BACKWARD)  # autograd runs both by themselves
    launched = [sum(not op.rides for op in compute_ops(b, Phase.FORWARD)) for b in (apart, fused)]
    assert launched[0] - launched[1] == 2


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_without_dropout_its_fusion_changes_nothing(model):
    plain, fused = (lowered(model, Strategy(fusion=f)).blocks for f in (FLASH, FLASH | {Fusion.FUSED_DROPOUT}))
    assert plain == fused


def test_the_embedding_is_dropped_once():
    for model, kind in ((DROPPED, BlockKind.POSITIONS), (replace(LLAMA, hidden_dropout=0.1), BlockKind.EMBEDDING)):
        assert [op.kind for op in block(model, kind).of_phase(Phase.FORWARD)].count(OpKind.DROPOUT) == 1


def test_a_step_with_dropout_takes_longer_and_more_room():
    plain, dropped = (step(model, Strategy(fusion=EAGER), 8) for model in (GPT, DROPPED))
    assert dropped.step_time_s > plain.step_time_s
    assert dropped.peak_memory_bytes > plain.peak_memory_bytes


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match=r"hidden_dropout must be at least 0 and below 1, but got"):
        replace(GPT, hidden_dropout=rate)


def test_configs_say_their_rates():
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100, "n_positions": 32}
    told = ModelSpec.from_hf_config(gpt2)
    assert (told.attention_dropout, told.hidden_dropout) == (0.1, 0.1)  # the class default
    off = ModelSpec.from_hf_config(gpt2 | {"attn_pdrop": 0.0, "resid_pdrop": 0.0})
    assert (off.attention_dropout, off.hidden_dropout) == (0.0, 0.0)
    with pytest.raises(ValueError, match="attn_pdrop must be at least 0 and below 1, but got 1.5"):
        ModelSpec.from_hf_config(gpt2 | {"attn_pdrop": 1.5})
