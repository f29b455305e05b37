"""Graph files: exact both ways, small, and refused where a byte of meaning is missing."""

from __future__ import annotations

import json
import math
import pickle
import random
import subprocess
import sys
from copy import deepcopy

import pytest

from estimator.graph_file import graph_text, read_graph
from estimator.inventory import inventory
from estimator.precision import recipe
from tests.capture.captured import EQUAL, SEQ, canonical


@pytest.mark.parametrize("family", EQUAL)
def test_a_file_reads_back_as_it_was_written(folder, family):
    model = canonical(folder, family)
    text = graph_text(model)
    again = read_graph("file", text)
    assert again == model
    assert again.captured.graph == model.captured.graph
    assert again.captured.origins == model.captured.origins
    assert again.captured.gradients == model.captured.gradients
    assert again.captured_at(SEQ) == model.captured_at(SEQ)
    assert graph_text(again) == text


def test_depth_costs_no_bytes(shared):
    from capture.model import capture_model

    model = capture_model(shared / "hf_configs" / "deepseek-ai--DeepSeek-V3_config.json")
    assert model.num_layers == 61
    assert len(graph_text(model)) < 100_000  # the aim is 500 kB


def test_a_captured_model_travels_to_workers(folder):
    model = canonical(folder, "gpt_oss")
    there = pickle.loads(pickle.dumps(model))
    assert there == model
    assert hash(there) == hash(model)
    assert there.captured_at(SEQ) == model.captured_at(SEQ)


def test_reading_a_graph_needs_no_framework(folder, tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(graph_text(canonical(folder, "llama")))
    code = (
        "import sys\nfrom estimator.model_io import load_model\n"
        f"print(load_model({str(path)!r}).num_layers, sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["2", "[]"]


def broken(folder, change) -> str:
    content = json.loads(graph_text(canonical(folder, "llama")))
    change(content)
    return json.dumps(content)


def at(path, value):
    def change(content):
        *way, last = path
        for key in way:
            content = content[key]
        content[last] = value

    return change


def cycle(content):
    ops = content["blocks"][1]["ops"]
    ops[0]["inputs"] = [ops[3]["outputs"][0]]


def swapped(content):
    ops = content["blocks"][1]["ops"]
    ops[0], ops[1] = ops[1], ops[0]


def twice(content):
    content["blocks"][1]["ops"].append(deepcopy(content["blocks"][1]["ops"][0]) | {"name": "again"})


def lost(content):
    del content["blocks"][1]["tensors"]["x"]


BROKEN = {
    "another version": (at(["version"], 1), "version must be 2, but got 1; capture the model again"),
    "another format": (at(["format"], "boat"), "format must be"),
    "a cycle": (cycle, r"blocks\.1: the ops form a cycle: .* <- .*; a block has none"),
    "a wrong order": (swapped, "reads 'input_norm.out', which only input_norm behind it makes"),
    "a value made twice": (twice, "makes 'input_norm.out', which input_norm makes"),
    "a tensor that is not there": (lost, "which is not among the tensors"),
    "no such input": (at(["blocks", 1, "ops", 0, "inputs"], ["scale"]), "which is not among the tensors"),
    "a negative size": (at(["blocks", 1, "ops", 1, "dims", 0, 0], -1), r"blocks\.1\.ops\.1\.dims must be a number"),
    "a size of nothing": (at(["blocks", 1, "ops", 1, "dims", 0, 0], 0), r"ops\.1\.dims must have sizes above 0"),
    "an infinite size": (at(["blocks", 1, "ops", 1, "dims", 0, 0], 1e999), r"ops\.1\.dims must be a number from 0 to"),
    "a size that is none": (at(["blocks", 1, "ops", 1, "dims", 0, 0], math.nan), r"ops\.1\.dims must be a number"),
    "a size beyond floats": (at(["blocks", 1, "ops", 1, "dims", 0, 0], 10**400), r"ops\.1\.dims must be a number"),
    "a size in words": (at(["blocks", 1, "ops", 1, "dims", 0, 0], "many"), r"ops\.1\.dims must be a number"),
    "a size that is true": (at(["blocks", 1, "ops", 1, "dims", 0, 0], True), r"ops\.1\.dims must be a number"),
    "a product of two sizes": (
        lambda c: c["blocks"][1]["ops"][1]["dims"].pop(),
        "a matmul, which has 3 dims, but got 2",
    ),
    "a collective": (at(["blocks", 1, "ops", 0, "kind"], "collective"), "must have collective and group if its kind"),
    "a payload": (at(["blocks", 1, "ops", 0, "payload"], 8), "payload is set by passes, and a captured graph has none"),
    "a name twice": (at(["blocks", 1, "ops", 1, "name"], "input_norm"), "names of their own, but got .*'input_norm'"),
    "a block twice": (lambda c: c["blocks"].append(c["blocks"][1]), "blocks must each be of a kind of its own"),
    "weights of objects": (at(["blocks", 1, "ops", 1, "weights", 0], ["w", [], {}]), "must be lists .name, dims"),
    "tokens beyond floats": (at(["tokens"], 10**400), "tokens must be a whole number of at least 1"),
    "no layers": (at(["model", "num_layers"], 0), "num_layers must be at least 1"),
    "a source that is none": (at(["gradients"], [["aten.mm"]]), r"gradients\.0 must be .ops, scope, module, line."),
    "an object as a list": (at(["blocks"], {}), "blocks must be a list"),
    "an unknown axis": (at(["blocks", 1, "ops", 1, "dims", 0, 1], "time"), "must be one of"),
    "an unknown kind": (at(["blocks", 1, "ops", 0, "kind"], "boat"), "kind must be one of"),
    "an unknown key": (at(["blocks", 1, "ops", 0, "colour"], "red"), "colour is not a key of an op"),
    "a role that is none": (at(["blocks", 1, "tensors", "x", 0], "red"), "must be one of"),
    "too many tokens": (at(["tokens"], 0), "tokens must be a whole number of at least 1"),
    "a phase that is none": (at(["phase"], "dream"), "phase must be one of"),
    "other layers": (at(["sequence"], [[0, 1], [1, 3], [2, 1]]), "sequence must run the layers of model"),
    "no head": (at(["sequence"], [[0, 1], [1, 2]]), "one embedding and one head"),
    "a block that is none": (at(["sequence"], [[0, 1], [7, 2], [2, 1]]), "must be \\[block, times\\]"),
    "a model that is none": (at(["model", "num_heads"], 0), "num_heads must be at least 1"),
    "no blocks": (lambda content: content.pop("blocks"), "blocks is required, but is absent"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line(folder, name):
    change, law = BROKEN[name]
    with pytest.raises(ValueError, match=law) as refused:
        read_graph("graph.json", broken(folder, change))
    assert str(refused.value).startswith("graph.json: ")
    assert "\n" not in str(refused.value)


WRONG = [None, True, -1, 0, 1.5, 1e16, math.nan, 10**400, "", "x", [], [[]], {}, {"x": 1}, "\n"]


def places(content, way=()):
    yield way
    for key in content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ():
        yield from places(content[key], (*way, key))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_whatever_stands_in_a_file_it_is_read_or_refused_in_one_line(folder, family):
    text = graph_text(canonical(folder, family))
    ways = [way for way in places(json.loads(text)) if way]
    rng = random.Random(7)
    refused = []
    for _ in range(400):
        content = json.loads(text)
        at(rng.choice(ways), rng.choice(WRONG))(content)
        try:
            inventory(read_graph("graph.json", json.dumps(content)).captured_at(SEQ), recipe("bf16"))
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) > 250
    assert all(told.startswith("graph.json: ") and "\n" not in told for told in refused)


@pytest.mark.parametrize("cut", [0, 1, 20, 2000, -3])
def test_a_truncated_file_is_refused(folder, cut):
    text = graph_text(canonical(folder, "llama"))
    with pytest.raises(ValueError, match=r"graph\.json: must be JSON text"):
        read_graph("graph.json", text[:cut])


NO_OBJECTS = {
    "a list": ("[]", "the file must be an object"),
    "a key twice": ('{"format": "trainspace-graph", "format": "x"}', "every key of an object must stand once"),
    "very deep": ("[" * 100_000, "recursion"),
    "another format": ('{"format": "boat"}', "format must be 'trainspace-graph', but got 'boat'"),
    "nothing but a format": ('{"format": "trainspace-graph", "version": 2}', "phase is required, but is absent"),
}


@pytest.mark.parametrize("name", NO_OBJECTS)
def test_what_is_no_graph_is_refused_in_one_line(name):
    text, law = NO_OBJECTS[name]
    with pytest.raises(ValueError, match=law) as refused:
        read_graph("graph.json", text)
    assert str(refused.value).startswith("graph.json: ")
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "graph.json"
    path.write_bytes(b'{"format": "\xff"}')
    with pytest.raises(ValueError, match="must be JSON text in UTF-8, but is damaged at byte 12"):
        read_graph(path)
