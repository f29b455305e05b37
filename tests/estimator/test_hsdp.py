"""HSDP: ZeRO shards inside a replica, gradients are summed over the replicas once a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.chunk import TRAFFIC, chunk_seconds
from estimator.compose import AGAIN, Net
from estimator.cost.collective import collective, nested
from estimator.gradients import behind_shards, bucket_terms, hidden_behind
from estimator.keep import Keep, keep_of
from estimator.op import Traffic
from estimator.precision import recipe
from estimator.result import COLUMNS
from estimator.span_codes import CODES
from estimator.strategy import Overlap, RankOrder, Schedule, Strategy
from estimator.tables import NET_SIZES, constants_of, gradient_groups, group_costs, replica_group
from estimator.workload import Workload
from tests.estimator.cases import LLAMA, MIXTRAL, SEQ, h100, step

ITEMS = ("weights", "gradients", "optimizer_states")
C = constants_of(h100(64), recipe("bf16"))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_with_every_rank_its_own_replica_only_the_all_reduce_of_stage_0_is_left(zero):
    plain, alone = step(LLAMA, Strategy(), 16), step(LLAMA, Strategy(zero_stage=zero, dp_replicate=16), 16)
    for item in ITEMS:
        assert alone.stages[0].memory[item] == plain.stages[0].memory[item]
    assert alone.stages[0].memory["gathered_weights"] == 0
    assert alone.step_time_s == pytest.approx(plain.step_time_s, rel=1e-14)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_replica_of_one_node_shards_by_its_ranks(zero):
    whole, replicated = (step(LLAMA, Strategy(zero_stage=zero, dp_replicate=r), 64) for r in (1, 8))
    for i, item in enumerate(reversed(ITEMS)):  # states from stage 1 on, gradients from 2, weights from 3
        times = 8 if zero > i else 1
        assert replicated.stages[0].memory[item] == pytest.approx(times * whole.stages[0].memory[item], rel=1e-15)


def test_gradients_are_scattered_in_the_node_and_summed_over_the_nodes_by_shard():
    """V bytes reduce-scattered over 8 neighbours, then V/8 all-reduced over 8 ranks that are 8 apart."""
    result = step(LLAMA, Strategy(zero_stage=1, dp_replicate=8), 64)
    v = LLAMA.num_parameters() * C.grad_bytes
    inside = collective(Traffic.REDUCE_SCATTER, h100(64), 8.0, 1.0).seconds(v)
    across = 2 * nested(Traffic.REDUCE_SCATTER, h100(64), [(8.0, 8.0)]).seconds(v / 8)
    assert result.exposed_comm_dp_s == pytest.approx(float(inside + across), rel=1e-12)


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_are_summed_once_whatever_the_micro_batches(zero):
    """FSDP2's set_requires_all_reduce: the last micro-batch only."""

    def exposed(batch, replicas):
        s = Strategy(zero_stage=zero, dp_replicate=replicas)
        return step(LLAMA, s, 64, Workload(seq=SEQ, global_batch=batch)).exposed_comm_dp_s

    each = {r: (exposed(256, r) - exposed(128, r)) / 2 for r in (1, 8)}
    once = exposed(128, 8) - 2 * each[8]
    v = LLAMA.num_parameters() * C.grad_bytes
    across = 2 * nested(Traffic.REDUCE_SCATTER, h100(64), [(8.0, 8.0)]).seconds(v / 8)
    assert once == pytest.approx(float(across), rel=1e-9)
    assert each[8] < each[1]  # what moves with every micro-batch stays in the node
    assert exposed(128, 1) == pytest.approx(2 * each[1], rel=1e-9)


def test_stage_0_does_not_see_replicas():
    plain, other = (step(MIXTRAL, Strategy(ep=2, overlap=Overlap(dp=1), dp_replicate=r), 64) for r in (1, 4))
    assert other.columns == plain.columns
    assert other.stages == plain.stages


def test_overlap_hides_the_sum_over_replicas_under_the_last_backward():
    for zero in (1, 2, 3):
        off, on = (step(LLAMA, Strategy(zero_stage=zero, dp_replicate=8, overlap=Overlap(dp=d)), 64) for d in (0, 1))
        assert on.exposed_comm_dp_s < off.exposed_comm_dp_s


def test_traffic_that_outlasts_its_window_leaves_what_is_longer():
    total, least = bucket_terms(3.0, 0.0, 30.0)
    assert hidden_behind(total, least, 1.0) == 2.0
    # Behind a window of 5 s stay the last of 30 buckets and what the others take of the chip.
    assert hidden_behind(total, least, 5.0) == pytest.approx(0.1 + 0.15 * 2.9, rel=1e-12)


def shards_and_replicas(**sizes):
    n = {name: np.array([1.0]) for name in NET_SIZES} | {name: np.array([float(x)]) for name, x in sizes.items()}
    return group_costs(h100(64), False, RankOrder.TP_CP_DP_PP, n)[0]


@pytest.mark.parametrize(("sizes", "shared"), [
    ({"dp": 64, "dp_replicate": 8}, 0.0),  # shards in a node, replicas over the network
    ({"dp": 8, "pp": 8, "dp_replicate": 2}, 1.0),  # both inside a node
    ({"dp": 8, "tp": 8, "dp_replicate": 2}, 1.0),  # both over the network
])  # fmt: skip
def test_replicas_share_the_links_that_their_shards_use(sizes, shared):
    assert shards_and_replicas(**sizes)[Net.SHARD_SHARED] == pytest.approx(shared, rel=1e-12)


def test_replicas_of_many_nodes_share_the_outermost_tier():
    net = shards_and_replicas(dp=64, dp_replicate=2)
    assert net[Net.SHARD_SHARED] == net[Net.SHARD_OUTER] > 0.5


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_window_gives_replicas_what_their_shards_leave_of_shared_links(zero):
    net, c, v, blocks = shards_and_replicas(dp=8, pp=8, dp_replicate=2), constants_of(h100(64), recipe("bf16")), 1e9, 8
    keep = keep_of(Keep(zero, 1, 1.0, 0.0, 0.0, 0.0, 0.0), zero, 1)
    told = behind_shards(3.0, 1.0, v, 0.0, blocks, keep, net, c)
    scatter, gather = (v * width * net[Net.SHARD_PER_BYTE] for width in (c.grad_bytes, c.gather_bytes))
    moved, last = {1: (0.0, 0.0), 2: (scatter, scatter / blocks), 3: (scatter + gather, scatter / blocks)}[zero]
    # After the last reduce-scatter, which nothing hides, comes the last sum.
    assert told == pytest.approx((3.0 + moved, 1.0 + last + net[Net.SHARD_LATENCY] * (zero > 1)), rel=1e-12)


@pytest.mark.parametrize("order", list(RankOrder))
def test_shards_and_replicas_make_up_the_whole_group(order):
    n = {name: np.array([2.0]) for name in NET_SIZES} | {"dp": np.array([16.0]), "dp_replicate": np.array([4.0])}
    whole, shards = gradient_groups(order, n)[:2], gradient_groups(order, n, n["dp_replicate"])[:2]
    for all_of_them, mine in zip(whole, shards, strict=True):
        sizes = [float(np.prod([size for size, _ in group])) for group in (all_of_them, mine)]
        assert sizes[0] == 4 * sizes[1]
    ((size, apart),) = replica_group(order, n)
    # The next replica begins where one ends: after 2 tp * 2 cp * 4 dp ranks, or as many on each of the 2 stages.
    assert (float(size[0]), float(apart[0])) == (4.0, 16.0 if order is RankOrder.TP_CP_DP_PP else 32.0)


def test_copies_of_dualpipe_shard_inside_a_replica():
    s = Strategy(pp=2, schedule=Schedule.DUALPIPE, zero_stage=1, dp_replicate=4)
    one, four = step(LLAMA, replace(s, dp_replicate=1), 16), step(LLAMA, s, 16)
    assert four.stages[0].memory["optimizer_states"] == pytest.approx(
        4 * one.stages[0].memory["optimizer_states"], rel=1e-15)  # fmt: skip


@pytest.mark.parametrize(("chips", "ep", "replicas"), [(16, 1, 3), (16, 16, 2), (8, 1, 16)])
def test_replicas_divide_the_ranks_that_share_weights(chips, ep, replicas):
    with pytest.raises(ValueError, match="dp_replicate: dp"):
        step(MIXTRAL if ep == 1 else replace(MIXTRAL, moe=replace(MIXTRAL.moe, num_experts=16)),
             Strategy(ep=ep, zero_stage=1, dp_replicate=replicas), chips)  # fmt: skip


def test_stages_below_3_gather_nothing_ahead_and_free_nothing():
    for zero in (0, 1, 2):
        plain, other = (
            step(LLAMA, Strategy(zero_stage=zero, overlap=Overlap(dp=1), **more), 16)
            for more in ({}, {"reshard_after_forward": 0, "prefetch_blocks": 3})
        )
        assert other.columns == plain.columns


def test_without_overlap_nothing_is_gathered_ahead():
    plain, other = (step(LLAMA, Strategy(zero_stage=3, prefetch_blocks=k), 16) for k in (1, 4))
    assert {c.name: other.columns[c.name] for c in COLUMNS} == plain.columns


@pytest.mark.parametrize("reshard", [0, 1])
def test_each_block_ahead_takes_memory_and_saves_waiting(reshard):
    told = [
        step(LLAMA, Strategy(zero_stage=3, overlap=Overlap(dp=1), prefetch_blocks=k, reshard_after_forward=reshard), 64)
        for k in range(6)
    ]
    seconds = [r.step_time_s for r in told]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[1]
    gathered = [r.stages[0].memory["gathered_weights"] for r in told]
    assert gathered == sorted(gathered)
    if reshard:
        assert gathered[1] == 2 * gathered[0]
        assert gathered[0] >= LLAMA.vocab * LLAMA.hidden * 2.0  # the widest block has the head


def test_a_wait_of_the_first_backward_is_filled_with_what_is_gathered_ahead():
    """2 s of backward in 4 blocks, 1.5 s of gathers: the network waits for (2 - 1.5 k) / 4 of a first block."""
    once, again = np.array([1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]), np.zeros(AGAIN)
    traffic = np.array([1.5, 1.5, 0.0, 0.0, 4.0, *[0.0] * (TRAFFIC - 5)])
    for ahead, wait in ((1, 0.125), (2, 0.0), (9, 0.0)):
        keep = keep_of(Keep(3, 1, float(ahead), 0.0, 0.0, 0.0, 0.0), 3, 1)
        forward, backward, *_ = chunk_seconds(once, again, CODES[Schedule.ONE_F_ONE_B], 0, keep, 1, traffic)
        assert forward + backward == pytest.approx(4.5 + wait + max(0.0, 1.0 + 0.15 * 1.5 - 1.5), rel=1e-15)


def test_kept_weights_are_gathered_once_and_stay_whole():
    freed, kept = (step(LLAMA, Strategy(zero_stage=3, reshard_after_forward=r), 64) for r in (1, 0))
    assert kept.stages[0].memory["gathered_weights"] == 64 * kept.stages[0].memory["weights"]
    # Two bf16 gathers and a fp32 scatter against one gather and the scatter: a quarter less on the wire.
    assert kept.exposed_comm_dp_s < 0.8 * freed.exposed_comm_dp_s
    assert kept.peak_memory_bytes > freed.peak_memory_bytes
