"""`search replay`: what it answers, what it leaves in a run, and that bad input loses nothing."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from estimator.detail.step import replay_step
from estimator.timeline import critical_path
from results.store import RunFolder
from search import replays
from search.commands.outcome import replay_lines
from search.commands.point import read_point
from tests.search.conftest import SMALL

POINT = (SMALL, "--reference", "fully_sharded")
TOO_LARGE = ("--set", "reference.fully_sharded.zero_stage=0", "--set", "reference.fully_sharded.recompute=none")
ILLEGAL = ("--set", "reference.fully_sharded.tp=3")


def rows_of(run):
    return list(RunFolder.open(run.path).read_replays().rows())


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def trace_of(path):
    with gzip.open(path, "rt") as file:
        return json.load(file)


# ------------------------------------------------------------------------------------------------------------- a run


def test_a_run_gets_a_row_and_a_trace_for_each_finalist_and_a_table(search, small_run):
    said = search("replay", small_run.path)
    assert said.code == 0
    rows = rows_of(small_run)
    assert [row["rank_replayed"] for row in rows] == [1, 2, 3, 4]
    times = [row["replayed_step_time_s"] for row in rows]
    assert times == sorted(times)
    assert {row["id"]: row["trace"] for row in rows} == {
        0: "replays/0.json.gz", 7: "replays/7.json.gz", 14: "replays/14.json.gz", -1: "replays/fully_sharded.json.gz",
    }  # fmt: skip
    for row in rows:
        about = trace_of(small_run.path / row["trace"])["otherData"]
        assert about["replayed_step_time_s"] == row["replayed_step_time_s"]
        assert f"{row['replayed_step_time_s']:.4g} s" in said.out
        assert f"{row['estimated_step_time_s']:.4g} s" in said.out
    for text in ("why chosen", "* best step_time_s", "reference fully_sharded", "64 = tp 1 x pp 1 x dp 64",
                 "critical path of", "should hide behind", "rank 0", "memory of rank 0", "https://ui.perfetto.dev",
                 f"search estimate {small_run.path}:"):  # fmt: skip
        assert text in said.out
    assert all(len(line) <= 100 for line in said.out.splitlines() if str(small_run.path) not in line)
    assert "replaying 4 of 4: fully_sharded (reference fully_sharded)" in said.err


def test_a_row_tells_what_the_replay_says(search, small_run):
    search("replay", small_run.path, "--no-trace")
    point = read_point(f"{small_run.path}:7", None, [])
    step = replay_step(point.model, point.strategy, point.system, point.workload)
    (row,) = [row for row in rows_of(small_run) if row["id"] == 7]
    assert row["replayed_step_time_s"] == step.step_time_s
    assert row["estimated_step_time_s"] == step.estimate.step_time_s
    assert row["error"] == step.error
    assert row["replayed_pipeline_s"] == step.pipeline_s
    assert row["replayed_peak_memory_bytes"] == max(step.peak_memory_bytes)
    assert row["events"] == len(step.timeline.tasks)
    critical = critical_path(step.timeline).seconds
    assert {name: row[f"critical_{name}_s"] for name in critical} == critical
    told = sum(value for name, value in row.items() if name.startswith("critical_"))
    assert told == pytest.approx(step.timeline.span_s, rel=1e-12)  # sums of a dozen doubles
    assert row["trace"] == ""


def test_json_has_stable_keys_and_the_fastest_in_full(search, small_run):
    data = json.loads(search("replay", small_run.path, "--no-trace", "--json").out)
    assert data.keys() == {"run", "rows", "best", "tuned"}
    assert data["tuned"] == []
    assert data["rows"][0].keys() == {
        "id", "name", "system", "num_gpus", "why", "strategy", "estimated_step_time_s", "replayed_step_time_s", "error",
        "replayed_pipeline_s", "estimated_peak_memory_bytes", "replayed_peak_memory_bytes", "critical_path_s",
        "exposed_comm_s", "events", "replay_s", "trace", "agrees", "fits", "rank_estimated", "rank_replayed", "note",
    }  # fmt: skip
    best = data["best"]
    assert best.keys() == {"id", "name", "span_s", "critical_path_s", "exposed", "ranks"}
    assert best["id"] == data["rows"][0]["id"]
    assert sum(best["critical_path_s"].values()) == pytest.approx(best["span_s"], rel=1e-12)
    for rank in best["ranks"]:
        whole = rank["compute_s"] + rank["communication_s"] - rank["overlap_s"] + rank["idle_s"]
        assert whole == pytest.approx(best["span_s"], rel=1e-9)


def test_show_tells_replayed_times_and_the_table_of_replays(search, small_run):
    nothing = search("show", small_run.path, "--tables", "replays")
    assert (nothing.code, nothing.out) == (0, f"no replays yet; search replay {small_run.path} makes them\n")
    assert "replayed" not in search("show", small_run.path).out.splitlines()[0].split()
    search("replay", small_run.path, "--no-trace")
    shown = search("show", small_run.path)
    for row in rows_of(small_run):
        assert f"{row['replayed_step_time_s']:.4g} s" in shown.out
    data = json.loads(search("show", small_run.path, "--json").out)
    assert [row["id"] for row in data["replays"]] == [row["id"] for row in rows_of(small_run)]
    table = search("show", small_run.path, "--tables", "replays", "--top", "2")
    assert table.out.count("\n      64 = ") == 2
    csv = search("show", small_run.path, "--tables", "replays", "--csv").out.splitlines()
    assert (len(csv), csv[0].split(",")[:3]) == (5, ["id", "name", "system"])
    assert search("show", small_run.path, "--tables", "replays", "--by", "events").code == 0
    assert search("show", small_run.path, "--tables", "replays", "--where", "tp == 1").code == 2


def test_replaying_again_replaces_rows_and_traces_of_the_same_points(search, small_run):
    search("replay", small_run.path)
    before = contents(small_run.path / "replays")
    assert search("replay", small_run.path).code == 0
    assert len(rows_of(small_run)) == 4
    assert contents(small_run.path / "replays") == before


def test_a_trace_of_other_content_is_never_overwritten(search, small_run):
    folder = small_run.path / "replays"
    folder.mkdir()
    (folder / "7.json.gz").write_bytes(b"mine")
    said = search("replay", small_run.path)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "7.json.gz" in said.err
    assert contents(folder) == {"7.json.gz": b"mine"}
    assert rows_of(small_run) == []
    assert search("replay", small_run.path, "--trace", "elsewhere").code == 0
    assert all(Path(row["trace"]).is_absolute() and Path(row["trace"]).is_file() for row in rows_of(small_run))
    assert contents(folder) == {"7.json.gz": b"mine"}


def test_a_trace_of_another_configuration_with_the_same_name_is_never_overwritten(search, tmp_path):
    assert search("replay", *POINT, "--trace", "t").code == 0
    before = contents(tmp_path / "t")
    assert list(before) == ["fully_sharded.json.gz"]
    said = search("replay", *POINT, "--set", "reference.fully_sharded.recompute=none", "--trace", "t")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert contents(tmp_path / "t") == before
    assert search("replay", *POINT, "--trace", "t").code == 0


def test_traces_go_where_they_are_asked_to(search, small_run, tmp_path):
    said = search("replay", small_run.path, "--trace", tmp_path / "t" / "deep")
    assert said.code == 0
    names = sorted(contents(tmp_path / "t" / "deep"))
    assert names == ["small-0.json.gz", "small-14.json.gz", "small-7.json.gz", "small-fully_sharded.json.gz"]
    assert not (small_run.path / "replays").exists()
    assert {row["trace"] for row in rows_of(small_run)} == {str(tmp_path / "t" / "deep" / name) for name in names}


@pytest.mark.parametrize(("top", "ids"), [("0", {0, 14, -1}), ("1", {0, 7, 14, -1}), ("1000", {0, 7, 14, -1})])
def test_more_finalists_than_the_front_has_points_are_all_points(search, small_run, top, ids):
    assert search("replay", small_run.path, "--no-trace", "--top", top).code == 0
    assert {row["id"] for row in rows_of(small_run)} == ids


def test_a_finalist_that_is_too_large_is_a_note_in_its_row(search, small_run, monkeypatch):
    def refuse(model, strategy, *rest, **more):
        if str(strategy.recompute) == "full" and not strategy.overlap.dp:
            raise ValueError("a step of 13,000,000 tasks is too large to replay;\ntake another")
        return replay_step(model, strategy, *rest, **more)

    monkeypatch.setattr(replays, "replay_step", refuse)
    said = search("replay", small_run.path)
    assert said.code == 0
    *fine, last = rows_of(small_run)
    assert (last["id"], last["rank_replayed"], last["events"], last["trace"]) == (14, 0, 0, "")
    assert last["note"] == "not replayed: a step of 13,000,000 tasks is too large to replay; take another"
    assert last["note"].partition(";")[0] in " ".join(said.out.split())
    assert not any(row["note"] for row in fine)
    data = json.loads(search("replay", small_run.path, "--json").out)
    assert data["rows"][-1]["replayed_step_time_s"] is None


def test_a_trace_that_fails_half_way_is_a_note_and_the_row_stays(search, small_run, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("replays/0.json.gz: cannot write the trace: No space left on device")

    monkeypatch.setattr(replays, "write_trace", refuse)
    said = search("replay", small_run.path)
    assert said.code == 0
    assert all("No space left on device" in row["note"] and row["rank_replayed"] for row in rows_of(small_run))
    assert "No space left on device" in said.out


def test_a_trace_that_does_not_hold_all_says_so_and_so_does_the_row(search, small_run, monkeypatch):
    whole = replays.write_trace
    monkeypatch.setattr(replays, "write_trace", lambda *args, **more: whole(*args, **more | {"max_bytes": 100_000}))
    said = search("replay", small_run.path)
    for row in rows_of(small_run):
        ops = trace_of(small_run.path / row["trace"])["otherData"]["ops"]
        assert row["note"] == f"trace shows operations {ops}"
        assert ops != "all"
    assert "trace shows operations" in said.out
    assert "trace shows operations" in search("replay", f"{small_run.path}:7").out


def test_what_a_trace_leaves_out_is_no_news_of_a_front():
    row = {"id": 3, "name": "", "rank_replayed": 0, "fits": True, "note": ""}
    partial = "trace shows operations of micro-batches 0, 5, 9 of 10; of the others passes only"
    notes = [partial, f"does not fit by the replay: rank 0; {partial}", "no trace: disk full"]
    told = replay_lines([row | {"note": note} for note in notes])
    assert told == ["3: does not fit by the replay: rank 0", "3: no trace: disk full"]


def test_memory_that_the_replay_finds_too_small_is_told(search, small_run, monkeypatch):
    def fuller(*point, **more):
        step = replay_step(*point, **more)
        tasks = step.timeline.tasks
        devices = tuple(replace(device, capacity_bytes=1e9) for device in tasks.devices)
        return replace(step, timeline=replace(step.timeline, tasks=replace(tasks, devices=devices)))

    monkeypatch.setattr(replays, "replay_step", fuller)
    said = search("replay", small_run.path, "--no-trace")
    assert all(row["note"].startswith("does not fit by the replay: rank 0 takes ") for row in rows_of(small_run))
    assert said.out.count("does not fit by the replay: rank 0") == 5  # four finalists, and the fastest in full
    assert not any(row["fits"] for row in rows_of(small_run))
    assert "! more memory than there is by the replay, ranked behind all that fit: " in said.out
    assert "worst rank; does not fit)" in search("replay", f"{small_run.path}:7", "--no-trace").out


def test_an_interruption_keeps_what_was_replayed(search, small_run, monkeypatch):
    def interrupt(model, strategy, *rest, **more):
        if str(strategy.recompute) == "full":
            raise KeyboardInterrupt
        return replay_step(model, strategy, *rest, **more)

    monkeypatch.setattr(replays, "replay_step", interrupt)
    assert search("replay", small_run.path).code == 130
    assert [row["id"] for row in rows_of(small_run)] == [0]
    assert RunFolder.open(small_run.path).state == "done"


def test_a_replay_that_contradicts_its_estimate_is_flagged_and_ranks_again(search, small_run, monkeypatch):
    def slowed(model, strategy, *rest, **more):
        step = replay_step(model, strategy, *rest, **more)
        return replace(step, step_time_s=9.0) if str(strategy.recompute) == "none" else step

    monkeypatch.setattr(replays, "replay_step", slowed)
    said = search("replay", small_run.path, "--no-trace")
    rows = rows_of(small_run)
    assert [row["id"] for row in rows if not row["agrees"]] == [0]
    assert (rows[-1]["id"], rows[-1]["rank_estimated"], rows[-1]["rank_replayed"]) == (0, 1, 4)
    told = " ".join(said.out.split())
    assert "! the estimate is off by more than 5%, trust the replay: 0 (-" in told
    assert "ranking changed: by replay 7, " in told
    assert "the fastest, 7: " in told
    assert "!" in next(line for line in search("show", small_run.path).out.splitlines() if line.startswith("  0"))


def test_a_damaged_file_of_replays_is_told_and_written_anew(search, small_run):
    file = small_run.path / "replays.parquet"
    search("replay", small_run.path, "--no-trace")
    whole = rows_of(small_run)
    for content in (b"", b"PAR1", file.read_bytes()[:-9]):
        file.write_bytes(content)
        said = search("show", small_run.path, "--tables", "replays")
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert "replays.parquet" in said.err
        front = search("show", small_run.path)
        assert front.code == 0
        assert f"search replay {small_run.path}" in " ".join(front.out.split())
        assert search("replay", small_run.path, "--no-trace").code == 0
        assert [row["id"] for row in rows_of(small_run)] == [row["id"] for row in whole]


def test_a_run_of_an_empty_front_has_nothing_to_replay(search, small_run):
    with RunFolder.open(small_run.path) as run:
        run.write_front({name: column[:0] for name, column in run.read_front().columns.items()})
    said = search("replay", small_run.path)
    assert (said.code, said.out.count("\n"), said.err) == (3, 1, "")
    assert json.loads(search("replay", small_run.path, "--json").out)["rows"] == []


# ------------------------------------------------------------------------------------------------------------- a point


def test_a_row_of_a_run_is_told_in_full_and_kept_with_the_run(search, small_run):
    said = search("replay", f"{small_run.path}:7", "--json")
    data = json.loads(said.out)
    (row,) = rows_of(small_run)
    assert (said.code, data["id"], row["why"]) == (0, 7, "asked for")
    assert data["replayed_step_time_s"] == row["replayed_step_time_s"]
    assert row["trace"] == "replays/7.json.gz"
    assert data["trace"] == str(small_run.path / "replays" / "7.json.gz")
    assert data.keys() >= {"strategy", "critical_path_s", "exposed", "ranks", "span_s", "agrees"}
    search("replay", small_run.path)
    whys = {row["id"]: row["why"] for row in rows_of(small_run)}
    assert search("replay", f"{small_run.path}:7").code == 0
    assert {row["id"]: row["why"] for row in rows_of(small_run)} == whys
    assert search("replay", f"{small_run.path}:fully_sharded", "--no-trace").code == 0


def test_a_changed_row_of_a_run_is_not_kept_with_the_run(search, small_run):
    before = contents(small_run.path)
    said = search("replay", f"{small_run.path}:7", "--set", "strategy.recompute=full")
    assert said.code == 0
    assert contents(small_run.path) == before


def test_a_configuration_is_told_in_full_and_leaves_no_file(search, tmp_path):
    said = search("replay", *POINT)
    assert said.code == 0
    for text in (
        "8.0 B parameters",
        "64 = tp 1",
        "estimate",
        "critical path of",
        "rank 0",
        "no trace was written; --trace",
    ):
        assert text in said.out
    assert list(tmp_path.iterdir()) == []
    data = json.loads(search("replay", *POINT, "--json").out)
    estimate = json.loads(search("estimate", *POINT, "--json").out)
    assert data["estimated_step_time_s"] == estimate["step_time_s"]
    assert data["strategy"] == estimate["strategy"]
    assert np.isclose(sum(data["critical_path_s"].values()), data["span_s"], rtol=1e-12)


def test_an_infeasible_point_is_one_line_with_reason_and_remedy_and_3(search, tmp_path):
    said = search("replay", *POINT, *TOO_LARGE, "--trace", "t")
    assert (said.code, said.out.count("\n"), said.err) == (3, 1, "")
    assert "does not fit: " in said.out
    assert "fits with " in said.out
    assert not (tmp_path / "t").exists()
    data = json.loads(search("replay", *POINT, *TOO_LARGE, "--json").out)
    assert (data["feasible"], bool(data["remedies"])) == (False, True)


# ----------------------------------------------------------------------------------------------------------- bad input

HOSTILE = [
    ["replay"],
    ["replay", "missing"],
    ["replay", "folder"],
    ["replay", "file"],
    ["replay", ""],
    ["replay", SMALL],
    ["replay", *POINT, *ILLEGAL],
    ["replay", *POINT, "--top", "3"],
    ["replay", *POINT, "--trace", "file"],
    ["replay", *POINT, "--trace", "file/below"],
    ["replay", *POINT, "--trace", "/proc/none"],
    ["replay", *POINT, "--trace", "runs/small"],
    ["replay", *POINT, "--trace", ""],
    ["replay", *POINT, "--trace", "t", "--no-trace"],
    ["replay", SMALL, "--reference", "fully_shard"],
    ["replay", "latest", "--top", "-1"],
    ["replay", "latest", "--top", "many"],
    ["replay", "latest", "--set", "strategy.tp=1"],
    ["replay", "latest", "--reference", "fully_sharded"],
    ["replay", "latest", "--trace", "file"],
    ["replay", "latest", "--trace", "file/below"],
    ["replay", "latest", "--trace", "runs/small"],
    ["replay", "latest:8"],
    ["replay", "latest:"],
    ["replay", "latest:none"],
    ["replay", "missing:0"],
    ["replay", "latest:0", "--top", "3"],
    ["launch", SMALL, "--replay", "-1"],
    ["launch", SMALL, "--replay", "some"],
]


@pytest.mark.parametrize("words", HOSTILE, ids=" ".join)
def test_bad_input_is_one_line_and_2_and_changes_nothing(search, small_run, tmp_path, words):
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    before = contents(tmp_path)
    said = search(*words)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith("search: ")
    assert "Traceback" not in said.err
    assert contents(tmp_path) == before


def test_a_file_where_the_folder_of_traces_should_be_is_one_line_and_nothing_is_lost(search, small_run):
    (small_run.path / "replays").write_text("mine")
    said = search("replay", small_run.path)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert (small_run.path / "replays").read_text() == "mine"
    assert search("replay", small_run.path, "--no-trace").code == 0


def test_a_run_that_another_process_writes_to_is_one_line(search, small_run):
    with RunFolder.open(small_run.path) as holder:
        holder.claim()
        said = search("replay", small_run.path)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "only one process may write to a run" in said.err


@pytest.mark.skipif("__import__('os').geteuid() == 0", reason="needs to be no root: root may write anywhere")
def test_a_read_only_run_is_one_line_and_stays_as_it_is(search, small_run):
    before = contents(small_run.path)
    small_run.path.chmod(0o555)
    try:
        said = search("replay", small_run.path)
    finally:
        small_run.path.chmod(0o755)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert contents(small_run.path) == before
