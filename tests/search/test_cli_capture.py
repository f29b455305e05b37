"""`search capture`, and captured models wherever a space has a model."""

from __future__ import annotations

import json

import pytest

from tests.capture.captured import config_file

SPACE = """
name: captured
model: {model}
{capture}system: {{cluster: dgx_h100, num_chips: 8}}
workload: {{seq: 512, global_batch: 16}}
strategy: {{tp: {tp}, pp: 1, cp: 1, ep: {ep}, micro_batch: 1, sequence_parallel: true}}
"""


def space_file(folder, model, *, capture=False, tp=2, ep=1, name="space.yaml"):
    path = folder / name
    path.write_text(SPACE.format(model=model, capture="capture: true\n" if capture else "", tp=tp, ep=ep))
    return path


def test_a_graph_goes_to_a_file_and_what_it_has_is_told(search, tmp_path):
    config = config_file(tmp_path, "deepseek_v3")
    said = search("capture", config, "-o", "graph.json", "--json")
    assert (said.code, said.err) == (0, "")
    told = json.loads(said.out)
    assert told["phase"] == "train"
    assert told["num_parameters"] == 96_608 + 8  # with the router's corrections
    assert [(b["kind"], b["times"]) for b in told["blocks"]] == [
        ("embedding", 1),
        ("dense", 1),
        ("moe", 1),
        ("head", 1),
    ]
    assert told["graph_bytes"] == (tmp_path / "graph.json").stat().st_size
    assert "deepseek" not in search("capture", config, "-o", "again.json").err
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "graph.json").read_bytes()
    assert search("capture", config).out == (tmp_path / "graph.json").read_text()


@pytest.mark.slow
def test_config_capture_and_graph_give_one_estimate(search, tmp_path):
    config = config_file(tmp_path, "qwen3_moe")
    assert search("capture", config, "-o", "graph.json").code == 0
    answers = []
    for model, capture in (("config.json", False), ("config.json", True), ("graph.json", False)):
        said = search("estimate", space_file(tmp_path, model, capture=capture, ep=2), "--json")
        assert said.code == 0
        answers.append({key: value for key, value in json.loads(said.out).items() if key != "assumptions"})
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.slow
def test_a_captured_graph_is_searched_and_its_run_needs_no_config_again(search, tmp_path):
    config = config_file(tmp_path, "llama")
    space = space_file(tmp_path, "config.json", capture=True, tp="[1, 2]")
    said = search("launch", space, "--pool", "inline", "--out", "run", "--replay", "1")
    assert said.code == 0, said.err
    config.unlink()
    rows = json.loads(search("show", "run", "--json").out)["rows"]
    again = search("estimate", f"run:{rows[0]['id']}", "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["step_time_s"] == rows[0]["step_time_s"]


HOSTILE = {
    "no file": (["capture", "missing.json"], "missing.json: cannot be read"),
    "truncated": (["capture", "cut.json"], "must be JSON text"),
    "no model_type": (["capture", "plain.json"], "model_type must be a text"),
    "no layers": (["capture", "config.json", "--layers", "0"], "must be a whole number of at least 1"),
    "too many layers": (["capture", "config.json", "--layers", "9"], "--layers must be from 1 to 2"),
    "an unknown phase": (["capture", "config.json", "--phase", "dream"], "invalid choice"),
    "onto its input": (["capture", "config.json", "-o", "config.json"], "must not replace the input"),
    "into no folder": (["capture", "config.json", "-o", "no/graph.json"], "cannot write"),
    "an old graph": (["estimate", "old.yaml"], "version must be 2, but got 0"),
    "a graph of prefill": (["estimate", "prefill.yaml"], "is a graph of phase prefill"),
    "a graph of decode": (["estimate", "decode.yaml"], "is a graph of phase decode"),
    "capture of a name": (["estimate", "named.yaml"], "cannot be read"),
    "capture: maybe": (["estimate", "maybe.yaml"], "capture: must be true or false"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bad_input_is_one_line_and_2(search, tmp_path, name):
    config_file(tmp_path, "llama")
    (tmp_path / "cut.json").write_text('{"model_type": "llama", ')
    (tmp_path / "plain.json").write_text("{}")
    assert search("capture", "config.json", "--phase", "prefill", "-o", "prefill.json").code == 0
    old = json.loads((tmp_path / "prefill.json").read_text()) | {"version": 0}
    (tmp_path / "old.json").write_text(json.dumps(old))
    space_file(tmp_path, "old.json", name="old.yaml")
    space_file(tmp_path, "prefill.json", name="prefill.yaml")
    assert search("capture", "config.json", "--phase", "decode", "-o", "decode.json").code == 0
    space_file(tmp_path, "decode.json", name="decode.yaml")
    space_file(tmp_path, "llama3_8b", capture=True, name="named.yaml")
    maybe = space_file(tmp_path, "config.json", capture=True, name="maybe.yaml")
    maybe.write_text(maybe.read_text().replace("capture: true", "capture: maybe"))
    words, law = HOSTILE[name]
    said = search(*words)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert law in said.err
