"""How wrong predictions are, as quantiles by cell, and bands with them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from estimator.band import Band, evaluate_band
from estimator.result import StepResult
from estimator.step import evaluate
from search import bands
from search.bands import (
    Quantiles,
    Residual,
    cell_of,
    model_error,
    predicted_band,
    quantile_table,
    quantiles_of,
    table_text,
    widened,
)
from search.configuration import configuration
from search.measured import Row, read_rows
from search.validate import Folds, validate
from tests.search.measured_rows import MOE, cells, write


def _residuals(values, cell=("a",), groups=None):
    return [
        Residual(cell=cell, group=group, fold=group, log_ratio=float(value))
        for value, group in zip(values, groups or range(len(values)), strict=True)
    ]


def _at(cell, **changes):
    config = configuration(Row(place="here", cells=cells(**changes)))
    assert cell_of(config.model, config.strategy, config.system) == cell


def test_a_cell_is_scale_kind_silicon_and_format():
    _at(("to 128 chips", "dense", "Hopper", "16 bits"))
    _at(("to 1024 chips", "MoE", "Hopper", "8 bits"), n_gpus="1024", dp="128", precision="fp8", **MOE)
    blackwell = {"gpu": "gb200", "gpus_per_node": "4", "intra_node": "nvlink5-1800-nvl72", "inter_node": ""}
    _at(("to 8 chips", "dense", "GB200", "4 bits"), precision="nvfp4", n_gpus="8", dp="1", **blackwell)


def test_eighty_of_a_hundred_groups_lie_inside():
    values = np.random.default_rng(0).normal(0, 0.1, 2000)
    q = quantile_table(_residuals(values, cell=()))[()]
    assert np.mean((q.low <= values) & (values <= q.high)) == pytest.approx(0.8, abs=0.01)
    assert (q.rows, q.groups) == (2000, 2000)


def test_a_new_group_lies_inside_with_the_same_probability_however_few_there_are():
    rng = np.random.default_rng(1)
    inside = []
    for _ in range(2000):
        *known, new = rng.normal(0, 1, 10)
        q = quantile_table(_residuals(known, cell=()))[()]
        inside.append(q.low <= new <= q.high)
    assert np.mean(inside) == pytest.approx(0.8, abs=0.025)  # of 2000: a standard deviation is 0.009


def test_repeats_of_a_group_count_as_the_root_of_their_number():
    alone = quantile_table(_residuals([-0.3, -0.1, 0.1, 0.3], cell=()))[()]
    assert quantile_table(_residuals([-0.3, -0.1, 0.1, *[0.3] * 100], ()))[()].low > alone.low
    heavy = quantile_table(_residuals([-0.3, -0.1, 0.1, *[0.3] * 4], (), [0, 1, 2, 3, 3, 3, 3]))[()]
    twice = quantile_table(_residuals([-0.3, -0.1, 0.1, 0.3, 0.3], (), [0, 1, 2, 3, 4]))[()]
    assert heavy.groups == 4
    assert heavy.low == pytest.approx(twice.low, abs=0.03)


def test_few_groups_are_drawn_towards_the_cell_around_them():
    wide = _residuals(np.linspace(-1, 1, 101), cell=("a", "b"))
    table = quantile_table([*wide, *_residuals([0.01, 0.02], cell=("a", "c"), groups=["x", "y"])])
    around, few = table[("a",)], table[("a", "c")]
    assert 0.02 < few.high < around.high
    assert few.high == pytest.approx((2 * 0.02 + 8 * around.high) / 10)
    assert quantiles_of(("a", "unknown", "b"), table) == around
    assert quantiles_of(("z",), table) == table[()]


def test_a_band_is_never_on_the_wrong_side():
    q = quantile_table(_residuals([0.1, 0.2, 0.3], cell=()))[()]
    assert (q.low, q.high > 0) == (0.0, True)


def _priced(**changes):
    config = configuration(Row(place="here", cells=cells(**changes)))
    parts = config.model, config.strategy, config.system, config.workload
    return parts, evaluate(*parts)


def test_errors_of_the_model_and_spread_of_a_step_add_up_in_quadrature():
    result = StepResult(columns={"step_time_s": 2.0, "peak_memory_bytes": 100.0}, feasible=True, reason="")
    band = Band(
        step_time_p10_s=2.0 * math.exp(-0.03), step_time_p90_s=2.0 * math.exp(0.4), peak_memory_p10_bytes=100.0,
        peak_memory_p90_bytes=100.0 * math.exp(0.05), device_memory_p90_bytes=120.0,
    )  # fmt: skip
    wide = widened(band, result, Quantiles(low=-0.04, high=0.3), Quantiles(low=-0.1, high=0.0))
    assert wide.step_time_p10_s == pytest.approx(2.0 * math.exp(-0.05))
    assert wide.step_time_p90_s == pytest.approx(2.0 * math.exp(0.5))
    assert wide.peak_memory_p10_bytes == pytest.approx(100.0 * math.exp(-0.1))
    assert wide.peak_memory_p90_bytes == pytest.approx(100.0 * math.exp(0.05))
    assert wide.device_memory_p90_bytes == 120.0


def test_the_shipped_table_covers_every_step_and_reads_back(tmp_path, monkeypatch):
    parts, result = _priced()
    narrow, wide = evaluate_band(*parts, result), predicted_band(*parts, result)
    assert wide.step_time_p10_s < narrow.step_time_p10_s < result.step_time_s
    assert wide.step_time_p90_s > narrow.step_time_p90_s > result.step_time_s
    unknown, _ = model_error(("to 8 chips", "dense", "abacus", "16 bits"))
    assert unknown.low < 0 < unknown.high
    table = {(): Quantiles(low=-0.25, high=0.5, rows=3, groups=2), ("a", "b"): Quantiles(low=0.0, high=0.125)}
    (tmp_path / "t.yaml").write_text(table_text(table, table, "it's made up"))
    monkeypatch.setattr(bands, "TABLE", tmp_path / "t.yaml")
    assert bands._shipped.__wrapped__() == (table, table)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of three models, of which one takes half as long again as predicted."""
    path = tmp_path_factory.mktemp("rows") / "t.csv"
    plain = [cells(case_id=n, layers=n, micro_batch=m, step_time_s="2") for n in ("16", "24", "32") for m in ("1", "2")]
    predicted = [c["predicted_step_time_s"] for c in validate(read_rows(write(path, *plain)))["cases"]]
    factors = [1.5, 1.5, 1.05, 1.05, 0.95, 0.95]
    return path, [row | {"step_time_s": repr(f * s)} for row, f, s in zip(plain, factors, predicted, strict=True)]


def test_a_left_out_row_gets_the_band_of_the_others(rows):
    path, measured = rows
    cases = validate(read_rows(write(path, *measured)), folds=Folds.GROUP)["cases"]
    slow = [row | {"step_time_s": repr(2.9 * float(row["step_time_s"]))} for row in measured[:2]]
    again = validate(read_rows(write(path, *slow, *measured[2:])), folds=Folds.GROUP)["cases"]
    before, after = ([c["predicted_step_time_s"] for c in each] for each in (cases, again))
    assert after[:2] == before[:2]
    assert after[2:] != before[2:]
    for key in ("p10_s", "p90_s"):  # others are predicted from fits that see the row: a little of it is left
        assert [c[key] for c in again[:2]] == pytest.approx([c[key] for c in cases[:2]], rel=1e-3)
        assert [c[key] for c in again[2:]] != [c[key] for c in cases[2:]]


def test_the_report_tells_how_many_steps_bands_hold(rows):
    path, measured = rows
    report = validate(read_rows(write(path, *measured)), folds=Folds.GROUP)
    cases = report["cases"]
    inside = [c["p10_s"] <= c["measured_step_time_s"] <= c["p90_s"] for c in cases]
    widths = [(c["p90_s"] - c["p10_s"]) / c["predicted_step_time_s"] for c in cases]
    assert report["overall"]["bands"]["inside"] == np.mean(inside)
    assert report["overall"]["bands"]["median_width"] == pytest.approx(np.median(widths))
    error = np.median([abs(c["error"]) for c in cases])
    assert report["overall"]["bands"]["width_over_error"] == pytest.approx(np.median(widths) / error)


def test_the_command_line_writes_a_table_that_can_be_shipped(search, rows, tmp_path):
    path, measured = rows
    write(path, *measured)
    out = tmp_path / "bands.yaml"
    assert search("validate", path, "--bands", out).code == 2
    said = search("validate", path, "--cross-validate", "group", "--bands", out)
    assert said.code == 0, said.err
    text = out.read_text()
    assert 'cell: ["to 128 chips", "dense", "Hopper", "16 bits"]' in text
    assert "t.csv, 6 steps" in text
    assert search("validate", path, "--cross-validate", "group", "--bands", out).code == 2
    assert out.read_text() == text
