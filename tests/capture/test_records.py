"""Recordings: every config in reach runs without weights and without the network, each distinct layer once."""

from __future__ import annotations

import json
import socket
from collections import Counter

import pytest

from capture import model as door
from capture.model import capture_model, capture_records
from estimator.op import Phase
from search.bench_capture import peak_rss_bytes
from tests.capture.captured import EQUAL, SEQ, config_file, recorded, spec
from tests.estimator.hf_families import FAMILIES

PHASES = ("train", "prefill", "decode")


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_every_public_config_at_hand_is_recorded(shared, phase):
    refused = {}
    for path in sorted((shared / "hf_configs").glob("*.json")):
        try:
            recording = capture_records(path, phase=phase)
        except ValueError as error:
            refused[path.name] = str(error)
            continue
        assert {record.phase for record in recording.records} >= {Phase.FORWARD}
    assert refused == {}


@pytest.mark.slow
def test_a_capture_of_the_largest_takes_less_than_a_gigabyte():
    assert peak_rss_bytes() < 1e9


@pytest.mark.parametrize("family", EQUAL)
def test_parameters_are_counted_over_the_whole_model(folder, family):
    # The families' counts are of transformers' own num_parameters(), which holds router corrections as buffers.
    assert recorded(folder, family).num_parameters == FAMILIES[family][1]


def test_only_the_first_layer_of_a_kind_runs_and_all_are_counted(folder):
    recording = recorded(folder, "deepseek_v3")
    scopes = {r.scope.split(".")[2] for r in recording.records if r.scope.startswith("model.layers.")}
    assert [place.kind for place in recording.layers] == [0, 1]
    assert scopes == {"0", "1"}
    four = recorded(folder, "qwen3_5_moe_text")
    assert [place.kind for place in four.layers] == [0, 0, 0, 1]
    assert {r.scope.split(".")[2] for r in four.records if r.scope.startswith("model.layers.")} == {"0", "3"}


@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h"])
def test_a_recurrence_is_one_record_and_one_of_its_gradient(folder, family):
    recording = recorded(folder, family)
    scans = Counter(r.op for r in recording.records if r.name in {"gated_delta_rule", "mamba2_scan"})
    back = Counter(r.op for r in recording.records if r.name.endswith(("delta_rule_backward", "scan_backward")))
    assert set(scans.values()) == set(back.values()) == {1}
    assert len(recording.records) < 1500


def test_a_mask_tells_its_window(folder):
    masks = [dict(r.arguments) for r in recorded(folder, "gpt_oss").records if r.op == "capture.mask"]
    assert sorted((m["window"], m["chunk"]) for m in masks) == [(0, 0), (8, 0)]
    masks = [dict(r.arguments) for r in recorded(folder, "llama4_text").records if r.op == "capture.mask"]
    assert sorted((m["window"], m["chunk"]) for m in masks) == [(0, 0), (0, 16)]


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3", "gpt_oss", "nemotron_h", "qwen3_5_text"])
def test_decode_attends_to_what_the_cache_of_prefill_holds(folder, family):
    recording = recorded(folder, family, "decode")
    cores = [r for r in recording.records if r.op == "capture.attention"]
    assert recording.seq == 1
    assert cores
    for core in cores:
        named = {name: recording.values[ref.value].shape for name, ref in core.arguments}
        assert named["query"][2] == 1
        windows = {8} if family == "gpt_oss" else set()
        assert named["key"][2] in {recording.context + 1} | windows


def test_backward_operations_know_the_module_that_they_are_the_gradient_of(folder):
    recording = recorded(folder, "llama")
    products = [r for r in recording.of_phase(Phase.BACKWARD) if r.name == "mm"]
    forward = {r.scope for r in recording.of_phase(Phase.FORWARD) if r.name == "mm" and "layers.0" in r.scope}
    assert Counter(r.scope for r in products if "layers.0" in r.scope) == Counter(dict.fromkeys(forward, 2))
    assert all(r.line.startswith("modeling_llama.py:") for r in products)


def test_sizes_of_batch_and_sequence_are_no_sizes_of_the_model(folder):
    recording = recorded(folder, "llama")
    widths = {size for v in recording.values if v.parameter for size in v.shape}
    assert not widths & {recording.batch, recording.seq, recording.batch * recording.seq}


def test_nothing_reaches_the_network(folder, monkeypatch):
    def refuse(*_args, **_options):
        raise AssertionError("a capture needs no network")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    capture_records(config_file(folder, "qwen3"))


def test_code_beside_a_config_runs_only_when_it_is_trusted(tmp_path):
    config = FAMILIES["llama"][0] | {
        "model_type": "mine", "architectures": ["MineForCausalLM"],
        "auto_map": {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "Path(r'" + str(tmp_path) + "', 'ran').touch()\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    with pytest.raises(ValueError, match="--trust-remote-code"):
        capture_model(tmp_path)
    assert not (tmp_path / "ran").exists()
    trusted = capture_model(tmp_path, trust_remote_code=True)
    assert (tmp_path / "ran").exists()
    from estimator.build import build

    assert trusted.captured_at(SEQ).blocks == build(spec("llama"), SEQ).blocks


def test_a_failure_names_module_class_and_the_operation_before(folder, monkeypatch):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: x if x.sum().item() else x)
    told = r"model\.layers\.0\.mlp \(LlamaMLP\) cannot run without data, after aten\.sum"
    with pytest.raises(ValueError, match=told):
        capture_records(config_file(folder, "llama"))


def test_without_the_extra_one_line_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr(door, "NEEDS", ("no_such_package",))
    with pytest.raises(ValueError, match=r"capture needs no_such_package.*pip install 'trainspace\[capture\]'"):
        capture_model(config_file(folder, "llama"))


def test_what_transformers_doubts_it_keeps_to_itself_and_the_refusal_is_one_line(tmp_path, capfd):
    config = FAMILIES["llama"][0] | {"rope_scaling": {"rope_type": "nonsense", "type": "nonsense"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="cannot make a model of it: .*; a key of the config has what its code does"):
        capture_model(tmp_path / "config.json")
    assert capfd.readouterr().err == ""


HOSTILE = {
    "truncated": ('{"model_type": "llama", ', "must be JSON text"),
    "a list": ("[1]", "must hold a JSON object, but got a list; give a Hugging Face config.json"),
    "null": ("null", "must hold a JSON object, but got null; give a Hugging Face config.json"),
    "nothing": ("", "must be JSON text, but is empty; give a Hugging Face config.json"),
    "no model_type": ('{"hidden_size": 8}', "model_type must be a text"),
    "an unknown model_type": ('{"model_type": "boat"}', "knows neither model_type 'boat'"),
    "no layers": (json.dumps(FAMILIES["llama"][0] | {"num_hidden_layers": 0}), "num_hidden_layers must be a whole"),
    "a negative size": (json.dumps(FAMILIES["llama"][0] | {"hidden_size": -64}), "hidden_size must be a whole"),
    "layers without end": (json.dumps(FAMILIES["llama"][0] | {"num_hidden_layers": 10**9}), "from 1 to 10000, but"),
    "heads that do not divide": (json.dumps(FAMILIES["llama"][0] | {"num_key_value_heads": 3}), "config.json: "),
    "a size that is text": (json.dumps(FAMILIES["llama"][0] | {"vocab_size": "many"}), "vocab_size must be a whole"),
    "no language model": ('{"model_type": "vit"}', "has no causal language model of 'vit'"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_config_is_refused_in_one_line(tmp_path, name):
    content, law = HOSTILE[name]
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=law) as refused:
        capture_model(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("layers", [0, -1, 3])
def test_layers_beyond_the_model_are_refused(folder, layers):
    with pytest.raises(ValueError, match="--layers must be from 1 to 2"):
        capture_model(config_file(folder, "llama"), num_layers=layers)
