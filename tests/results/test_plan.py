"""Claims about capacity plans, against sums done by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from results.plan import co2_kg, cost_usd, energy_kwh, gpu_hours, num_steps, plan, plan_front, training_days, within


def test_a_step_is_never_cut():
    assert num_steps(100, 100) == 1
    assert num_steps(101, 100) == 2


def test_a_plan_is_steps_times_what_a_step_takes():
    # 86,400 steps of one second are a day; 100 chips for a day are 2,400 hours; at 2 USD they cost 4,800 USD;
    # 86,400 steps of 1,000 tokens at 1 J are 86.4 MJ, which is 24 kWh; 86.4 million tokens at 0.5 kg each are 43.2 kg.
    points = plan(
        tokens=86_400_000,
        tokens_per_step=1000,
        step_time_s=[1.0],
        num_gpus=100,
        price_usd_per_gpu_hour=2.0,
        energy_j_per_token=1.0,
        co2_kg_per_mtoken=0.5,
    )
    found = [points.num_steps, points.days, points.gpu_hours, points.cost_usd, points.energy_kwh, points.co2_kg]
    assert [float(values[0]) for values in found] == [86_400.0, 1.0, 2400.0, 4800.0, 24.0, 43.2]
    assert all(values.shape == (1,) for values in found)


def test_each_formula_holds_alone():
    assert training_days(2, 43_200.0) == 1.0
    assert gpu_hours(0.5, 8) == 96.0
    assert cost_usd(96.0, 2.5) == 240.0
    assert energy_kwh(1, 3.6e6, 2.0) == 2.0
    assert co2_kg(10, 2e6, 0.25) == 5.0


def test_the_published_run_of_deepseek_v3_comes_out():
    # DeepSeek-V3, arXiv:2412.19437, table 1: 180 K H800 GPU-hours a trillion tokens, 2.664 M for 14.8 T, 2 USD each.
    points = plan(
        tokens=14.8e12,
        tokens_per_step=15360 * 4096,
        step_time_s=[19.9],
        num_gpus=2048,
        price_usd_per_gpu_hour=2.0,
        energy_j_per_token=0.0,
        co2_kg_per_mtoken=0.0,
    )
    # rtol 0.005: the 19.9 s are published to three digits.
    assert points.gpu_hours[0] == pytest.approx(2.664e6, rel=0.005)
    assert points.cost_usd[0] == pytest.approx(5.328e6, rel=0.005)


def test_a_front_is_planned_from_its_own_columns(make_front):
    front = make_front(3)
    tokens_per_step = 62914560
    points = plan_front(front, tokens=100 * tokens_per_step)
    assert points.num_steps.tolist() == [100.0] * 3
    assert points.days == pytest.approx(100 * front["step_time_s"] / 86400, rel=1e-14)
    # The front's cost of a million tokens, times the millions of tokens; rtol: a handful of float64 products.
    assert points.cost_usd == pytest.approx(front["cost_usd_per_mtoken"] * 100 * tokens_per_step / 1e6, rel=1e-12)
    assert points.energy_kwh == pytest.approx(100 * tokens_per_step * 0.5 / 3.6e6, rel=1e-14)
    assert points.co2_kg == pytest.approx(100 * tokens_per_step * 0.2 / 1e6, rel=1e-14)


def test_limits_leave_the_points_that_end_in_time_and_in_budget(make_front):
    points = plan_front(make_front(3), tokens=1e12)
    everything = within(points)
    assert everything.tolist() == [True] * 3
    assert within(points, days=float(points.days[1])).tolist() == [True, True, False]
    assert within(points, budget_usd=float(points.cost_usd[0])).tolist() == [True, False, False]
    assert within(points, days=float(points.days[2]), budget_usd=1.0).tolist() == [False] * 3


@pytest.mark.parametrize("tokens", [0.0, -1.0, math.nan, math.inf])
def test_tokens_must_be_positive(make_front, tokens):
    with pytest.raises(ValueError, match="tokens must be a positive number"):
        plan_front(make_front(1), tokens)


def test_limits_must_be_positive(make_front):
    points = plan_front(make_front(1), tokens=1e9)
    with pytest.raises(ValueError, match="days must be a positive number"):
        within(points, days=0.0)
    with pytest.raises(ValueError, match="budget must be a positive number"):
        within(points, budget_usd=math.nan)


def test_an_empty_front_has_an_empty_plan(make_front):
    assert np.array_equal(plan_front(make_front(0), tokens=1e9).days, [])
