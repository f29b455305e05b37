"""What a transfer costs and which links it loads, one at a time. The replay's view of estimator/cost/collective.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from estimator.compose import Net
from estimator.cost.collective import (
    Linear,
    collective,
    nested_members,
    point_to_point,
    point_to_point_loads,
    tier_loads,
)
from estimator.cost.overlap import SLOWDOWN, Side, side
from estimator.groups import size_and_stride
from estimator.op import Op, Traffic
from estimator.strategy import Strategy
from estimator.tables import NET_SIZES, gradient_groups, group_costs, replica_group, twin_groups
from hardware.system import SystemSpec

__all__ = ["GradientTraffic", "Transfer", "stage_hop", "transfer_of"]


class Transfer(NamedTuple):
    """Seconds alone; share of each tier's link [T]; share of the chip's compute that it takes while it runs."""

    seconds: float
    loads: np.ndarray
    takes: float


def transfer_of(op: Op, s: Strategy, system: SystemSpec, pieces: int = 1) -> Transfer:
    """One of `pieces` equal parts of a collective op; each part pays its latency.

    Copies of keys and values in a ring, and of a gather ahead of its GEMMs, are moved by copy engines and take no
    compute (as the estimate has it).
    """
    assert op.collective is not None
    assert op.group is not None
    if op.collective is Traffic.COPY:
        return Transfer(0.0, np.zeros(system.num_tiers), 0.0)
    size, stride = size_and_stride(op.group, s)
    cost = collective(
        op.collective, system, float(size), float(stride), fanout=op.fanout, max_domains=op.max_domains
    )  # fmt: skip
    loads = tier_loads(
        op.collective, system, system.members(float(size), float(stride)), fanout=op.fanout,
        max_domains=op.max_domains,
    )  # fmt: skip
    if op.collective is Traffic.RING:  # its parts are the hops round the ring, each of which pays its own latency
        cost = Linear(cost.per_byte, float(cost.latency_s) / pieces)
        return _transfer(cost, float(op.payload) / pieces, loads, 0.0)
    copied = bool(op.partners) and side(op) is Side.AHEAD
    return _transfer(cost, float(op.payload) / pieces, loads, 0.0 if copied else SLOWDOWN)


def stage_hop(nbytes: float, system: SystemSpec, stride: float) -> Transfer:
    """A micro-batch's activations, or their gradients, to the neighbouring stage. Takes no compute."""
    cost = point_to_point(system, np.asarray(stride))
    return _transfer(cost, nbytes, point_to_point_loads(system, stride), 0.0)


def _transfer(cost: Linear, nbytes: float, loads: np.ndarray, takes: float) -> Transfer:
    """Links are loaded while bytes move, not while latency passes: the share of the whole time that they are busy."""
    seconds = float(cost.seconds(nbytes))
    moving = float(cost.per_byte) * nbytes
    return Transfer(seconds, loads * (moving / seconds if seconds > 0 else 0.0), takes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTraffic:
    """Reduce-scatters and all-gathers of the two gradient groups: seconds per byte, latency, loads, members.

    Of ZeRO's shards where these are less than the group (HSDP), whose `replicas` then sum what the shards hold:
    seconds per byte of the whole gradients.
    """

    dense: Linear
    expert: Linear
    dense_loads: np.ndarray
    expert_loads: np.ndarray
    dense_ranks: float
    expert_ranks: float
    dense_shards: float
    expert_shards: float
    replicas: tuple[Linear, Linear]
    replica_loads: np.ndarray
    stage_stride: float

    @classmethod
    def of(
        cls, sizes: dict[str, np.ndarray], s: Strategy, system: SystemSpec, *, has_experts: bool, twinned: float = 0.0
    ) -> GradientTraffic:
        """For NET_SIZES, each [1]; `twinned` as in group_costs. Stage 0 shards nothing."""
        n = {name: np.asarray(sizes[name], dtype=np.float64) for name in NET_SIZES}
        n |= {} if s.zero_stage else {"dp_replicate": np.ones(1)}
        x = group_costs(system, has_experts, s.rank_order, n, twinned)[0].tolist()
        dense, expert, stage = gradient_groups(s.rank_order, n, n["dp_replicate"])
        twins = twin_groups(s.rank_order, n, n["dp_replicate"])
        groups = dense, expert, replica_group(s.rank_order, n), twins
        loads = [tier_loads(Traffic.REDUCE_SCATTER, system, nested_members(system, group))[0] for group in groups]
        if twinned and n["ep"][0] > 1:
            loads[1] = (1.0 - twinned) * loads[1] + twinned * loads[3]

        def linear(first: Net) -> Linear:
            return Linear(x[first], x[first + 1])

        return cls(
            dense=linear(Net.SHARD_PER_BYTE), expert=linear(Net.ESHARD_PER_BYTE), dense_loads=loads[0],
            expert_loads=loads[1], dense_ranks=x[Net.DP], expert_ranks=x[Net.EDP], dense_shards=x[Net.SHARDS],
            expert_shards=x[Net.ESHARDS], replicas=(linear(Net.REPLICA_PER_BYTE), linear(Net.EREPLICA_PER_BYTE)),
            replica_loads=loads[2], stage_stride=float(stage[0]),
        )  # fmt: skip

    @property
    def replicated(self) -> bool:
        """Whether shards are held more than once."""
        return self.dense_shards < self.dense_ranks or self.expert_shards < self.expert_ranks

    def transfer(self, dense_bytes: float, expert_bytes: float, times: float = 1.0) -> Transfer:
        """A reduce-scatter (or all-gather) of the two groups, one after the other, `times` over (all-reduce: twice)."""
        return self._both(
            (self.dense, self.dense_loads, dense_bytes), (self.expert, self.expert_loads, expert_bytes), times
        )

    def across(self, dense_bytes: float, expert_bytes: float) -> Transfer:
        """What the shards hold of so many bytes of gradients, summed over the replicas."""
        (dense, expert), loads = self.replicas, self.replica_loads
        return self._both((dense, loads, dense_bytes), (expert, loads, expert_bytes), 1.0)

    def _both(self, dense: _Part, expert: _Part, times: float) -> Transfer:
        parts = [dense, expert]
        seconds = np.array([times * cost.seconds(nbytes) if nbytes > 0 else 0.0 for cost, _, nbytes in parts])
        moving = np.array([times * cost.per_byte * nbytes for cost, _, nbytes in parts])
        total = float(seconds.sum())
        loads = sum(m * load for m, (_, load, _) in zip(moving, parts, strict=True)) / total if total > 0 else 0.0
        return Transfer(total, np.zeros_like(self.dense_loads) + loads, SLOWDOWN)


_Part = tuple[Linear, np.ndarray, float]
"""A group's cost, its loads, and the bytes that it moves."""
