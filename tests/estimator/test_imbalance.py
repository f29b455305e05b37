"""The fullest rank of experts under a skewed router, and what copies of hot experts make of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from estimator import imbalance
from estimator.imbalance import NUM_SAMPLES, Routing, expert_loads, load_factor, placed_loads
from estimator.workload import Workload
from tests.estimator.cases import DEEPSEEK, LLAMA, MIXTRAL, WORK

QUANTILES = (0.1, 0.5, 0.9)
SHAPES = ((8, 2), (8, 8), (64, 8), (64, 64), (256, 64))
SKEWS = (0.01, 0.1, 0.3, 0.6, 1.0, 1.5)


def test_loads_have_the_mean_and_the_coefficient_of_variation_that_were_asked_for():
    for skew in SKEWS:
        for loads in expert_loads(64, skew, 100):
            assert loads.mean(axis=1) == pytest.approx(1.0, rel=1e-12)
            assert loads.std(axis=1) == pytest.approx(skew, rel=1e-9)  # the root is found to the last bits


def test_two_experts_on_two_ranks_leave_nothing_to_chance():
    for skew in (0.01, 0.25, 0.9):
        for quantile in QUANTILES:
            assert load_factor(2, 2, 0, skew, quantile) == pytest.approx(1 + skew, rel=1e-9)


def test_four_experts_on_two_ranks_are_uniform_for_a_small_skew():
    """Four standardised normals lie evenly on a sphere in three dimensions, so any one coordinate is uniform.

    The mean of two is half the coordinate along (1, 1, -1, -1) / 2 of a vector of norm 2: skew times a uniform.
    """
    skew = 1e-4
    for q in QUANTILES:
        deviation = math.sqrt(q * (1 - q) / NUM_SAMPLES)
        assert (load_factor(4, 2, 0, skew, q) - 1) / skew == pytest.approx(q, abs=3 * deviation)


def test_four_experts_on_four_ranks_follow_the_largest_of_four_standardised_normals():
    """Grubbs 1950: above its middle the largest residual exceeds g as often as 4 times one t variable with 2 degrees.

    Of that the distribution is t / sqrt(2 + t^2) / 2 + 1/2; of residuals over the population's deviation here.
    """
    skew, q = 1e-4, 0.9
    x = 1 - 2 * (1 - q) / 4  # t / sqrt(2 + t^2) where a tail of 0.1 / 4 begins
    g = math.sqrt(3) * x
    # Density of the largest at g by a difference of the same formula, for the deviation of a sampled quantile.
    density = 4 * 0.5 / math.sqrt(3)
    deviation = math.sqrt(q * (1 - q) / NUM_SAMPLES) / density
    assert (load_factor(4, 4, 0, skew, q) - 1) / skew == pytest.approx(g, abs=3 * deviation)


@pytest.mark.parametrize(("experts", "ep"), SHAPES)
def test_the_fullest_rank_is_fuller_the_more_a_router_is_skewed(experts, ep):
    for quantile in QUANTILES:
        factors = [load_factor(experts, ep, 0, skew, quantile, top_k=2) for skew in (0.0, *SKEWS)]
        assert factors == sorted(factors)
        assert factors[0] == 1.0


@pytest.mark.parametrize(("experts", "ep"), SHAPES)
def test_quantiles_are_in_order(experts, ep):
    for skew in SKEWS:
        low, middle, high = (load_factor(experts, ep, 0, skew, q, top_k=2) for q in QUANTILES)
        assert 1 <= low <= middle <= high


def test_balanced_routing_is_exactly_one_and_a_small_skew_comes_close():
    for experts, ep in SHAPES:
        assert load_factor(experts, ep, 0, 0.0, 0.9) == 1.0
        assert load_factor(experts, ep, ep, 0.0, 0.9) == 1.0
        assert load_factor(experts, 1, 0, 0.5) == 1.0
        # No expert is further above the mean than sqrt(E - 1) deviations (Samuelson 1968).
        assert 1 < load_factor(experts, ep, 0, 1e-6, 0.9) <= 1 + 1e-6 * math.sqrt(experts)


@pytest.mark.parametrize(("experts", "ep", "copies"), [(8, 8, 8), (64, 8, 8), (64, 64, 64), (256, 64, 64)])
def test_copies_of_hot_experts_even_ranks_out(experts, ep, copies):
    for skew in (0.1, 0.5, 1.0):
        for quantile in QUANTILES:
            plain, evened = (load_factor(experts, ep, r, skew, quantile) for r in (0, copies))
            assert 1 <= evened < plain


def test_one_copy_of_each_of_two_experts_is_balance():
    assert load_factor(2, 2, 2, 0.2) == 1.0  # below a third the second copy is the colder expert's


def test_no_rank_gets_more_than_a_token_sends_it():
    """Eight experts, two a token: one expert has at most half of all rows, four times its share of an eighth."""
    assert load_factor(8, 8, 0, 1.7, 0.9, top_k=2) == 4.0
    assert load_factor(8, 8, 0, 1.7, 0.9, top_k=1) > 4.0


def placed_by_hand(before, now, ep, redundant):
    """The same greedy for one sample, with lists."""
    copies = [1] * len(before)
    for _ in range(redundant):
        copies[max(range(len(before)), key=lambda e: before[e] / copies[e])] += 1
    slots = [e for e in range(len(before)) for _ in range(copies[e])]
    slots.sort(key=lambda e: -before[e] / copies[e])
    ranks = [[] for _ in range(ep)]
    for e in slots:
        free = [rank for rank in ranks if len(rank) < len(slots) // ep]
        min(free, key=lambda rank: sum(before[x] / copies[x] for x in rank)).append(e)
    return [sum(now[x] / copies[x] for x in rank) for rank in ranks]


@pytest.mark.parametrize(("experts", "ep", "copies"), [(4, 2, 2), (6, 4, 2), (16, 4, 4), (16, 8, 16)])
def test_placement_is_the_greedy_written_out(experts, ep, copies):
    before, now = expert_loads(experts, 0.7, 20)
    loads = placed_loads(before, now, ep, copies)
    assert loads.sum(axis=1) == pytest.approx(experts, rel=1e-12)
    for i in range(20):
        assert loads[i] == pytest.approx(placed_by_hand(before[i], now[i], ep, copies), rel=1e-12)


def test_the_factor_is_the_fullest_over_the_mean_of_what_was_placed():
    before, now = expert_loads(16, 0.7, NUM_SAMPLES)
    fullest = placed_loads(before, now, 4, 8).max(axis=1) / 4  # 16 loads of mean 1 on 4 ranks
    for quantile in QUANTILES:
        assert load_factor(16, 4, 8, 0.7, quantile) == pytest.approx(np.quantile(fullest, quantile), rel=1e-12)


@pytest.mark.parametrize(("experts", "ep", "copies"), [(8, 8, 0), (64, 8, 0), (256, 64, 0), (64, 8, 16)])
def test_samples_are_enough(monkeypatch, experts, ep, copies):
    """Against 16 times as many: within 3 % of the excess at the median and at P90, 8 % at P10 where it is small."""
    few = [load_factor(experts, ep, copies, 0.5, q) - 1 for q in QUANTILES]
    monkeypatch.setattr(imbalance, "NUM_SAMPLES", 16 * NUM_SAMPLES)
    cached = (imbalance.load_factor, imbalance._factors, imbalance._windows)
    for function in cached:
        function.cache_clear()
    many = [load_factor(experts, ep, copies, 0.5, q) - 1 for q in QUANTILES]
    for function in cached:
        function.cache_clear()
    for a, b, tolerance in zip(few, many, (0.08, 0.03, 0.03), strict=True):
        assert a == pytest.approx(b, rel=tolerance)


def test_degrees_in_an_array_are_answered_one_by_one():
    routing = Routing.of(DEEPSEEK, replace(WORK, routing_skew=0.5))
    degrees = np.array([8.0, 1.0, 2.0, 8.0])
    assert routing.load_factor(degrees, 0).tolist() == [routing.load_factor(d, 0) for d in degrees.tolist()]


def test_dense_models_and_padded_experts_have_no_fullest_rank():
    skewed = replace(WORK, routing_skew=0.5)
    padded = replace(MIXTRAL, moe=replace(MIXTRAL.moe, capacity_factor=1.25))
    for model in (LLAMA, padded):
        assert Routing.of(model, skewed).load_factor(8.0) == 1.0


def test_a_skew_that_no_router_can_have_is_refused():
    with pytest.raises(ValueError, match="routing_skew must be a number of at least 0, but got -0.1"):
        Workload(seq=1, global_batch=1, routing_skew=-0.1)
    with pytest.raises(ValueError, match="at least 0, but got nan"):
        Workload(seq=1, global_batch=1, routing_skew=math.nan)
    most = math.sqrt(8 / 2 - 1)
    Routing.of(MIXTRAL, replace(WORK, routing_skew=most))
    with pytest.raises(
        ValueError, match=r"routing_skew \(1.8\) must be at most sqrt\(num_experts / top_k - 1\) = 1.732"
    ):
        Routing.of(MIXTRAL, replace(WORK, routing_skew=1.8))
