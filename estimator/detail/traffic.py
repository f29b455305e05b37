"""What a transfer costs and which links it loads, one at a time. The replay's view of estimator/cost/collective.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from estimator.cost.collective import (
    Linear,
    collective,
    nested_members,
    point_to_point,
    point_to_point_loads,
    tier_loads,
)
from estimator.cost.overlap import SLOWDOWN
from estimator.op import Group, Op, Traffic
from estimator.strategy import Strategy
from estimator.tables import NET_SIZES, gradient_groups, group_costs, twin_groups
from hardware.system import SystemSpec

__all__ = ["GradientTraffic", "Transfer", "stage_hop", "transfer_of"]


class Transfer(NamedTuple):
    """Seconds alone; share of each tier's link [T]; share of the chip's compute that it takes while it runs."""

    seconds: float
    loads: np.ndarray
    takes: float


def transfer_of(op: Op, s: Strategy, system: SystemSpec, pieces: int = 1) -> Transfer:
    """One of `pieces` equal parts of a collective op; each part pays its latency.

    Copies of keys and values in a ring are moved by copy engines and take no compute (as the estimate has it).
    """
    assert op.collective is not None
    assert op.group is not None
    if op.collective is Traffic.COPY:
        return Transfer(0.0, np.zeros(system.num_tiers), 0.0)
    size, stride = {
        Group.TP: (s.tp, 1.0), Group.CP: (s.cp, s.tp), Group.ETP: (s.etp, 1.0), Group.EP: (s.ep, s.etp),
    }[op.group]  # fmt: skip
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
    return _transfer(cost, float(op.payload) / pieces, loads, SLOWDOWN)


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
    """Reduce-scatters and all-gathers of the two gradient groups: seconds per byte, latency, loads, members."""

    dense: Linear
    expert: Linear
    dense_loads: np.ndarray
    expert_loads: np.ndarray
    dense_ranks: float
    expert_ranks: float
    stage_stride: float

    @classmethod
    def of(
        cls, sizes: dict[str, np.ndarray], s: Strategy, system: SystemSpec, *, has_experts: bool, twinned: float = 0.0
    ) -> GradientTraffic:
        """For NET_SIZES, each [1]; `twinned` as in group_costs."""
        n = {name: np.asarray(sizes[name], dtype=np.float64) for name in NET_SIZES}
        costs = group_costs(system, has_experts, s.rank_order, n, twinned)
        (d, d_byte, d_latency, e, e_byte, e_latency, *_) = costs[0].tolist()
        dense, expert, stage = gradient_groups(s.rank_order, n)
        loads = [tier_loads(Traffic.REDUCE_SCATTER, system, nested_members(system, g))[0] for g in (dense, expert)]
        if twinned and n["ep"][0] > 1:
            twins = tier_loads(Traffic.REDUCE_SCATTER, system, nested_members(system, twin_groups(s.rank_order, n)))[0]
            loads[1] = (1.0 - twinned) * loads[1] + twinned * twins
        return cls(
            dense=Linear(d_byte, d_latency), expert=Linear(e_byte, e_latency), dense_loads=loads[0],
            expert_loads=loads[1], dense_ranks=d, expert_ranks=e, stage_stride=float(stage[0]),
        )  # fmt: skip

    def transfer(self, dense_bytes: float, expert_bytes: float, times: float = 1.0) -> Transfer:
        """A reduce-scatter (or all-gather) of the two groups, one after the other, `times` over (all-reduce: twice)."""
        parts = [
            (self.dense, self.dense_loads, dense_bytes),
            (self.expert, self.expert_loads, expert_bytes),
        ]
        seconds = np.array([times * cost.seconds(nbytes) if nbytes > 0 else 0.0 for cost, _, nbytes in parts])
        moving = np.array([times * cost.per_byte * nbytes for cost, _, nbytes in parts])
        total = float(seconds.sum())
        loads = sum(m * load for m, (_, load, _) in zip(moving, parts, strict=True)) / total if total > 0 else 0.0
        return Transfer(total, np.zeros_like(self.dense_loads) + loads, SLOWDOWN)
