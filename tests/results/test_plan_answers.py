"""Claims about what a plan answers, against a search through all its points."""

from __future__ import annotations

import numpy as np
import pytest

from results.plan import plan_front
from results.plan_answers import answers, curves


@pytest.fixture
def planned(make_front):
    """Twelve points on three clusters of four sizes; H is the cheapest, B the quickest."""
    sizes = np.tile([256.0, 512.0, 1024.0, 2048.0], 3)
    systems = np.repeat(["h", "a", "b"], 4).tolist()
    speed = np.repeat([1.0, 0.5, 2.5], 4) * np.tile([1.0, 1.9, 3.0, 3.3], 3)
    step = 100.0 / speed
    price = np.repeat([2.0, 1.5, 6.0], 4)
    tokens = 1e7
    front = make_front(
        12, system=systems, num_gpus=sizes, step_time_s=step, tokens_per_s=tokens / step,
        cost_usd_per_mtoken=price * sizes / 3600.0 * step / (tokens / 1e6),
    )  # fmt: skip
    return front, plan_front(front, 1e12)


def test_each_answer_is_the_best_of_all_points_within_the_limits(planned):
    front, points = planned
    for days in (np.inf, 40.0, 60.0, 90.0):
        mask = points.days <= days
        kept = np.flatnonzero(mask)
        best = answers(front, points, mask)
        assert best.quickest == min(kept, key=lambda i: points.days[i])
        assert best.cheapest == min(kept, key=lambda i: (points.cost_usd[i], points.days[i]))
        assert best.fewest_gpus == min(kept, key=lambda i: (front["num_gpus"][i], points.cost_usd[i]))
        costs = [points.cost_usd[i] for i in best.cheapest_by_system]
        assert costs == sorted(costs)
        for place in best.cheapest_by_system:
            mine = [i for i in kept if front["system"][i] == front["system"][place]]
            assert points.cost_usd[place] == min(points.cost_usd[mine])


def test_nothing_within_the_limits_has_no_answer(planned):
    front, points = planned
    best = answers(front, points, points.days < 0)
    assert (best.fewest_gpus, best.cheapest, best.quickest, best.cheapest_by_system) == (None, None, None, ())


def test_a_curve_bends_where_more_chips_stop_helping(planned):
    front, points = planned
    found = curves(front, points)
    assert [curve.system for curve in found] == ["h", "a", "b"]
    for curve in found:
        assert front["num_gpus"][list(curve.places)].tolist() == [256, 512, 1024, 2048]
        assert curve.efficiency == pytest.approx((1.0, 0.95, 0.75, 0.4125))
        assert front["num_gpus"][curve.knee] == 1024  # 1.9, 3.0, 3.3: the last doubling gives a tenth


def test_perfect_scaling_has_its_knee_where_any_point_would_do_and_two_sizes_have_none(make_front):
    step = 100.0 / np.array([1.0, 2.0])
    front = make_front(2, num_gpus=[256.0, 512.0], step_time_s=step, tokens_per_s=1e7 / step)
    (curve,) = curves(front, plan_front(front, 1e12))
    assert curve.knee is None
    assert curves(front.take([0]), plan_front(front.take([0]), 1e12)) == []


def test_goodput_lengthens_the_run_and_spares_cost(make_front):
    front = make_front(2)
    plain, failing = plan_front(front, 1e12), plan_front(front, 1e12, goodput=[0.5, 0.8], spare_gpus=[0.0, 2048.0])
    assert failing.days == pytest.approx(plain.days / [0.5, 0.8])
    assert failing.gpu_hours == pytest.approx(plain.gpu_hours / [0.5, 0.4])
    assert failing.cost_usd == pytest.approx(plain.cost_usd / [0.5, 0.4])
    assert failing.energy_kwh == pytest.approx(plain.energy_kwh / [0.5, 0.8])
    assert failing.num_steps.tolist() == plain.num_steps.tolist()
    assert np.isinf(plan_front(front, 1e12, goodput=[0.0, 1.0]).days[0])
