"""The iterations that all ranks of a job have: what is left of one that died. Pairs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from capture.traces.assemble import CODE
from capture.traces.records import Kind, RankTrace

__all__ = ["common"]


def common(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces without iterations that some rank lacks or did not end. ValueError where none is left."""
    ended = [set(_ended(trace).tolist()) for trace in traces]
    shared = set.intersection(*ended)
    if not shared:
        least = min(range(len(traces)), key=lambda k: len(ended[k]))
        raise ValueError(
            f"{traces[least].source}: ranks must have an iteration in common, but rank {traces[least].rank} ended "
            f"{len(ended[least])} and none that all others have; record longer"
        )
    return [_of(trace, shared, len(set.union(*ended))) for trace in traces]


def _ended(trace: RankTrace) -> np.ndarray:
    """Iterations with a mark; where a trace has none, all but its last."""
    inside = trace.iteration >= 0
    marked = trace.iteration[inside & (trace.kind == CODE[Kind.ITERATION])]
    return np.unique(marked) if len(marked) else np.unique(trace.iteration[inside])[:-1]


def _of(trace: RankTrace, shared: set[int], most: int) -> RankTrace:
    """A trace with these iterations, and what is of none."""
    kept = np.isin(trace.iteration, [-1, *shared])
    place = np.full(len(trace), -1)
    place[kept] = np.arange(int(kept.sum()))
    edges = kept[trace.before] & kept[trace.after]
    columns = {
        field.name: getattr(trace, field.name)[kept]
        for field in fields(trace)
        if isinstance(getattr(trace, field.name), np.ndarray) and field.name not in EDGES
    }
    note = f"{len(shared)} of {most} iterations, those that all ranks have"
    return replace(
        trace, **columns, before=place[trace.before[edges]], after=place[trace.after[edges]],
        notices=(*trace.notices, note),
    )  # fmt: skip


EDGES = ("before", "after", "memory_s", "memory_bytes")
"""Columns that are not of events."""
