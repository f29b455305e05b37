"""P10 and P90 from end to end: in `search estimate`, in a run, in what validates; refused where not priced."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from estimator.step import evaluate
from results.schema import strategy_at
from results.store import RunFolder
from search.bands import predicted_band
from search.measured import read_rows
from search.space import SpaceError, load_space, parse_space
from search.validate import validate
from tests.search.measured_rows import cells, write

SPACE = """\
name: skewed
model: mixtral_8x7b
system: {cluster: dgx_h100, num_chips: 64}
workload: {seq: 2048, global_batch: 256, routing_skew: 0.5}
strategy: {ep: [4, 8], zero_stage: [1], recompute: [none, full], redundant_experts: [0, 8]}
search: {keep: all}
reference:
  mine: {ep: 8, zero_stage: 1, recompute: full}
  illegal: {ep: 3}
"""
BAND = ("step_time_p10_s", "step_time_p90_s", "peak_memory_p10_bytes", "peak_memory_p90_bytes")


@pytest.fixture
def skewed_run(search, tmp_path):
    (tmp_path / "skewed.yaml").write_text(SPACE)
    said = search("launch", tmp_path / "skewed.yaml", "--pool", "inline", "--out", tmp_path / "run", "--replay", "0")
    assert said.code == 0, said.err
    return RunFolder.open(tmp_path / "run")


def test_a_front_and_its_references_have_bands(skewed_run, search, tmp_path):
    front, reference = skewed_run.read_front(), skewed_run.read_reference()
    for table in (front, reference.where(reference["name"] == "mine")):
        assert len(table)
        for low, middle, high in (
            ("step_time_p10_s", "step_time_s", "step_time_p90_s"),
            ("peak_memory_p10_bytes", "peak_memory_bytes", "peak_memory_p90_bytes"),
        ):
            assert (table[low] < table[middle]).all()
            assert (table[middle] < table[high]).all()
    space = load_space(tmp_path / "skewed.yaml")
    for line in front.rows():
        parts = space.model, strategy_at(line), space.system, space.workload
        band = predicted_band(*parts, evaluate(*parts))
        assert [line[name] for name in BAND] == [band.columns()[name] for name in BAND]
    illegal = reference.where(reference["name"] == "illegal")
    assert all(np.isnan(illegal[name]).all() for name in BAND)
    assert all(np.isnan(skewed_run.read_trials()[name]).all() for name in BAND)  # a million rows may be there


def test_show_sorts_and_selects_by_a_band(skewed_run, search):
    data = json.loads(search("show", skewed_run.path, "--by", "step_time_p90_s", "--json").out)["rows"]
    late = [line["step_time_p90_s"] for line in data]
    assert late == sorted(late)
    some = search("show", skewed_run.path, "--where", f"step_time_p90_s <= {late[0]!r}", "--json")
    assert [line["id"] for line in json.loads(some.out)["rows"]] == [data[0]["id"]]


def test_estimate_shows_the_band_and_what_it_is_of(search, tmp_path):
    (tmp_path / "skewed.yaml").write_text(SPACE)
    words = ("estimate", tmp_path / "skewed.yaml", "--reference", "mine")
    data, text = json.loads(search(*words, "--json").out), search(*words).out
    assert data["step_time_p10_s"] < data["step_time_s"] < data["step_time_p90_s"]
    assert data["peak_memory_p10_bytes"] < data["peak_memory_bytes"] < data["peak_memory_p90_bytes"]
    flat = " ".join(text.split())
    assert "P10 to P90: how far published steps like this one (to 128 chips, MoE, Hopper, 16 bits) came out" in flat
    assert "routing skew 0.5 (the fullest of 8 ranks of experts has" in flat
    assert "the slowest of 64 chips; allocated" in flat
    assert "; not failures, nor other jobs" in flat
    assert re.search(r"s \([^)]+ to [^)]+s\) a step, ", text)
    even = " ".join(search(*words, "--set", "workload.routing_skew=0").out.split())
    assert "routing skew" not in even
    assert "and the slowest of 64 chips; allocated" in even


def test_a_configuration_that_fits_by_luck_is_told_so(search, tmp_path):
    (tmp_path / "skewed.yaml").write_text(SPACE)
    words = ("estimate", tmp_path / "skewed.yaml", "--reference", "mine")
    data = json.loads(search(*words, "--json").out)
    middle = (data["device_memory_bytes"] + data["device_memory_p90_bytes"]) / 2
    space = load_space(tmp_path / "skewed.yaml")
    headroom = 1 - middle / space.system.chip.hbm_bytes
    system = f"system={{cluster: dgx_h100, num_chips: 64, headroom: {headroom}}}"
    said = search(*words, "--set", system)
    assert said.code == 0
    assert "warning: fits at the median, not at P90 of routing skew:" in said.out


@pytest.mark.parametrize("more", ["objectives: [step_time_p90_s]", "constraints: ['step_time_p90_s <= 20']"])
def test_a_search_does_not_price_bands(more):
    with pytest.raises(SpaceError, match="P10 and P90 are told of the rows that a search keeps.*accepted step_time_s"):
        parse_space(f"{SPACE}{more}\n", "x.yaml")


def test_validation_tells_the_band_of_each_case(tmp_path):
    case = validate(read_rows(write(tmp_path / "rows.csv", cells())))["cases"][0]
    assert case["p10_s"] < case["predicted_step_time_s"] < case["p90_s"]
