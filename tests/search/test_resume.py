"""A run that is cut short goes on where it stopped. Drivers that must die run as this file itself."""

# ruff: noqa: T201  # drivers speak to their test

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from results.store import RunFolder
from search.launch import Interrupted, LaunchOptions, Update, launch, resume
from search.space import load_space
from tests.search.test_pool import command, descendants, wait_until_gone
from tests.search.watch import Watch

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("search.block_size=400",)  # 15 blocks
INLINE = LaunchOptions(pool="inline")
WAIT_S = 120.0


def driver(arguments: list[str], pause_at: int) -> None:
    """Runs a command line, and at an update says so and waits for the end."""
    from search.cli import main
    from search.commands.progress import Lines

    seen: list[Update] = []

    def update(self: Lines, state: Update) -> None:
        seen.append(state)
        if len(seen) == pause_at:
            print("paused", flush=True)
            sys.stdin.read()

    Lines.update = update  # type: ignore[method-assign]
    sys.exit(main(arguments))


def start(*words: str | Path, pause_at: int = 8) -> subprocess.Popen[str]:
    """A driver that has reached the update `pause_at`."""
    command = [sys.executable, __file__, str(pause_at), *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    said = process.stdout.readline()
    if said != "paused\n":
        process.kill()
        pytest.fail(f"the driver said {said!r}, {process.communicate()}")
    return process


def launched(out: Path, *more: str, pause_at: int = 8) -> subprocess.Popen[str]:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return start("launch", "llama3_70b", *settings, "--out", out, *more, pause_at=pause_at)


def journal(run: Path) -> Path:
    return run / "journal" / "blocks.jsonl"


def lines_of(run: Path) -> list[str]:
    return journal(run).read_text().splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return launch(load_space("llama3_70b", SETTINGS), replace(INLINE, out=out), Watch())


def front_bytes(run: RunFolder | Path) -> bytes:
    return ((run if isinstance(run, Path) else run.path) / "front.parquet").read_bytes()


def interrupted(out: Path, at: int) -> Path:
    """A run of this process that stops itself at an update."""

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        launch(load_space("llama3_70b", SETTINGS), replace(INLINE, out=out), Watch(at, stop))
    assert stopped.value.run == out
    return out


def test_a_killed_driver_resumes_to_the_same_front(whole, tmp_path):
    run = tmp_path / "run"
    with launched(run, "--pool", "inline") as process:
        process.kill()
    assert RunFolder.open(run).state == "interrupted"
    before = lines_of(run)
    assert 0 < len(before) < len(lines_of(whole.path))
    watch = Watch()
    resumed = resume(run, INLINE, watch)
    assert front_bytes(resumed) == front_bytes(whole)
    assert resumed.state == "done"
    assert len(watch.updates) == 1 + len(lines_of(whole.path)) - len(before)
    assert lines_of(run)[: len(before)] == before
    assert {(r["start"], r["stop"]) for r in map(json.loads, lines_of(run))} == {
        (r["start"], r["stop"]) for r in whole.read_blocks()
    }


def workers_of(pid: int) -> set[int]:
    return {below for below in descendants(pid) if command(below).startswith("ray::SearchWorker")}


@pytest.mark.slow
def test_a_killed_driver_on_ray_resumes_to_the_same_front_and_leaves_no_worker(whole, tmp_path):
    run = tmp_path / "run"
    with launched(run, "--workers", "2") as process:
        workers = workers_of(process.pid)
        assert len(workers) == 2
        process.kill()
    assert wait_until_gone(workers) == set()
    with start("resume", run, "--workers", "1", pause_at=3) as again:  # and is killed once more
        workers = workers_of(again.pid)
        again.kill()
    assert wait_until_gone(workers) == set()
    assert front_bytes(resume(run, INLINE, Watch())) == front_bytes(whole)


@pytest.mark.parametrize("pool", [pytest.param("ray", marks=pytest.mark.slow), "inline"])
def test_ctrl_c_ends_with_130_the_command_to_resume_and_a_run_that_does(whole, tmp_path, pool):
    run = tmp_path / "a run"
    with launched(run, "--pool", pool) as process:
        below = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert out == ""
    assert f"search resume '{run}'" in err
    assert "Traceback" not in err
    assert wait_until_gone(below) == set()
    assert RunFolder.open(run).manifest["state"] == "interrupted"
    assert front_bytes(resume(run, INLINE, Watch())) == front_bytes(whole)


@pytest.mark.parametrize("cut", [1, 40, "half"])
def test_a_journal_that_is_cut_in_its_last_line_loses_that_block_only(whole, tmp_path, cut):
    run = interrupted(tmp_path / "run", 9)
    before = lines_of(run)
    text = journal(run).read_bytes()
    missing = len(before[-1]) // 2 if cut == "half" else cut
    journal(run).write_bytes(text[:-missing])
    watch = Watch()
    resumed = resume(run, INLINE, watch)
    assert front_bytes(resumed) == front_bytes(whole)
    assert len(watch.updates) == 1 + len(lines_of(whole.path)) - (len(before) - 1)
    assert lines_of(run)[: len(before) - 1] == before[:-1]


def test_blocks_of_another_plan_are_swept_again(whole, tmp_path):
    """Other code or another library may order structures otherwise: its blocks must not stand for ours."""
    run = interrupted(tmp_path / "run", 9)
    before = len(lines_of(run))
    forged = [{**json.loads(line), "plan": "another", "ids": [], "systems": [], "values": []} for line in lines_of(run)]
    journal(run).write_text("".join(json.dumps(record) + "\n" for record in forged))
    resumed = resume(run, INLINE, Watch())
    assert front_bytes(resumed) == front_bytes(whole)
    assert len(lines_of(run)) == before + len(lines_of(whole.path))


@pytest.mark.parametrize(
    "damage",
    [{"ids": None}, {"ids": [1, 2, 3]}, {"counts": []}, {"counts": "x"}, {"values": [["x"]]}, {"systems": {}},
     {"stop": 7}, {"start": []}, {"start": -1}],
    ids=str,
)  # fmt: skip
def test_a_damaged_record_of_a_block_is_swept_again(whole, tmp_path, damage):
    run = interrupted(tmp_path / "run", 9)
    first, *others = lines_of(run)
    kept = [json.dumps(json.loads(first) | damage), *others]
    journal(run).write_text("".join(f"{line}\n" for line in kept))
    resumed = resume(run, INLINE, Watch())
    assert front_bytes(resumed) == front_bytes(whole)
    assert len(lines_of(run)) == len(lines_of(whole.path)) + 1


def test_resuming_a_run_that_is_done_does_nothing(whole):
    files = {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()}
    watch = Watch()
    again = resume(whole.path, INLINE, watch)
    assert again.state == "done"
    assert (watch.phases, watch.updates) == ([], [])
    assert {path: path.read_bytes() for path in whole.path.rglob("*") if path.is_file()} == files


def test_a_run_whose_every_block_is_journalled_only_writes_its_front(whole, tmp_path):
    run = interrupted(tmp_path / "run", 1 + len(lines_of(whole.path)))
    watch = Watch()
    assert front_bytes(resume(run, INLINE, watch)) == front_bytes(whole)
    assert watch.updates == []


def test_counts_of_a_resumed_run_cover_the_space(whole, tmp_path):
    resumed = resume(interrupted(tmp_path / "run", 5), INLINE, Watch())
    counts, wanted = resumed.manifest["counts"], whole.manifest["counts"]
    assert counts["legal"] == wanted["legal"]
    assert counts["front"] == wanted["front"]
    assert counts["priced"] == wanted["priced"]  # the same blocks in the same order


if __name__ == "__main__":
    driver(sys.argv[2:], int(sys.argv[1]))
