"""Measured operators that a chip brings: their own figures where a row has them, lines between rows, nothing beyond."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.cost.lookup import Rows
from estimator.cost.price import Confidence, price
from estimator.cost.table import _PhaseSeconds
from estimator.graph import BlockKind
from estimator.op import Axis, OpKind, Phase
from estimator.precision import recipe
from estimator.strategy import Fusion, Strategy
from hardware.op_times import OpTimes
from search.plain import from_plain, plain
from tests.estimator.cases import LLAMA, block, h100, named

BF16, CHIP = recipe("bf16"), h100(8).chip
UP, DOWN, CORE = "mlp.up_proj", "mlp.down_proj", "attention.core"


def of_up(*tokens, seconds=1e-3, fmt="bf16"):
    """Rows of the up-projection at so many tokens, `seconds` for each thousand."""
    op = named(block(LLAMA, BlockKind.DENSE), UP)
    _, k, n = (float(d.size) for d in op.dims)
    return {"gemm": {fmt: np.array([[m, n, k, seconds * m / 1000] for m in tokens])}}


def chip(tables):
    return replace(CHIP, times=OpTimes.of("mine.csv", tables))


def tokens_of(op):
    return float(op.dims[0].size)


def test_a_row_of_the_table_is_the_price_and_its_source_says_so():
    b = block(LLAMA, BlockKind.DENSE)
    op = named(b, UP)
    found = price(op, b, chip(of_up(tokens_of(op))), BF16)
    assert found.seconds == 1e-3 * tokens_of(op) / 1000
    assert (found.source, found.confidence) == ("table", Confidence.HIGH)
    model = price(op, b, CHIP, BF16)
    assert (found.compute_s, found.memory_s, found.work) == (model.compute_s, model.memory_s, model.work)


def test_between_rows_the_price_lies_on_a_line_in_logarithms_and_is_told_as_such():
    b = block(LLAMA, BlockKind.DENSE)
    op = named(b, UP)
    m = tokens_of(op)
    found = price(op, b, chip(of_up(m / 2, m * 2)), BF16)
    assert found.seconds == pytest.approx(1e-3 * m / 1000, rel=1e-12)  # seconds are in proportion: so is every line
    assert found.source == "interpolated"


@pytest.mark.parametrize("tokens", [(1.0, 2.0), (1e7, 2e7)])
def test_nothing_is_extrapolated(tokens):
    b = block(LLAMA, BlockKind.DENSE)
    op = named(b, UP)
    assert price(op, b, chip(of_up(*tokens)), BF16) == price(op, b, CHIP, BF16)


def test_a_table_of_another_format_or_another_weight_says_nothing():
    b = block(LLAMA, BlockKind.DENSE)
    for tables, name in ((of_up(1.0, 1e9, fmt="fp16"), UP), (of_up(1.0, 1e9), DOWN)):
        assert price(named(b, name), b, chip(tables), BF16) == price(named(b, name), b, CHIP, BF16)


def test_weights_between_those_of_the_table_need_every_corner():
    corners = [[m, n, k, m * n * k] for m in (8.0, 32.0) for n in (8.0, 32.0) for k in (8.0, 32.0)]
    rows = Rows.of(np.array([[n, k, m, s] for m, n, k, s in corners]))
    assert rows.seconds((16.0, 16.0, 16.0)) == (pytest.approx(16.0**3, rel=1e-12), 0.0)
    assert rows.seconds((8.0, 32.0, 8.0)) == (8.0 * 32 * 8, 1.0)
    torn = Rows.of(np.array([[n, k, m, s] for m, n, k, s in corners if (n, k) != (8.0, 32.0)]))
    assert np.isnan(torn.seconds((16.0, 16.0, 16.0))[0])
    assert torn.seconds((32.0, 8.0, 16.0))[0] == pytest.approx(32.0 * 8 * 16, rel=1e-12)


def test_rows_of_a_batch_are_looked_up_one_by_one_and_others_get_their_usual_price():
    one = named(block(LLAMA, BlockKind.DENSE), UP)
    m, n, k = tokens_of(one), float(one.dims[2].size), float(one.dims[1].size)
    tables = {"gemm": {"bf16": np.array([[m, n / tp, k, 1e-3 * tp] for tp in (1, 4)])}}
    tp = np.array([1.0, 2.0, 4.0, 8.0])
    rows = block(LLAMA, BlockKind.DENSE, Strategy(tp=tp))
    many = price(named(rows, UP), rows, chip(tables), BF16)
    assert many.looked.tolist() == [1.0, 1.0, 1.0, 0.0]  # 2 lies between 1 and 4
    assert many.source == price(named(rows, UP), rows, CHIP, BF16).source
    for i, degree in enumerate(tp):
        alone = block(LLAMA, BlockKind.DENSE, Strategy(tp=float(degree)))
        assert many.seconds[i] == price(named(alone, UP), alone, chip(tables), BF16).seconds


def test_seconds_of_a_batch_count_by_row_as_measured_or_by_the_model():
    b = block(LLAMA, BlockKind.DENSE)
    op = named(b, UP)
    assumed = replace(chip(of_up(tokens_of(op))), measured=())
    total = _PhaseSeconds(Strategy(), 0.0)
    half = price(op, b, assumed, BF16)._replace(
        seconds=np.array([3.0, 5.0]), looked=np.array([1.0, 0.0]), confidence=Confidence.MEDIUM
    )
    total.add_compute(op, half, 0.0, half.seconds)
    assert total.by_source["measured"].tolist() == [3.0, 0.0]
    assert total.by_source["tile"].tolist() == [0.0, 5.0]


def test_causal_attention_of_whole_sequences_is_looked_up_by_its_heads():
    b = block(LLAMA, BlockKind.DENSE, Strategy(fusion=frozenset({Fusion.FLASH_ATTENTION})))
    op = next(op for op in b.of_phase(Phase.FORWARD) if op.kind is OpKind.ATTENTION)
    batch, query, _, heads, qk, _ = (float(d.size) for d in op.dims)
    kv = float(b.tensors[op.inputs[1]].dims[-1].size) / qk
    mine = {"attention": {"bf16 forward": np.array([[batch, query, heads, kv, qk, 7e-4]])}}
    assert price(op, b, chip(mine), BF16).seconds == 7e-4
    backward = next(op for op in b.of_phase(Phase.BACKWARD) if op.kind is OpKind.ATTENTION)
    assert price(backward, b, chip(mine), BF16) == price(backward, b, CHIP, BF16)
    windowed = op.but(reach=128.0)
    assert price(windowed, b, chip(mine), BF16).source != "table"
    others = {"attention": {"bf16 forward": np.array([[batch, query, heads, kv + 1, qk, 7e-4]])}}
    assert price(op, b, chip(others), BF16) == price(op, b, CHIP, BF16)


@pytest.mark.parametrize("change", [{"QUERY": 0.5}, {"KEY": 0.5}, {"visible": 2.0}, {"selects": True}])
def test_attention_that_no_row_measures_is_not_looked_up(change):
    b = block(LLAMA, BlockKind.DENSE, Strategy(fusion=frozenset({Fusion.FLASH_ATTENTION})))
    op = next(op for op in b.of_phase(Phase.FORWARD) if op.kind is OpKind.ATTENTION)
    for name, value in change.items():
        if name in Axis.__members__:  # a rank's share of the queries (cp), or other keys than queries
            dims = [d._replace(size=d.size * value) if d.axis is Axis[name] else d for d in op.dims]
            op = op.but(dims=tuple(dims))
        else:
            op = op.but(**{name: value})
    batch, query, _, heads, qk, _ = (float(d.size) for d in op.dims)
    kv = float(b.tensors[op.inputs[1]].dims[-1].size) / qk
    mine = {"attention": {"bf16 forward": np.array([[batch, query, heads, kv, qk, 7e-4]])}}
    assert price(op, b, chip(mine), BF16) == price(op, b, CHIP, BF16)


def test_gradients_of_weights_pay_for_the_sum_besides():
    b = block(LLAMA, BlockKind.DENSE)
    op = next(op for op in b.of_phase(Phase.WEIGHT_GRAD) if op.name.startswith(UP))
    m, k, n = (float(d.size) for d in op.dims)
    found = price(op, b, chip({"gemm": {"bf16": np.array([[m, n, k, 1e-3]])}}), BF16)
    moved = found.work.behind / (CHIP.hbm_bytes_per_s * CHIP.hbm_efficiency)
    assert found.seconds == 1e-3 + moved
    assert moved > 0.0


def test_a_chip_with_its_table_is_stored_and_read_back_and_damage_is_refused():
    mine = chip(of_up(1.0, 2.0))
    assert from_plain(type(mine), plain(mine)) == mine
    for damaged in (replace(mine.times, packed="AAAA"), replace(mine.times, digest="0" * 16)):
        with pytest.raises(ValueError, match="measured operators of mine.csv are damaged"):
            damaged.tables()
