"""Where time went: by hand, and sums that must hold on any timeline."""

from __future__ import annotations

import numpy as np
import pytest

from estimator.breakdown import Cause, breakdown, differences, stragglers
from estimator.replay import replay
from estimator.tasks import Category, Device, Stream, Tasks


def job(seconds, edges, streams, category=(), names=(), devices=2):
    """Tasks on streams 0 and 1 (compute of each device), 2 and 3 (its link), 4 and 5 (its host)."""
    made = [
        Stream(device=s % devices, name=("compute", "link", "host")[s // devices], computes=s < devices)
        for s in range(3 * devices)
    ]
    ranks = [Device(name=f"rank {d}") for d in range(devices)]
    return replay(Tasks.of(devices=ranks, streams=made, stream=streams, seconds=seconds, edges=edges,
                           category=category, names=names))  # fmt: skip


@pytest.fixture
def exchange():
    """Rank 0 computes 1 s, sends for 2 s over 1 s of its compute; rank 1 waits for it, then its host, then computes."""
    return job(
        [1.0, 2.0, 1.0, 0.5, 1.0], [(0, 1), (1, 3), (3, 4)], [0, 3, 0, 5, 1],
        category=[Category.FORWARD, Category.DP, Category.BACKWARD, Category.HOST, Category.FORWARD],
        names=["a", "send", "b", "lag", "a"],
    )  # fmt: skip


def test_a_device_computes_or_does_something_else_or_idles(exchange):
    found = breakdown(exchange)
    assert found.span_s == 4.5
    assert found.compute_s == pytest.approx([2.0, 1.0])
    assert found.non_compute_s == pytest.approx([0.0, 2.0])
    assert found.idle_s == pytest.approx([2.5, 1.5])
    assert found.compute_s + found.non_compute_s + found.idle_s == pytest.approx([4.5, 4.5])


def test_what_a_device_waits_for_is_told_by_what_let_it_go(exchange):
    waits = breakdown(exchange).waits_s
    assert waits[Cause.COMMUNICATION] == pytest.approx([0.0, 3.0])
    assert waits[Cause.HOST] == pytest.approx([0.0, 0.5])
    assert waits[Cause.END] == pytest.approx([2.5, 0.0])


def test_overlap_is_the_share_of_transfers_under_compute():
    found = breakdown(job([2.0, 1.0, 3.0], [], [0, 2, 2], devices=1))
    assert found.communication_s == pytest.approx([4.0])
    assert found.overlap_share == pytest.approx([0.5])


def test_without_transfers_nothing_is_hidden():
    told = breakdown(job([1.0, 2.0], [], [0, 0], devices=1))
    assert told.overlap_share.tolist() == [0.0]
    assert told.overlap_s.dtype == np.float64


def test_the_straggler_is_whose_compute_the_path_goes_through(exchange):
    timeline = job([3.0, 1.0, 1.0], [(0, 2), (1, 2)], [0, 1, 1])
    first, second = stragglers(timeline)
    assert (first.device, first.critical_s, first.late, first.beyond_s) == (0, 3.0, True, 0.5)
    assert (second.device, second.critical_s, second.late) == (1, 1.0, False)


def test_two_timelines_differ_by_name_in_count_and_seconds(exchange):
    other = job([1.5, 2.0], [], [0, 3], category=[Category.FORWARD, Category.DP], names=["a", "send"])
    found = {one.name: one for one in differences(exchange, other)}
    assert (found["a"].count_a, found["a"].count_b, found["a"].seconds) == (1.0, 0.5, pytest.approx(-0.25))
    assert (found["b"].count_b, found["b"].seconds) == (0.0, pytest.approx(-0.5))
    assert found["send"].seconds == 0.0
    assert next(iter(differences(exchange, other))).name == "b"


@pytest.mark.parametrize("seed", range(20))
def test_time_without_compute_is_all_told(seed):
    rng = np.random.default_rng(seed)
    num = 40
    edges = [(i, j) for i in range(num) for j in range(i + 1, num) if rng.random() < 0.06]
    timeline = job(rng.integers(0, 4, num).astype(float), edges, rng.integers(0, 4, num))
    found = breakdown(timeline)
    assert sum(found.waits_s.values()) == pytest.approx(found.non_compute_s + found.idle_s)
    assert all((seconds >= 0.0).all() for seconds in found.waits_s.values())


def test_a_launch_behind_a_launch_is_all_the_host_s():
    """Compute, then two host tasks in a row, then compute: both waits are the host's, whoever let the first go."""
    found = breakdown(job([1.0, 0.5, 0.25, 1.0], [(0, 1), (1, 2), (2, 3)], [0, 2, 2, 0], devices=1,
                          category=[Category.FORWARD, Category.HOST, Category.HOST, Category.FORWARD]))  # fmt: skip
    assert found.waits_s[Cause.HOST] == pytest.approx([0.75])
    sent = breakdown(job([1.0, 2.0, 0.5, 1.0], [(0, 1), (1, 2), (2, 3)], [0, 1, 2, 0], devices=1,
                         category=[Category.FORWARD, Category.DP, Category.HOST, Category.FORWARD]))  # fmt: skip
    assert sent.waits_s[Cause.COMMUNICATION] == pytest.approx([2.0])
    assert sent.waits_s[Cause.HOST] == pytest.approx([0.5])


def test_a_host_that_begins_late_is_told_as_the_host_and_not_as_the_beginning():
    found = breakdown(job([0.5, 1.0], [(0, 1)], [2, 0], devices=1, category=[Category.HOST, Category.FORWARD]))
    assert found.waits_s[Cause.HOST] == pytest.approx([0.5])
    assert found.waits_s[Cause.BEGIN] == pytest.approx([0.0])
