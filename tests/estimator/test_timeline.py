"""What a timeline says, by hand and against sums over small slices of time."""

from collections import defaultdict

import numpy as np
import pytest

from estimator.replay import replay
from estimator.tasks import Category, Device, Shield, Stream, Tasks
from estimator.timeline import Timeline, busy, critical_path, exposed, memory

COMPUTE, TP, DP = range(3)
DP_BACKWARD, TP_GEMM = (Category.DP, Shield.BACKWARD), (Category.TP, Shield.GEMM)
CODE = {shield: code for code, shield in enumerate(Shield)}


def recorded(rows, devices=1, **columns):
    """A timeline of (device, stream kind, category, shield, start, end) as if measured."""
    streams = [
        Stream(device=d, name=f"{kind} {d}", computes=kind == COMPUTE)
        for d in range(devices)
        for kind in (COMPUTE, TP, DP)
    ]
    tasks = Tasks.of(
        devices=[Device(name=f"rank {d}", base_bytes=100.0 * d, capacity_bytes=1e3) for d in range(devices)],
        streams=streams,
        stream=[3 * row[0] + row[1] for row in rows],
        seconds=[row[5] - row[4] for row in rows],
        category=[row[2] for row in rows],
        shield=[CODE[row[3]] for row in rows],
        **columns,
    )
    start, end = (np.array([row[k] for row in rows], dtype=float) for k in (4, 5))
    return Timeline(tasks=tasks, start=start, end=end, blame=np.full(len(rows), -1), host_s=np.zeros(len(rows)))


def compute(start, end, device=0):
    return (device, COMPUTE, Category.FORWARD, Shield.NOTHING, start, end)


def tp(start, end, device=0):
    return (device, TP, *TP_GEMM, start, end)


def dp(start, end, device=0):
    return (device, DP, *DP_BACKWARD, start, end)


def random_rows(seed, num=60, devices=3):
    """Whole seconds from 0 to 40, many at the same time."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num):
        start = int(rng.integers(0, 30))
        make = (compute, tp, dp)[rng.integers(0, 3)]
        rows.append(make(start, start + int(rng.integers(0, 9)), int(rng.integers(0, devices))))
    return rows


def by_slices(rows, devices):
    """Exposed, total, compute, communication, overlap: sums over slices of one second."""
    bare, total = defaultdict(lambda: np.zeros(devices)), defaultdict(lambda: np.zeros(devices))
    times = np.zeros((3, devices))
    for d in range(devices):
        for second in range(40):
            alive = [row for row in rows if row[0] == d and row[4] <= second < row[5]]
            sends = [row for row in alive if row[1] != COMPUTE]
            computes = len(sends) < len(alive)
            times[:, d] += computes, bool(sends), computes and bool(sends)
            for row in sends:
                total[row[2:4]][d] += 1
                bare[row[2:4]][d] += 0 if computes else 1 / len(sends)
    return bare, total, times


# ------------------------------------------------------------------------------------------------ exposed and busy


@pytest.mark.parametrize("seed", range(8))
def test_exposed_and_busy_are_sums_over_slices_of_time(seed):
    rows = random_rows(seed)
    timeline = recorded(rows, devices=3)
    bare, total, times = by_slices(rows, 3)
    got, spent = exposed(timeline), busy(timeline)
    assert got.total.keys() == got.seconds.keys() == total.keys()
    for key in total:
        assert got.total[key].tolist() == total[key].tolist()
        np.testing.assert_allclose(got.seconds[key], bare[key], rtol=1e-12, atol=1e-12)
    assert [spent.compute.tolist(), spent.communication.tolist(), spent.overlap.tolist()] == times.tolist()
    assert (spent.compute + spent.communication - spent.overlap + spent.idle).tolist() == [timeline.span_s] * 3


def test_a_hidden_transfer_exposes_nothing_at_all():
    rng = np.random.default_rng(0)
    edges = np.cumsum(rng.uniform(0, 1, 1001))
    rows = [compute(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    rows += [tp(*np.sort(rng.uniform(edges[0], edges[-1], 2))) for _ in range(100)]
    assert exposed(recorded(rows)).seconds[TP_GEMM].tolist() == [0.0]


def test_transfers_at_the_same_time_share_what_is_exposed():
    got = exposed(recorded([compute(0, 2), tp(1, 6), dp(4, 8)]))
    assert got.seconds[TP_GEMM].tolist() == [2 + 1]  # alone from 2 to 4, half of 4 to 6
    assert got.seconds[DP_BACKWARD].tolist() == [1 + 2]
    assert got.total[TP_GEMM].tolist() == [5]


def test_compute_of_another_rank_hides_nothing():
    got = exposed(recorded([compute(0, 5, device=1), tp(0, 5, device=0)], devices=2))
    assert got.seconds[TP_GEMM].tolist() == [5, 0]


def test_the_hosts_own_tasks_are_no_transfers():
    host = (0, TP, Category.HOST, Shield.NOTHING, 0.0, 3.0)
    assert exposed(recorded([host])).total == {}
    assert busy(recorded([host])).idle.tolist() == [3.0]


def test_a_rank_that_ends_early_is_idle_to_the_end():
    got = busy(recorded([compute(1, 3, device=0), compute(0, 10, device=1)], devices=2))
    assert got.idle.tolist() == [8, 0]


# --------------------------------------------------------------------------------------------------- critical path


def test_the_critical_path_follows_blame_and_names_every_second():
    streams = [Stream(device=0, name="compute", computes=True), Stream(device=0, name="dp")]
    tasks = Tasks.of(
        devices=[Device(name="rank 0", links=("ib",))], streams=streams, stream=[0, 0, 1, 0],
        seconds=[2.0, 3.0, 4.0, 1.0], edges=[(0, 2), (2, 3)], takes=[0, 0, 0.25, 0],
        launch_s=[1.0, 0, 0, 10.0], gates=[0, 0, 0, 1],
        category=[Category.FORWARD, Category.BACKWARD, Category.DP, Category.OPTIMIZER],
    )  # fmt: skip
    timeline = replay(tasks)
    # launch to 1, forward to 3, transfer to 7 beside the backward (to 7), launch to 17, optimizer to 18
    got = critical_path(timeline)
    assert timeline.end.tolist() == [3.0, 7.0, 7.0, 18.0]
    assert got.tasks.tolist() == [0, 2, 3]
    assert got.seconds == {"forward": 2.0, "optimizer": 1.0, "dp": 4.0, "host": 11.0, "contention": 0.0, "idle": 0.0}


def test_a_stretch_on_the_path_is_contention_of_links_and_of_compute():
    streams = [Stream(device=0, name="compute", computes=True), Stream(device=0, name="a"), Stream(device=0, name="b")]
    tasks = Tasks.of(
        devices=[Device(name="rank 0", links=("ib",))], streams=streams, stream=[1, 2, 0], seconds=[1.0, 1.0, 4.0],
        edges=[(0, 2)], loads=[[1.0], [2.0], [0.0]], category=[Category.PP, Category.DP, Category.FORWARD],
        takes=[0.0, 0.5, 0.0],
    )  # fmt: skip
    # Both at 1/3 until 3 s, and both end; then compute alone
    got = critical_path(replay(tasks))
    assert got.seconds == pytest.approx({"pp": 1, "forward": 4, "host": 0, "contention": 2, "idle": 0}, abs=1e-15)


@pytest.mark.parametrize("seed", range(4))
def test_seconds_of_the_critical_path_sum_to_the_span(seed):
    rng, n = np.random.default_rng(seed), 5000
    streams = [Stream(device=d, name=str(k), computes=k == 0) for d in range(3) for k in range(3)]
    stream = rng.integers(0, 9, n)
    edges = [(i, j) for i, j in enumerate(range(1, n)) if i % 3] + [(i, i + 7) for i in range(n - 7)]
    tasks = Tasks.of(
        devices=[Device(name=str(d), links=("a", "b")) for d in range(3)], streams=streams, stream=stream,
        seconds=rng.exponential(1e-3, n), edges=edges, takes=rng.uniform(0, 0.3, n), loads=rng.uniform(0, 0.8, (n, 2)),
        launch_s=rng.exponential(2e-4, n), gates=rng.random(n) < 0.1,
        category=[tuple(Category)[c] for c in rng.integers(0, len(Category), n)],
    )  # fmt: skip
    timeline = replay(tasks)
    path = critical_path(timeline)
    assert sum(path.seconds.values()) == pytest.approx(timeline.span_s, rel=1e-12)
    assert min(path.seconds.values()) >= 0
    assert path.seconds["contention"] > 0
    assert path.seconds["host"] > 0
    assert timeline.blame[path.tasks[1:]].tolist() == path.tasks[:-1].tolist()
    # Nobody starts before its blame ends, nor later than its launch explains
    wait = timeline.start[path.tasks[1:]] - timeline.end[path.tasks[:-1]]
    np.testing.assert_allclose(wait, timeline.host_s[path.tasks[1:]], atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- memory


def test_memory_is_a_step_function_of_overlapping_lifetimes():
    rows = [compute(0, 4), compute(2, 6), compute(6, 9), tp(1, 3, device=1)]
    got = memory(recorded(rows, devices=2, alloc_bytes=[10, 5, 20, 7], free_bytes=[0, 10, 25, 0]))
    assert got.times[0].tolist() == [0, 2, 6, 9]
    assert got.bytes[0].tolist() == [10, 15, 25, 0]  # at 6 ten are given back and twenty taken
    assert got.times[1].tolist() == [0, 1]
    assert got.bytes[1].tolist() == [100, 107]
    assert got.peak.tolist() == [25, 107]
    assert got.when.tolist() == [6, 1]
    assert got.capacity.tolist() == [1e3, 1e3]


@pytest.mark.parametrize("seed", range(4))
def test_memory_at_any_time_is_what_was_taken_less_what_was_given_back(seed):
    rows, rng = random_rows(seed), np.random.default_rng(seed)
    alloc, free = rng.integers(0, 9, (2, len(rows))).astype(float)
    timeline = recorded(rows, devices=3, alloc_bytes=alloc, free_bytes=free)
    got, mine = memory(timeline), timeline.tasks.device
    for d in range(3):
        assert (np.diff(got.times[d]) > 0).all()
        for time in range(45):
            taken = (
                alloc[(mine == d) & (timeline.start <= time)].sum() - free[(mine == d) & (timeline.end <= time)].sum()
            )
            held = got.bytes[d][np.searchsorted(got.times[d], time, side="right") - 1]
            assert held == 100.0 * d + taken
        assert got.peak[d] == got.bytes[d].max()


def test_tasks_that_did_not_run_count_nowhere():
    tasks = recorded([compute(0, 4), tp(0, 9)], alloc_bytes=[1, 2], free_bytes=[1, 2]).tasks
    got = replay(tasks, only=np.array([True, False]))
    assert got.span_s == 4.0
    assert exposed(got).total == {}
    assert busy(got).communication.tolist() == [0.0]
    assert memory(got).peak.tolist() == [1.0]
    assert critical_path(got).tasks.tolist() == [0]
