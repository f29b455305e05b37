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
    return chunk_seconds(once, again, CODES[schedule], keep, overlap, traffic)[:3]


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
