"""Block recompute with each chunk's own number of layers: hand-made sums, and bits of the common number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.cost.table import Again
from estimator.graph import BlockKind
from estimator.layout import layout_of
from estimator.strategy import Recompute, Schedule, Strategy
from tests.estimator.cases import DEEPSEEK, FULL, LLAMA, NONE, again, lowered, step

BLOCK = Recompute.parse("block")
FOUR = Strategy(pp=4, recompute=BLOCK)
TWO_EACH = Strategy(pp=2, vpp=2, schedule=Schedule.INTERLEAVED, recompute=BLOCK)


def per_chunk(strategy, *numbers):
    return replace(strategy, recompute_per_chunk=numbers)


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK], ids=lambda m: m.name)
@pytest.mark.parametrize("strategy", [FOUR, TWO_EACH, replace(FOUR, schedule=Schedule.DUALPIPE)])
@pytest.mark.parametrize("num", [1, 2])
def test_the_same_number_everywhere_is_recompute_layers_bit_for_bit(model, strategy, num):
    common = step(model, replace(strategy, recompute_layers=num), 16)
    own = step(model, per_chunk(strategy, num, num, num, num), 16)
    assert own.columns == common.columns
    assert own.stages == common.stages


def test_a_number_beyond_the_shortest_chunk_is_that_chunk_whole():
    layout = replace(FOUR, layout=(3, 2, 2, 1))
    common = step(LLAMA, replace(layout, recompute_layers=3), 16)
    assert step(LLAMA, per_chunk(layout, 3, 2, 2, 1), 16).columns == common.columns


def test_every_layer_of_every_chunk_is_full_recompute():
    full = step(LLAMA, replace(FOUR, recompute=FULL), 16)
    own = step(LLAMA, per_chunk(FOUR, 2, 2, 2, 2), 16)
    assert own.step_time_s == pytest.approx(full.step_time_s, rel=1e-12)
    assert own.peak_memory_bytes == full.peak_memory_bytes


def test_each_recomputed_layer_adds_its_forward_to_its_own_stage():
    none = step(LLAMA, replace(FOUR, recompute=NONE), 16)
    some = step(LLAMA, per_chunk(FOUR, 2, 0, 1, 0), 16)
    layer = again(LLAMA, BlockKind.DENSE, Again.R_COMP, choice=FULL)
    added = [b.backward_s - a.backward_s for a, b in zip(none.stages, some.stages, strict=True)]
    assert added == pytest.approx([2 * layer, 0.0, layer, 0.0], rel=1e-9, abs=1e-15)
    assert some.step_time_s > none.step_time_s


def test_each_recomputed_layer_frees_its_activations_on_its_own_stage():
    # 1F1B: rank i of 4 keeps min(m, 4 - i) micro-batches.
    none = step(LLAMA, replace(FOUR, recompute=NONE), 16)
    some = step(LLAMA, per_chunk(FOUR, 2, 0, 1, 0), 16)
    kept, left = (again(LLAMA, BlockKind.DENSE, Again.SAVED_BYTES, choice=c) for c in (NONE, FULL))
    freed = [a.memory["activations"] - b.memory["activations"] for a, b in zip(none.stages, some.stages, strict=True)]
    assert freed == pytest.approx([4 * 2 * (kept - left), 0.0, 2 * (kept - left), 0.0], rel=1e-12)


def test_flops_of_recompute_are_those_of_the_chosen_layers():
    one = step(LLAMA, per_chunk(FOUR, 1, 0, 0, 0), 16)
    three = step(LLAMA, per_chunk(FOUR, 2, 0, 1, 0), 16)
    assert three.hfu * three.step_time_s - three.mfu * three.step_time_s == pytest.approx(
        3 * (one.hfu - one.mfu) * one.step_time_s, rel=1e-9
    )


def test_step_time_rises_and_memory_falls_chunk_by_chunk():
    chosen = [(1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 0), (1, 1, 1, 1), (2, 2, 1, 1), (2, 2, 2, 2)]
    told = [step(LLAMA, per_chunk(TWO_EACH, *numbers), 16) for numbers in chosen]
    work = [sum(s.forward_s + s.backward_s for s in r.stages) for r in told]
    held = [sum(s.memory["activations"] for s in r.stages) for r in told]
    assert work == sorted(work)
    assert len(set(work)) == len(work)
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)


def test_a_row_of_a_batch_is_the_scalar():
    import numpy as np

    batch = step(LLAMA, replace(per_chunk(FOUR, 2, 0, 1, 0), micro_batch=np.array([1.0, 2.0])), 16)
    for i, size in enumerate((1, 2)):
        alone = step(LLAMA, replace(per_chunk(FOUR, 2, 0, 1, 0), micro_batch=size), 16)
        assert batch.columns["step_time_s"][i] == alone.step_time_s
        assert batch.columns["peak_memory_bytes"][i] == alone.peak_memory_bytes


def test_the_common_number_is_ignored_beside_chunks_of_their_own():
    own = per_chunk(FOUR, 2, 0, 1, 0)
    assert step(LLAMA, replace(own, recompute_layers=2), 16).columns == step(LLAMA, own, 16).columns


def test_stages_still_tell_their_layers():
    told = step(LLAMA, per_chunk(replace(FOUR, layout=(3, 2, 2, 1)), 1, 0, 2, 0), 16)
    assert [stage.layers for stage in told.stages] == [(3,), (2,), (2,), (1,)]


def test_chunks_that_recompute_alike_are_of_one_class():
    kinds = lowered(LLAMA).kinds
    layout = layout_of(LLAMA, kinds, Schedule.ONE_F_ONE_B, 4, 1, None, (1, 1, 2, 1))
    assert layout.class_of.tolist() == [0, 1, 2, 3]
    assert layout_of(LLAMA, kinds, Schedule.ONE_F_ONE_B, 4, 1, None, (1, 1, 1, 1)).class_of.tolist() == [0, 1, 1, 2]
    assert layout.first.shape == (4, 3, len(kinds))


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (per_chunk(FOUR, 1, 1), "recompute_per_chunk (1+1) must name each of pp * vpp = 4 * 1 chunks"),
        (per_chunk(FOUR, 1, 1, 3, 1), "from 0 to its layers (2+2+2+2) and not all of them 0"),
        (per_chunk(FOUR, 1, -1, 0, 1), "recompute_per_chunk (1+-1+0+1) must name"),
        (per_chunk(FOUR, 0, 0, 0, 0), "write all zero as recompute: none"),
        (per_chunk(FOUR), "recompute_per_chunk () must name"),
        (replace(per_chunk(FOUR, 1, 1, 1, 1), recompute=FULL), "leave recompute_layers and recompute_per_chunk out"),
        (per_chunk(replace(FOUR, layout=(3, 2, 2, 1)), 3, 2, 2, 2), "its layers (3+2+2+1)"),
    ],
)
def test_what_chunks_cannot_recompute_is_refused_with_law_offence_and_remedy(strategy, told):
    with pytest.raises(ValueError, match="recompute") as caught:
        step(LLAMA, strategy, 16)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_types_are_checked_where_a_strategy_is_made():
    with pytest.raises(TypeError, match="must be None or a tuple of whole numbers, but got"):
        replace(FOUR, recompute_per_chunk=[1, 1, 1, 1])
    with pytest.raises(TypeError, match=r"tp_chunks must be of Chunks, but got 4; Chunks\(\.\.\.\) makes one"):
        Strategy(tp_chunks=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expert_bucket_bytes must be None or a whole number, but got"):
        Strategy(expert_bucket_bytes="all")  # type: ignore[arg-type]
