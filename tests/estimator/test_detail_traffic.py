"""The replay of a step against its estimate where much traffic is under way: late, of several kinds, or to the host."""

import pytest

from estimator.strategy import Overlap, Schedule, Strategy
from tests.estimator.test_detail import FULL, replayed

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
    # for equal shares of a chunk; 1F1B is off by 5 % here. It was off by up to 23 %.
    assert abs(result.error) < 0.07
