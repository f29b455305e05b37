"""Reads BytePS's communication traces (`comm.json`): each partition of each gradient through its stages.

PUSH and PULL are transfers to and from servers, which record nothing: nothing pairs with them. REDUCE and BROADCAST are
collectives of the GPUs of one machine. An event of `total` is a gradient's wait and work together: it gives when
it was posted. The rank is that of the folder that holds the file, as BytePS lays them out. Refuses stages that it does
not know.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

import msgspec

from capture.traces.assemble import Rows
from capture.traces.chrome import ChromeEvents
from capture.traces.opened import Opened
from capture.traces.records import Group, Kind, RankTrace, Topology

__all__ = ["looks_like_byteps", "read_byteps"]

NS_PER_US = 1000
TOTAL = "total"
KINDS = {
    "COORDINATE_REDUCE": Kind.HOST, "REDUCE": Kind.COLLECTIVE, "COPYD2H": Kind.COPY, "PCIE_REDUCE": Kind.HOST,
    "COORDINATE_PUSH": Kind.HOST, "PUSH": Kind.SEND, "PULL": Kind.RECV, "COPYH2D": Kind.COPY,
    "COORDINATE_BROADCAST": Kind.HOST, "BROADCAST": Kind.COLLECTIVE, "COMPRESS": Kind.COMPUTE,
    "DECOMPRESS": Kind.COMPUTE,
}  # fmt: skip
STAGES = tuple(KINDS)
LOCAL = Group(name="local", size=0)


Whole = Annotated[int, msgspec.Meta(ge=-(10**17), le=10**17)]  # microseconds


class _Event(msgspec.Struct, gc=False):
    name: str = ""
    ph: str = ""
    ts: Whole = 0
    dur: Whole = 0
    pid: str | int = ""
    tid: str | int = ""


def looks_like_byteps(head: bytes) -> bool:
    """Whether events have what only BytePS writes."""
    return b'"total"' in head and b'"Comm.' in head


def read_byteps(file: Opened) -> RankTrace:
    """The trace of one worker."""
    totals: dict[str, list[_Event]] = defaultdict(list)
    stages: list[_Event] = []
    for events in ChromeEvents(file, _Event):
        for event in events:
            if event.ph == "X" and event.dur < 0:
                raise ValueError(
                    f"{file.source}: event {event.name!r} must not end before it starts, but ends {-event.dur} us "
                    "earlier: the clock went backwards; record again"
                )
            if event.ph == "X" and str(event.tid) == TOTAL:
                totals[str(event.pid)].append(event)
            elif event.ph == "X":
                stages.append(event)
    if not stages:
        raise ValueError(f"{file.source}: must hold stages of partitions, but holds none; record more steps")
    for each in totals.values():
        each.sort(key=lambda total: total.ts)
    local = file.folder.isdecimal()
    rank = int(file.folder) if local else 0
    notice = "ranks are those of folders, local to a machine" if local else "ranks are not recorded: taken for rank 0"
    return _rows(file.source, stages, totals).trace(
        source=file.source, format="byteps", rank=rank, world=None, machine=None, job="",
        topology=Topology.PARAMETER_SERVER, notices=[notice, "sizes of tensors are not recorded"],
    )  # fmt: skip


def _rows(source: str, stages: list[_Event], totals: dict[str, list[_Event]]) -> Rows:
    """Stages in order. A partition's k-th time through a stage is of iteration k, and so is its gradient's total."""
    rows = Rows()
    times: dict[tuple[object, ...], int] = defaultdict(int)
    last: dict[tuple[object, ...], tuple[int, int]] = {}
    sequence = 0
    for event in sorted(stages, key=lambda event: (event.ts, event.ts + event.dur)):
        stage, tensor = event.name.rpartition(".")[2], str(event.pid)
        if stage not in KINDS:
            raise ValueError(f"{source}: event {event.name!r} must be of a stage in {', '.join(STAGES)}, but is not")
        iteration = times[tensor, event.tid, stage]
        times[tensor, event.tid, stage] += 1
        kind, whole = KINDS[stage], totals.get(tensor, [])
        total = whole[iteration].ts if iteration < len(whole) else event.ts
        is_local = kind is Kind.COLLECTIVE
        row = rows.add(
            kind, stage.lower(), stage.lower(), event.ts * NS_PER_US, (event.ts + event.dur) * NS_PER_US,
            posted_ns=min(total, event.ts) * NS_PER_US, iteration=iteration, tensor=f"{tensor}|{event.tid}",
            group=LOCAL if is_local else None, sequence=sequence if is_local else -1,
        )  # fmt: skip
        sequence += is_local
        key = (tensor, event.tid, iteration)
        if key in last and last[key][1] <= event.ts:
            rows.edges.append((last[key][0], row))
        last[key] = (row, event.ts + event.dur)
    return rows
