"""A priced graph as a timeline, one operation after the other, without overlap and schedule: `search replay` has those.

Forward through the model, and back where the graph has gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from estimator.inventory import Entry
from estimator.op import Group, Phase
from estimator.tasks import Category, Device, Stream, Tasks
from estimator.timeline import Timeline
from results.graph_export.view import GraphView

__all__ = ["laid_out"]

COMPUTE = "compute"
CATEGORY = {
    Phase.FORWARD: Category.FORWARD, Phase.RECOMPUTE: Category.RECOMPUTE, Phase.BACKWARD: Category.BACKWARD,
    Phase.WEIGHT_GRAD: Category.BACKWARD,
}  # fmt: skip
TRAFFIC = {Group.TP: Category.TP, Group.CP: Category.CP, Group.EP: Category.EP, Group.ETP: Category.EP}


def laid_out(view: GraphView) -> Timeline:
    """Every op as often as the model runs it; ValueError where one has no price."""
    runs = list(_runs(view))
    if not runs or any(math.isnan(entry.seconds) for _, entry in runs):
        raise ValueError("a trace needs seconds, but nothing is priced; name a chip with --chip, or a configuration")
    scopes = tuple(dict.fromkeys(scope for scope, _ in runs))
    number = {scope: i for i, scope in enumerate(scopes)}
    names = tuple(dict.fromkeys(COMPUTE if e.op.group is None else e.op.group.value for _, e in runs))
    streams = [Stream(device=0, name=name, computes=name == COMPUTE) for name in names]
    seconds = np.array([entry.seconds for _, entry in runs])
    end = np.cumsum(seconds)
    tasks = Tasks.of(
        devices=[Device(name=view.name)], streams=streams, seconds=seconds,
        stream=[names.index(COMPUTE if e.op.group is None else e.op.group.value) for _, e in runs],
        names=[entry.op.name for _, entry in runs], scope=np.array([number[scope] for scope, _ in runs]),
        category=[CATEGORY[e.op.phase] if e.op.group is None else TRAFFIC[e.op.group] for _, e in runs],
    )  # fmt: skip
    return Timeline(
        tasks=replace(tasks, scopes=scopes), start=end - seconds, end=end, blame=np.arange(len(runs)) - 1,
        host_s=np.zeros(len(runs)),
    )  # fmt: skip


def _runs(view: GraphView) -> Iterator[tuple[str, Entry]]:
    """Entries in the order in which they run, each with the block that it runs in."""
    sequence = view.graph.sequence
    mine = {kind: [e for e in view.entries if e.block.kind is kind] for kind in view.graph.kinds}
    backward = {kind: [e for e in mine[kind] if e.op.phase is not Phase.FORWARD] for kind in view.graph.kinds}
    for i, kind in enumerate(sequence):
        yield from ((f"{i} {kind.value}", entry) for entry in mine[kind] if entry.op.phase is Phase.FORWARD)
    for i in range(len(sequence) - 1, -1, -1):
        yield from ((f"{i} {sequence[i].value} backward", entry) for entry in backward[sequence[i]])
