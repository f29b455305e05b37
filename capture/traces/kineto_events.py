"""The events of a PyTorch profiler (Kineto) trace, sorted into columns as they stream by. Joins nothing.

Old and new categories alike. What nests in other operations, Python frames, marks on the device and flow arrows, which
repeat the correlation ids of what they join, are left out.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from capture.traces.assemble import Table
from capture.traces.chrome import Microseconds

__all__ = ["Annotation", "Args", "Columns", "Event", "Role"]


class Args(msgspec.Struct, gc=False):
    """The arguments of events that mean something here."""

    correlation: int | None = None
    device: Any = None
    stream: Any = None
    bytes: float | None = None
    name: str | None = None
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(), name="Input type")
    collective: str | None = msgspec.field(default=None, name="Collective name")
    in_elements: Any = msgspec.field(default=None, name="In msg nelems")
    out_elements: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: str | None = None
    group_size: int | None = msgspec.field(default=None, name="Group size")
    group_name: Any = msgspec.field(default=None, name="Process Group Name")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    source_rank: int | None = msgspec.field(default=None, name="Src Rank")
    target_rank: int | None = msgspec.field(default=None, name="Dst Rank")
    allocated: float | None = msgspec.field(default=None, name="Total Allocated")
    device_type: int | None = msgspec.field(default=None, name="Device Type")


class Event(msgspec.Struct, gc=False):
    """One event; times in microseconds. A `ts` of whole microseconds since 1970 is exact in a float, and so is one of
    nanoseconds since `baseTimeNanoseconds`.
    """  # noqa: D205 - one sentence would be no clearer

    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: Microseconds = 0.0
    dur: Microseconds = 0.0
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    args: Args | None = None


class Role(IntEnum):
    """What an event is, by its category."""

    OPERATION = 0
    ANNOTATION = 1
    CALL = 2
    KERNEL = 3
    COPY = 4


ROLES = {
    "cpu_op": Role.OPERATION, "operator": Role.OPERATION, "user_annotation": Role.ANNOTATION, "kernel": Role.KERNEL,
    "gpu_memcpy": Role.COPY, "gpu_memset": Role.COPY, "memcpy": Role.COPY, "memset": Role.COPY, "runtime": Role.CALL,
    "cuda_runtime": Role.CALL, "cuda_driver": Role.CALL, "hip_runtime": Role.CALL, "hip_driver": Role.CALL,
    "xpu_runtime": Role.CALL, "xpu_driver": Role.CALL, "privateuse1_runtime": Role.CALL,
    "privateuse1_driver": Role.CALL,
}  # fmt: skip
LARGEST = (1 << 63) - 1  # of an int64
LIBRARY = re.compile(r"(?:nccl|rccl|gloo|mpi|ucc|hccl|xccl|oneccl):")
STEP = "ProfilerStep#"
OPTIMIZER = "Optimizer.step#"


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A named interval of a host thread: a mark of a step, or a call into a communication library."""

    name: str
    thread: int
    start: float
    end: float
    args: Args | None


class _Spans:
    """Columns of one role. where: index of thread or stream; name: index of name."""

    def __init__(self) -> None:
        self.where, self.name = array("i"), array("i")
        self.start, self.duration = array("d"), array("d")

    def add(self, where: int, name: int, start: float, duration: float) -> None:
        self.where.append(where)
        self.name.append(name)
        self.start.append(start)
        self.duration.append(duration)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(where, start, end, name), as `host.cut` takes them."""
        start = np.array(self.start, np.float64)
        return np.array(self.where, np.int64), start, start + np.array(self.duration), np.array(self.name, np.int64)


@dataclass(slots=True)
class Columns:
    """All that is kept of a trace. correlations are -1 where an event has none."""

    names: Table = field(default_factory=Table)
    streams: Table = field(default_factory=Table)
    threads: dict[tuple[Any, Any], int] = field(default_factory=dict)
    thread_names: dict[tuple[Any, Any], str] = field(default_factory=dict)
    operations: _Spans = field(default_factory=_Spans)
    calls: _Spans = field(default_factory=_Spans)
    call_correlation: array[int] = field(default_factory=lambda: array("q"))
    device: _Spans = field(default_factory=_Spans)
    device_correlation: array[int] = field(default_factory=lambda: array("q"))
    device_role: array[int] = field(default_factory=lambda: array("b"))
    device_bytes: array[float] = field(default_factory=lambda: array("d"))
    communication: dict[int, Args] = field(default_factory=dict)  # by row of `device`
    annotations: list[Annotation] = field(default_factory=list)  # of communication libraries
    posts: list[Annotation] = field(default_factory=list)  # operations c10d::...
    steps: list[Annotation] = field(default_factory=list)
    optimizer_ends: list[float] = field(default_factory=list)
    memory: dict[int, tuple[array[float], array[float]]] = field(default_factory=dict)  # by type of device

    def take(self, events: list[Event]) -> None:
        """Sorts events in."""
        roles, names, operations = ROLES, self.names, self.operations
        for event in events:
            if event.ph == "X":
                role = roles.get(event.cat)
                if role is None:
                    role = roles.get(event.cat.lower())
                if role is Role.OPERATION:
                    where = self.thread(event)
                    operations.add(where, names(event.name), event.ts, event.dur)
                    if event.name.startswith("c10d::"):
                        self.posts.append(_annotation(event, where))
                elif role is Role.CALL:
                    self.calls.add(self.thread(event), names(event.name), event.ts, event.dur)
                    self.call_correlation.append(_correlation(event.args))
                elif role is Role.ANNOTATION:
                    self._annotate(event)
                elif role is not None:
                    self._device(event, role)
            elif event.ph == "i" and event.name == "[memory]":
                self._memory(event)
            elif event.ph == "M" and event.name == "thread_name" and event.args is not None:
                self.thread_names[event.pid, event.tid] = event.args.name or ""

    def thread(self, event: Event) -> int:
        """Index of a host thread."""
        return self.threads.setdefault((event.pid, event.tid), len(self.threads))

    def _annotate(self, event: Event) -> None:
        if LIBRARY.match(event.name):
            self.annotations.append(_annotation(event, self.thread(event)))
        elif event.name.startswith(STEP):
            self.steps.append(_annotation(event, self.thread(event)))
        elif event.name.startswith(OPTIMIZER):
            self.optimizer_ends.append(event.ts + event.dur)

    def _device(self, event: Event, role: Role) -> None:
        args = event.args or Args()
        device = event.pid if args.device is None else args.device
        stream = event.tid if args.stream is None else args.stream
        if args.collective is not None or "ccl" in event.name:
            self.communication[len(self.device.start)] = args
        self.device.add(self.streams(f"device {device} stream {stream}"), self.names(event.name), event.ts, event.dur)
        self.device_correlation.append(_correlation(args))
        self.device_role.append(role)
        self.device_bytes.append(float("nan") if args.bytes is None else args.bytes)

    def _memory(self, event: Event) -> None:
        if event.args is not None and event.args.allocated is not None:
            seconds, held = self.memory.setdefault(event.args.device_type or 0, (array("d"), array("d")))
            seconds.append(event.ts)
            held.append(event.args.allocated)


def _correlation(args: Args | None) -> int:
    """Unsigned in some recorders; only equality matters."""
    return -1 if args is None or args.correlation is None else args.correlation & LARGEST


def _annotation(event: Event, thread: int) -> Annotation:
    return Annotation(name=event.name, thread=thread, start=event.ts, end=event.ts + event.dur, args=event.args)
