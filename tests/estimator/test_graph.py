"""The intermediate representation: what it counts and what it says is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.build import build
from estimator.graph import BlockKind
from estimator.model import QKNorm
from estimator.model_io import model_names
from estimator.op import Op
from spaces import MODELS
from tests.estimator.cases import DEEPSEEK, FULL, GPT, LLAMA, MIXTRAL, SEQ, TINY, block, published, saved


@pytest.mark.parametrize("name", model_names([MODELS]))
def test_a_published_models_graph_holds_its_published_parameters(name):
    model = published(name)
    assert build(model, SEQ).num_parameters() == model.num_parameters(include_mtp=True)


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_positions", [0, 77])
@pytest.mark.parametrize("bias", [False, True])
def test_every_variant_holds_the_parameters_of_its_closed_form(model, tied, max_positions, bias):
    model = replace(model, tied_embeddings=tied, max_positions=max_positions, attention_output_bias=bias)
    assert build(model, SEQ).num_parameters() == model.num_parameters(include_mtp=True)


def test_query_and_key_norms_hold_one_vector_of_a_heads_width_each():
    with_norms, without = replace(LLAMA, qk_norm=QKNorm.HEAD), LLAMA
    more = build(with_norms, SEQ).num_parameters() - build(without, SEQ).num_parameters()
    assert more == 2 * LLAMA.head_dim * LLAMA.num_layers


def test_an_op_copied_with_changes_differs_in_those_alone():
    op = next(iter(build(LLAMA, SEQ).blocks[BlockKind.DENSE].ops))
    assert op.but(name="other") == replace(op, name="other")
    assert isinstance(op.but(), Op)
    assert op.but() == op


def test_kinds_are_in_order_of_first_use():
    assert build(DEEPSEEK, SEQ).kinds == (
        BlockKind.EMBEDDING, BlockKind.DENSE, BlockKind.MOE, BlockKind.HEAD, BlockKind.MTP
    )  # fmt: skip
    assert build(GPT, SEQ).kinds == (BlockKind.EMBEDDING, BlockKind.POSITIONS, BlockKind.DENSE, BlockKind.HEAD)


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, DEEPSEEK, GPT], ids=lambda m: m.name)
def test_a_fully_recomputed_layer_keeps_its_input_and_nothing_else(model):
    kind = BlockKind.DENSE if model.moe is None else BlockKind.MOE
    assert saved(model, kind, choice=FULL) == 2 * model.hidden


def test_blocks_hold_each_weight_once():
    for kind in (BlockKind.DENSE, BlockKind.MOE, BlockKind.MTP):
        names = [w.name for w in block(DEEPSEEK, kind).weights]
        assert len(names) == len(set(names))
