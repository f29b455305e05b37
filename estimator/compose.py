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

__all__ = ["Constants", "Net", "Tables", "chunk_seconds", "choose_columns", "finish", "gather_exposed",
           "gradient_exposed", "rank_params", "rank_windows", "span_of"]  # fmt: skip


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
    """Everything a composition looks up. Ragged layouts are flat, with their offsets in `layouts`."""

    base: np.ndarray  # [R, K, Base]
    again: np.ndarray  # [R, choices, K, Again]
    hop_bytes: np.ndarray  # [R]
    buffer_bytes: np.ndarray  # [R]
    nets: np.ndarray  # [G, Net]
    counts: np.ndarray  # [sum C, K]
    first: np.ndarray  # [sum C * depth, K]
    held: np.ndarray  # [sum p, K]
    chunks: np.ndarray  # [sum p, slots]
    layouts: np.ndarray  # int64 [L, 6]: first chunk, C, first row of `first`, its rows, first rank, slots
    constants: Constants


F_COMP, F_HOST, F_CP, F_TP0, F_EP0 = (int(Base[n]) for n in ("F_COMP", "F_HOST", "F_CP", "F_TP0", "F_EP0"))
B_COMP, B_HOST, B_CP, B_TP0, B_EP0 = (int(Base[n]) for n in ("B_COMP", "B_HOST", "B_CP", "B_TP0", "B_EP0"))
W_COMP, W_HOST = int(Base.W_COMP), int(Base.W_HOST)
DENSE, EXPERT = int(Base.DENSE_PARAMS), int(Base.EXPERT_PARAMS)
R_COMP, R_HOST, R_CP, R_TP0, R_EP0 = (int(Again[n]) for n in ("R_COMP", "R_HOST", "R_CP", "R_TP0", "R_EP0"))
N_DP, N_DP_BYTE, N_DP_LAT = int(Net.DP), int(Net.DP_PER_BYTE), int(Net.DP_LATENCY)
N_EDP, N_EDP_BYTE, N_EDP_LAT = int(Net.EDP), int(Net.EDP_PER_BYTE), int(Net.EDP_LATENCY)


@njit(cache=True)
def choose_columns(base, again_all, tp, ep, f, b, w, r):
    """Seconds of each block kind under the overlap flags of TP and EP: forward, input gradient, weight gradient [K],
    and recompute `r` [choices, K]."""
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
    counts, first, layers, choice, f, b, w, r, hop, blocking, splits, zero, overlap_dp, base, net, c, out_f, out_b, out_w
):
    """Seconds of one micro-batch on each chunk. Blocking sends occupy their sender; ZeRO-2 reduces gradients and
    ZeRO-3 gathers weights (forward and backward) for every micro-batch. Schedules that do not split backward get W
    inside B."""
    num_chunks, kinds = counts.shape
    depth = first.shape[0] // num_chunks
    for j in range(num_chunks):
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
        if blocking:
            if j < num_chunks - 1:
                tf += hop
            if j > 0:
                tb += hop
        out_f[j] = tf
        out_b[j] = tb
        out_w[j] = tw


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
def rank_windows(chunks, f, b, w, win_f, win_b):
    """Seconds of one micro-batch's forward and backward on each rank: where data-parallel traffic can hide."""
    for i in range(chunks.shape[0]):
        tf = 0.0
        tb = 0.0
        for slot in range(chunks.shape[1]):
            j = chunks[i, slot]
            tf += f[j]
            tb += b[j] + w[j]
        win_f[i] = tf
        win_b[i] = tb


@njit(cache=True)
def bucketed(wire, nbytes, bucket, latency, overlap, window):
    """Exposed seconds of traffic in buckets that starts as soon as its bucket is full. The last bucket has nothing left
    to hide behind. bucket 0: one bucket."""
    pieces = 1.0
    if bucket > 0:
        pieces = max(np.ceil(nbytes / bucket), 1.0)
    total = wire + pieces * latency
    if not overlap:
        return wire + latency
    tail = total / pieces
    return max(total - (1.0 - SLOWDOWN) * window, tail + SLOWDOWN * (total - tail))


@njit(cache=True)
def gradient_exposed(dense, expert, window, zero, overlap, bucket, net, c):
    """Gradient traffic after the last backward. Stage 0 all-reduces (twice a reduce-scatter); stages 2 and 3 have
    reduced every micro-batch already."""
    if zero >= 2:
        return 0.0
    twice = 2.0 if zero == 0 else 1.0
    wire = twice * c.grad_bytes * (dense * net[N_DP_BYTE] + expert * net[N_EDP_BYTE])
    latency = twice * (net[N_DP_LAT] + net[N_EDP_LAT])
    return bucketed(wire, c.grad_bytes * (dense + expert), bucket, latency, overlap, window)


@njit(cache=True)
def gather_exposed(dense, expert, window, zero, overlap, bucket, net, c):
    """Weight all-gather after the update (stages 1 and 2), hidden under the next step's first forward when overlapped."""
    if zero == 0 or zero >= 3:
        return 0.0
    wire = c.gather_bytes * (dense * net[N_DP_BYTE] + expert * net[N_EDP_BYTE])
    latency = net[N_DP_LAT] + net[N_EDP_LAT]
    return bucketed(wire, c.grad_bytes * (dense + expert), bucket, latency, overlap, window)


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
