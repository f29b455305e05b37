# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""What the sweep of one structure works on: its columns, its lanes, and what its options have in common.

Filled once per structure, by the functions that price a candidate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from estimator.batch import fixed_bytes, staging_bytes
from estimator.chunk import TRAFFIC, zero_traffic
from estimator.compose import (
    AGAIN,
    ONCE,
    PASSES,
    again_seconds,
    choose_columns,
    once_seconds,
)
from estimator.gradients import (
    apart_seconds,
    behind_shards,
    bucketed_terms,
    gather_wire,
    gradient_wire,
    replica_terms,
    shard_of,
    update_seconds,
)
from estimator.jit import kernel, njit
from estimator.keep import Keep, keep_of, uses_host
from estimator.lanes import WIDTH
from estimator.memory import (
    ITEMS,
    WORKSPACE_BYTES,
    chunk_bytes,
    hosted_bytes,
    kept_bytes,
    moving_bytes,
    owed_bytes,
    second_set,
    static_bytes,
)
from estimator.span import in_flight_peak, owed_peak, scratch_rows
from estimator.span_codes import holds_pairs
from search.bounds import CHEAPEST, cheapest, choice_of, device, host_floor, seconds_scratch

__all__ = [
    "Job", "Scratch", "fill_bytes", "fill_flight", "fill_gradients", "fill_seconds", "fill_traffic", "least_memory",
    "new_scratch",
]  # fmt: skip

NUM_ITEMS = len(ITEMS)


class Scratch(NamedTuple):
    """Arrays that every structure writes anew.

    Per pair of TP and EP flags and CHEAPEST: columns of block kinds `cols` [5, ONCE, K] and of recompute `r`
    [5, choices, K, AGAIN]; of classes of chunks `once` [5, Q, ONCE], `again` [5, recomputes, Q, AGAIN]; `traffic`
    [Q, TRAFFIC] of ZeRO.

    Per recompute: `moving`, `total`, `kept` (activations in flight, wherever they are) [recomputes, p], `memory`
    [2, 4, recomputes, 1 + buckets] (EP overlap, ZeRO stage; bare, then per bucket, and of stage 3 without and with
    overlap; infinite where over capacity or no candidate), `is_open` [2, 4, recomputes], `fits` (under
    any of those), `least` [recomputes], `wanted` [2, 4, recomputes]: what floors leave open.

    Per rank: chunks in flight without and with EP overlap `flying` [2, p, slots], `late` [2, p, slots]
    (span.owed_peak), parameters `dense`, `expert` [p]. Per level of the tree of variants: `rows`, `bases`, `agains`.

    Per ZeRO stage: `plain` [4, 2], gradients and gathers not overlapped (the slowest rank's), `terms`
    [4, buckets, leads, 4], total and least of each (of stage 3 in the first), `update` [4]. `floor`: of `traffic` what
    the host moves at least.

    In lanes: `classes` [PASSES Q], `chunks` [PASSES C], `pipe`, `covers` [2 leads], `held` [1 + buckets] (memory),
    `witness` [2] (the point that beat a lane's last candidate: it often beats the next), `out` [2].
    """

    cols: np.ndarray
    r: np.ndarray
    once: np.ndarray
    again: np.ndarray
    traffic: np.ndarray
    moving: np.ndarray
    total: np.ndarray
    memory: np.ndarray
    is_open: np.ndarray
    fits: np.ndarray
    least: np.ndarray
    wanted: np.ndarray
    flags: np.ndarray
    zero: np.ndarray
    kept: np.ndarray
    floor: np.ndarray
    plain: np.ndarray
    terms: np.ndarray
    update: np.ndarray
    classes: np.ndarray
    chunks: np.ndarray
    pipe: np.ndarray
    covers: np.ndarray
    held: np.ndarray
    witness: np.ndarray
    out: np.ndarray
    flying: np.ndarray
    late: np.ndarray
    dense: np.ndarray
    expert: np.ndarray
    rows: np.ndarray
    bases: np.ndarray
    agains: np.ndarray


class Job(NamedTuple):
    """One variant of a structure under one way to keep: its prices and columns, and the lanes at work.

    Each lane is a recompute `o` under flags `g` (2 tp + ep) and a pipeline `kind` of ZeRO and DP overlap: 0 for stages
    0 and 1, then stages 2 and 3, each without and with overlap.
    """

    i: int
    variant: int
    base: np.ndarray
    again: np.ndarray
    buffer_bytes: float
    hop_bytes: float
    net: np.ndarray
    code: int
    p: int
    v: int
    m: int
    hop: float
    id: int
    num: int
    num_plain: int
    flags: np.ndarray
    zero: np.ndarray
    keep: Keep
    replicas: float
    o: np.ndarray
    g: np.ndarray
    kind: np.ndarray


@njit(cache=True)
def new_scratch(t, options, height):
    """Scratch for the largest structure of these tables, and so many levels of variants."""
    kinds, most, deepest = t.base.shape[1], np.max(t.layouts[:, 1]), np.max(t.layouts[:, 7])
    ranks, leads = np.max(t.layouts[:, 5]), np.max(t.layouts[:, 9])
    num, buckets = options.plain.shape[0] + options.block_layers.size, options.buckets.size
    cols, r = seconds_scratch(t.again.shape[1], kinds)
    witness = np.full((2, WIDTH), np.inf)
    walked = np.max(t.programs[:, 10] + t.programs[:, 11])  # rows of a program
    return Scratch(
        cols, r, np.empty((5, most, ONCE)), np.empty((5, num, most, AGAIN)), np.empty((most, TRAFFIC)),
        np.empty((num, ranks)), np.empty((num, ranks)), np.empty((2, 4, num, 1 + buckets)),
        np.empty((2, 4, num), np.bool_), np.empty(num, np.bool_), np.empty(num), np.empty((2, 4, num), np.bool_),
        np.empty((4, 2), np.int64), np.empty(4, np.int64), np.zeros((num, ranks)), np.empty((most, TRAFFIC)),
        np.zeros((4, 2)), np.empty((4, buckets, leads, 4)), np.zeros(4), np.empty((PASSES * most, WIDTH)),
        np.empty((PASSES * deepest, WIDTH)), np.empty((max(scratch_rows(ranks), walked), WIDTH)),
        np.empty((2 * leads, WIDTH)), np.empty((1 + buckets, WIDTH)), witness, np.empty((2, WIDTH)),
        np.empty((2, ranks, t.slots.shape[1])), np.empty((2, ranks, t.slots.shape[1])), np.empty(ranks),
        np.empty(ranks), np.empty(height, np.int64), np.empty((height, *t.base.shape[1:])),
        np.empty((height, *t.again.shape[1:])),
    )  # fmt: skip


@njit(cache=True)
def fill_flight(code, p, v, m, slots, made, x):
    """Views of the chunks in flight on each rank, filled: without and with EP overlap, and when most is owed."""
    flying, late = x.flying[:, :p, : slots.shape[1]], x.late[:, :p, : slots.shape[1]]
    for ep in range(2):
        in_flight_peak(code, p, v, m, made, flying[ep])
        second_set(holds_pairs(code), ep, flying[ep])
    owed_peak(code, p, m, made, late)
    return flying, late


@kernel
def fill_traffic(c, job, place, x):
    """What ZeRO and the host move for every class of chunks, and of that the least."""
    traffic, floor = x.traffic, x.floor
    for j in range(place.counts.shape[0]):
        zero_traffic(place.counts, j, job.base, job.net, c, traffic[j])
        for n in range(TRAFFIC):
            floor[j, n] = traffic[j, n]
        host_floor(job.zero, floor[j])


@kernel
def fill_seconds(job, place, options, prune, x):
    """Seconds of every class of chunks under every pair of flags and recompute."""
    base, again = job.base, job.again
    cols, r, once, repeated = x.cols, x.r, x.once, x.again
    for g in range(4):
        choose_columns(base, again, g >> 1, g & 1, cols[g], r[g])
    cheapest(job.flags, cols, r)
    for g in range(5):
        if g == CHEAPEST or (job.flags[0, g >> 1] >= 0 and job.flags[1, g & 1] >= 0):
            for j in range(place.counts.shape[0]):
                once_seconds(place.counts, j, cols[g], once[g, j])
    for o in range(job.num):
        if not x.fits[o]:
            continue
        choice, layers = choice_of(options, job.num_plain, o)
        for g in range(5 if prune else 4):
            if g == CHEAPEST or (job.flags[0, g >> 1] >= 0 and job.flags[1, g & 1] >= 0):
                for j in range(place.counts.shape[0]):
                    again_seconds(place.counts, place.first, j, layers, choice, r[g], repeated[g, o, j])


@njit(cache=True)
def fill_bytes(c, job, place, flying, late, options, x):
    """What depends on ZeRO and recompute alone, of those that are wanted: memory and update."""
    base, again, net = job.base, job.again, job.net
    p, num_classes = job.p, place.counts.shape[0]
    dense, expert, held = x.dense, x.expert, np.empty(p)
    saved, most, live, owed = np.empty(num_classes), np.empty(num_classes), np.empty(num_classes), np.empty(num_classes)
    words, line = np.empty(num_classes), np.empty(NUM_ITEMS)
    hosted, offloads = np.zeros(p), uses_host(job.keep)
    owed_bytes(place.counts, base, owed)
    moving, update = x.moving, x.update
    fixed = fixed_bytes(job.buffer_bytes, job.hop_bytes, p) + WORKSPACE_BYTES
    staged = np.empty((options.buckets.size, p))
    x.fits[:] = False
    x.memory[:, :, : job.num, :2] = np.inf
    for ep in range(2):
        if job.flags[1, ep] < 0:
            continue
        for o in range(job.num):
            if not (x.wanted[ep, 0, o] or x.wanted[ep, 1, o] or x.wanted[ep, 2, o] or x.wanted[ep, 3, o]):
                continue
            choice, layers = choice_of(options, job.num_plain, o)
            chunk_bytes(place.counts, place.first, layers, again, choice, saved, most, words, live)
            for rank in range(p):
                share = job.keep.activations
                moving[o, rank] = moving_bytes(
                    rank, place.slots, flying[ep], late, saved, most, words, owed, live, share, line
                )
                if offloads:
                    x.kept[o, rank] = kept_bytes(rank, place.slots, flying[ep], saved, words)
        for z in range(4):
            if job.zero[z] < 0:
                continue
            memory, wanted = x.memory[ep, z], x.wanted[ep, z]
            # What is gathered ahead depends on overlap, so ZeRO-3 is there twice: overlapped first, in column 1.
            twice = z == 3 and job.keep.prefetch != 1.0
            for dp in range(1 if twice else 0, -1, -1):
                keep = keep_of(job.keep, z, dp)
                for rank in range(p):
                    held[rank] = static_bytes(rank, place.held, base, keep, net, c, line)
                    if offloads:
                        shard = shard_of(dense[rank], expert[rank], z, net)
                        hosted[rank] = hosted_bytes(rank, place.held, base, keep, net, c, shard, 0.0, line)
                _fill_memory(
                    c, job, options.buckets, z, held, dense, expert, fixed, staged, moving, wanted, x.total, memory
                )
                if offloads:
                    _refuse_hosts(c, job, hosted, x.kept, wanted, memory)
                if dp == 1 or (z == 3 and not twice):
                    memory[: job.num, 1] = memory[: job.num, 0]
            for o in range(job.num):
                x.fits[o] |= least_memory(memory, z, o) < np.inf
    for z in range(4):
        if job.zero[z] < 0:
            continue
        update[z] = 0.0
        for rank in place.leads:
            mine = update_seconds(dense[rank], expert[rank], keep_of(job.keep, z, 0), net, c)
            update[z] = max(update[z], mine + apart_seconds(rank, place.held, base, z, net, c))


@kernel
def fill_gradients(c, base, net, z, keep, place, options, x):
    """Data-parallel traffic of the leading ranks under one ZeRO stage and every bucket; `keep`: of any stage."""
    leads, buckets, plain, terms = place.leads, options.buckets, x.plain, x.terms[z]
    keep = keep_of(keep, z, 1)
    plain[z, 0], plain[z, 1] = 0.0, 0.0
    for n in range(leads.size):
        d, e = x.dense[leads[n]], x.expert[leads[n]]
        grad_s, grad_latency = gradient_wire(d, e, z, net, c)
        gather_s, gather_latency = gather_wire(d, e, z, net, c)
        plain[z, 0] = max(plain[z, 0], grad_s + grad_latency)
        plain[z, 1] = max(plain[z, 1], gather_s + gather_latency)
        blocks = 0.0
        for k in range(place.held.shape[1]):
            blocks += place.held[leads[n], k]
        if z == 3:
            total, least = replica_terms(d, e, blocks, net, c)
            terms[0, n, 0], terms[0, n, 1] = behind_shards(total, least, d, e, blocks, keep, net, c)
        for k in range(buckets.size if z < 3 else 0):
            total, least, terms[k, n, 2], terms[k, n, 3] = bucketed_terms(d, e, z, buckets[k], net, c)
            terms[k, n, 0], terms[k, n, 1] = behind_shards(total, least, d, e, blocks, keep, net, c)


@kernel
def _fill_memory(c, job, buckets, z, held, dense, expert, fixed, staged, moving, wanted, total, memory):
    """Memory of each recompute that is wanted, bare and with each bucket; infinite where over capacity."""
    p, bucketed = job.p, z < 3 and job.flags[3, 1] >= 0
    least_grads = np.inf
    for rank in range(p):
        least_grads = min(least_grads, (dense[rank] + expert[rank]) * c.grad_bytes)
    for k in range(buckets.size if bucketed else 0):
        for rank in range(p):
            staged[k, rank] = staging_bytes(buckets[k], dense[rank], expert[rank], 1, z, c) + fixed
    for o in range(job.num):
        if not wanted[o]:
            continue
        low = 0.0
        for rank in range(p):
            total[o, rank] = held[rank] + moving[o, rank]
            low = max(low, total[o, rank])
        bare = low + (0.0 + fixed)
        fits = device(bare, c) <= c.capacity_bytes
        memory[o, 0] = bare if fits else np.inf
        for k in range(buckets.size if bucketed and fits else 0):
            most = bare
            if buckets[k] > 0.0 or c.expert_bucket > 0.0:
                if c.expert_bucket < 0.0 and buckets[k] <= least_grads:  # the same on every rank
                    most = low + staged[k, 0]
                else:
                    most = 0.0
                    for rank in range(p):
                        most = max(most, total[o, rank] + staged[k, rank])
            memory[o, 1 + k] = most if device(most, c) <= c.capacity_bytes else np.inf


@kernel
def least_memory(memory, z, o):
    """Least bytes of a recompute under a ZeRO stage: bare, or, of stage 3, the less of without and with overlap."""
    return min(memory[o, 0], memory[o, 1]) if z == 3 else memory[o, 0]


@kernel
def _refuse_hosts(c, job, hosted, kept, wanted, memory):
    """Make memory infinite where a rank would keep more on its host than fits there."""
    for o in range(job.num):
        most = 0.0
        for rank in range(job.p if wanted[o] else 0):
            most = max(most, hosted[rank] + job.keep.activations * kept[o, rank])
        if most > c.host_capacity_bytes:
            memory[o] = np.inf
