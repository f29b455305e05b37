"""Timelines by hand, for what shows them: tasks one after the other, in the order given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from estimator.tasks import Category, Device, Stream, Tasks
from estimator.timeline import Timeline
from hardware.units import GIB

__all__ = ["laid", "pipeline"]


def laid(tasks: Tasks) -> Timeline:
    """Every task as soon as its stream and its predecessors allow; predecessors come first in the list."""
    before: dict[int, list[int]] = {}
    for b, a in zip(tasks.before.tolist(), tasks.after.tolist(), strict=True):
        before.setdefault(a, []).append(b)
    start, end, blame = np.zeros(len(tasks)), np.zeros(len(tasks)), np.full(len(tasks), -1)
    last: dict[int, int] = {}
    for i, stream in enumerate(tasks.stream.tolist()):
        causes = [*before.get(i, []), *([last[stream]] if stream in last else [])]
        if causes:
            blame[i] = max(causes, key=lambda cause: end[cause])
            start[i] = end[blame[i]]
        end[i] = start[i] + tasks.seconds[i]
        last[stream] = i
    return Timeline(tasks=tasks, start=start, end=end, blame=blame, host_s=np.zeros(len(tasks)))


def pipeline(*, ranks: int, micro_batches: int, ops: int = 2, seconds: float = 1e-3) -> Timeline:
    """Forward passes of `ops` kernels down a pipeline, a send after each; each kernel's 1 MB goes with the send."""
    devices = [
        Device(name=f"rank {r}", num_ranks=8, base_bytes=2.0 * GIB, capacity_bytes=10 * GIB) for r in range(ranks)
    ]
    streams = [
        Stream(device=r, name=name, computes=name == "compute") for r in range(ranks) for name in ("compute", "pp")
    ]
    stream, cost, edges, names, batch, kinds, free = [], [], [], [], [], [], []
    for m in range(micro_batches):
        sent = -1
        for r in range(ranks):
            for op in range(ops):
                if op == 0 and sent >= 0:
                    edges.append((sent, len(stream)))
                elif op:
                    edges.append((len(stream) - 1, len(stream)))
                stream.append(2 * r)
                cost.append(seconds * (1 + op))
                names.append(f"kernel {op} of {m}")
                kinds.append(Category.FORWARD)
                free.append(0.0)
                batch.append(m)
            edges.append((len(stream) - 1, len(stream)))
            stream.append(2 * r + 1)
            cost.append(seconds / 7)
            names.append(f"send {m}")
            kinds.append(Category.PP)
            free.append(1e6 * ops)
            batch.append(m)
            sent = len(stream) - 1
    is_send = np.array([kind is Category.PP for kind in kinds])
    tasks = Tasks.of(
        devices=devices, streams=streams, stream=stream, seconds=cost, edges=edges, names=names, category=kinds,
        scope=batch, micro_batch=batch, takes=0.15 * is_send, alloc_bytes=np.where(is_send, 0.0, 1e6), free_bytes=free,
    )  # fmt: skip
    return laid(replace(tasks, scopes=tuple(f"forward {m}" for m in range(micro_batches))))
