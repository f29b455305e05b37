"""Several spaces in one launch: one folder each, one index, and nothing lost where one of them ends badly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from results.batch_index import BatchIndex, Entry, folder_names
from results.store import RunFolder
from search import launch as launching
from search.commands import launch_many
from search.launch import Interrupted

INLINE = ("--pool", "inline", "--replay", "0")
HEAD = "model: llama3_8b\nworkload: {seq: 8192, global_batch: 512}\n"
FITS = HEAD + "system: dgx_h100\nstrategy: {zero_stage: [2, 3], recompute: [none, full]}\n"
TIGHT = HEAD + "system: {cluster: dgx_h100, num_chips: 1}\nstrategy: {micro_batch: [1, 2]}\n"


@pytest.fixture
def spaces(tmp_path):
    folder = tmp_path / "spaces"
    folder.mkdir()
    for name, text in {"a": FITS, "b": FITS, "tight": TIGHT}.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_a_pattern_gives_one_folder_a_space_and_one_index(search, spaces):
    said = search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch")
    assert said.code == 0
    assert {path.name for path in Path("batch").iterdir()} == {"a", "b", "index.json"}
    rows = json.loads(Path("batch/index.json").read_text())["runs"]
    assert [(row["run"], row["outcome"], row["front"] > 0) for row in rows] == [
        ("a", "done", True),
        ("b", "done", True),
    ]
    for row in rows:
        front = RunFolder.open(Path("batch") / row["run"]).read_front()
        assert row["best"]["step_time_s"] == front["step_time_s"].min()
    assert "search show batch/a" in said.out
    assert "[2/2] b" in said.err
    assert said.err.splitlines()[:3] == [
        "a: llama3_8b on 512 x dgx_h100, 4 points; step_time_s, peak_memory_bytes",
        "b: llama3_8b on 512 x dgx_h100, 4 points; step_time_s, peak_memory_bytes",
        "batch of 2: batch",
    ]


def test_runs_of_a_batch_are_the_runs_of_a_launch_alone(search, spaces):
    assert search("launch", "spaces/a.yaml", *INLINE, "--out", "alone").code == 0
    assert search("launch", "spaces/a.yaml", "spaces/b.yaml", *INLINE, "--out", "batch").code == 0
    alone, together = (RunFolder.open(Path(p)) for p in ("alone", "batch/a"))
    assert alone.space_yaml == together.space_yaml
    first, second = (list(folder.read_front().rows()) for folder in (alone, together))
    assert first == second


def test_without_a_place_a_batch_is_made_under_runs_and_found_again(search, spaces):
    said = search("launch", "spaces/a.yaml", "spaces/b.yaml", *INLINE, "--json")
    data = json.loads(said.out)
    assert data["batch"].startswith("runs/batch-")
    assert [Path(row["run"]).name for row in data["runs"]] == ["a", "b"]
    listed = json.loads(search("runs", "--json").out)["runs"]
    assert sorted(Path(row["path"]).name for row in listed) == ["a", "b"]
    assert search("show", "latest").code == 0
    assert "best step_time" in search("runs", Path(data["batch"]).name).out


def test_a_space_where_nothing_fits_does_not_end_the_others(search, spaces):
    said = search("launch", "spaces/tight.yaml", "spaces/a.yaml", *INLINE, "--out", "batch")
    assert said.code == 3
    outcomes = {row["run"]: row["outcome"] for row in BatchIndex.open(Path("batch")).rows()}
    assert outcomes == {"tight": "nothing feasible", "a": "done"}
    assert "search why batch/tight" in said.out
    assert search("why", "batch/tight").code == 0


def test_a_space_that_cannot_be_read_stops_all_before_anything_is_made(search, spaces):
    (spaces / "bad.yaml").write_text("model: llama3_9b\n")
    said = search("launch", "spaces/*.yaml", *INLINE, "--out", "batch")
    assert said.code == 2
    assert said.err.count("\n") == 1
    assert not Path("batch").exists()


def test_a_pattern_without_a_match_is_bad_input(search):
    said = search("launch", "nowhere/*.yaml", *INLINE)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "nowhere/*.yaml: no file matches" in said.err


def test_a_run_that_fails_is_told_and_tried_again_by_resume(search, spaces, monkeypatch):
    whole, broken = launch_many.resume, []

    def breaks_once(path, options, progress):
        if path.name == "a" and not broken:
            broken.append(path)
            raise RuntimeError("2 blocks failed")
        return whole(path, options, progress)

    monkeypatch.setattr(launch_many, "resume", breaks_once)
    said = search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch")
    assert said.code == 1
    assert "a: 2 blocks failed" in said.out
    assert [row["outcome"] for row in BatchIndex.open(Path("batch")).rows()] == ["failed", "done"]
    again = search("resume", "batch", *INLINE)
    assert again.code == 0
    assert [row["outcome"] for row in BatchIndex.open(Path("batch")).rows()] == ["done", "done"]


def test_a_defect_in_one_space_does_not_end_the_others_and_is_the_worst_exit_code(search, spaces, monkeypatch):
    whole = launch_many.resume

    def breaks(path, options, progress):
        if path.name == "a":
            raise KeyError("no such candidates: []")
        return whole(path, options, progress)

    monkeypatch.setattr(launch_many, "resume", breaks)
    said = search("launch", "spaces/*.yaml", *INLINE, "--out", "batch")
    assert said.code == 1
    outcomes = {row["run"]: row["outcome"] for row in BatchIndex.open(Path("batch")).rows()}
    assert outcomes == {"a": "failed", "b": "done", "tight": "nothing feasible"}
    told = " ".join(said.out.split())
    assert "a: a defect of ours: KeyError: 'no such candidates: []'" in told
    assert "search resume batch/a --traceback" in told


def test_an_interrupted_batch_goes_on_where_it_stopped_with_the_same_fronts(search, spaces, monkeypatch):
    assert search("launch", "spaces/[ab].yaml", *INLINE, "--out", "whole").code == 0
    carry_out = launching._carry_out

    def stops(run, *rest):
        if run.path.name == "b":
            run.update_manifest(state="interrupted")
            raise Interrupted(run.path)
        return carry_out(run, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(launching, "_carry_out", stops)
        said = search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch")
    assert said.code == 130
    assert "search resume batch" in said.err
    assert [row["outcome"] for row in BatchIndex.open(Path("batch")).rows()] == ["done", "interrupted"]
    before = Path("batch/a/front.parquet").stat().st_mtime_ns
    assert search("resume", "batch", *INLINE).code == 0
    assert Path("batch/a/front.parquet").stat().st_mtime_ns == before
    for name in ("a", "b"):
        fronts = [list(RunFolder.open(Path(p) / name).read_front().rows()) for p in ("whole", "batch")]
        assert fronts[0] == fronts[1]


def test_a_run_that_was_killed_shows_as_interrupted_in_the_index(search, spaces):
    search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch")
    index = BatchIndex.open(Path("batch"))
    RunFolder.open(Path("batch/b")).update_manifest(state="running")  # as a killed process leaves it
    index.settle(1, outcome="running")
    assert [row["outcome"] for row in BatchIndex.open(Path("batch")).rows()] == ["done", "interrupted"]


def test_a_run_whose_folder_is_gone_is_not_told_as_done(search, spaces):
    search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch")
    shutil.rmtree("batch/a")
    assert [row["outcome"] for row in BatchIndex.open(Path("batch")).rows()] == ["failed", "done"]
    assert "a: batch/a: no such run folder any more" in search("runs", "batch").out
    again = search("resume", "batch", *INLINE)
    assert again.code == 2
    assert "search show batch/b" in again.out


@pytest.mark.parametrize("command", [("show",), ("estimate",), ("replay",)])
def test_a_batch_where_a_run_is_wanted_names_its_runs(search, spaces, command):
    search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch")
    said = search(*command, "batch")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "batch/a" in said.err


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1, "created": "", "runs": [{"run": "a"}]}'])
def test_a_damaged_index_is_one_line(search, spaces, text):
    search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch")
    Path("batch/index.json").write_text(text)
    for words in (("resume", "batch", *INLINE), ("runs", "batch")):
        said = search(*words)
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert "index.json: must be the index of a batch" in said.err


def test_a_batch_needs_a_new_or_empty_folder(search, spaces):
    Path("batch").mkdir()
    Path("batch/notes.txt").write_text("mine")
    said = search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch")
    assert said.code == 2
    assert Path("batch/notes.txt").read_text() == "mine"


def test_folders_of_equal_names_are_numbered_and_never_shared():
    assert folder_names(["x", "x-2", "x", "x", "..", "/"]) == ["x", "x-2", "x-3", "x-4", "run", "run-2"]


def test_an_unknown_outcome_is_refused():
    with pytest.raises(ValueError, match="outcome must be one of"):
        Entry(run="a", name="a", model="m", systems=(), num_gpus=(), outcome="lost")


@pytest.mark.slow
def test_runs_of_a_batch_share_one_ray(search, spaces, monkeypatch):
    import ray

    started = []
    init = ray.init
    monkeypatch.setattr(ray, "init", lambda *a, **k: started.append(1) or init(*a, **k))
    said = search("launch", "spaces/[ab].yaml", "--replay", "0", "--out", "batch")
    assert said.code == 0
    assert len(started) == 1
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    "change",
    [
        {"run": 5}, {"run": "../a"}, {"num_gpus": ["x"]}, {"systems": [], "num_gpus": []}, {"best": [1]},
        {"best": {"step_time_s": "abc"}}, {"front": "many"}, {"outcome": "lost"}, {"error": None},
    ],
)  # fmt: skip
def test_a_row_of_the_index_of_the_wrong_kind_is_one_line(search, spaces, change):
    search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch")
    data = json.loads(Path("batch/index.json").read_text())
    data["runs"][0] |= change
    Path("batch/index.json").write_text(json.dumps(data))
    for words in (("resume", "batch", *INLINE), ("runs", "batch"), ("show", "batch")):
        said = search(*words)
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert "index.json: must be the index of a batch" in said.err


def test_a_run_whose_space_is_gone_does_not_end_the_others(search, spaces):
    search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch")
    index = BatchIndex.open(Path("batch"))
    for number in range(2):
        index.settle(number, outcome="waiting")
    Path("batch/a/space.yaml").unlink()
    Path("batch/a/space.yaml").mkdir()
    said = search("resume", "batch", *INLINE)
    assert said.code == 2
    assert [row["outcome"] for row in BatchIndex.open(Path("batch")).rows()] == ["failed", "done"]
    assert "a: " in said.out


def test_an_answer_that_cannot_be_written_stops_a_launch_before_it_begins(search, spaces):
    for place in ("nowhere/answer.json", "spaces/a.yaml", "spaces"):
        said = search("launch", "spaces/a.yaml", *INLINE, "--out", "run", "--json", "-o", place)
        assert (said.code, said.err.count("\n")) == (2, 1)
        assert not Path("run").exists()


def test_what_a_space_folds_stands_in_the_manifest_of_a_run_alone_and_in_a_batch(search, spaces):
    (spaces / "a.yaml").write_text(FITS.replace("strategy: {", "strategy: {ep: [1, 2], "))
    assert search("launch", "spaces/a.yaml", *INLINE, "--out", "alone").code == 0
    assert search("launch", "spaces/[ab].yaml", *INLINE, "--out", "batch").code == 0
    for place in ("alone", "batch/a"):
        (notice,) = RunFolder.open(Path(place)).manifest["notices"]
        assert notice.startswith("ep: 1, 2 has no effect on")
