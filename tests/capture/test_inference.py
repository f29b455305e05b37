"""Captured prompts and captured tokens behind a cache are the built ones, and are priced alike to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from capture.model import capture_model
from estimator.build import build
from estimator.inference import Deployment, Formats, InferenceResult, Requests, ServingPhase
from estimator.inference.step import infer
from estimator.op import OpKind
from estimator.passes.serving import behind_cache, without_training
from hardware.catalog import cluster
from tests.capture.captured import EQUAL, config_file, spec

CONTEXT = 1000
PRICED = ("llama", "qwen3_moe", "deepseek_v3, low-rank queries", "gpt_oss", "nemotron_h", "qwen3_5_moe_text", "gpt2")
H100 = cluster("dgx_h100", 2)


def plain(family):
    return replace(spec(family), attention_dropout=0.0, hidden_dropout=0.0)


@pytest.fixture(scope="module")
def captured(folder):
    known = {}

    def of(family, phase):
        if (family, phase) not in known:
            known[family, phase] = capture_model(config_file(folder, family), phase=phase)
        return known[family, phase]

    return of


@pytest.mark.parametrize("family", EQUAL)
def test_a_token_behind_its_cache_is_one_graph_from_either_door(captured, family):
    ours = captured(family, "decode").captured.at(CONTEXT)
    theirs = behind_cache(without_training(build(plain(family), 1)), plain(family), CONTEXT)
    assert ours.sequence == theirs.sequence
    for kind, block in ours.blocks.items():
        assert block.ops == theirs.blocks[kind].ops
        assert {name: theirs.blocks[kind].tensors[name] for name in block.tensors} == block.tensors


@pytest.mark.parametrize("family", PRICED)
@pytest.mark.parametrize("phase", list(ServingPhase))
def test_both_doors_give_the_same_answer_bit_for_bit(captured, family, phase):
    model = plain(family)
    request = Requests(phase=phase, batch=16, context=CONTEXT, output=40)
    for deployment in (
        Deployment(), Deployment(tp=2), Deployment(tp=2, absorb=False, formats=Formats(weights="int4", kv_cache="fp8")),
        Deployment(ep=2 if model.moe else 1, overlap_ep=True),
    ):  # fmt: skip
        theirs = told(infer(model, deployment, H100, request))
        assert told(infer(captured(family, phase.value), deployment, H100, request), theirs) == theirs
        assert told(infer(captured(family, "train"), deployment, H100, request)) == theirs


def told(result: InferenceResult, like: dict | None = None) -> dict:
    """What both doors must agree in; a graph of decode has no prompt to tell of, and keeps what its files have."""
    absent = {"time_to_first_token_s", "request_s"} if like is not None else set()
    columns = {name: value for name, value in result.columns.items() if value == value}
    if like is not None:
        columns |= {name: like["columns"][name] for name in absent if name in like["columns"]}
    return {"columns": columns, "memory": dict(result.memory), "parts": result.parts}


def test_an_op_that_is_torn_out_of_decode_changes_its_price(captured):
    model, alone = captured("llama", "decode"), Deployment(fusion=frozenset())  # a kernel for every op
    request = Requests(phase=ServingPhase.DECODE, batch=2, context=64)
    whole = infer(model, alone, H100, request)
    graph = model.captured.graph
    layer = next(kind for kind in graph.kinds if kind.is_layer)
    for name in [op.name for op in graph.blocks[layer].ops if op.kind not in {OpKind.SCORES, OpKind.CONTEXT}]:
        block = graph.blocks[layer]
        torn = block.with_ops(tuple(op for op in block.ops if op.name != name))
        other = replace(graph, blocks={**graph.blocks, layer: torn})
        changed = replace(model, captured=replace(model.captured, graph=other, digest=name))
        found = infer(changed, alone, H100, request)
        assert found.time_per_output_token_s < whole.time_per_output_token_s


def test_a_graph_of_decode_has_no_prompt(captured):
    with pytest.raises(ValueError, match="graph of decode, which has no prompt"):
        infer(captured("llama", "decode"), Deployment(), H100, Requests(phase=ServingPhase.PREFILL, batch=2, context=8))
