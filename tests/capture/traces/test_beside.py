"""What transfers and compute of a host cost each other is found again in recordings that were made with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from capture.traces.beside import Delays, bytes_beside, delayed, delays_of, host_s_per_byte, left_of, usual_messages
from capture.traces.dfg import build
from capture.traces.operations import Op
from capture.traces.records import Topology
from capture.traces.synthesise import Bucket, Link, Wire, synthesise
from capture.traces.what_if import link_of
from tests.capture.traces.made import fine
from tests.capture.traces.test_synthesise import job


@pytest.fixture(scope="module")
def ring(shared):
    """Messages of four ranks, some beside backward passes."""
    return build(fine(shared, "ring4_400mbit", 4), hosts=False)


def test_all_bytes_of_a_rank_are_beside_what_spans_them(ring):
    spans = replace(ring, start_s=ring.start_s.copy(), end_s=ring.end_s.copy())
    computes = np.flatnonzero(ring.is_op(Op.COMPUTE))
    one = computes[ring.node[computes] == 0][0]
    spans.start_s[one], spans.end_s[one] = ring.start_s.min(), ring.end_s.max()
    came = ring.nbytes[ring.is_op(Op.RECV) & (ring.node == 0)].sum()
    assert bytes_beside(spans)[one] == pytest.approx(came)
    assert (bytes_beside(ring)[~ring.is_op(Op.COMPUTE)] == 0.0).all()


@pytest.mark.parametrize("cost", [0.0, 1e-9, 3e-9])
@pytest.mark.parametrize("pace", [1.0, 1.2])
def test_what_a_byte_costs_is_found_from_a_job_alone_on_a_machine_of_any_pace(ring, cost, pace):
    computes, beside = ring.is_op(Op.COMPUTE), bytes_beside(ring)
    even = ring.seconds.copy()
    for name in np.unique(ring.name[computes]):
        mine = computes & (ring.name == name)
        even[mine] = np.median(ring.seconds[mine])
    slowed = replace(ring, seconds=np.where(computes, pace * even + cost * beside, ring.seconds))
    alone = replace(ring, seconds=np.where(computes, even, ring.seconds))
    assert host_s_per_byte(slowed, alone) == pytest.approx(cost, abs=1e-15)


def test_a_job_alone_that_computes_something_else_is_refused(ring):
    other = replace(ring, names=tuple(f"other {name}" for name in ring.names))
    with pytest.raises(ValueError, match="no operation has the same name"):
        host_s_per_byte(ring, other)


def test_no_compute_loses_more_than_most_of_itself():
    assert left_of(np.array([1.0, 1.0]), np.array([0.0, 9.0]), 0.5).tolist() == [1.0, 0.1]


def test_the_usual_message_of_a_size_is_deaf_to_those_that_waited(ring):
    size, usual = usual_messages(ring)
    late = replace(ring, seconds=ring.seconds.copy())
    late.seconds[np.flatnonzero(ring.is_op(Op.RECV))[::7]] += 1.0
    assert usual_messages(late)[1].mean() == pytest.approx(usual.mean(), rel=0.05)  # the mean rises by a seventh of 1 s
    assert len(size) == len(usual)
    link = link_of(ring)[0]
    assert 8 * link.bytes_per_s == pytest.approx(400e6, rel=0.05)


def test_delays_are_what_the_link_does_not_say(ring):
    link, number = link_of(ring)[0], ring.iterations[0]
    found = delays_of(ring, number, link, ring.seconds + ring.lag_s)
    mine = ring.is_op(Op.RECV) & (ring.iteration == number)
    beyond = (ring.seconds + ring.lag_s)[mine] - link.latency_s - ring.nbytes[mine] / link.bytes_per_s
    assert sorted([*found.quiet_s, *found.busy_s]) == pytest.approx(sorted(beyond))
    busy = replace(ring, start_s=ring.start_s.copy(), end_s=ring.end_s.copy())
    computes = np.flatnonzero(ring.is_op(Op.COMPUTE))
    for rank in range(4):
        one = computes[ring.node[computes] == rank][0]
        busy.start_s[one], busy.end_s[one] = ring.start_s.min(), ring.end_s.max()
    assert len(delays_of(busy, number, link, ring.seconds + ring.lag_s).quiet_s) == 0


def test_transfers_beside_compute_are_delayed_as_such_were_and_their_hosts_pay_for_bytes_alone():
    link = Link(bytes_per_s=1.0, host_s_per_byte=0.25)
    # Leaves at 1 s, beside compute until 3 s; the second message is behind the update's wait.
    made = synthesise(job(), [Bucket(nbytes=3.0, op=0, names=())], Wire(topology=Topology.RING, link=link))
    found = delayed(made, Delays(quiet_s=np.array([0.5]), busy_s=np.array([1.5])), 0)
    moves = made.bucket >= 0
    assert made.tasks.seconds[moves].tolist() == [1.5] * 4
    assert sorted(found.tasks.seconds[moves].tolist()) == [2.0, 2.0, 3.0, 3.0]
    cost = found.tasks.takes[moves] * found.tasks.seconds[moves]
    assert cost == pytest.approx(1.5 * 0.25)


def test_nothing_is_delayed_where_nothing_is_known():
    made = synthesise(
        job(), [Bucket(nbytes=3.0, op=0, names=())], Wire(topology=Topology.RING, link=Link(bytes_per_s=1.0))
    )
    assert delayed(made, Delays(quiet_s=np.zeros(0), busy_s=np.zeros(0)), 0) is made
