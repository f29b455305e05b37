"""Checks that traces are of one job, and that what should be one collective or transfer is one. Aligns no clocks.

Believes nothing by order alone: process group, order, name and size must agree, and so must the ends, since a
collective ends everywhere at about the same moment (within 1 to 7 us on one host of eight V100). Refuses with the
figure that disagrees; where the recorder gives collectives a transaction, ends may differ. Missing ranks are told, not
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from capture.traces.assemble import CODE
from capture.traces.joined import missing_ranks
from capture.traces.records import Group, Kind, RankTrace

__all__ = ["Agreement", "Pairing", "pair"]

NS = 1_000_000_000
FLOOR_S = 100e-6
"""Ends within this agree whatever a collective takes: two clocks that drift 20 us a second apart, over five seconds."""
SHARE, OF_DURATION = 80, 0.5
"""This percentage of the ends must agree within this part of a collective's median duration on the rank that came last.
A ring of four at 400 Mbit/s: within 0.15. A sampled pair that its order mismatches: 2.8."""
ENOUGH = 3  # paired ends below which a constant clock difference explains anything
UNEQUAL = ("all_to_all", "gather", "scatter", "send_recv", "barrier")
"""Collectives whose ranks may give different sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How well the ends of what two ranks did together agree.

    clock_s: end on rank `b` less that on `a`, the median. median_s, most_s, worst_s: what is left of differences
    without it: of half, of SHARE percent, of all. duration_s: median over collectives of the shorter duration of the
    two, which is that of the rank that came last.
    """

    a: int
    b: int
    num_paired: int
    clock_s: float
    median_s: float
    most_s: float
    worst_s: float
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """What the checks found. `missing`: ranks of the job without a trace. Counts are of collectives and transfers that
    at least two ranks recorded, not of their events.
    """  # noqa: D205 - one sentence would be no clearer

    missing: tuple[int, ...]
    num_collectives: int
    num_transfers: int
    agreements: tuple[Agreement, ...]
    notices: tuple[str, ...] = ()


def pair(traces: Sequence[RankTrace]) -> Pairing:
    """Pairs what the ranks of one job did together; ValueError where they did not."""
    _check_job(traces)
    groups = _shared_groups(traces)
    num_collectives, agreements = 0, []
    ends: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}
    by_order: set[tuple[int, int]] = set()
    unlike: dict[tuple[int, int], str] = {}
    for first, *others in groups.values():
        num_collectives += len(first.rows)
        for other in others:
            key = (first.trace.rank, other.trace.rank)
            _check_number(first, other)
            if (offence := _unlike(first, other)) is not None:
                unlike.setdefault(key, offence)
            if np.any(first.durations_s > 0) or np.any(other.durations_s > 0):  # else no times are recorded
                ends.setdefault(key, []).append(_ends(first, other))
            if not _same_transactions(first, other):
                by_order.add(key)
    of_rank = {trace.rank: trace for trace in traces}
    for pair_of_ranks, offence in unlike.items():
        if pair_of_ranks not in ends:
            raise ValueError(f"{offence}; give traces of the same steps")
    for (a, b), differences in sorted(ends.items()):
        agreement = _agreement(a, b, differences)
        if (a, b) in by_order or (a, b) in unlike:
            _check_pair(of_rank[a], of_rank[b], agreement, unlike.get((a, b)))
        agreements.append(agreement)
    missing = tuple(missing_ranks(traces))
    return Pairing(
        missing=missing, num_collectives=num_collectives, num_transfers=_check_transfers(of_rank),
        agreements=tuple(agreements), notices=tuple(_notices(traces, missing, agreements)),
    )  # fmt: skip


def _check_job(traces: Sequence[RankTrace]) -> None:
    first, seen = traces[0], dict[int, RankTrace]()
    for trace in traces:
        for what in ("world", "job"):
            if (mine := getattr(trace, what)) != (its := getattr(first, what)):
                raise ValueError(
                    f"{trace.source}: must be of the same job as {first.source}, but its {what} is {mine} against "
                    f"{its}; give the ranks of one job"
                )
        if trace.rank in seen:
            raise ValueError(
                f"{trace.source}: rank {trace.rank} must have one trace, but {seen[trace.rank].source} is of it too; "
                "give each rank once"
            )
        seen[trace.rank] = trace


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """One rank's collectives of one group in order: rows of its trace."""

    trace: RankTrace
    group: Group
    rows: np.ndarray

    @property
    def ends_s(self) -> np.ndarray:
        return self.trace.end_s[self.rows]

    @property
    def durations_s(self) -> np.ndarray:
        return self.trace.end_s[self.rows] - self.trace.start_s[self.rows]


def _shared_groups(traces: Sequence[RankTrace]) -> dict[tuple[str, tuple[int, ...]], list[_Member]]:
    """Members of each group by name and ranks, those of at least two traces."""
    found: dict[tuple[str, tuple[int, ...]], list[_Member]] = {}
    for trace in traces:
        for index, group in enumerate(trace.groups):
            rows = np.flatnonzero(
                (trace.group == index) & (trace.kind == CODE[Kind.COLLECTIVE]) & (trace.sequence >= 0)
            )
            rows = rows[np.argsort(trace.sequence[rows], kind="stable")]
            key = _group_key(trace, group, found)
            found.setdefault(key, []).append(_Member(trace=trace, group=group, rows=rows))
    return {key: members for key, members in found.items() if len(members) > 1}


def _group_key(
    trace: RankTrace, group: Group, found: dict[tuple[str, tuple[int, ...]], list[_Member]]
) -> tuple[str, tuple[int, ...]]:
    """What a group is found by: that of an earlier one where it can be the same.

    A name stands for several groups where no rank is in two of them, as each node's own group. Where one of two does
    not tell its ranks (a recorder cuts long lists short), name and size must do.
    """
    for (name, ranks), members in found.items():
        if name != group.name:
            continue
        other = members[0]
        sizes = {group.size, other.group.size} - {0}
        if len(sizes) < 2 and (ranks == group.ranks or not ranks or not group.ranks):
            return name, ranks
        if not ranks or not group.ranks or set(ranks) & set(group.ranks):
            mine, its = _members(group), _members(other.group)
            raise ValueError(
                f"{trace.source}: process group {name!r} must have the members that {other.trace.source} tells, but "
                f"has {mine} against {its}; give the ranks of one job"
            )
    return group.name, group.ranks


def _members(group: Group) -> str:
    return f"ranks {list(group.ranks)}" if group.ranks else f"{group.size} ranks"


def _check_number(first: _Member, other: _Member) -> None:
    if len(other.rows) != len(first.rows):
        raise ValueError(
            f"{other.trace.source}: process group {other.group.name!r} must have as many collectives as in "
            f"{first.trace.source}, but has {len(other.rows)} against {len(first.rows)}; give traces of the same steps"
        )


def _unlike(first: _Member, other: _Member) -> str | None:
    """The first collective that has another name or size on the other rank, in words."""
    index = {text: number for number, text in enumerate(first.trace.names)}
    same_text = np.array([index.get(text, -1) for text in other.trace.names], np.int64)
    unequal = np.array([text in UNEQUAL for text in first.trace.names], bool)
    names, theirs = same_text[other.trace.name[other.rows]], first.trace.name[first.rows]
    # Where a size is not told, the difference is not a number, and no greater than any.
    sizes_differ = np.abs(other.trace.nbytes[other.rows] - first.trace.nbytes[first.rows]) > 0
    wrong = (names != theirs) | (sizes_differ & ~unequal[theirs])
    if not wrong.any():
        return None
    sequence = int(np.argmax(wrong))
    where = f"{other.trace.source}: process group {other.group.name!r}: collective {sequence}"
    mine, its = _what(other.trace, other.rows[sequence]), _what(first.trace, first.rows[sequence])
    return f"{where} must be the same as in {first.trace.source}, but is {_told(*mine)} against {_told(*its)}"


def _same_transactions(first: _Member, other: _Member) -> bool:
    """Whether the recorder says itself which collectives are the same."""
    mine, theirs = (
        [member.trace.transactions[k] if k >= 0 else None for k in member.trace.transaction[member.rows].tolist()]
        for member in (first, other)
    )
    return None not in mine and mine == theirs


def _what(trace: RankTrace, row: int) -> tuple[str, float | None]:
    nbytes = float(trace.nbytes[row])
    return trace.names[trace.name[row]], None if np.isnan(nbytes) else nbytes


def _told(name: str, nbytes: float | None) -> str:
    return name if nbytes is None else f"{name} of {nbytes:.0f} bytes"


def _ends(first: _Member, other: _Member) -> tuple[np.ndarray, np.ndarray]:
    """How much later the other rank's collectives end, and what they take where they take less."""
    epochs_s = (other.trace.epoch_ns - first.trace.epoch_ns) / NS
    return other.ends_s - first.ends_s + epochs_s, np.minimum(first.durations_s, other.durations_s)


def _agreement(a: int, b: int, found: list[tuple[np.ndarray, np.ndarray]]) -> Agreement:
    later_s = np.concatenate([later for later, _ in found])
    clock_s = float(np.median(later_s))
    left_s = np.abs(later_s - clock_s)
    return Agreement(
        a=a, b=b, num_paired=len(later_s), clock_s=clock_s, median_s=float(np.median(left_s)),
        most_s=float(np.percentile(left_s, SHARE)), worst_s=float(left_s.max()),
        duration_s=float(np.median(np.concatenate([took for _, took in found]))),
    )  # fmt: skip


def _check_pair(a: RankTrace, b: RankTrace, found: Agreement, unlike: str | None) -> None:
    """ValueError where names or sizes are unlike or ends scatter, with how far they do."""
    scatter = (
        f"ends matched by order differ by up to {found.worst_s * 1e3:.1f} ms (median {found.median_s * 1e3:.1f} ms) "
        f"without a constant difference of clocks, where a collective takes {found.duration_s * 1e3:.1f} ms"
    )
    if unlike is not None:
        raise ValueError(f"{unlike}, and {scatter}; give whole traces of the same steps")
    if found.most_s > max(FLOOR_S, OF_DURATION * found.duration_s):
        raise ValueError(
            f"{b.source}: collectives must end when those of rank {a.rank} ({a.source}) do, but {scatter}: these are "
            "not the same ones; give whole traces of the same steps"
        )


def _check_transfers(of_rank: dict[int, RankTrace]) -> int:
    """Each SEND to a rank that is here has its RECV there, of the same size, and the other way round."""
    sends, recvs = (_transfers(of_rank, kind) for kind in (Kind.SEND, Kind.RECV))
    for what, mine, others in (("SEND", sends, recvs), ("RECV", recvs, sends)):
        for text, (trace, row) in mine.items():
            there = of_rank.get(int(trace.peer[row]))
            if there is None:
                continue
            where = f"{trace.source}: {what} of transaction {text!r}"
            match = others.get(text)
            if match is None or match[0] is not there or match[0].peer[match[1]] != trace.rank:
                raise ValueError(
                    f"{where} must have its other end on rank {there.rank}, but {there.source} has none; give traces "
                    "of the same steps"
                )
            nbytes, its = float(trace.nbytes[row]), float(there.nbytes[match[1]])
            if abs(nbytes - its) > 0:  # no number, where unknown, differs from nothing
                raise ValueError(
                    f"{where} must be as large as in {there.source}, but is of {nbytes:.0f} against {its:.0f} bytes; "
                    "give the ranks of one job"
                )
    return sum(int(trace.peer[row]) in of_rank for trace, row in sends.values())


def _transfers(of_rank: dict[int, RankTrace], kind: Kind) -> dict[str, tuple[RankTrace, int]]:
    found: dict[str, tuple[RankTrace, int]] = {}
    for trace in of_rank.values():
        for row in np.flatnonzero((trace.kind == CODE[kind]) & (trace.transaction >= 0)):
            text = trace.transactions[trace.transaction[row]]
            if text in found:
                raise ValueError(
                    f"{trace.source}: {kind.name} of transaction {text!r} must be the only one, but "
                    f"{found[text][0].source} has one too; number the transfers"
                )
            found[text] = (trace, int(row))
    return found


def _notices(traces: Sequence[RankTrace], missing: tuple[int, ...], agreements: list[Agreement]) -> Iterator[str]:
    if len(traces) == 1:
        yield "one rank: nothing to pair, so neither its clock nor its waiting can be told from others'"
    if missing:
        told = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        world = len(traces) + len(missing)
        yield f"{len(missing)} of {world} ranks are missing ({told}): alignment and the global graph need all"
    few = [found for found in agreements if found.num_paired < ENOUGH]
    if few:
        pairs = ", ".join(f"{found.a} and {found.b}" for found in few)
        yield f"ranks {pairs} share fewer than {ENOUGH} collectives: too few for their ends to disagree"
