"""Buckets of the experts' own: two streams instead of one, each with its pieces, latencies and last bucket."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.compose import Constants, Net
from estimator.cost.overlap import SLOWDOWN
from estimator.gradients import bucket_terms, bucketed_terms, gather_wire, gradient_wire
from estimator.precision import recipe
from estimator.strategy import Overlap, Strategy
from estimator.tables import constants_of
from tests.estimator.cases import LLAMA, MIXTRAL, h100, step

ON = Overlap(dp=1)
MOE = Strategy(ep=8, overlap=ON, bucket_bytes=40_000_000)
NET = np.zeros(len(Net))
NET[:6] = [32.0, 2e-11, 3e-5, 4.0, 5e-11, 7e-5]  # DP, per byte, latency; the same of EDP
NET[[Net.SHARDS, Net.SHARD_PER_BYTE, Net.SHARD_LATENCY]] = NET[:3]  # no replicas
NET[[Net.ESHARDS, Net.ESHARD_PER_BYTE, Net.ESHARD_LATENCY]] = NET[3:6]
D, E, MB = 3e8, 2e9, 1e6


def constants(expert_bucket=None) -> Constants:
    return constants_of(h100(64), recipe("bf16"), expert_bucket)


def test_one_stream_is_what_it_was():
    c = constants()
    for zero in range(4):
        pieces = max(np.ceil(c.grad_bytes * (D + E) / (40 * MB)), 1.0)
        wanted = (*bucket_terms(*gradient_wire(D, E, zero, NET, c), pieces),
                  *bucket_terms(*gather_wire(D, E, zero, NET, c), pieces))  # fmt: skip
        assert bucketed_terms(D, E, zero, 40 * MB, NET, c) == wanted


@pytest.mark.parametrize(("zero", "scatters", "gathers"), [(0, 2, 0), (1, 1, 1), (2, 0, 1), (3, 0, 0)])
def test_two_streams_pay_their_own_pieces_and_expose_both_last_buckets(zero, scatters, gathers):
    c = constants(400_000_000)
    d, e = np.ceil(c.grad_bytes * D / (40 * MB)), np.ceil(c.grad_bytes * E / (400 * MB))
    told = bucketed_terms(D, E, zero, 40 * MB, NET, c)
    for times, width, (total, least) in ((scatters, c.grad_bytes, told[:2]), (gathers, c.gather_bytes, told[2:])):
        dense = times * (width * D * NET[1] + d * NET[2])
        expert = times * (width * E * NET[4] + e * NET[5])
        tail = dense / d + expert / e
        assert total == pytest.approx(dense + expert, rel=1e-12)
        assert least == pytest.approx(tail + SLOWDOWN * (dense + expert - tail), rel=1e-12)


def test_a_rank_without_experts_sends_nothing_of_theirs():
    own = bucketed_terms(D, 0.0, 1, 40 * MB, NET, constants(400_000_000))
    c = constants()
    latency = NET.copy()
    latency[[5, Net.ESHARD_LATENCY]] = 0.0
    assert own == pytest.approx(bucketed_terms(D, 0.0, 1, 40 * MB, latency, c), rel=1e-12)


def test_two_more_buckets_are_in_flight():
    joint, own = step(MIXTRAL, MOE, 64), step(MIXTRAL, replace(MOE, expert_bucket_bytes=10_000_000), 64)
    assert {s.memory["buckets"] for s in joint.stages} == {2 * 40e6}
    assert {s.memory["buckets"] for s in own.stages} == {2 * 40e6 + 2 * 10e6}
    whole = step(MIXTRAL, replace(MOE, expert_bucket_bytes=0), 64)
    assert {s.memory["buckets"] for s in whole.stages} == {2 * 40e6}


def test_a_small_bucket_of_experts_exposes_less_of_their_gradients():
    small, all_at_once = (
        step(MIXTRAL, replace(MOE, expert_bucket_bytes=n), 64).exposed_comm_dp_s for n in (40_000_000, 0)
    )
    assert small < all_at_once


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (LLAMA, Strategy(overlap=ON)),
        (MIXTRAL, replace(MOE, overlap=Overlap())),
        (MIXTRAL, replace(MOE, zero_stage=3)),
    ],
    ids=["no experts", "no overlap", "ZeRO-3"],
)
def test_where_nothing_is_bucketed_it_changes_nothing(model, strategy):
    a, b = step(model, strategy, 64), step(model, replace(strategy, expert_bucket_bytes=7), 64)
    assert a.columns == b.columns
