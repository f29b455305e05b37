"""Reads a Horovod timeline: rank 0's view of each tensor from its negotiation to the end of its reduction.

Tensors that were fused are one collective: their copies into the fusion buffer tell. A tensor's k-th all-reduce is of
iteration k. Waiting (QUEUE, WAIT_FOR_...) is no event; negotiation gives the posting. Other ranks are but ticks in the
negotiation, so nothing can be paired. Refuses ends without a beginning.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from capture.traces.assemble import Rows
from capture.traces.chrome import ChromeEvents, Microseconds
from capture.traces.communication import collective_name, element_bytes, rank_list
from capture.traces.opened import Opened
from capture.traces.records import Group, Kind, RankTrace, Topology

__all__ = ["looks_like_horovod", "read_horovod"]

NS_PER_US = 1000
NEGOTIATE = "NEGOTIATE_"
LIBRARIES = ("NCCL_", "MPI_", "GLOO_", "CCL_", "DDL_", "CUDA_IPC_", "ADASUM_", "MLSL_")
INTO, OUT_OF = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
HIERARCHICAL = ("NCCL_REDUCESCATTER", "MEMCPY_IN_HOST_BUFFER")
EPOCH = "start_time_since_epoch_in_micros"
MARKS = (b'"NEGOTIATE_', b'"CYCLE_START"', EPOCH.encode())


class _Args(msgspec.Struct, gc=False):
    name: str | None = None
    dtype: str | None = None
    shape: Any = None
    start_time_since_epoch_in_micros: Annotated[int, msgspec.Meta(ge=0, le=10**17)] | None = None


class _Event(msgspec.Struct, gc=False):
    name: str = ""
    ph: str = ""
    ts: Microseconds = 0.0
    dur: Microseconds = 0.0
    pid: int = 0
    args: _Args | None = None


@dataclass(slots=True, kw_only=True)
class _Reduction:
    """What one tensor went through once, in microseconds. spans: by activity, in order."""

    tensor: str
    operation: str
    posted: float | None
    iteration: int
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    nbytes: float = float("nan")

    def span(self, *wanted: str) -> tuple[float, float] | None:
        """From the first beginning to the last end of the activities that begin with one of these."""
        found = [(start, end) for name, start, end in self.spans if name.startswith(wanted)]
        return (min(start for start, _ in found), max(end for _, end in found)) if found else None


def looks_like_horovod(head: bytes) -> bool:
    """Whether an array of events has what only Horovod writes."""
    return head.lstrip().startswith(b"[") and any(mark in head for mark in MARKS)


def read_horovod(file: Opened) -> RankTrace:
    """The trace of rank 0."""
    stream = ChromeEvents(file, _Event, unfinished=True)
    found = _Found(file.source)
    for events in stream:
        for event in events:
            found.take(event)
    world = found.world or None
    group = Group(name="horovod", size=found.world, ranks=tuple(range(found.world)))
    rows = Rows()
    for sequence, fused in enumerate(_fused(found.done)):
        _add(rows, fused, group, sequence)
    if not rows.rows:
        raise ValueError(f"{file.source}: must hold a collective from beginning to end, but holds none; record longer")
    notices = ["rank 0 alone is recorded", "no marks of iterations: a tensor's k-th all-reduce is of iteration k"]
    if found.num_open:
        notices.append(f"{found.num_open} activities were cut off at the end and are left out")
    hierarchical = any(one.span(*HIERARCHICAL) for one in found.done)
    return rows.trace(
        source=file.source, format="horovod", rank=0, world=world, machine=None, job="", notices=notices,
        epoch_ns=found.epoch_us * NS_PER_US, topology=Topology.HIERARCHICAL if hierarchical else Topology.UNKNOWN,
    )  # fmt: skip


class _Found:
    """Reductions so far, by process number: a process of the timeline is a tensor."""

    def __init__(self, source: str) -> None:
        self.source, self.epoch_us, self.world = source, 0, 0
        self.tensors: dict[int, str] = {}
        self.posted: dict[int, float] = {}
        self.current: dict[int, _Reduction] = {}
        self.times: dict[tuple[str, str], int] = defaultdict(int)
        self.done: list[_Reduction] = []
        self.stacks: dict[int, list[tuple[str, float]]] = defaultdict(list)

    def take(self, event: _Event) -> None:
        """Sorts one event in."""
        if event.args is not None and event.args.start_time_since_epoch_in_micros is not None:
            self.epoch_us = event.args.start_time_since_epoch_in_micros
        if event.ph == "M" and event.name == "process_name" and event.args is not None and event.args.name:
            self.tensors[event.pid] = event.args.name
        elif event.ph == "B":
            self._begin(event)
        elif event.ph == "E":
            self._end(event)
        elif event.ph == "X" and event.name.isdecimal() and len(event.name) < 7:  # a rank is ready
            self.world = max(self.world, int(event.name) + 1)
            if event.name == "0":
                self.posted[event.pid] = event.ts

    @property
    def num_open(self) -> int:
        """Activities that have begun and not ended."""
        return sum(map(len, self.stacks.values()))

    def _begin(self, event: _Event) -> None:
        tensor = self.tensors.get(event.pid, f"tensor {event.pid}")
        if event.name.startswith(NEGOTIATE):
            self.posted[event.pid] = event.ts
        elif event.pid not in self.current:
            name = collective_name(event.name)
            self.current[event.pid] = _Reduction(
                tensor=tensor, operation=name, posted=self.posted.pop(event.pid, None),
                iteration=self.times[tensor, name] if name == "all_reduce" else -1,
            )  # fmt: skip
            self.times[tensor, name] += 1
        self.stacks[event.pid].append((event.name, event.ts))

    def _end(self, event: _Event) -> None:
        stack = self.stacks[event.pid]
        tensor = self.tensors.get(event.pid, f"tensor {event.pid}")
        if not stack:
            raise ValueError(
                f"{self.source}: an end of {tensor!r} at {event.ts} us must have a beginning, but has none; record "
                "again"
            )
        name, start = stack.pop()
        if event.ts < start:
            raise ValueError(
                f"{self.source}: event {name!r} of {tensor!r} must not end before it starts, but ends "
                f"{start - event.ts:.3f} us earlier: the clock went backwards; record again"
            )
        if name.startswith(NEGOTIATE):
            return
        one = self.current[event.pid]
        one.spans.append((name, start, event.ts))
        if not stack:
            self.done.append(self.current.pop(event.pid))
            one.nbytes = _nbytes(event.args)


def _nbytes(args: _Args | None) -> float:
    """Bytes of a tensor by its type and its shape, a text such as `[1000, 2048]`."""
    if args is None or args.dtype is None or args.shape is None:
        return float("nan")
    sizes, scalar = rank_list(args.shape), args.shape in ("[]", "", [])
    width = element_bytes(args.dtype)
    return float("nan") if width is None or not (sizes or scalar) else float(width * math.prod(sizes))


def _fused(done: list[_Reduction]) -> Iterator[list[_Reduction]]:
    """Reductions that ran as one: the same operation at the same time, out of the fusion buffer."""
    known = [(one, span) for one in done if (span := one.span(*LIBRARIES)) is not None]
    together: list[_Reduction] = []
    end, operation = 0.0, ""
    for one, span in sorted(known, key=lambda each: each[1]):
        fused = one.span(INTO) is not None
        if together and (not fused or span[0] >= end or one.operation != operation):
            yield together
            together = []
        if not together:
            end, operation = span[1], one.operation
        together.append(one)
        if not fused:
            yield together
            together = []
    if together:
        yield together


def _add(rows: Rows, fused: list[_Reduction], group: Group, sequence: int) -> None:
    """One collective with the copies into and out of the buffer around it."""
    first = fused[0]
    tensor = " + ".join(one.tensor for one in fused)
    nbytes = sum(one.nbytes for one in fused)

    def at(*activities: str) -> tuple[int, int] | None:
        spans = [span for one in fused if (span := one.span(*activities)) is not None]
        if not spans:
            return None
        return round(min(s for s, _ in spans) * NS_PER_US), round(max(e for _, e in spans) * NS_PER_US)

    into, moved, out_of = at(INTO), at(*LIBRARIES), at(OUT_OF)
    assert moved is not None
    posted = [one.posted for one in fused if one.posted is not None]
    told: dict[str, Any] = {"iteration": first.iteration, "tensor": tensor, "nbytes": nbytes}
    collective = rows.add(
        Kind.COLLECTIVE, "communication", first.operation, *moved, group=group, sequence=sequence,
        posted_ns=min(round(max(posted) * NS_PER_US), moved[0]) if posted else None, **told,
    )  # fmt: skip
    if into is not None and into[1] <= moved[0]:
        rows.edges.append((rows.add(Kind.COPY, "fusion buffer", INTO, *into, **told), collective))
    if out_of is not None and moved[1] <= out_of[0]:
        rows.edges.append((collective, rows.add(Kind.COPY, "fusion buffer", OUT_OF, *out_of, **told)))
