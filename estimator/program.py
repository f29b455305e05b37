"""Orders compiled to straight-line programs of maxima and sums: the fast form of schedules without a closed one.

A program walks an order once, a step a pass, with the seconds of eight candidates in its lanes (span_program.py).
Orders of many micro-batches are walked for few: beyond the warm-up every rank repeats the same passes, so what the
micro-batches left out take is added to each rank at one *cut*, a moment that all ranks reach at the same time where
passes are equally long. No path passes the cuts of two ranks: the costliest that a path can visit counts.

Depends on (schedule, p, v, m, group) only: counts do not follow seconds, so spans never fall when a time grows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from estimator.schedule import Kind, Order, Pass, in_flight, order, owed, placement, side_by_side, simulate
from estimator.schedule.rules import VEES
from estimator.schedule.simulation import gives, needs
from estimator.span_codes import CODES, FIRST_PROGRAM
from estimator.span_program import RETURN
from estimator.strategy import Schedule

__all__ = ["NO_PROGRAM", "TOLD", "Program", "has_program", "program", "walked_micro_batches"]

TOLD: Final = 6
"""Numbers by rank and local chunk: micro-batches in flight, more for each that is not walked; in flight and owed when
most is owed; forwards and backwards that run alone."""


class Program(NamedTuple):
    """One order, compiled. Rows of lanes: p ranks, then outputs on their way, one never there, one for no one, costs.

    `steps` [n, 6]: rank, cost, two inputs, output, what the rank goes on with before its next step; all are rows.
    `sums` [s, 3]: cost row, row of seconds (compose.PASSES times chunks) to add to it, whether once for each
    micro-batch that is not walked; the first p are what ranks do at their cuts, where that is once. `told`
    [p, TOLD, local chunks].

    Where ranks wait for each other in every round: `around` [n, 6], steps around the cuts, and `between` [p, 2], those
    of them that lie between a pass of a rank and the same pass RETURN micro-batches later.
    """

    steps: np.ndarray
    sums: np.ndarray
    around: np.ndarray
    between: np.ndarray
    told: np.ndarray
    rows: int  # of ranks and outputs; costs follow
    num_costs: int
    walked: int  # micro-batches
    turn: int  # the chunk whose output stays on its rank, -1: none


def _read_only(values: Sequence[Sequence[int]] | np.ndarray, dtype: type, *shape: int) -> np.ndarray:
    array: np.ndarray = np.ascontiguousarray(np.array(values, dtype=dtype).reshape(shape))
    array.setflags(write=False)
    return array


NO_PROGRAM: Final = Program(
    steps=_read_only([], np.int32, 0, 6), sums=_read_only([], np.int32, 0, 3), around=_read_only([], np.int32, 0, 6),
    between=_read_only([], np.int32, 0, 2), told=_read_only([], np.float64, 0, TOLD, 0), rows=0, num_costs=0,
    walked=0, turn=-1,
)  # fmt: skip
"""Of schedules with a closed form."""


def has_program(schedule: Schedule, p: int, group: int = 0) -> bool:
    """Whether an order is walked, for want of a closed form."""
    return CODES[schedule] >= FIRST_PROGRAM or (schedule is Schedule.INTERLEAVED and group not in {0, p})


def walked_micro_batches(schedule: Schedule, p: int, m: int, group: int = 0) -> int:
    """Micro-batches that a program walks of m: enough to be warmed up, and of groups as many in the last one."""
    if schedule is Schedule.INTERLEAVED:
        least = WALKED_GROUPS * group
        return m if m < least + group else least + m % group
    return min(m, 2 * p + MORE)


MORE: Final = 4
"""Micro-batches that are walked beside those of a warm-up and a cool-down."""
WALKED_GROUPS: Final = 3
"""The same in groups."""
COUPLED: Final = frozenset({Schedule.V_HALF, Schedule.V_MIN, Schedule.DUALPIPE_V})
"""Whose ranks wait for each other in every round where F, B and W differ, or where hops take time."""


def program(schedule: Schedule, p: int, v: int, m: int, group: int = 0) -> Program:
    """The program of a legal shape; NO_PROGRAM where it has a closed form."""
    if not has_program(schedule, p, group):
        return NO_PROGRAM
    group = group or p
    walked = walked_micro_batches(schedule, p, m, group)
    return _compiled(schedule, p, v, walked, group if schedule is Schedule.INTERLEAVED else 0, walked < m)


@lru_cache(maxsize=4096)
def _compiled(schedule: Schedule, p: int, v: int, m: int, group: int, goes_on: bool) -> Program:
    passes, chunks = order(schedule, p, m, v, group), placement(schedule, p, v)
    writer = _Writer(passes, chunks, schedule, m, goes_on=goes_on)
    events = writer.events()
    some, between = writer.middle(events)
    steps, around = writer.numbered(events), writer.numbered(some)
    rows = max(row for step in (*steps, *around) for row in (step[2], step[3], step[4])) + 1
    # Costs stand behind all other rows.
    steps, around = ([(r, rows + cost, *on_way, rows + then) for r, cost, *on_way, then in x] for x in (steps, around))
    sums = [(rows + cost, row, left) for terms, cost in writer.costs.items() for row, left in terms]
    return Program(
        steps=_read_only(steps, np.int32, -1, 6), sums=_read_only(sums, np.int32, -1, 3),
        around=_read_only(around, np.int32, -1, 6), between=_read_only(between, np.int32, -1, 2),
        told=_read_only(writer.told(), np.float64, p, TOLD, chunks.shape[1]), rows=rows, num_costs=len(writer.costs),
        walked=m, turn=p - 1 if schedule in VEES else -1,
    )  # fmt: skip


Term = tuple[int, int]
"""A row of seconds, and whether it counts once for each micro-batch that is not walked."""


class _Event(NamedTuple):
    """A pass or a cut to be stepped, when it starts where passes are equally long, and what follows on its rank."""

    start: float
    rank: int
    place: int  # among the rank's passes
    pass_: Pass | None
    terms: list[Term]
    then: list[Term]


class _Writer:
    """Turns one order into steps; collects the sums of seconds that they need."""

    def __init__(self, passes: Order, chunks: np.ndarray, schedule: Schedule, m: int, *, goes_on: bool) -> None:
        self.passes, self.chunks, self.schedule = passes, chunks, schedule
        self.num_chunks = int(chunks.max()) + 1
        self.rank_of = {int(chunk): rank for rank, mine in enumerate(chunks) for chunk in mine}
        ones = np.ones(self.num_chunks)
        self.started = simulate(passes, ones, ones, ones).start
        self.costs: dict[tuple[Term, ...], int] = {}
        self.cuts = self._cuts(m) if goes_on else [{} for _ in passes]
        for terms in [terms for cuts in self.cuts for terms in cuts.values()]:
            self._cost(terms)  # first, by rank: a walk finds them there
        paired = schedule is Schedule.INTERLEAVED
        self.pairs = [side_by_side(items) for items in passes] if paired else passes
        self.beside = {
            (kind, chunk, k)
            for items in self.pairs if paired
            for x in items if x.kind is Kind.PAIR
            for kind, chunk, k in ((Kind.F, x.chunk, x.micro_batch), (Kind.BW, x.back_chunk, x.back_micro_batch))
        }  # fmt: skip

    def events(self) -> list[_Event]:
        """Every pass and cut, after those that it waits for.

        A weight gradient goes with the pass before it: nothing waits for its end but its rank.
        """
        out: list[_Event] = []
        for rank, items in enumerate(self.passes):
            mine: list[_Event] = []
            for n, item in enumerate(items):
                start = float(self.started[rank][n])
                if n in self.cuts[rank]:
                    mine.append(_Event(start - 0.5, rank, n, None, self.cuts[rank][n], []))
                if item.kind is Kind.W:
                    mine[-1].then.extend(self._terms(item))
                else:
                    mine.append(_Event(start, rank, n, item, self._terms(item), []))
            out += mine
        return sorted(out, key=lambda event: event[:2])

    def middle(self, events: list[_Event]) -> tuple[list[_Event], list[tuple[int, int]]]:
        """Passes around the cuts; and of each rank those between one pass and the same RETURN micro-batches later.

        Begins behind the gradient that another follows soonest: where every rank waits for its neighbours, they wait
        for a chain of gradients that turns there.
        """
        if self.schedule not in COUPLED or not all(self.cuts):
            return [], []
        each = 2 if any(x.kind is Kind.PAIR for x in self.passes[0]) else 3 * self.chunks.shape[1]
        bounds = []
        for items, started, cut in zip(self.passes, self.started, self.cuts, strict=True):
            low = next(iter(cut)) - each * RETURN // 2
            back = [n for n in range(low, low + 2 * each) if items[n].kind in {Kind.B, Kind.PAIR}]
            gaps = [(float(started[late] - started[n]), n) for n, late in itertools.pairwise(back)]
            bounds.append((min(gaps)[1] + 1, min(gaps)[1] + 1 + each * RETURN))
        around = [e for e in events if e.pass_ and bounds[e.rank][0] - each <= e.place < bounds[e.rank][1] + each]
        at = {(e.rank, e.place): i for i, e in enumerate(around)}
        after = [
            [min(i for (r, n), i in at.items() if r == rank and n >= bound) for bound in both]
            for rank, both in enumerate(bounds)
        ]
        return around, [(low, high) for low, high in after]

    def numbered(self, events: list[_Event]) -> list[tuple[int, ...]]:
        """Steps with rows for what is on its way between ranks, used again once it has arrived."""
        p = len(self.passes)
        never, no_one, rows = p, p + 1, p + 2
        unused: list[int] = []
        on_way: dict[tuple[bool, int, int], int] = {}
        waited = {need for event in events if event.pass_ for need in needs(event.pass_, self.num_chunks)}
        steps = []
        for _, rank, _, item, terms, then in events:
            inputs = [on_way.pop(need) for need in needs(item, self.num_chunks) if need in on_way] if item else []
            unused += [row for row in dict.fromkeys(inputs) if row not in on_way.values()]
            sent = [key for key in gives(item) if key in waited and self._rank_after(key, rank) != rank] if item else []
            output = no_one
            if sent:
                if not unused:
                    unused.append(rows)
                    rows += 1
                output = unused.pop()
                on_way |= dict.fromkeys(sent, output)
            steps.append((rank, self._cost(terms), *[*inputs, never, never][:2], output, self._cost(then)))
        return steps

    def _rank_after(self, key: tuple[bool, int, int], rank: int) -> int:
        """The rank that waits for an output; its own where nobody does."""
        is_gradient, chunk, _ = key
        return self.rank_of.get(chunk - 1 if is_gradient else chunk + 1, rank)

    def _cost(self, terms: Sequence[Term]) -> int:
        return self.costs.setdefault(tuple(terms), len(self.costs))

    def _terms(self, item: Pass) -> list[Term]:
        """Rows of seconds that a pass takes: a pass that has no partner takes those of one alone."""
        num, j, back = self.num_chunks, item.chunk, item.back_chunk
        if item.kind is Kind.PAIR:
            return [(j, 0), (num + back, 0), (2 * num + back, 0)]
        if item.kind is Kind.W:
            return [(2 * num + j, 0)]
        alone = 0 if (item.kind, j, item.micro_batch) in self.beside else 3 * num
        if item.kind is Kind.F:
            return [(alone + j, 0)]
        return [(alone + num + j, 0), *([(2 * num + j, 0)] if item.kind is Kind.BW else [])]

    def _cuts(self, m: int) -> list[dict[int, list[Term]]]:
        """Before which passes each rank does what is not walked: once, or in each of its phases."""
        num = self.num_chunks
        if self.schedule is Schedule.BREADTH_FIRST:  # every chunk runs all forwards, and all backwards, in a row
            rows = {Kind.F: (3 * num,), Kind.BW: (4 * num, 2 * num)}
            return [
                {
                    n: [(row + x.chunk, 1) for row in rows[x.kind]]
                    for n, x in enumerate(items)
                    if x.micro_batch == m // 2
                }
                for items in self.passes
            ]
        middle = max(float(rank[-1]) for rank in self.started) / 2
        rounds = [[(part * num + int(j), 1) for j in mine for part in range(3)] for mine in self.chunks]
        return [{int(np.searchsorted(rank, middle)): terms} for rank, terms in zip(self.started, rounds, strict=True)]

    def told(self) -> np.ndarray:
        """The numbers by rank and local chunk that TOLD names."""
        out = np.zeros((len(self.chunks), TOLD, self.chunks.shape[1]))
        out[:, 0] = in_flight(self.passes, self.chunks)
        out[:, 1] = self.schedule is Schedule.BREADTH_FIRST
        out[:, 2:4] = owed(self.passes, self.chunks).transpose(1, 0, 2)
        for rank, items in enumerate(self.pairs):
            alone = Counter((x.kind is Kind.F, x.chunk) for x in items if x.kind in {Kind.F, Kind.B, Kind.BW})
            for local, chunk in enumerate(self.chunks[rank].tolist()):
                out[rank, 4:, local] = alone[True, chunk], alone[False, chunk]
        return out
