"""The passes of one priced configuration, rank by rank, as its schedule orders them. Prices nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator.model import ModelSpec
from estimator.result import StepResult
from estimator.rules import Case
from estimator.schedule import Kind, Order, Simulation, in_flight, order, placement, side_by_side, simulate
from estimator.strategy import Schedule, Strategy
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["Passes", "num_passes", "passes_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Who runs what and when. `held`: activations of the worst rank, in micro-batches of a rank's chunks."""

    order: Order
    simulated: Simulation
    held: float


def num_passes(model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> int:
    """Micro-batches times chunks: what `passes_of` has to simulate."""
    case = Case.of(model, strategy, system, workload)
    return int(case.sizes["num_micro_batches"][0]) * int(strategy.pp) * int(strategy.vpp)


def passes_of(
    model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload, result: StepResult
) -> Passes:
    """The order of a schedule, and when its passes run; `result` is the price of this very configuration."""
    p, v = int(strategy.pp), int(strategy.vpp)
    case = Case.of(model, strategy, system, workload)
    m = int(case.sizes["num_micro_batches"][0])
    passes = order(strategy.schedule, p, m, v, strategy.interleave_group)
    chunks = placement(strategy.schedule, p, v)
    pairs = any(item.kind is Kind.PAIR for items in passes for item in items)
    if strategy.overlap.ep and int(strategy.ep) > 1 and not pairs:
        passes = [side_by_side(items) for items in passes]
    f, b, w = np.array(result.chunks).T
    held = in_flight(passes, chunks).sum(axis=1).max() / chunks.shape[1]
    if strategy.schedule is Schedule.DUALPIPE:
        held *= 2.0  # a micro-batch runs one of a rank's two chunks
    return Passes(order=passes, simulated=simulate(passes, f, b, w), held=float(held))
