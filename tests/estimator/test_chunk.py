"""What a micro-batch takes on a chunk, with what ZeRO moves for it: by hand."""

import numpy as np
import pytest

from estimator.chunk import TRAFFIC, chunk_seconds
from estimator.compose import AGAIN
from estimator.keep import Keep, keep_of
from estimator.span_codes import CODES
from estimator.strategy import Schedule

F, B, W = 1.0, 2.0, 1.0
GATHER = 0.6
SPLIT = [Schedule.ZB_H1, Schedule.ZB_V, Schedule.DUALPIPE, Schedule.DUALPIPE_V]


def passes(schedule, zero, overlap, scatter, blocks=4.0):
    """Forward, input gradient and weight gradient of a chunk of four blocks."""
    once, again = np.array([F, B, W, *[0.0] * 4]), np.zeros(AGAIN)
    traffic = np.array([GATHER, scatter, 0.0, 0.0, blocks, *[0.0] * (TRAFFIC - 5)])
    keep = keep_of(Keep(zero, 1, 1.0, 0.0, 0.0, 0.0, 0.0), zero, overlap)
    return chunk_seconds(once, again, CODES[schedule], 0, keep, overlap, traffic)[:3]


@pytest.mark.parametrize("schedule", SPLIT)
def test_gradients_are_reduced_after_the_weight_gradients_that_make_them(schedule):
    assert passes(schedule, 2, 0, 0.5) == (F, B, W + 0.5)
    assert passes(schedule, 3, 0, 0.5) == (F + GATHER, B + GATHER, W + 0.5)
    assert passes(Schedule.ONE_F_ONE_B, 2, 0, 0.5) == (F, B + W + 0.5, 0.0)


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_weight_gradient_hides_what_it_can(schedule):
    assert passes(schedule, 2, 1, 0.5) == pytest.approx((F, B, W + 0.15 * 0.5), rel=1e-15)


def test_a_pass_of_weight_gradients_leaves_those_of_two_blocks_to_the_passes_after_it():
    # 3 s of traffic beside 1 s: of the 2 s that are left over, half belong to the last two of four blocks.
    assert passes(Schedule.ZB_H1, 2, 1, 3.0) == pytest.approx((F, B, 2.0), rel=1e-15)
    # Forward and backward have 3 s, which is all that they hide.
    assert passes(Schedule.ZB_H1, 2, 1, 9.0, blocks=2.0) == pytest.approx((F, B, 9.0 - 3.0), rel=1e-15)


def test_whole_backwards_of_pairs_hide_gradients_under_both_halves():
    assert passes(Schedule.DUALPIPE, 2, 1, 2.5) == pytest.approx((F, B, W + 0.15 * 2.5), rel=1e-15)
    assert passes(Schedule.DUALPIPE, 2, 1, 4.0) == pytest.approx((F, B, 2.0), rel=1e-15)


@pytest.mark.parametrize("schedule", SPLIT)
def test_a_micro_batch_takes_no_less_than_its_traffic(schedule):
    for zero, least in ((2, 20.0), (3, 20.0 + 2 * GATHER)):
        assert sum(passes(schedule, zero, 1, 20.0)) >= least


def hosted(schedule, keep, saved=0.0, grads=0.0, blocks=8.0):
    """The same with a link to the host that moves a byte a second."""
    once, again = np.array([F, B, W, *[0.0] * 4]), np.array([0.0, 0.0, 0.0, saved])
    traffic = np.array([0.0, 0.0, 0.0, 0.0, blocks, 1.0, 0.0, 0.0, grads, grads])
    return chunk_seconds(once, again, CODES[schedule], 0, keep, 0, traffic)[:3]


def test_the_first_block_is_fetched_beside_the_last_store():
    keep = Keep(0, 1, 1.0, 1.0, 0.0, 0.0, 0.0)
    assert hosted(Schedule.ONE_F_ONE_B, keep, saved=6.0, blocks=2.0) == (6.0, 6.0 - (6.0 - 3.0) / 2, 0.0)
    assert hosted(Schedule.ONE_F_ONE_B, keep, saved=6.0, blocks=1.0) == (6.0, B + W, 0.0)
    assert hosted(Schedule.GPIPE, keep, saved=6.0, blocks=2.0) == (6.0, 6.0, 0.0)
    assert hosted(Schedule.ONE_F_ONE_B, keep, saved=0.5) == (F, B + W, 0.0)


def test_gradients_of_the_last_two_blocks_go_down_beside_the_next_passes():
    keep = Keep(0, 1, 1.0, 0.0, 0.0, 1.0, 0.0)
    # 8 s of 8 blocks: 2 s may be late; what backward has not hidden of its own is 8 - 3 s, a quarter of which leaves.
    assert hosted(Schedule.ONE_F_ONE_B, keep, grads=8.0) == (2.0, 8.0 - 5.0 / 4, 0.0)
    assert hosted(Schedule.ZB_H1, keep, grads=8.0) == (1.0, 2.0, 8.0 - 7.0 / 4)
    # Of few blocks all may be late, and each pass takes a third.
    assert hosted(Schedule.ONE_F_ONE_B, keep, grads=9.0, blocks=2.0) == pytest.approx((3.0, 6.0, 0.0), rel=1e-15)
    assert hosted(Schedule.ZB_H1, keep, grads=9.0, blocks=2.0) == pytest.approx((3.0, 3.0, 3.0), rel=1e-15)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.DUALPIPE])
def test_passes_side_by_side_hide_gradients_under_both(schedule):
    once, again = np.array([F, B, W, *[0.0] * 4]), np.zeros(AGAIN)
    traffic = np.array([0.0, 5.0, 0.0, 0.0, 4.0, *[0.0] * (TRAFFIC - 5)])
    keep = keep_of(Keep(2, 1, 1.0, 0.0, 0.0, 0.0, 0.0), 2, 1)
    f, b, w, alone_f, alone_b = chunk_seconds(once, again, CODES[schedule], 1, keep, 1, traffic)
    assert f + b + w == pytest.approx(5.0, rel=1e-15)
    assert (alone_f, alone_b + w) == (F, 5.0)  # a backward without a partner waits for all of it
