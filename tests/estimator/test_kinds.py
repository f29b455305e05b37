"""Claims about every kind of layer: what it holds, what it computes, what it sends, and that a step of it adds up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.build import build
from estimator.build.scores import band, visible_share
from estimator.cost.work import work
from estimator.detail.step import replay_step
from estimator.graph import BlockKind
from estimator.layers import LayerSpec, Mixer, Mlp
from estimator.layout import layout_of
from estimator.model import QKNorm
from estimator.op import Op, OpKind, Phase, Traffic
from estimator.parts import HyperSpec, IndexerSpec
from estimator.precision import recipe
from estimator.step import evaluate
from estimator.strategy import ContextParallel, LayoutRule, Recompute, Schedule, Strategy
from estimator.tables import model_flops_per_token
from estimator.workload import Workload
from tests.estimator.cases import FULL, LLAMA, PLAIN, SEQ, UNFUSED, WORK, block, h100, lowered, named, step, traffic
from tests.estimator.kinds import (
    CHUNKED,
    COMPRESSED,
    DELTA,
    EXPERTS,
    FULL_NORM,
    HYBRID,
    KINDS,
    LATENT,
    PARALLEL,
    SPARSE,
    WINDOWED,
)

F, B, W = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD
BF16 = recipe("bf16")
ALL_GATHER = ContextParallel.ALL_GATHER
every_kind = pytest.mark.parametrize("model", KINDS, ids=lambda m: m.name)


def layer_block(model, place, strategy=PLAIN, seq=SEQ):
    return block(model, BlockKind.of(model.layer_specs[place]), strategy, seq)


def flops(b, name):
    return float(work(named(b, name), b, BF16).flops)


def matrix_flops(model, strategy):
    """Of one rank's forward."""
    graph = lowered(model, strategy)
    total = 0.0
    for kind in graph.sequence:
        b = graph.blocks[kind]
        found = (work(op, b, BF16) for op in b.of_phase(F) if op.collective is None)
        total += sum(float(w.flops) for w in found if w.matrix)
    return total


@every_kind
def test_the_graph_holds_the_parameters_of_the_closed_form(model):
    assert build(model, SEQ).num_parameters() == model.num_parameters(include_mtp=True)


@every_kind
def test_every_op_reads_what_was_written_before_it(model):
    for kind, b in build(model, SEQ).blocks.items():
        known = {b.input} | ({"ahead", "mtp.layer.out"} if kind is BlockKind.MTP else set())
        for op in b.ops:
            assert set(op.inputs) <= known, op.name
            known |= set(op.outputs)
        assert known <= set(b.tensors)


@every_kind
def test_a_layer_hands_on_what_it_was_given(model):
    graph = build(model, SEQ)
    entry = graph.blocks[BlockKind.HEAD].tensors["x"]
    for kind, b in graph.blocks.items():
        if kind.is_layer:
            assert b.tensors["x"] == b.tensors[b.ops[-1].outputs[0]] == entry


@every_kind
def test_a_batch_of_strategies_is_priced_like_each_alone(model):
    tp = np.array([1.0, 2.0, 4.0])
    base = {"sequence_parallel": True, "pp": 2, "zero_stage": 1, "recompute": FULL}
    together = step(model, Strategy(tp=tp, **base), 16)
    for row, degree in enumerate(tp):
        alone = step(model, Strategy(tp=int(degree), **base), 16)
        for name, values in together.columns.items():
            if isinstance(alone.columns[name], float):
                assert np.asarray(values)[row] == alone.columns[name], name


# Passes that wait for a neighbour wait for launches too, and an MTP layer makes the last stage of these small models
# the longest by far: tiny-deepseek parts from its estimate by 1 %.
@every_kind
@pytest.mark.parametrize("recomputed", [Recompute(), FULL, Recompute.parse("layernorm")], ids=str)
def test_a_step_that_hides_nothing_replays_to_its_estimate(model, recomputed):
    strategy = Strategy(tp=2, pp=2, sequence_parallel=True, zero_stage=1, recompute=recomputed)
    result = replay_step(model, strategy, h100(16), Workload(seq=4096, global_batch=32))
    assert result.step_time_s == pytest.approx(result.estimate.step_time_s, rel=2e-2)


@every_kind
def test_gathered_keys_replay_to_their_estimate(model):
    strategy = Strategy(cp=2, context_parallel=ALL_GATHER, pp=2)
    result = replay_step(model, strategy, h100(16), Workload(seq=8192, global_batch=32))
    assert result.step_time_s == pytest.approx(result.estimate.step_time_s, rel=2e-2)


@every_kind
def test_tensor_parallel_ranks_share_the_products(model):
    one, two = (matrix_flops(model, Strategy(tp=tp, sequence_parallel=True)) for tp in (1, 2))
    assert 2 * two == pytest.approx(one, rel=1e-12)  # rounding of sums


@every_kind
def test_context_parallel_ranks_share_the_products(model):
    one, two = (matrix_flops(model, Strategy(cp=cp, context_parallel=ALL_GATHER)) for cp in (1, 2))
    assert 2 * two == pytest.approx(one, rel=1e-12)


@every_kind
def test_recompute_frees_memory_and_takes_time(model):
    kept, again = (step(model, Strategy(recompute=r, ep=1), 16) for r in (Recompute(), FULL))
    assert again.peak_memory_bytes < kept.peak_memory_bytes
    assert again.step_time_s > kept.step_time_s


@every_kind
def test_layers_stay_in_their_order_on_the_chunks_of_a_pipeline(model):
    kinds = build(model, SEQ).kinds
    layout = layout_of(model, kinds, Schedule.ONE_F_ONE_B, 4, 1)
    for chunk in range(3):  # the last also runs MTP
        mine = [BlockKind.of(layer) for layer in model.layer_specs[2 * chunk : 2 * chunk + 2]]
        counts = [mine.count(kind) for kind in kinds if kind.is_layer]
        assert [c for c, kind in zip(layout.counts[chunk], kinds, strict=True) if kind.is_layer] == counts


@every_kind
def test_a_balanced_layout_is_no_slower_than_an_even_one(model):
    even, balanced = (step(model, Strategy(pp=4, layout=rule), 16) for rule in (None, LayoutRule.AUTO))
    assert balanced.step_time_s <= even.step_time_s


# ------------------------------------------------------------------------------------------------- windows and chunks


@pytest.mark.parametrize("window", [1, 2, 7, 16])
def test_a_window_leaves_as_many_scores_as_its_mask(window):
    i, j = np.indices((16, 16))
    entries = ((j <= i) & (j > i - window)).sum()
    assert band(16, window) == min(entries, 16 * 16 / 2)  # the whole triangle counts half its diagonal, as elsewhere


def test_chunks_leave_as_many_scores_as_their_mask():
    i, j = np.indices((20, 20))
    entries = ((j <= i) & (i // 8 == j // 8)).sum()
    assert visible_share(20, LayerSpec(chunk=8)) * 20 * 20 / 2 == entries


def test_a_windowed_core_multiplies_its_band_and_keeps_what_a_whole_one_keeps():
    windowed, whole = (layer_block(WINDOWED, place) for place in (0, 1))
    scores = 2 * WINDOWED.num_heads * (64 + 64)
    assert flops(windowed, "attention.core") == scores * (SEQ * 128 - 128 * 127 / 2)
    assert flops(whole, "attention.core") == scores * SEQ * SEQ / 2
    assert windowed.saved() == whole.saved()


def test_a_smaller_window_takes_less_time_and_none_takes_more_than_all():
    def seconds(window):
        layers = (LayerSpec(window=window),) * 8
        return step(replace(LLAMA, layers=layers), Strategy(), 16, WORK).forward_s

    times = [seconds(window) for window in (64, 256, 1024, SEQ - 1, SEQ)]
    assert times == sorted(times)
    assert times[0] < times[2]
    assert times[-1] == step(LLAMA, Strategy(), 16, WORK).forward_s


def test_an_unfused_window_forms_the_whole_square():
    windowed, whole = (layer_block(WINDOWED, place, Strategy(fusion=UNFUSED)) for place in (0, 1))
    assert flops(windowed, "attention.scores") == flops(whole, "attention.scores")


def test_a_ring_brings_a_window_no_more_than_the_window():
    strategy = Strategy(cp=4)
    sent = {place: dict(traffic_by_name(layer_block(WINDOWED, place, strategy))) for place in (0, 1)}
    keys = 2 * 4 * 64 * 2  # bytes of a token: k and v of 4 heads of 64
    assert sent[1]["attention.scores.ring"] == SEQ * keys
    # Two slices a rank, 128 tokens before each; a ring of 4 moves 3/4 of its payload.
    assert sent[0]["attention.scores.ring"] * 3 / 4 == 2 * 128 * keys


def traffic_by_name(b):
    return [(op.name, float(op.payload)) for op in b.of_phase(F) if op.collective is not None]


def test_layers_without_positions_rotate_nothing():
    names = {op.name for op in layer_block(CHUNKED, 2).ops}
    assert not any("rope" in name for name in names)
    assert any("rope" in op.name for op in layer_block(CHUNKED, 0).ops)


# ----------------------------------------------------------------------------------------------------------- the rest


def test_a_parallel_block_gathers_once_and_reduces_once():
    strategy = Strategy(tp=4, sequence_parallel=True)
    kinds = [kind for kind, group, _ in traffic(block(PARALLEL, BlockKind.DENSE, strategy), F) if group == "tp"]
    assert kinds == [Traffic.ALL_GATHER, Traffic.REDUCE_SCATTER]
    beside = [kind for kind, group, _ in traffic(block(LLAMA, BlockKind.DENSE, strategy), F) if group == "tp"]
    assert len(beside) == 4


def test_a_norm_over_all_heads_adds_up_over_tensor_parallel_ranks():
    names = dict(traffic_by_name(block(FULL_NORM, BlockKind.DENSE, Strategy(tp=4))))
    assert names["attention.q_norm.reduce"] == names["attention.k_norm.reduce"] == SEQ * 4


def test_a_mamba_scan_takes_the_products_of_its_chunks():
    # Dao and Gu 2024, arXiv:2405.21060, section 6: Q = 128 tokens of a chunk, N = P = 64, 32 heads in 8 groups.
    q, n, p, heads, groups = 128, 64, 64, 32, 8
    per_token = groups * q * n + heads * (q * p + n * p + n * p)
    b = layer_block(HYBRID, 0)
    assert flops(b, "mamba.scan") == 2 * SEQ * per_token
    back = named(b, "mamba.scan.grad")
    assert float(work(back, b, BF16).flops) == 2.5 * 2 * SEQ * per_token


def test_a_mamba_scan_writes_and_reads_the_state_of_every_chunk():
    b = layer_block(HYBRID, 0)
    states = SEQ / 128 * 32 * 64 * 64
    streams = SEQ * (3072 + 32 + 2048) * 2  # x, B and C; steps; the output
    assert work(named(b, "mamba.scan"), b, BF16).nbytes == streams + 2 * states * (4 + 2)


def test_a_mamba_layer_keeps_what_its_fused_kernel_keeps():
    kept = {name for name, _ in layer_block(HYBRID, 0).saved()}
    assert kept >= {"mamba.xbc", "mamba.gate", "mamba.dt", "mamba.scan.out"}
    assert not kept & {"mamba.conv.out", "mamba.states", "mamba.in_proj.out"}


def test_a_gated_delta_net_takes_the_products_of_its_chunks():
    # Yang 2024, arXiv:2412.06464, section 3.3: chunks of 64, 16 value heads of 64 x 64.
    c, k, v = 64, 64, 64
    assert flops(layer_block(DELTA, 0), "linear.scan") == 2 * SEQ * 16 * (c * (3 * k + 2 * v) + 3 * k * v)


@pytest.mark.parametrize(("model", "place", "name"), [(HYBRID, 0, "mamba.scan"), (DELTA, 0, "linear.scan")])
def test_context_parallelism_spreads_the_heads_of_a_recurrence(model, place, name):
    b = layer_block(model, place, Strategy(cp=2))
    (op,) = [op for op in b.of_phase(F) if op.name == f"{name}.heads"]
    scan = named(b, name)
    moved = sum(b.tensors[t].elements for t in (*scan.inputs, scan.outputs[0])) * 2
    assert (op.collective, op.group.value, op.payload) == (Traffic.ALL_TO_ALL, "cp", moved)


def test_short_sequences_see_all_keys_masked_and_long_ones_read_chosen_latents():
    short, long = layer_block(SPARSE, 0, seq=256), layer_block(SPARSE, 0, seq=SEQ)
    assert [d.size for d in named(short, "attention.core").dims[4:]] == [96, 64]
    assert [d.size for d in named(long, "attention.core").dims[4:]] == [160, 128]
    entries = SEQ * 256 - 256 * 255 / 2
    assert flops(long, "attention.core") == 2 * entries * 16 * (160 + 128)


def test_an_indexer_scores_all_keys_and_learns_from_those_it_chose():
    b = layer_block(SPARSE, 0)
    entries = SEQ * 256 - 256 * 255 / 2
    assert flops(b, "index.scores") == SEQ * SEQ * 4 * 64
    assert flops(b, "index.loss") == pytest.approx(2 * entries * 4 * 64, rel=1e-12)  # a share times the half
    assert flops(b, "index.target") == pytest.approx(2 * entries * 16 * 160, rel=1e-12)
    back = {op.name for op in b.of_phase(B)}
    assert {"index.loss.grad"} <= back
    assert not back & {"index.scores.grad", "index.target.grad", "index.q_proj.grad", "index.k_proj.grad"}
    assert {"index.q_proj.weight_grad", "index.k_proj.weight_grad"} <= {op.name for op in b.of_phase(W)}


def test_chosen_keys_are_read_query_by_query():
    b = layer_block(SPARSE, 0)
    core = named(b, "attention.core")
    every = work(core.but(selects=False), b, BF16).nbytes
    entries = SEQ * 256 - 256 * 255 / 2
    assert work(core, b, BF16).nbytes - every == pytest.approx(entries * 160 * 2, rel=1e-12)


def test_tensor_parallel_ranks_gather_the_choice_and_the_latents():
    names = dict(traffic_by_name(layer_block(SPARSE, 0, Strategy(tp=4, sequence_parallel=True))))
    assert names["index.chosen.gather"] == SEQ * 256 * 4
    assert names["attention.latent.gather"] == SEQ * 160 * 2


def test_compressed_attention_sees_its_window_and_its_entries():
    window = SEQ * 128 - 128 * 127 / 2
    heavy = SEQ * (SEQ / 128) / 2
    num, best = SEQ / 4, 256
    chosen = 4 * (num * best - best * (best - 1) / 2)
    for place, entries in ((0, window), (2, window + heavy), (3, window + chosen)):
        got = flops(layer_block(COMPRESSED, place), "attention.core")
        assert got == pytest.approx(2 * entries * 16 * (128 + 128), rel=1e-12)


def test_hyper_connections_widen_what_stages_send_and_layers_keep():
    plain = replace(COMPRESSED, hyper=None)
    wide, narrow = (build(model, SEQ).blocks[BlockKind.HEAD].tensors["x"].elements for model in (COMPRESSED, plain))
    assert wide == 4 * narrow
    times = [step(model, Strategy(pp=4), 16) for model in (COMPRESSED, plain)]
    assert times[0].exposed_comm_pp_s > times[1].exposed_comm_pp_s
    assert times[0].peak_memory_bytes > times[1].peak_memory_bytes


def test_latent_experts_send_narrow_rows():
    whole = replace(LATENT, moe=replace(LATENT.moe, latent=0))
    place = [layer.mlp for layer in LATENT.layer_specs].index(Mlp.MOE)
    sent = [
        dict(traffic_by_name(layer_block(m, place, Strategy(ep=8))))["dispatch.all_to_all"] for m in (LATENT, whole)
    ]
    assert sent[0] * 4 == sent[1]


def test_words_that_choose_experts_search_no_scores():
    kinds = {op.name: op.kind for op in layer_block(COMPRESSED, 0).ops}
    assert kinds["router.top"] is OpKind.MIX
    assert {op.name: op.kind for op in layer_block(COMPRESSED, 2).ops}["router.top"] is OpKind.TOPK


SEES = {layer: replace(layer, mixer=Mixer.ATTENTION) for layer in HYBRID.layer_specs if layer.mixer is Mixer.MAMBA}
CHANGES = {
    "window": (LLAMA, {"layers": (LayerSpec(window=64),) * 8}),
    "chunk": (LLAMA, {"layers": (LayerSpec(chunk=64),) * 8}),
    "rope": (LLAMA, {"layers": (LayerSpec(rope=False),) * 8}),
    "no mixer": (LLAMA, {"layers": (LayerSpec(mixer=Mixer.NONE),) * 8}),
    "no mlp": (LLAMA, {"layers": (LayerSpec(mlp=Mlp.NONE),) * 8}),
    "sinks": (LLAMA, {"attention_sinks": True}),
    "gate": (LLAMA, {"attention_gate": True}),
    "unweighted": (LLAMA, {"qk_norm": QKNorm.UNWEIGHTED}),
    "full": (LLAMA, {"qk_norm": QKNorm.FULL}),
    "parallel": (LLAMA, {"parallel_block": True}),
    "hyper": (LLAMA, {"hyper": HyperSpec(streams=2)}),
    "router bias": (WINDOWED, {"moe": replace(WINDOWED.moe, router_bias=False)}),
    "shared gate": (DELTA, {"moe": EXPERTS}),
    "latent": (LATENT, {"moe": replace(LATENT.moe, latent=512)}),
    "indexer": (SPARSE, {"indexer": IndexerSpec(num_heads=4, head_dim=64, top_k=128)}),
    "hash": (COMPRESSED, {"layers": tuple(replace(x, hash_routed=False) for x in COMPRESSED.layer_specs)}),
    "mtp layer": (COMPRESSED, {"mtp_layer": COMPRESSED.layer_specs[-1]}),
    "mamba": (HYBRID, {"layers": tuple(SEES.get(x, x) for x in HYBRID.layer_specs), "mamba": None}),
    **{f"mamba {name}": (HYBRID, {"mamba": replace(HYBRID.mamba, **{name: value})}) for name, value in
       {"num_heads": 64, "head_dim": 32, "state": 128, "groups": 16, "conv": 8, "chunk": 256,
        "conv_bias": False}.items()},
    **{f"linear {name}": (DELTA, {"linear": replace(DELTA.linear, **{name: value})}) for name, value in
       {"num_key_heads": 4, "num_value_heads": 32, "key_head_dim": 32, "value_head_dim": 32, "conv": 8,
        "chunk": 128}.items()},
    **{f"compressed {name}": (COMPRESSED, {"compressed": replace(COMPRESSED.compressed, **{name: value})}) for
       name, value in {"q_lora_rank": 128, "o_groups": 4, "o_lora_rank": 64}.items()},
}  # fmt: skip


@pytest.mark.parametrize(("model", "change"), CHANGES.values(), ids=CHANGES)
def test_every_field_moves_a_number(model, change):
    before, after = (step(m, Strategy(tp=2, sequence_parallel=True), 16) for m in (model, replace(model, **change)))
    assert before.step_time_s != after.step_time_s


@pytest.mark.parametrize(
    ("model", "strategy", "law"),
    [
        (HYBRID, Strategy(tp=16), r"groups of mamba \(8\) must be divisible by tp \(16\)"),
        (DELTA, Strategy(tp=16, sequence_parallel=True), r"key heads of linear attention \(8\) must be divisible"),
        (COMPRESSED, Strategy(tp=16, sequence_parallel=True), r"o_groups of compressed attention \(8\)"),
        (DELTA, Strategy(cp=16), r"key heads of linear attention must be divisible by tp \* cp \(1 \* 16\)"),
        (SPARSE, Strategy(cp=2), "use context_parallel: all-gather"),
        (COMPRESSED, Strategy(cp=32, context_parallel=ALL_GATHER), "whole entries of seq"),
        (SPARSE, Strategy(fusion=UNFUSED), "add flash_attention to fusion"),
    ],
)
def test_what_is_not_modelled_is_refused_with_the_law(model, strategy, law):
    with pytest.raises(ValueError, match=law):
        evaluate(model, strategy, h100(64), WORK)


def test_model_flops_leave_out_gradients_that_an_indexer_does_not_take():
    b = layer_block(SPARSE, 0)
    model = replace(SPARSE, num_mtp_layers=0)
    per_layer = model_flops_per_token(model, SEQ) - model_flops_per_token(
        replace(model, num_layers=7, layers=model.layer_specs[1:]), SEQ
    )
    forward: dict[Op, float] = {op: float(work(op, b, BF16).flops) for op in b.of_phase(F) if op.collective is None
                                and work(op, b, BF16).matrix}  # fmt: skip
    times = {op: 3 if not op.detached else 2 if op.kind is OpKind.MATMUL else 1 for op in forward}
    assert per_layer * SEQ == pytest.approx(sum(times[op] * value for op, value in forward.items()), rel=1e-9)
