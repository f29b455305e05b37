"""A model that answers: bytes against model papers, seconds against physical limits, identities, formats and laws."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spaces
from estimator.build import build
from estimator.cost.direct import direct_seconds
from estimator.inference import Deployment, Formats, Requests, ServingPhase
from estimator.inference.cache import bytes_per_token, layer_bytes, sequence_bytes
from estimator.inference.passes import priced_pass, served
from estimator.inference.step import infer
from estimator.layers import Mixer
from estimator.model_io import load_model
from estimator.op import OpKind, Traffic
from estimator.passes.answering import distinct_experts
from estimator.passes.serving import absorb, behind_cache, without_training
from estimator.strategy import CudaGraph
from hardware.catalog import cluster
from hardware.dtype import DType

H100 = cluster("dgx_h100", 8)
PREFILL, DECODE = ServingPhase.PREFILL, ServingPhase.DECODE


def model(name):
    return load_model(name, [spaces.MODELS])


def decode(batch=8, context=4096, output=1):
    return Requests(phase=DECODE, batch=batch, context=context, output=output)


def prefill(batch=1, context=4096):
    return Requests(phase=PREFILL, batch=batch, context=context)


CASES = (
    ("llama3_8b", Deployment(), cluster("dgx_h100", 1)),
    ("llama3_70b", Deployment(tp=8), H100),
    ("llama3_70b", Deployment(tp=4, formats=Formats(weights="fp8", activations="fp8", kv_cache="fp8")), H100),
    ("llama3_70b", Deployment(tp=2, pp=2), H100),
    ("qwen3_30b_a3b", Deployment(tp=2, ep=4, formats=Formats(weights="int4")), H100),
    ("deepseek_v3", Deployment(ep=64, formats=Formats(weights="fp8", activations="fp8")), cluster("dgx_h800", 64)),
    ("deepseek_v3", Deployment(tp=4, ep=16, absorb=False), cluster("dgx_h800", 64)),
    ("deepseek_v3_2", Deployment(ep=64), cluster("dgx_h800", 64)),
    (
        "deepseek_v4_flash",
        Deployment(ep=64, formats=Formats(weights="fp8", activations="fp8")),
        cluster("dgx_h800", 64),
    ),
    ("deepseek_v4_flash", Deployment(tp=4, ep=16), cluster("dgx_h800", 64)),
    ("gpt_oss_120b", Deployment(tp=2), H100),
    ("nemotron_h_56b", Deployment(tp=8), H100),
)
IDS = [f"{name}-tp{d.tp}pp{d.pp}ep{d.ep}" for name, d, _ in CASES]


# ------------------------------------------------------------------------------------------------- bytes of the cache


def test_the_cache_of_deepseek_v3_is_as_small_as_its_report_says():
    # 61 layers of a latent of 512 and a rotary key of 64 (arXiv:2412.19437, section 4.2), two bytes each.
    assert bytes_per_token(model("deepseek_v3"), Deployment(), 4096.0) == 61 * (512 + 64) * 2 == 70_272


def test_the_cache_of_llama_3_70b_is_that_of_its_grouped_heads():
    # 80 layers, 8 heads of keys and of values, 128 wide (arXiv:2407.21783, table 3).
    assert bytes_per_token(model("llama3_70b"), Deployment(), 4096.0) == 80 * 2 * 8 * 128 * 2 == 327_680


@pytest.mark.parametrize(("kv_cache", "share"), [("fp8", 1 / 2), ("int8", 1 / 2), ("nvfp4", 0.5625 / 2)])
def test_a_narrower_cache_takes_its_share(kv_cache, share):
    narrow = Deployment(formats=Formats(kv_cache=kv_cache))
    assert bytes_per_token(model("llama3_70b"), narrow, 10.0) == pytest.approx(327_680 * share, rel=1e-12)


def test_heads_of_keys_split_over_tp_until_each_rank_has_one_and_latents_not_at_all():
    llama, deepseek = model("llama3_70b"), model("deepseek_v3")
    per_rank = {tp: sequence_bytes(llama, Deployment(tp=tp), 100.0) for tp in (1, 8, 16)}
    assert per_rank[1] == 8 * per_rank[8] == 8 * per_rank[16]
    assert sequence_bytes(deepseek, Deployment(tp=8), 100.0) == sequence_bytes(deepseek, Deployment(), 100.0)


def test_windows_fill_up_and_states_do_not_grow():
    gpt, nemotron = model("gpt_oss_120b"), model("nemotron_h_56b")
    window = next(layer for layer in gpt.layer_specs if layer.window)
    assert layer_bytes(window, gpt, Deployment(), 1e5) == 128 * 2 * 8 * 64 * 2
    state = next(layer for layer in nemotron.layer_specs if layer.mixer is Mixer.MAMBA)
    m = nemotron.mamba
    held = m.num_heads * m.head_dim * m.state * 4 + (m.inner + 2 * m.groups * m.state) * (m.conv - 1) * 2
    assert layer_bytes(state, nemotron, Deployment(), 10.0) == layer_bytes(state, nemotron, Deployment(), 1e6) == held


@pytest.mark.parametrize(("name", "kind", "keys"), [("gpt_oss_120b", "window128+moe", 128), ("gpt_oss_120b", "moe", 0)])
def test_a_token_reads_its_window_of_the_cache_and_no_more(name, kind, keys):
    lengths = (64.0, 1000.0, 50_000.0)
    found = priced_pass(model(name), Deployment(tp=2), H100, DECODE, sequences=16, contexts=lengths)
    block = next(found.blocks[k] for k in found.kinds if k.value == kind)
    (core,) = [op for op in block.ops if op.op.kind is OpKind.ATTENTION]
    seen = np.minimum(lengths, keys or math.inf)
    assert core.read_bytes.tolist() == (16 * seen * 2 * (8 / 2) * 64 * 2).tolist()  # k and v, 4 of 8 heads, 64 wide


def test_an_indexer_keeps_a_key_of_every_token():
    sparse, plain = model("deepseek_v3_2"), model("deepseek_v3")
    more = bytes_per_token(sparse, Deployment(), 1e4) - bytes_per_token(plain, Deployment(), 1e4)
    assert more == 61 * 128 * 2  # arXiv:2512.02556: one head of 128


# ---------------------------------------------------------------------------------------------------- physical limits


@pytest.mark.parametrize(("name", "deployment", "system"), CASES, ids=IDS)
@pytest.mark.parametrize("batch", [64, 1024])
def test_a_token_never_takes_less_than_its_weights_and_cache_through_memory(name, deployment, system, batch):
    spec, d, f = model(name), deployment, deployment.formats
    dp = system.num_chips // (d.tp * d.pp)
    result = infer(spec, d, system, decode(batch=batch))
    # Of dense layers and attention a rank reads 1/tp, of experts at least those that one token visits, all over again
    # for each pass; counted here from the parameters of the model file, not from the graph.
    spec = replace(spec, num_mtp_layers=0, mtp_layer=None)
    width = {"bf16": 2.0, "fp8": 1.0, "int4": 0.5}[f.weights]
    moe = spec.moe
    experts = sum(layer.mlp.value == "moe" for layer in spec.layer_specs) * (moe.num_experts if moe else 0)
    each = spec.mlp_parameters(moe.ffn, moe.latent) if moe else 0
    ends = spec.vocab * spec.hidden * (1 if spec.tied_embeddings else 2)
    dense = spec.num_parameters() - experts * each - ends
    head = spec.vocab * spec.hidden * 2 / d.tp
    tokens = batch / dp * d.ep * d.etp / d.tp
    hit = experts * (1 - (1 - moe.top_k / moe.num_experts) ** tokens) * each / (d.ep * d.etp) if moe else 0.0
    replicated = dense - sum(spec.mixer_parameters(layer) for layer in spec.layer_specs) if spec.mla else 0
    split = (dense - replicated) / d.tp if not spec.mla else 0.0  # latents' projections are on every rank: left out
    weights = (split * width + head + hit * width) / d.pp
    reads = sum(layer_bytes(layer, spec, d, 4096.0) for layer in spec.layer_specs if not layer.indexed)
    reads *= batch / dp / d.pp
    least = (weights + reads) / system.chip.hbm_bytes_per_s
    assert result.time_per_output_token_s > least > 0
    assert 0 < result.mbu < 1
    assert 0 < result.mfu < 1


@pytest.mark.parametrize(("name", "deployment", "system"), CASES, ids=IDS)
def test_a_prompt_never_takes_less_than_its_products_at_peak(name, deployment, system):
    spec, d = model(name), deployment
    dp = system.num_chips // (d.tp * d.pp)
    result = infer(spec, d, system, prefill(batch=4 * dp, context=2048))
    spec = replace(spec, num_mtp_layers=0, mtp_layer=None)
    ends = spec.vocab * spec.hidden * (1 if spec.tied_embeddings else 2)
    flops = 2.0 * (spec.num_active_parameters() - ends) * 4 * dp * 2048
    peak = system.chip.peak(DType(d.formats.activations))
    # Experts and attention of a replica are split over its tp and pp ranks, so all chips work at once at best.
    assert result.time_to_first_token_s > flops / (system.num_chips * peak)
    assert 0 < result.mfu < 1


@pytest.mark.parametrize(("name", "deployment", "system"), CASES, ids=IDS)
def test_a_longer_context_never_makes_a_token_faster(name, deployment, system):
    seconds = [
        infer(model(name), deployment, system, decode(batch=64, context=n)).time_per_output_token_s
        for n in (1, 100, 1000, 10_000, 100_000)
    ]
    assert seconds == sorted(seconds)
    first = [infer(model(name), deployment, system, prefill(64, n)).time_to_first_token_s for n in (64, 1024, 16384)]
    assert first == sorted(first)


@pytest.mark.parametrize(("name", "deployment", "system"), CASES, ids=IDS)
def test_throughput_grows_with_the_batch_and_saturates(name, deployment, system):
    batches = [64 * 4**i for i in range(6)]
    rates = [infer(model(name), deployment, system, decode(batch=b)).tokens_per_s for b in batches]
    assert rates == sorted(rates)
    gains = [b / a for a, b in itertools.pairwise(rates)]
    assert gains[-1] < 1.35  # of the four times that each batch is of the last
    assert gains[0] > (1.1 if deployment.absorb else 1.0) * gains[-1]  # a cache projected up is compute from the start


def test_decode_of_one_sequence_is_bound_by_memory():
    result = infer(model("llama3_70b"), Deployment(tp=8), H100, decode(batch=1))
    parts = {part.part: part for part in result.parts}
    assert parts["mlp"].memory_bound_s == parts["mlp"].seconds
    assert infer(model("llama3_70b"), Deployment(tp=8), H100, prefill()).mfu > 10 * result.mfu


# ------------------------------------------------------------------------------------------------------------ experts


def test_the_experts_that_are_read_are_those_that_tokens_hit():
    spec = model("qwen3_30b_a3b")
    for tokens in (1, 2, 16, 1000):
        graph = distinct_experts(behind_cache(build(spec, 1), spec, 8), float(tokens))
        (groups,) = {op.dims[0].size for b in graph.blocks.values() for op in b.ops if op.kind is OpKind.GROUPED_MATMUL}
        assert groups == pytest.approx(128 * (1 - (1 - 8 / 128) ** tokens), rel=1e-12)


@settings(max_examples=20)
@given(experts=st.integers(2, 6), tokens=st.integers(1, 3), data=st.data())
def test_the_expected_number_of_distinct_experts_is_that_of_all_choices(experts, tokens, data):
    top_k = data.draw(st.integers(1, experts - 1))
    choices = list(itertools.combinations(range(experts), top_k))
    all_of_them = list(itertools.product(choices, repeat=tokens))
    mean = sum(len(set().union(*chosen)) for chosen in all_of_them) / len(all_of_them)
    assert mean == pytest.approx(experts * (1 - (1 - top_k / experts) ** tokens), rel=1e-12)


def test_few_tokens_load_few_experts_and_take_less_time():
    spec = model("deepseek_v3")
    system, d = cluster("dgx_h800", 64), Deployment(ep=64)
    seconds = {}
    for sequences in (1.0 / 64, 1.0, 64.0):
        found = priced_pass(spec, d, system, DECODE, sequences=sequences, contexts=(1024.0,))
        block = next(found.blocks[kind] for kind in found.kinds if kind.value == "moe")
        seconds[sequences] = sum(
            float(np.max(op.read_bytes)) for op in block.ops if op.op.kind is OpKind.GROUPED_MATMUL
        )
    one, many = seconds[1.0 / 64], seconds[64.0]
    assert one == pytest.approx(8 / 256 * many, rel=1e-3)  # one token in the group: 8 of 256; 4,096: all but none
    assert one < seconds[1.0] < many


# ------------------------------------------------------------------------------------------------------------ formats


def test_weights_alone_load_fewer_bytes_and_multiply_as_before():
    spec, request = model("llama3_70b"), decode(batch=1)
    plain, four = (
        infer(spec, Deployment(tp=8, formats=f), H100, request) for f in (Formats(), Formats(weights="int4"))
    )
    assert four.time_per_output_token_s < plain.time_per_output_token_s
    assert four.mfu * four.time_per_output_token_s == pytest.approx(plain.mfu * plain.time_per_output_token_s)
    long = prefill(batch=8)
    slow, fast = (infer(spec, Deployment(tp=8, formats=f), H100, long) for f in (Formats(weights="int4"), Formats()))
    assert slow.compute_s == pytest.approx(fast.compute_s, rel=1e-3)  # products of many rows hide what they load
    assert spec.num_parameters() * 0.5 / 8 < four.weight_bytes < spec.num_parameters() * 0.6 / 8


def test_narrow_products_are_faster_and_add_casts():
    spec = model("llama3_70b")
    wide, narrow = (
        infer(spec, Deployment(tp=8, formats=f), H100, prefill(batch=8))
        for f in (Formats(), Formats(weights="fp8", activations="fp8"))
    )
    assert 1.2 < wide.compute_s / narrow.compute_s < 2.0


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_a_narrower_cache_helps_decode_only(phase):
    spec, request = model("llama3_70b"), Requests(phase=phase, batch=64, context=8192)
    wide, narrow = (
        infer(spec, Deployment(tp=8, formats=Formats(kv_cache=kv)), H100, request) for kv in ("bf16", "fp8")
    )
    assert narrow.kv_cache_bytes == wide.kv_cache_bytes / 2
    assert (narrow.attention_s < 0.7 * wide.attention_s) == (phase is DECODE)


# ------------------------------------------------------------------------------------------------------- absorbed MLA


def test_absorbing_moves_products_and_keeps_every_parameter():
    spec = replace(model("deepseek_v3"), num_mtp_layers=0)
    graph = behind_cache(without_training(build(spec, 1)), spec, 1000)
    assert absorb(graph, spec).num_parameters() == graph.num_parameters()


@pytest.mark.parametrize("deployment", [Deployment(ep=64), Deployment(tp=8, ep=8)])
def test_choosing_keys_pays_where_the_cache_is_long(deployment):
    system, request = cluster("dgx_h800", 64), decode(64 * 8, 100_000)
    sparse, full = (infer(model(name), deployment, system, request) for name in ("deepseek_v3_2", "deepseek_v3"))
    assert sparse.time_per_output_token_s < full.time_per_output_token_s
    gathered, needed = sparse.exposed_comm_tp_s, full.exposed_comm_tp_s
    assert gathered <= 1.5 * needed  # what is gathered is of new tokens, whatever the cache holds


def test_absorbed_latents_pay_where_the_cache_is_long():
    spec, system = model("deepseek_v3"), cluster("dgx_h800", 64)
    once, again = (infer(spec, Deployment(ep=64, absorb=a), system, decode(64, 8192)) for a in (True, False))
    assert once.time_per_output_token_s < again.time_per_output_token_s / 3


# --------------------------------------------------------------------------------------------- identities and the host


@pytest.mark.parametrize(("name", "deployment", "system"), CASES, ids=IDS)
@pytest.mark.parametrize("phase", [PREFILL, DECODE])
def test_seconds_add_up(name, deployment, system, phase):
    result = infer(model(name), deployment, system, Requests(phase=phase, batch=256, context=2048, output=64))
    total = result.time_per_output_token_s if phase is DECODE else result.time_to_first_token_s
    parts = ("compute_s", "exposed_comm_tp_s", "exposed_comm_ep_s", "pipeline_s", "host_s")
    assert total == pytest.approx(sum(result.columns[part] for part in parts), rel=1e-12)
    assert result.attention_s < result.compute_s
    assert sum(result.memory.values()) == result.peak_memory_bytes < result.device_memory_bytes
    if phase is DECODE:
        assert result.request_s == pytest.approx(result.time_to_first_token_s + 63 * total, rel=1e-12)
        assert result.first_output_token_s <= total <= result.last_output_token_s
        assert result.tokens_per_s == pytest.approx(256 / total, rel=1e-12)


def test_a_growing_cache_is_priced_like_caches_of_each_length():
    spec, d = model("gpt_oss_120b"), Deployment(tp=2)
    each = [infer(spec, d, H100, decode(64, n)).time_per_output_token_s for n in range(125, 135)]
    grown = infer(spec, d, H100, decode(64, 125, output=10))
    assert (grown.first_output_token_s, grown.last_output_token_s) == (each[0], each[-1])
    # The window of 128 fills on the way: one kink, which trapezoids over every length follow.
    trapezoids = (sum(each) - (each[0] + each[-1]) / 2) / 9
    assert grown.time_per_output_token_s == pytest.approx(trapezoids, rel=1e-12)


def test_without_graphs_small_batches_wait_for_the_host():
    spec, scopes = model("llama3_8b"), (CudaGraph.NONE, CudaGraph.LAYER, CudaGraph.FULL)
    none, layer, full = (infer(spec, Deployment(tp=8, cuda_graph=g), H100, decode(1, 128)) for g in scopes)
    assert full.host_s == pytest.approx(2e-4)  # what is left between passes
    assert none.host_s > layer.host_s >= full.host_s
    assert none.host_s > 0.1 * none.time_per_output_token_s
    assert none.time_per_output_token_s - none.host_s == pytest.approx(full.time_per_output_token_s - full.host_s)
    busy = infer(spec, Deployment(tp=8, cuda_graph=CudaGraph.NONE), H100, decode(512, 4096))
    assert busy.host_s < none.host_s  # long kernels hide launches


# ----------------------------------------------------------------------------------------------- layouts and traffic


def test_replicas_of_attention_answer_side_by_side():
    spec = model("llama3_8b")
    one = infer(spec, Deployment(), cluster("dgx_h100", 1), decode(32))
    eight = infer(spec, Deployment(), H100, decode(256))
    assert eight.time_per_output_token_s == one.time_per_output_token_s
    assert eight.tokens_per_s == 8 * one.tokens_per_s
    assert eight.device_memory_bytes == one.device_memory_bytes


def test_a_pipeline_holds_less_and_takes_as_long_for_a_token():
    spec = model("llama3_70b")
    flat, deep = (infer(spec, Deployment(tp=2, pp=pp), cluster("dgx_h100", 2 * pp), decode(32)) for pp in (1, 4))
    assert deep.weight_bytes < 0.3 * flat.weight_bytes
    assert deep.kv_cache_bytes == flat.kv_cache_bytes / 4
    assert deep.tokens_per_s > 1.1 * flat.tokens_per_s  # four micro-batches at once, each reads its stage's weights
    assert deep.time_per_output_token_s > 0.25 * flat.time_per_output_token_s


def test_no_stage_of_a_pipeline_works_on_two_micro_batches_at_once():
    spec, d, system = model("llama3_8b"), Deployment(pp=4), cluster("dgx_h100", 4)
    result = infer(spec, d, system, decode(256, 2048))
    found = priced_pass(spec, d, system, DECODE, sequences=64, contexts=(2048.0,))
    seconds = {kind.value: float(np.max(found.blocks[kind].seconds)) for kind in found.kinds}
    last = 8 * seconds["dense"] + seconds["head"]  # the longest of four stages of 8 layers
    assert result.time_per_output_token_s == pytest.approx(4 * last + 2e-4, rel=1e-12)
    assert 4 * last > 32 * seconds["dense"] + seconds["head"] + seconds["embedding"] + 4 * 1e-5  # longer than one trip


def test_one_sequence_gains_nothing_by_a_pipeline():
    spec = model("llama3_70b")
    flat, deep = (infer(spec, Deployment(tp=2, pp=pp), cluster("dgx_h100", 2 * pp), decode(1)) for pp in (1, 4))
    assert deep.time_per_output_token_s > flat.time_per_output_token_s
    assert deep.pipeline_s > 0


def test_two_halves_hide_expert_traffic():
    spec, system = model("deepseek_v3"), cluster("dgx_h800", 64)
    f = Formats(weights="fp8", activations="fp8")
    plain, paired = (
        infer(spec, Deployment(ep=64, formats=f, overlap_ep=on), system, decode(64 * 256, 4096)) for on in (False, True)
    )
    assert paired.exposed_comm_ep_s < 0.5 * plain.exposed_comm_ep_s
    assert paired.compute_s > plain.compute_s  # each half reads all weights


def test_small_messages_cost_latency_and_large_ones_their_bytes():
    small = direct_seconds(Traffic.ALL_REDUCE, H100, 8.0, 1e3)
    assert small == pytest.approx(direct_seconds(Traffic.ALL_REDUCE, H100, 8.0, 1.0), rel=0.02)
    rate = H100.tiers[0].link.bytes_per_s
    for nbytes in (1e3, 1e6, 1e9):
        assert direct_seconds(Traffic.ALL_REDUCE, H100, 8.0, nbytes) > 2 * 7 / 8 * nbytes / rate
        assert direct_seconds(Traffic.ALL_GATHER, H100, 8.0, nbytes) > 7 / 8 * nbytes / rate
    assert direct_seconds(Traffic.ALL_REDUCE, cluster("dgx_h100", 16), 16.0, 1e3) == math.inf  # leaves the node
    assert direct_seconds(Traffic.ALL_TO_ALL, H100, 8.0, 1e3) == math.inf


# --------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize(
    ("changes", "request_", "said"),
    [
        ({"tp": 3}, decode(), "world: num_chips"),
        ({"tp": 8}, decode(context=1), None),
        ({}, decode(batch=9), r"batch: batch \(9\) must be divisible by dp \(8\)"),
        ({"formats": Formats(weights="nvfp4", activations="nvfp4")}, decode(), "engine: .*nvfp4.*h100"),
        ({"formats": Formats(weights="nvfp4")}, decode(), None),
        ({"ep": 2}, decode(), "experts"),
    ],
)
def test_what_cannot_be_is_refused_with_law_offence_and_remedy(changes, request_, said):
    if said is None:
        assert infer(model("llama3_8b"), Deployment(**changes), H100, request_).feasible
        return
    with pytest.raises(ValueError, match=said):
        infer(model("llama3_8b"), Deployment(**changes), H100, request_)


def test_sizes_and_formats_that_do_not_exist_are_refused():
    for wrong in ({"context": 0}, {"output": -1}, {"batch": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Requests(**{"phase": DECODE, "batch": 1, "context": 1} | wrong)
    with pytest.raises(ValueError, match="kv_cache must be one of"):
        Formats(kv_cache="fp6")
    with pytest.raises(ValueError, match="must take no more bytes than activations"):
        Formats(activations="fp8")


def test_what_does_not_fit_is_infeasible_not_an_error():
    result = infer(model("llama3_70b"), Deployment(), H100, decode())
    assert not result.feasible
    assert result.reason == "memory"


def test_learned_positions_have_an_end_that_is_told():
    short = replace(model("gpt3_175b"))
    told = infer(short, Deployment(tp=8), cluster("dgx_h100", 8), decode(8, 4096)).assumptions
    assert any("beyond the model's 2048 positions" in text for text in told)


# ----------------------------------------------------------------------------------------------------- compressed keys


def test_entries_are_kept_once_for_keys_and_values_and_beside_them_a_window():
    flash, window = model("deepseek_v4_flash"), 128
    by_kind = {(layer.compression, layer.indexed): layer_bytes(layer, flash, Deployment(), 65_536.0)
               for layer in flash.layer_specs}  # fmt: skip
    assert by_kind == {
        (0, False): 2 * 512 * window,
        (128, False): 2 * 512 * (window + 65_536 / 128),
        (4, True): 2 * (512 * (window + 65_536 / 4) + 128 * 65_536 / 4),
    }


def flops_of_a_token(name, context):
    found = priced_pass(served(model(name)), Deployment(), cluster("dgx_h800", 64), DECODE, sequences=1.0,
                        contexts=(context,))  # fmt: skip
    ops = [op for kind in found.sequence for op in found.blocks[kind].ops if op.price and op.price.work.matrix]
    return sum(float(np.max(op.price.work.flops)) for op in ops)


@pytest.mark.parametrize(
    ("name", "flops", "cache"), [("deepseek_v4_pro", 0.27, 0.10), ("deepseek_v4_flash", 0.10, 0.07)]
)
def test_a_million_tokens_cost_the_share_of_deepseek_v3_2_that_the_report_tells(name, flops, cache):
    # arXiv:2606.19348, abstract and section 1. It weighs formats (fp4 and fp8 against bf16), which counts of FLOPs and
    # of elements do not: a fifth off at most.
    before = model("deepseek_v3_2")
    assert flops_of_a_token(name, 1e6) / flops_of_a_token("deepseek_v3_2", 1e6) == pytest.approx(flops, rel=0.23)
    kept = sequence_bytes(model(name), Deployment(), 1e6) / sequence_bytes(before, Deployment(), 1e6)
    assert kept == pytest.approx(cache, rel=0.16)


def test_a_token_sees_its_window_and_the_entries_that_are_chosen():
    flash = served(model("deepseek_v4_flash"))
    for context in (1024.0, 2560.0, 65_536.0):
        found = priced_pass(flash, Deployment(), H100, DECODE, sequences=1.0, contexts=(512.0, context))
        for kind, block in found.blocks.items():
            if kind.layer is None:
                continue
            (core,) = [op.op for op in block.ops if op.op.kind is OpKind.ATTENTION]
            keys = np.broadcast_to(core.dims[2].size, 2)
            for length, seen in zip((512.0, context), keys, strict=True):
                entries = length / kind.layer.compression if kind.layer.compression else 0.0
                assert seen == 128 + (min(entries, 512.0) if kind.layer.indexed else entries)
            scored = [op.op.dims[1].size for op in block.ops if op.op.name == "index.scores"]
            assert [np.broadcast_to(s, 2).tolist() for s in scored] == [[128.0, context / 4]] * kind.layer.indexed
