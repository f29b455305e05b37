# mypy: disallow-untyped-decorators=False
"""Gathered prices + schedule + memory -> step time and bytes: the one composition, jitted.

The scalar path, the batch path and the exact sweep call these functions with the same numbers in the same order, so
their answers agree bit for bit. Letters: p ranks, v chunks per rank, m micro-batches, C chunks, K block kinds.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numba import njit

from estimator.cost.table import SLOWDOWN, Again, Base
from estimator.span import pipeline_span

__all__ = [
    "Constants", "Net", "Place", "Tables", "bucket_terms", "choose_columns", "chunk_seconds", "finish", "gather_wire",
    "gradient_wire", "hidden_behind", "pieces_of", "place_of", "rank_params", "rank_windows", "span_of", "spread",
    "update_seconds",
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


class Constants(NamedTuple):
    """Numbers of the system and the recipe."""

    grad_bytes: float
    state_bytes: float
    gather_bytes: float  # bytes per parameter of a weight all-gather
    update_s_per_param: float
    capacity_bytes: float
    context_bytes: float
    norm_latency_s: float
    fixed_host_s: float
    jitter: float  # share of a step lost to the slowest of n


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


F_COMP, F_HOST, F_CP, F_TP0, F_EP0 = (int(Base[n]) for n in ("F_COMP", "F_HOST", "F_CP", "F_TP0", "F_EP0"))
B_COMP, B_HOST, B_CP, B_TP0, B_EP0 = (int(Base[n]) for n in ("B_COMP", "B_HOST", "B_CP", "B_TP0", "B_EP0"))
W_COMP, W_HOST = int(Base.W_COMP), int(Base.W_HOST)
DENSE, EXPERT = int(Base.DENSE_PARAMS), int(Base.EXPERT_PARAMS)
R_COMP, R_HOST, R_CP, R_TP0, R_EP0 = (int(Again[n]) for n in ("R_COMP", "R_HOST", "R_CP", "R_TP0", "R_EP0"))
N_DP, N_DP_BYTE, N_DP_LAT = int(Net.DP), int(Net.DP_PER_BYTE), int(Net.DP_LATENCY)
N_EDP, N_EDP_BYTE, N_EDP_LAT = int(Net.EDP), int(Net.EDP_PER_BYTE), int(Net.EDP_LATENCY)


@njit(cache=True)
def choose_columns(base, again_all, tp, ep, f, b, w, r):
    """Seconds of each block kind under the overlap flags of TP and EP.

    Fills forward, input gradient and weight gradient [K], and recompute `r` [choices, K].
    """
    for k in range(base.shape[0]):
        f[k] = base[k, F_COMP] + base[k, F_HOST] + base[k, F_CP] + base[k, F_TP0 + tp] + base[k, F_EP0 + ep]
        b[k] = base[k, B_COMP] + base[k, B_HOST] + base[k, B_CP] + base[k, B_TP0 + tp] + base[k, B_EP0 + ep]
        w[k] = base[k, W_COMP] + base[k, W_HOST]
        for c in range(again_all.shape[0]):
            a = again_all[c, k]
            r[c, k] = a[R_COMP] + a[R_HOST] + a[R_CP] + a[R_TP0 + tp] + a[R_EP0 + ep]


@njit(cache=True)
def zero_traffic(counts, j, base, net, c):
    """Seconds to gather the weights of chunk j once, and to reduce-scatter its gradients once, block by block."""
    dense = 0.0
    expert = 0.0
    blocks = 0.0
    for k in range(counts.shape[1]):
        dense += counts[j, k] * base[k, DENSE]
        expert += counts[j, k] * base[k, EXPERT]
        blocks += counts[j, k]
    wire = dense * net[N_DP_BYTE] + expert * net[N_EDP_BYTE]
    latency = blocks * (net[N_DP_LAT] + net[N_EDP_LAT])
    return wire * c.gather_bytes + latency, wire * c.grad_bytes + latency


@njit(cache=True)
def beside(window, traffic):
    """Seconds of compute and traffic side by side; traffic takes SLOWDOWN of the chip."""
    return max(window + SLOWDOWN * traffic, traffic)


@njit(cache=True)
def chunk_seconds(
    counts, first, layers, choice, f, b, w, r, splits, zero, overlap_dp, base, net, c, out_f, out_b, out_w
):
    """Seconds of one micro-batch on each class of chunks.

    ZeRO-2 reduces gradients and ZeRO-3 gathers weights (forward and backward) for every micro-batch. Schedules that do
    not split backward get W inside B.
    """
    num_classes, kinds = counts.shape
    depth = first.shape[0] // num_classes
    for j in range(num_classes):
        tf = 0.0
        tb = 0.0
        tw = 0.0
        tr = 0.0
        for k in range(kinds):
            n = counts[j, k]
            if n > 0:
                tf += n * f[k]
                tb += n * b[k]
                tw += n * w[k]
                if layers > 0:
                    full = first[j * depth + min(layers, depth - 1), k]
                    tr += full * r[1, k] + (n - full) * r[0, k]
                else:
                    tr += n * r[choice, k]
        tb += tr
        if not splits:
            tb += tw
            tw = 0.0
        if zero >= 2:
            gather, scatter = zero_traffic(counts, j, base, net, c)
            back = scatter + gather if zero >= 3 else scatter
            if overlap_dp:
                tb = beside(tb, back)
                if zero >= 3:
                    tf = beside(tf, gather)
            else:
                tb += back
                if zero >= 3:
                    tf += gather
        out_f[j] = tf
        out_b[j] = tb
        out_w[j] = tw


@njit(cache=True)
def spread(class_of, class_f, class_b, class_w, hop, blocking, f, b, w):
    """Seconds of each chunk [C] from those of its class. Sends that block occupy their sender."""
    last = class_of.size - 1
    sent = hop if blocking else 0.0
    for j in range(last + 1):
        f[j] = class_f[class_of[j]] + (sent if j < last else 0.0)
        b[j] = class_b[class_of[j]] + (sent if j > 0 else 0.0)
        w[j] = class_w[class_of[j]]


@njit(cache=True)
def span_of(code, f, b, w, hop, blocking, p, v, m):
    """Makespan of the pipeline: hops that do not block are latency between stages."""
    return pipeline_span(code, f, b, w, 0.0 if blocking else hop, p, v, m)


@njit(cache=True)
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


@njit(cache=True)
def rank_windows(place, class_f, class_b, class_w, win_f, win_b):
    """Seconds of one micro-batch's forward and backward on each leading rank: where data-parallel traffic can hide."""
    for n in range(place.leads.size):
        tf = 0.0
        tb = 0.0
        for slot in range(place.slots.shape[1]):
            j = place.slots[place.leads[n], slot]
            tf += class_f[j]
            tb += class_b[j] + class_w[j]
        win_f[n] = tf
        win_b[n] = tb


@njit(cache=True)
def gradient_wire(dense, expert, zero, net, c):
    """Seconds on the wire and latency of the gradients after the last backward.

    Stage 0 all-reduces (twice a reduce-scatter); stages 2 and 3 have reduced every micro-batch already.
    """
    if zero >= 2:
        return 0.0, 0.0
    twice = 2.0 if zero == 0 else 1.0
    wire = twice * c.grad_bytes * (dense * net[N_DP_BYTE] + expert * net[N_EDP_BYTE])
    return wire, twice * (net[N_DP_LAT] + net[N_EDP_LAT])


@njit(cache=True)
def gather_wire(dense, expert, zero, net, c):
    """The same of the weight all-gather after the update (stages 1 and 2).

    Overlap hides it under the next step's first forward.
    """
    if zero == 0 or zero >= 3:
        return 0.0, 0.0
    wire = c.gather_bytes * (dense * net[N_DP_BYTE] + expert * net[N_EDP_BYTE])
    return wire, net[N_DP_LAT] + net[N_EDP_LAT]


@njit(cache=True)
def pieces_of(grads_bytes, bucket):
    """Buckets that a rank's gradients fill. bucket 0: one."""
    if bucket <= 0:
        return 1.0
    return max(np.ceil(grads_bytes / bucket), 1.0)


@njit(cache=True)
def bucket_terms(wire, latency, pieces):
    """Traffic in buckets that starts as soon as one is full: its total seconds, and what stays exposed in any window.

    The last bucket has nothing left to hide behind, the others take SLOWDOWN of the chip.
    """
    total = wire + pieces * latency
    tail = total / pieces
    return total, tail + SLOWDOWN * (total - tail)


@njit(cache=True)
def hidden_behind(total, least, window):
    """Exposed seconds of bucketed traffic beside `window` seconds of compute."""
    return max(total - (1.0 - SLOWDOWN) * window, least)


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
def update_seconds(dense, expert, zero, net, c):
    """Optimizer update of the shard that a rank owns: bound by memory."""
    shard = dense / net[N_DP] + expert / net[N_EDP] if zero >= 1 else dense + expert
    return shard * c.update_s_per_param


@njit(cache=True)
def finish(span, dp_exposed, update, gather, c):
    """Step seconds: (pipeline + optimizer + its traffic + host) and the share lost to the slowest rank."""
    busy = span + dp_exposed + update + (gather + c.norm_latency_s) + c.fixed_host_s
    return busy + c.jitter * busy
