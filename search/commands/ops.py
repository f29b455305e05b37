"""Every operation of a configuration with its price: the table of `search estimate --ops`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from estimator.inventory import Entry
from hardware.units import format_bytes, format_count, format_seconds
from results.report.text import clip, columns
from search.commands.graph_subject import priced_graph
from search.commands.point import Point

__all__ = ["PricedOp", "listed", "ops_table", "price_ops"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOp:
    """One op of one block on one rank, for one micro-batch. `times`: how often the model runs the block.

    `hbm_bytes` are those read and written; `intensity` is FLOPs for each of them; `utilisation` and `confidence` as
    estimator/inventory.py has them. What an op lacks is NaN.
    """

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
    confidence: str
    compute_s: float
    memory_s: float
    read_bytes: float
    written_bytes: float
    intensity: float
    utilisation: float


def price_ops(point: Point) -> list[PricedOp]:
    """Ops in the order of the model, phase by phase. Traffic that overlap hides is listed with its full seconds."""
    return listed(priced_graph(point)[1])


def listed(entries: Iterable[Entry]) -> list[PricedOp]:
    """The ops of priced entries, in their order."""
    return [_listed(entry) for entry in entries]


def _listed(entry: Entry) -> PricedOp:
    op = entry.op
    kind = op.kind.value
    if op.collective is not None and op.group is not None:
        kind = f"{op.collective.value} {op.group.value}"
    return PricedOp(
        block=entry.block.kind.value, times=entry.times, name=op.name, kind=kind, phase=op.phase.value,
        flops=entry.flops, hbm_bytes=entry.read_bytes + entry.written_bytes, link_bytes=entry.link_bytes,
        seconds=entry.seconds, bound=entry.bound, source=entry.source, confidence=entry.confidence,
        compute_s=entry.compute_s, memory_s=entry.memory_s, read_bytes=entry.read_bytes,
        written_bytes=entry.written_bytes, intensity=entry.intensity, utilisation=entry.utilisation,
    )  # fmt: skip


def ops_table(ops: list[PricedOp], of: str = "one micro-batch on one rank") -> str:
    """One table a block and phase, traffic of groups of one left out."""
    out = [f"{of}; what overlap hides is listed in full"]
    for (block, times, phase), members in groupby(ops, key=lambda op: (op.block, op.times, op.phase)):
        some = list(members)
        total = format_seconds(sum(op.seconds for op in some))
        out += ["", f"{block} ({times} in the model), {phase}: {total}"]
        cells = [
            [
                clip(op.name, 28),
                op.kind,
                format_count(op.flops) if op.flops else "-",
                format_bytes(op.hbm_bytes or op.link_bytes),
                f"{op.intensity:.0f}" if op.intensity == op.intensity else "-",
                format_seconds(op.seconds),
                op.bound,
                f"{op.utilisation:.0%}" if op.utilisation == op.utilisation else "-",
                op.source,
            ]
            for op in some
            if op.seconds
        ]
        out += columns(["op", "kind", "FLOPs", "bytes", "FLOP/B", "seconds", "bound", "used", "source"], cells, left=2)
    return "\n".join(out) + "\n"
