"""P10 and P90 of a step: what they cover, on which sides of the estimate they lie, and what widens them."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from estimator.band import CHIP_SPREAD, HIGH, LOW, evaluate_band, straggler_share
from estimator.imbalance import MEDIAN
from estimator.result import BAND_COLUMNS, column
from estimator.step import evaluate
from estimator.strategy import LayoutRule, Recompute, Strategy
from estimator.tables import jitter_share
from tests.estimator.cases import LLAMA, MIXTRAL, WORK, h100

SKEWED = replace(WORK, routing_skew=0.6)
S = Strategy(ep=8)


def test_the_slowest_of_one_chip_is_a_chip():
    one = replace(h100(8), num_chips=1)
    for quantile in (LOW, 0.3, HIGH):
        assert straggler_share(one, quantile) == pytest.approx(CHIP_SPREAD * NormalDist().inv_cdf(quantile), rel=1e-12)


def test_the_slowest_of_many_is_where_simulated_chips_have_it():
    chips, draws = 64, 40_000
    slowest = np.random.RandomState(1).standard_normal((draws, chips)).max(axis=1) * CHIP_SPREAD
    for quantile in (LOW, HIGH):
        expected = np.quantile(slowest, quantile) - np.quantile(slowest, MEDIAN)
        share = straggler_share(h100(chips), quantile) - jitter_share(h100(chips))
        # Two quantiles of 40,000 draws, each of a deviation of about 1 % of the spread.
        assert share == pytest.approx(expected, abs=0.03 * CHIP_SPREAD)


def test_the_median_is_the_estimate_and_larger_machines_vary_less():
    shares = {n: [straggler_share(h100(n), q) for q in (LOW, MEDIAN, HIGH)] for n in (8, 512, 16384)}
    for n, (low, middle, high) in shares.items():
        assert low < middle == jitter_share(h100(n)) < high
    widths = [high - low for low, _, high in shares.values()]
    assert widths == sorted(widths, reverse=True)


def test_without_skew_a_band_is_the_estimate_with_other_stragglers():
    for model in (LLAMA, MIXTRAL):
        result = evaluate(model, Strategy(), h100(16), WORK)
        band = evaluate_band(model, Strategy(), h100(16), WORK)
        busy = result.step_time_s - result.jitter_s
        for quantile, seconds in ((LOW, band.step_time_p10_s), (HIGH, band.step_time_p90_s)):
            assert seconds == pytest.approx(busy * (1 + straggler_share(h100(16), quantile)), rel=1e-12)
        assert band.peak_memory_p10_bytes == band.peak_memory_p90_bytes == result.peak_memory_bytes


@pytest.mark.parametrize("s", [S, replace(S, redundant_experts=8), replace(S, recompute=Recompute.parse(["moe"]))])
def test_low_and_high_are_on_either_side_of_the_estimate(s):
    for skew in (0.0, 0.05, 0.6, 1.5):
        work = replace(WORK, routing_skew=skew)
        result, band = evaluate(MIXTRAL, s, h100(16), work), evaluate_band(MIXTRAL, s, h100(16), work)
        assert band.step_time_p10_s <= result.step_time_s <= band.step_time_p90_s
        assert band.peak_memory_p10_bytes <= result.peak_memory_bytes <= band.peak_memory_p90_bytes
        assert result.device_memory_bytes <= band.device_memory_p90_bytes


def test_skew_widens_the_band_of_time_and_gives_memory_one():
    even, uneven = (evaluate_band(MIXTRAL, S, h100(16), work) for work in (WORK, SKEWED))
    widths = [b.step_time_p90_s / b.step_time_p10_s for b in (even, uneven)]
    assert widths[1] > widths[0] > 1
    assert uneven.peak_memory_p90_bytes > uneven.peak_memory_p10_bytes > even.peak_memory_p90_bytes
    memory = evaluate(MIXTRAL, S, h100(16), SKEWED, quantile=HIGH)
    assert uneven.peak_memory_p90_bytes == memory.peak_memory_bytes
    assert uneven.device_memory_p90_bytes == memory.device_memory_bytes


def test_rows_of_a_batch_have_the_bands_of_scalars():
    degrees = np.array([1.0, 8.0, 4.0, 2.0])
    rows = evaluate_band(MIXTRAL, replace(S, ep=degrees), h100(16), SKEWED)
    for i, ep in enumerate(degrees.tolist()):
        one = evaluate_band(MIXTRAL, replace(S, ep=ep), h100(16), SKEWED)
        assert {n: v[i] for n, v in rows.columns().items()} == one.columns()


def test_a_balanced_layout_stays_that_of_the_median():
    s = Strategy(pp=2, layout=LayoutRule.AUTO)
    result = evaluate(LLAMA, s, h100(16), WORK)
    band = evaluate_band(LLAMA, s, h100(16), WORK, result)
    assert band.step_time_p10_s < result.step_time_s < band.step_time_p90_s
    with pytest.raises(ValueError, match="layout auto has a layout for each row"):
        evaluate_band(LLAMA, replace(s, micro_batch=np.array([1.0, 2.0])), h100(16), WORK)


def test_a_band_has_columns_of_its_own_that_no_evaluation_has():
    for told in BAND_COLUMNS:
        with pytest.raises(ValueError, match="unknown column"):
            column(told.name)
