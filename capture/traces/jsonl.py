"""Reads this package's own traces: JSON lines, a header and then one event a line (docs/traces.md has every field).

Version 1 is what is written today; version 0 has neither `format` nor `version` in its header. Refuses a later version,
keys that it does not know, lines of one stream whose ends go back in time, and a transaction that a rank names twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated

import msgspec

from capture.profile.recorder import FORMAT, VERSION
from capture.traces.assemble import MAX_WORLD, Rows
from capture.traces.opened import Opened, named
from capture.traces.records import Group, Kind, RankTrace, Topology

__all__ = ["FORMAT", "VERSION", "read_jsonl"]

TOLERANCE_NS = 1_000_000  # ends on a stream may stand this much out of order: threads race for the file
WORLD = "world"

KIND_OF = {
    "FW": Kind.COMPUTE, "BW": Kind.COMPUTE, "UPD": Kind.COMPUTE, "COMP": Kind.COMPUTE, "RED": Kind.COMPUTE,
    "COMM": Kind.COLLECTIVE, "SEND": Kind.SEND, "RECV": Kind.RECV, "COPY": Kind.COPY, "HOST": Kind.HOST,
    "ITER": Kind.ITERATION,
}  # fmt: skip
STREAM_OF = {"SEND": "send", "RECV": "recv", "RED": "reduce", "COMM": "communication", "COPY": "copy", "HOST": "host",
             "ITER": "iterations"}  # fmt: skip
MARK, MEMORY = "MARK", "MEM"
CATEGORIES = (*KIND_OF, MARK, MEMORY)


LARGEST = (1 << 63) - 1
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    ranks: list[int]


class _Meta(msgspec.Struct):
    """What the recorder was told; keys besides these are its own notes."""

    rank: int
    world: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORLD)] | None = None
    mode: str = ""
    topology: str = ""
    job: str = ""
    machine: str | None = None
    groups: list[_Group] = []


class _Header(msgspec.Struct):
    meta: _Meta
    format: str = FORMAT
    version: int = 0
    bof: dict[str, int] = {}  # bucket of each tensor


class _Event(msgspec.Struct, forbid_unknown_fields=True):
    """One line. `ts`, `end`, `enq`: start, end and posting, whole nanoseconds of the rank's clock."""

    name: str
    cat: str
    ts: Nanoseconds
    end: Nanoseconds | None = None
    it: Annotated[int, msgspec.Meta(ge=-1, le=LARGEST)] = -1
    enq: Nanoseconds | None = None
    stream: str | None = None
    group: str | None = None
    bytes: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)] | None = None
    tensor: str | None = None
    bucket: int | None = None
    peer: Annotated[int, msgspec.Meta(ge=-1, le=MAX_WORLD)] = -1
    tx: str | None = None
    step: int | None = None
    id: int | None = None
    deps: list[int] = []


def read_jsonl(file: Opened) -> RankTrace:
    """The trace of one rank."""
    lines = _lines(file)
    header = _header(file.source, next(lines, (1, b""))[1])
    meta = header.meta
    groups = {g.name: Group(name=g.name, size=len(g.ranks), ranks=tuple(g.ranks)) for g in meta.groups}
    if meta.world is not None:
        groups.setdefault(WORLD, Group(name=WORLD, size=meta.world, ranks=tuple(range(meta.world))))
    lawful = _Lawful(file.source, groups)
    decoder = msgspec.json.Decoder(_Event)
    events, memory = [], []
    for number, line in lines:
        try:
            event = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"{file.source}:{number}: each line must be an event of docs/traces.md, but {error}; mend it"
            ) from error
        lawful.check(number, event)
        if event.cat == MEMORY:
            memory.append((event.ts, event.bytes or 0))
        elif event.cat != MARK:
            events.append(event)
    rows = _rows(events, groups)
    rows.memory = memory
    rows.edges = _edges(file.source, events, header.bof)
    return rows.trace(
        source=file.source, format="jsonl", rank=meta.rank, world=meta.world, machine=meta.machine, job=meta.job,
        topology=_topology(file.source, meta),
    )  # fmt: skip


def _lines(file: Opened) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with named(file.source):
            for line in file.stream:
                number += 1
                if line.strip():
                    yield number, line
    except ValueError as error:
        raise ValueError(f"{error}; the last whole line is {number}") from error


def _header(source: str, line: bytes) -> _Header:
    try:
        header = msgspec.json.decode(line, type=_Header)
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"{source}:1: the first line must be the header of docs/traces.md, but {error}; mend it"
        ) from error
    if header.format != FORMAT or not 0 <= header.version <= VERSION:
        raise ValueError(
            f"{source}:1: must be {FORMAT!r} of version 0 to {VERSION}, but is {header.format!r} of version "
            f"{header.version}; read it with the package that wrote it"
        )
    return header


class _Lawful:
    """What holds of every line, given those above it."""

    def __init__(self, source: str, groups: dict[str, Group]) -> None:
        self.source, self.groups = source, groups
        self.last_ns: dict[str, int] = {}
        self.seen: set[tuple[str, int, str | None]] = set()
        self.ids: dict[int, int] = {}

    def check(self, number: int, event: _Event) -> None:
        """ValueError that names the line and the event."""
        what = f"{self.source}:{number}: event {event.name!r}"
        if event.cat not in CATEGORIES:
            raise ValueError(f"{what} must have a cat of {', '.join(CATEGORIES)}, but has {event.cat!r}")
        if event.cat == MEMORY and event.bytes is None:
            raise ValueError(f"{what} is a sample of memory and must have bytes; write them")
        if event.cat in (MARK, MEMORY):
            return
        if event.end is None or event.end < event.ts:
            raise ValueError(f"{what} must end after ts={event.ts}, but end is {event.end}; record again")
        if event.enq is not None and event.enq > event.ts:
            raise ValueError(f"{what} must be posted before ts={event.ts}, but enq is {event.enq}; record again")
        if event.group is not None and event.group not in self.groups:
            raise ValueError(
                f"{what} must be of a group in the header, but {event.group!r} is none; have {[*self.groups] or 'none'}"
            )
        if event.id is not None and (line := self.ids.setdefault(event.id, number)) != number:
            raise ValueError(f"{what} must have an id of its own, but {event.id} is that of line {line}; number anew")
        self._check_stream(what, event)
        if event.cat in ("SEND", "RECV"):
            self._check_transfer(what, event)

    def _check_stream(self, what: str, event: _Event) -> None:
        stream, end_ns = _stream(event), event.end or 0
        back_ns = self.last_ns.get(stream, end_ns) - end_ns
        if back_ns > TOLERANCE_NS:
            raise ValueError(
                f"{what} must end after those above it on stream {stream!r}, but ends {back_ns / 1e6:.3f} ms before "
                "one: the clock went backwards; record again"
            )
        self.last_ns[stream] = end_ns + max(back_ns, 0)

    def _check_transfer(self, what: str, event: _Event) -> None:
        if event.tx is None or event.peer < 0:
            raise ValueError(f"{what} is a {event.cat} and must have tx and peer; write both")
        key = (event.cat, event.it, event.tx)
        if key in self.seen:
            raise ValueError(
                f"{what} must have a transaction of its own, but {event.tx!r} stands twice among the {event.cat} of "
                f"iteration {event.it}; number the transfers"
            )
        self.seen.add(key)


def _stream(event: _Event) -> str:
    return event.stream or STREAM_OF.get(event.cat, "compute")


def _posted_ns(event: _Event) -> int:
    """When it was asked for: collectives of several threads may start in another order than that."""
    return event.ts if event.enq is None else event.enq


def _topology(source: str, meta: _Meta) -> Topology:
    name = meta.topology or (meta.mode if meta.mode == "ring" else Topology.UNKNOWN.value)
    try:
        return Topology(name)
    except ValueError:
        have = ", ".join(t.value for t in Topology)
        raise ValueError(f"{source}:1: topology must be one of {have}, but is {name!r}") from None


def _rows(events: list[_Event], groups: dict[str, Group]) -> Rows:
    rows = Rows(groups={group: index for index, group in enumerate(groups.values())})
    iteration = {it: index for index, it in enumerate(sorted({e.it for e in events if e.it >= 0}))}
    sequence = _sequences(events)
    for number, e in enumerate(events):
        assert e.end is not None
        kind = KIND_OF[e.cat]
        rows.add(
            kind, _stream(e), e.name, e.ts, e.end, posted_ns=e.enq, iteration=iteration.get(e.it, -1),
            group=groups.get(e.group or WORLD) if kind is Kind.COLLECTIVE else None, sequence=sequence.get(number, -1),
            nbytes=float("nan") if e.bytes is None else e.bytes, peer=e.peer,
            transaction=None if e.tx is None else f"i{e.it}|{e.tx}",
            tensor=e.tensor if e.bucket is None else f"bucket {e.bucket}",
        )  # fmt: skip
    return rows


def _sequences(events: list[_Event]) -> dict[int, int]:
    """Place of each collective among those of its group, in the order in which they were posted."""
    of_group: dict[str, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        if event.cat == "COMM":
            of_group[event.group or WORLD].append(number)
    return {
        number: place
        for members in of_group.values()
        for place, number in enumerate(sorted(members, key=lambda n: _posted_ns(events[n])))
    }


def _edges(source: str, events: list[_Event], bucket_of: dict[str, int]) -> list[tuple[int, int]]:
    """`deps` as written, and what buckets imply."""
    index = {e.id: number for number, e in enumerate(events) if e.id is not None}
    edges = []
    for number, event in enumerate(events):
        for dep in event.deps:
            if dep not in index:
                raise ValueError(
                    f"{source}: event {event.name!r} must depend on events of the file, but {dep} is none; have ids "
                    f"of the file in deps"
                )
            edges.append((index[dep], number))
    return edges + _bucket_edges(events, bucket_of)


def _bucket_edges(events: list[_Event], bucket_of: dict[str, int]) -> list[tuple[int, int]]:
    """Gradients go before their copy and transfer, that before the update; RECVs before what passes them on.

    Only where recorded times agree.
    """
    found: dict[tuple[int, str, int, int], int] = {}  # iteration, category, bucket, step
    ready: dict[tuple[int, int], list[int]] = defaultdict(list)
    updates = {e.it: number for number, e in enumerate(events) if e.cat == "UPD"}
    for number, e in enumerate(events):
        bucket = e.bucket if e.bucket is not None else bucket_of.get(e.tensor or "")
        if bucket is not None and e.cat == "BW":
            ready[e.it, bucket].append(number)
        elif bucket is not None:
            found[e.it, e.cat, bucket, e.step or 0] = number
    edges = [
        (first, copy)
        for made in ready.values()
        for copy in made
        if events[copy].bucket is not None
        for first in made
        if first != copy and events[first].bucket is None
    ]
    for (it, cat, bucket, step), number in found.items():
        before = [found.get((it, "RECV", bucket, step))] if cat == "RED" else []
        if cat == "SEND":
            before = [found.get((it, kind, bucket, step - 1)) for kind in ("RED", "RECV")]
        if cat in ("COMM", "SEND", "RECV") and step == 0:
            before = [*before, *ready[it, bucket]]
        edges += [(first, number) for first in before if first is not None]
        if cat in ("COMM", "SEND", "RECV") and it in updates:
            edges.append((number, updates[it]))
    return [(a, b) for a, b in edges if (events[a].end or 0) <= events[b].ts]
