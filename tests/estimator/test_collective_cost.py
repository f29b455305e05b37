"""Seconds of collectives against their closed forms, on links whose numbers are round."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.cost.collective import collective, point_to_point, scalar_all_reduce_latency
from estimator.op import Traffic
from hardware.link import LinkSpec
from hardware.system import UNBOUNDED, Tier
from tests.estimator.cases import h100

FAST = LinkSpec(name="fast", bytes_per_s=400e9, latency_s=1e-6, efficiency=1.0, source="test")
NIC = LinkSpec(name="nic", bytes_per_s=50e9, latency_s=5e-6, efficiency=1.0, source="test")
CLUSTER = replace(
    h100(4096), tiers=(Tier(name="node", span=8, link=FAST), Tier(name="fabric", span=UNBOUNDED, link=NIC))
)
V = 1e9
MOVING = [t for t in Traffic if t is not Traffic.COPY]
AR, AG, RS, A2A, RING = (
    Traffic.ALL_REDUCE, Traffic.ALL_GATHER, Traffic.REDUCE_SCATTER, Traffic.ALL_TO_ALL, Traffic.RING
)  # fmt: skip


def seconds(kind, size, stride=1.0, nbytes=V, system=CLUSTER, **options):
    return collective(kind, system, float(size), float(stride), **options).seconds(nbytes)


@pytest.mark.parametrize("kind", list(Traffic))
@pytest.mark.parametrize("stride", [1, 8, 64])
def test_one_rank_talks_to_nobody_for_nothing(kind, stride):
    assert seconds(kind, 1, stride) == 0.0
    assert seconds(kind, 1, stride, fanout=8.0, max_domains=4) == 0.0


def test_a_copy_is_free():
    assert seconds(Traffic.COPY, 8) == 0.0


@pytest.mark.parametrize(("size", "stride"), [(2, 1), (8, 1), (16, 1), (64, 1), (4, 2), (32, 8), (16, 4)])
def test_all_reduce_is_reduce_scatter_then_all_gather(size, stride):
    assert seconds(AR, size, stride) == seconds(RS, size, stride) + seconds(AG, size, stride)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_ring_in_a_node_moves_n_minus_1_nths_of_the_buffer(size):
    """Thakur 2005, doi:10.1177/1094342005051521, section 4.1: (n-1) alpha + (n-1)/n V beta."""
    for kind in (AG, RS, RING):
        assert seconds(kind, size) == pytest.approx((size - 1) * 1e-6 + (size - 1) / size * V / 400e9, rel=1e-14)


@pytest.mark.parametrize("size", [2, 16, 128])
def test_a_group_with_one_rank_a_node_has_one_nic(size):
    want = (size - 1) * 5e-6 + (size - 1) / size * V / 50e9
    assert seconds(AG, size, stride=8) == pytest.approx(want, rel=1e-14)


def test_a_group_that_fills_its_nodes_has_all_their_nics():
    """16 ranks on two nodes: 8 NICs carry the ring, as fast as the links inside; of its 15 hops 14 are inner ones."""
    assert seconds(AG, 16) == pytest.approx(14 * 1e-6 + 1 * 5e-6 + 15 / 16 * V / 400e9, rel=1e-14)


@pytest.mark.parametrize(("per_node", "stride"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_bandwidth_between_nodes_grows_with_the_ranks_a_group_has_in_each(per_node, stride):
    size = 4 * per_node
    cost = collective(AG, CLUSTER, float(size), float(stride))
    assert cost.per_byte == pytest.approx((size - 1) / size / (50e9 * per_node), rel=1e-14)


def test_an_all_to_all_sends_each_rank_its_share_over_its_own_link():
    """16 ranks: 8/16 of the buffer leaves the node through one NIC, 7/16 stays inside."""
    assert collective(A2A, CLUSTER, 16.0, 1.0).per_byte == 8 / 16 / 50e9
    assert collective(A2A, CLUSTER, 8.0, 1.0).per_byte == 7 / 8 / 400e9


def test_node_limited_routing_caps_what_leaves_the_node():
    """top-8 rows over 8 nodes, at most 4 of them: 4/8 of the rows cross, less those whose node is their own."""
    free = collective(A2A, CLUSTER, 64.0, 1.0, fanout=8.0).per_byte
    capped = collective(A2A, CLUSTER, 64.0, 1.0, fanout=8.0, max_domains=4).per_byte
    assert free == 56 / 64 / 50e9
    assert capped == pytest.approx(4 / 8 * 7 / 8 / 50e9, rel=1e-14)


def test_a_limit_wider_than_the_job_changes_nothing():
    assert seconds(A2A, 16, fanout=8.0, max_domains=8) == seconds(A2A, 16, fanout=8.0)


def test_rows_from_other_nodes_are_passed_on_inside():
    """With fabric as fast as the node, 7/8 of every row crosses the inner links once."""
    even = replace(CLUSTER, tiers=(CLUSTER.tiers[0], replace(CLUSTER.tiers[1], link=FAST)))
    cost = collective(A2A, even, 64.0, 1.0, fanout=8.0, max_domains=1)
    assert cost.per_byte == pytest.approx(7 / 8 / 400e9, rel=1e-14)


def test_switches_that_reduce_in_flight_speed_up_all_reduce_alone():
    system = h100(8)
    assert seconds(AR, 8, system=system) < seconds(RS, 8, system=system) + seconds(AG, 8, system=system)


@given(
    st.sampled_from(MOVING), st.integers(0, 9), st.integers(0, 9), st.floats(0, 1e10), st.floats(0, 1e10),
)  # fmt: skip
def test_time_grows_with_bytes_and_is_never_below_the_wire(kind, size, stride, a, b):
    n, s = 2.0**size, 2.0**stride
    low, high = sorted((a, b))
    assert seconds(kind, n, s, low) <= seconds(kind, n, s, high)
    factor = 2 if kind is AR else 1
    if kind is not A2A:
        assert seconds(kind, n, s, high) >= factor * (n - 1) / n * high / 400e9 * (1 - 1e-14)


@given(st.sampled_from(MOVING), st.integers(0, 8), st.integers(0, 9))
def test_time_grows_with_the_ranks_of_a_group(kind, size, stride):
    """Doubling a group at the same stride, whole domains each time."""
    assert seconds(kind, 2.0 ** (size + 1), 2.0**stride) >= seconds(kind, 2.0**size, 2.0**stride)


@given(st.integers(0, 9), st.floats(1, 1e9))
def test_the_next_stage_is_one_hop_away_on_the_innermost_tier_that_holds_both(stride, nbytes):
    link = FAST if 2**stride < 8 else NIC
    want = nbytes / link.bytes_per_s + link.latency_s
    assert point_to_point(CLUSTER, 2.0**stride).seconds(nbytes) == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("kind", MOVING)
def test_arrays_and_numbers_give_the_same_bits(kind):
    grid = [(2.0**n, 2.0**s) for n in range(10) for s in range(8)] + [(3.0, 1.0), (12.0, 4.0), (24.0, 1.0)]
    sizes, strides = (np.array(x) for x in zip(*grid, strict=True))
    many = collective(kind, CLUSTER, sizes, strides, fanout=8.0, max_domains=4)
    for i, (n, s) in enumerate(grid):
        one = collective(kind, CLUSTER, n, s, fanout=8.0, max_domains=4)
        assert (one.per_byte, one.latency_s) == (many.per_byte[i], many.latency_s[i])


def test_a_few_bytes_over_the_job_take_a_trees_hops():
    assert scalar_all_reduce_latency(CLUSTER) == 2 * math.log2(4096) * 5e-6
    assert scalar_all_reduce_latency(replace(CLUSTER, num_chips=1)) == 0
