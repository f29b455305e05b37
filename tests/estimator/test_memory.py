"""Bytes by item against published formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.cost.table import Again, Base
from estimator.graph import BlockKind
from estimator.memory import ITEMS, RESERVED_FACTOR, WORKSPACE_BYTES
from estimator.strategy import Fusion, Overlap, Recompute, Schedule, Strategy
from tests.estimator.cases import (
    FULL,
    GPT,
    LLAMA,
    MIXTRAL,
    NONE,
    PLAIN,
    SEQ,
    TINY,
    WORK,
    again,
    base,
    h100,
    published,
    step,
)

MIB = 1024**2


def memory(model, strategy, num_chips, rank=0):
    return step(model, strategy, num_chips).stages[rank].memory


def num_parameters(model):
    return model.num_parameters(include_mtp=True)


@pytest.mark.parametrize("model", [LLAMA, GPT, MIXTRAL], ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("stage", "weights", "grads", "states"), [(0, 1, 1, 1), (1, 1, 1, 8), (2, 1, 8, 8), (3, 8, 8, 8)]
)
def test_zero_shards_what_its_paper_says(model, stage, weights, grads, states):
    """Rajbhandari 2020, arXiv:1910.02054, section 5: (2 + 2 + K) Psi with K = 12.

    Gradients are fp32 here, so (2 + 4 + 12) Psi, each term over N from its stage on.
    """
    psi = num_parameters(model)
    got = memory(model, Strategy(zero_stage=stage), 8)
    assert (got["weights"], got["gradients"]) == (2 * psi / weights, 4 * psi / grads)
    assert got["optimizer_states"] == 12 * psi / states


def test_zero_3_keeps_the_widest_block_whole_and_the_next_one():
    widest = max(base(MIXTRAL, k, Base.DENSE_WEIGHT_BYTES) + base(MIXTRAL, k, Base.EXPERT_WEIGHT_BYTES)
                 for k in (BlockKind.EMBEDDING, BlockKind.MOE, BlockKind.HEAD))  # fmt: skip
    assert memory(MIXTRAL, Strategy(zero_stage=3), 8)["gathered_weights"] == 2 * widest
    assert memory(MIXTRAL, Strategy(zero_stage=2), 8)["gathered_weights"] == 0


def test_experts_without_replicas_have_nothing_to_gather():
    model = replace(MIXTRAL, vocab=1024)  # narrower than a layer, so that layers decide
    s = Strategy(zero_stage=3, ep=8)
    layer = base(model, BlockKind.MOE, Base.DENSE_WEIGHT_BYTES, s)
    assert memory(model, s, 8)["gathered_weights"] == 2 * layer


def test_experts_shard_over_their_own_replicas():
    """8 ranks, ep 4: two replicas of each expert, eight of everything else."""
    model, moe = MIXTRAL, MIXTRAL.moe
    experts = model.num_layers * moe.num_experts * 3 * model.hidden * moe.ffn
    dense = num_parameters(model) - experts
    got = memory(model, Strategy(ep=4, zero_stage=1), 8)
    assert got["weights"] == 2 * (dense + experts / 4)
    assert got["optimizer_states"] == 12 * (dense / 8 + experts / 4 / 2)


def test_context_parallel_ranks_share_states_as_data_parallel_ones_do():
    psi = num_parameters(LLAMA)
    assert memory(LLAMA, Strategy(cp=4, zero_stage=1), 8)["optimizer_states"] == 12 * psi / 8


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_weights_over_a_pipeline_add_up_to_the_model_and_its_copies(model):
    """Tied tables and the look-ups of MTP are held on both ends."""
    result = step(model, Strategy(pp=4), 4)
    copies = (model.tied_embeddings + model.num_mtp_layers) * model.vocab * model.hidden
    assert sum(s.memory["gradients"] for s in result.stages) == 4 * (num_parameters(model) + copies)


def test_dualpipe_holds_two_copies():
    one, two = (step(LLAMA, Strategy(pp=4, schedule=s), 4) for s in (Schedule.ONE_F_ONE_B, Schedule.DUALPIPE))
    for item in ("weights", "gradients", "optimizer_states"):
        assert sum(s.memory[item] for s in two.stages) == 2 * sum(s.memory[item] for s in one.stages)


def test_a_rank_of_the_published_deepseek_layout_holds_its_layers_twice_over():
    """Rank 1 of 16 runs stages 1 and 14: seven MoE layers in all, four experts of each."""
    model = published("deepseek_v3")
    s = Strategy(pp=16, ep=64, schedule=Schedule.DUALPIPE, zero_stage=1, precision="fp8_block")
    result = step(model, s, 2048, replace(WORK, seq=4096, global_batch=15360))
    dense, expert = (base(model, BlockKind.MOE, c, s) for c in (Base.DENSE_PARAMS, Base.EXPERT_PARAMS))
    got = result.stages[1]
    assert got.layers == (4, 3)
    assert got.memory["gradients"] == 4 * 7 * (dense + expert)
    shared = 8 * 7 * (dense / 256 + expert / 4)  # the 128 and 2 replicas of each stage, twice: both copies share them
    assert got.memory["optimizer_states"] == pytest.approx(shared, rel=1e-14)


def kept(model, strategy=PLAIN, choice=NONE):
    return again(model, BlockKind.DENSE, Again.SAVED_BYTES, strategy, choice)


@pytest.mark.parametrize(("schedule", "in_flight"), [
    (Schedule.ONE_F_ONE_B, lambda rank, m: min(m, 4 - rank)), (Schedule.GPIPE, lambda rank, m: m),
    (Schedule.ZB_H1, lambda rank, m: min(m, 4)),
])  # fmt: skip
@pytest.mark.parametrize("m", [2, 16])
def test_a_rank_keeps_the_micro_batches_in_flight(schedule, in_flight, m):
    """Middle ranks of four, two layers each."""
    result = step(LLAMA, Strategy(pp=4, schedule=schedule, micro_batch=64 // m), 4)
    for rank in (1, 2):
        per_micro_batch = 2 * kept(LLAMA) * 64 / m
        assert result.stages[rank].memory["activations"] == in_flight(rank, m) * per_micro_batch


def test_interleaving_keeps_more_than_one_f_one_b():
    """Narayanan 2021, arXiv:2104.04473, section 2.2: about 1 + (p-1)/(pv) times as much.

    Rank 0 of p 4, v 2 holds 2 * 3 + 4 + 1 = 11 chunks of one layer, of which seven have the embedding's ids too.
    """
    plain = step(LLAMA, Strategy(pp=4), 4).stages[0].memory["activations"]
    virtual = step(LLAMA, Strategy(pp=4, vpp=2, schedule=Schedule.INTERLEAVED), 4).stages[0].memory["activations"]
    ids = 4 * SEQ
    assert plain == 4 * (2 * kept(LLAMA) + ids)
    assert virtual == 11 * kept(LLAMA) + 7 * ids


@pytest.mark.parametrize("layers", [1, 2])
def test_block_recompute_frees_the_first_layers_of_a_stage(layers):
    s = Strategy(pp=4, recompute=Recompute.parse("block"), recompute_layers=layers)
    want = 3 * (layers * kept(LLAMA, choice=FULL) + (2 - layers) * kept(LLAMA))
    assert memory(LLAMA, s, 4, rank=1)["activations"] == want


def test_a_stage_with_nothing_recomputed_keeps_one_block_less_alive():
    """Block recompute of all layers works on a whole recomputed layer; of none, on the widest op alone."""
    s = Strategy(pp=4, recompute=Recompute.parse("block"), recompute_layers=2)
    full, none = memory(LLAMA, s, 4, rank=1)["working_set"], memory(LLAMA, Strategy(pp=4), 4, rank=1)["working_set"]
    assert full - none == kept(LLAMA) - kept(LLAMA, choice=FULL)


def test_overlapped_buckets_are_staged_twice_and_never_exceed_the_gradients():
    on = Overlap(dp=1)
    assert memory(LLAMA, Strategy(overlap=on, bucket_bytes=MIB), 8)["buckets"] == 2 * MIB
    huge = memory(LLAMA, Strategy(overlap=on, bucket_bytes=2**50), 8)
    assert huge["buckets"] == 2 * huge["gradients"]
    for none in (
        Strategy(bucket_bytes=MIB),
        Strategy(overlap=on, bucket_bytes=0),
        Strategy(overlap=on, bucket_bytes=MIB, zero_stage=3),
    ):
        assert memory(LLAMA, none, 8)["buckets"] == 0


def test_exchange_buffers_hold_an_all_to_all_both_ways_and_the_stage_boundary():
    rows = SEQ * MIXTRAL.moe.top_k * MIXTRAL.hidden * 2
    hop = SEQ * MIXTRAL.hidden * 2
    assert memory(MIXTRAL, Strategy(), 8)["exchange_buffers"] == 0
    assert memory(MIXTRAL, Strategy(ep=8), 8)["exchange_buffers"] == 2 * rows
    assert memory(MIXTRAL, Strategy(ep=4, pp=2), 8)["exchange_buffers"] == 2 * rows + 4 * hop


def test_a_fused_loss_lowers_the_peak():
    plain = step(LLAMA, Strategy(), 8)
    fused = step(LLAMA, Strategy(fusion=Strategy().fusion | {Fusion.FUSED_LOSS}), 8)
    assert plain.stages[0].memory["logits"] - fused.stages[0].memory["logits"] == 4 * SEQ * LLAMA.vocab
    assert fused.peak_memory_bytes < plain.peak_memory_bytes


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_items_add_up_and_counters_build_on_each_other(model):
    result = step(model, Strategy(pp=2, zero_stage=1, overlap=Overlap(dp=1), bucket_bytes=MIB), 8)
    sums = [sum(s.memory.values()) for s in result.stages]
    assert all(tuple(s.memory) == ITEMS and s.memory["workspace"] == WORKSPACE_BYTES for s in result.stages)
    assert result.peak_memory_bytes == pytest.approx(max(sums), rel=1e-14)  # another order of summation
    assert result.reserved_memory_bytes == result.peak_memory_bytes * RESERVED_FACTOR
    assert result.device_memory_bytes == result.reserved_memory_bytes + h100(8).chip.context_bytes


@given(
    st.sampled_from(TINY), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.booleans(),
    st.sampled_from([Schedule.ONE_F_ONE_B, Schedule.GPIPE]),
)  # fmt: skip
def test_more_zero_never_holds_more(model, pp, tp, overlap, schedule):
    """Up to stage 2, and at stage 3 but for the blocks it gathers, which small models feel."""
    schedule = schedule if pp > 1 else Schedule.ONE_F_ONE_B
    common = {"pp": pp, "tp": tp, "sequence_parallel": True, "schedule": schedule, "bucket_bytes": MIB,
              "overlap": Overlap(dp=int(overlap))}  # fmt: skip
    results = [step(model, Strategy(zero_stage=z, **common), 32) for z in range(4)]
    peaks = [r.peak_memory_bytes for r in results]
    gathered = max(s.memory["gathered_weights"] for s in results[3].stages)
    assert peaks[0] >= peaks[1] >= peaks[2] >= peaks[3] - gathered


@given(st.sampled_from(TINY), st.sampled_from([1, 2, 4]), st.sampled_from(["bf16", "fp8_block"]), st.integers(0, 8))
def test_more_recompute_never_raises_memory_and_never_lowers_time(model, pp, precision, layers):
    common = {"pp": pp, "precision": precision}
    block_kind = Recompute.parse("block")
    choices = [Strategy(**common), Strategy(recompute=block_kind, recompute_layers=layers + 1, **common),
               Strategy(recompute=block_kind, recompute_layers=layers + 2, **common),
               Strategy(recompute=FULL, **common)]  # fmt: skip
    results = [step(model, s, 8) for s in choices]
    for less, more in zip(results, results[1:], strict=False):
        for a, b in zip(less.stages, more.stages, strict=True):
            assert sum(b.memory.values()) <= sum(a.memory.values()) * (1 + 1e-14)
        assert more.step_time_s >= less.step_time_s * (1 - 1e-12)  # sums in another order


@given(st.sampled_from(TINY), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_more_tensor_parallelism_never_holds_more(model, tp, pp):
    peaks = [step(model, Strategy(tp=t, pp=pp, sequence_parallel=True, micro_batch=1), 64).peak_memory_bytes
             for t in (tp, 2 * tp)]  # fmt: skip
    assert peaks[1] <= peaks[0]


def test_logits_are_an_item_of_the_rank_that_holds_the_head():
    """Vocabulary-parallel loss keeps fp32 softmax: 4 bytes a logit of its share of the padded vocabulary."""
    result = step(LLAMA, Strategy(pp=4, tp=2, sequence_parallel=True), 8)
    logits = [s.memory["logits"] for s in result.stages]
    assert logits == [0, 0, 0, 4 * SEQ * 8192 / 2]  # one micro-batch in flight on the last rank of 1F1B
    fused = replace(Strategy(pp=4), fusion=Strategy().fusion | {Fusion.FUSED_LOSS})
    assert step(LLAMA, fused, 4).stages[3].memory["logits"] == 0


def test_a_forward_beside_a_backward_holds_one_more_chunk():
    """EP overlap runs two micro-batches side by side: at one stage and interleaved it must be paid for."""
    on = Overlap(ep=1)
    for s in (Strategy(ep=4, micro_batch=1), Strategy(ep=4, pp=2, vpp=2, schedule=Schedule.INTERLEAVED)):
        off, beside = step(MIXTRAL, s, 8), step(MIXTRAL, replace(s, overlap=on), 8)
        grown = [
            b.memory["activations"] - a.memory["activations"] for a, b in zip(off.stages, beside.stages, strict=True)
        ]
        assert min(grown) > 0
        assert off.columns["exposed_comm_ep_s"] > beside.columns["exposed_comm_ep_s"]
    two = Strategy(ep=4, pp=2, schedule=Schedule.DUALPIPE)  # its p + 1 counts the pair already
    assert step(MIXTRAL, two, 8).stages[0].memory == step(MIXTRAL, replace(two, overlap=on), 8).stages[0].memory
    alone = Strategy(overlap=on)  # no experts apart: nothing to run beside
    assert step(MIXTRAL, alone, 8).peak_memory_bytes == step(MIXTRAL, Strategy(), 8).peak_memory_bytes
