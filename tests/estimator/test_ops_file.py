"""Files of graphs after passes: exact both ways, and no models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import spaces
from estimator.build import build
from estimator.model_io import load_model
from estimator.ops_file import OpsFile, ops_text, read_ops
from estimator.passes import lower, recompute
from estimator.passes.differentiate import differentiate
from estimator.precision import recipe
from estimator.strategy import Fusion, Recompute, Strategy

MODELS = ("llama3_8b", "deepseek_v3", "nemotron_h_56b", "gpt_oss_120b", "deepseek_v4_flash", "gpt3_175b")


def logical(name):
    return build(load_model(name, [spaces.MODELS]), 4096)


def of_a_rank(name):
    ep = 2 if name not in {"llama3_8b", "nemotron_h_56b", "gpt3_175b"} else 1
    strategy = Strategy(
        tp=2, ep=ep, cp=2, sequence_parallel=True, precision="fp8_1x128", fusion=tuple(Fusion)
    )  # fmt: skip
    graph = lower(logical(name), strategy, recipe(strategy.precision))
    return recompute(graph, Recompute.parse("selective"))


@pytest.mark.parametrize("make", [logical, lambda name: differentiate(logical(name)), of_a_rank])
@pytest.mark.parametrize("name", MODELS)
def test_a_file_reads_back_as_it_was_written(name, make):
    ops = OpsFile(graph=make(name), told="told", precision="fp8_1x128")
    text = ops_text(ops)
    again = read_ops("file", text)
    assert again == ops
    assert ops_text(again) == text


def test_shares_of_bytes_and_of_rows_stay_exact():
    graph = of_a_rank("deepseek_v3")
    kind = graph.kinds[1]
    ops = [op.but(payload=op.payload / 3, load=4 / 3) if op.payload else op for op in graph.blocks[kind].ops]
    uneven = replace(graph, blocks={**graph.blocks, kind: graph.blocks[kind].with_ops(tuple(ops))})
    assert uneven != graph
    assert read_ops("file", ops_text(OpsFile(graph=uneven, told="", precision="bf16"))).graph == uneven


def broken(change):
    content = json.loads(ops_text(OpsFile(graph=of_a_rank("llama3_8b"), told="told", precision="bf16")))
    change(content)
    return json.dumps(content)


BROKEN = {
    "another version": (lambda c: c.update(version=9), "version must be 1, but got 9; export the graph again"),
    "another format": (lambda c: c.update(format="boat"), "format must be 'trainspace-ops'"),
    "no such recipe": (lambda c: c.update(precision="bf15"), "precision must be one of"),
    "a key too many": (lambda c: c.update(colour=1), "colour is not a key"),
    "half a collective": (
        lambda c: next(o for o in c["blocks"][1]["ops"] if o["kind"] == "collective").pop("group"),
        "must have collective and group",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line(name):
    change, law = BROKEN[name]
    with pytest.raises(ValueError, match=law) as refused:
        read_ops("ops.json", broken(change))
    assert str(refused.value).startswith("ops.json: ")
    assert "\n" not in str(refused.value)


def test_ops_of_a_layout_are_no_model(tmp_path):
    path = tmp_path / "ops.json"
    path.write_text(ops_text(OpsFile(graph=of_a_rank("llama3_8b"), told="told", precision="bf16")))
    with pytest.raises(ValueError, match="holds the ops of one layout, which are no model"):
        load_model(path)
