"""Reads what PyTorch's profiler writes (Kineto), old and new: NCCL and RCCL by their kernels, gloo by its threads.

Kernels and copies are the device's events, collectives among them by their kernels; a launch gives each its posting and
its dependency. Where no device has events, the host's operations are the computation, `gloo:NAME` is a collective from
its real start to its real end and `c10d::NAME` its posting. Steps are the profiler's marks, else ends of the optimizer.
Refuses a clock that goes backwards. Knows one rank.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from capture.traces.assemble import CODE, Table, assemble
from capture.traces.chrome import ChromeEvents
from capture.traces.host import cut
from capture.traces.kineto_collectives import Collective, Job, device_collectives, host_collectives, numbered
from capture.traces.kineto_events import Columns, Event, Role
from capture.traces.kineto_ties import edges, steps
from capture.traces.opened import Opened
from capture.traces.records import Group, Kind, RankTrace

__all__ = ["read_kineto"]

US = 1e-6
NS_PER_US = 1000
SCHEMA: dict[str, tuple[Any, Any]] = {
    "kind": (0, np.int8), "stream": (0, np.int32), "name": (0, np.int32), "start": (0.0, np.float64),
    "end": (0.0, np.float64), "posted": (np.nan, np.float64), "iteration": (-1, np.int32), "group": (-1, np.int32),
    "sequence": (-1, np.int64), "nbytes": (np.nan, np.float64), "peer": (-1, np.int32), "transaction": (-1, np.int32),
}  # fmt: skip
"""Columns on the way, times in microseconds: what they hold where nothing is known, and of what type they are."""

Part: TypeAlias = dict[str, np.ndarray]


def read_kineto(file: Opened) -> RankTrace:
    """The trace of one rank."""
    stream = ChromeEvents(file, Event)
    columns = Columns()
    for events in stream:
        columns.take(events)
    return _Trace(file.source, stream.header, columns).assembled()


class _Trace:
    """One rank's host pieces, then its device events, then collectives on the host, then marks: rows in this order."""

    def __init__(self, source: str, header: dict[str, Any], columns: Columns) -> None:
        told = header.get("distributedInfo")
        self.source, self.header, self.columns = source, header, columns
        self.notices = [] if isinstance(told, dict) and "rank" in told else ["no distributedInfo: taken for rank 0"]
        self.job = Job.of(source, told)
        self.machine = str(header["host_name"]) if header.get("host_name") else None
        self.base_ns = header.get("baseTimeNanoseconds") or 0
        if not isinstance(self.base_ns, int) or not 0 <= self.base_ns < 1 << 63:
            raise ValueError(
                f"{source}: baseTimeNanoseconds must be nanoseconds since 1970, but is {self.base_ns!r}; record again"
            )
        self.groups: dict[Group, int] = {}
        self.transactions = Table()
        self.has_device = len(columns.device.start) > 0
        self.device = columns.device.arrays()
        self.calls = columns.calls.arrays() if self.has_device else _posts(columns)
        operations = columns.operations.arrays()
        self.pieces = cut(operations, self.calls)
        self.launched = self._launched()
        if not len(self.pieces.start) and not self.has_device:
            raise ValueError(f"{source}: must hold operations or kernels, but holds neither; profile with activities")
        found = device_collectives(columns, self.job, self.launched, self.notices)
        both = numbered([*found, *host_collectives(columns, self.job, self.notices)])
        self.on_device, self.on_host = both[: len(found)], both[len(found) :]
        self.marks = steps(columns, self.notices)

    def _launched(self) -> np.ndarray:
        """Row of the call that launched each device event, -1 where none has its correlation."""
        device = np.array(self.columns.device_correlation, np.int64)
        calls = np.array(self.columns.call_correlation, np.int64)
        if not len(calls):
            return np.full(len(device), -1, np.int64)
        order = np.argsort(calls, kind="stable")
        at = order[np.minimum(np.searchsorted(calls[order], device), len(calls) - 1)]
        return np.where((device >= 0) & (calls[at] == device), at, -1)

    def assembled(self) -> RankTrace:
        """Everything in one RankTrace."""
        parts = [self._host(), self._device(), self._host_collectives(), self._steps()]
        columns = {
            key: np.concatenate([part.get(key, np.full(len(part["start"]), unknown)) for part in parts]).astype(dtype)
            for key, (unknown, dtype) in SCHEMA.items()
        }
        first = float(columns["start"].min())
        communicates = np.zeros(len(self.device[1]), bool)
        communicates[[one.row for one in self.on_device]] = True
        before, after = edges(
            self.pieces, self.calls, self.columns.names.texts, self.device, self.launched, communicates, self._posts()
        )
        held_at, held = self._memory()
        fields = {
            "source": self.source, "format": "kineto", "rank": self.job.rank, "world": self.job.world,
            "machine": self.machine, "job": "", "names": self.columns.names.texts,
            "streams": self.columns.streams.texts, "groups": tuple(self.groups),
            "transactions": self.transactions.texts, "tensors": (),
            "epoch_ns": self.base_ns + _ns(first),
            "start_s": (columns.pop("start") - first) * US, "end_s": (columns.pop("end") - first) * US,
            "posted_s": (columns.pop("posted") - first) * US, **columns,
        }  # fmt: skip
        return assemble(
            fields, before=before, after=after, memory_s=(held_at - first) * US, memory_bytes=held, notices=self.notices
        )

    def _posts(self) -> list[tuple[int, int]]:
        """Of each collective on the host the call that posted it and its row, -1 for no call."""
        first = len(self.pieces.start) + len(self.device[1])
        return [] if self.has_device else [(one.post, first + row) for row, one in enumerate(self.on_host)]

    def _host(self) -> Part:
        """Pieces of host threads. Without a device they are the computation, but for calls that post."""
        pieces, columns = self.pieces, self.columns
        threads = np.array([columns.streams(self._thread(key)) for key in columns.threads], np.int32)
        kind = np.full(len(pieces.start), CODE[Kind.HOST if self.has_device else Kind.COMPUTE])
        kind[pieces.call >= 0] = CODE[Kind.HOST]
        return {
            "kind": kind, "stream": threads[pieces.thread], "name": pieces.name, "start": pieces.start,
            "end": pieces.end, "iteration": self.marks.of(pieces.start),
        }  # fmt: skip

    def _thread(self, key: tuple[Any, Any]) -> str:
        name = self.columns.thread_names.get(key)
        return f"thread {key[1]}" if name is None else name if str(key[1]) in name else f"thread {key[1]} ({name})"

    def _device(self) -> Part:
        """Kernels and copies, those that communicate with what is known of it."""
        where, start, end, name = self.device
        role = np.array(self.columns.device_role, np.int8)
        launched = self.launched >= 0
        asked = np.where(launched, self.calls[1][self.launched] if len(self.calls[1]) else np.nan, np.nan)
        part = {
            "kind": np.where(role == Role.COPY, CODE[Kind.COPY], CODE[Kind.COMPUTE]), "stream": where, "name": name,
            "start": start, "end": end, "posted": np.minimum(asked, start),
            "iteration": self.marks.of(np.where(launched, asked, start)), "nbytes": np.array(self.columns.device_bytes),
            **{key: np.full(len(start), SCHEMA[key][0]) for key in ("group", "sequence", "peer", "transaction")},
        }  # fmt: skip
        rows = [one.row for one in self.on_device]
        for key, value in self._told(self.on_device).items():
            part[key][rows] = value
        return part

    def _host_collectives(self) -> Part:
        """Collectives that run on the host's own threads."""
        found = self.on_host
        threads = [self.columns.annotations[one.row].thread for one in found]
        keys = list(self.columns.threads)
        starts = np.array([one.start for one in found], np.float64)
        posted = np.array([one.posted for one in found], np.float64)
        return {
            **self._told(found), "start": starts, "end": np.array([one.end for one in found], np.float64),
            "posted": posted, "stream": np.array([self.columns.streams(self._thread(keys[t])) for t in threads]),
            "iteration": self.marks.of(np.where(np.isnan(posted), starts, posted)),
        }  # fmt: skip

    def _told(self, found: list[Collective]) -> Part:
        return {
            "kind": np.array([CODE[one.kind] for one in found], np.int8),
            "name": np.array([self.columns.names(one.name) for one in found], np.int32),
            "group": np.array([self.groups.setdefault(one.group, len(self.groups)) for one in found], np.int32),
            "sequence": np.array([one.sequence for one in found], np.int64),
            "nbytes": np.array([one.nbytes for one in found], np.float64),
            "peer": np.array([one.peer for one in found], np.int32),
            "transaction": np.array([self.transactions(one.transaction) for one in found], np.int32),
        }  # fmt: skip

    def _steps(self) -> Part:
        marks = self.marks
        num = len(marks.start)
        return {
            "kind": np.full(num, CODE[Kind.ITERATION]), "start": marks.start, "end": marks.end,
            "name": np.array([self.columns.names(name) for name in marks.names], np.int32),
            "stream": np.full(num, self.columns.streams("iterations") if num else 0), "iteration": np.arange(num),
        }  # fmt: skip

    def _memory(self) -> tuple[np.ndarray, np.ndarray]:
        """Samples of the device's memory; of the host's where no device has any."""
        kinds = self.columns.memory
        if not kinds:
            return np.zeros(0), np.zeros(0)
        at, held = kinds[max(kinds)]  # 0 is the host
        return np.array(at), np.array(held)


def _ns(us: float) -> int:
    """Whole nanoseconds; the product as a float would hold no more than a quarter of a microsecond since 1970."""
    return int(us) * NS_PER_US + round((us - int(us)) * NS_PER_US)


def _posts(columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Operations that post collectives, as calls."""
    posts = columns.posts
    return (
        np.array([post.thread for post in posts], np.int64), np.array([post.start for post in posts], np.float64),
        np.array([post.end for post in posts], np.float64),
        np.array([columns.names(post.name) for post in posts], np.int64),
    )  # fmt: skip
