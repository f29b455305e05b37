"""Orders that are found by running them: a rank that would wait runs a weight gradient that it owes.

`with_weight_gradients` fills an order of forwards and input gradients; `zero_bubble` also chooses between these, under
a limit of activations, after the greedy heuristic of Qi 2023, arXiv:2401.10241, section 3.1. Deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Final

import numpy as np

from estimator.schedule.passes import Kind, Order, Pass
from estimator.schedule.simulation import simulate

__all__ = ["with_weight_gradients", "zero_bubble"]

PATIENCE: Final = (1.0, 0.0, 0.5)
"""Shares of a weight gradient that a rank must have to wait before it runs one: those that are tried."""


@dataclass(slots=True)
class _Rank:
    """Where a rank stands while an order is made."""

    free: float = 0.0
    held: int = 0
    num_forward: int = 0
    num_main: int = 0  # forwards and input gradients
    done: list[Pass] = field(default_factory=list)
    owed: list[Pass] = field(default_factory=list)


Choice = Callable[[int, _Rank], tuple[Pass | None, float]]
"""The pass that a rank would run next, and when its input is there (infinite: nobody knows yet); None: no more."""


class _Run:
    """Ranks that decide one after the other, the one that is free first first; so what they know is what has begun."""

    def __init__(self, p: int, seconds: dict[Kind, np.ndarray], hop: float) -> None:
        self.num_chunks, self.seconds, self.hop = len(seconds[Kind.F]), seconds, hop
        self.ranks = [_Rank() for _ in range(p)]
        self.made: dict[tuple[Kind, int, int], tuple[float, int]] = {}

    def arrival(self, rank: int, item: Pass) -> float:
        """When the input of a pass is there; infinite where the pass that makes it has not begun."""
        if item.kind is Kind.F:
            key = (Kind.F, item.chunk - 1, item.micro_batch) if item.chunk else None
        elif item.chunk == self.num_chunks - 1:
            key = (Kind.F, item.chunk, item.micro_batch)
        else:
            key = (Kind.B, item.chunk + 1, item.micro_batch)
        if key is None:
            return 0.0
        if key not in self.made:
            return math.inf
        end, origin = self.made[key]
        return end if origin == rank else end + self.hop

    def start(self, rank: int, item: Pass, at: float) -> None:
        """Begin a pass."""
        r = self.ranks[rank]
        r.free = at + float(self.seconds[item.kind][item.chunk])
        r.done.append(item)
        self.made[item.kind, item.chunk, item.micro_batch] = (r.free, rank)
        r.num_main += item.kind is not Kind.W
        if item.kind is Kind.F:
            r.held += 1
            r.num_forward += 1
        elif item.kind is Kind.B:
            r.owed.append(item._replace(kind=Kind.W))
        else:
            r.held -= 1

    def all(self, choose: Choice, most: Sequence[int], patience: float) -> Order:
        """Run everything. `most` [p]: activations that each rank may hold."""
        parked: set[int] = set()
        active = set(range(len(self.ranks)))
        while active:
            awake = active - parked
            assert awake, "every rank waits for another"
            rank = min(awake, key=lambda i: (self.ranks[i].free, i))
            r = self.ranks[rank]
            item, arrival = choose(rank, r)
            full = item is not None and item.kind is Kind.F and r.held >= most[rank]
            gap = arrival - r.free
            if r.owed and (item is None or full or gap >= max(patience * self._owed(r), 1e-12)):
                self.start(rank, r.owed.pop(0), r.free)
            elif item is None:
                active.discard(rank)
            elif arrival == math.inf:
                parked.add(rank)
                continue
            else:
                self.start(rank, item, max(r.free, arrival))
            parked.clear()
        return [r.done for r in self.ranks]

    def _owed(self, r: _Rank) -> float:
        return float(self.seconds[Kind.W][r.owed[0].chunk])


def with_weight_gradients(main: Order, num_chunks: int, most: int) -> Order:
    """An order of forwards and input gradients, its weight gradients put where a rank waits or holds `most` chunks.

    All passes count as equally long.
    """
    run = _Run(len(main), dict.fromkeys((Kind.F, Kind.B, Kind.W), np.ones(num_chunks)), 0.0)

    def choose(rank: int, r: _Rank) -> tuple[Pass | None, float]:
        if r.num_main == len(main[rank]):
            return None, math.inf
        item = main[rank][r.num_main]
        return item, run.arrival(rank, item)

    return run.all(choose, [most] * len(main), 1.0)


def zero_bubble(
    p: int, m: int, most: Sequence[int], f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float = 0.0
) -> Order:
    """The fastest of a few greedy orders over one chunk a rank whose rank i holds at most `most[i]` >= 1 activations.

    f, b, w: [p] seconds. Tried: how long a rank must have to wait before it runs a weight gradient, and whether a
    forward goes before an input gradient that is there as well.
    """
    best: tuple[float, Order] | None = None
    for patience, forward_first in product(PATIENCE, (True, False)):
        run = _Run(p, {Kind.F: f, Kind.B: b, Kind.W: w}, hop)
        made = run.all(partial(_one_each, run, m, most, forward_first), most, patience)
        span = simulate(made, f, b, w, hop).span
        if best is None or span < best[0] * (1.0 - 1e-12):
            best = span, made
    assert best is not None
    return best[1]


def _one_each(
    run: _Run, m: int, most: Sequence[int], forward_first: bool, rank: int, r: _Rank
) -> tuple[Pass | None, float]:
    """Forward or input gradient in turn where both are there; else the one that is there first."""
    forward = Pass(Kind.F, rank, r.num_forward) if r.num_forward < m else None
    backward = Pass(Kind.B, rank, r.num_main - r.num_forward) if r.num_main - r.num_forward < r.num_forward else None
    arrival_f = run.arrival(rank, forward) if forward else math.inf
    arrival_b = run.arrival(rank, backward) if backward else math.inf
    if forward is None or backward is None:
        return (forward, arrival_f) if backward is None else (backward, arrival_b)
    if r.held >= most[rank] and not r.owed:  # only a gradient makes room
        return backward, arrival_b
    both = max(arrival_f, arrival_b) <= r.free
    forward_turn = r.done[-1].kind is not Kind.F if any(x.kind is Kind.B for x in r.done) else forward_first
    if both:
        return (forward, arrival_f) if forward_turn else (backward, arrival_b)
    return (forward, arrival_f) if arrival_f < arrival_b else (backward, arrival_b)
