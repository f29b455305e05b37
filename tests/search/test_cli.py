"""The command line: what it answers, with which exit code, and that bad input takes one line and no traceback."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from estimator.step import evaluate
from results.schema import FRONT_FIELDS, STRATEGY_NAMES
from search.cli import main
from search.commands import catalog, ops, remedies
from search.commands.point import read_point
from search.space import load_space
from tests.search.conftest import SMALL
from tests.search.measured_rows import cells, write

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    "launch",
    "resume",
    "runs",
    "show",
    "plan",
    "estimate",
    "compare",
    "schedules",
    "why",
    "validate",
    "catalog",
    "capture",
    "bench",
    "replay",
    "report",
    "infer",
    "fit",
)
LIGHT = {"numpy", "yaml", "ray", "numba", "pyarrow", "optuna", "moocore", "rich", "torch", "matplotlib"}
PUBLISHED = ("estimate", "deepseek_v3", "--reference", "published")
TOO_LARGE = (
    "--set", "reference.fully_sharded.zero_stage=0", "--set", "reference.fully_sharded.recompute=none",
)  # fmt: skip


_ON_EIGHT_CHIPS = [
    "system={cluster: dgx_h800, num_chips: 8}", "workload.global_batch=64", "reference.published.pp=1",
    "reference.published.ep=8", "reference.published.schedule=1f1b", "reference.published.overlap={dp: 1}",
]  # fmt: skip


def test_a_first_call_says_that_it_compiles_and_an_illegal_configuration_takes_one_line(search, monkeypatch):
    monkeypatch.setattr("search.commands.point.is_compiled_here", lambda function: False)
    said = search("estimate", "llama3_8b_small:fully_sharded")
    assert said.err.count("compiling the estimator (first run only, one to three minutes)") == 1
    illegal = search("estimate", "llama3_8b_small:fully_sharded", "--set", "strategy.tp=3")
    assert (illegal.code, illegal.err.count("\n")) == (2, 1)
    monkeypatch.undo()
    assert "compiling" not in search("estimate", "llama3_8b_small:fully_sharded").err


def python(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], text=True, capture_output=True, env=env, timeout=60, check=False, **options
    )  # type: ignore[call-overload]


# ------------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("words", [[], ["--help"], *[[name, "--help"] for name in COMMANDS]])
def test_help_ends_with_0_and_loads_nothing_but_the_standard_library(words):
    code = f"import sys\nfrom search.cli import main\ncode = main({words!r})\nprint(code, *sys.modules)"
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    status, *modules = done.stdout.splitlines()[-1].split()
    assert status == "0"
    assert not LIGHT & set(modules)
    assert not [name for name in modules if name.startswith(("hardware", "estimator", "results", "search.commands"))]


def test_help_names_every_command(search):
    said = search("--help")
    assert all(f"\n    {name} " in said.out for name in COMMANDS)


def test_search_without_arguments_prints_its_help(search):
    assert search() == search("--help")


def test_the_module_is_the_command():
    done = python("-m", "search", "--version", cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("trainspace")


# -------------------------------------------------------------------------------------------------------- bad input

SPACES = {
    "malformed.yaml": "model: [llama3_8b",
    "list.yaml": "- 1",
    "empty.yaml": "",
    "binary.yaml": "\x00\x01",
    "unknown_key.yaml": "model: llama3_8b\nsystm: dgx_h100",
    "unknown_model.yaml": "model: lama\nsystem: dgx_h100\nworkload: {seq: 8, global_batch: 8}",
    "wrong_type.yaml": "model: llama3_8b\nsystem: dgx_h100\nworkload: {seq: many, global_batch: 8}",
    "impossible.yaml": "model: llama3_8b\nsystem: dgx_h100\nworkload: {seq: 8192, global_batch: 8}\nstrategy: {tp: -1}",
    "tag.yaml": "model: !!python/object/apply:os.system ['true']",
}


@pytest.mark.parametrize("command", ["launch", "estimate", "why"])
@pytest.mark.parametrize("file", SPACES)
def test_a_bad_space_file_is_one_line_that_names_the_file_and_2(search, tmp_path, command, file):
    (tmp_path / file).write_text(SPACES[file])
    said = search(command, file)
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert file in said.err


HOSTILE = [
    ["launch"],
    ["launch", "missing.yaml"],
    ["launch", "folder"],
    ["launch", SMALL, "--out", "file"],
    ["launch", SMALL, "--out", "file/below"],
    ["launch", SMALL, "--out", "folder"],
    ["launch", SMALL, "--workers", "0"],
    ["launch", SMALL, "--workers", "many"],
    ["launch", SMALL, "--pool", "inline", "--workers", "3"],
    ["launch", SMALL, "--seed", "-1"],
    ["launch", SMALL, "--pool", "threads"],
    ["launch", SMALL, "--set", "strategy.tp"],
    ["launch", SMALL, "--set", "strategy.dp=8"],
    ["launch", SMALL, "--trials", "0"],
    ["launch", SMALL, "--sampler", "cmaes"],
    ["launch", SMALL, "--set", "search.sampler=cmaes"],
    ["launch", SMALL, "--warm", "nowhere"],
    ["show", "latest", "--exact", "nowhere"],
    ["resume", "missing"],
    ["resume", "missing", "--pool", "inline", "--workers", "3"],
    ["resume", "folder"],
    ["runs", "missing"],
    ["runs", "file"],
    ["show"],
    ["show", ""],
    ["show", "missing"],
    ["show", "folder"],
    ["show", "latest", "--where", "tp +"],
    ["show", "latest", "--where", "tp + 1"],
    ["show", "latest", "--where", "tq == 1"],
    ["show", "latest", "--by", "tq"],
    ["show", "latest", "--top", "-1"],
    ["show", "latest", "--tables", "journal"],
    ["show", "latest", "-o", "missing/file"],
    ["show", "latest", "-o", "folder"],
    ["show", "latest", "--xlsx", "file"],
    ["report", "missing"],
    ["report", "folder"],
    ["report", "latest", "-o", "missing/file"],
    ["report", "latest", "-o", "folder"],
    ["report"],
    ["report", "latest", "--png", "file"],
    ["report", "latest", "--png", "runs/small"],
    ["show", "latest", "--xlsx", "missing/file.xlsx"],
    ["show", "latest", "--where", "tp == 99", "--xlsx", "front.xlsx"],
    ["fit"],
    ["fit", "missing"],
    ["fit", "latest"],
    ["fit", "latest:8"],
    ["fit", SMALL + ":fully_sharded", "--longest", "0"],
    ["fit", SMALL + ":fully_sharded", "--set", "reference.fully_sharded.tp=3"],
    ["plan", "latest"],
    ["plan", "latest", "--tokens", "nan"],
    ["plan", "latest", "--tokens", "inf"],
    ["plan", "latest", "--tokens", "-1"],
    ["plan", "latest", "--tokens", "many"],
    ["plan", "latest", "--tokens", "1e12", "--days", "0"],
    ["plan", "latest", "--tokens", "1e12", "--goodput", "restart_s"],
    ["plan", "latest", "--tokens", "1e12", "--goodput", "restarts=1"],
    ["plan", "latest", "--tokens", "1e12", "--goodput", "spare_nodes=1.5"],
    ["plan", "latest", "--tokens", "1e12", "--goodput", "broken_share=2"],
    ["plan", "latest", "--tokens", "1e12", "--goodput", "up_target=1"],
    ["plan", "latest", "--tokens", "1e12", "--goodput", "off", "--goodput", "restart_s=1"],
    ["plan", "latest", "--tokens", "1e12", "--goodput", "chip_failures_per_hour=1e6"],
    ["plan", "latest", "--tokens", "1e12", "--set", "strategy.tp=1"],
    ["plan", "missing", "--tokens", "1e12"],
    ["plan", "missing.yaml", "--tokens", "1e12"],
    ["plan", "latest", "--tokens", "1e12", "-o", "missing/plan.csv"],
    ["plan", SMALL, "--tokens", "1e12", "--set", "strategy.layout=search"],
    ["estimate"],
    ["estimate", "missing"],
    ["estimate", "folder"],
    ["estimate", SMALL, "--reference", "fully_shard"],
    ["estimate", SMALL],
    ["estimate", "latest:8"],
    ["estimate", "latest:"],
    ["estimate", "latest:fully"],
    ["estimate", "latest:-1"],
    ["estimate", "missing:0"],
    ["estimate", "latest:0", "--reference", "fully_sharded"],
    ["estimate", SMALL, "--reference", "fully_sharded", "--set", "reference.fully_sharded.tp=3"],
    ["why", "missing"],
    ["why", "folder"],
    ["validate", "missing.csv"],
    ["validate", "folder"],
    ["validate", "file"],
    ["catalog"],
    ["catalog", "boats"],
    ["catalog", "chips", "h101"],
    ["catalog", "clusters", "dgx"],
    ["catalog", "models", "lama"],
    ["catalog", "spaces", "lama"],
    ["plan", "latest", "--tokens", "1e12", "--days", "inf"],
    ["bench", "--only", "nothing*"],
    ["catalog", "chips", "--js"],
    ["serve"],
    ["--json"],
]


@pytest.mark.parametrize("words", HOSTILE, ids=" ".join)
def test_bad_input_is_one_line_and_2(search, small_run, tmp_path, words):
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "keep").write_text("mine")
    said = search(*words)
    assert (said.code, said.out) == (2, "")
    *told, last = said.err.splitlines()
    assert last.startswith("search: ")
    assert not told
    assert "Traceback" not in said.err
    assert (tmp_path / "file").read_text() == "text"
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["keep"]


@pytest.mark.parametrize("command", [["show"], ["plan", "--tokens", "1e12"], ["estimate"], ["report"]])
@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", b"PAR1\x00\x00\x00\x00PAR1"])
def test_a_damaged_front_is_one_line_and_2(search, small_run, command, content):
    (small_run.path / "front.parquet").write_bytes(content)
    name, *options = command
    said = search(name, f"{small_run.path}:0" if name == "estimate" else small_run.path, *options)
    assert (said.code, said.out) == (2, "")
    assert said.err.count("\n") == 1
    assert "front.parquet" in said.err


def test_a_damaged_manifest_is_one_line_and_2(search, small_run):
    (small_run.path / "manifest.json").write_text('{"state": ')
    said = search("show", small_run.path)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "manifest.json" in said.err


def test_a_run_that_is_not_finished_says_that_it_has_no_front(search, small_run):
    (small_run.path / "front.parquet").unlink()
    said = search("show", small_run.path)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)


def test_an_illegal_configuration_is_refused_with_its_rule(search):
    said = search(*PUBLISHED, "--set", "reference.published.tp=3")
    assert said.code == 2
    assert "num_chips (2048) must be divisible by tp (3) * cp (1) * pp (16)" in said.err


# ------------------------------------------------------------------------------------------ defects and interruptions


def test_a_defect_is_one_line_that_asks_for_a_traceback_and_1(search, monkeypatch):
    monkeypatch.setattr(catalog, "run", lambda args: 1 / 0)
    said = search("catalog", "chips")
    assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
    assert "ZeroDivisionError" in said.err
    assert "SEARCH_TRACEBACK=1" in said.err


def test_a_message_of_many_lines_is_told_on_one(search, monkeypatch):
    def refuse(args):
        raise ValueError("a rule\n  broken\n")

    monkeypatch.setattr(catalog, "run", refuse)
    said = search("catalog", "chips")
    assert (said.code, said.err) == (2, "search: a rule broken\n")


def test_a_refusal_of_the_operating_system_names_the_file(search, monkeypatch, tmp_path):
    monkeypatch.setattr(catalog, "run", lambda args: (tmp_path / "missing").read_text())
    said = search("catalog", "chips")
    assert (said.code, said.err) == (2, f"search: {tmp_path / 'missing'}: No such file or directory\n")


@pytest.mark.parametrize("words", [["--traceback", "catalog", "chips"], ["catalog", "chips", "--traceback"]])
def test_a_defect_shows_where_it_came_from_when_asked(search, monkeypatch, words):
    monkeypatch.setattr(catalog, "run", lambda args: 1 / 0)
    said = search(*words)
    assert said.code == 1
    assert "Traceback" in said.err


def test_the_environment_asks_for_a_traceback_too(search, monkeypatch):
    monkeypatch.setattr(catalog, "run", lambda args: 1 / 0)
    monkeypatch.setenv("SEARCH_TRACEBACK", "1")
    assert "Traceback" in search("catalog", "chips").err


def test_an_interruption_is_130(search, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "run", interrupted)
    said = search("catalog", "chips")
    assert (said.code, said.out, said.err) == (130, "", "search: interrupted\n")


def test_a_reader_that_has_seen_enough_is_no_error():
    read, write_end = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "search", "catalog", "chips", "--json"]
    with os.fdopen(write_end, "w") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, env=env, cwd=ROOT, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


# ------------------------------------------------------------------------------------------------------- show, plan

STRATEGY_KEYS = {
    "tp", "pp", "cp", "ep", "etp", "dp", "vpp", "schedule", "layout", "micro_batch", "zero_stage", "sequence_parallel",
    "context_parallel", "rank_order", "recompute", "recompute_layers", "precision", "optimizer", "overlap",
    "bucket_bytes", "fusion", "recompute_per_chunk", "tp_chunks", "expert_bucket_bytes", "dp_replicate",
    "reshard_after_forward", "prefetch_blocks", "offload", "interleave_group", "cuda_graph", "shared_expert_overlap",
    "redundant_experts",
}  # fmt: skip


def ids(said):
    return [row["id"] for row in json.loads(said.out)["rows"]]


@pytest.mark.parametrize("name", ["runs/small", "small", "latest"])
def test_a_run_is_found_by_folder_by_name_and_as_the_latest(search, small_run, name):
    assert ids(search("show", name, "--json")) == ids(search("show", small_run.path, "--json"))


def test_show_puts_the_best_of_each_objective_first(search, small_run):
    front = small_run.read_front()
    said = search("show", "latest", "--json")
    best = [front["id"][np.argmin(front[name])] for name in ("step_time_s", "peak_memory_bytes")]
    assert ids(said)[:2] == best
    assert sorted(ids(said)) == sorted(front["id"])


def test_show_as_json_has_the_agreed_keys(search, small_run):
    data = json.loads(search("show", "latest", "--json").out)
    assert data.keys() == {"run", "rows", "reference", "replays"}
    columns = {field.name for field in FRONT_FIELDS} - {*STRATEGY_NAMES} | {"strategy", "megatron_layout"}
    for row in [*data["rows"], *data["reference"]]:
        assert row.keys() == columns
        assert row["strategy"].keys() == STRATEGY_KEYS
        assert row["strategy"]["overlap"].keys() == {"tp", "cp", "dp", "ep", "pp"}
        assert row["strategy"]["offload"].keys() == {"activations", "parameters", "gradients", "states"}
    assert [row["name"] for row in data["reference"]] == ["fully_sharded"]


def test_show_names_the_reference_beside_the_front(search, small_run):
    assert "reference fully_sharded" in search("show", "latest").out


@pytest.mark.parametrize(
    ("where", "wanted"),
    [
        ("recompute == 'full'", [14]),
        ("recompute in ['none', 'full']", [0, 14]),
        ("id < 10 and tp == 1", [0, 7]),
        ("peak_memory_bytes < 0", []),
        ("1 < 2", [0, 7, 14]),
    ],
)
def test_where_keeps_the_rows_that_satisfy_it(search, small_run, where, wanted):
    said = search("show", "latest", "--json", "--where", where)
    assert (said.code, sorted(ids(said))) == (0, wanted)


def test_where_that_keeps_no_row_says_so(search, small_run):
    said = search("show", "latest", "--where", "tp == 99")
    assert (said.code, said.out) == (0, "no rows in front where tp == 99\n")


@pytest.mark.parametrize("by", ["step_time_s", "tokens_per_s", "peak_memory_bytes", "id", "recompute"])
def test_by_orders_rows_best_first(search, small_run, by):
    front = small_run.read_front()
    values = {number: front[by][i] for i, number in enumerate(front["id"])}
    order = sorted(values, key=lambda number: values[number], reverse=by == "tokens_per_s")
    assert ids(search("show", "latest", "--by", by, "--json")) == order
    text = search("show", "latest", "--by", by, "--top", "2").out
    assert "2 of 3 rows" in text
    assert by in text.splitlines()[0]


def test_top_limits_rows_of_every_form(search, small_run):
    assert len(ids(search("show", "latest", "--top", "1", "--json"))) == 1
    assert "1 of 3 points" in search("show", "latest", "--top", "1").out
    assert search("show", "latest", "--top", "1", "--csv").out.count("\n") == 2


def test_show_draws_the_front_and_says_what_to_type_next(search, small_run):
    out = search("show", "latest").out
    assert "step_time_s (log)" in out or "step_time_s (linear)" in out
    assert out.count("o a point, 8 several, K knee") == 1
    assert max(map(len, out.splitlines())) <= 100
    best = json.loads(search("show", "latest", "--json").out)["rows"][0]["id"]
    *_, commands = out.partition("next:\n")
    lines = [line.strip() for line in commands.splitlines()]
    assert f"search estimate runs/small:{best}" in lines
    assert f"search compare runs/small:fully_sharded runs/small:{best}" in lines
    for line in lines:
        assert search(*line.split()[1:]).code == 0, line


def test_csv_reads_back_to_the_same_numbers(search, small_run):
    rows = list(csv.DictReader(io.StringIO(search("show", "latest", "--csv", "--by", "id").out)))
    front = small_run.read_front()
    assert [float(row["step_time_s"]) for row in rows] == front["step_time_s"].tolist()
    assert list(rows[0]) == list(front.names)


def test_other_tables_can_be_shown(search, small_run):
    assert ids(search("show", "latest", "--tables", "reference", "--json")) == [-1]
    assert "reference fully_sharded" in search("show", "latest", "--tables", "reference").out
    assert search("show", "latest", "--tables", "trials").out == "no rows in trials\n"


def test_output_goes_to_a_file_when_asked(search, small_run, tmp_path):
    said = search("show", "latest", "--json", "-o", "rows.json")
    assert (said.code, said.out, said.err) == (0, "", "")
    assert (tmp_path / "rows.json").read_text() == search("show", "latest", "--json").out


def test_a_picture_is_a_png(search, small_run, tmp_path):
    pytest.importorskip("matplotlib")
    assert search("show", "latest", "--picture", "front.png").code == 0
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_runs_lists_runs_and_what_cannot_be_read(search, small_run, tmp_path):
    (tmp_path / "runs" / "broken").mkdir()
    rows = {Path(row["path"]).name: row for row in json.loads(search("runs", "--json").out)["runs"]}
    assert rows["small"]["state"] == "done"
    assert rows["broken"]["state"] == "unreadable"
    assert "runs/small" in search("runs").out


def test_plan_takes_days_from_step_time(search, small_run):
    data = json.loads(search("plan", "latest", "--tokens", "1e12", "--goodput", "off", "--json").out)
    front = small_run.read_front()
    for row in data["rows"]:
        step = front["step_time_s"][front.find(row["id"])]
        assert row["num_steps"] == math.ceil(1e12 / (8192 * 128))
        assert row["days"] == pytest.approx(row["num_steps"] * step / 86400, rel=1e-12)
    assert [row["days"] for row in data["rows"]] == sorted(row["days"] for row in data["rows"])
    assert {"id", "days", "gpu_hours", "cost_usd", "energy_kwh", "num_steps"} <= data["rows"][0].keys()


def test_a_plan_that_no_point_keeps_to_is_3_and_says_what_is_closest(search, small_run):
    said = search("plan", "latest", "--tokens", "1e12", "--days", "1", "--budget", "1e9")
    assert said.code == 3
    assert "0 of 3 points of the front within 1 day and 1,000,000,000 USD; the fastest takes" in said.out
    assert search("plan", "latest", "--tokens", "1e12", "--days", "1000").code == 0


# ---------------------------------------------------------------------------------------------------- estimate, why

ESTIMATE_KEYS = {
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu", "mfu_bf16", "hfu",
    "pipeline_s", "compute_s", "forward_s", "backward_s", "recompute_s", "bubble_s", "exposed_comm_s",
    "exposed_offload_s", "exposed_host_s", "fixed_host_s", "optimizer_s", "optimizer_comm_s", "jitter_s",
    "peak_memory_bytes", "reserved_memory_bytes", "device_memory_bytes", "stages", "price_sources",
    "cost_usd_per_mtoken", "energy_j_per_token", "feasible", "reason", "assumptions",
}  # fmt: skip


def test_estimate_is_evaluate(search):
    data = json.loads(search(*PUBLISHED, "--json").out)
    space = load_space("deepseek_v3")
    result = evaluate(space.model, space.references["published"], space.system, space.workload)
    assert data["step_time_s"] == result.step_time_s
    assert data["device_memory_bytes"] == result.device_memory_bytes
    assert data.keys() >= ESTIMATE_KEYS
    assert data["strategy"].keys() == STRATEGY_KEYS
    assert data["exposed_comm_s"].keys() == {"tp", "cp", "ep", "pp", "dp"}


def test_estimate_tells_arithmetic_time_memory_and_sources(search):
    said = search(*PUBLISHED)
    assert (said.code, said.err) == (0, "")
    for text in (
        "671.0 B parameters",
        "2048 = tp 1 x pp 16 x dp 128, ep 64",
        "not counted",
        "allocated",
        "price sources",
    ):
        assert text in said.out
    assert max(len(line) for line in said.out.splitlines()) <= 110


def test_a_row_of_a_run_is_estimated_to_what_the_run_stored(search, small_run):
    front = small_run.read_front()
    for i, number in enumerate(front["id"]):
        data = json.loads(search("estimate", f"latest:{number}", "--json").out)
        assert data["step_time_s"] == front["step_time_s"][i]
        assert data["peak_memory_bytes"] == front["peak_memory_bytes"][i]
    data = json.loads(search("estimate", "small:fully_sharded", "--json").out)
    assert data["step_time_s"] == small_run.read_reference()["step_time_s"][0]


def test_a_row_of_a_run_can_be_changed(search, small_run):
    data = json.loads(search("estimate", "latest:0", "--set", "strategy.zero_stage=2", "--json").out)
    assert data["strategy"]["zero_stage"] == 2


def test_a_space_of_one_point_is_a_configuration(search, tmp_path):
    text = (
        "model: llama3_8b\nsystem: dgx_h100\nworkload: {seq: 8192, global_batch: 512}\nstrategy: {tp: 8, zero_stage: 3}"
    )
    (tmp_path / "config.yaml").write_text(text)
    said = search("estimate", "config.yaml", "--json")
    assert (said.code, json.loads(said.out)["strategy"]["tp"]) == (0, 8)


def test_what_does_not_fit_is_told_in_full_with_remedies_and_3(search):
    words = ("estimate", SMALL, "--reference", "fully_sharded", *TOO_LARGE)
    said = search(*words)
    assert said.code == 3
    for text in ("does not fit", "too much", "what would make it fit", "step_time_s", "weights"):
        assert text in said.out
    data = json.loads(search(*words, "--json").out)
    assert (data["feasible"], data["reason"]) == (False, "memory")
    assert data["remedies"]
    assert all(remedy["device_memory_bytes"] <= data["usable_memory_bytes"] for remedy in data["remedies"])


def test_remedies_fit_with_the_fewest_changes_fastest_first():
    point = read_point(SMALL, "fully_sharded", [TOO_LARGE[1], TOO_LARGE[3]])
    found = remedies.remedies(point)
    assert all(len(remedy.changes) == 1 for remedy in found)
    assert [r.step_time_s for r in found] == sorted(r.step_time_s for r in found)
    for remedy in found:
        result = point.evaluate(remedy.strategy)
        assert result.feasible
        assert result.step_time_s == remedy.step_time_s


def fits(point, strategy):
    """None where a rule forbids it."""
    try:
        return bool(point.evaluate(strategy).feasible)
    except ValueError:
        return None


def test_remedies_combine_changes_where_no_single_one_is_enough():
    sets = ["reference.published.zero_stage=0", "reference.published.recompute=none"]
    point = read_point("deepseek_v3", "published", sets)
    singles = [s for _, s in remedies.neighbours(point, point.strategy)]
    assert not any(fits(point, s) for s in singles)
    pairs = {s for single in singles if fits(point, single) is not None for _, s in remedies.neighbours(point, single)}
    fastest = min(point.evaluate(s).step_time_s for s in pairs if fits(point, s))
    assert remedies.remedies(point)[0].step_time_s == fastest
    assert all(fits(point, remedy.strategy) for remedy in remedies.remedies(point))


def test_more_chips_are_the_last_resort():
    point = read_point("deepseek_v3", "published", _ON_EIGHT_CHIPS)
    found = remedies.remedies(point)
    (number,) = {text for remedy in found for text in remedy.changes if text.startswith("num_chips")}
    larger = replace(point, system=point.system.with_chips(int(number.split()[1])))
    assert all(larger.evaluate(remedy.strategy).feasible for remedy in found)


def test_the_closest_is_told_where_no_remedy_is_enough(monkeypatch):
    monkeypatch.setattr(remedies, "MAX_DOUBLINGS", 1)
    (closest,) = remedies.remedies(read_point("deepseek_v3", "published", _ON_EIGHT_CHIPS))
    assert not closest.fits


def test_ops_add_up_to_the_seconds_of_a_step():
    """One stage, no tp, ep or cp: nothing is hidden or idle, so forward = micro-batches x ops."""
    point = read_point(SMALL, "fully_sharded", [])
    result = point.evaluate()
    priced = ops.price_ops(point)
    rounds = point.row(result)["num_micro_batches"]
    for phases, column in (
        (["forward"], "forward_s"),
        (["backward", "weight_grad"], "backward_s"),
        (["recompute"], "recompute_s"),
    ):
        seconds = sum(op.seconds * op.times for op in priced if op.phase in phases)
        assert rounds * seconds == pytest.approx(getattr(result, column), rel=1e-9)


def test_ops_are_listed_on_demand(search):
    assert "lm_head" not in search(*PUBLISHED).out
    assert "lm_head" in search(*PUBLISHED, "--ops").out
    data = json.loads(search(*PUBLISHED, "--ops", "--json").out)
    keys = {"block", "name", "kind", "phase", "flops", "hbm_bytes", "seconds", "bound", "source"}
    assert all(op.keys() >= keys for op in data["ops"])
    assert {op["bound"] for op in data["ops"]} == {"compute", "memory", "link"}


def test_why_counts_what_each_rule_rejected_in_a_run(search, small_run):
    data = json.loads(search("why", "latest", "--json").out)
    assert data.keys() == {"run", "counts", "rejections", "closest", "remedies", "reference"}
    assert {row["rule"]: row["count"] for row in data["rejections"]} == {"constraint": 192, "memory": 100}
    text = search("why", "small").out
    assert "tp * pp <= 16" in text
    assert "1.0 K legal" in text


def test_why_counts_every_point_of_a_space_once(search):
    data = json.loads(search("why", SMALL, "--json").out)
    rejected = sum(row["count"] for row in data["rejections"])
    assert rejected + data["counts"]["legal"] == data["counts"]["raw"] == load_space(SMALL).raw_size


def test_why_explains_a_configuration(search):
    words = ("why", SMALL, "--reference", "fully_sharded")
    assert "legal and fits" in search(*words).out
    assert "what would make it fit" in search(*words, *TOO_LARGE).out
    said = search(*words, "--set", "reference.fully_sharded.tp=3")
    assert (said.code, said.err) == (0, "")
    assert "is illegal: world: num_chips (64) must be divisible by tp (3)" in said.out
    data = json.loads(search(*words, "--set", "reference.fully_sharded.tp=3", "--json").out)
    assert (data["legal"], data["feasible"]) == (False, False)
    assert data["reason"].startswith("world: ")


# -------------------------------------------------------------------------------------------- validate, catalog, bench


def test_validate_scores_the_rows_of_all_tables(search, tmp_path):
    first = write(tmp_path / "a.csv", cells(), cells(case_id="b", tp="3"))
    second = write(tmp_path / "b.csv", cells(case_id="c", complete="0"))
    data = json.loads(search("validate", first, second, "--json").out)
    assert (data["rows"], data["scored"], sum(data["skipped"].values())) == (3, 1, 1)
    assert data.keys() == {"rows", "scored", "skipped", "families", "overall", "cases"}
    assert "3 rows: 1 scored, 1 incomplete, 1 skipped" in search("validate", first, second).out


def test_validate_without_a_table_asks_for_one(search, monkeypatch, tmp_path):
    monkeypatch.setattr("spaces.SPACES", tmp_path)
    said = search("validate")
    assert said.code == 2
    assert "give a CSV" in said.err


@pytest.mark.parametrize("kind", ["chips", "clusters", "models", "spaces"])
def test_catalog_lists_and_describes_each_kind(search, kind):
    data = json.loads(search("catalog", kind, "--json").out)
    assert len(data[kind]) >= 3
    listed = search("catalog", kind).out
    for entry in data[kind]:
        assert entry["name"] in listed
        described = json.loads(search("catalog", kind, entry["name"], "--json").out)
        assert described["fields"][0]["value"] == entry["name"]
        assert all(row.keys() == {"field", "value", "source"} for row in described["fields"])


@pytest.mark.parametrize("kind", ["chips", "clusters", "models", "spaces"])
def test_catalog_fits_a_terminal_and_cuts_nothing(search, kind):
    entries = json.loads(search("catalog", kind, "--json").out)[kind]
    text = search("catalog", kind).out
    assert max(map(len, text.splitlines())) <= 100
    assert "..." not in text
    words = text.replace("+", "+ ").split()
    for entry in entries:
        last = str(list(entry.values())[-1])
        assert kind == "chips" or set(last.replace("+", "+ ").split()) <= set(words)


def test_catalog_tells_the_source_of_a_chip_and_of_a_model(search):
    assert "source: " in search("catalog", "chips", "h800-80g-sxm").out
    assert "arXiv:2412.19437" in search("catalog", "models", "deepseek_v3").out


def test_catalog_tells_the_kinds_of_layers_of_a_model(search):
    models = {entry["name"]: entry for entry in json.loads(search("catalog", "models", "--json").out)["models"]}
    assert models["nemotron_3_nano"]["layers"] == "23 mamba, 23 moe-mlp, 6 nope"
    assert models["llama3_8b"]["layers"] == "32 dense"
    assert "23 mamba, 23 moe-mlp" in search("catalog", "models").out


def test_bench_reports_the_machine_and_the_chosen_cases(search):
    said = search("bench", "--only", "evaluate_s", "--json")
    data = json.loads(said.out)
    assert data.keys() == {"machine", "cases"}
    assert data["machine"].keys() >= {"cpu", "cores", "python"}
    assert data["cases"].keys() == {"evaluate_s"}
    case = data["cases"]["evaluate_s"]
    assert (case["unit"], case["better"]) == ("s", "lower")
    assert 0 < case["value"] < 1
    assert "evaluate_s" in search("bench", "--only", "eval*").out


def test_main_reads_the_command_line_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["search", "catalog", "spaces"])
    assert main() == 0
    assert "deepseek_v3" in capsys.readouterr().out


def test_an_override_of_a_strategy_is_one_of_the_named_point_too(search):
    first, second = (
        json.loads(search("estimate", "llama3_70b:rule_of_thumb", *words, "--json").out)
        for words in ((), ("--set", "strategy.tp=4"))
    )
    assert (first["strategy"]["tp"], second["strategy"]["tp"]) == (8, 4)
    assert first["step_time_s"] != second["step_time_s"]
