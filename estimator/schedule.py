"""In which order each rank runs its passes, and what that order takes: the truth that span.py's fast forms shorten.

Letters: p ranks (pipeline stages), v chunks a rank, m micro-batches, C model chunks in model order. Adding a schedule
means adding one row to `_RULES`: its order, its placement and its conditions. Knows nothing of bytes or of hardware;
gradient reduction and the optimizer come after it.

Times of one micro-batch on chunk j: `f[j]` forward, `b[j]` input gradient (with any recompute), `w[j]` weight gradient.
A schedule that does not split the backward runs b + w as one pass. An overlapped pair of DualPipe is one pass of
f + b + w that needs both inputs at its start and gives both outputs at its end: overlap hides communication, it does
not shorten compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from estimator.strategy import Schedule

__all__ = ["Kind", "Order", "Pass", "Simulation", "check_conditions", "in_flight", "order", "placement",
           "side_by_side", "simulate"]  # fmt: skip


class Kind(Enum):
    """What a pass computes."""

    F = "forward"
    B = "input gradient"
    W = "weight gradient"
    BW = "full backward"
    PAIR = "forward overlapped with a full backward of another micro-batch"


class Pass(NamedTuple):
    """One pass of one micro-batch over one model chunk; a PAIR also names whose backward it runs."""

    kind: Kind
    chunk: int
    micro_batch: int
    back_chunk: int = -1
    back_micro_batch: int = -1


Order = list[list[Pass]]
"""The passes of each rank, in the order in which it runs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """When every pass runs. `start`, `end`: per rank, one per pass of its order; `rank_end`, `busy`: [p] seconds."""

    span: float
    start: tuple[np.ndarray, ...]
    end: tuple[np.ndarray, ...]
    rank_end: np.ndarray
    busy: np.ndarray


# ----------------------------------------------------------------------------------------------- the public questions


def check_conditions(schedule: Schedule, p: int, m: int, v: int) -> str | None:
    """Why (p, m, v) is illegal for the schedule: law, offence and remedy; None where it is legal.

    >>> check_conditions(Schedule.INTERLEAVED, 4, 6, 2)
    'interleaved needs micro-batches (6) divisible by pp (4); try 4 or 8'
    """
    for name, value in (("pp", p), ("vpp", v), ("micro-batches", m)):
        if value < 1:
            return f"{name} ({value}) must be at least 1; try 1"
    return _RULES[schedule].condition(schedule, p, m, v)


def order(schedule: Schedule, p: int, m: int, v: int = 1) -> Order:
    """The passes of each rank in order; ValueError where (p, m, v) is illegal.

    >>> [f"{x.kind.name}{x.micro_batch}" for x in order(Schedule.ONE_F_ONE_B, 2, 3)[0]]
    ['F0', 'F1', 'BW0', 'F2', 'BW1', 'BW2']
    """
    offence = check_conditions(schedule, p, m, v)
    if offence:
        raise ValueError(offence)
    return [list(_RULES[schedule].passes(p, m, v, rank)) for rank in range(p)]


def placement(schedule: Schedule, p: int, v: int = 1) -> np.ndarray:
    """Model chunk by rank and local chunk: int [p, local].

    >>> placement(Schedule.INTERLEAVED, 2, 3).tolist()
    [[0, 2, 4], [1, 3, 5]]
    >>> placement(Schedule.DUALPIPE, 4).tolist()
    [[0, 3], [1, 2], [2, 1], [3, 0]]
    """
    return _RULES[schedule].placement(p, v)


def simulate(
    passes: Order, f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float = 0.0,
    alone: tuple[np.ndarray, np.ndarray] | None = None,
) -> Simulation:  # fmt: skip
    """Run an order: each pass starts once its rank is free and its inputs are there. f, b, w: [C] seconds.

    `hop` is the latency of an edge between two ranks; the device is free while it flies. `alone`: f and b of passes
    outside pairs, where they differ. ValueError on a deadlock.
    """
    num_chunks = len(f)
    alone_f, alone_b = alone or (f, b)
    arrived: dict[tuple[bool, int, int], tuple[float, int]] = {}
    start: list[list[float]] = [[] for _ in passes]
    end: list[list[float]] = [[] for _ in passes]
    waiting: dict[tuple[bool, int, int], int] = {}
    runnable = deque(range(len(passes)))
    while runnable:
        rank = runnable.popleft()
        for item in passes[rank][len(end[rank]) :]:
            missing = next((need for need in _needs(item, num_chunks) if need not in arrived), None)
            if missing is not None:
                waiting[missing] = rank
                break
            begin = end[rank][-1] if end[rank] else 0.0
            for need in _needs(item, num_chunks):
                seconds, origin = arrived[need]
                begin = max(begin, seconds + (hop if origin != rank else 0.0))
            start[rank].append(begin)
            paired = item.kind is Kind.PAIR
            end[rank].append(begin + (_seconds(item, f, b, w) if paired else _seconds(item, alone_f, alone_b, w)))
            for output in _gives(item):
                arrived[output] = (end[rank][-1], rank)
                if output in waiting:
                    runnable.append(waiting.pop(output))
    stuck = [(rank, items[len(end[rank])]) for rank, items in enumerate(passes) if len(end[rank]) < len(items)]
    if stuck:
        msg = f"an order must run to its end, but ranks wait on each other at {stuck}; reorder these passes"
        raise ValueError(msg)
    starts, ends = tuple(map(np.asarray, start)), tuple(map(np.asarray, end))
    rank_end = np.array([float(x[-1]) if len(x) else 0.0 for x in ends])
    busy = np.array([float(np.sum(e - s)) for s, e in zip(starts, ends, strict=True)])
    return Simulation(span=float(rank_end.max()), start=starts, end=ends, rank_end=rank_end, busy=busy)


def side_by_side(items: Sequence[Pass]) -> list[Pass]:
    """A rank's passes with each forward of the steady phase beside the backward that followed it.

    So two micro-batches hide each other's expert traffic, and one micro-batch more is in flight. (Megatron-Core warms
    up by one more forward for it.) Passes must be whole forwards and backwards.

    >>> [x.kind.name for x in side_by_side(order(Schedule.ONE_F_ONE_B, 1, 3)[0])]
    ['F', 'PAIR', 'PAIR', 'BW']
    """
    forwards = [item for item in items if item.kind is Kind.F]
    backwards = [item for item in items if item.kind is Kind.BW]
    assert len(forwards) + len(backwards) == len(items), "only whole forwards and backwards run side by side"
    ahead = next(n for n, item in enumerate(items) if item.kind is Kind.BW)
    pairs = [
        Pass(Kind.PAIR, f.chunk, f.micro_batch, b.chunk, b.micro_batch)
        for f, b in zip(forwards[ahead:], backwards, strict=False)
    ]
    return [*forwards[:ahead], *pairs, *backwards[len(pairs) :]]


def in_flight(passes: Order, chunks: np.ndarray) -> np.ndarray:
    """Micro-batches alive by rank and local chunk when the rank first holds most of them: int [p, local].

    `chunks` is the placement. An activation lives from the start of its forward to the end of its full backward, or of
    its weight gradient where the backward is split.
    """
    peak = np.zeros(chunks.shape, dtype=np.int64)
    for rank, items in enumerate(passes):
        local = {int(chunk): index for index, chunk in enumerate(chunks[rank])}
        alive = np.zeros(chunks.shape[1], dtype=np.int64)
        for item in items:
            if item.kind in (Kind.F, Kind.PAIR):
                alive[local[item.chunk]] += 1
                if alive.sum() > peak[rank].sum():
                    peak[rank] = alive
            if item.kind in (Kind.BW, Kind.W):
                alive[local[item.chunk]] -= 1
            elif item.kind is Kind.PAIR:
                alive[local[item.back_chunk]] -= 1
        assert not alive.any(), f"rank {rank} keeps {alive} activations"
    return peak


def _backward_of(item: Pass) -> tuple[int, int] | None:
    """Chunk and micro-batch whose input gradient the pass computes."""
    if item.kind is Kind.PAIR:
        return item.back_chunk, item.back_micro_batch
    return (item.chunk, item.micro_batch) if item.kind in (Kind.B, Kind.BW) else None


def _needs(item: Pass, num_chunks: int) -> Iterator[tuple[bool, int, int]]:
    """What must be there before the pass: (is it a gradient, chunk, micro-batch)."""
    if item.kind in (Kind.F, Kind.PAIR) and item.chunk > 0:
        yield False, item.chunk - 1, item.micro_batch
    if item.kind is Kind.W:
        yield True, item.chunk, item.micro_batch
    backward = _backward_of(item)
    if backward is not None:
        chunk, micro_batch = backward
        yield False, chunk, micro_batch
        if chunk < num_chunks - 1:
            yield True, chunk + 1, micro_batch


def _gives(item: Pass) -> Iterator[tuple[bool, int, int]]:
    if item.kind in (Kind.F, Kind.PAIR):
        yield False, item.chunk, item.micro_batch
    backward = _backward_of(item)
    if backward is not None:
        yield True, *backward


def _seconds(item: Pass, f: np.ndarray, b: np.ndarray, w: np.ndarray) -> float:
    if item.kind is Kind.PAIR:
        return float(f[item.chunk] + (b[item.back_chunk] + w[item.back_chunk]))
    if item.kind is Kind.BW:
        return float(b[item.chunk] + w[item.chunk])
    return float({Kind.F: f, Kind.B: b, Kind.W: w}[item.kind][item.chunk])


# ------------------------------------------------------------------------------------------- orders, one rank at a time


def _gpipe(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """All forwards, then all backwards: Huang 2019, arXiv:1811.06965."""
    yield from (Pass(Kind.F, rank, k) for k in range(m))
    yield from (Pass(Kind.BW, rank, k) for k in range(m))


def _one_f_one_b(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """Warm-up of p - 1 - rank forwards, then one forward, one backward: Narayanan 2021, arXiv:2104.04473, Fig. 4."""
    warm_up = min(p - 1 - rank, m)
    yield from (Pass(Kind.F, rank, k) for k in range(warm_up))
    for k in range(m):
        if k + warm_up < m:
            yield Pass(Kind.F, rank, k + warm_up)
        yield Pass(Kind.BW, rank, k)


def _interleaved(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """1F1B over v chunks a rank, p micro-batches a chunk at a time: Narayanan 2021, arXiv:2104.04473, section 2.2."""

    def passes(kind: Kind, n: int) -> Pass:
        group, place = divmod(n, p * v)
        local = place // p if kind is Kind.F else v - 1 - place // p
        return Pass(kind, local * p + rank, group * p + place % p)

    total = m * v
    warm_up = min(2 * (p - 1 - rank) + (v - 1) * p, total)
    yield from (passes(Kind.F, n) for n in range(warm_up))
    for n in range(total):
        if n + warm_up < total:
            yield passes(Kind.F, n + warm_up)
        yield passes(Kind.BW, n)


def _zb_h1(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """1F1B with the weight gradient put off by `rank` micro-batches: ZB-H1 of Qi 2023, arXiv:2401.10241, section 2.1.

    Rank i starts p - 1 - i forwards ahead and keeps i weight gradients back, so every rank holds p activations and the
    last rank's weight gradients fill the tail.
    """
    warm_up = min(p - 1 - rank, m)
    yield from (Pass(Kind.F, rank, k) for k in range(warm_up))
    for k in range(m):
        if k + warm_up < m:
            yield Pass(Kind.F, rank, k + warm_up)
        yield Pass(Kind.B, rank, k)
        if k >= rank:
            yield Pass(Kind.W, rank, k - rank)
    yield from (Pass(Kind.W, rank, k) for k in range(max(m - rank, 0), m))


def _dualpipe(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """Micro-batches fed from both ends: DeepSeek-V3, arXiv:2412.19437, Fig. 5 and section 3.2.1.

    Micro-batches 0 .. m/2 - 1 flow from rank 0 to p - 1, the rest the other way. Phase 0 is the direction whose entry
    is nearer to this rank, phase 1 the other; `depth` is the distance to the nearer end.
    """
    half, depth = p // 2, min(rank, p - 1 - rank)
    inner = half - 1 - depth
    chunks = (depth, p - 1 - depth)
    firsts = (0, m // 2) if rank < half else (m // 2, 0)
    forwards, backwards = [0, 0], [0, 0]
    owed: deque[Pass] = deque()  # weight gradients put off, oldest first

    def forward(phase: int) -> Pass:
        forwards[phase] += 1
        return Pass(Kind.F, chunks[phase], firsts[phase] + forwards[phase] - 1)

    def backward(phase: int, *, split: bool = False) -> Pass:
        backwards[phase] += 1
        item = Pass(Kind.B if split else Kind.BW, chunks[phase], firsts[phase] + backwards[phase] - 1)
        if split:
            owed.append(item._replace(kind=Kind.W))
        return item

    def pair(phase: int) -> Pass:
        ahead, back = forward(phase), backward(1 - phase)
        return Pass(Kind.PAIR, ahead.chunk, ahead.micro_batch, back.chunk, back.micro_batch)

    # Step 1: forwards of phase 0 until the first micro-batch of the other direction arrives
    for _ in range(2 * inner):
        yield forward(0)

    # Step 2: forwards of both phases in turn
    for _ in range(depth + 1):
        yield forward(0)
        yield forward(1)

    # Step 3: split backwards of phase 1, the weight gradient at once, then a forward of phase 1
    for _ in range(inner):
        yield backward(1, split=True)
        yield owed.popleft()
        yield forward(1)

    # Step 4 (main): overlapped pairs, forward 0 with backward 1, then forward 1 with backward 0
    for index in range(m // 2 - p + depth + 1):
        if index == 0 and inner == 0:  # the other middle rank waits for this forward, so it is not held up by a pair
            yield forward(0)
            yield backward(1)
        else:
            yield pair(0)
        yield pair(1)

    # Step 5: phase 0 has no forwards left: backward 1 alone, then forward 1 with backward 0
    for _ in range(inner):
        yield backward(1)
        yield pair(1)

    # Step 6: backwards of both phases in turn, the second half of them split
    for index in range(2 * (depth + 1)):
        yield backward(1 - index % 2, split=index > depth)

    # Step 7: an owed weight gradient, then a split backward of phase 0
    for _ in range(inner):
        yield owed.popleft()
        yield backward(0, split=True)

    # Step 8: the weight gradients still owed
    while owed:
        yield owed.popleft()


# -------------------------------------------------------------------------------------------- placements and conditions


def _round_robin(p: int, v: int) -> np.ndarray:
    """Chunk j on rank j % p."""
    return np.arange(p * v).reshape(v, p).T.copy()


def _both_directions(p: int, v: int) -> np.ndarray:
    """Chunks i and p - 1 - i on rank i."""
    return np.stack([np.arange(p), np.arange(p)[::-1]], axis=1)


def _one_chunk(schedule: Schedule, p: int, m: int, v: int) -> str | None:
    if v != 1:
        return f"{schedule.value} runs one chunk a rank, but vpp is {v}; try vpp 1 or schedule interleaved"
    return None


def _whole_rounds(schedule: Schedule, p: int, m: int, v: int) -> str | None:
    if m % p:
        near = f"{m // p * p} or {(m // p + 1) * p}" if m > p else f"{p}"
        return f"{schedule.value} needs micro-batches ({m}) divisible by pp ({p}); try {near}"
    return None


def _two_directions(schedule: Schedule, p: int, m: int, v: int) -> str | None:
    if v != 1:
        return _one_chunk(schedule, p, m, v)
    if p % 2:
        return f"{schedule.value} needs an even pp, but pp is {p}; try {p + 1}"
    if m % 2 or m < 2 * p:
        least = max(2 * p, m + m % 2)
        return f"{schedule.value} needs an even number of micro-batches, at least 2 pp ({2 * p}), got {m}; try {least}"
    return None


class _Rule(NamedTuple):
    passes: Callable[[int, int, int, int], Iterator[Pass]]
    placement: Callable[[int, int], np.ndarray]
    condition: Callable[[Schedule, int, int, int], str | None]


_RULES: dict[Schedule, _Rule] = {
    Schedule.GPIPE: _Rule(_gpipe, _round_robin, _one_chunk),
    Schedule.ONE_F_ONE_B: _Rule(_one_f_one_b, _round_robin, _one_chunk),
    Schedule.INTERLEAVED: _Rule(_interleaved, _round_robin, _whole_rounds),
    Schedule.ZB_H1: _Rule(_zb_h1, _round_robin, _one_chunk),
    Schedule.DUALPIPE: _Rule(_dualpipe, _both_directions, _two_directions),
}
