"""Alignment recovers offsets that were injected, and says what it cannot know."""

from __future__ import annotations

import json
import tarfile
import time
from dataclasses import replace

import numpy as np
import pytest

from capture.align import Mode, align, moved, solve, variance
from capture.traces.bounds import Messages
from capture.traces.dfg import build
from capture.traces.records import Kind
from capture.traces.replay import replay_trace
from tests.capture.traces.jobs import messages, no_ends
from tests.capture.traces.made import collective, compute, fine, recv, send, shifted, trace

US = 1e-6
INJECTED = (0.0, 0.041, -0.05, 0.017, -0.033, 0.05, -0.008, 0.029)


def exchange(forth_s=0.010, back_s=0.010, fast_s=0.003, only_forth=False):
    """Two ranks, the second's clock fast by `fast_s`, that send each other one message."""
    pairs = [("a", 0, 1.0, 1.0 + forth_s)] + ([] if only_forth else [("b", 1, 2.0, 2.0 + back_s)])
    rows = {0: [], 1: []}
    for text, source, start, end in pairs:
        rows[source].append(send(text, start, end, 1 - source, nbytes=8.0))
        rows[1 - source].append(recv(text, start + 0.001, end, source, nbytes=8.0))
    return shifted([trace(rank, events, world=2) for rank, events in rows.items()], (0.0, fast_s))


def test_two_messages_of_equal_size_give_the_offset_and_its_interval_exactly():
    found = align(exchange())
    assert found.offset_s == pytest.approx([0.0, -0.003], abs=1e-9)
    assert found.low_s[1] == pytest.approx(-0.013)
    assert found.high_s[1] == pytest.approx(0.007)
    assert found.identifiable.all()
    assert found.mode is Mode.MESSAGES


def test_one_way_alone_leaves_a_side_open_and_is_not_called_identifiable():
    found = align(exchange(only_forth=True))
    assert np.isinf(found.high_s[1])
    assert np.isfinite(found.low_s[1])
    assert found.identifiable.tolist() == [True, False]


def test_clocks_that_contradict_are_refused():
    with pytest.raises(ValueError, match=r"constant clock offsets, .* 2000\.0 us before they are sent") as refusal:
        align(exchange(forth_s=0.010, back_s=-0.012))
    assert "\n" not in str(refusal.value)


def test_moved_traces_need_no_more_moving():
    once = moved(exchange(), align(exchange()))
    assert align(once).offset_s == pytest.approx([0.0, 0.0], abs=2e-9)
    assert once[1].notices == ("clock of rank 1 moved by -3000.0 us, feasible -13000.0 to +7000.0 us",)
    again = moved(once, align(once))
    assert len(again[1].notices) == 1


def test_nodes_of_one_machine_share_its_clock():
    traces = [replace(t, machine="one") for t in exchange(forth_s=0.010, back_s=0.011, fast_s=0.0)]
    apart = align(traces, same_machine=False).offset_s[1]
    assert apart == pytest.approx(0.0005, abs=1e-6)
    assert abs(align(traces).offset_s[1]) < 0.05 * apart


def ends(late_s=(0.0, 0.0)):
    """Three ranks, eight all-reduces; ends agree but for the last two, of which the third rank is late."""
    rows = [
        [collective("all_reduce", k + 0.1 * rank, k + 0.5 + (late_s[k - 6] if rank == 2 and k > 5 else 0.0))
         for k in range(8)] for rank in range(3)
    ]  # fmt: skip
    return shifted([trace(rank, events, world=3) for rank, events in enumerate(rows)], INJECTED[:3])


@pytest.mark.parametrize("late_s", [(0.0, 0.0), (0.01, 0.02)])
def test_collectives_alone_are_aligned_by_their_ends_whatever_a_few_do(late_s):
    found = align(ends(late_s))
    assert found.mode is Mode.EQUAL_ENDS
    assert found.offset_s == pytest.approx([-o for o in INJECTED[:3]], abs=1e-8)
    assert (found.low_s < found.offset_s + 1e-9).all()
    assert (found.offset_s - 1e-9 < found.high_s).all()


def test_a_broadcast_says_nothing_of_ends():
    traces = [trace(r, [collective("broadcast", 0.0, 1.0)], world=2) for r in range(2)]
    with pytest.raises(ValueError, match="aligned by transfers between ranks, but there are none"):
        align(traces)


@pytest.mark.parametrize(
    ("traces", "what"),
    [
        ([exchange()[0]], r"rank0.jsonl: clocks are aligned for all ranks, but rank 1 is missing"),
        ([trace(r, [compute("FW", 0.0, 1.0)], world=2) for r in range(2)], "but there are none; record communication"),
    ],
)
def test_what_cannot_be_aligned_is_refused(traces, what):
    with pytest.raises(ValueError, match=what):
        align(traces)


def test_a_solver_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"'NONE' is not; have .*CLARABEL"):
        align(exchange(), solver="NONE")


def test_one_rank_needs_no_alignment():
    assert align([trace(0, [compute("FW", 0.0, 1.0)])]).mode is Mode.ONE_NODE


@pytest.mark.parametrize("servers", [0, 4])
@pytest.mark.parametrize("num", [16, 64, 128])
def test_synthetic_jobs_are_aligned_within_50_us_in_5_s(num, servers):
    theta, observed = messages(num, 20_000, servers=servers)
    start = time.perf_counter()
    found = solve(tuple(range(num)), observed, no_ends(num), [None] * num)
    assert time.perf_counter() - start < 5.0
    assert np.abs(found.offset_s - theta).max() < 50 * US
    assert found.identifiable.all()


@pytest.mark.parametrize("num", [64, 128])
def test_machines_of_eight_nodes_help_to_align_a_long_ring(num):
    theta, observed = messages(num, 20_000, per_machine=8)
    machines = [f"machine {r // 8}" for r in range(num)]
    found = solve(tuple(range(num)), observed, no_ends(num), machines)
    assert np.abs(found.offset_s - theta).max() < 15 * US
    alone = solve(tuple(range(num)), observed, no_ends(num), [None] * num)
    assert np.abs(found.offset_s - theta).max() < np.abs(alone.offset_s - theta).max()


def test_the_shipped_ring_is_aligned_within_100_us_of_its_one_clock(shared):
    traces = fine(shared, "ring4_400mbit", 4)
    found = align(shifted(traces, INJECTED[:4]))
    assert np.abs(found.offset_s + INJECTED[:4]).max() < 100 * US
    assert found.identifiable.all()


def test_without_alignment_a_replay_is_off(shared):
    traces = fine(shared, "ring4_400mbit", 4)
    truth = build(traces).iteration_s()
    injected = shifted(traces, INJECTED[:4])
    off = {}
    for name, job in (("raw", injected), ("aligned", moved(injected, align(injected)))):
        off[name] = abs(replay_trace(build(job)).replayed_s.mean() / truth.mean() - 1.0)
    assert off["aligned"] < 0.002
    assert off["raw"] > 0.05


def dlrm(shared):
    """The NCCL kernels of all eight ranks, by order; machines are not told."""
    found = {}
    with tarfile.open(shared / "traces" / "param" / "dlrm_kineto.tar.gz") as archive:
        for member in archive:
            if member.isfile():
                data = json.load(archive.extractfile(member))
                found[data["distributedInfo"]["rank"]] = [
                    e for e in data["traceEvents"] if e.get("cat") == "kernel" and e["name"].startswith("nccl")
                ]
    zero = min(e["ts"] for events in found.values() for e in events)
    return [
        trace(rank, [
            (Kind.COLLECTIVE, "nccl", e["name"], (e["ts"] - zero) * US, (e["ts"] - zero + e["dur"]) * US, {})
            for e in sorted(events, key=lambda e: e["ts"])
        ], world=8)
        for rank, events in sorted(found.items())
    ]  # fmt: skip


def test_eight_gpus_are_aligned_within_20_us_by_their_collectives_alone(shared):
    traces = dlrm(shared)
    rest = align(traces).offset_s  # on one host's clock: what is left is how well ends agree
    found = align(shifted(traces, INJECTED))
    assert np.abs(found.offset_s + INJECTED).max() < 20 * US
    assert found.offset_s + INJECTED == pytest.approx(rest, abs=1e-7)
    assert found.identifiable.all()
    assert (found.high_s - found.low_s < 300 * US).all()


def alike(delta_s, *, seed=0):
    """Two nodes, the second's clock fast by `delta_s`, whose messages all take as long.

    In half of the messages the sender is late, in half the receiver; all take 1 ms once both are there.
    """
    rng = np.random.default_rng(seed)
    num = 400
    source = np.arange(num) % 2
    when = 0.1 * np.arange(num)
    late = np.where(np.arange(num) % 4 < 2, 0.005, 0.0)
    sent, posted = when + late, when + 0.005 - late
    end = np.maximum(sent, posted) + 1e-3 + rng.normal(0.0, 1e-6, num)
    clock = np.array([0.0, delta_s])
    return Messages(
        source=source, target=1 - source, family=source, nbytes=np.full(num, 8.0), sent_s=sent + clock[source],
        posted_s=posted + clock[1 - source], end_s=end + clock[1 - source],
    )  # fmt: skip


@pytest.mark.parametrize("delta_s", [0.0, 0.0003, -0.0002])
def test_alike_receives_of_both_branches_pin_the_offset(delta_s):
    source, target, weight, wanted = variance(alike(delta_s), np.zeros(2))
    assert source.tolist() == [0, 1]
    assert target.tolist() == [1, 0]
    assert (weight > 0).all()
    assert wanted == pytest.approx([-delta_s, delta_s], abs=1e-6)
