"""Events of all ranks in one table, on one axis of time, and who belongs to whom. Makes no edges, moves no clock.

Two events belong together where their recorder said so: a SEND and a RECV by transaction, collectives by process group
and order. What is missing, doubled or without an id is refused with its file and event; nothing is matched by guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from capture.traces.records import KINDS, EventColumns, Kind, RankTrace

__all__ = ["Events", "collectives", "event_name", "join", "missing_ranks", "transfers"]

NS = 1e-9
T = TypeVar("T")
NUM_NAMED = 8  # ranks that a message names at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Events(EventColumns):
    """N events of R ranks, with indices into tables that all ranks share.

    node [N]: place of the event's rank in `traces`, which are in order of rank; peer [N]: that of the other rank.
    first [R + 1]: where each rank's events begin. streams [S]: (node, name). start_s, end_s, posted_s [N]: seconds
    after `epoch_ns`. groups [G]: (name, ranks, size).
    """

    traces: tuple[RankTrace, ...]
    epoch_ns: int
    streams: tuple[tuple[int, str], ...]
    groups: tuple[tuple[str, tuple[int, ...], int], ...]
    first: np.ndarray
    node: np.ndarray

    def of(self, kind: Kind) -> np.ndarray:
        """[N] bool: whether an event is of this kind."""
        return self.kind == KINDS.index(kind)


def missing_ranks(traces: Sequence[RankTrace]) -> list[int]:
    """Ranks of the job, or where its size is unknown of its process groups, that no trace is of."""
    job: set[int] = set()
    for trace in traces:
        job.update(range(trace.world or 0))
        for group in trace.groups:
            job.update(group.ranks or range(group.size))
    return sorted(job - {trace.rank for trace in traces})


def join(traces: Sequence[RankTrace]) -> Events:
    """One table. ValueError for no trace at all, a rank that is there twice, ranks of different jobs."""
    if not traces:
        raise ValueError("a job must have a trace of at least one rank, but got none; import its files first")
    ranks = tuple(sorted(traces, key=lambda trace: trace.rank))
    for one, other in zip(ranks[:-1], ranks[1:], strict=True):
        if one.rank == other.rank:
            law = f"a rank must be there once, but {one.source} and {other.source} are both of rank {one.rank}"
            raise ValueError(f"{law}; leave one out")
    jobs = {trace.job: trace.source for trace in ranks if trace.job}
    if len(jobs) > 1:
        (a, file), (b, another), *_ = jobs.items()
        raise ValueError(f"traces must be of one job, but {file} is of {a!r} and {another} of {b!r}; give one job's")
    worlds = {trace.world: trace.source for trace in ranks if trace.world}
    if len(worlds) > 1:
        (m, file), (n, another), *_ = worlds.items()
        raise ValueError(f"traces must be of one job, but {file} has {m} ranks and {another} {n}; give one job's")
    epoch = min(trace.epoch_ns for trace in ranks)
    shift = np.array([(trace.epoch_ns - epoch) * NS for trace in ranks])
    counts = np.array([len(trace) for trace in ranks])
    first = np.concatenate([[0], np.cumsum(counts)])
    node = np.repeat(np.arange(len(ranks)), counts)
    streams = [(r, name) for r, trace in enumerate(ranks) for name in trace.streams]
    stream_at = np.cumsum([0, *(len(trace.streams) for trace in ranks)])[:-1]
    names, name = _shared([trace.names for trace in ranks], [trace.name for trace in ranks])
    tensors, tensor = _shared([trace.tensors for trace in ranks], [trace.tensor for trace in ranks])
    texts, transaction = _shared([trace.transactions for trace in ranks], [trace.transaction for trace in ranks])
    tables = [[(g.name, g.ranks, g.size) for g in trace.groups] for trace in ranks]
    groups, group = _shared(tables, [trace.group for trace in ranks])
    place = {trace.rank: r for r, trace in enumerate(ranks)}

    def column(key: str) -> np.ndarray:
        return np.concatenate([getattr(trace, key) for trace in ranks])

    def moved(key: str) -> np.ndarray:
        return column(key) + shift[node]

    def numbered(key: str) -> np.ndarray:
        rows = [getattr(trace, key) + at for trace, at in zip(ranks, first[:-1], strict=True)]
        return np.concatenate(rows).astype(np.int64)

    return Events(
        traces=ranks, epoch_ns=epoch, names=names, streams=tuple(streams), groups=groups, transactions=texts,
        tensors=tensors, first=first, node=node, kind=column("kind"), stream=column("stream") + stream_at[node],
        name=name, start_s=moved("start_s"), end_s=moved("end_s"), posted_s=moved("posted_s"),
        iteration=column("iteration"), group=group, sequence=column("sequence"), nbytes=column("nbytes"),
        peer=np.array([place.get(int(p), -1) for p in column("peer")], dtype=np.int64), transaction=transaction,
        tensor=tensor,
        before=numbered("before"), after=numbered("after"),
    )  # fmt: skip


def _shared(tables: Sequence[Sequence[T]], columns: Sequence[np.ndarray]) -> tuple[tuple[T, ...], np.ndarray]:
    """One table of all entries, and the columns with indices into it; -1 stays."""
    place: dict[T, int] = {}
    out = []
    for table, column in zip(tables, columns, strict=True):
        to = np.array([*(place.setdefault(entry, len(place)) for entry in table), -1], dtype=np.int64)
        out.append(to[column])
    return tuple(place), np.concatenate(out)


def event_name(events: Events, i: int) -> str:
    """An event for a message: file, name, iteration."""
    trace = events.traces[int(events.node[i])]
    when = f" of iteration {events.iteration[i]}" if events.iteration[i] >= 0 else ""
    return f"{trace.source}: {events.names[int(events.name[i])]!r}{when}"


def transfers(events: Events, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SEND and RECV [P] of each transfer among the chosen events [N] bool.

    The same transaction in two iterations is two transfers. ValueError where a transfer has no id, is there twice or
    lacks an end.
    """
    ends = {}
    for kind in (Kind.SEND, Kind.RECV):
        mine = np.flatnonzero(events.of(kind) & chosen)
        nameless = mine[events.transaction[mine] < 0]
        if len(nameless):
            law = "a SEND or RECV must have a transaction id that its peer shares"
            raise ValueError(f"{event_name(events, int(nameless[0]))} has none: {law}; record with ids")
        key = _keys(events, mine)
        order = np.argsort(key, kind="stable")
        double = np.flatnonzero(key[order][1:] == key[order][:-1])
        if len(double):
            i = int(mine[order[double[0] + 1]])
            text = events.transactions[int(events.transaction[i])]
            law = f"transaction {text!r} must have one {kind.value}, but has another in"
            raise ValueError(
                f"{event_name(events, i)}: {law} {event_name(events, int(mine[order[double[0]]]))}; "
                "make ids unique within an iteration"
            )
        ends[kind] = (key[order], mine[order])
    (sent, send), (received, recv) = ends[Kind.SEND], ends[Kind.RECV]
    for have, mine, other, lacks in ((sent, send, received, "RECV"), (received, recv, sent, "SEND")):
        alone = np.flatnonzero(~np.isin(have, other))
        if len(alone):
            i = int(mine[alone[0]])
            text = events.transactions[int(events.transaction[i])]
            raise ValueError(
                f"{event_name(events, i)}: transaction {text!r} must have two ends, but no rank has its {lacks}; "
                "import all ranks, cut at the same iterations"
            )
    return send, recv


def _keys(events: Events, mine: np.ndarray) -> np.ndarray:
    """A number per transaction and iteration."""
    return events.transaction[mine] * (int(events.iteration.max(initial=0)) + 2) + events.iteration[mine] + 1


def collectives(events: Events, chosen: np.ndarray) -> np.ndarray:
    """Which operation each event is a rank's part of, [N]: numbered in order of start, -1 where not chosen.

    ValueError where a part has no group or order, a group lacks ranks, or a rank takes part twice.
    """
    mine = np.flatnonzero(events.of(Kind.COLLECTIVE) & chosen)
    loose = mine[(events.group[mine] < 0) | (events.sequence[mine] < 0)]
    if len(loose):
        law = "a collective must say its process group and its order there"
        raise ValueError(f"{event_name(events, int(loose[0]))}: {law}, but does not; import it anew")
    key = events.group[mine] * (int(events.sequence.max(initial=0)) + 1) + events.sequence[mine]
    keys, which = np.unique(key, return_inverse=True)
    size = np.array([group[2] for group in events.groups], dtype=np.int64)
    ranks = np.array([trace.rank for trace in events.traces])
    whole = np.full(len(events), -1, dtype=np.int64)
    whole[mine] = which
    pairs = which * len(events.traces) + events.node[mine]
    values, counts = np.unique(pairs, return_counts=True)
    if (counts > 1).any():
        i = int(mine[np.flatnonzero(pairs == values[np.argmax(counts > 1)])[1]])
        raise ValueError(f"{event_name(events, i)}: a rank must take part once, but does twice; make sequences unique")
    there = np.bincount(which, minlength=len(keys))
    want = np.zeros(len(keys), dtype=np.int64)
    want[which] = size[events.group[mine]]
    short = np.flatnonzero((want > 0) & (there < want))
    if len(short):
        i = int(mine[np.argmax(which == short[0])])
        members = events.groups[int(events.group[i])][1] or tuple(range(int(want[short[0]])))
        have = set(ranks[events.node[mine[which == short[0]]]].tolist())
        lacking = [rank for rank in members if rank not in have][:NUM_NAMED]
        raise ValueError(
            f"{event_name(events, i)}: all {want[short[0]]} ranks of the group must be there, but "
            f"{', '.join(map(str, lacking)) or 'some'} are missing; import their traces too"
        )
    begin = np.full(len(keys), np.inf)
    np.minimum.at(begin, which, events.start_s[mine])
    order = np.argsort(begin, kind="stable")
    number = np.empty(len(keys), dtype=np.int64)
    number[order] = np.arange(len(keys))
    whole[mine] = number[which]
    return whole
