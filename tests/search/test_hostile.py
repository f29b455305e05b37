"""Nasty input and damaged runs: one clear line, nothing lost, nothing overwritten, nothing left running."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from estimator.model_io import load_model, model_from_mapping
from results.schema import FRONT_FIELDS
from results.store import RunFolder
from search.space import SpaceError, load_space, parse_space
from tests.search.conftest import SMALL

ROOT = Path(__file__).resolve().parents[2]
INLINE = ("--pool", "inline")
MODEL = {
    "name": "tiny", "num_layers": 2, "hidden": 8, "ffn": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4,
    "vocab": 10,
}  # fmt: skip
SPACE = (
    "model: {model}\nsystem: dgx_h100\nworkload: {{seq: 8, global_batch: 128}}\nreference: {{'{name}': {{tp: 8}}}}\n"
)


def space(model: str = "llama3_8b", name: str = "eight") -> str:
    return SPACE.format(model=model, name=name)


@pytest.mark.parametrize("size", [10**18, 2**70])
@pytest.mark.parametrize("key", ["num_layers", "num_mtp_layers", "hidden", "ffn", "vocab", "head_dim"])
def test_a_model_of_impossible_size_is_refused_before_memory_is_taken(key, size):
    with pytest.raises(ValueError, match=f"{key} must be at most .*, but got {size}"):
        model_from_mapping(MODEL | {key: size})


def test_an_alias_bomb_in_a_model_file_is_shown_short(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    bomb = "\n".join(lines)
    values = "\n".join(f"{key}: {value}" for key, value in MODEL.items() if key != "hidden")
    file = tmp_path / "bomb.yaml"
    file.write_text(f"source:\n  {bomb.replace(chr(10), chr(10) + '  ')}\n{values}\nhidden: *a9\n")
    with pytest.raises(ValueError, match="hidden must be an integer") as caught:
        load_model(file)
    assert len(str(caught.value)) < 1000


def test_a_model_name_too_long_for_the_file_system_names_its_line():
    with pytest.raises(SpaceError, match=r"^space:1: model: ") as caught:
        parse_space(space(model="x" * 5000))
    assert len(str(caught.value)) < 1000


def test_a_reference_must_not_be_named_like_a_row():
    with pytest.raises(SpaceError, match=r"^space:4: reference.12: a name must not be a number"):
        parse_space(space(name="12"))


def test_references_without_a_price_come_last_instead_of_failing(search):
    more = ("--set", "reference.broken.tp=3", "--set", "reference.also.pp=5")
    assert search("launch", SMALL, *INLINE, *more, "--out", "run").code == 0
    said = search("show", "run", "--tables", "reference", "--json")
    rows = json.loads(said.out)["rows"]
    assert said.code == 0
    assert [row["feasible"] for row in rows] == [True, False, False]
    assert search("show", "run", "--tables", "reference").code == 0


@pytest.mark.parametrize("file", ["front.parquet", "reference.parquet", "rejections.parquet"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut"])
def test_resuming_a_finished_run_writes_damaged_tables_again(search, file, damage):
    assert search("launch", SMALL, *INLINE, "--out", "run").code == 0
    target = Path("run", file)
    whole = target.read_bytes()
    target.unlink()
    if damage != "missing":
        target.write_bytes(b"" if damage == "empty" else whole[:-10])
    assert search("resume", "run", *INLINE).code == 0
    assert target.read_bytes() == whole


@pytest.mark.parametrize(
    ("key", "value"),
    [("counts", {"raw": "x"}), ("counts", {"raw": [1]}), ("counts", {"front": math.nan}), ("seconds", {"total": "x"})],
)
@pytest.mark.parametrize("command", ["show", "why", "resume"])
def test_a_garbled_manifest_is_one_line_that_names_it(search, small_run, command, key, value):
    manifest = small_run.path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {key: value}))
    said = search(command, small_run.path)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "manifest.json" in said.err


def test_a_garbled_line_of_a_journal_says_what_to_do(search):
    assert search("launch", SMALL, *INLINE, "--out", "run").code == 0
    with RunFolder.open(Path("run")) as run:
        run.update_manifest(state="interrupted")
        run.append_block({})
    file = Path("run", "journal", "blocks.jsonl")
    file.write_bytes(b"\0\0\0\n")
    said = search("resume", "run", *INLINE)
    assert said.code == 2
    assert "blocks.jsonl:1: " in said.err.splitlines()[-1]
    assert "delete the line" in said.err.splitlines()[-1]
    file.write_bytes(b"")
    assert search("resume", "run", *INLINE).code == 0


@pytest.mark.parametrize("file", ["manifest.json", "front.parquet", "space.yaml", "journal/blocks.jsonl"])
@pytest.mark.parametrize("option", ["-o", "--picture"])
def test_an_output_never_replaces_a_file_of_a_run(search, small_run, option, file):
    target = small_run.path / file
    target.parent.mkdir(exist_ok=True)
    target.touch()
    before = target.read_bytes()
    said = search("show", small_run.path, option, target)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert target.read_bytes() == before


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_an_output_never_replaces_the_input(search, tmp_path, force):
    file = tmp_path / "mine.yaml"
    file.write_text(space())
    said = search("estimate", file, "--reference", "eight", "-o", file, *force)
    assert said.code == 2
    assert "must not replace the input" in said.err
    assert file.read_text() == space()


@pytest.mark.parametrize(
    "words",
    [
        ["show", "latest", "-o", "mine"],
        ["show", "latest", "--xlsx", "mine.xlsx"],
        ["show", "latest", "--picture", "mine.png"],
        ["report", "latest", "-o", "mine.html"],
        ["report", "latest", "--png", "mine.d"],
        ["plan", "latest", "--tokens", "1e12", "-o", "mine.csv"],
        ["plan", "latest", "--tokens", "1e12", "-o", "mine.parquet"],
        ["plan", "latest", "--tokens", "1e12", "-o", "mine.html"],
        ["estimate", "latest:0", "-o", "mine"],
        ["compare", "latest:0", "latest:7", "-o", "mine"],
        ["fit", "latest:0", "--longest", "8192", "-o", "mine"],
        ["export", "latest:0", "--to", "torchtitan", "-o", "mine"],
        ["why", "latest", "-o", "mine"],
    ],
    ids=lambda words: f"{words[0]} {words[-2]} {words[-1]}",
)
def test_no_file_is_replaced_but_by_force(search, small_run, tmp_path, words):
    target = tmp_path / words[-1]
    if target.suffix == ".d":
        target.mkdir()
        target /= "ranks.png"
    target.write_bytes(b"edited by hand")
    said = search(*words)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1), said.err
    assert f"{target.relative_to(tmp_path)}: must not replace a file that exists" in said.err
    assert target.read_bytes() == b"edited by hand"
    assert search(*words, "--force").code == 0
    assert target.read_bytes() != b"edited by hand"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "latest", "--tokens", "1e12", "-o", "x.foo"], "a plan's name must end in .csv, .parquet, .html"),
        (["plan", "latest", "--tokens", "1e12", "-o", "x"], "but ends in nothing"),
        (["report", "latest", "-o", "x.pdf"], "a page's name must end in .html"),
        (["show", "latest", "--picture", "x.jpg"], "a picture's name must end in .png"),
        (["show", "latest", "--xlsx", "x.csv"], "a workbook's name must end in .xlsx"),
        (["report", "latest", "--point", "5"], "no row has id 5; the first of 3 ids are 0, 7, 14"),
        (["report", "latest", "--point", "nobody"], "or a reference that fits (fully_sharded), but got 'nobody'"),
        (["fit", "latest:0", "--longest", "1023"], "--longest must be at least 1024 tokens"),
        (["compare", "latest:0", "latest:5"], "no row has id 5"),
    ],
)
def test_what_is_asked_for_wrongly_is_one_line_and_leaves_no_file(search, small_run, tmp_path, words, told):
    said = search(*words)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1), said.err
    assert told in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_failure_is_told_alone_whatever_has_no_effect(search):
    """A notice is told with an answer; the line that says why there is none stands by itself."""
    idle = "strategy.dp_replicate=2"  # at ZeRO-0
    words = ["llama3_8b_small:fully_sharded", "--set", "strategy.zero_stage=0", "--set", idle]
    told = "dp_replicate: 2 has no effect where zero_stage is 0"
    assert told in search("export", *words, "--to", "megatron-lm").err
    said = search("export", *words, "--to", "torchtitan", "--set", "strategy.optimizer=muon")
    assert (said.code, said.err.count("\n")) == (2, 1), said.err
    assert "has no words for optimizer muon" in said.err
    said = search("compare", words[0], "llama3_8b_small:nobody", *words[1:])
    assert (said.code, said.err.count("\n")) == (2, 1), said.err


def test_a_run_that_has_not_ended_says_so_beside_what_it_has(search, small_run):
    assert "the run is" not in search("show", "runs/small").out
    small_run.update_manifest(state="interrupted")
    small_run.close()
    said = " ".join(search("show", "runs/small").out.split())
    assert "the run is interrupted, this is what it has found so far; go on with: search resume runs/small" in said
    small_run.write_front({field.name: [] for field in FRONT_FIELDS})
    small_run.close()
    assert "no rows in front; search why runs/small tells what was rejected" in search("show", "runs/small").out
    assert "no row has id 0; there is no row" in search("estimate", "runs/small:0").err


def test_reading_a_run_starts_no_thread_that_could_outlive_it(small_run):
    code = (
        "import os, sys\nfrom pathlib import Path\nimport results.parquet\nfrom results.store import RunFolder\n"
        "before = len(os.listdir('/proc/self/task'))\nrun = RunFolder.open(Path(sys.argv[1]))\n"
        "run.read_front(), run.read_reference(), run.read_rejections()\n"
        "sys.exit(len(os.listdir('/proc/self/task')) - before)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code, str(small_run.path)], env=env, check=False).returncode == 0


def run_in_shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "SEARCH": f"{sys.executable} -m search", "SPACE": SMALL}
    return subprocess.run(["bash", "-c", line], env=env, cwd=cwd, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&- <&-", "2>/dev/full", "2> >(head -1 >/dev/null)"])
def test_a_search_goes_on_when_nobody_can_be_told(tmp_path, streams):
    done = run_in_shell(f"$SEARCH launch $SPACE --pool inline --out run {streams}", tmp_path)
    assert done.returncode == 0
    with RunFolder.open(tmp_path / "run") as run:
        assert (run.state, len(run.read_front()) > 0) == ("done", True)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["front"]


def test_a_full_standard_output_is_named(tmp_path):
    done = run_in_shell("$SEARCH catalog chips >/dev/full", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("search: standard output: cannot write: No space left on device; give a file")


@pytest.mark.parametrize("code", ["show missing 2>&-", "show missing 2>/dev/full"])
def test_an_error_that_cannot_be_told_keeps_its_exit_code(tmp_path, code):
    assert run_in_shell(f"$SEARCH {code}", tmp_path).returncode == 2


def test_an_illegal_configuration_names_where_it_stands(search, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(space())
    said = search("estimate", file, "--reference", "eight", "--set", "reference.eight.tp=3")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith(f"search: {file}: world: ")


def test_a_space_of_a_run_that_is_no_text_names_its_file(search, small_run):
    (small_run.path / "space.yaml").write_bytes(b"name: \xff\n")
    for command in ("replay", "why"):
        said = search(command, small_run.path)
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith(f"search: {small_run.path / 'space.yaml'}: must be UTF-8, but is damaged at byte 6")


@pytest.mark.parametrize("words", [("replay", "{run}:999"), ("compare", "{run}:0", "{run}:999")])
def test_an_id_that_a_run_lacks_names_the_run(search, small_run, words):
    said = search(*(word.format(run=small_run.path) for word in words))
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith(f"search: {small_run.path}:999: no row has id 999; the first of 3 ids are 0, 7, 14")


def test_a_run_in_the_place_of_one_of_its_points_says_how_to_name_one(search, small_run):
    for words in (("estimate", small_run.path), ("compare", f"{small_run.path}:0", small_run.path)):
        said = search(*words)
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert f"write {small_run.path}:ID" in said.err


def test_a_space_in_the_place_of_a_point_names_the_keys_with_several_values(search):
    said = search("compare", SMALL, SMALL)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith(f"search: {SMALL}: strategy.tp, strategy.pp, strategy.micro_batch, ...: ")


@pytest.mark.parametrize("sampler", ["nsga2", "exhaustive", "auto"])
def test_a_warm_start_that_cannot_be_leaves_no_folder(search, small_run, sampler):
    (small_run.path / "front.parquet").write_bytes(b"PAR1")
    words = ("launch", SMALL, *INLINE, "--warm", small_run.path, "--out", "run", "--sampler", sampler)
    said = search(*words)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert ("front.parquet" if sampler == "nsga2" else "--warm starts a study") in said.err
    assert not Path("run").exists()


def test_a_run_whose_space_was_edited_is_not_resumed(search):
    assert search("launch", SMALL, *INLINE, "--out", "run").code == 0
    run = RunFolder.open(Path("run"))
    run.update_manifest(state="interrupted")
    run.close()
    whole = Path("run/space.yaml").read_text()
    Path("run/space.yaml").write_text(whole.replace("global_batch: 128", "global_batch: 256"))
    said = search("resume", "run", *INLINE)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "run/space.yaml: a run keeps the space that it was made with" in said.err
    assert RunFolder.open(Path("run")).manifest["state"] == "interrupted"
    Path("run/space.yaml").write_text(whole)
    assert search("resume", "run", *INLINE).code == 0


def test_a_run_of_before_spaces_were_hashed_is_resumed(search):
    assert search("launch", SMALL, *INLINE, "--out", "run").code == 0
    manifest = json.loads(Path("run/manifest.json").read_text())
    del manifest["space_sha256"]
    Path("run/manifest.json").write_text(json.dumps(manifest | {"state": "interrupted"}))
    assert search("resume", "run", *INLINE).code == 0


MIXED = """\
model: llama3_8b
system: {segments: [{cluster: dgx_h100, num_chips: 16}, {cluster: dgx_a100, num_chips: 16}]}
workload: {seq: 4096, global_batch: 64}
strategy: {pp: 2, zero_stage: 1}
"""


def test_a_replay_of_segments_is_refused_in_one_line(search):
    Path("mixed.yaml").write_text(MIXED)
    said = search("replay", "mixed.yaml", "--no-trace")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "a replay runs on chips of one kind" in said.err


def test_a_launch_on_several_kinds_of_chips_tells_all_of_them_and_once_that_none_is_replayed(search):
    Path("mixed.yaml").write_text(MIXED)
    said = search("launch", "mixed.yaml", "--pool", "inline", "--out", "run")
    assert said.code == 0
    assert "16 x h100-80g-sxm + 16 x a100-80g-sxm" in said.err
    assert " ".join((said.out + said.err).split()).count("a replay runs on chips of one kind") == 1
    assert "search replay" not in said.out
    again = search("replay", "run", "--no-trace")
    assert (again.code, again.out, again.err.count("\n")) == (2, "", 1)
    assert "on chips of several kinds: a replay runs on chips of one kind" in again.err


def test_segments_together_have_no_more_chips_than_a_cluster():
    with pytest.raises(SpaceError, match="system: must have at most 10000000 chips.*10000016"):
        parse_space(MIXED.replace("num_chips: 16", "num_chips: 10000000", 1))


def test_a_price_beyond_all_bounds_is_one_line(search):
    words = ("estimate", f"{SMALL}:fully_sharded", "--set")
    said = search(*words, "system={cluster: dgx_h100, num_chips: 64, price_usd_per_hour: 1.0e+308}")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "price_usd_per_hour must be at least 0 and at most 1e+09" in said.err


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_more_buckets_than_can_be_replayed_are_refused_at_once(search, stage):
    place = "reference.fully_sharded"
    words = ("--set", f"{place}.zero_stage={stage}", "--set", f"{place}.tp=2", "--set", f"{place}.bucket_bytes=1")
    said = search("replay", f"{SMALL}:fully_sharded", *words, "--no-trace")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 2)  # what it is about to replay, and why it does not
    assert "at most 300000 buckets of gradients to be replayed, but bucket_bytes 1 makes" in said.err


def test_damaged_rows_of_replays_are_written_anew_and_never_silently(search, small_run):
    file = small_run.path / "replays.parquet"
    file.write_bytes(b"PAR1")
    said = search("replay", f"{small_run.path}:7", "--no-trace")
    assert said.code == 0
    assert f"{file}: not a whole Parquet file" in said.err
    assert "written anew" in said.err
    assert len(small_run.read_replays()) == 1
    assert "written anew" not in search("replay", f"{small_run.path}:7", "--no-trace").err


@pytest.mark.parametrize("line", ["model: ../beside/bad.yaml", "model: llama3_8b\nsystem: ../beside/broken.yaml"])
def test_a_file_beside_a_space_is_named_once_and_without_detours(search, tmp_path, line):
    for folder in ("asked", "beside"):
        (tmp_path / folder).mkdir()
    (tmp_path / "beside" / "bad.yaml").write_text("num_layer: 3\n")
    (tmp_path / "beside" / "broken.yaml").write_text("cluster: [x\n")
    system = "" if "system" in line else "\nsystem: dgx_h100"
    (tmp_path / "asked" / "x.yaml").write_text(f"{line}{system}\nworkload: {{seq: 8, global_batch: 8}}\n")
    said = search("estimate", "asked/x.yaml")  # whose fixture holds every message to naming a place once
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "beside/b" in said.err
    assert ".." not in said.err


def test_a_way_through_a_linked_folder_stays_as_it_is(tmp_path):
    """There `link/../m.yaml` is beside the folder that the link leads to."""
    (tmp_path / "far" / "in").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "in")
    (tmp_path / "far" / "m.yaml").write_text("num_layer: 3\n")
    with pytest.raises(SpaceError, match=r"link/\.\./m\.yaml: num_layer is not a key"):
        parse_space("model: link/../m.yaml\nsystem: dgx_h100\nworkload: {seq: 8, global_batch: 8}\n", folder=tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "cluster: dgx_h100\nnum_chips: banana\n",
            r"own.yaml:2: system.num_chips: must be a whole number; got 'banana'",
        ),
        ("cluster: dgx_h1000\n", r"own.yaml: system: unknown cluster 'dgx_h1000'; did you mean 'dgx_h100'"),
        ("cluster: dgx_h100\nchip: {hbm_bytes: -4}\n", r"own.yaml: system: h100-80g-sxm: hbm_bytes must be finite"),
    ],
)
def test_a_system_in_a_file_of_its_own_is_refused_where_it_is_wrong(text, said, tmp_path):
    (tmp_path / "own.yaml").write_text(text)
    place = tmp_path / "space.yaml"
    place.write_text("model: llama3_8b\nsystem: own.yaml\nworkload: {seq: 8, global_batch: 128}\n")
    with pytest.raises(SpaceError, match=said):
        load_space(str(place))
    place.write_text(place.read_text().replace("own.yaml", "{file: own.yaml, num_chips: plum}"))
    with pytest.raises(SpaceError, match=r"space.yaml:2: system.num_chips: must be a whole number; got 'plum'"):
        load_space(str(place))
