"""More than one token a pass: drafts that are checked, prompts in chunks beside decoded tokens; and skewed routing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import spaces
from estimator.imbalance import Routing
from estimator.inference import Deployment, Formats, Requests, ServingPhase
from estimator.inference.laws import chunk_share
from estimator.inference.passes import priced_pass
from estimator.inference.step import infer
from estimator.model_io import load_model
from estimator.op import OpKind
from hardware.catalog import cluster

H100, H800 = cluster("dgx_h100", 8), cluster("dgx_h800", 64)
PREFILL, DECODE = ServingPhase.PREFILL, ServingPhase.DECODE
FP8 = Formats(weights="fp8", activations="fp8")
PARTS = ("compute_s", "exposed_comm_tp_s", "exposed_comm_ep_s", "pipeline_s", "host_s")


def model(name):
    return load_model(name, [spaces.MODELS])


def decode(batch=64, context=2048, output=512, **more):
    return Requests(phase=DECODE, batch=batch, context=context, output=output, **more)


def drafting(acceptance=0.8, drafts=2, **more):
    d = Deployment(ep=64, formats=FP8, drafts=drafts, **more)
    return infer(model("deepseek_v3"), d, H800, decode(batch=1024, output=64, acceptance=acceptance))


# ------------------------------------------------------------------------------------------------------------- drafts


@pytest.mark.parametrize(("acceptance", "drafts", "tokens"), [(0.0, 3, 1.0), (1.0, 3, 4.0), (0.5, 1, 1.5)])
def test_a_pass_gives_the_drafts_that_stand_and_one_token(acceptance, drafts, tokens):
    assert decode(acceptance=acceptance).tokens_a_pass(drafts) == tokens


def test_acceptance_changes_how_many_tokens_a_pass_gives_and_not_the_pass():
    found = {a: drafting(a) for a in (0.0, 0.3, 0.9, 1.0)}
    passes = [r.time_per_output_token_s * decode(acceptance=a).tokens_a_pass(2) for a, r in found.items()]
    assert passes == pytest.approx([passes[0]] * 4, rel=1e-12)
    assert found[1.0].tokens_per_s == pytest.approx(3 * found[0.0].tokens_per_s, rel=1e-12)


def test_drafts_that_never_stand_cost_and_those_that_do_pay():
    plain = infer(model("deepseek_v3"), Deployment(ep=64, formats=FP8), H800, decode(batch=1024, output=64))
    assert drafting(0.0).time_per_output_token_s > plain.time_per_output_token_s > drafting(1.0).time_per_output_token_s
    assert drafting().device_memory_bytes > plain.device_memory_bytes  # of the module, and what it keeps
    assert drafting().mbu < 1.0


def test_a_sequence_reads_its_cache_once_for_all_its_queries():
    whole = model("deepseek_v3")
    served = replace(whole, num_mtp_layers=0, mtp_layer=None)
    one, four = (
        priced_pass(served, Deployment(), H800, DECODE, sequences=16.0, contexts=(4096.0,), queries=q) for q in (1, 4)
    )
    for kind, block in one.blocks.items():
        for a, b in zip(block.ops, four.blocks[kind].ops, strict=True):
            assert np.max(a.read_bytes) <= np.max(b.read_bytes)  # of experts more are hit
            if a.op.kind is OpKind.ATTENTION:
                assert np.max(a.read_bytes) == np.max(b.read_bytes) > 0
                assert np.max(b.price.work.flops) == pytest.approx(4 * np.max(a.price.work.flops), rel=1e-12)
            if a.op.kind is OpKind.MATMUL and kind.layer is not None:
                assert np.max(b.price.work.flops) == pytest.approx(4 * np.max(a.price.work.flops), rel=1e-12)


# ------------------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize(("name", "deployment"), [("llama3_70b", Deployment(tp=8)), ("gpt_oss_120b", Deployment(tp=2)),
                                                  ("nemotron_h_56b", Deployment(tp=8))])  # fmt: skip
def test_a_pass_with_a_whole_prompt_takes_about_what_both_take_alone(name, deployment):
    plain = infer(model(name), deployment, H100, decode())
    mixed = infer(model(name), deployment.but(chunk=2048), H100, decode())
    alone = infer(model(name), deployment, H100, Requests(phase=PREFILL, batch=8 // deployment.tp, context=2048))
    prompt = alone.time_to_first_token_s
    assert prompt < mixed.longest_pass_s < 1.02 * (prompt + plain.last_output_token_s)
    assert mixed.time_to_first_token_s > prompt  # its tokens wait for those that are decoded beside them
    assert mixed.tokens_per_s < plain.tokens_per_s


def test_what_a_chunk_sees_before_it_is_its_share_of_the_prompt():
    d, r = Deployment(tp=8), decode(batch=64, context=32_768, output=16_384)
    plain, mixed = (infer(model("llama3_70b"), one, H100, r) for one in (d, d.but(chunk=1024)))
    prompt = infer(model("llama3_70b"), d, H100, Requests(phase=PREFILL, batch=1, context=32_768))
    share = chunk_share(d.but(chunk=1024), H100, r)
    seen = mixed.attention_s - plain.attention_s
    # Beside it, decoded tokens read queries and outputs of the chunk's rows as well: a few per cent.
    assert seen == pytest.approx(share * prompt.attention_s / 32, rel=0.05)


def test_prompts_are_read_as_fast_as_answers_end():
    d, r = Deployment(tp=8, chunk=1024), decode(batch=64, context=2048, output=512)
    assert chunk_share(d, H100, r) * 1024 == 64 * 2048 / 512
    with pytest.raises(ValueError, match=r"chunk: 64 sequences .* must read 256 tokens .* chunk is 255; try 256"):
        chunk_share(d.but(chunk=255), H100, r)


def test_the_longer_the_answers_the_less_prompts_beside_them_cost():
    plain, mixed = Deployment(tp=8), Deployment(tp=8, chunk=512)
    slower = []
    for output in (512, 2048, 16384):
        both = [
            infer(model("llama3_8b"), d, H100, decode(output=output)).time_per_output_token_s for d in (plain, mixed)
        ]
        slower.append(both[1] / both[0])
    assert slower == sorted(slower, reverse=True)
    assert 1.0 < slower[-1] < 1.05


def test_larger_chunks_make_tokens_wait_longer_and_prompts_less():
    small, large = (infer(model("llama3_70b"), Deployment(tp=8, chunk=c), H100, decode()) for c in (512, 2048))
    assert small.longest_pass_s < large.longest_pass_s
    assert large.time_to_first_token_s < small.time_to_first_token_s


@pytest.mark.parametrize(
    "more", [{"chunk": 2048}, {"drafts": 1}, {"drafts": 2, "chunk": 4096}, {"pp": 2, "chunk": 4096}]
)
def test_seconds_add_up(more):
    d = Deployment(ep=32, formats=FP8, overlap_ep=True, **more)
    result = infer(model("deepseek_v3"), d, H800, decode(batch=2048, context=4096, output=1024))
    total = result.time_per_output_token_s
    assert total == pytest.approx(sum(result.columns[part] for part in PARTS), rel=1e-12)
    assert sum(result.memory.values()) == result.peak_memory_bytes
    assert max(result.mbu, result.mfu) < 1.0


# --------------------------------------------------------------------------------------------------------------- skew


def grouped(skew, copies=0):
    moe = model("qwen3_30b_a3b")
    routing = Routing(num_experts=128, top_k=8, skew=skew)
    d = Deployment(ep=8, redundant_experts=copies)
    found = priced_pass(moe, d, H100, PREFILL, sequences=4.0, contexts=(4096.0,), routing=routing)
    ops = [op for block in found.blocks.values() for op in block.ops if op.op.kind is OpKind.GROUPED_MATMUL]
    return {op.op.name: np.max(op.op.dims[1].size) for op in ops}, routing.load_factor(8, copies)


def test_the_fullest_rank_gets_its_share_of_the_rows():
    even, one = grouped(0.0)
    assert one == 1.0
    for copies in (0, 64):
        rows, load = grouped(0.6, copies)
        assert load > 1.05
        assert {name: rows[name] / even[name] for name in rows} == pytest.approx(dict.fromkeys(rows, load), rel=1e-12)


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_skew_costs_and_copies_of_hot_experts_win_some_of_it_back(phase):
    def rate(skew, copies=0):
        d = Deployment(ep=64, formats=FP8, redundant_experts=copies)
        r = Requests(phase=phase, batch=4096, context=2048, routing_skew=skew)
        return infer(model("deepseek_v3"), d, H800, r).tokens_per_s

    assert rate(0.0) > rate(0.3) > rate(1.0)
    assert rate(0.0) > rate(1.0, 64) > rate(1.0)


def test_copies_let_experts_lie_on_chips_that_do_not_divide_them():
    d, r = Deployment(ep=144, formats=FP8), decode(batch=144 * 96, context=4989, output=1)
    deepseek, unit = model("deepseek_v3"), cluster("dgx_h800", 144)
    with pytest.raises(ValueError, match="experts"):
        infer(deepseek, d, unit, r)
    assert infer(deepseek, d.but(redundant_experts=32), unit, r).feasible


# --------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize(
    ("name", "more", "request_", "said"),
    [
        ("llama3_8b", {"drafts": 1}, decode(), "drafts: .* llama3_8b has none .*; leave drafts out"),
        ("llama3_8b", {"chunk": 4096}, decode(), "chunk: a chunk must be at most a prompt, but got 4096 of 2048"),
        ("llama3_8b", {"chunk": 64}, Requests(phase=PREFILL, batch=8, context=64), "chunk: chunk are of decode"),
        ("deepseek_v3", {"drafts": 1, "absorb": False}, decode(), "drafts: latents"),
        ("qwen3_30b_a3b", {"ep": 8}, decode(routing_skew=9.0), r"routing_skew \(9\) must be at most"),
        ("qwen3_30b_a3b", {"ep": 8, "redundant_experts": 129}, decode(), "redundant_experts|experts"),
    ],
)
def test_what_cannot_be_is_refused(name, more, request_, said):
    with pytest.raises(ValueError, match=said):
        infer(model(name), Deployment(**more), H100, request_)


def test_numbers_that_do_not_exist_are_refused():
    for wrong in ({"routing_skew": -1.0}, {"routing_skew": float("nan")}, {"acceptance": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            decode(**wrong)
    for name in ("drafts", "chunk", "redundant_experts"):
        with pytest.raises(ValueError, match=f"{name} must be at least 0, but got -1"):
            Deployment(**{name: -1})
