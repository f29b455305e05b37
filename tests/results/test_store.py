"""Claims about run folders: what survives a crash, who may write, and who else can read."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.tasks import Category
from results.files import append_line, read_lines
from results.schema import FRONT_FIELDS, REPLAY_FIELDS, Plain
from results.store import RunFolder, list_runs

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", "probe", "model: gpt\n", {"seed": 7}) as run:
        yield run


def child(code, *arguments, **options):
    """A second process that sees this checkout."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def test_a_new_run_states_everything_the_manifest_promises(run):
    manifest = RunFolder.open(run.path).manifest
    promised = {"state", "counts", "seconds", "workers", "sampler", "seed", "versions", "hypervolume", "events"}
    assert promised <= set(manifest)
    assert (manifest["state"], manifest["seed"], manifest["name"]) == ("running", 7, "probe")
    assert RunFolder.open(run.path).space_yaml == "model: gpt\n"


def test_a_front_reads_back_to_the_same_bits(run, make_front):
    front = make_front(5, step_time_s=[0.1, 1 / 3, 5e-324, 1.7976931348623157e308, math.nan])
    run.write_front(front.columns)
    back = RunFolder.open(run.path).read_front()
    assert back.names == front.names
    for name in front.names:
        assert back[name].dtype == front[name].dtype
        assert back[name].tobytes() == front[name].tobytes() or back[name].tolist() == front[name].tolist()


def test_duckdb_and_pandas_read_a_run_without_this_package(run, make_front):
    run.write_front(make_front(3).columns)
    file = str(run.path / "front.parquet")
    with duckdb.connect() as connection:
        row = connection.execute(
            f"SELECT id, tp, schedule, overlap_ep, step_time_s FROM '{file}' ORDER BY id"
        ).fetchone()
        described = {name: kind for name, kind, *_ in connection.execute(f"DESCRIBE FROM '{file}'").fetchall()}
    assert row == (1000, 1, "dualpipe", False, 20.0)
    assert set(described.values()) == {"BIGINT", "DOUBLE", "VARCHAR", "BOOLEAN"}
    frame = pd.read_parquet(file)
    assert frame["device_memory_bytes"].tolist() == [70e9, 35e9, 70e9 / 3]
    assert frame["pp"].dtype == np.int64


def test_parquet_carries_units_descriptions_version_and_run(run, make_front):
    run.write_front(make_front(1).columns)
    schema = pq.read_schema(run.path / "front.parquet")
    assert schema.metadata[b"schema_version"] == b"1"
    assert schema.metadata[b"run"] == b"probe"
    assert schema.field("step_time_s").metadata[b"unit"] == b"s"
    assert all(schema.field(field.name).metadata[b"description"] for field in FRONT_FIELDS)


def test_reference_rejections_and_trials_read_back(run, make_front):
    assert len(run.read_reference()) == 0
    assert len(run.read_trials()) == 0
    run.write_reference(make_front(1, id=[-1], name=["published"], feasible=[False], reason=["too big"]).columns)
    run.write_rejections([{"rule": "heads", "count": 12, "example": "64 by 6"}, {"rule": "memory", "count": 3}])
    run.write_trials(1, make_front(2).columns)
    run.write_trials(0, make_front(1, id=[5]).columns)
    assert run.read_reference().row(0)["name"] == "published"
    assert list(run.read_rejections().rows())[1] == {"rule": "memory", "count": 3, "example": ""}
    assert run.read_trials()["id"].tolist() == [5, 1000, 1001]


def replays(num, **replaced):
    """Rows of finalists, as a writer gives them."""
    numbers = {
        field.name: np.arange(num, dtype=np.float64) for field in REPLAY_FIELDS if field.kind is not Plain.STRING
    }
    texts = {field.name: ["text"] * num for field in REPLAY_FIELDS if field.kind is Plain.STRING}
    return numbers | texts | {"agrees": [True] * num, "fits": [True] * num} | replaced


def test_replays_read_back_and_a_run_without_any_has_no_rows(run):
    assert len(run.read_replays()) == 0
    run.write_replays(replays(3, replayed_step_time_s=[1 / 3, math.nan, 5e-324]))
    back = RunFolder.open(run.path).read_replays()
    assert back.names == tuple(field.name for field in REPLAY_FIELDS)
    assert back["replayed_step_time_s"].tobytes() == np.array([1 / 3, math.nan, 5e-324]).tobytes()
    assert (back["agrees"].dtype, back["id"].dtype, back["why"][0]) == (np.bool_, np.int64, "text")
    schema = pq.read_schema(run.path / "replays.parquet")
    assert all(schema.field(field.name).metadata[b"description"] for field in REPLAY_FIELDS)
    with duckdb.connect() as connection:
        file = run.path / "replays.parquet"
        assert connection.execute(f"SELECT count(*), max(id) FROM '{file}'").fetchone() == (3, 2)


def test_every_category_of_a_critical_path_has_a_column():
    names = {field.name for field in REPLAY_FIELDS}
    assert {f"critical_{category.value}_s" for category in Category} <= names
    assert {"critical_contention_s", "critical_idle_s"} <= names


def test_a_run_is_whole_without_replays_and_not_with_damaged_ones(run, make_front):
    run.write_front(make_front(2).columns)
    run.write_reference(make_front(0).columns)
    run.write_rejections([])
    assert run.is_whole()
    run.write_replays(replays(1))
    assert run.is_whole()
    (run.path / "replays.parquet").write_bytes(b"PAR1")
    assert not run.is_whole()


def test_traces_have_a_folder_of_their_own(run):
    assert run.traces() == run.path / "replays" == run.traces()
    run.traces().rmdir()
    (run.path / "replays").write_text("mine")
    with pytest.raises(ValueError, match="replays: cannot make the folder"):
        run.traces()


def test_an_empty_front_is_a_front(run, make_front):
    run.write_front(make_front(0).columns)
    assert len(run.read_front()) == 0


@given(st.lists(st.floats(allow_nan=False), max_size=5), st.text(), st.integers())
def test_the_journal_gives_back_every_float_text_and_integer(tmp_path_factory, floats, text, integer):
    path = tmp_path_factory.mktemp("journal") / "blocks.jsonl"
    record = {"values": floats, "text": text, "block": integer}
    append_line(path, record)
    append_line(path, {"array": np.array([0.1, 2.0]), "one": np.int64(3)})
    assert read_lines(path) == [record, {"array": [0.1, 2.0], "one": 3}]


@pytest.mark.parametrize("cut", [1, 5, 14])
def test_a_line_that_a_crash_cut_is_left_out_and_replaced_by_the_next(run, cut):
    run.append_block({"block": 1})
    run.append_block({"block": 2, "x": 1})
    journal = run.path / "journal" / "blocks.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert run.read_blocks() == [{"block": 1}]
    run.append_block({"block": 3})
    assert run.read_blocks() == [{"block": 1}, {"block": 3}]


def test_a_cut_first_line_leaves_an_empty_journal(run):
    run.append_block({"pad": "x" * 200_000})
    journal = run.path / "journal" / "blocks.jsonl"
    journal.write_bytes(journal.read_bytes()[:-1])
    assert run.read_blocks() == []
    run.append_block({"block": 1})
    assert run.read_blocks() == [{"block": 1}]


@pytest.mark.parametrize("bad", [b'{"block": ', b"\xff\xfe", b"17", b""])
def test_a_garbled_line_elsewhere_is_named_by_its_number(run, bad):
    run.append_block({"block": 1})
    journal = run.path / "journal" / "blocks.jsonl"
    journal.write_bytes(journal.read_bytes() + bad + b"\n" + b'{"block": 3}\n')
    with pytest.raises(ValueError, match=r"blocks\.jsonl:2: each line must be a JSON object") as caught:
        run.read_blocks()
    assert "\n" not in str(caught.value)


def test_a_run_before_its_first_block_has_an_empty_journal(run):
    assert run.read_blocks() == []


KILLED = """
import sys
from pathlib import Path
from results.store import RunFolder
run = RunFolder.create(Path(sys.argv[1]), "victim", "model: gpt", {})
block = 0
while True:
    run.append_block({"block": block, "step_time_s": block / 3})
    print(block, flush=True)
    block += 1
"""


def test_a_writer_that_is_killed_between_blocks_leaves_a_run_that_reads_and_resumes(tmp_path):
    with child(KILLED, tmp_path / "run") as victim:
        seen = [int(victim.stdout.readline()) for _ in range(20)][-1]
        victim.send_signal(signal.SIGKILL)
        victim.stdout.read()
        victim.stderr.read()
    assert victim.returncode == -signal.SIGKILL
    run = RunFolder.open(tmp_path / "run")
    blocks = run.read_blocks()
    assert len(blocks) > seen  # what was reported was on disk
    assert blocks == [{"block": i, "step_time_s": i / 3} for i in range(len(blocks))]
    assert (run.manifest["state"], run.state) == ("running", "interrupted")
    with run:
        run.claim()
        run.append_block({"block": "next"})
        assert run.read_blocks()[-1] == {"block": "next"}


TORN = """
import os, signal, sys
from pathlib import Path
from results.store import RunFolder
run = RunFolder.open(Path(sys.argv[1]))
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
run.update_manifest(state="done")
"""


def test_a_writer_that_is_killed_inside_a_write_leaves_the_old_file(run):
    before = (run.path / "manifest.json").read_bytes()
    run.close()
    with child(TORN, run.path) as victim:
        victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    assert (run.path / "manifest.json").read_bytes() == before
    again = RunFolder.open(run.path)
    with again:
        again.update_manifest(state="done")
    assert RunFolder.open(run.path).state == "done"


HOLDER = """
import sys
from pathlib import Path
from results.store import RunFolder
run = RunFolder.open(Path(sys.argv[1]))
run.claim()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_writer_is_told_which_process_holds_the_run(run):
    run.close()
    with child(HOLDER, run.path, stdin=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "held\n"
        second = RunFolder.open(run.path)
        with pytest.raises(ValueError, match=f"process {holder.pid} does"):
            second.claim()
        with pytest.raises(ValueError, match=f"process {holder.pid} does"):
            second.append_block({"block": 1})
        assert second.state == "running"
        holder.communicate(input="")
    second.claim()
    assert second.state == "running"
    second.close()
    assert second.state == "interrupted"


@pytest.mark.parametrize("present", ["note.txt", "front.parquet", ".hidden"])
def test_a_folder_that_holds_anything_is_refused_and_left_alone(tmp_path, present):
    (tmp_path / present).write_text("mine")
    with pytest.raises(ValueError, match="must be a new or empty folder"):
        RunFolder.create(tmp_path, "probe", "", {})
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(present, "mine")]


def test_a_run_is_never_created_twice_in_one_folder(run):
    with pytest.raises(ValueError, match="must be a new or empty folder"):
        RunFolder.create(run.path, "probe", "", {})


def test_an_empty_folder_may_become_a_run(tmp_path):
    with RunFolder.create(tmp_path, "probe", "", {}) as run:
        assert run.path == tmp_path


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/none/run")):
        with pytest.raises(ValueError, match=str(out)) as caught:
            RunFolder.create(out, "probe", "", {})
        assert "\n" not in str(caught.value)


def test_runs_without_a_folder_get_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [RunFolder.create(None, "deep/seek v3", "", {}) for _ in range(3)]
    paths = {run.path for run in runs}
    assert len(paths) == 3
    assert all(path.parent == Path("runs") and path.name.startswith("deep-seek-v3-2") for path in paths)
    for run in runs:
        run.close()


def one_line_error(path, match):
    with pytest.raises(ValueError, match=match) as caught:
        RunFolder.open(path)
    assert "\n" not in str(caught.value)


def test_what_is_not_a_whole_run_is_refused_in_one_line(run, tmp_path):
    manifest = run.path / "manifest.json"
    good = json.loads(manifest.read_text())
    one_line_error(tmp_path / "none", "no such run folder")
    one_line_error(tmp_path, "it has no manifest.json")
    for text, match in [
        (manifest.read_text()[:-20], "must be JSON"),
        ("\x00\xff", "must be JSON"),
        ("[]", "must be a JSON object"),
        (json.dumps(good | {"schema_version": 99}), "schema version must be 1, but the run has 99"),
        (json.dumps(good | {"state": "asleep"}), "state must be one of"),
        (json.dumps(good | {"counts": 3}), "counts must be a mapping, but got 3"),
        (json.dumps({k: v for k, v in good.items() if k != "seconds"}), "'seconds'"),
    ]:
        manifest.write_text(text)
        one_line_error(run.path, match)


@pytest.mark.parametrize("keep", [0, 3, 100, -1])
def test_a_half_written_parquet_file_is_one_line(run, make_front, keep):
    run.write_front(make_front(3).columns)
    file = run.path / "front.parquet"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"front\.parquet: not a whole Parquet file") as caught:
        run.read_front()
    assert "\n" not in str(caught.value)


def test_a_front_that_was_never_written_is_one_line(run):
    with pytest.raises(ValueError, match="ended before it wrote it; `search resume"):
        run.read_front()


def test_parquet_of_another_schema_is_refused(run, make_front):
    run.write_front(make_front(1).columns)
    file = run.path / "front.parquet"
    table = pq.read_table(file)
    pq.write_table(table.replace_schema_metadata({b"schema_version": b"2"}), file)
    with pytest.raises(ValueError, match="schema version must be 1, but the file has 2"):
        run.read_front()
    pq.write_table(table.drop_columns(["tp"]), file)
    with pytest.raises(ValueError, match="column 'tp' must be there as int64"):
        run.read_front()


def test_a_run_from_before_a_column_reads_its_default(run, make_front):
    front = make_front(2)
    run.write_front(front.columns)
    file = run.path / "front.parquet"
    older = ["rank_order", "recompute_per_chunk", "tp_chunks", "expert_bucket_bytes"]
    pq.write_table(pq.read_table(file).drop_columns(older), file)
    read = run.read_front()
    assert read.names == front.names
    for name in front.names:
        np.testing.assert_array_equal(read[name], front[name])
    assert repr(read.row(0)) == repr(front.row(0))  # by their text, for a band that is not known is NaN


def test_a_manifest_takes_finite_numbers_and_known_states_only(run):
    with pytest.raises(ValueError, match="numbers must be finite"):
        run.update_manifest(hypervolume={"value": math.nan})
    with pytest.raises(ValueError, match="state must be one of"):
        run.update_manifest(state="asleep")
    assert RunFolder.open(run.path).manifest["hypervolume"] is None


def test_the_manifest_handed_out_is_a_copy(run):
    run.manifest["counts"]["front"] = 3
    assert run.manifest["counts"] == {}


def test_runs_are_listed_newest_first_and_broken_ones_with_their_error(tmp_path):
    for name, created in (("old", "2026-01-01T00:00:00+00:00"), ("new", "2026-02-01T00:00:00+00:00")):
        with RunFolder.create(tmp_path / name, name, "", {"created": created, "seconds": {"total": 2.5}}) as run:
            run.update_manifest(state="done", counts={"front": 3})
    (tmp_path / "broken").mkdir()
    rows = list_runs(tmp_path)
    assert [row["name"] for row in rows] == ["new", "old", "broken"]
    assert (rows[0]["state"], rows[0]["front"], rows[0]["seconds"]) == ("done", 3, 2.5)
    assert "no manifest.json" in rows[2]["error"]
    with pytest.raises(ValueError, match="no such folder"):
        list_runs(tmp_path / "none")


def test_listing_runs_loads_no_pyarrow(run):
    code = "import sys; from pathlib import Path; from results.store import list_runs; list_runs(Path(sys.argv[1]))"
    with child(code + "; print('pyarrow' in sys.modules)", run.path.parent) as reader:
        assert reader.communicate()[0] == "False\n"
