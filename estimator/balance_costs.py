# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# mypy: disallow-untyped-decorators=False
"""What any run of consecutive layers costs as one pipeline chunk: the tables over which `balance` walks. Jitted.

`chunk_costs` asks the functions of compose.py and memory.py, so that a table entry is what `evaluate` would say of that
chunk; `linear_costs` adds given seconds of layers up. Knows nothing of ranks.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from estimator.chunk import TRAFFIC, chunk_seconds, zero_traffic
from estimator.compose import (
    AGAIN,
    ONCE,
    again_seconds,
    choose_columns,
    once_seconds,
)
from estimator.cost.table import Base
from estimator.jit import njit
from estimator.keep import BUFFERS
from estimator.memory import chunk_bytes, owed_bytes, static_bytes

__all__ = [
    "DENSE",
    "EXPERT",
    "FIRST",
    "INNER",
    "KEPT",
    "LAST",
    "LIVE",
    "NUM_BYTES",
    "OWED",
    "SAVED",
    "WIDE",
    "ChunkCosts",
    "chunk_costs",
    "linear_costs",
]

FIRST: Final = 0  # slots: the first chunk, which also holds embedding and positions
LAST: Final = 1  # the last chunk, which also holds head and MTP
INNER: Final = 2  # and those between; one slot more for each other depth of block recompute

KEPT: Final = 0  # weights, gradients and optimizer states that the chunk's blocks bring to a rank
WIDE: Final = 1  # gathered weights of its widest block (ZeRO-3)
DENSE: Final = 2  # parameters, whose gradients fill buckets
EXPERT: Final = 3
SAVED: Final = 4  # activations that one micro-batch keeps
LIVE: Final = 5  # widest working set
OWED: Final = 6  # what one micro-batch keeps between its input gradients and its weight gradients
NUM_BYTES: Final = 7

B_DENSE, B_EXPERT = int(Base.DENSE_PARAMS), int(Base.EXPERT_PARAMS)


class ChunkCosts(NamedTuple):
    """Costs of a chunk that holds layers a .. b - 1, by slot. L layers, C chunks, S slots.

    `slot` [C]: which table a chunk reads. `seconds` [S, L + 1, L + 1]: of one micro-batch, infinite where it was not
    asked for. `nbytes` [S, L + 1, L + 1, NUM_BYTES]. `floor` [L + 1]: seconds of the first layers at least, whatever
    else shares their chunk. Of FIRST only a = 0 is filled, of LAST only b = L.
    """

    slot: np.ndarray
    seconds: np.ndarray
    nbytes: np.ndarray
    floor: np.ndarray


@njit(cache=True)
def linear_costs(layers: np.ndarray, first: float, last: float, num_chunks: int, cut: float) -> ChunkCosts:
    """Seconds alone, from those of each layer [L] and what first and last chunk hold beside; chunks up to `cut`."""
    num = layers.size
    seconds = np.full((3, num + 1, num + 1), np.inf)
    floor = np.zeros(num + 1)
    slot = np.full(num_chunks, INNER)
    slot[0], slot[num_chunks - 1] = FIRST, LAST
    for a in range(num + 1):
        total = 0.0
        b = a
        while total <= cut:
            seconds[INNER, a, b] = total
            if a == 0:
                seconds[FIRST, 0, b] = first + total
            if b == num:
                seconds[LAST, a, b] = total + last
                break
            total += layers[b]
            b += 1
        if a < num:
            floor[a + 1] = floor[a] + layers[a]
    return ChunkCosts(slot, seconds, np.empty((1, 1, 1, NUM_BYTES)), floor)


@njit(cache=True)
def chunk_costs(
    kind_of: np.ndarray, slot: np.ndarray, depths: np.ndarray, ends: np.ndarray, held_ends: np.ndarray,
    base: np.ndarray, again: np.ndarray, flags: np.ndarray, choice: int, code: int, keep, hop: float,
    net: np.ndarray, c,
) -> ChunkCosts:  # fmt: skip
    """Seconds and bytes of every possible chunk of one configuration.

    `kind_of` [L]: block kind of each layer. `depths` [S]: layers of block recompute by slot (0: not block). `ends`,
    `held_ends` [2, K]: blocks that first and last chunk run, and hold, beside their layers. `flags`: overlap of tp, ep,
    pp, dp. keep: Keep; c: Constants. What is offloaded leaves two blocks of every chunk, where a rank has two in all.
    """
    num, kinds, slots = kind_of.size, base.shape[0], depths.size
    cols, r = np.empty((ONCE, kinds)), np.empty((again.shape[0], kinds, AGAIN))
    once, repeated, traffic = np.empty(ONCE), np.empty(AGAIN), np.empty(TRAFFIC)
    choose_columns(base, again, flags[0], flags[1], cols, r)
    sent = hop if flags[2] == 0 else 0.0
    seconds = np.full((slots, num + 1, num + 1), np.inf)
    nbytes = np.zeros((slots, num + 1, num + 1, NUM_BYTES))
    floor = np.zeros(num + 1)
    for a in range(num):
        floor[a + 1] = floor[a] + cols[:3, kind_of[a]].sum()
    counts, first, held = np.zeros((1, kinds)), np.zeros((2, kinds)), np.zeros((1, kinds))
    saved, most, live, owed, line = np.empty(1), np.empty(1), np.empty(1), np.empty(1), np.zeros(4)
    logits = np.empty(1)
    share = keep.activations
    for s in range(slots):
        sends = 1.0 if s < INNER else 2.0  # the ends have one neighbour
        for start in range(1 if s == FIRST else num + 1):
            counts[:] = 0.0
            held[:] = 0.0
            first[:] = 0.0
            if s < INNER:
                counts[0] = ends[s]
                held[0] = held_ends[s]
            for stop in range(start, num + 1):
                if stop > start:
                    k = kind_of[stop - 1]
                    counts[0, k] += 1.0
                    held[0, k] += 1.0
                    if stop - start <= depths[s]:
                        first[1, k] += 1.0
                if s == LAST and stop < num:
                    continue
                once_seconds(counts, 0, cols, once)
                again_seconds(counts, first, 0, depths[s], choice, r, repeated)
                zero_traffic(counts, 0, base, net, c, traffic)
                passes = chunk_seconds(once, repeated, code, flags[1], keep, flags[3], traffic)
                seconds[s, start, stop] = (passes[0] + passes[1] + passes[2]) + sends * sent
                chunk_bytes(counts, first, depths[s], again, choice, saved, most, logits, live)
                owed_bytes(counts, base, owed)
                static_bytes(0, held, base, keep, net, c, line)
                x = nbytes[s, start, stop]
                for k in range(kinds):
                    x[DENSE] += held[0, k] * base[k, B_DENSE]
                    x[EXPERT] += held[0, k] * base[k, B_EXPERT]
                x[KEPT], x[WIDE] = line[0] + line[1] + line[2], line[3]
                if not keep.reshard:  # of every chunk, not of the widest
                    x[KEPT], x[WIDE] = x[KEPT] + line[3], 0.0
                x[SAVED] = (1.0 - share) * (saved[0] - logits[0]) + logits[0]
                x[LIVE], x[OWED] = live[0] + share * (BUFFERS * most[0]), owed[0]
    return ChunkCosts(slot, seconds, nbytes, floor)
