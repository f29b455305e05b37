"""`search graph passes`: the fixed order of passes, and what each makes of a graph."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np

from estimator.graph import OpGraph
from estimator.groups import between_ranks
from estimator.inventory import amounts
from estimator.op import OpKind
from estimator.passes import PASSES, Lowering, Pass, run_to
from hardware.units import format_bytes, format_count
from results.report.text import columns, hanging
from search.commands.answer import answer
from search.commands.graph_fuse import read_lowering

__all__ = ["run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """A graph behind a pass: ops of all layers, those between ranks, FLOPs and bytes of one rank and micro-batch."""

    ops: int
    collectives: int
    flops: float
    hbm_bytes: float
    link_bytes: float


def run(args: argparse.Namespace) -> int:
    """The table; of a graph or a configuration also the amounts behind each pass."""
    if args.config is None:
        if args.after is not None:
            raise ValueError("--after shows a graph behind a pass, but none was given; name a graph or configuration")
        answer(args, text=_order(), data=[_plain(p, None) for p in PASSES])
        return 0
    subject = read_lowering(args, args.config)
    last = PASSES[-1].name if args.after is None else args.after
    run_to(subject.graph, subject.by, last)  # refuses a name that is none
    names = [p.name for p in PASSES]
    shown = PASSES[: names.index(last) + 1]
    rows = [(p, _amounts(run_to(subject.graph, subject.by, p.name), subject.by)) for p in shown]
    text = f"{subject.name}: {subject.told}\n\n{_table(rows)}"
    answer(args, text=text, data={"name": subject.name, "of": subject.told, "passes": [_plain(*row) for row in rows]})
    return 0


def _amounts(graph: OpGraph, by: Lowering) -> Amounts:
    """Of all layers, each as often as the model runs it."""
    ops = collectives = 0
    flops = moved = sent = 0.0
    graph = between_ranks(graph, by.strategy)
    for kind in graph.kinds:
        block, times = graph.blocks[kind], graph.sequence.count(kind)
        for op in block.ops:
            ops += times
            if op.kind is OpKind.COLLECTIVE:
                collectives += times
            found = amounts(op, block, by.recipe)
            told = {name: times * float(np.asarray(value).reshape(-1)[0]) for name, value in found.items()}
            sent += told["link_bytes"]
            flops += told["flops"]
            moved += told["read_bytes"] + told["written_bytes"]
    return Amounts(ops=ops, collectives=collectives, flops=flops, hbm_bytes=moved, link_bytes=sent)


def _order() -> str:
    """The passes, and what each does."""
    lines = []
    for p in PASSES:
        where = f" ({p.acts})" if p.run is None else ""
        lines += hanging(f"{p.stage.value:<10}{p.name:<16}", p.about + where)
    return "\n".join(lines) + "\n"


def _table(rows: list[tuple[Pass, Amounts]]) -> str:
    cells = [
        [p.stage.value, p.name, str(a.ops), str(a.collectives), format_count(a.flops), format_bytes(a.hbm_bytes),
         format_bytes(a.link_bytes)]
        for p, a in rows
    ]  # fmt: skip
    return "\n".join(columns(["stage", "pass", "ops", "traffic", "FLOPs", "HBM", "links"], cells, left=2)) + "\n"


def _plain(p: Pass, amounts: Amounts | None) -> dict[str, Any]:
    told = {
        "pass": p.name, "stage": p.stage.value, "about": p.about, "changes_ops": p.run is not None, "acts": p.acts,
        "sizes": list(p.sizes), "reads": list(p.reads), "each_recompute": p.each,
    }  # fmt: skip
    if amounts is None:
        return told
    return told | {name: getattr(amounts, name) for name in Amounts.__slots__}
