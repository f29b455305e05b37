"""When the passes of an order run, and what they hold meanwhile: an event simulation, the truth of every fast form."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from estimator.schedule.passes import Kind, Order, Pass

__all__ = ["Simulation", "gives", "in_flight", "needs", "owed", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """When every pass runs. `start`, `end`: per rank, one per pass of its order; `rank_end`, `busy`: [p] seconds."""

    span: float
    start: tuple[np.ndarray, ...]
    end: tuple[np.ndarray, ...]
    rank_end: np.ndarray
    busy: np.ndarray


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
            missing = next((need for need in needs(item, num_chunks) if need not in arrived), None)
            if missing is not None:
                waiting[missing] = rank
                break
            begin = end[rank][-1] if end[rank] else 0.0
            for need in needs(item, num_chunks):
                seconds, origin = arrived[need]
                begin = max(begin, seconds + (hop if origin != rank else 0.0))
            start[rank].append(begin)
            paired = item.kind is Kind.PAIR
            end[rank].append(begin + (_seconds(item, f, b, w) if paired else _seconds(item, alone_f, alone_b, w)))
            for output in gives(item):
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


def owed(passes: Order, chunks: np.ndarray) -> np.ndarray:
    """Micro-batches in flight, and those that only wait for their weight gradients, when a rank first owes most.

    int [2, p, local]; those in flight here are without those that wait. Zero where backwards are whole.
    """
    out = np.zeros((2, *chunks.shape), dtype=np.int64)
    for rank, items in enumerate(passes):
        local = {int(chunk): index for index, chunk in enumerate(chunks[rank])}
        now = np.zeros((2, chunks.shape[1]), dtype=np.int64)
        for item in items:
            at = local[item.chunk]
            back = local[item.back_chunk] if item.kind is Kind.PAIR else at
            now[0, at] += item.kind in (Kind.F, Kind.PAIR)
            now[0, back] -= item.kind in (Kind.B, Kind.BW, Kind.PAIR)
            now[1, at] += (item.kind is Kind.B) - (item.kind is Kind.W)
            if now[1].sum() > out[1, rank].sum():
                out[:, rank] = now
    return out


def _backward_of(item: Pass) -> tuple[int, int] | None:
    """Chunk and micro-batch whose input gradient the pass computes."""
    if item.kind is Kind.PAIR:
        return item.back_chunk, item.back_micro_batch
    return (item.chunk, item.micro_batch) if item.kind in (Kind.B, Kind.BW) else None


def needs(item: Pass, num_chunks: int) -> Iterator[tuple[bool, int, int]]:
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


def gives(item: Pass) -> Iterator[tuple[bool, int, int]]:
    """What is there after it, in the same terms."""
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
