"""A captured graph is the graph that the model file gives: the same ops, wiring, sizes, parameters and answers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture.canonical import canonicalise, lift_all
from capture.flow import PART, SAME, Flow, UnknownOp
from capture.model import capture_model, capture_records
from capture.records import Recording
from estimator.build import build
from estimator.model import ModelSpec
from estimator.op import OpKind, Phase
from estimator.passes.differentiate import differentiate
from estimator.result import StepResult
from estimator.step import evaluate
from estimator.strategy import Recompute, Strategy
from estimator.workload import Workload
from hardware import catalog
from tests.capture.captured import EQUAL, SEQ, built, canonical, config_file, recorded, spec
from tests.estimator.hf_families import FAMILIES

TORN = (
    "llama",
    "qwen3",
    "mixtral",
    "deepseek_v3, low-rank queries",
    "gpt_oss",
    "qwen3_5_moe_text",
    "nemotron_h",
    "deepseek_v32",
    "gpt2",
)
SYSTEM = catalog.cluster("dgx_h100", 16)


@pytest.mark.parametrize("family", EQUAL)
def test_the_two_doors_meet_in_one_graph(folder, family):
    ours, theirs = canonical(folder, family).captured_at(SEQ), built(family)
    assert Counter(op.kind for b in ours.blocks.values() for op in b.ops) == Counter(
        op.kind for b in theirs.blocks.values() for op in b.ops
    )
    assert ours.sequence == theirs.sequence
    assert ours.blocks == theirs.blocks


@pytest.mark.parametrize("seq", [1, 100, 1024, 8192])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5_moe_text", "nemotron_h", "gpt_oss"])
def test_one_capture_serves_any_sequence_length(folder, family, seq):
    assert canonical(folder, family).captured_at(seq).blocks == build(spec(family), seq).blocks


@pytest.mark.parametrize("family", EQUAL)
def test_parameters_are_those_of_the_model_it_was_captured_from(folder, family):
    model, recording = canonical(folder, family), recorded(folder, family)
    assert model.captured.graph.num_parameters() - model.num_router_biases() == recording.num_parameters
    assert model.num_parameters() == spec(family).num_parameters()


@pytest.mark.parametrize("family", EQUAL)
def test_every_op_tells_the_records_it_stands_for(folder, family):
    model = canonical(folder, family)
    told = {name.rpartition("/")[2] for name in model.captured.origins}
    for block in model.captured.graph.blocks.values():
        assert {op.name for op in block.ops} <= told
    places = [place for origins in model.captured.origins.values() for place in origins]
    assert all(":" in place.line and place.module for place in places)
    assert all(place.ops for place in places)


@pytest.mark.parametrize("family", EQUAL)
def test_every_operation_that_ran_backward_is_told(folder, family):
    ran = Counter((r.op, r.scope, r.module, r.line) for r in recorded(folder, family).of_phase(Phase.BACKWARD))
    told: Counter[tuple[str, str, str, str]] = Counter()
    for place in canonical(folder, family).captured.gradients:
        told.update({(op, place.scope, place.module, place.line): times for op, times in place.ops})
    assert told == ran
    assert ran


def test_two_halves_of_a_window_are_told_apart_by_their_mask(folder):
    kinds = [kind.value for kind in canonical(folder, "gpt_oss").captured.graph.sequence]
    assert kinds == ["embedding", "window8+moe", "moe", "head"]


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_is_captured_without_the_training_that_its_code_lacks(folder, family):
    # With as many keys as tokens or fewer, a model file reads them masked, as transformers does.
    seq = canonical(folder, family).captured.chosen_keys
    ours, theirs = canonical(folder, family).captured_at(seq), build(spec(family), seq)
    assert ours.sequence == theirs.sequence
    learning = {"index.target", "index.loss"}
    for kind, block in theirs.blocks.items():
        mine = {op.name: op for op in ours.blocks[kind].ops}
        other = {op.name: op for op in block.ops if op.name not in learning}
        assert list(mine) == list(other)
        assert [name for name in mine if mine[name] != other[name]] == (["attention.scores"] if kind.is_layer else [])
    assert canonical(folder, family).captured.graph.num_parameters() == spec(family).num_parameters()


def test_chosen_keys_stay_as_many_whatever_the_sequence(folder):
    model = canonical(folder, "deepseek_v32")
    ops = {seq: [op for b in model.captured_at(seq).blocks.values() for op in b.ops] for seq in (4, 64, 4096)}
    scores = {seq: next(op for op in found if op.name == "attention.scores") for seq, found in ops.items()}
    assert scores[4].visible == 1.0  # 8 keys are chosen: all of 4
    seen = {seq: op.visible * seq * seq / 2 for seq, op in scores.items()}
    assert seen[64] == 64 * 8 - 8 * 7 / 2
    assert seen[4096] == pytest.approx(4096 * 8 - 8 * 7 / 2, rel=1e-12)  # one division and its inverse


SMALL = FAMILIES["llama"][0] | {"head_dim": 16, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
OWN = {
    "gemma2": {"input_norm", "attention.output_norm", "post_attention_norm", "mlp.output_norm", "final_norm"},
    "gemma3_text": {"input_norm", "attention.q_norm", "attention.k_norm", "attention.output_norm",
                    "post_attention_norm", "mlp.output_norm", "final_norm"},
    "glm4": {"input_norm", "attention.output_norm", "post_attention_norm", "mlp.output_norm", "final_norm"},
    "olmo2": {"attention.q_norm", "attention.k_norm", "attention.output_norm", "mlp.output_norm", "final_norm"},
    "cohere": {"input_norm", "final_norm"},
    "granite": {"input_norm", "post_attention_norm", "final_norm"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN)
def test_what_no_model_file_can_say_is_captured_all_the_same(tmp_path, kind):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | {"model_type": kind}))
    model = capture_model(path)
    ops = [op for block in model.captured.graph.blocks.values() for op in block.ops]
    assert {op.name for op in ops if op.kind is OpKind.NORM} == OWN[kind]
    assert model.num_parameters() == capture_records(path).num_parameters
    assert ("logit_cap" in [op.name for op in ops]) == (kind == "gemma2")
    result = evaluate(model, Strategy(tp=2, sequence_parallel=True), SYSTEM, Workload(seq=64, global_batch=16))
    assert result.step_time_s > 0


@pytest.mark.slow
def test_the_table_of_the_page_tells_what_public_configs_come_to(shared, root):
    page = (root / "docs" / "capture.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.count("|") == 8]
    told = {row[0]: (row[1], row[2], row[6].partition(":")[0]) for row in rows[2:]}
    found = {}
    for path in sorted((shared / "hf_configs").glob("*.json")):
        recording = capture_records(path)
        name = path.name.removesuffix("_config.json").split("--")[1]
        kinds = f"{len({place.kind for place in recording.layers})} of {len(recording.layers)}"
        found[name] = (recording.architecture, kinds, _state(path, recording))
    assert found == told


def _state(path, recording) -> str:
    try:
        model = canonicalise(recording, "public")
    except UnknownOp:
        return "refused"
    theirs = build(replace(ModelSpec.from_hf_config(path), num_mtp_layers=0, mtp_layer=None), SEQ)
    ours = model.captured_at(SEQ)
    if ours.blocks == theirs.blocks and ours.sequence == theirs.sequence:
        return "equal"
    own = {op.name for block in theirs.blocks.values() for op in block.ops}
    own -= {op.name for block in ours.blocks.values() for op in block.ops}
    return "equal but for the indexer" if {"index.target", "index.loss"} <= own else "differs"


# ---------------------------------------------------------------------------------------- what is torn out is missed


def without(recording: Recording, *gone: int) -> Recording:
    """The recording as if these records had not run: what read their result reads their first tensor input."""
    instead: dict[int, int] = {}
    kept = []
    for i, record in enumerate(recording.records):
        inputs = tuple(instead.get(v, v) for v in record.inputs)
        if i in gone and inputs:
            instead |= dict.fromkeys(record.outputs, max(inputs, key=lambda v: recording.values[v].elements))
            continue
        renamed = tuple(
            (a[0], replace(a[1], value=instead.get(a[1].value, a[1].value)))
            if isinstance(a, tuple) and hasattr(a[1], "value") else a
            for a in record.arguments
        )  # fmt: skip
        kept.append(replace(record, inputs=inputs, arguments=renamed))
    return replace(
        recording, records=kept, entry={k: instead.get(v, v) for k, v in recording.entry.items()},
        result={k: instead.get(v, v) for k, v in recording.result.items()},
        output=instead.get(recording.output, recording.output),
    )  # fmt: skip


def is_missed(recording: Recording, whole: dict) -> bool:
    try:
        graph = canonicalise(recording, "torn").captured_at(SEQ)
    except (ValueError, KeyError, IndexError, AssertionError, StopIteration):
        return True
    return graph.blocks != whole


@pytest.mark.parametrize("family", TORN)
def test_an_op_that_is_torn_out_is_missed(folder, family):
    recording = recorded(folder, family)
    flow = Flow(recording)
    lift_all(flow, "whole")
    owned: dict[str, list[int]] = {}
    for i, owner in flow.claims.items():
        if flow.records[i].name not in SAME | PART:
            owned.setdefault(owner, []).append(i)
    whole = canonical(folder, family).captured_at(SEQ).blocks
    assert not is_missed(recording, whole)
    assert [op for op, records in owned.items() if not is_missed(without(recording, *records), whole)] == []


# -------------------------------------------------------------------------------------------- backward, cross-checked


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "deepseek_v3, low-rank queries", "nemotron_h"])
def test_the_recorded_backward_has_the_products_that_differentiation_derives(folder, family):
    recording = recorded(folder, family)
    rows = recording.batch * recording.seq
    recorded_products = Counter(
        tuple(sorted((*recording.values[r.inputs[-2]].shape, recording.values[r.inputs[-1]].shape[-1])))
        for r in recording.of_phase(Phase.BACKWARD)
        if r.name == "mm" and "router" not in r.module.lower()
    )
    graph = differentiate(canonical(folder, family).captured_at(rows))
    derived = Counter(
        tuple(sorted(int(dim.size) for dim in op.dims))
        for block in graph.blocks.values()
        for op in block.of_phase(Phase.BACKWARD, Phase.WEIGHT_GRAD)
        if op.kind is OpKind.MATMUL and not op.name.startswith("router")
    )
    assert recorded_products == derived


# ------------------------------------------------------------------------------------------------------- same answers

SIZES = st.sampled_from([1, 2, 4])
RECOMPUTES = st.sampled_from(["none", "full", "selective"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tp=SIZES, pp=st.sampled_from([1, 2]), cp=st.sampled_from([1, 2]), ep=SIZES, micro=SIZES,
       zero=st.sampled_from([0, 1, 2, 3]), sequence_parallel=st.booleans(), recompute=RECOMPUTES,
       precision=st.sampled_from(["bf16", "fp8"]))  # fmt: skip
def test_both_doors_give_the_same_step_bit_for_bit(
    folder, family, tp, pp, cp, ep, micro, zero, sequence_parallel, recompute, precision
):
    given_sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro_batch": micro, "zero_stage": zero}
    strategy = Strategy(**given_sizes, sequence_parallel=sequence_parallel, recompute=Recompute.parse(recompute),
                        precision=precision)  # fmt: skip
    work = Workload(seq=1024, global_batch=64)
    answers = [_answer(model, strategy, work) for model in (canonical(folder, family), spec(family))]
    assert answers[0] == answers[1]


def _answer(model, strategy, work) -> StepResult | str:
    try:
        result = evaluate(model, strategy, SYSTEM, work)
    except ValueError as error:
        return str(error)
    return replace(result, assumptions=())


# ------------------------------------------------------------------------------------------------------ what is unknown


def test_an_unknown_op_is_refused_by_name_module_and_line(folder, monkeypatch):
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: plain(self, x).erf())
    path = config_file(folder, "llama")
    with pytest.raises(ValueError, match=r"model\.layers\.0.*\(LlamaMLP, test_canonical\.py:\d+\): aten\.erf\.default"):
        capture_model(path)
    allowed = capture_model(path, allow_unknown=True)
    assert any("erf" in name for name in allowed.captured.unknown)
    assert any("memory-bound" in note for note in allowed.notes)
    ops = {op.name: op for b in allowed.captured.graph.blocks.values() for op in b.ops}
    assert ops[next(name for name in ops if name.endswith("erf"))].kind is OpKind.ELEMENTWISE


def test_branches_that_are_not_understood_are_priced_one_record_at_a_time_when_allowed(folder, monkeypatch):
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    kind = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock
    plain = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: plain(self, x).cumsum(-1))
    path = config_file(folder, "qwen3_moe")
    with pytest.raises(ValueError, match="cumsum"):
        capture_model(path)
    model = capture_model(path, allow_unknown=True)
    assert model.moe is None
    assert model.num_parameters() == spec("qwen3_moe").num_parameters()  # priced otherwise, but all there
    assert {name.rpartition(".")[2] for name in model.captured.unknown} >= {"_grouped_mm", "topk", "cumsum"}


def test_an_op_that_the_result_depends_on_is_never_dropped(folder):
    recording = recorded(folder, "llama")
    sums = [i for i, r in enumerate(recording.records) if r.phase is Phase.FORWARD and r.op == "aten.add.Tensor"]
    last = max(i for i in sums if len(recording.records[i].inputs) == 2)
    odd = replace(recording.records[last], op="aten.remainder.Tensor")
    records = [odd if i == last else r for i, r in enumerate(recording.records)]
    with pytest.raises(ValueError, match=r"remainder"):
        canonicalise(replace(recording, records=records), "odd")


def test_layers_can_be_cut_to_the_first_ones(folder):
    model = capture_model(config_file(folder, "nemotron_h"), num_layers=2)
    assert [kind.value for kind in model.captured.graph.sequence] == ["embedding", "mamba", "mlp", "head"]
    assert model.num_layers == 2


@pytest.mark.parametrize("family", [*EQUAL, "deepseek_v32"])
def test_decode_has_the_ops_of_prefill_for_one_token_behind_its_cache(folder, family):
    path = config_file(folder, family)
    prefill, decode = (capture_model(path, phase=phase).captured for phase in ("prefill", "decode"))
    context = 1000
    graph = decode.at(context)
    assert graph.sequence == prefill.graph.sequence
    for kind, block in prefill.at(1).blocks.items():
        other = graph.blocks[kind].ops
        assert [op.name for op in block.ops] == [op.name for op in other]
        cached = {"attention.kv_b_proj"}  # transformers forms keys of the whole cache again, at every token
        for one, mine in zip(block.ops, other, strict=True):
            if one.kind is OpKind.MATMUL and one.name not in cached:
                assert mine.dims == one.dims
            if one.name in cached or one.kind is OpKind.CONTEXT:
                assert context in [dim.size for dim in mine.dims]


def test_a_decoded_token_sees_its_window_and_no_more_than_the_cache(folder):
    model = capture_model(config_file(folder, "gpt_oss"), phase="decode").captured
    seen = {
        (kind.value, context): op.visible * op.dims[2].size / 2
        for context in (4, 1024)
        for kind, block in model.at(context).blocks.items()
        for op in block.ops
        if op.kind is OpKind.SCORES
    }
    assert seen == {("window8+moe", 4): 4, ("window8+moe", 1024): 8, ("moe", 4): 4, ("moe", 1024): 1024}


def test_prefill_is_the_forward_without_its_loss(folder):
    model = capture_model(config_file(folder, "llama"), phase="prefill")
    kinds = [op.name for b in model.captured.graph.blocks.values() for op in b.ops]
    trained = [op.name for b in canonical(folder, "llama").captured.graph.blocks.values() for op in b.ops]
    assert kinds == [name for name in trained if name != "loss"]
