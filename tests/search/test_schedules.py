"""`search schedules`: every schedule for one configuration, held to `evaluate`."""

import json

import numpy as np
import pytest

from estimator.schedule import in_flight, placement
from estimator.strategy import Schedule
from results.report.gantt import alive, text_gantt
from search.commands.point import read_point
from search.commands.schedules import _lane, compared

POINT = ("llama3_70b", "rule_of_thumb", ["workload.global_batch=128"])
WORDS = ["schedules", "llama3_70b:rule_of_thumb", "--set", "workload.global_batch=128"]


@pytest.fixture(scope="module")
def point():
    return read_point(*POINT)


@pytest.fixture(scope="module")
def rows(point):
    return compared(point, 45e9)[0]


def test_every_schedule_is_a_row_or_refused_with_its_rule(point, rows):
    assert {row.strategy.schedule for row in rows} == set(Schedule)
    few = compared(read_point(POINT[0], POINT[1], ["workload.global_batch=32"]), 45e9)
    assert few[1]["dualpipe"].startswith("schedule: dualpipe needs an even number of micro-batches, at least 2 pp (8)")


def test_rows_that_fit_come_first_and_the_fastest_of_them_first(rows):
    assert rows == sorted(rows, key=lambda row: (not row.fits, float(row.result.step_time_s)))
    for row in rows:
        assert row.fits == (float(row.result.device_memory_bytes) <= 45e9)


def test_less_memory_never_makes_a_schedule_faster(point, rows):
    wide = {row.strategy.schedule: row for row in compared(point, 70e9)[0]}
    for row in rows:
        other = wide[row.strategy.schedule]
        if row.fits:
            assert other.fits
            assert other.result.step_time_s <= row.result.step_time_s


def test_what_is_drawn_is_what_is_priced(rows):
    for row in rows:
        chunks = placement(row.strategy.schedule, int(row.strategy.pp), int(row.strategy.vpp))
        assert in_flight(row.passes, chunks).sum(axis=1).max() > 0
        # Sends are in the estimate and not in the picture: below 3 % of the pipeline here.
        assert row.simulated.span == pytest.approx(float(row.result.pipeline_s), rel=0.05)
        moments, held = alive(_lane(row))
        assert held.max() == 1.0
        assert held[-1] == 0.0
        assert (np.diff(moments) >= 0.0).all()
        lines = text_gantt(_lane(row))
        assert len(lines) == int(row.strategy.pp) + 2
        assert {len(line) for line in lines[:-1]} == {101}


def test_the_table_its_json_and_its_picture(search, tmp_path):
    said = search(*WORDS, "--memory", "45")
    assert said.code == 0
    assert sum(line.endswith("  no") for line in said.out.splitlines()) == 2
    assert "zb-v x2" in said.out
    picture = tmp_path / "a.png"
    told = search(*WORDS, "--json", "-o", str(picture))
    assert picture.read_bytes()[:4] == b"\x89PNG"
    data = json.loads(told.out)
    assert {row["schedule"] for row in data["schedules"]} == {s.value for s in Schedule}
    assert all(0.0 <= row["bubble_share"] < 1.0 for row in data["schedules"])
    assert search(*WORDS, "--memory", "5").code == 3


@pytest.mark.parametrize("words", [
    ["schedules", "llama3_70b"], ["schedules", "llama3_70b:rule_of_thumb", "--memory", "no"],
    ["schedules", "llama3_8b_small:fully_sharded"],
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(search, words):
    said = search(*words)
    assert said.code == 2
    assert said.err.count("\n") == 1


def test_numbers_are_refused_with_an_example_in_their_own_unit(search):
    for words, example in (
        ([*WORDS, "--memory", "nan"], "80"),
        (["plan", "latest", "--tokens", "0"], "15e12"),
        (["plan", "latest", "--tokens", "1e12", "--days", "0"], "30"),
        (["plan", "latest", "--tokens", "1e12", "--budget", "-1"], "5e6"),
    ):
        said = search(*words)
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert f"must be a positive number such as {example}, but got" in said.err


def test_rows_whose_expert_traffic_cannot_be_hidden_say_so(search):
    words = ["schedules", "deepseek_v3:published", "--set", "workload.global_batch=4096"]
    data = json.loads(search(*words, "--json").out)["schedules"]
    bare = [f"{row['schedule']}{' x2' if row['vpp'] == 2 else ''}" for row in data if not row["overlap_ep"]]
    assert bare
    told = " ".join(search(*words).out.split())
    assert f"without overlap of ep, which needs two micro-batches side by side: {', '.join(bare)}" in told
    assert "without overlap of ep" not in search(*WORDS).out


def test_step_times_have_the_four_digits_of_a_front(search):
    (row, *_) = json.loads(search(*WORDS, "--json").out)["schedules"]
    assert f"{row['step_time_s']:.4g} s" in search(*WORDS).out
    estimate = search("estimate", *WORDS[1:])
    step = json.loads(search("estimate", *WORDS[1:], "--json").out)["step_time_s"]
    assert f"{step:.4g} s (" in estimate.out


def test_a_configuration_that_is_illegal_itself_is_bad_input_with_its_rule(search):
    said = search("schedules", "llama3_70b:rule_of_thumb", "--set", "strategy.cp=3")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "world: num_chips (512)" in said.err


def test_more_passes_than_a_minute_of_simulation_are_refused(search):
    said = search("schedules", "llama3_70b:rule_of_thumb", "--set", "workload.global_batch=512000")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "must be at most 20000" in said.err


def test_memory_without_a_bound_is_refused(search):
    said = search("schedules", "llama3_70b:rule_of_thumb", "--memory", "1e300")
    assert (said.code, said.err.count("\n")) == (2, 1)
