"""Replay against hand-computed cases, the schedules' own simulation, and a slow event simulation written apart."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.replay import replay
from estimator.schedule import Kind, order, placement, simulate
from estimator.strategy import Schedule
from estimator.tasks import Category, Device, Stream, Tasks
from estimator.timeline import critical_path, exposed, memory

SHAPES = [(s, p, m, 1) for s in (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZB_H1) for p, m in ((1, 3), (4, 9))]
SHAPES += [(Schedule.INTERLEAVED, 4, 8, 3), (Schedule.DUALPIPE, 4, 12, 1), (Schedule.DUALPIPE, 6, 12, 1)]
RANK = Device(name="rank 0", links=("nvlink", "ib"))
STREAMS = (
    Stream(device=0, name="compute", computes=True),
    Stream(device=0, name="tp"),
    Stream(device=0, name="dp"),
)


def one_rank(stream, seconds, edges=(), **columns):
    """Tasks on the streams of one rank with two links."""
    return Tasks.of(devices=[RANK], streams=STREAMS, stream=stream, seconds=seconds, edges=edges, **columns)


def slow(tasks, only=None, ready=None):
    """Start and end by the rules alone: at every event all rates, queues and inputs are looked at anew.

    What a stream takes in an instant is decided by what was ready before the takes of that instant; a task of no
    length ends in a further turn of it.
    """
    n = len(tasks)
    only = np.ones(n, bool) if only is None else only
    ready = np.zeros(n) if ready is None else ready
    needs = defaultdict(set)
    for b, a in zip(tasks.before.tolist(), tasks.after.tolist(), strict=True):
        if only[b]:
            needs[a].add(b)
    start, end, since, host = {}, {}, {}, defaultdict(float)
    launched, left = {}, {}  # task -> second in which its launch is through; task -> work left
    now = 0.0

    def rates():
        found = {}
        for i in left:
            beside = [j for j in left if tasks.device[j] == tasks.device[i]]
            if tasks.streams[tasks.stream[i]].computes:
                share = sum(tasks.takes[j] for j in beside if not tasks.streams[tasks.stream[j]].computes)
                found[i] = max(0.1, 1 - share)
            else:
                loads = [
                    sum(tasks.loads[j, x] for j in beside) for x in range(tasks.loads.shape[1]) if tasks.loads[i, x]
                ]
                found[i] = 1 / max(1, *loads, 1)
        return found

    while len(end) < only.sum():
        for i in np.flatnonzero(only):
            if i not in since and needs[i] <= end.keys() and ready[i] <= now:
                since[i] = now
        held = {tasks.stream[i] for i in [*left, *launched]}
        heads = {}
        for i in sorted(since, key=lambda i: (since[i], i)):
            if i not in start and i not in launched and tasks.stream[i] not in held:
                heads.setdefault(tasks.stream[i], i)
        for i in sorted(heads.values(), key=lambda i: (since[i], i)):
            launched[i] = now
            if tasks.launch_s[i] > 0:
                d = tasks.device[i]
                host[d] = max(host[d], since[i] if tasks.gates[i] else 0.0) + tasks.launch_s[i]
                launched[i] = max(now, host[d])
        for i in [i for i, t in launched.items() if t <= now]:
            del launched[i]
            start[i], left[i] = now, float(tasks.seconds[i])
        rate = rates()
        ends = {i: now + left[i] / rate[i] for i in left}
        waits = [t for t in ready[only] if t > now]
        later = min([*ends.values(), *launched.values(), *waits], default=None)
        assert later is not None, "stuck"
        done = [i for i in left if ends[i] <= later * (1 + 1e-14)]
        for i in left:
            left[i] -= (later - now) * rate[i]
        for i in done:
            end[i] = later
            del left[i]
        now = later
    pick = [[times.get(i, np.nan) for i in range(n)] for times in (start, end)]
    return np.array(pick[0]), np.array(pick[1])


@st.composite
def graphs(draw):
    """Random graphs on two devices with five streams and two links; seconds rarely tie."""
    n = draw(st.integers(1, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pairs = rng.integers(0, n, (draw(st.integers(0, 2 * n)), 2))
    edges = [(min(a, b), max(a, b)) for a, b in pairs.tolist() if a != b]
    names = rng.permutation(n)  # so that the order of indices says nothing
    streams = [*STREAMS, Stream(device=1, name="compute", computes=True), Stream(device=1, name="tp")]

    def some(share, values):
        return np.where(rng.random(n) < share, values, 0.0)

    return Tasks.of(
        devices=[RANK, Device(name="rank 1", links=("nvlink", "ib"))],
        streams=streams,
        stream=rng.integers(0, len(streams), n),
        seconds=some(0.9, rng.uniform(0.1, 2.0, n)),
        edges=[(names[a], names[b]) for a, b in edges],
        takes=some(0.5, rng.uniform(0.0, 0.7, n)),
        loads=np.stack([some(0.6, rng.uniform(0.1, 1.5, n)) for _ in range(2)], axis=1),
        launch_s=some(draw(st.sampled_from([0.0, 0.7])), rng.uniform(0.05, 1.0, n)),
        gates=rng.random(n) < 0.3,
    )


# ------------------------------------------------------------------------------------------------------ exact oracles


def order_as_tasks(passes, f, b, w):
    """A schedule's order as tasks: one compute stream per rank with the order as edges, and who needs whose output."""
    flat = [(rank, item) for rank, items in enumerate(passes) for item in items]
    gives, edges = {}, []
    for i, (_, item) in enumerate(flat):
        if item.kind in (Kind.F, Kind.PAIR):
            gives["F", item.chunk, item.micro_batch] = i
        if item.kind in (Kind.B, Kind.BW):
            gives["B", item.chunk, item.micro_batch] = i
        if item.kind is Kind.PAIR:
            gives["B", item.back_chunk, item.back_micro_batch] = i
    for i, (rank, item) in enumerate(flat):
        if i and flat[i - 1][0] == rank:
            edges.append((i - 1, i))
        needs = []
        if item.kind in (Kind.F, Kind.PAIR):
            needs.append(("F", item.chunk - 1, item.micro_batch))
        if item.kind is Kind.W:
            needs.append(("B", item.chunk, item.micro_batch))
        back = {Kind.PAIR: item[3:], Kind.B: item[1:3], Kind.BW: item[1:3]}.get(item.kind)
        if back:
            needs += [("F", *back), ("B", back[0] + 1, back[1])]
        edges += [(gives[need], i) for need in needs if need in gives]
    times = {Kind.F: lambda x: f[x.chunk], Kind.B: lambda x: b[x.chunk], Kind.W: lambda x: w[x.chunk]}
    times[Kind.BW] = lambda x: b[x.chunk] + w[x.chunk]
    times[Kind.PAIR] = lambda x: f[x.chunk] + (b[x.back_chunk] + w[x.back_chunk])
    return Tasks.of(
        devices=[Device(name=f"rank {r}") for r in range(len(passes))],
        streams=[Stream(device=r, name="compute", computes=True) for r in range(len(passes))],
        stream=[rank for rank, _ in flat],
        seconds=[times[item.kind](item) for _, item in flat],
        edges=edges,
    )


@pytest.mark.parametrize(("schedule", "p", "m", "v"), SHAPES)
def test_every_schedules_order_takes_what_its_simulation_takes_bit_for_bit(schedule, p, m, v):
    passes, rng = order(schedule, p, m, v), np.random.default_rng(p * m)
    f, b, w = (rng.uniform(0.5, 2.0, placement(schedule, p, v).max() + 1) for _ in range(3))
    truth = simulate(passes, f, b, w)
    got = replay(order_as_tasks(passes, f, b, w))
    assert got.start.tolist() == np.concatenate(truth.start).tolist()
    assert got.end.tolist() == np.concatenate(truth.end).tolist()
    assert got.span_s == truth.span


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_any_graph_runs_as_in_a_slow_simulation(tasks):
    start, end = slow(tasks)
    got = replay(tasks)
    # Work left is summed in another order; a few hundred roundings of numbers near 1.
    np.testing.assert_allclose(got.start, start, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(got.end, end, rtol=1e-11, atol=1e-12)
    seconds = critical_path(got).seconds
    assert sum(seconds.values()) == pytest.approx(got.span_s, rel=1e-12, abs=1e-15)
    assert min(seconds.values()) >= 0.0


@settings(max_examples=100, deadline=None)
@given(graphs(), st.integers(0, 2**32 - 1))
def test_a_part_with_ready_times_runs_as_in_a_slow_simulation(tasks, seed):
    rng = np.random.default_rng(seed)
    only, ready = rng.random(len(tasks)) < 0.7, np.where(rng.random(len(tasks)) < 0.5, rng.uniform(0, 4, len(tasks)), 0)
    start, end = slow(tasks, only, ready)
    got = replay(tasks, only=only, ready=ready)
    np.testing.assert_allclose(got.start, start, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(got.end, end, rtol=1e-11, atol=1e-12)
    assert np.isnan(got.end[~only]).all()
    assert (got.blame[~only] == -1).all()


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_one_device_alone_runs_as_in_the_whole_once_told_when_its_inputs_come(tasks):
    tasks = replace(tasks, seconds=tasks.seconds + 0.01)  # a task of no length makes ties
    full, only = replay(tasks), tasks.device == 1
    ready = np.zeros(len(tasks))
    foreign = only[tasks.after] & ~only[tasks.before]
    np.maximum.at(ready, tasks.after[foreign], full.end[tasks.before[foreign]])
    part = replay(tasks, only=only, ready=ready)
    assert part.start[only].tolist() == full.start[only].tolist()
    assert part.end[only].tolist() == full.end[only].tolist()


@settings(max_examples=100, deadline=None)
@given(graphs(), st.integers(0, 2**32 - 1))
def test_renaming_tasks_changes_nothing_where_nothing_ties(tasks, seed):
    n, rng = len(tasks), np.random.default_rng(seed)
    new = rng.permutation(n)  # task new[i] of the one is task i of the other
    ready = rng.uniform(0.0, 1.0, n)
    old = np.argsort(new)
    shuffled = Tasks.of(
        devices=tasks.devices, streams=tasks.streams, stream=tasks.stream[new], seconds=tasks.seconds[new] + 0.01,
        edges=old[np.stack([tasks.before, tasks.after], axis=1)], takes=tasks.takes[new], loads=tasks.loads[new],
        launch_s=tasks.launch_s[new], gates=tasks.gates[new],
    )  # fmt: skip
    same = replace(tasks, seconds=tasks.seconds + 0.01)
    a, b = replay(same, ready=ready), replay(shuffled, ready=ready[new])
    if len(np.unique(ready_times(same, a, ready))) == n:  # one task may let go two at once
        assert b.start.tolist() == a.start[new].tolist()
        assert b.end.tolist() == a.end[new].tolist()


def ready_times(tasks, timeline, ready):
    """When each task became ready."""
    times = ready.copy()
    np.maximum.at(times, tasks.after, timeline.end[tasks.before])
    return times


# --------------------------------------------------------------------------------------------------------- by hand


@pytest.mark.parametrize(("work", "transfer", "take"), [(3.0, 2.0, 0.25), (1.0, 4.0, 0.25), (1.0, 100.0, 1.5)])
def test_compute_beside_a_transfer_pays_for_what_it_takes(work, transfer, take):
    got = replay(one_rank([0, 1], [work, transfer], takes=[0, take]))
    rate = max(0.1, 1 - take)
    hidden = work / rate if work / rate <= transfer else work + (1 - rate) * transfer
    assert got.end.tolist() == pytest.approx([hidden, transfer], rel=1e-15)
    if take < 0.9:  # below the least rate
        assert got.span_s == pytest.approx(max(work + take * transfer, transfer), rel=1e-15)


def test_two_transfers_on_one_link_take_twice_as_long_each():
    got = replay(one_rank([1, 2], [1.0, 1.0], loads=[[1, 0], [1, 0]]))
    assert got.end.tolist() == [2.0, 2.0]


def test_a_link_that_carries_both_slows_neither():
    assert replay(one_rank([1, 2], [1.0, 3.0], loads=[[0.5, 0], [0.5, 1]])).end.tolist() == [1.0, 3.0]


def test_the_fullest_link_decides_and_what_is_left_runs_alone():
    got = replay(one_rank([1, 2], [1.0, 3.0], loads=[[0.5, 1.0], [1.0, 1.0]]))
    assert got.end.tolist() == [2.0, 4.0]  # both at 1/2 by the second link; then 2 s of work alone


def test_links_of_one_rank_are_not_those_of_another():
    streams = [Stream(device=0, name="dp"), Stream(device=1, name="dp")]
    both = Tasks.of(devices=[RANK, RANK], streams=streams, stream=[0, 1], seconds=[1, 1], loads=[[1, 0], [1, 0]])
    assert replay(both).end.tolist() == [1.0, 1.0]


def test_a_host_that_launches_slowly_decides_when_kernels_start():
    got = replay(one_rank([0, 0, 0], [1.0, 1.0, 1.0], launch_s=[3.0, 3.0, 3.0]))
    assert got.start.tolist() == [3.0, 6.0, 9.0]
    assert got.host_s.tolist() == [3.0, 2.0, 2.0]
    assert critical_path(got).seconds == {"other": 3.0, "host": 7.0, "contention": 0.0, "idle": 0.0}


def test_a_host_that_is_ahead_costs_its_first_launch_only():
    assert replay(one_rank([0, 0, 0], [5.0, 5.0, 5.0], launch_s=[1.0, 1.0, 1.0])).end.tolist() == [6.0, 11.0, 16.0]


def test_a_gate_holds_the_host_until_its_inputs_are_there():
    free = one_rank([1, 0, 0], [10.0, 1.0, 1.0], [(0, 1), (1, 2)], launch_s=[0, 2.0, 2.0])
    gated = one_rank([1, 0, 0], [10.0, 1.0, 1.0], [(0, 1), (1, 2)], launch_s=[0, 2.0, 2.0], gates=[0, 1, 0])
    assert replay(free).start.tolist() == [0.0, 10.0, 11.0]  # launched at 2 and 4, ahead of the inputs
    assert replay(gated).start.tolist() == [0.0, 12.0, 14.0]


def test_launches_of_two_streams_share_one_host_in_order_of_readiness():
    got = replay(one_rank([1, 0], [1.0, 1.0], launch_s=[2.0, 2.0]))
    assert got.start.tolist() == [2.0, 4.0]
    assert replay(one_rank([0, 1], [1.0, 1.0], launch_s=[2.0, 2.0])).start.tolist() == [2.0, 4.0]


def test_a_task_that_waits_for_its_launch_loads_no_link_yet():
    got = replay(one_rank([1, 2], [1.0, 1.0], loads=[[1, 0], [1, 0]], launch_s=[0, 1.0]))
    assert got.start.tolist() == [0.0, 1.0]
    assert got.end.tolist() == [1.0, 2.0]


def test_a_stream_serves_first_come_first_and_lowest_index_within_an_instant():
    got = replay(one_rank([1, 0, 0, 0], [1.0, 3.0, 1.0, 1.0], [(0, 2)]))
    assert got.start.tolist() == [0.0, 0.0, 4.0, 3.0]  # task 3 waits since 0, task 2 since 1


def test_a_measured_link_serves_one_message_at_a_time():
    links = [Device(name="worker 0"), Device(name="worker 1"), Device(name="link 0 -> 1")]
    streams = [Stream(device=0, name="gpu", computes=True), Stream(device=1, name="gpu", computes=True)]
    streams.append(Stream(device=2, name="link"))
    # Worker 0 makes gradients at 2 and 4; the link takes 3 s a message; worker 1 uses both.
    chain = Tasks.of(
        devices=links, streams=streams, stream=[0, 0, 2, 2, 1], seconds=[2.0, 2.0, 3.0, 3.0, 1.0],
        edges=[(0, 1), (0, 2), (1, 3), (2, 4), (3, 4)],
    )  # fmt: skip
    got = replay(chain)
    assert got.start.tolist() == [0.0, 2.0, 2.0, 5.0, 8.0]
    assert got.blame.tolist() == [-1, 0, 0, 2, 3]
    assert critical_path(got).tasks.tolist() == [0, 2, 3, 4]


def test_the_release_of_a_task_is_nobodys_fault():
    got = replay(one_rank([0, 0], [1.0, 1.0], [(0, 1)]), ready=np.array([0.0, 5.0]))
    assert got.start.tolist() == [0.0, 5.0]
    assert got.blame.tolist() == [-1, -1]
    assert critical_path(got).seconds == {"other": 1.0, "host": 0.0, "contention": 0.0, "idle": 5.0}


def test_tasks_of_no_length_pass_in_their_instant():
    n = 50
    got = replay(one_rank([i % 3 for i in range(n)], [0.0] * n, [(i, i + 1) for i in range(n - 1)], takes=[0.1] * n))
    assert got.end.tolist() == [0.0] * n
    assert got.blame.tolist() == list(range(-1, n - 1))


def test_a_task_alone_takes_its_seconds_to_the_bit():
    rng = np.random.default_rng(3)
    seconds = rng.uniform(1e-7, 1e-3, 1000)
    got = replay(one_rank([0] * 1000, seconds, takes=[0.5] * 1000))  # what compute takes slows nobody
    assert (got.end == got.start + seconds).all()
    assert got.start[1:].tolist() == got.end[:-1].tolist()


def test_work_far_below_the_clocks_precision_ends():
    tiny = one_rank([0, 1, 2] * 20, [1e9, 1e-9, 3e-9] * 20, takes=[0, 0.3, 0.3] * 20, loads=[[1, 1]] * 60)
    assert np.isfinite(replay(tiny).end).all()


def test_a_crowd_that_is_ready_backwards_leaves_in_order():
    n = 20_000
    crowd = one_rank([0] * n, [1.0] * n, [(n - 1, i) for i in reversed(range(n - 1))])
    assert replay(crowd).start[:-1].tolist() == list(range(1, n))


def test_a_device_of_nothing_and_a_graph_of_nothing_replay():
    empty = Tasks.of(devices=[RANK], streams=[], stream=[], seconds=[])
    got = replay(empty)
    assert got.span_s == 0.0
    assert critical_path(got).seconds == {"host": 0.0, "contention": 0.0, "idle": 0.0}
    assert exposed(got).total == {}
    assert memory(got).peak.tolist() == [0.0]
    nothing = replay(one_rank([0], [1.0]), only=np.array([False]))
    assert nothing.span_s == 0.0
    assert len(critical_path(nothing).tasks) == 0


# ------------------------------------------------------------------------------------------------------- refusals


def test_tasks_in_a_circle_are_named():
    circle = one_rank([0] * 5, [1.0] * 5, [(1, 2), (2, 3), (3, 1), (3, 4), (0, 1)], names=list("abcde"))
    with pytest.raises(ValueError, match=r"in a circle, but 'b', 'c', 'd' do|'c', 'd', 'b' do|'d', 'b', 'c' do"):
        replay(circle)
    with pytest.raises(ValueError, match=r"circle, but 'a' do; remove an edge"):
        replay(one_rank([0], [1.0], [(0, 0)], names=["a"]))


def test_a_circle_outside_the_part_holds_nobody_up():
    circle = one_rank([0] * 3, [1.0] * 3, [(0, 1), (1, 0), (1, 2)])
    assert replay(circle, only=np.array([False, False, True])).end[2] == 1.0


@pytest.mark.parametrize(
    ("columns", "law"),
    [
        ({"seconds": [1.0, -1.0]}, r"seconds must be a number of at least 0, but is -1.0 for task 'task 1'"),
        ({"seconds": [np.nan, 1.0]}, r"seconds must .* nan for task 'task 0'"),
        ({"seconds": [np.inf, 1.0]}, r"seconds must .* inf for task 'task 0'"),
        ({"launch_s": [0.0, -1.0]}, r"launch_s must .* 'task 1'"),
        ({"takes": [0.0, np.nan]}, r"takes must .* 'task 1'"),
        ({"loads": [[0.0, 0.0], [0.0, -1.0]]}, r"loads must .* 'task 1'"),
        ({"alloc_bytes": [-1.0, 0.0]}, r"alloc_bytes must .* 'task 0'"),
        ({"shield": [0, 99]}, r"shield must be an index below 9, but is 99 for task 1"),
        ({"edges": [(0, 2)]}, r"after must be a task from 0 to 1, but is 2 on edge 'task 0' -> 'task 2'"),
        ({"edges": [(-1, 1)]}, r"before must be a task from 0 to 1, but is -1"),
        ({"micro_batch": [3, 3], "seconds": [-1.0, 1.0]}, r"'task 0 of micro-batch 3'"),
    ],
)
def test_values_that_cannot_be_run_are_refused_by_name(columns, law):
    with pytest.raises(ValueError, match=law):
        replay(one_rank([0, 0], **{"seconds": [1.0, 1.0], **columns}))


@pytest.mark.parametrize(
    ("columns", "law"),
    [
        ({"takes": np.zeros(1)}, r"takes must have a value for each of 2 tasks, but is \[1\]"),
        ({"loads": np.zeros(2)}, r"loads must be \[2 tasks, links\], but is \[2\]"),
        (
            {"before": np.zeros(3, np.int64)},
            r"before and after must be one task each per edge, but are \[3\] and \[0\]",
        ),
    ],
)
def test_columns_of_another_length_are_refused(columns, law):
    with pytest.raises(ValueError, match=law):
        replay(replace(one_rank([0, 0], [1.0, 1.0]), **columns))


def test_masks_and_ready_times_that_do_not_fit_are_refused():
    two = one_rank([0, 0], [1.0, 1.0])
    with pytest.raises(ValueError, match="only must be 2 booleans"):
        replay(two, only=np.array([0, 1]))
    with pytest.raises(ValueError, match="ready must be 2 seconds"):
        replay(two, ready=np.zeros(3))
    with pytest.raises(ValueError, match="ready must be a number .* 'task 1'"):
        replay(two, ready=np.array([0.0, np.nan]))


def test_streams_that_are_nowhere_are_refused():
    with pytest.raises(ValueError, match="task 1 is on 3; add the stream"):
        one_rank([0, 3], [1.0, 1.0])
    lost = Tasks.of(devices=[RANK], streams=[Stream(device=1, name="x")], stream=[0], seconds=[1.0])
    with pytest.raises(ValueError, match="stream 'x' .0. must be of one of 1 devices, but is of 1"):
        replay(lost)


def test_what_blocks_is_blamed_for_its_stretch():
    got = replay(one_rank([0, 1], [4.0, 2.0], takes=[0, 0.5], category=[Category.FORWARD, Category.TP]))
    assert got.end.tolist() == [5.0, 2.0]
    assert critical_path(got).seconds == {"forward": 4.0, "host": 0.0, "contention": 1.0, "idle": 0.0}
