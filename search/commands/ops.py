"""Every operation of a configuration with its price: the table of `search estimate --ops`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from estimator.build import build
from estimator.cost.price import BACKENDS, price
from estimator.cost.table import _Pricer
from estimator.graph import Block
from estimator.imbalance import Routing
from estimator.op import Array, Op, OpKind, Phase
from estimator.passes import lower, recompute
from estimator.precision import PrecisionRecipe, recipe
from hardware.units import format_bytes, format_count, format_seconds
from results.report.text import clip, columns
from search.commands.point import Point

__all__ = ["PricedOp", "ops_table", "price_ops"]

PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.WEIGHT_GRAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOp:
    """One op of one block on one rank, for one micro-batch. `times`: how often the model runs the block."""

    block: str
    times: int
    name: str
    kind: str
    phase: str
    flops: float
    hbm_bytes: float
    link_bytes: float
    seconds: float
    bound: str
    source: str


def price_ops(point: Point) -> list[PricedOp]:
    """Ops in the order of the model, phase by phase. Traffic that overlap hides is listed with its full seconds."""
    if point.system.segments:
        law = "operations are listed for chips of one kind, but got a system of segments"
        raise ValueError(f"{law} ({point.system.told_chips}); leave --ops out, or name one cluster")
    r = recipe(point.strategy.precision)
    routing = Routing.of(point.model, point.workload)
    graph = lower(build(point.model, point.workload.seq), point.strategy, r, routing)
    graph = recompute(graph, point.strategy.recompute)
    pricer = _Pricer(point.strategy, point.system, r, tuple(BACKENDS))
    priced = []
    for kind in graph.kinds:
        times = graph.sequence.count(kind)
        for phase in PHASES:
            priced += list(_ops(point, graph.blocks[kind], phase, times, r, pricer))
    return priced


def _ops(
    point: Point, block: Block, phase: Phase, times: int, r: PrecisionRecipe, pricer: _Pricer
) -> Iterator[PricedOp]:
    for op in block.of_phase(phase):
        if op.kind is OpKind.COLLECTIVE:
            yield _traffic(op, block, times, _number(pricer.traffic_seconds(op)))
            continue
        p = price(op, block, point.system.chip, r)
        yield PricedOp(
            block=block.kind.value,
            times=times,
            name=op.name,
            kind=op.kind.value,
            phase=op.phase.value,
            flops=_number(p.work.flops),
            hbm_bytes=_number(p.work.nbytes),
            link_bytes=0.0,
            seconds=_number(p.seconds),
            bound="compute" if _number(p.compute_s) >= _number(p.memory_s) else "memory",
            source=p.source,
        )


def _traffic(op: Op, block: Block, times: int, seconds: float) -> PricedOp:
    assert op.collective is not None
    assert op.group is not None
    return PricedOp(
        block=block.kind.value,
        times=times,
        name=op.name,
        kind=f"{op.collective.value} {op.group.value}",
        phase=op.phase.value,
        flops=0.0,
        hbm_bytes=0.0,
        link_bytes=_number(op.payload),
        seconds=seconds,
        bound="link",
        source="link",
    )


def ops_table(ops: list[PricedOp]) -> str:
    """One table a block and phase, traffic of groups of one left out."""
    out = ["one micro-batch on one rank; what overlap hides is listed in full"]
    for (block, times, phase), members in groupby(ops, key=lambda op: (op.block, op.times, op.phase)):
        listed = list(members)
        total = format_seconds(sum(op.seconds for op in listed))
        out += ["", f"{block} ({times} in the model), {phase}: {total}"]
        cells = [
            [
                clip(op.name, 28),
                op.kind,
                format_count(op.flops) if op.flops else "-",
                format_bytes(op.hbm_bytes or op.link_bytes),
                format_seconds(op.seconds),
                op.bound,
                op.source,
            ]
            for op in listed
            if op.seconds
        ]
        out += columns(["op", "kind", "FLOPs", "bytes", "seconds", "bound", "source"], cells, left=2)
    return "\n".join(out) + "\n"


def _number(value: Array) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])
