"""Claims about a replay as text: it fits a terminal, adds up, and says who computed when and what was in the way."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from estimator.tasks import SHIELDS, Category, Device, Shield, Stream, Tasks
from estimator.timeline import critical_path, exposed, memory
from hardware.units import GIB
from results.report.replay import busy_strips, critical_table, exposed_table, finalist_table, memory_lines
from results.schema import REPLAY_FIELDS, Plain, conform
from tests.results.laid import laid, pipeline


def fits_a_terminal(text):
    return all(len(line) <= 100 and line.isprintable() for line in text.splitlines()) and text.endswith("\n")


@pytest.fixture
def half():
    """A rank that computes for a second, sends for one, does both for one, then nothing; 4 GiB in the third."""
    tasks = Tasks.of(
        devices=[Device(name="rank 0", base_bytes=1.0 * GIB, capacity_bytes=8 * GIB), Device(name="rank 1")],
        streams=[Stream(device=0, name="compute", computes=True), Stream(device=0, name="dp"),
                 Stream(device=1, name="compute", computes=True)],
        stream=[0, 1, 0, 1, 2], seconds=[1.0, 1.0, 1.0, 1.0, 4.0], edges=[(0, 1), (1, 2), (1, 3)],
        category=[Category.FORWARD, Category.DP, Category.BACKWARD, Category.DP, Category.FORWARD],
        shield=[SHIELDS.index(Shield.BACKWARD)] * 5,
        alloc_bytes=[0, 0, 3 * GIB, 0, 0], free_bytes=[0, 0, 3 * GIB, 0, 0],
    )  # fmt: skip
    return laid(tasks)


def test_a_strip_shows_compute_traffic_and_idle_time(half):
    text = busy_strips(half)
    _, first, second = text.splitlines()
    strip = re.match(r"rank 0 {2}([#+.-]{50})", first)[1]
    assert {strip[:12], strip[13:25], strip[25:37], strip[38:]} == {"#" * 12, "-" * 12, "." * 12}
    assert second[8:58] == "#" * 50
    assert first.split()[-3:] == ["50.0%", "25.0%", "25.0%"]
    assert second.split()[-3:] == ["100.0%", "0.0%", "0.0%"]
    assert fits_a_terminal(text)


def test_many_ranks_are_shown_by_some(half):
    text = busy_strips(pipeline(ranks=40, micro_batches=3))
    lines = text.splitlines()
    assert (len(lines), lines[-1]) == (18, "16 of 40 ranks")
    assert (lines[1].split()[1], lines[-2].split()[1]) == ("0", "39")
    assert fits_a_terminal(text)


def test_the_critical_path_is_told_longest_first_and_adds_up():
    timeline = pipeline(ranks=3, micro_batches=5)
    text = critical_table(critical_path(timeline), timeline.span_s)
    _, *lines = text.splitlines()
    shares = [float(re.search(r"([\d.]+)%", line)[1]) for line in lines]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))  # printed to a tenth of a percent
    assert fits_a_terminal(text)


def test_exposed_traffic_is_told_with_what_should_have_hidden_it(half):
    text = exposed_table(exposed(half), half)
    row = text.splitlines()[-1]
    assert re.split(r"\s{2,}", row) == ["dp", "the last backward passes", "1.0 s", "2.0 s", "50%", "rank 0"]
    assert fits_a_terminal(text)
    silent = laid(Tasks.of(devices=[Device(name="a")], streams=[Stream(device=0, name="c", computes=True)], stream=[0],
                           seconds=[1.0]))  # fmt: skip
    assert exposed_table(exposed(silent), silent) == "no traffic\n"


def test_memory_is_told_of_the_fullest_rank_over_time(half):
    text = memory_lines(half, memory(half))
    assert "memory of rank 0, the fullest: peak 4.0 GiB of 8.0 GiB (50.0%) at 2.0 s" in text
    tenths = text.splitlines()[-1].rpartition(" ")[2]
    assert re.fullmatch("1{25}5{12,13}1{12,13}", tenths)
    assert fits_a_terminal(text)


def test_what_does_not_fit_by_the_replay_is_said(half):
    small = replace(half.tasks.devices[0], capacity_bytes=3.5 * GIB)
    tight = replace(half, tasks=replace(half.tasks, devices=(small, half.tasks.devices[1])))
    text = memory_lines(tight, memory(tight))
    assert "does not fit by the replay: rank 0\n" in text
    assert "!" in text.splitlines()[-1]


def test_a_timeline_without_memory_or_tasks_is_still_told():
    empty = laid(Tasks.of(devices=[Device(name="a")], streams=[Stream(device=0, name="c")], stream=[], seconds=[]))
    for text in (
        busy_strips(empty), memory_lines(empty, memory(empty)), critical_table(critical_path(empty), 0.0),
        exposed_table(exposed(empty), empty),
    ):  # fmt: skip
        assert fits_a_terminal(text)


def finalist(**cells):
    row = {field.name: "" if field.kind is Plain.STRING else 1.0 for field in REPLAY_FIELDS}
    row |= {"agrees": True, "fits": True, "why": "best step_time_s, knee", "error": -0.012, "note": ""} | cells
    return conform({name: [cell] for name, cell in row.items()}, REPLAY_FIELDS).row(0)


def test_finalists_are_told_with_estimate_replay_and_a_flag_where_they_differ(make_front):
    front = make_front(3)
    rows = [
        finalist(id=1000, replayed_step_time_s=19.9, estimated_step_time_s=19.66),
        finalist(id=1001, error=0.0721, agrees=False),
        finalist(id=-1, name="mine", error=math.nan, replayed_step_time_s=math.nan, note="not replayed: too large"),
    ]
    text = finalist_table(rows, list(front.rows()))
    assert re.search(r"1000 +19\.66 s +19\.9 s +-1\.2% .*\* best step_time_s, knee", text)
    assert "+7.2%!" in text
    assert re.search(r"ref +1 s +- +- ", text)
    assert "      not replayed: too large\n" in text
    assert "2048 = tp 1 x pp 16" in text or "tp 1 x pp 16 x dp 128" in text
    assert fits_a_terminal(text)
    assert finalist_table([], []) == "no finalists\n"
