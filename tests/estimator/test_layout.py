"""Where blocks sit: every layer once, and once more where a schedule or a module needs a copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.build import build
from estimator.graph import BlockKind
from estimator.layout import even_layers, layout_of
from estimator.strategy import Schedule
from tests.estimator.cases import DEEPSEEK, GPT, LLAMA, SEQ, TINY, published


def laid_out(model, schedule=Schedule.ONE_F_ONE_B, pp=1, vpp=1, layers=None):
    kinds = build(model, SEQ).kinds
    return layout_of(model, kinds, schedule, pp, vpp, layers), {k: i for i, k in enumerate(kinds)}


@given(st.integers(1, 200), st.integers(1, 64))
def test_even_layers_hold_every_layer_and_differ_by_at_most_one(num_layers, num_chunks):
    layers = even_layers(num_layers, num_chunks)
    assert (len(layers), sum(layers)) == (num_chunks, num_layers)
    assert max(layers) - min(layers) <= 1
    assert layers[-1] == min(layers)  # it has the head as well


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
@pytest.mark.parametrize(("schedule", "pp", "vpp"), [
    (Schedule.ONE_F_ONE_B, 1, 1), (Schedule.ONE_F_ONE_B, 4, 1), (Schedule.INTERLEAVED, 2, 4), (Schedule.GPIPE, 8, 1),
    (Schedule.ZB_H1, 2, 1),
])  # fmt: skip
def test_every_block_of_the_sequence_runs_once(model, schedule, pp, vpp):
    layout, column = laid_out(model, schedule, pp, vpp)
    sequence = build(model, SEQ).sequence
    for kind, i in column.items():
        copies = model.num_mtp_layers if kind is BlockKind.EMBEDDING and pp * vpp > 1 else 0  # MTP looks tokens up
        assert layout.counts[:, i].sum() == sequence.count(kind) + copies


def test_dualpipe_holds_every_block_twice():
    once, column = laid_out(LLAMA, Schedule.ONE_F_ONE_B, 4)
    twice, _ = laid_out(LLAMA, Schedule.DUALPIPE, 4)
    assert (twice.held.sum(axis=0) == 2 * once.held.sum(axis=0)).all()
    assert twice.held[0, column[BlockKind.HEAD]] == twice.held[3, column[BlockKind.HEAD]] == 1
    assert twice.held[0, column[BlockKind.EMBEDDING]] == 1


def test_interleaving_holds_every_block_once():
    plain, _ = laid_out(LLAMA, Schedule.ONE_F_ONE_B, 4)
    virtual, _ = laid_out(LLAMA, Schedule.INTERLEAVED, 4, 2)
    assert (plain.held.sum(axis=0) == virtual.held.sum(axis=0)).all()


def test_tied_tables_are_held_once_on_a_rank_and_twice_over_a_pipeline():
    for pp, tables in ((1, 1), (4, 2)):
        layout, column = laid_out(GPT, pp=pp)
        held = layout.held[:, [column[BlockKind.EMBEDDING], column[BlockKind.HEAD]]]
        assert held.sum() == tables


def test_learned_positions_stay_when_the_head_takes_the_table():
    layout, column = laid_out(GPT)
    assert layout.held[0, column[BlockKind.POSITIONS]] == 1
    layout, _ = laid_out(GPT, pp=4)
    assert layout.held[:, column[BlockKind.POSITIONS]].tolist() == [1, 0, 0, 0]


def test_mtp_keeps_a_copy_of_the_embedding_on_the_last_rank():
    layout, column = laid_out(DEEPSEEK, pp=4)
    assert layout.held[:, column[BlockKind.EMBEDDING]].tolist() == [1, 0, 0, 1]
    one, _ = laid_out(DEEPSEEK)
    assert one.held[:, column[BlockKind.EMBEDDING]].tolist() == [1]
    both_ends, _ = laid_out(DEEPSEEK, Schedule.DUALPIPE, 4)  # the end ranks run the first and the last chunk
    assert both_ends.held[:, column[BlockKind.EMBEDDING]].tolist() == [1, 0, 0, 1]
    tied, _ = laid_out(replace(DEEPSEEK, tied_embeddings=True), pp=4)
    assert tied.held[:, column[BlockKind.EMBEDDING]].tolist() == [1, 0, 0, 0]


def test_an_mtp_module_brings_a_layer_that_block_recompute_does_not_count():
    layout, column = laid_out(DEEPSEEK, pp=4)
    without, _ = laid_out(replace(DEEPSEEK, num_mtp_layers=0), pp=4)
    moe = column[BlockKind.MOE]
    assert layout.counts[-1, moe] == without.counts[-1, moe] + 1
    assert (layout.first[:, :, moe] == without.first[:, :, moe]).all()


def test_an_explicit_layout_is_taken_as_it_is():
    layout, column = laid_out(LLAMA, pp=4, layers=(1, 3, 4, 0))
    assert layout.counts[:, column[BlockKind.DENSE]].tolist() == [1, 3, 4, 0]


def test_the_first_n_layers_of_a_chunk_grow_one_by_one_to_all_of_them():
    layout, column = laid_out(DEEPSEEK, pp=3)
    steps = np.diff(layout.first.sum(axis=2), axis=1)
    assert set(np.unique(steps)) <= {0, 1}
    assert layout.first[0, 1, column[BlockKind.DENSE]] == 1  # the one dense layer is the first
    assert layout.first[:, -1].sum() == DEEPSEEK.num_layers


def test_the_published_deepseek_pipeline_puts_three_or_four_layers_on_a_stage():
    layout, column = laid_out(published("deepseek_v3"), Schedule.DUALPIPE, 16)
    layers = layout.first[:, -1].sum(axis=1)
    assert (layers.sum(), layers.min(), layers.max()) == (61, 3, 4)
    assert layout.counts[0, column[BlockKind.DENSE]] == 3
