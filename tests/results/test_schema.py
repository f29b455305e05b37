"""Claims about column types and the way from strategies to columns and back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from estimator.result import COLUMNS
from estimator.strategy import Chunks, ContextParallel, Fusion, Overlap, Recompute, Schedule, Strategy
from results.schema import (
    FRONT_FIELDS,
    STRATEGY_NAMES,
    Field,
    Plain,
    conform,
    strategy_at,
    strategy_columns,
    strategy_json,
)
from results.table import Table


def test_every_result_column_is_stored_with_its_unit_and_meaning():
    stored = {field.name: field for field in FRONT_FIELDS}
    for column in COLUMNS:
        assert (stored[column.name].unit, stored[column.name].description) == (column.unit, column.description)


def test_column_names_are_unique_and_described():
    assert len({field.name for field in FRONT_FIELDS}) == len(FRONT_FIELDS)
    assert all(field.description for field in FRONT_FIELDS)


@pytest.mark.parametrize(
    ("kind", "values", "offence"),
    [
        (Plain.INT64, [1.0, 1.5], "whole numbers, but got np.float64(1.5)"),
        (Plain.INT64, [float("nan")], "whole numbers"),
        (Plain.INT64, [1e19], "whole numbers"),
        (Plain.FLOAT64, ["fast"], "holds float64"),
        (Plain.BOOL, [0, 2], "true or false"),
        (Plain.STRING, ["a", None], "text, but got None"),
    ],
)
def test_a_value_of_another_type_is_refused(kind, values, offence):
    field = Field(name="x", kind=kind, unit="", description="")
    with pytest.raises(ValueError, match="column 'x'") as caught:
        conform({"x": values}, (field,))
    assert offence in str(caught.value)


def test_missing_unknown_and_ragged_columns_are_refused(make_front):
    columns = dict(make_front().columns)
    with pytest.raises(ValueError, match=r"\['step_time_s'\] are missing"):
        conform({name: c for name, c in columns.items() if name != "step_time_s"}, FRONT_FIELDS)
    with pytest.raises(ValueError, match=r"unknown columns \['speed'\]"):
        conform(columns | {"speed": np.zeros(4)}, FRONT_FIELDS)
    with pytest.raises(ValueError, match="one length"):
        conform(columns | {"tp": np.ones(3)}, FRONT_FIELDS)


def test_integers_beyond_float_precision_are_kept():
    field = Field(name="id", kind=Plain.INT64, unit="", description="")
    assert conform({"id": [2**62 + 1]}, (field,))["id"].tolist() == [2**62 + 1]


STRATEGY = Strategy(
    tp=2,
    cp=4,
    pp=2,
    ep=8,
    etp=2,
    vpp=2,
    micro_batch=3,
    schedule=Schedule.INTERLEAVED,
    layout=(5, 6, 6, 5),
    sequence_parallel=True,
    context_parallel=ContextParallel.ULYSSES,
    zero_stage=2,
    recompute=Recompute.parse("block"),
    recompute_layers=4,
    recompute_per_chunk=(4, 0, 6, 1),
    tp_chunks=Chunks(attention_out=2, mlp_in=8),
    precision="fp8_block",
    overlap=Overlap(tp=1, dp=1),
    bucket_bytes=500_000_000,
    expert_bucket_bytes=0,
    fusion=frozenset({Fusion.FUSED_LOSS}),
)


@pytest.mark.parametrize("strategy", [STRATEGY, Strategy(), Strategy(fusion=frozenset())])
def test_a_strategy_survives_the_way_into_columns_and_back(strategy):
    table = Table(columns={name: np.asarray(cells) for name, cells in strategy_columns(strategy, dp=16).items()})
    assert table.names == STRATEGY_NAMES
    assert strategy_at(table.row(0)) == strategy


def test_a_batch_gives_one_row_per_strategy():
    columns = strategy_columns(Strategy(tp=np.array([1.0, 2.0, 4.0]), overlap=Overlap(ep=np.array([0.0, 1, 1]))), dp=8)
    assert columns["tp"].tolist() == [1, 2, 4]
    assert columns["overlap_ep"].tolist() == [0, 1, 1]
    assert columns["dp"].tolist() == [8, 8, 8]
    assert columns["schedule"] == ["1f1b"] * 3


def test_strategy_json_nests_overlap_and_writes_out_what_is_off(make_front):
    row = make_front(1).row(0)
    nested = strategy_json(row)
    assert nested["overlap"] == {"tp": False, "cp": True, "dp": False, "ep": False, "pp": False}
    assert (nested["layout"], nested["recompute"], nested["bucket_bytes"]) == (
        "even",
        "layernorm+mla_up_proj",
        160_000_000,
    )
    assert strategy_json(row | {"layout": "3+4"})["layout"] == [3, 4]
    assert (nested["recompute_per_chunk"], nested["expert_bucket_bytes"]) == ("same", None)
    assert nested["tp_chunks"] == {"attention_in": 4, "attention_out": 4, "mlp_in": 4, "mlp_out": 4}
    told = strategy_json(row | {"recompute_per_chunk": "3+0", "tp_chunks": "1+2+4+8", "expert_bucket_bytes": 0})
    assert (told["recompute_per_chunk"], told["expert_bucket_bytes"]) == ([3, 0], 0)
    assert list(told["tp_chunks"].values()) == [1, 2, 4, 8]
    assert json.loads(json.dumps(nested)) == nested


def test_table_rows_are_plain_python(make_front):
    kinds = {type(value) for value in make_front(1).row(0).values()}
    assert kinds == {int, float, str, bool}


def test_sorting_keeps_the_order_of_equals_and_puts_nan_last(make_front):
    table = make_front(4, step_time_s=[2.0, float("nan"), 1.0, 2.0])
    assert table.sort("step_time_s")["id"].tolist() == [1002, 1000, 1003, 1001]
    assert table.sort("step_time_s", descending=True)["id"].tolist() == [1000, 1003, 1002, 1001]


def test_rows_are_found_by_id_and_filtered_by_mask(make_front):
    table = make_front(4)
    assert table.find(1002) == 2
    assert table.where(table["step_time_s"] > 20.0)["id"].tolist() == [1001, 1002, 1003]
    with pytest.raises(ValueError, match="no row has id 7"):
        table.find(7)
    with pytest.raises(ValueError, match="unknown column 'speed'"):
        table["speed"]
