"""`search graph schedule` and `search graph discover` on the command line."""

from __future__ import annotations

import gzip
import json

import pytest
import yaml

from estimator.passes.fuse.reading import read_rules
from search.cli import main
from tests.capture.captured import config_file


def told(capsys, *words):
    assert main(["graph", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_stage_is_scheduled_and_traced(capsys, tmp_path):
    trace = tmp_path / "stage.json.gz"
    options = ("--stage", "1", "--micro-batches", "2", "--trace", str(trace))
    data = told(capsys, "schedule", "llama3_70b:rule_of_thumb", *options)
    assert data["span_s"] == pytest.approx(data["compute_s"] + data["exposed_s"] + data["idle_s"])
    assert sum(data["critical_path_s"].values()) == pytest.approx(data["span_s"])
    assert sum(data["exposed_by_s"].values()) == pytest.approx(data["exposed_s"])
    assert {row["category"] for row in data["traffic"]} == {"tp", "dp", "pp"}
    for row in data["traffic"]:
        assert row["hidden_s"] + row["exposed_s"] == pytest.approx(row["total_s"])
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"mlp.down_proj.reduce", "gradients.reduce"} <= {event.get("name") for event in events}
    assert main(["graph", "schedule", "llama3_70b:rule_of_thumb", "--micro-batches", "2"]) == 0
    text = capsys.readouterr().out
    assert "what hides what" in text
    assert "one op after the other" in " ".join(text.split())


def test_a_captured_graph_has_the_schedule_of_the_built_one(capsys, tmp_path, search):
    config = config_file(tmp_path, "llama")
    assert search("capture", config, "-o", "llama.graph.json").code == 0
    built, captured = (told(capsys, "schedule", str(path), "--seq", "512")
                       for path in (config, tmp_path / "llama.graph.json"))  # fmt: skip
    for data in (built, captured):
        data.pop("name")
    assert built == captured


@pytest.mark.parametrize(("words", "law"), [
    (("schedule", "llama3_70b:rule_of_thumb", "--stage", "4"), "stage must be from 0 to 3, but got 4"),
    (("schedule", "llama3_8b", "--stage", "1"), "--stage is for a configuration"),
    (("schedule", "llama3_70b:rule_of_thumb", "--seq", "5"), "--seq is for a model"),
    (("schedule", "llama3_70b:rule_of_thumb", "--micro-batches", "100000"), "--micro-batches must make at most"),
    (("discover", "no_such"), "neither a known name nor a file"),
    (("discover", "llama3_8b", "--with", "fused_nrom"), "--with must name rules of"),
])  # fmt: skip
def test_mistakes_take_one_line(words, law, capsys):
    assert main(["graph", *words]) == 2
    message = capsys.readouterr().err
    assert law in message
    assert message.count("\n") == 1


def test_drafts_of_a_graph_are_a_rule_file_ranked_by_gain(capsys, tmp_path):
    assert main(["graph", "discover", "qwen3_32b"]) == 0
    text = capsys.readouterr().out
    path = tmp_path / "drafts.yaml"
    path.write_text(text, encoding="utf-8")
    rules = [rule for rule, _ in read_rules(path)]
    assert rules[0].name == "norm_rope"
    assert "# review: a norm reduces over a row" in text
    data = told(capsys, "discover", "qwen3_32b")
    assert [d["rule"]["name"] for d in data["drafts"]] == [rule.name for rule in rules]
    gains = [d["saved"]["seconds"] for d in data["drafts"]]
    assert gains == sorted(gains, reverse=True)
    assert all(gain > 0 for gain in gains)
    names = "flash_attention,fused_norm,fused_activation,norm_rope"
    alone = told(capsys, "fuse", "qwen3_32b", "--rules", str(path), "--only", names)
    plain = told(capsys, "fuse", "qwen3_32b")
    assert plain["after"]["seconds"] - alone["after"]["seconds"] == pytest.approx(gains[0], rel=1e-9)


def test_drafts_of_a_config_come_from_the_source_of_its_modules(capsys, tmp_path):
    config = config_file(tmp_path, "llama")
    data = told(capsys, "discover", str(config), "--with", "none", "--seq", "4096")
    found = {d["rule"]["name"]: d for d in data["drafts"]}
    norm = found["one_pass_llama_rms_norm"]
    assert norm["rule"]["op"] == {"class": "LlamaRMSNorm"}
    assert norm["found"].startswith("LlamaRMSNorm (modeling_llama.py:")
    assert any("rsqrt" in note for note in norm["review"])
    joined = " ".join(d["found"] for d in data["drafts"])
    assert "LlamaMLP" in joined
    assert "LlamaAttention" in joined
    assert "mlp.silu > mlp.act" in joined
    text = yaml.safe_dump({"rules": [d["rule"] for d in data["drafts"]]})
    (tmp_path / "drafts.yaml").write_text(text, encoding="utf-8")
    assert len(read_rules(tmp_path / "drafts.yaml")) == len(found)


def test_rules_by_class_hold_of_captured_graphs_and_follow_bases(capsys, tmp_path, search):
    config = config_file(tmp_path, "llama")
    assert search("capture", config, "-o", "llama.graph.json").code == 0
    rules = tmp_path / "classes.yaml"
    rules.write_text(
        "rules:\n"
        "  - {name: norms, about: of a class, op: {class: LlamaRMSNorm}, change: {op: {passes: 1}}}\n"
        "  - {name: sums, about: of a base, op: {class: GradientCheckpointingLayer}, change: {op: {passes: 0.5}}}\n"
        "  - {name: gates, about: a module, module: LlamaMLP, when: first.hidden > 1e9, result: {passes: 1}}\n",
        encoding="utf-8",
    )
    words = ("fuse", str(tmp_path / "llama.graph.json"), "--rules", str(rules), "--only", "norms,sums,gates")
    data = told(capsys, *words)
    fired = {(f["rule"], op) for f in data["firings"] for op in f["ops"]}
    assert fired == {
        ("norms", "input_norm"), ("norms", "post_attention_norm"), ("norms", "final_norm"),
        ("sums", "attention.residual"), ("sums", "mlp.residual"),
    }  # fmt: skip
    (gates,) = [m["why"] for m in data["missed"] if m["rule"] == "gates"]
    assert "first.hidden > 1e9 does not hold (first.hidden = 64)" in gates
    built = told(capsys, "fuse", str(config), "--rules", str(rules), "--only", "norms,gates")
    assert not built["firings"]
    assert all("nothing is known of" in m["why"] for m in built["missed"] if m["rule"] in {"norms", "gates"})


def test_graphs_that_answer_have_no_gradients(capsys, tmp_path, search):
    config = config_file(tmp_path, "llama")
    assert search("capture", config, "-o", "decode.graph.json", "--phase", "decode").code == 0
    graph = str(tmp_path / "decode.graph.json")
    rules = tmp_path / "decode.yaml"
    rules.write_text(
        "rules:\n"
        "  - {name: one, about: of decode, phases: decode, op: {kind: rope}, change: {op: {passes: 0.5}}}\n"
        "  - {name: other, about: of prefill, phases: prefill, op: {kind: rope}, change: {op: {passes: 0.5}}}\n",
        encoding="utf-8",
    )
    data = told(capsys, "fuse", graph, "--rules", str(rules), "--only", "one,other")
    assert {rule["rule"] for rule in data["rules"]} == {"one"}
    assert {m["rule"]: m["why"] for m in data["missed"]}["other"] == "it is for prefill, and this is decode"
    scheduled = told(capsys, "schedule", graph)
    assert set(scheduled["seconds_by"]) == {"forward"}
    assert scheduled["num_tasks"] == told(capsys, "fuse", graph)["after"]["kernels"]
