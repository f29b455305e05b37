"""From what an importer found to a RankTrace: in order of start, on seconds near zero, every index in its table.

Refuses an event that ends before it starts or was posted after its start, and edges that form a cycle. Reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from capture.traces.records import KINDS, Group, Kind, RankTrace, Topology

__all__ = ["CODE", "MAX_WORLD", "Rows", "Table", "assemble", "topological_order"]

MAX_WORLD = 1 << 20
CODE = {kind: np.int8(index) for index, kind in enumerate(KINDS)}
NS = 1_000_000_000


class Table:
    """Texts and their indices, in order of first use."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def __call__(self, text: str | None) -> int:
        """Index of a text, -1 for none."""
        return -1 if text is None else self.index.setdefault(text, len(self.index))

    @property
    def texts(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self.index)


@dataclass(slots=True, kw_only=True)
class Rows:
    """Events one at a time, for recorders that write thousands, not millions. Times are whole nanoseconds."""

    streams: Table = field(default_factory=Table)
    names: Table = field(default_factory=Table)
    tensors: Table = field(default_factory=Table)
    transactions: Table = field(default_factory=Table)
    groups: dict[Group, int] = field(default_factory=dict)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self, kind: Kind, stream: str, name: str, start_ns: int, end_ns: int, *,
        posted_ns: int | None = None, iteration: int = -1, group: Group | None = None, sequence: int = -1,
        nbytes: float = float("nan"), peer: int = -1, transaction: str | None = None, tensor: str | None = None,
    ) -> int:  # fmt: skip
        """Adds an event and gives its number, for `edges`."""
        of = -1 if group is None else self.groups.setdefault(group, len(self.groups))
        self.rows.append((
            CODE[kind], self.streams(stream), self.names(name), start_ns, end_ns, posted_ns, iteration, of, sequence,
            nbytes, peer, self.transactions(transaction), self.tensors(tensor),
        ))  # fmt: skip
        return len(self.rows) - 1

    def trace(self, **header: Any) -> RankTrace:  # noqa: ANN401 - the fields of RankTrace that are not of events
        """All of them as a RankTrace; `header` holds its other fields, `epoch_ns` of second 0 of the recorder's clock.

        Times given to `add` are since that second 0, and the first of them becomes second 0 of the trace.
        """
        columns = list(zip(*self.rows, strict=True)) or [()] * 13
        first = min([*columns[3], *(ns for ns, _ in self.memory)], default=0)
        header["epoch_ns"] = header.get("epoch_ns", 0) + first
        pairs = np.array(self.edges, np.int64).reshape(-1, 2)
        notices = header.pop("notices", ())
        topology = header.pop("topology", Topology.UNKNOWN)
        fields = dict(
            header, names=self.names.texts, streams=self.streams.texts, groups=tuple(self.groups),
            transactions=self.transactions.texts, tensors=self.tensors.texts, kind=np.array(columns[0], np.int8),
            stream=np.array(columns[1], np.int32), name=np.array(columns[2], np.int32),
            start_s=_seconds(columns[3], first), end_s=_seconds(columns[4], first),
            posted_s=_seconds(columns[5], first), iteration=np.array(columns[6], np.int32),
            group=np.array(columns[7], np.int32), sequence=np.array(columns[8], np.int64),
            nbytes=np.array(columns[9], np.float64), peer=np.array(columns[10], np.int32),
            transaction=np.array(columns[11], np.int32), tensor=np.array(columns[12], np.int32),
        )  # fmt: skip
        return assemble(
            fields, before=pairs[:, 0], after=pairs[:, 1], memory_s=_seconds([ns for ns, _ in self.memory], first),
            memory_bytes=np.array([nbytes for _, nbytes in self.memory], np.float64), topology=topology,
            notices=notices,
        )  # fmt: skip


def _seconds(times_ns: Sequence[int | None], first_ns: int) -> np.ndarray:
    """Seconds after the first; None becomes NaN. Whole numbers are subtracted: a float holds no epoch's nanoseconds."""
    return np.array([np.nan if ns is None else (ns - first_ns) / NS for ns in times_ns], np.float64)


def assemble(
    fields: dict[str, Any], *, before: np.ndarray, after: np.ndarray, memory_s: np.ndarray, memory_bytes: np.ndarray,
    topology: Topology = Topology.UNKNOWN, notices: Sequence[str] = (),
) -> RankTrace:  # fmt: skip
    """A RankTrace of `fields` by name, columns in any order; columns that are not given hold "unknown".

    ValueError where an event ends before it starts, was posted after its start, or where edges form a cycle.
    """
    num = len(fields["start_s"])
    fields = dict(fields)
    unknown: dict[str, tuple[Any, Any]] = {
        "posted_s": (np.nan, np.float64), "iteration": (-1, np.int32), "group": (-1, np.int32),
        "sequence": (-1, np.int64), "nbytes": (np.nan, np.float64), "peer": (-1, np.int32),
        "transaction": (-1, np.int32), "tensor": (-1, np.int32),
    }  # fmt: skip
    for name, (value, dtype) in unknown.items():
        if name not in fields:
            fields[name] = np.full(num, value, dtype)
    _check_rank(fields)
    _check_groups(fields)
    _check_clock(fields)
    _check_content(fields)
    order = np.argsort(fields["start_s"], kind="stable")
    place = np.empty(num, np.int64)
    place[order] = np.arange(num)
    columns: dict[str, Any] = {k: v[order] if isinstance(v, np.ndarray) else v for k, v in fields.items()}
    before, after = place[before], place[after]
    if (cycle := _cycle(num, before, after)) is not None:
        name = columns["names"][columns["name"][cycle]]
        raise ValueError(
            f"{columns['source']}: event {name!r} must not depend on itself, but its dependencies form a cycle; "
            "write the trace again"
        )
    at = np.argsort(memory_s, kind="stable")
    trace = RankTrace(
        before=before, after=after, memory_s=memory_s[at], memory_bytes=memory_bytes[at], topology=topology,
        notices=tuple(notices), **columns,
    )  # fmt: skip
    assert all(len(getattr(trace, name)) == num for name in (*unknown, "kind", "stream", "name", "end_s"))
    return trace


def _check_rank(fields: dict[str, Any]) -> None:
    source, rank, world = fields["source"], fields["rank"], fields["world"]
    if world is not None and not 1 <= world <= MAX_WORLD:
        raise ValueError(f"{source}: world must be 1 to {MAX_WORLD} ranks, but is {world}; give that of the job")
    if not 0 <= rank < (MAX_WORLD if world is None else world):
        raise ValueError(f"{source}: rank must be below the world of {world}, but is {rank}; number ranks from 0")


def _check_groups(fields: dict[str, Any]) -> None:
    """Sizes and members are those of a job: what is made of them later is as large as they say."""
    most = MAX_WORLD if fields["world"] is None else fields["world"]
    for group in fields["groups"]:
        where = f"{fields['source']}: process group {group.name!r}"
        if not 0 <= group.size <= most:
            raise ValueError(f"{where} must have up to the {most} ranks of the job, but has {group.size}; record again")
        if stray := [rank for rank in group.ranks if not 0 <= rank < most]:
            raise ValueError(f"{where} must be of ranks below {most}, but has {stray[0]}; number ranks from 0")
        if len(set(group.ranks)) < len(group.ranks):
            raise ValueError(f"{where} must have each rank once, but has {list(group.ranks)}; leave one out")


def _check_content(fields: dict[str, Any]) -> None:
    """There is something to look at, and nothing of it has less than no bytes."""
    if not np.any(fields["kind"] != CODE[Kind.ITERATION]):
        raise ValueError(f"{fields['source']}: must hold operations, but holds none; record longer")
    negative = fields["nbytes"] < 0
    if np.any(negative):
        row = int(np.argmax(negative))
        raise ValueError(
            f"{fields['source']}: event {fields['names'][fields['name'][row]]!r} must have at least 0 bytes, but has "
            f"{fields['nbytes'][row]:.0f}; record again"
        )


def _check_clock(fields: dict[str, Any]) -> None:
    start_s, end_s, posted_s = fields["start_s"], fields["end_s"], fields["posted_s"]
    for wrong, what, seconds in (
        (end_s < start_s, "must not end before it starts, but ends", start_s - end_s),
        (posted_s > start_s, "must not start before it was posted, but starts", posted_s - start_s),
    ):
        if np.any(wrong):
            row = int(np.argmax(wrong))
            name = fields["names"][fields["name"][row]]
            raise ValueError(
                f"{fields['source']}: event {name!r} {what} {seconds[row] * 1e6:.3f} us earlier: the clock went "
                "backwards; record again"
            )


def _cycle(num: int, before: np.ndarray, after: np.ndarray) -> int | None:
    """An event of a cycle, if there is one. Edges that all go forward in a numbering cannot form one."""
    if np.all(before < after):
        return None
    left = set(range(num)) - set(topological_order(num, before, after).tolist())
    if not left:
        return None
    # What is left waits for a cycle or is in one: going back from it ends up in the cycle.
    waits_for = {int(a): int(b) for b, a in zip(before, after, strict=True) if int(b) in left}
    event, seen = min(left), set[int]()
    while event not in seen:
        seen.add(event)
        event = waits_for[event]
    return event


def topological_order(num: int, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Events so that each comes after those it depends on, ties by number; events of cycles and after are left out."""
    by = np.argsort(before, kind="stable")
    firsts = np.searchsorted(before[by], np.arange(num + 1)).tolist()
    targets = after[by].tolist()
    waits = np.bincount(after, minlength=num).tolist()
    order = [event for event in range(num) if waits[event] == 0]
    for event in order:  # grows while it is walked
        for target in targets[firsts[event] : firsts[event + 1]]:
            waits[target] -= 1
            if waits[target] == 0:
                order.append(target)
    return np.array(order, np.int64)
