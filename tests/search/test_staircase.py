"""The staircase: a front of two objectives, whatever the order of its points."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import search.staircase as staircase
from results.pareto import non_dominated
from search.staircase import Staircase, beater, insert, is_beaten, new_staircase

SMALL = st.integers(0, 6).map(float)
POINTS = st.lists(st.tuples(SMALL, SMALL), min_size=1, max_size=40)


def offered(points, ids=None) -> Staircase:
    front = new_staircase()
    for key, (x, y) in zip(ids if ids is not None else range(len(points)), points, strict=True):
        if not is_beaten(front, x, y):
            insert(front, x, y, key)
    return front


def rows(front: Staircase) -> list[tuple[float, float, int]]:
    return list(zip(*(column.tolist() for column in front.points()), strict=True))


@given(POINTS)
def test_it_keeps_what_nothing_dominates_and_the_lowest_id_of_equals(points):
    best: dict[tuple[float, float], int] = {}
    for key, point in enumerate(points):
        best.setdefault(point, key)
    wanted = [
        (x, y, key)
        for (x, y), key in best.items()
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    ]
    assert rows(offered(points)) == sorted(wanted)


@given(POINTS, st.randoms(use_true_random=False))
def test_the_order_of_points_does_not_matter(points, draw):
    order = list(range(len(points)))
    draw.shuffle(order)
    assert rows(offered([points[i] for i in order], order)) == rows(offered(points))


@given(POINTS, SMALL, SMALL)
def test_a_point_is_beaten_by_what_is_nowhere_worse_and_somewhere_better(points, x, y):
    front = offered(points)
    wanted = any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)
    assert is_beaten(front, x, y) is wanted
    by = beater(front.x, front.y, front.size[0], x, y)
    assert (by >= 0) is wanted
    if wanted:
        assert front.x[by] <= x
        assert front.y[by] <= y


def test_it_agrees_with_the_pareto_front_of_results_on_many_points():
    draw = np.random.default_rng(3)
    points = draw.integers(0, 300, size=(20_000, 2)).astype(float)
    points[:, 1] += (300 - points[:, 0]) ** 1.1
    keep = non_dominated(points, np.arange(len(points)))
    assert sorted(key for _, _, key in rows(offered(points))) == keep.tolist()
    assert len(keep) > 100


def test_steps_ascend_in_one_objective_and_descend_in_the_other():
    front = offered([tuple(map(float, p)) for p in np.random.default_rng(0).integers(0, 1000, size=(500, 2))])
    x, y, _ = front.points()
    assert (np.diff(x) > 0).all()
    assert (np.diff(y) < 0).all()


def test_points_are_copies():
    front = offered([(1.0, 2.0)])
    front.points()[0][:] = 9.0
    assert rows(front) == [(1.0, 2.0, 0)]


def test_a_full_staircase_says_what_to_do(monkeypatch):
    monkeypatch.setattr(staircase, "CAPACITY", 3)
    front = staircase.new_staircase()
    for i in range(3):
        insert(front, float(i), float(-i), i)
    insert(front, 1.0, -1.5, 7)  # replaces a point, so there is room
    with pytest.raises(ValueError, match="must stay within its capacity of 131072 points; constrain or coarsen"):
        insert(front, 5.0, -5.0, 9)
