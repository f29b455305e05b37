# mypy: disallow-untyped-decorators=False
"""Gathered prices + schedule + memory -> step time and bytes: the one composition, jitted.

The scalar path, the batch path and the exact sweep call these functions with the same numbers in the same order, so
their answers agree bit for bit. Letters: p ranks, v chunks per rank, m micro-batches, C chunks, K block kinds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from estimator.cost.table import Again, Base
from estimator.jit import kernel, njit
from estimator.lanes import load, put, splat
from estimator.program import Program
from estimator.span import pipeline_spans
from estimator.span_codes import INTERLEAVED
from estimator.span_program import walk

__all__ = [
    "AGAIN", "ONCE", "PASSES", "Constants", "Net", "Place", "Tables", "again_seconds", "choose_columns", "finish",
    "once_seconds", "pair_hop", "place_of", "program_of", "rank_params", "rank_windows", "spans_of",
]  # fmt: skip


class Net(IntEnum):
    """Columns of the group table: data-parallel rings and the hop to the next stage."""

    DP = 0  # ranks of the dense gradient group, dp * cp
    DP_PER_BYTE = 1  # (n - 1)/n over the narrowest tier: seconds per byte of a reduce-scatter or all-gather
    DP_LATENCY = 2
    EDP = 3  # ranks of the expert gradient group
    EDP_PER_BYTE = 4
    EDP_LATENCY = 5
    HOP_PER_BYTE = 6
    HOP_LATENCY = 7
    SHARDS = 8  # ranks over which ZeRO shards: the dense gradient group, or under HSDP one replica of it
    SHARD_PER_BYTE = 9
    SHARD_LATENCY = 10
    SHARD_OUTER = 11  # share of the outermost tier's link that a shard group's traffic uses while it moves
    ESHARDS = 12  # the same of experts
    ESHARD_PER_BYTE = 13
    ESHARD_LATENCY = 14
    ESHARD_OUTER = 15
    REPLICA_PER_BYTE = 16  # all-reduce of a rank's shard over the replicas: seconds per byte of the whole gradients
    REPLICA_LATENCY = 17
    EREPLICA_PER_BYTE = 18
    EREPLICA_LATENCY = 19
    SHARD_SHARED = 20  # share of the link that bounds the replicas' all-reduce that a shard group's traffic uses
    ESHARD_SHARED = 21


class Constants(NamedTuple):
    """Numbers of the system and the recipe."""

    grad_bytes: float
    state_bytes: float
    gather_bytes: float  # bytes per parameter of a weight all-gather
    update_s_per_param: float
    matrix_bytes: float  # of a gradient that ranks gather to update whole matrices; -1: all parameters fare alike
    capacity_bytes: float
    context_bytes: float
    norm_latency_s: float
    fixed_host_s: float
    jitter: float  # share of a step lost to the slowest of n
    expert_bucket: float  # bytes of a bucket of the experts' gradients; -1: they share the others' buckets
    host_s_per_byte: float  # over the link to the host, one way; 0: unknown, and rules refuse to offload
    host_sum_s_per_byte: float  # of gradients that go down and are added up in the host's memory
    host_update_s_per_param: float
    host_capacity_bytes: float


class Tables(NamedTuple):
    """Everything a composition looks up. Layouts are ragged and flat; `Place` finds one."""

    base: np.ndarray  # [R, K, Base]
    again: np.ndarray  # [R, choices, K, Again]
    hop_bytes: np.ndarray  # [R]
    buffer_bytes: np.ndarray  # [R]
    nets: np.ndarray  # [G, Net]
    counts: np.ndarray  # [sum Q, K], per class of chunks
    first: np.ndarray  # [sum Q * depth, K], per class of chunks
    held: np.ndarray  # [sum p, K]
    chunks: np.ndarray  # [sum p, slots]: chunks of each rank
    slots: np.ndarray  # [sum p, slots]: their classes
    class_of: np.ndarray  # [sum C]
    leads: np.ndarray  # [sum leads]: ranks that stand for those like them
    layouts: np.ndarray  # int64 [L, 11]: start and length of counts, first, ranks, class_of, leads; slots in use
    steps: np.ndarray  # int32 [sum n, 6]: of programs; this and what follows: see estimator/program.py
    sums: np.ndarray
    around: np.ndarray
    between: np.ndarray
    told: np.ndarray
    programs: np.ndarray  # int64 [N, 14]: start and length of the five, then whole numbers; 0 is none
    constants: Constants


class Place(NamedTuple):
    """One layout: views into the flat arrays of Tables."""

    counts: np.ndarray
    first: np.ndarray
    held: np.ndarray
    chunks: np.ndarray
    slots: np.ndarray
    class_of: np.ndarray
    leads: np.ndarray


ONCE: Final = 8
"""What a chunk takes for one micro-batch: forward, input gradient, weight gradient; what forward and input gradient
take longer alone; seconds of their expert traffic on the outermost tier; what the two gradients take less (at most 0)
where they are one pass, for weight gradients run beside reductions of input gradients."""
AGAIN: Final = 4
"""What recompute adds to it: seconds, seconds longer alone, seconds on the outermost tier. And the bytes kept
that may go to the host: all but logits, whose backward follows at once."""
PASSES: Final = 5
"""Rows of seconds by class or chunk: forward, input gradient, weight gradient, the first two alone."""

F_COMP, F_HOST, F_CP, F_TP0, F_EP0 = (int(Base[n]) for n in ("F_COMP", "F_HOST", "F_CP", "F_TP0", "F_EP0"))
B_COMP, B_HOST, B_CP, B_TP0, B_EP0 = (int(Base[n]) for n in ("B_COMP", "B_HOST", "B_CP", "B_TP0", "B_EP0"))
W_COMP, W_HOST, B_BESIDE_W = int(Base.W_COMP), int(Base.W_HOST), int(Base.B_BESIDE_W)
DENSE, EXPERT = int(Base.DENSE_PARAMS), int(Base.EXPERT_PARAMS)
R_COMP, R_HOST, R_CP, R_TP0, R_EP0 = (int(Again[n]) for n in ("R_COMP", "R_HOST", "R_CP", "R_TP0", "R_EP0"))
F_WIRE, B_WIRE, R_WIRE = int(Base.F_WIRE), int(Base.B_WIRE), int(Again.R_WIRE)
A_SAVED, A_LOGITS = int(Again.SAVED_BYTES), int(Again.LOGITS_BYTES)


@kernel
def choose_columns(base, again_all, tp, ep, cols, r):
    """Seconds of each block kind under the overlap flags of TP and EP: `cols` [ONCE, K], `r` [choices, K, AGAIN].

    Rows of `cols`, and what recompute repeats of them in `r`: see ONCE and AGAIN.
    """
    for k in range(base.shape[0]):
        x = base[k]
        cols[0, k] = x[F_COMP] + x[F_HOST] + x[F_CP] + x[F_TP0 + tp] + x[F_EP0 + ep]
        cols[1, k] = x[B_COMP] + x[B_HOST] + x[B_CP] + x[B_TP0 + tp] + x[B_EP0 + ep]
        cols[2, k] = x[W_COMP] + x[W_HOST]
        cols[3, k] = x[F_EP0] - x[F_EP0 + ep]
        cols[4, k] = x[B_EP0] - x[B_EP0 + ep]
        cols[5, k] = x[F_WIRE]
        cols[6, k] = x[B_WIRE]
        cols[7, k] = 0.0 if tp else x[B_BESIDE_W]
        for c in range(again_all.shape[0]):
            a = again_all[c, k]
            r[c, k, 0] = a[R_COMP] + a[R_HOST] + a[R_CP] + a[R_TP0 + tp] + a[R_EP0 + ep]
            r[c, k, 1] = a[R_EP0] - a[R_EP0 + ep]
            r[c, k, 2] = a[R_WIRE]
            r[c, k, 3] = a[A_SAVED] - a[A_LOGITS]


@kernel
def once_seconds(counts, j, cols, out):
    """Sums `cols` [ONCE, K] over the blocks of class j of chunks: fills `out` [ONCE], one micro-batch, no recompute."""
    for i in range(out.size):
        out[i] = 0.0
    for k in range(counts.shape[1]):
        n = counts[j, k]
        if n > 0:
            for i in range(out.size):
                out[i] += n * cols[i, k]


@kernel
def again_seconds(counts, first, j, layers, choice, r, out):
    """The same of what class j of chunks computes again: fills `out` [AGAIN] from `r` [choices, K, AGAIN]."""
    depth = first.shape[0] // counts.shape[0]
    for i in range(out.size):
        out[i] = 0.0
    for k in range(counts.shape[1]):
        n = counts[j, k]
        if n > 0:
            if layers > 0:
                full = first[j * depth + min(layers, depth - 1), k]
                for i in range(out.size):
                    out[i] += full * r[1, k, i] + (n - full) * r[0, k, i]
            else:
                for i in range(out.size):
                    out[i] += n * r[choice, k, i]


@kernel
def pair_hop(code, ep, hop, blocking):
    """What a pair of passes of an interleaved schedule takes longer: it gives both outputs at its end.

    So each step of every rank waits for a hop from the step before on a neighbour (DualPipe's ladder has it already).
    """
    return hop if code == INTERLEAVED and ep and not blocking else 0.0


@njit(cache=True, inline="always")
def spans_of(class_of, classes, chunks, pipe, hop, blocking, code, p, v, m, made):
    """Makespans of the pipeline, in lanes.

    `classes` [PASSES Q]: f, b, w of each class, then f and b alone; scratch: `chunks` [PASSES C], where the seconds of
    each chunk stay, and `pipe`. Sends that block occupy their sender; others are latency between stages.
    """
    num, last, sent = classes.shape[0] // PASSES, class_of.size - 1, hop if blocking else 0.0
    total, turn = last + 1, made.turn
    for j in range(total):
        q = class_of[j]
        ahead, back = (sent if j < last and j != turn else 0.0), (sent if j > 0 and j != turn + 1 else 0.0)
        put(chunks, j, load(classes, q) + ahead)
        put(chunks, total + j, load(classes, num + q) + back)
        put(chunks, 2 * total + j, load(classes, 2 * num + q))
        put(chunks, 3 * total + j, load(classes, 3 * num + q) + ahead)
        put(chunks, 4 * total + j, load(classes, 4 * num + q) + back)
    if made.steps.shape[0] > 0:
        return walk(made, chunks, 0.0 if blocking else hop, p, m, pipe)
    f, b, w = chunks[:total], chunks[total : 2 * total], chunks[2 * total : 3 * total]
    alone_f, alone_b = chunks[3 * total : 4 * total], chunks[4 * total : 5 * total]
    return pipeline_spans(code, f, b, w, alone_f, alone_b, 0.0 if blocking else hop, p, v, m, pipe)


@kernel
def rank_params(held, base, dense, expert):
    """Parameters that each rank holds, dense and expert [p]."""
    for i in range(held.shape[0]):
        d = 0.0
        e = 0.0
        for k in range(held.shape[1]):
            d += held[i, k] * base[k, DENSE]
            e += held[i, k] * base[k, EXPERT]
        dense[i] = d
        expert[i] = e


@kernel
def rank_windows(leads, slots, classes, windows):
    """Seconds of one micro-batch on each leading rank, in lanes: where data-parallel traffic can hide.

    `classes` as in `spans_of`; `windows` [2 leads]: forwards, then backwards.
    """
    num = classes.shape[0] // PASSES
    for n in range(leads.size):
        tf = splat(0.0)
        tb = splat(0.0)
        for slot in range(slots.shape[1]):
            j = slots[leads[n], slot]
            tf = tf + load(classes, j)
            tb = tb + (load(classes, num + j) + load(classes, 2 * num + j))
        put(windows, n, tf)
        put(windows, leads.size + n, tb)


@njit(cache=True)
def place_of(t, layout, p):
    """Views of one layout."""
    x = t.layouts[layout]
    return Place(
        t.counts[x[0] : x[0] + x[1]], t.first[x[2] : x[2] + x[3]], t.held[x[4] : x[4] + p],
        t.chunks[x[4] : x[4] + p, : x[10]], t.slots[x[4] : x[4] + p, : x[10]], t.class_of[x[6] : x[6] + x[7]],
        t.leads[x[8] : x[8] + x[9]],
    )  # fmt: skip


@njit(cache=True)
def program_of(t, program, p):
    """Views of one program; empty where the schedule has a closed form."""
    x = t.programs[program]
    return Program(
        t.steps[x[0] : x[0] + x[1]], t.sums[x[2] : x[2] + x[3]], t.around[x[4] : x[4] + x[5]],
        t.between[x[6] : x[6] + x[7]], t.told[x[8] : x[8] + x[9]], x[10], x[11], x[12], x[13],
    )  # fmt: skip


@kernel
def finish(span, dp_exposed, update, gather, c):
    """Step seconds: (pipeline + optimizer + its traffic + host) and the share lost to the slowest rank.

    Span, exposed seconds and gather: floats or lanes.
    """
    busy = span + dp_exposed + update + (gather + c.norm_latency_s) + c.fixed_host_s
    return busy + c.jitter * busy
