"""Models that answer, on the command line: infer, launch, show, why, resume; and bad input, one line each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from estimator.inference import Deployment, Formats, Requests, ServingPhase
from estimator.inference.step import infer
from results.store import RunFolder
from search.served import answers, load_served, parse_served
from search.served_sweep import priced_row, sweep_served
from search.space import SpaceError, load_space, shipped_spaces
from tests.capture.captured import config_file

TEXT = """
name: small
model: llama3_8b
system: {cluster: dgx_h100, num_chips: 4}
workload: {phase: decode, batch: [4, 64], context: 1024, output: 16}
strategy: {tp: [1, 2, 4], pp: [1, 2], weights: [bf16, int4], kv_cache: fp8}
reference:
  plain: {tp: 4, batch: 8}
"""
POINT = TEXT.replace("[4, 64]", "8").replace("[1, 2, 4]", "2").replace("[1, 2]", "1").replace("[bf16, int4]", "bf16")


@pytest.fixture
def space_file(tmp_path):
    (tmp_path / "small.yaml").write_text(TEXT)
    (tmp_path / "point.yaml").write_text(POINT)
    return "small.yaml"


@pytest.mark.parametrize("name", shipped_spaces(answers=True))
def test_shipped_spaces_of_requests_are_complete(name):
    space = load_served(name)
    assert parse_served(space.resolved_yaml(), "resolved.yaml") == space
    assert answers(name)
    assert not answers("llama3_70b")
    for reference, (batch, _) in space.references.items():
        system = space.systems[-1]
        point = space.point(0)._replace(system=system, batch=batch, values=space.references[reference][1])
        assert priced_row(space, point)["feasible"]


def test_the_front_is_that_of_every_candidate():
    space = parse_served(TEXT)
    found = sweep_served(space, lambda done, found: None)
    rows = []
    for number in range(space.raw_size):
        try:
            rows.append(priced_row(space, space.point(number)) | {"id": number})
        except ValueError:
            continue
    assert found.legal == len(rows)
    values = np.array([(r["time_per_output_token_s"], -r["tokens_per_s_per_gpu"]) for r in rows if r["feasible"]])
    beaten = [(np.all(values <= v, axis=1) & np.any(values < v, axis=1)).any() for v in values]
    best = [r for r, b in zip([r for r in rows if r["feasible"]], beaten, strict=True) if not b]
    assert {r["id"] for r in found.rows} <= {r["id"] for r in best}
    keys = [{(r["time_per_output_token_s"], r["tokens_per_s_per_gpu"]) for r in some} for some in (found.rows, best)]
    assert keys[0] == keys[1]
    assert 1 < len(found.rows) < len(rows)


def test_larger_batches_than_one_that_does_not_fit_are_counted_not_priced():
    space = parse_served(TEXT.replace("[4, 64]", "[4, 4096, 16384, 65536]").replace("context: 1024", "context: 65536"))
    found = sweep_served(space, lambda done, found: None)
    rows = [priced_row(space, space.point(n)) for n in range(space.raw_size) if _is_legal(space, n)]
    assert found.legal == len(rows)
    assert found.by_rule["memory"] == sum(not row["feasible"] for row in rows)
    stopped = {tuple(row[n] for n in ("tp", "pp", "weights")) for row in rows if not row["feasible"]}
    assert found.priced == found.fits + len(stopped) < found.legal


def _is_legal(space, number):
    try:
        priced_row(space, space.point(number))
    except ValueError:
        return False
    return True


def test_infer_tells_a_deployment_in_full(search, space_file):
    said = search("infer", "point.yaml")
    assert said.code == 0
    for words in ("a token", "tokens/s", "fits:", "kv_cache", "65,536 bytes of cache", "not modelled"):
        assert words in said.out
    told = json.loads(search("infer", "point.yaml", "--json").out)
    d = Deployment(tp=2, formats=Formats(kv_cache="fp8"))
    space = parse_served(POINT)
    result = infer(
        space.model, d, space.systems[0], Requests(phase=ServingPhase.DECODE, batch=8, context=1024, output=16)
    )
    assert told["time_per_output_token_s"] == result.time_per_output_token_s
    assert told["memory"] == dict(result.memory)
    asked = {"phase": "decode", "batch": 8, "context": 1024, "output": 16, "routing_skew": 0.0, "acceptance": 0.8}
    assert told["workload"] == asked
    assert told["strategy"]["dp"] == 2


def test_infer_takes_named_points_overrides_and_prefill(search, space_file):
    named = json.loads(search("infer", "small.yaml:plain", "--json", "--set", "strategy.tp=2").out)
    assert (named["strategy"]["tp"], named["workload"]["batch"]) == (2, 8)
    first = search("infer", "point.yaml", "--set", "workload.phase=prefill")
    assert first.code == 0
    assert "to the first token" in first.out
    told = json.loads(search("infer", "point.yaml", "--json", "--set", "workload.phase=prefill").out)
    assert told["time_per_output_token_s"] is None
    assert told["time_to_first_token_s"] > 0


def test_what_does_not_fit_ends_with_3_and_what_would_fit(search):
    said = search("infer", "llama3_70b_decode:node", "--set", "strategy.tp=1")
    assert said.code == 3
    assert "does not fit" in said.out
    assert "what would make it fit" in said.out
    told = json.loads(search("infer", "llama3_70b_decode:node", "--set", "strategy.tp=1", "--json").out)
    assert {"tp 2", "weights int4"} <= {remedy["change"] for remedy in told["remedies"]}
    assert all(remedy["device_memory_bytes"] <= told["usable_memory_bytes"] for remedy in told["remedies"])
    long = search("infer", "llama3_70b_decode:node", "--set", "workload.context=100000", "--json")
    assert any(remedy["change"].startswith("batch") for remedy in json.loads(long.out)["remedies"])


def test_launch_show_why_resume_and_infer_work_on_a_run(search, space_file):
    said = search("launch", "small.yaml", "--out", "run", "--json")
    assert said.code == 0
    told = json.loads(said.out)
    assert told["state"] == "done"
    assert told["counts"]["front"] == len(told["rows"])
    shown = json.loads(search("show", "run", "--json").out)
    assert shown["rows"]
    assert sorted(r["id"] for r in shown["rows"]) == sorted(r["id"] for r in told["rows"])
    row = told["rows"][0]
    again = json.loads(search("infer", f"run:{row['id']}", "--json").out)
    assert again["time_per_output_token_s"] == row["time_per_output_token_s"]
    assert again["device_memory_bytes"] == row["device_memory_bytes"]
    text = search("show", "run")
    assert "best time_per_output_token_s" in text.out
    assert "reference plain" in text.out
    some = json.loads(search("show", "run", "--where", "weights == 'int4' and batch == 64", "--json").out)["rows"]
    assert some
    assert {(r["weights"], r["batch"]) for r in some} == {("int4", 64)}
    by = search("show", "run", "--by", "tokens_per_s_per_gpu", "--top", "1")
    assert by.out.splitlines()[2].split()[0] == str(max(told["rows"], key=lambda r: r["tokens_per_s_per_gpu"])["id"])
    assert "id,name,system,phase,batch" in search("show", "run", "--csv").out
    assert search("why", "run").code == 0
    assert search("resume", "run").code == 0
    assert search("runs", ".").code == 0
    with RunFolder.open(Path("run")) as folder:
        folder.update_manifest(state="interrupted")
    assert search("resume", "run").code == 0
    assert json.loads(search("show", "run", "--json").out)["rows"] == shown["rows"]


def test_a_front_of_prefill_is_of_the_first_token_and_throughput(search, space_file):
    said = search("launch", "small.yaml", "--out", "run", "--json", "--set", "workload.phase=prefill")
    assert said.code == 0
    rows = json.loads(said.out)["rows"]
    assert {row["phase"] for row in rows} == {"prefill"}
    assert all(row["time_per_output_token_s"] is None for row in rows)
    first = min(rows, key=lambda row: row["time_to_first_token_s"])
    assert first["tokens_per_s_per_gpu"] == min(row["tokens_per_s_per_gpu"] for row in rows)
    assert "best time_to_first_token_s" in search("show", "run").out


def test_nothing_feasible_ends_with_3_and_says_what_would_fit(search, space_file):
    said = search("launch", "small.yaml", "--out", "run", "--set", "workload.context=10000000")
    assert said.code == 3
    assert "nothing is feasible" in said.out
    assert search("show", "run").code == 0
    assert search("resume", "run").code == 3


def test_commands_of_training_say_where_to_go(search, space_file):
    assert search("launch", "small.yaml", "--out", "run").code == 0
    of_runs = (["estimate", "run:0"], ["plan", "run", "--tokens", "1e9"], ["replay", "run"])
    for words in (*of_runs, *([name, "small.yaml"] for name in ("estimate", "why", "schedules"))):
        said = search(*words)
        assert (said.code, len(said.err.splitlines())) == (2, 1), words
        assert "search infer" in said.err


def test_a_space_of_training_is_sent_to_search_estimate(search):
    said = search("infer", "llama3_70b:rule_of_thumb")
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "workload.seq: a model that trains is priced by search estimate" in said.err


def test_of_several_spaces_those_of_requests_are_left_to_themselves(search, space_file):
    said = search("launch", "small.yaml", "point.yaml")
    assert said.code == 2
    assert "one by one" in said.err


def test_chunks_and_drafts_are_choices_of_a_search_and_told(search, space_file, tmp_path):
    text = TEXT.replace("output: 16", "output: 512").replace("weights: [bf16, int4]", "chunk: [0, 512, 1024]")
    (tmp_path / "chunks.yaml").write_text(text.replace("kv_cache: fp8", "kv_cache: fp8, fusion: []"))
    space = load_served("chunks.yaml")
    assert parse_served(space.resolved_yaml(), "resolved.yaml") == space
    run = search("launch", "chunks.yaml", "--out", "run", "--json")
    assert run.code == 0
    rows = json.loads(run.out)["rows"]
    assert {row["chunk"] for row in rows} == {0}  # prompts that are read elsewhere cost nothing here
    chunked = search("launch", "chunks.yaml", "--set", "strategy.chunk=[512,1024]", "--set",
                     "objectives=[longest_pass_s,tokens_per_s_per_gpu]", "--out", "other", "--json")  # fmt: skip
    assert chunked.code == 0
    assert {row["chunk"] for row in json.loads(chunked.out)["rows"]} == {512, 1024}
    told = search("infer", "chunks.yaml", "--reference", "plain", "--set", "strategy.chunk=512")
    assert "prompts in chunks of 512" in " ".join(told.out.split())
    assert "a pass with a chunk takes" in " ".join(told.out.split())
    data = json.loads(
        search("infer", "chunks.yaml", "--reference", "plain", "--set", "strategy.chunk=512", "--json").out
    )
    assert data["strategy"]["chunk"] == 512
    assert data["longest_pass_s"] > data["time_per_output_token_s"]


BAD = {
    "no context": ("context: 1024", "context: 0", "workload.context: must be at least 1"),
    "a negative output": ("output: 16", "output: -1", "workload.output: must be at least 1"),
    "no batch": ("batch: [4, 64], ", "", "workload.batch: is required"),
    "an unknown phase": ("phase: decode", "phase: dream", "workload.phase: must be a known name"),
    "a cache that does not exist": ("kv_cache: fp8", "kv_cache: fp6", "strategy.kv_cache: must be a known name"),
    "a key of training": ("kv_cache: fp8", "zero_stage: 1", "strategy.zero_stage: zero_stage is of training"),
    "an unknown key": ("kv_cache: fp8", "kv_cash: fp8", "did you mean 'kv_cache'"),
    "a key of training's workload": ("output: 16", "global_batch: 16", "unknown key 'global_batch'"),
    "dp": ("kv_cache: fp8", "dp: 2", "dp is what remains"),
    "an objective of training": ("name: small", "objectives: [step_time_s]", "objectives.0: must be a known name"),
    "a constraint that is none": ("name: small", "constraints: [tp + 1]", "constraints.0: must compare"),
    "a name that no row has": ("name: small", "constraints: ['step_time_s < 1']", "a name must be known"),
    "a skew below none": ("output: 16", "output: 16, routing_skew: -1", "workload.routing_skew: routing_skew must be"),
    "a skew that is no number": (
        "output: 16",
        "output: 16, routing_skew: much",
        "workload.routing_skew: must be a numb",
    ),
    "a chance above one": ("output: 16", "output: 16, acceptance: 1.5", "workload.acceptance: acceptance must be from"),
    "drafts below none": ("kv_cache: fp8", "drafts: -1", "strategy.drafts: must be at least 0"),
    "a chunk that is none": ("kv_cache: fp8", "chunk: all", "strategy.chunk: must be"),
    "a point with two values": ("batch: 8}", "batch: 8, kv_cache: [fp8, bf16]}", "one value per key"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("command", ["infer", "launch"])
def test_bad_input_takes_one_line_with_place_and_key(search, tmp_path, case, command):
    old, new, message = BAD[case]
    assert old in TEXT
    (tmp_path / "bad.yaml").write_text(TEXT.replace(old, new, 1))
    said = search(command, "bad.yaml")
    assert said.code == 2
    assert len(said.err.splitlines()) == 1
    assert message in said.err
    assert "bad.yaml:" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("workload.batch=9",), "batch (9) must be divisible by dp (2)"),
        (("strategy.tp=3",), "world: num_chips (4) must be divisible"),
        (("strategy.activations=nvfp4", "strategy.weights=nvfp4"), "need a matrix engine for nvfp4"),
        (("strategy.activations=fp8",), "must take no more bytes than activations"),
        (("strategy.tp=[1,2]",), "strategy.tp: a configuration has one value per key"),
        (("strategy.drafts=1",), "drafts: a prediction module of the model's own makes drafts, but llama3_8b has none"),
        (("strategy.chunk=8",), "must read 256 tokens of prompts, but chunk is 8; try 256"),
    ],
)
def test_illegal_deployments_take_one_line(search, space_file, words, message):
    said = search("infer", "point.yaml", *(part for word in words for part in ("--set", word)))
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert message in said.err


def test_beyond_what_the_model_was_made_for_a_notice_is_told(search, tmp_path, folder_of_llama):
    text = POINT.replace("model: llama3_8b", f"model: {folder_of_llama}")
    (tmp_path / "hf.yaml").write_text(text)
    told = 2048
    folder_of_llama.write_text(json.dumps(json.loads(folder_of_llama.read_text()) | {"max_position_embeddings": told}))
    assert parse_served(text).max_context == told
    said = search("infer", "hf.yaml", "--set", f"workload.context={told}")
    assert said.code == 0
    assert "notice: context and output" in said.out
    assert "notice" not in search("infer", "hf.yaml", "--set", f"workload.context={told - 16}").out
    own = parse_served(POINT.replace("output: 16", "output: 16, max_context: 1000"))
    assert len(own.notices) == 1
    assert parse_served(own.resolved_yaml()) == own


@pytest.mark.parametrize("told", [0, -1, "'long'"])
def test_a_model_is_made_for_one_token_at_least(search, tmp_path, told):
    (tmp_path / "point.yaml").write_text(POINT.replace("output: 16", f"output: 16, max_context: {told}"))
    said = search("infer", "point.yaml")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "workload.max_context" in said.err


RULE = "{name: mine, about: norms that stream twice, op: {kind: norm}, change: {op: {passes: 2}}, phases: [decode]}"


def test_kernels_of_ones_own_work_in_the_phases_that_they_name():
    fusion = "fusion: [flash_attention, mine]"
    text = POINT.replace("kv_cache: fp8", f"kv_cache: fp8, {fusion}") + f"fusion_rules: [{RULE}]\n"
    plain = parse_served(text.replace(", mine]", "]"))
    own = parse_served(text)
    assert parse_served(own.resolved_yaml()) == own
    assert [rule.value for rule in own.fusion_rules] == ["mine"]
    rows = [priced_row(space, space.point(0)) for space in (plain, own)]
    assert rows[0]["time_per_output_token_s"] != rows[1]["time_per_output_token_s"]
    assert rows[0]["time_to_first_token_s"] == rows[1]["time_to_first_token_s"]
    assert rows[1]["fusion"] == "flash_attention+mine"


def test_columns_without_a_value_in_prefill_are_no_objectives():
    text = TEXT.replace("phase: decode", "phase: prefill").replace(
        "name: small", "objectives: [time_per_output_token_s]"
    )
    with pytest.raises(SpaceError, match="must be a known name"):
        parse_served(text)


def test_a_space_of_requests_is_none_of_training():
    with pytest.raises(SpaceError, match="priced by search infer"):
        load_space("llama3_70b_decode")


def test_a_captured_graph_answers_as_the_model_file_does(search, tmp_path, folder_of_llama):
    (tmp_path / "captured.yaml").write_text(
        POINT.replace("model: llama3_8b", f"model: {folder_of_llama}\ncapture: true")
    )
    (tmp_path / "file.yaml").write_text(POINT.replace("model: llama3_8b", f"model: {folder_of_llama}"))
    ours, theirs = (json.loads(search("infer", f"{name}.yaml", "--json").out) for name in ("captured", "file"))
    same = [name for name in theirs if name not in {"assumptions", "model", "name"}]
    assert [ours[name] for name in same] == [theirs[name] for name in same]


@pytest.fixture
def folder_of_llama(tmp_path):
    return config_file(tmp_path, "llama")
