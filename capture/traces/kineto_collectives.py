"""Which events of a profiler trace are collectives and transfers, of what group, size and place in order.

New traces tell all of it in a kernel's arguments. Of old ones the annotation `nccl:NAME` around the launch tells name
and size; groups are then told apart by stream, as a communicator runs on one of its own, and taken to span the world.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from capture.traces.communication import (
    KNOWN,
    Dims,
    collective_name,
    element_bytes,
    elements,
    kernel_collective,
    rank_list,
)
from capture.traces.kineto_events import Annotation, Args, Columns
from capture.traces.records import Group, Kind

__all__ = ["Collective", "device_collectives", "host_collectives", "numbered"]

ON_HOST = ("gloo", "mpi")  # backends whose threads are where a collective runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective, or a transfer between two ranks, in microseconds.

    row: of the device events, or of `annotations` for one that runs on the host. post: row of `posts`, -1 unknown.
    """

    row: int
    name: str
    kind: Kind
    start: float
    end: float
    posted: float
    group: Group
    nbytes: float
    post: int = -1
    peer: int = -1
    sequence: int = -1
    transaction: str | None = None


class _Group(msgspec.Struct):
    pg_name: str | int
    pg_size: int | None = None
    group_size: int | None = None
    ranks: Any = None


class _Info(msgspec.Struct):
    """`distributedInfo` of the header."""

    rank: int = 0
    world_size: int | None = None
    pg_config: list[_Group] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the header tells of a job's groups."""

    rank: int
    world: int | None
    groups: dict[str, Group]

    @classmethod
    def of(cls, source: str, told: object) -> Job:
        """From `distributedInfo`."""
        try:
            info = msgspec.convert({} if told is None else told, _Info)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{source}: distributedInfo must tell rank, world and groups, but {error}; record again"
            ) from error
        groups = {}
        for one in info.pg_config or []:
            ranks = rank_list(one.ranks)
            size = one.pg_size or one.group_size or len(ranks)
            groups[str(one.pg_name)] = Group(name=str(one.pg_name), size=size, ranks=ranks)
        return cls(rank=info.rank, world=info.world_size, groups=groups)

    def group(self, args: Args | None) -> Group | None:
        """The group that an event names, or the only one that there is."""
        if args is not None and args.group_name is not None:
            name, ranks = str(args.group_name), rank_list(args.group_ranks)
            known = self.groups.get(name)
            if not ranks and known is not None:
                return known
            return Group(name=name, size=args.group_size or len(ranks), ranks=ranks)
        return next(iter(self.groups.values())) if len(self.groups) == 1 else None

    def assumed(self, name: str) -> Group:
        """A group that nothing tells of."""
        return Group(name=name, size=self.world or 0)


def device_collectives(columns: Columns, job: Job, launched: np.ndarray, notices: list[str]) -> list[Collective]:
    """Those that run as kernels. `launched`: row of the call of each device event, -1 unknown."""
    found, assumed = [], dict[int, Group]()
    around = _Around(columns.annotations)
    unpaired = 0
    for row, args in sorted(columns.communication.items(), key=lambda item: columns.device.start[item[0]]):
        kernel = columns.names.texts[columns.device.name[row]]
        of_kernel = kernel_collective(kernel)
        if of_kernel is None and args.collective is None:
            continue
        call = int(launched[row])
        note = None if call < 0 else around(columns.calls.where[call], columns.calls.start[call])
        name = _name(args.collective or ("" if note is None else note.name), of_kernel)
        group, where = job.group(args), columns.device.where[row]
        if group is None:
            group = assumed.setdefault(where, job.assumed(f"stream {len(assumed)}"))
        start, end = columns.device.start[row], columns.device.start[row] + columns.device.duration[row]
        posted = float("nan") if call < 0 else min(columns.calls.start[call], start)
        one = Collective(
            row=row, name=name, kind=Kind.COLLECTIVE, start=start, end=end, posted=posted, group=group,
            nbytes=_nbytes(name, args, note),
        )  # fmt: skip
        found.append(_directed(one, args, job.rank))
        unpaired += found[-1].sequence == UNPAIRED
    if assumed:
        notices.append("groups of collectives are not recorded: one is assumed per stream, of all ranks")
    if unpaired:
        notices.append(f"{unpaired} sends and receives do not tell the other rank: they are paired with nothing")
    return found


def host_collectives(columns: Columns, job: Job, notices: list[str]) -> list[Collective]:
    """Those of backends that run on the host's own threads, each matched to the operation that posted it."""
    waiting: dict[str, list[int]] = defaultdict(list)
    for post in sorted(range(len(columns.posts)), key=lambda p: columns.posts[p].start):
        waiting[collective_name(columns.posts[post].name)].append(post)
    found, missing = [], 0
    group_of = dict[str, Group]()
    rows = [r for r, note in enumerate(columns.annotations) if note.name.partition(":")[0] in ON_HOST]
    for row in sorted(rows, key=lambda r: columns.annotations[r].start):
        note = columns.annotations[row]
        name, count = collective_name(note.name), _elements(note.args)
        post = _posted(waiting[name], columns.posts, note, count)
        missing += post < 0
        posted = float("nan") if post < 0 else columns.posts[post].start
        backend = note.name.partition(":")[0]
        group = job.group(note.args) or group_of.setdefault(backend, job.assumed(backend))
        found.append(Collective(
            row=row, name=name, kind=Kind.COLLECTIVE, start=note.start, end=note.end, posted=posted, group=group,
            nbytes=_nbytes(name, note.args or Args(), note), post=post,
        ))  # fmt: skip
    if missing:
        notices.append(f"{missing} collectives have no recorded posting: they count as posted when they started")
    if group_of:
        notices.append("groups of collectives are not recorded: one is assumed per backend, of all ranks")
    return found


def numbered(found: Sequence[Collective]) -> list[Collective]:
    """With the place of each collective in its group, and of each transfer among those between its two ranks."""
    order = sorted(range(len(found)), key=lambda i: (_asked(found[i]), found[i].start))
    counts: dict[object, int] = defaultdict(int)
    out = list(found)
    for index in order:
        one = found[index]
        if one.transaction is not None:
            key: object = (one.group, one.transaction)
            out[index] = replace(one, transaction=f"{one.group.name}|{one.transaction}|{counts[key]}", sequence=-1)
        elif one.sequence == UNPAIRED:
            out[index] = replace(one, sequence=-1)
            continue
        else:
            key = one.group
            out[index] = replace(one, sequence=counts[key])
        counts[key] += 1
    return out


UNPAIRED = -2


def _asked(one: Collective) -> float:
    return one.start if np.isnan(one.posted) else one.posted


def _directed(one: Collective, args: Args, rank: int) -> Collective:
    """A send or receive as a transfer between two ranks, where the other is told."""
    if one.name == "coalesced":
        return replace(one, sequence=UNPAIRED)
    if one.name not in ("send", "recv"):
        return one
    peer = args.target_rank if one.name == "send" else args.source_rank
    if peer is None or peer < 0 or peer == rank:
        return replace(one, sequence=UNPAIRED)
    pair = (rank, peer) if one.name == "send" else (peer, rank)
    kind = Kind.SEND if one.name == "send" else Kind.RECV
    return replace(one, kind=kind, peer=peer, transaction=f"{pair[0]}>{pair[1]}")


def _name(told: str, of_kernel: str | None) -> str:
    """What a collective is called; several in one kernel (`coalesced`) are told apart by the kernel at best."""
    name = collective_name(told)
    if told and (name in KNOWN or of_kernel is None):
        return name
    return "coalesced" if of_kernel == "send_recv" and told else of_kernel or "collective"


class _Around:
    """The innermost annotation of a library around a moment of a thread."""

    def __init__(self, notes: Sequence[Annotation]) -> None:
        self.of_thread: dict[int, list[Annotation]] = defaultdict(list)
        for note in sorted(notes, key=lambda note: note.start):
            self.of_thread[note.thread].append(note)
        self.starts = {thread: [note.start for note in each] for thread, each in self.of_thread.items()}

    def __call__(self, thread: int, at: float) -> Annotation | None:
        notes = self.of_thread.get(thread, [])
        for index in range(bisect_right(self.starts.get(thread, []), at) - 1, -1, -1):
            if notes[index].end >= at:
                return notes[index]
            if at - notes[index].start > LONGEST:
                return None
        return None


LONGEST = 10e6  # microseconds: no annotation of a library is longer


def _posted(waiting: list[int], posts: Sequence[Annotation], note: Annotation, count: int | None) -> int:
    """Takes the first posting that can be of this collective: before it, and of as many elements."""
    for place, post in enumerate(waiting):
        if posts[post].start > note.start:
            return -1
        asked = _elements(posts[post].args, first=True)
        if count is None or asked is None or asked == count:
            return waiting.pop(place)
    return -1


def _elements(args: Args | None, *, first: bool = False) -> int | None:
    """Elements of all inputs, or of the first (a list of tensors), where they are told."""
    dims = None if args is None else _dims(args)
    if not dims:
        return None
    one = dims[0] if first else dims
    return elements(one) if isinstance(one, list) else None


def _nbytes(name: str, args: Args, note: Annotation | None) -> float:
    """Bytes that this rank gives, or of a receive gets; not a number where not told."""
    told = args.out_elements if name == "recv" else args.in_elements
    if isinstance(told, int | float) and args.dtype is not None and (width := element_bytes(args.dtype)) is not None:
        return float(told * width)
    if note is None or note.args is None:
        return float("nan")
    dims, types = _dims(note.args), _decoded(note.args.types, list[str]) or []
    widths = [element_bytes(dtype) for dtype in types]
    if not dims or len(widths) != len(dims) or None in widths:
        return float("nan")
    counts = [elements(dim) for dim in dims if isinstance(dim, list)]
    return float(sum(count * (width or 0) for count, width in zip(counts, widths, strict=False)))


def _dims(args: Args) -> list[Any] | None:
    return _decoded(args.dims, Dims)


def _decoded(raw: msgspec.Raw, form: Any) -> list[Any] | None:  # noqa: ANN401 - a type
    """What stands there; None for nothing, or for something else."""
    try:
        value: list[Any] = msgspec.json.decode(raw, type=form)
    except msgspec.MsgspecError:
        return None
    return value
