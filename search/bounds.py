# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Lower corners of structures, jitted: what no candidate under one can undercut.

Derived from the very functions that price a candidate, each option at its cheapest by itself.
"""

from __future__ import annotations

import numpy as np

from estimator.batch import fixed_bytes
from estimator.compose import (
    AGAIN,
    ONCE,
    TRAFFIC,
    Tables,
    again_seconds,
    choose_columns,
    chunk_seconds,
    finish,
    once_seconds,
    place_of,
    program_of,
    rank_params,
)
from estimator.gradients import apart_seconds, update_seconds
from estimator.jit import njit
from estimator.keep import at_home, keep_of
from estimator.memory import (
    ITEMS,
    RESERVED_FACTOR,
    WORKSPACE_BYTES,
    chunk_bytes,
    moving_bytes,
    owed_bytes,
    static_bytes,
)
from estimator.span import in_flight_peak, owed_peak
from estimator.span_codes import DUALPIPE, splits_backward
from search.parts import Options, Part

__all__ = ["CHEAPEST", "cheapest", "corners", "device", "least_seconds", "least_update", "seconds_scratch"]

NUM_ITEMS = len(ITEMS)
CHEAPEST = 4
"""Row of the pseudo-choice of flags that is on every column the cheapest; rows 0 to 3 are 2 tp + ep."""


@njit(cache=True)
def device(memory, c):
    """Bytes that the driver reports."""
    return memory * RESERVED_FACTOR + c.context_bytes


@njit(cache=True)
def seconds_scratch(choices, kinds):
    """Columns of each block kind under each pair of TP and EP flags, the last row CHEAPEST.

    Of one run [5, ONCE, K], and of recompute [5, choices, K, AGAIN] (compose.py).
    """
    return np.empty((5, ONCE, kinds)), np.empty((5, choices, kinds, AGAIN))


@njit(cache=True)
def cheapest(flags, cols, r):
    """Fill row CHEAPEST: on each column the cheapest of the allowed flags of TP and EP overlap, never alone."""
    cols[CHEAPEST], r[CHEAPEST] = np.inf, np.inf
    for q in range(4):
        if flags[0, q >> 1] >= 0 and flags[1, q & 1] >= 0:
            cols[CHEAPEST] = np.minimum(cols[CHEAPEST], cols[q])
            r[CHEAPEST] = np.minimum(r[CHEAPEST], r[q])
    cols[CHEAPEST, 3:] = 0.0
    r[CHEAPEST, :, :, 1:] = 0.0


@njit(cache=True)
def least_seconds(t, part, i, place, options, cols, r, out):
    """Seconds of each class of chunks under the cheapest flags and the cheapest recompute: out [3, Q]."""
    base, again = t.base[part.row[i]], t.again[part.row[i]][options.corner :]
    for q in range(4):
        choose_columns(base, again, q >> 1, q & 1, cols[q], r[q])
    cheapest(part.flags[i], cols, r)
    splits, keep = splits_backward(part.schedule[i]), at_home(keep_of(options.keep, 0, 0))
    once, repeated, nothing = np.empty(ONCE), np.empty(AGAIN), np.zeros(TRAFFIC)
    for j in range(place.counts.shape[0]):
        once_seconds(place.counts, j, cols[CHEAPEST], once)
        again_seconds(place.counts, place.first, j, 0, 0, r[CHEAPEST], repeated)
        out[0, j], out[1, j], out[2, j], _, _ = chunk_seconds(once, repeated, splits, keep, 0, nothing)


@njit(cache=True)
def least_update(t, part, i, place, options):
    """Lower bound of the optimizer update: on each rank the cheapest ZeRO stage."""
    net, c = t.nets[part.net[i]], t.constants
    dense, expert = np.empty(part.pp[i]), np.empty(part.pp[i])
    rank_params(place.held, t.base[part.row[i]], dense, expert)
    update = 0.0
    for rank in place.leads:
        least = np.inf
        for z in range(4):
            if part.zero[i, z] >= 0:
                own = update_seconds(dense[rank], expert[rank], keep_of(options.keep, z, 0), net, c)
                least = min(least, own + apart_seconds(rank, place.held, t.base[part.row[i]], z, net, c))
        update = max(update, least)
    return update


@njit(cache=True)
def _least_memory(t, part, i, place, options):
    """Lower bound of memory: on each rank the cheapest ZeRO stage and the cheapest recompute, no buckets."""
    p = part.pp[i]
    base, again = t.base[part.row[i]], t.again[part.row[i]]
    net, c = t.nets[part.net[i]], t.constants
    num_classes = place.counts.shape[0]
    saved, most, live, owed = np.empty(num_classes), np.empty(num_classes), np.empty(num_classes), np.empty(num_classes)
    flying, late = np.empty(place.slots.shape), np.empty((2, p, place.slots.shape[1]))
    made = program_of(t, part.program[i], p)
    in_flight_peak(part.schedule[i], p, part.vpp[i], part.m[i], made, flying)
    owed_peak(part.schedule[i], p, part.m[i], made, late)
    chunk_bytes(place.counts, place.first, 0, again, options.corner, saved, most, live)
    owed_bytes(place.counts, base, owed)
    rest = 0.0 + (fixed_bytes(t.buffer_bytes[part.row[i]], t.hop_bytes[part.row[i]], p) + WORKSPACE_BYTES)
    line = np.empty(NUM_ITEMS)
    memory = 0.0
    for rank in range(p):
        static = np.inf
        for z in range(4):
            if part.zero[i, z] >= 0:
                for dp in range(2):  # overlap decides how much is gathered ahead
                    if part.flags[i, 3, dp] >= 0:
                        keep = keep_of(options.keep, z, dp)
                        static = min(static, static_bytes(rank, place.held, base, keep, net, c, line))
        share = options.keep.activations
        moving = moving_bytes(rank, place.slots, flying, late, saved, most, owed, live, share, line)
        memory = max(memory, (static + moving) + rest)
    return memory


@njit(cache=True)
def corners(t: Tables, part: Part, options: Options, steps: np.ndarray, memories: np.ndarray) -> None:
    """Lower bounds of each structure: `steps` (the busy time of its busiest rank, so cheap), `memories` [S]."""
    cols, r = seconds_scratch(1, t.base.shape[1])
    seconds = np.empty((3, np.max(t.layouts[:, 1])))
    for i in range(part.id.size):
        place = place_of(t, part.layout[i], part.pp[i])
        least_seconds(t, part, i, place, options, cols, r, seconds)
        each = part.m[i] / 2 if part.schedule[i] == DUALPIPE else part.m[i] * 1.0
        busy = 0.0
        for rank in place.leads:
            mine = 0.0
            for j in place.slots[rank]:
                mine += seconds[0, j] + seconds[1, j] + seconds[2, j]
            busy = max(busy, each * mine)
        # A shade below, for the pipeline adds the same passes up in another order.
        steps[i] = finish(busy * (1.0 - 1e-9), 0.0, least_update(t, part, i, place, options), 0.0, t.constants)
        memories[i] = _least_memory(t, part, i, place, options)
