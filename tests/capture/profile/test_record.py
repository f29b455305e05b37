"""`search trace record` on scripts that nobody edited: what they leave when they end, fail or are killed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from search.cli import main
from tests.capture.profile.started import environment

HERE = Path(__file__).parent
ALONE, RANKS = str(HERE / "unedited.py"), str(HERE / "launcher.py")
STEPS, WARM = 7, 2


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)


def record(folder, *words):
    return main(["trace", "record", *words[:-1], "-o", str(folder), "--", sys.executable, *words[-1]])


def iterations(path):
    return [line["it"] for line in map(json.loads, path.read_text().splitlines()) if line.get("cat") == "ITER"]


def test_a_process_that_trains_alone_is_recorded_and_its_overhead_told(tmp_path, capsys):
    assert record(tmp_path / "new", "--overhead", "--json", [ALONE, str(STEPS)]) == 0
    told = json.loads(capsys.readouterr().out)
    (rank,) = told["ranks"]
    assert rank["iterations"] == STEPS - WARM
    assert iterations(tmp_path / "new" / "rank0.jsonl") == [*range(WARM, STEPS)]
    assert rank["events"] == {"FW": 4 * 5, "BW": 4 * 5, "UPD": 5, "ITER": 5, "COMP": 15}  # three modules and the loss
    assert told["overhead"] == pytest.approx(told["iteration_s"] / told["plain_iteration_s"] - 1.0)
    assert [*os.listdir(tmp_path / "new")] == ["rank0.jsonl"]
    assert main(["trace", "import", str(tmp_path / "new" / "rank0.jsonl")]) == 0


def test_nothing_is_written_into_a_folder_that_holds_something(tmp_path, capsys):
    (tmp_path / "mine").write_text("dear")
    assert record(tmp_path, [ALONE, "3"]) == 2
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "dear"


def test_a_command_that_does_not_train_leaves_no_folder(tmp_path, capsys):
    assert record(tmp_path / "new", ["-c", "print(1)"]) == 2
    assert "no training loop was seen" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert record(tmp_path / "new", [ALONE, str(WARM)]) == 2  # iterations for warming up are not recorded
    assert "no training loop was seen" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_run_is_told_in_one_line(tmp_path, capsys):
    nowhere = ["-o", str(tmp_path / "a")]
    for words, told in ((nowhere, "give it after --"), ([*nowhere, "--", "no-such-program"], "program: cannot run")):
        assert main(["trace", "record", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line
    if os.geteuid() != 0:  # to whom every folder is open
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        assert record(tmp_path / "a", [ALONE, "3"]) == 2
        assert "cannot write there" in capsys.readouterr().err


def test_a_job_whose_rank_is_killed_keeps_what_all_ranks_had_and_says_which_one(tmp_path, capsys):
    assert record(tmp_path / "new", [RANKS, f"{STEPS}/1:5"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "search: rank 1 died: it was killed; kept in" in error
    assert "4 iterations of rank 1" in error
    files = sorted(str(path) for path in (tmp_path / "new").iterdir())
    assert [Path(path).name for path in files] == ["rank0.jsonl", "rank1.jsonl"]
    assert iterations(Path(files[1])) == [2, 3, 4, 5]
    assert main(["trace", "import", "--whole", *files, "-o", str(tmp_path / "job.dfg"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [rank["iterations"] for rank in told["ranks"]] == [4, 4]
    assert told["pairing"]["collectives"] == 4
    assert main(["trace", "replay", str(tmp_path / "job.dfg")]) == 0


def test_a_job_whose_rank_fails_says_its_error(tmp_path, capsys):
    assert record(tmp_path / "new", [RANKS, f"{STEPS}/0:4:error"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "search: rank 0 died: RuntimeError: the data ended; kept in" in error


@pytest.mark.slow
def test_a_job_of_torchrun_is_recorded(tmp_path, capsys):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ALONE, str(STEPS)]
    assert record(tmp_path / "new", "--json", command) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(rank["rank"], rank["world"], rank["iterations"]) for rank in told["ranks"]] == [(0, 2, 5), (1, 2, 5)]


def test_a_recording_that_is_told_to_end_ends_its_command_and_tells(tmp_path):
    folder, program = tmp_path / "traces", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    words = ["trace", "record", "-o", str(folder), "--", sys.executable, "-c", program]
    ours = [sys.executable, "-c", f"from search.cli import main; raise SystemExit(main({words!r}))"]
    with subprocess.Popen(ours, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert err == (
        "search: the command ended with exit code -15; nothing is kept, for no iteration was recorded whole\n"
    )
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
