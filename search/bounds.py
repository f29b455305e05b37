# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Lower corners of structures, jitted: what no candidate under one can undercut.

Derived from the very functions that price a candidate, each option at its cheapest by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from estimator.batch import fixed_bytes
from estimator.chunk import TRAFFIC, chunk_seconds
from estimator.compose import (
    AGAIN,
    ONCE,
    Tables,
    again_seconds,
    choose_columns,
    finish,
    once_seconds,
    place_of,
    program_of,
)
from estimator.cost.table import Base
from estimator.gradients import apart_seconds, update_seconds
from estimator.jit import kernel, njit
from estimator.keep import Keep, at_home, keep_of
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
from estimator.span_codes import DUALPIPE
from search.parts import Kinds, Options, Part

__all__ = [
    "CHEAPEST", "cheapest", "choice_of", "corners", "device", "host_floor", "seconds_scratch", "without_stage",
]  # fmt: skip

DENSE, EXPERT = int(Base.DENSE_PARAMS), int(Base.EXPERT_PARAMS)
NUM_ITEMS = len(ITEMS)
CHEAPEST = 4
"""Row of the pseudo-choice of flags that is on every column the cheapest; rows 0 to 3 are 2 tp + ep."""


@kernel
def device(memory, c):
    """Bytes that the driver reports."""
    return memory * RESERVED_FACTOR + c.context_bytes


@kernel
def choice_of(options, num_plain, o):
    """Index on the tables' recompute axis, and layers of block recompute (0: not block)."""
    return (options.plain[o, 0], 0) if o < num_plain else (1, options.block_layers[o - num_plain])


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
def least_seconds(t, row, flags, code, place, options, keep, floor, cols, r, out):
    """Seconds of each class of chunks under the cheapest flags and the cheapest recompute: out [3, Q].

    `floor` [Q, TRAFFIC]: what the host moves at least under any ZeRO stage (`host_floor`).
    """
    base, again = t.base[row], t.again[row][options.corner :]
    for q in range(4):
        choose_columns(base, again, q >> 1, q & 1, cols[q], r[q])
    cheapest(flags, cols, r)
    once, repeated = np.empty(ONCE), np.empty(AGAIN)
    for j in range(place.counts.shape[0]):
        once_seconds(place.counts, j, cols[CHEAPEST], once)
        again_seconds(place.counts, place.first, j, 0, 0, r[CHEAPEST], repeated)
        out[0, j], out[1, j], out[2, j], _, _ = chunk_seconds(once, repeated, code, 0, keep, 0, floor[j])


@kernel
def without_stage(keep):
    """What is on the host, and nothing of what ZeRO moves."""
    return Keep(0, 1, 1.0, keep.activations, keep.parameters, keep.gradients, keep.states)


@kernel
def host_floor(zero, traffic):
    """Keep of ZeRO's traffic [TRAFFIC] what the host moves, as shards where a stage that shards is a candidate."""
    if zero[3] >= 0:
        traffic[6] = min(traffic[6], traffic[7])
    if zero[2] >= 0 or zero[3] >= 0:
        traffic[8] = min(traffic[8], traffic[9])


@kernel
def least_update(t, row, net, zero, place, keep, c):
    """Lower bound of the optimizer update: on each rank the cheapest ZeRO stage."""
    base, held, update = t.base[row], place.held, 0.0
    for rank in place.leads:
        dense = 0.0
        expert = 0.0
        for k in range(held.shape[1]):
            dense += held[rank, k] * base[k, DENSE]
            expert += held[rank, k] * base[k, EXPERT]
        least = np.inf
        for z in range(4):
            if zero[z] >= 0:
                own = update_seconds(dense, expert, keep_of(keep, z, 0), t.nets[net], c)
                least = min(least, own + apart_seconds(rank, held, base, z, t.nets[net], c))
        update = max(update, least)
    return update


@njit(cache=True)
def least_memory_of(t, part, i, row, place, options, asked, x):
    """Lower bound of memory: on each leading rank the cheapest ZeRO stage and the cheapest recompute, no buckets.

    Ranks that others lead are left out: fewer ranks, no larger a maximum.
    """
    p = part.pp[i]
    base, again = t.base[row], t.again[row]
    net, c = t.nets[part.net[i]], t.constants
    num_classes, slots = place.counts.shape[0], place.slots.shape[1]
    saved, live, owed, line = x.saved[:num_classes], x.live[:num_classes], x.owed[:num_classes], x.line
    most, logits = x.most[:num_classes], x.logits[:num_classes]
    flying, late = x.flying[:p, :slots], x.late[:, :p, :slots]
    made = program_of(t, part.program[i], p)
    in_flight_peak(part.schedule[i], p, part.vpp[i], part.m[i], made, flying)
    owed_peak(part.schedule[i], p, part.m[i], made, late)
    chunk_bytes(place.counts, place.first, 0, again, options.corner, saved, most, logits, live)
    owed_bytes(place.counts, base, owed)
    rest = 0.0 + (fixed_bytes(t.buffer_bytes[row], t.hop_bytes[row], p) + WORKSPACE_BYTES)
    memory = 0.0
    for rank in place.leads:
        static = np.inf
        for z in range(4):
            if part.zero[i, z] >= 0:
                for dp in range(2):  # overlap decides how much is gathered ahead
                    if part.flags[i, 3, dp] >= 0:
                        static = min(static, static_bytes(rank, place.held, base, keep_of(asked, z, dp), net, c, line))
        share = asked.activations
        moving = moving_bytes(rank, place.slots, flying, late, saved, most, logits, owed, live, share, line)
        memory = max(memory, (static + moving) + rest)
    # A shade below, for the shares of a corner of several are none of their own, and round in their own way.
    return memory * (1.0 - 1e-12)


class Corner(NamedTuple):
    """Scratch of `least_memory_of`, for the largest structure."""

    saved: np.ndarray
    most: np.ndarray
    logits: np.ndarray
    live: np.ndarray
    owed: np.ndarray
    flying: np.ndarray
    late: np.ndarray
    line: np.ndarray


@njit(cache=True)
def new_corner(t):
    """Scratch for the largest structure of these tables."""
    most, ranks, slots = np.max(t.layouts[:, 1]), np.max(t.layouts[:, 5]), t.slots.shape[1]
    return Corner(
        np.empty(most), np.empty(most), np.empty(most), np.empty(most), np.empty(most), np.empty((ranks, slots)),
        np.empty((2, ranks, slots)), np.empty(NUM_ITEMS),
    )  # fmt: skip


@njit(cache=True)
def corners(t: Tables, part: Part, kinds: Kinds, options: Options, steps: np.ndarray, memories: np.ndarray) -> None:
    """Lower bounds of each structure over all its variants [S]: `steps`, `memories`.

    Of time it is the busy time of the busiest rank, so cheap.
    """
    cols, r = seconds_scratch(1, t.base.shape[1])
    most = np.max(t.layouts[:, 1])
    seconds, nothing = np.empty((3, most)), np.zeros((most, TRAFFIC))
    x = new_corner(t)
    # All that may go to the host is there, and moves in no time.
    hosts = kinds.hosts
    least = Keep(0, 1, np.min(kinds.gathers[:, 1]), np.max(hosts[:, 0]), np.max(hosts[:, 1]), np.max(hosts[:, 2]),
                 np.max(hosts[:, 3]))  # fmt: skip
    home = at_home(least)
    for i in range(part.id.size):
        place = place_of(t, part.layout[i], part.pp[i])
        row = kinds.prices[part.row[i], kinds.prices.shape[1] - 1]
        least_seconds(t, row, part.flags[i], part.schedule[i], place, options, home, nothing, cols, r, seconds)
        each = part.m[i] / 2 if part.schedule[i] == DUALPIPE else part.m[i] * 1.0
        busy = 0.0
        for rank in place.leads:
            mine = 0.0
            for j in place.slots[rank]:
                mine += seconds[0, j] + seconds[1, j] + seconds[2, j]
            busy = max(busy, each * mine)
        update = (1.0 - least.states) * least_update(t, row, part.net[i], part.zero[i], place, home, t.constants)
        # A shade below, for the pipeline adds the same passes up in another order.
        steps[i] = finish(busy * (1.0 - 1e-9), 0.0, update, 0.0, t.constants)
        memories[i] = least_memory_of(t, part, i, row, place, options, least, x)
