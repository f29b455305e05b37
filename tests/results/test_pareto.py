"""Claims about dominance, hypervolume and the knee, against brute force and hand-made figures."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.pareto import hypervolume, knee, merge, non_dominated, worst


def brute_force(values, ids):
    """Keeps a row unless another is nowhere worse and somewhere better, or equal with a lower id."""
    kept = []
    for i, row in enumerate(values):
        beaten = any(np.all(other <= row) and np.any(other < row) for other in values)
        twin = any(np.array_equal(values[j], row) and ids[j] < ids[i] for j in range(len(values)))
        if not beaten and not twin:
            kept.append(i)
    return sorted(kept, key=lambda i: ids[i])


@st.composite
def clouds(draw):
    """Few distinct values, so that ties and twins are common."""
    num_objectives = draw(st.integers(1, 4))
    grid = st.sampled_from([-1.5, 0.0, 0.1, 0.2, 3.0, 1e9])
    rows = draw(st.lists(st.lists(grid, min_size=num_objectives, max_size=num_objectives), min_size=1, max_size=40))
    ids = draw(st.permutations(range(len(rows))))
    return np.array(rows), np.array(ids)


@given(clouds())
def test_the_front_is_what_brute_force_keeps(cloud):
    values, ids = cloud
    assert non_dominated(values, ids).tolist() == brute_force(values, ids)


@given(clouds(), st.randoms(use_true_random=False))
def test_the_front_does_not_depend_on_the_order_of_rows(cloud, random):
    values, ids = cloud
    order = list(range(len(ids)))
    random.shuffle(order)
    assert ids[non_dominated(values, ids)].tolist() == ids[order][non_dominated(values[order], ids[order])].tolist()


@given(clouds(), st.integers(1, 5))
def test_merging_the_fronts_of_parts_gives_the_front_of_the_whole(cloud, num_parts):
    values, ids = cloud
    parts = [np.arange(part, len(ids), num_parts) for part in range(num_parts)]
    fronts = [(ids[p][kept], values[p][kept]) for p in parts for kept in [non_dominated(values[p], ids[p])]]
    merged_ids, merged_values = merge(fronts)
    whole = non_dominated(values, ids)
    assert merged_ids.tolist() == ids[whole].tolist()
    assert np.array_equal(merged_values, values[whole])


@given(clouds())
def test_a_front_that_arrives_twice_counts_once(cloud):
    values, ids = cloud
    once = merge([(ids, values)])
    twice = merge([(ids, values), (ids, values)])
    assert once[0].tolist() == twice[0].tolist()


def test_a_million_ids_beyond_float_precision_stay_apart():
    ids = np.array([2**60 + 1, 2**60])
    assert ids[non_dominated([[1.0], [1.0]], ids)].tolist() == [2**60]


def test_objectives_that_are_better_when_larger_are_maximised():
    values = [[1.0, 10.0], [2.0, 20.0], [2.0, 10.0]]
    assert non_dominated(values, [0, 1, 2], higher=[False, True]).tolist() == [0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_with_its_row(bad):
    with pytest.raises(ValueError, match="row 1 is"):
        non_dominated([[1.0, 2.0], [1.0, bad]], [0, 1])


@pytest.mark.parametrize("shape", [(3,), (3, 0), (3, 5)])
def test_one_to_four_objectives_are_needed(shape):
    with pytest.raises(ValueError, match="1 <= K <= 4"):
        non_dominated(np.ones(shape), [0, 1, 2])


def test_no_points_have_no_front_and_no_volume():
    nothing = np.empty((0, 2))
    assert non_dominated(nothing, []).tolist() == []
    assert hypervolume(nothing, [1.0, 1.0]) == 0.0


def test_hypervolume_counts_decades():
    # Exact: the exponents are small whole numbers. One point two decades below the corner on each axis covers 2**K.
    for num_objectives in (1, 2, 3, 4):
        assert hypervolume([[1.0] * num_objectives], [100.0] * num_objectives) == 2.0**num_objectives


def test_hypervolume_of_a_staircase_is_the_sum_of_its_strips():
    # Strips in decades below (3, 3): x from 0 to 1 is 1 high, from 1 to 2 is 2 high, from 2 to 3 is 3 high.
    assert hypervolume([[1.0, 100.0], [10.0, 10.0], [100.0, 1.0]], [1000.0, 1000.0]) == 6.0


def test_hypervolume_ignores_points_beyond_the_reference():
    assert hypervolume([[1.0, 1.0], [0.1, 1000.0]], [10.0, 10.0]) == 1.0


def test_hypervolume_of_a_maximised_objective_grows_with_it():
    assert hypervolume([[1.0, 100.0]], [10.0, 1.0], higher=[False, True]) == 2.0


def test_hypervolume_refuses_values_without_a_logarithm():
    with pytest.raises(ValueError, match="must be positive"):
        hypervolume([[0.0, 1.0]], [1.0, 1.0])


def test_the_worst_point_takes_each_objective_at_its_worst():
    assert worst([[1.0, 5.0], [3.0, 4.0]], higher=[False, True]).tolist() == [3.0, 4.0]


def test_the_knee_is_the_point_farthest_from_the_line_of_the_ends():
    points = np.array([[1.0, 1e4], [3.0, 300.0], [100.0, 10.0], [1e4, 1.0]])  # on linear axes the third would be it
    logs = np.log10(points) / 4.0
    start, end = logs[0], logs[-1]
    along, offsets = (end - start) / np.linalg.norm(end - start), logs - start
    distances = np.abs(along[0] * offsets[:, 1] - along[1] * offsets[:, 0])
    assert knee(points) == int(np.argmax(distances)) == 1


def test_the_knee_follows_units_nowhere():
    points = np.array([[1.0, 1000.0], [3.0, 40.0], [10.0, 4.0], [1000.0, 1.0]])
    assert knee(points * [1e-3, 2.0**30]) == knee(points)


@pytest.mark.parametrize("points", [[[2.0]], [[2.0, 3.0, 4.0, 5.0]], [[1.0, 7.0], [1.0, 7.0]], [[0.0, -1.0]]])
def test_a_front_without_extent_has_its_first_point_as_knee(points):
    assert knee(points) == 0
