# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# mypy: disallow-untyped-decorators=False
"""Dynamic programming over stage boundaries, jitted: `one_each`, `pairs` and `round_robin` for balance.py.

Letters: L layers, C chunks in model order, p ranks. A chunk between the ends holds at least one layer; the first and
the last may hold none. Seconds and bytes grow with a chunk, so a walk that lengthens one ends where it passes a limit.

Goals: SECONDS and BYTES minimise the largest over ranks, SQUARES the sum of squared seconds of chunks, each among
layouts whose ranks keep within `cut` seconds and `room.limit` bytes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from estimator.balance_costs import DENSE, EXPERT, KEPT, LIVE, NUM_BYTES, OWED, SAVED, WIDE
from estimator.batch import staging_bytes
from estimator.compose import Constants
from estimator.jit import kernel, njit

__all__ = ["BYTES", "SECONDS", "SQUARES", "Room", "one_each", "pairs", "rank_bytes", "round_robin"]

SECONDS: Final = 0
BYTES: Final = 1
SQUARES: Final = 2

WAITING: Final = OWED  # of a rank's sums: what it keeps when most micro-batches wait for their weight gradients
NUM_SUMS: Final = NUM_BYTES
EQUAL: Final = 1e-12  # relative: sums of the same numbers in another order are equal


class Room(NamedTuple):
    """Memory of a rank: `limit` (infinite: not asked for), `fixed` bytes, `bucket` of gradients where `staged` is 1.

    `shared` [2]: what first and last chunk both count and a rank with both holds once: bytes kept, dense parameters.
    `flying` [C]: micro-batches in flight on each chunk; `late` [2, C]: those, and the ones that only wait for their
    weight gradients, when most do.
    """

    limit: float
    fixed: float
    bucket: float
    staged: int
    shared: np.ndarray
    flying: np.ndarray
    late: np.ndarray
    constants: Constants


@kernel
def _least(c, num_chunks):
    """Layers that a chunk must hold."""
    return 1 if 0 < c < num_chunks - 1 else 0


@kernel
def _hold(t, room, c, a, b, sums):
    """Add a chunk to what a rank holds: `sums` [NUM_SUMS], which begins at zero."""
    x = t.nbytes[t.slot[c], a, b]
    sums[KEPT] += x[KEPT]
    sums[WIDE] = max(sums[WIDE], x[WIDE])
    sums[DENSE] += x[DENSE]
    sums[EXPERT] += x[EXPERT]
    sums[LIVE] = max(sums[LIVE], x[LIVE])
    sums[SAVED] += room.flying[c] * x[SAVED]
    sums[WAITING] += room.late[0, c] * x[SAVED] + room.late[1, c] * x[OWED]


@kernel
def _held(room, sums):
    """Bytes of a rank from its sums, in the terms of memory.py and batch.py."""
    staged = staging_bytes(room.bucket, sums[DENSE], sums[EXPERT], room.staged, 0, room.constants)
    return sums[KEPT] + sums[WIDE] + staged + max(sums[SAVED], sums[WAITING]) + sums[LIVE] + room.fixed


@kernel
def _bytes_of(t, room, c, a, b, d, x, y, sums):
    """Bytes of a rank with layers a .. b - 1 on chunk c and, where d >= 0, x .. y - 1 on chunk d."""
    sums[:] = 0.0
    _hold(t, room, c, a, b, sums)
    if d >= 0:
        _hold(t, room, d, x, y, sums)
        if c == 0:
            sums[KEPT] -= room.shared[0]
            sums[DENSE] -= room.shared[1]
    return _held(room, sums)


@kernel
def _joined(goal, before, load, squares):
    """Value of a layout with one more rank."""
    return before + squares if goal == SQUARES else max(before, load)


@njit(cache=True)
def one_each(t, room, goal, cut, layers):
    """Chunk c on rank c: fills `layers` [C] with the best and returns its value, infinite where there is none.

    value[b]: best of chunks 0 .. c that end before layer b. O(C L^2), less what `cut` leaves out.
    """
    num, chunks = t.floor.size - 1, t.slot.size
    value, following = np.full(num + 1, np.inf), np.empty(num + 1)
    start, sums = np.zeros((chunks, num + 1), np.int64), np.zeros(NUM_SUMS)
    value[0] = 0.0
    for c in range(chunks):
        following[:] = np.inf
        left, s = chunks - 1 - c, t.slot[c]
        for b in range(num if left == 0 else 0, num + 1):
            if t.floor[num] - t.floor[b] > cut * left * (1.0 + 1e-9):
                continue
            best = np.inf
            for a in range(0 if c == 0 else b - _least(c, chunks), -1, -1):
                load = t.seconds[s, a, b]
                if load > cut:
                    break
                squares = load * load
                if room.limit < np.inf:
                    nbytes = _bytes_of(t, room, c, a, b, -1, 0, 0, sums)
                    if nbytes > room.limit:
                        break
                    load = nbytes if goal == BYTES else load
                found = _joined(goal, value[a], load, squares)
                if found < np.inf and found <= best * (1.0 + EQUAL):  # of equals the longest: later chunks hold more
                    best, start[c, b] = min(best, found), a
            following[b] = best
        value, following = following, value
    if value[num] < np.inf:
        b = num
        for c in range(chunks - 1, -1, -1):
            layers[c] = b - start[c, b]
            b = start[c, b]
    return value[num]


@njit(cache=True)
def pairs(t, room, goal, cut, layers):
    """Chunks k and C - 1 - k on one rank (DualPipe, V shapes): as `one_each`, from the ends of the model inwards.

    value[i, j]: best of the outer k pairs where they hold layers 0 .. i - 1 and j .. L - 1.
    """
    num, chunks = t.floor.size - 1, t.slot.size
    levels = chunks // 2
    value, following = np.full((num + 1, num + 1), np.inf), np.empty((num + 1, num + 1))
    taken, sums = np.zeros((levels, num + 1, num + 1, 2), np.int16), np.zeros(NUM_SUMS)
    value[0, num] = 0.0
    for k in range(levels):
        following[:] = np.inf
        c, d, left = k, chunks - 1 - k, levels - k
        s, z, least = t.slot[c], t.slot[d], _least(k, chunks)
        for i in range(num + 1):
            for j in range(i, num + 1):
                before = value[i, j]
                if before == np.inf or t.floor[j] - t.floor[i] > cut * left * (1.0 + 1e-9):
                    continue
                for x in range(least, j - i + 1):
                    if t.seconds[s, i, i + x] > cut:
                        break
                    most = j - i - x
                    for y in range(most if left == 1 else least, most + 1):
                        if y < least:
                            break
                        one, two = t.seconds[s, i, i + x], t.seconds[z, j - y, j]
                        load = one + two
                        if load > cut:
                            break
                        if room.limit < np.inf:
                            nbytes = _bytes_of(t, room, c, i, i + x, d, j - y, j, sums)
                            if nbytes > room.limit:
                                break
                            load = nbytes if goal == BYTES else load
                        found = _joined(goal, before, load, one * one + two * two)
                        if found < following[i + x, j - y] * (1.0 - EQUAL):
                            following[i + x, j - y] = found
                            taken[k, i + x, j - y, 0], taken[k, i + x, j - y, 1] = x, y
        value, following = following, value
    best, middle = np.inf, -1
    for i in range(num + 1):
        if value[i, i] < best * (1.0 - EQUAL):
            best, middle = value[i, i], i
    if middle >= 0:
        i = j = middle
        for k in range(levels - 1, -1, -1):
            x, y = taken[k, i, j]
            layers[k], layers[chunks - 1 - k] = x, y
            i, j = i - x, j + y
    return best


@njit(cache=True)
def rank_bytes(t, room, chunks, layers):
    """Bytes of a rank that runs `chunks` [local] of a layout [C]."""
    sums = np.zeros(NUM_SUMS)
    for c in chunks:
        a = layers[:c].sum()
        _hold(t, room, c, a, a + layers[c], sums)
    if chunks.min() == 0 and chunks.max() == t.slot.size - 1:
        sums[KEPT] -= room.shared[0]
        sums[DENSE] -= room.shared[1]
    return _held(room, sums)


@njit(cache=True)
def round_robin(t, room, p, prefix, goal, layers):
    """Chunk c on rank c % p, where all layers from `prefix` on are alike: the largest seconds, or bytes, of a rank.

    Every way to spread the prefix over the first chunks is tried; the layers after it go one by one to the rank that
    then has least, there to the chunk that has least seconds: best possible where seconds of alike layers add up.
    """
    num, chunks = t.floor.size - 1, t.slot.size
    trial, start, load = np.empty(chunks, np.int64), np.empty(chunks, np.int64), np.empty(p)
    best, best_squares, sums = np.inf, np.inf, np.zeros(NUM_SUMS)
    for mask in range(1 << prefix):
        left, grows = _spread_prefix(mask, prefix, num, trial, start)
        if left < 0 or not _fill(t, room, p, goal, left, grows, num, trial, start, load, sums):
            continue
        most, squares = load.max(), 0.0
        for c in range(chunks):
            squares += _chunk_seconds(t, c, start, trial, num, 0) ** 2
        if most < best * (1.0 - EQUAL) or (most <= best * (1.0 + EQUAL) and squares < best_squares * (1.0 - EQUAL)):
            best, best_squares = most, squares
            layers[:] = trial
    return best


@njit(cache=True)
def _spread_prefix(mask, prefix, num, trial, start):
    """Least layers of every chunk: bit i of `mask` begins a new chunk with prefix layer i; the first bit skips chunk 0.

    Returns the layers that are left (negative: impossible) and the first chunk that may take them.
    """
    chunks = trial.size
    trial[:] = 0
    start[:] = prefix
    start[0] = 0
    c = 0
    for i in range(prefix):
        if (mask >> i) & 1:
            c += 1
            if c >= chunks:
                return -1, c
            start[c] = i
        trial[c] += 1
    for d in range(c + 1, chunks):
        trial[d] = _least(d, chunks)
    return num - trial.sum(), c


@kernel
def _chunk_seconds(t, c, start, trial, num, more):
    """Seconds of a chunk with some layers more; the last chunk ends with the model."""
    n = trial[c] + more
    a = num - n if c == trial.size - 1 else start[c]
    return t.seconds[t.slot[c], a, a + n]


@kernel
def _rank_load(t, room, p, rank, goal, start, trial, num, sums):
    """Seconds, or bytes, of a rank as it is, and whether it keeps within its room."""
    seconds = 0.0
    sums[:] = 0.0
    for c in range(rank, trial.size, p):
        a = num - trial[c] if c == trial.size - 1 else start[c]
        seconds += t.seconds[t.slot[c], a, a + trial[c]]
        if room.limit < np.inf:
            _hold(t, room, c, a, a + trial[c], sums)
    nbytes = _held(room, sums) if room.limit < np.inf else 0.0
    return (nbytes if goal == BYTES else seconds), nbytes <= room.limit


@njit(cache=True)
def _fill(t, room, p, goal, left, grows, num, trial, start, load, sums):
    """Give away the layers that are left; whether every rank keeps within its room."""
    grown, into = np.empty(p), np.empty(p, np.int64)
    for rank in range(p):
        load[rank], fits = _rank_load(t, room, p, rank, goal, start, trial, num, sums)
        if not fits:
            return False
        _grow(t, room, p, rank, goal, grows, num, trial, start, grown, into, sums)
    for _ in range(left):
        rank = 0
        for other in range(1, p):
            if grown[other] <= grown[rank] * (1.0 + EQUAL):  # of equals the later, which keeps fewer micro-batches
                rank = other
        if grown[rank] == np.inf:
            return False
        load[rank] = grown[rank]
        trial[into[rank]] += 1
        _grow(t, room, p, rank, goal, grows, num, trial, start, grown, into, sums)
    return True


@kernel
def _grow(t, room, p, rank, goal, grows, num, trial, start, grown, into, sums):
    """What a rank would have with one layer more, and on which of its chunks; infinite where it has no room."""
    least, at = np.inf, -1
    for c in range(rank, trial.size, p):
        if c >= grows and start[c] + trial[c] < num:
            seconds = _chunk_seconds(t, c, start, trial, num, 1)
            if seconds <= least * (1.0 + EQUAL):
                least, at = seconds, c
    grown[rank], into[rank] = np.inf, at
    if at >= 0:
        trial[at] += 1
        with_one, fits = _rank_load(t, room, p, rank, goal, start, trial, num, sums)
        trial[at] -= 1
        if fits:
            grown[rank] = with_one
