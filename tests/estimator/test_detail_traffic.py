"""The replay of a step against its estimate where much traffic is under way: late, of several kinds, or to the host."""

import numpy as np
import pytest

from estimator.strategy import Offload, Overlap, Schedule, Strategy
from tests.estimator.test_detail import FULL, MOE, replayed

SPLIT = [(Schedule.ZB_H1, 1), (Schedule.ZB_H2, 1), (Schedule.ZB_V, 2), (Schedule.DUALPIPE, 1), (Schedule.DUALPIPE_V, 2)]


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize(("schedule", "vpp"), SPLIT)
def test_gradients_of_split_backwards_replay_to_their_estimate(schedule, vpp, zero_stage):
    strategy = Strategy(pp=4, vpp=vpp, schedule=schedule, zero_stage=zero_stage, recompute=FULL)
    result = replayed(strategy, chips=32, batch=64, seq=2048)
    # What is left: a pass that waits for a neighbour also waits for its first launch, some microseconds.
    assert result.step_time_s == pytest.approx(result.estimate.step_time_s, rel=5e-4)


@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize(("schedule", "vpp"), SPLIT)
def test_gradients_of_split_backwards_hide_where_they_do_in_a_replay(schedule, vpp, zero_stage):
    strategy = Strategy(pp=4, vpp=vpp, schedule=schedule, zero_stage=zero_stage, overlap=Overlap(dp=1, pp=1))
    result = replayed(strategy, chips=16, batch=64, seq=1024)
    # Traffic-bound: blocks are not alike (the head's gradients are those of three layers), which the estimate takes
    # for equal shares of a chunk; 1F1B is off by 5 % here, ZB-H2 by 7.2. It was off by up to 23 %.
    assert abs(result.error) < 0.075


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_sums_over_replicas_hide_where_they_do_in_a_replay(zero_stage, replicas):
    strategy = Strategy(ep=8, zero_stage=zero_stage, dp_replicate=replicas, overlap=Overlap(dp=1), recompute=FULL)
    result = replayed(strategy, model=MOE, chips=64, batch=64, seq=2048)
    # One micro-batch, whose backward is shorter than its traffic: whatever hides too much shows. Up to 33 % before.
    assert abs(result.error) < 0.03


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_replicas_of_a_node_sum_over_links_that_their_shards_do_not_use(zero_stage):
    strategy = Strategy(zero_stage=zero_stage, dp_replicate=8, overlap=Overlap(dp=1), recompute=FULL)
    result = replayed(strategy, chips=64, batch=64, seq=2048)
    # The embedding's gradients, a tenth of all, come at the very end; the estimate takes blocks for alike.
    assert -0.07 < result.error < 0.0
    sums = [stream.name for stream in result.timeline.tasks.streams if stream.name == "replicas"]
    assert len(sums) == 1


ROWS = [Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.ZB_H1, Schedule.DUALPIPE]


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize(("pp", "vpp", "schedule"), [
    (1, 1, Schedule.ONE_F_ONE_B), (16, 1, Schedule.ONE_F_ONE_B), (8, 4, Schedule.INTERLEAVED), (8, 2, Schedule.ZB_V),
    *((8, 1, schedule) for schedule in ROWS),
])  # fmt: skip
def test_stores_wait_for_room_however_few_blocks_a_chunk_has(pp, vpp, schedule, share):
    strategy = Strategy(pp=pp, vpp=vpp, schedule=schedule, overlap=Overlap(pp=1), offload=Offload(activations=share))
    result = replayed(strategy, chips=max(16, 2 * pp), batch=4 * max(16, 2 * pp))
    # Link-bound, with chunks of 32 blocks to one: the estimate was up to 137 % above the replay. What is left is the
    # turn from forward to backward, where a block on its way holds up one that is fetched: 5.9 % for GPipe, whose turn
    # has every micro-batch, below 5 for the others.
    assert abs(result.error) < (0.06 if schedule is Schedule.GPIPE else 0.05)
    # Two blocks are on their way at most, as the estimate has it; ops' working sets are the widest of each block there.
    assert max(result.peak_memory_bytes) < 1.005 * result.estimate.peak_memory_bytes


def test_a_replay_says_which_ranks_are_overfull():
    result = replayed(Strategy(zero_stage=1), chips=16)
    capacity = result.timeline.tasks.devices[0].capacity_bytes
    assert result.overfull == () if result.peak_memory_bytes[0] <= capacity else (0,)
    assert replayed(Strategy(), chips=16).overfull == (0,)  # 8 B parameters with fp32 states on one chip: 128 GB


@pytest.mark.parametrize("dp", [0, 1])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize(("pp", "vpp", "schedule"), [
    (4, 1, Schedule.ONE_F_ONE_B), (4, 1, Schedule.ZB_H1), (4, 4, Schedule.INTERLEAVED),
])  # fmt: skip
def test_gradients_go_down_beside_the_passes_after_them(pp, vpp, schedule, zero_stage, share, dp):
    strategy = Strategy(
        pp=pp, vpp=vpp, schedule=schedule, zero_stage=zero_stage, overlap=Overlap(dp=dp),
        offload=Offload(gradients=share),
    )  # fmt: skip
    # Up to 28 % before. The estimate gives forward an even share of a link at most, and counts two buffers where the
    # overlapped ZeRO-2 and 3 have two for whole gradients as well.
    assert abs(replayed(strategy, chips=16, batch=128).error) < 0.07


@pytest.mark.parametrize("seq", [1024, 2048, 4096])
@pytest.mark.parametrize(("pp", "vpp", "schedule"), [
    (1, 1, Schedule.ONE_F_ONE_B), (4, 2, Schedule.INTERLEAVED), (4, 1, Schedule.DUALPIPE), (4, 2, Schedule.DUALPIPE_V),
])  # fmt: skip
def test_passes_side_by_side_hide_gradients_of_each_other(pp, vpp, schedule, seq):
    strategy = Strategy(
        pp=pp, vpp=vpp, ep=8, schedule=schedule, zero_stage=2, overlap=Overlap(ep=1, dp=1), recompute=FULL
    )
    # Gradients take from a third of a pair of passes to more than all of it: 9.7 % where both are as long (interleaved,
    # 1024 tokens); up to 14 % before, without recompute.
    assert abs(replayed(strategy, model=MOE, chips=64, batch=256, seq=seq).error) < 0.1
    plain = replayed(Strategy(ep=8, zero_stage=2, overlap=Overlap(ep=1, dp=1)), model=MOE, chips=64, batch=256, seq=seq)
    assert np.isclose(plain.error, 0.0, atol=0.04)
