# mypy: disallow-untyped-decorators=False
"""All options under one structure after another: the jitted loops of the exact sweep.

Order of the nest: ZeRO stage, recompute, overlaps of TP, EP and PP, overlap of DP, bucket. Everything that an inner
loop does not change is computed outside it, by the same functions in the same order as `evaluate` (estimator/batch.py),
so a candidate's step time and memory are the same bits. Before each level its lower corner (no exposed traffic, the
cheapest member of every option) is held against the front: what a point of the front strictly beats cannot add to it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from estimator.batch import fixed_bytes, splits_backward, staging_bytes
from estimator.compose import (
    Net,
    Tables,
    bucket_terms,
    choose_columns,
    chunk_seconds,
    finish,
    gather_wire,
    gradient_wire,
    hidden_behind,
    pieces_of,
    place_of,
    rank_params,
    rank_windows,
    span_of,
    spread,
    update_seconds,
)
from estimator.memory import ITEMS, RESERVED_FACTOR, WORKSPACE_BYTES, chunk_bytes, moving_bytes, static_bytes
from estimator.span import DUALPIPE, in_flight_peak
from search.postfix import run
from search.staircase import Staircase, beater, insert, is_beaten

__all__ = ["COUNTS", "DERIVED", "Filter", "Options", "Part", "corners", "sweep"]

N_DP, N_EDP, HOP_BYTE, HOP_LAT = int(Net.DP), int(Net.EDP), int(Net.HOP_PER_BYTE), int(Net.HOP_LATENCY)
NUM_ITEMS = len(ITEMS)

COUNTS = ("structures", "covered", "fits", "priced", "out_of_memory")
DERIVED = (
    "step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "mfu_bf16", "cost_usd_per_mtoken",
    "energy_j_per_token", "peak_memory_bytes", "reserved_memory_bytes", "device_memory_bytes", "num_gpus",
    "fixed_host_s",
)  # fmt: skip
"""Columns that follow from step time and memory alone, in the order in which `_derive` fills them."""
OPTION_VALUES = ("recompute_layers", "zero_stage", "overlap_tp", "overlap_ep", "overlap_pp", "overlap_dp",
                 "bucket_bytes", "recompute")  # fmt: skip


NUM_DERIVED = len(DERIVED)


class Part(NamedTuple):
    """Columns of the structures of one world (search/structures.py)."""

    row: np.ndarray
    net: np.ndarray
    layout: np.ndarray
    schedule: np.ndarray
    pp: np.ndarray
    vpp: np.ndarray
    m: np.ndarray
    id: np.ndarray
    flags: np.ndarray
    zero: np.ndarray
    num_blocks: np.ndarray
    legal: np.ndarray


class Options(NamedTuple):
    """Option axes of one world; `corner` is the index of the cheapest pseudo-choice on the tables' recompute axis."""

    plain: np.ndarray
    plain_codes: np.ndarray
    block_layers: np.ndarray
    block_ids: np.ndarray
    block_code: float
    buckets: np.ndarray
    bucket_ids: np.ndarray
    corner: int
    use_step: bool
    use_memory: bool


class Filter(NamedTuple):
    """Constraints as postfix programs, concatenated: `ends` [C]; `values` [V] scratch (DERIVED, OPTION_VALUES, then the
    structure's own values from `own` [S, W]); `scale` [7] turns step time into columns."""

    opcodes: np.ndarray
    operands: np.ndarray
    ends: np.ndarray
    values: np.ndarray
    stack: np.ndarray
    own: np.ndarray
    scale: np.ndarray


@njit(cache=True)
def _beaten(front, options, step, memory):
    return is_beaten(front, step if options.use_step else 0.0, memory if options.use_memory else 0.0)


@njit(cache=True)
def _derive(f, c, step, memory):
    """Fill DERIVED; the operations are those of estimator/step.py: columns_of."""
    tokens, chips, per_chip, bf16, price, power, fixed = f.scale
    v = f.values
    v[0] = step
    v[1] = tokens / step
    v[2] = tokens / chips / step
    v[3] = per_chip / step / 1e12
    v[4] = per_chip / (step * bf16)
    v[5] = price * step / tokens * 1e6
    v[6] = power * step / tokens
    v[7] = memory
    v[8] = memory * RESERVED_FACTOR
    v[9] = memory * RESERVED_FACTOR + c.context_bytes
    v[10] = chips
    v[11] = fixed


@njit(cache=True)
def _passes(f):
    """Whether all constraints hold for `values`."""
    start = 0
    for i in range(f.ends.size):
        if run(f.opcodes[start : f.ends[i]], f.operands[start : f.ends[i]], f.values, f.stack) != 1.0:
            return False
        start = f.ends[i]
    return True


@njit(cache=True)
def _device(memory, c):
    return memory * RESERVED_FACTOR + c.context_bytes


@njit(cache=True)
def _cheapest(flags, tf, tb, tw, tr, low_f, low_b, low_w, low_r):
    """On each column the cheapest of the allowed flags of TP and EP overlap: tf, tb, tw [4, K], tr [4, choices, K]."""
    low_f[:], low_b[:], low_w[:], low_r[:] = np.inf, np.inf, np.inf, np.inf
    for q in range(4):
        if flags[0, q >> 1] >= 0 and flags[1, q & 1] >= 0:
            for k in range(low_f.size):
                low_f[k] = min(low_f[k], tf[q, k])
                low_b[k] = min(low_b[k], tb[q, k])
                low_w[k] = min(low_w[k], tw[q, k])
                for choice in range(low_r.shape[0]):
                    low_r[choice, k] = min(low_r[choice, k], tr[q, choice, k])


@njit(cache=True)
def _least_seconds(t, part, i, place, options, tf, tb, tw, tr, low_f, low_b, low_w, low_r, qf, qb, qw):
    """Seconds of each class of chunks (qf, qb, qw) under the cheapest flags and the cheapest recompute."""
    base, again = t.base[part.row[i]], t.again[part.row[i]][options.corner :]
    for q in range(4):
        choose_columns(base, again, q >> 1, q & 1, tf[q], tb[q], tw[q], tr[q])
    _cheapest(part.flags[i], tf, tb, tw, tr, low_f, low_b, low_w, low_r)
    chunk_seconds(
        place.counts, place.first, 0, 0, low_f, low_b, low_w, low_r, splits_backward(part.schedule[i]), 0, 0, base,
        t.nets[part.net[i]], t.constants, qf, qb, qw,
    )  # fmt: skip


@njit(cache=True)
def _least_update(t, part, i, place):
    """Lower bound of the optimizer update: on each rank the cheapest ZeRO stage."""
    net, c = t.nets[part.net[i]], t.constants
    dense, expert = np.empty(part.pp[i]), np.empty(part.pp[i])
    rank_params(place.held, t.base[part.row[i]], dense, expert)
    update = 0.0
    for rank in place.leads:
        least = np.inf
        for z in range(4):
            if part.zero[i, z] >= 0:
                least = min(least, update_seconds(dense[rank], expert[rank], z, net, c))
        update = max(update, least)
    return update


@njit(cache=True)
def _least_memory(t, part, i, place, options):
    """Lower bound of memory: on each rank the cheapest ZeRO stage and the cheapest recompute, no buckets."""
    p = part.pp[i]
    base, again = t.base[part.row[i]], t.again[part.row[i]]
    net, c = t.nets[part.net[i]], t.constants
    saved, live = np.empty(place.counts.shape[0]), np.empty(place.counts.shape[0])
    flying = np.empty(place.slots.shape)
    in_flight_peak(part.schedule[i], p, part.vpp[i], part.m[i], flying)
    chunk_bytes(place.counts, place.first, 0, again, options.corner, saved, live)
    rest = 0.0 + (fixed_bytes(t.buffer_bytes[part.row[i]], t.hop_bytes[part.row[i]], p) + WORKSPACE_BYTES)
    line = np.empty(NUM_ITEMS)
    memory = 0.0
    for rank in range(p):
        static = np.inf
        for z in range(4):
            if part.zero[i, z] >= 0:
                s = static_bytes(rank, place.held, base, z, net[N_DP], net[N_EDP], c.grad_bytes, c.state_bytes, line)
                static = min(static, s)
        memory = max(memory, (static + moving_bytes(rank, place.slots, flying, saved, live, line)) + rest)
    return memory


@njit(cache=True)
def _hop(t, part, i):
    net = t.nets[part.net[i]]
    return t.hop_bytes[part.row[i]] * net[HOP_BYTE] + net[HOP_LAT]


class Scratch(NamedTuple):
    """Arrays that every structure writes anew: per overlap pair [4, K], their cheapest [K], per class of chunks [Q], per
    chunk [C]."""

    tf: np.ndarray
    tb: np.ndarray
    tw: np.ndarray
    tr: np.ndarray
    low_f: np.ndarray
    low_b: np.ndarray
    low_w: np.ndarray
    low_r: np.ndarray
    qf: np.ndarray
    qb: np.ndarray
    qw: np.ndarray
    cf: np.ndarray
    cb: np.ndarray
    cw: np.ndarray


@njit(cache=True)
def _scratch(t, choices):
    kinds, most, deepest = t.base.shape[1], np.max(t.layouts[:, 1]), np.max(t.layouts[:, 7])
    return Scratch(
        np.empty((4, kinds)), np.empty((4, kinds)), np.empty((4, kinds)), np.empty((4, choices, kinds)),
        np.empty(kinds), np.empty(kinds), np.empty(kinds), np.empty((choices, kinds)),
        np.empty(most), np.empty(most), np.empty(most), np.empty(deepest), np.empty(deepest), np.empty(deepest),
    )  # fmt: skip


@njit(cache=True)
def corners(t: Tables, part: Part, options: Options, steps: np.ndarray, memories: np.ndarray) -> None:
    """Lower bounds of each structure: `steps` (the busy time of its busiest rank, so cheap), `memories` [S]."""
    x = _scratch(t, 1)
    for i in range(part.id.size):
        place = place_of(t, part.layout[i], part.pp[i])
        _least_seconds(
            t, part, i, place, options, x.tf, x.tb, x.tw, x.tr, x.low_f, x.low_b, x.low_w, x.low_r, x.qf, x.qb, x.qw
        )
        each = part.m[i] / 2 if part.schedule[i] == DUALPIPE else part.m[i] * 1.0
        busy = 0.0
        for rank in place.leads:
            mine = 0.0
            for j in place.slots[rank]:
                mine += x.qf[j] + x.qb[j] + x.qw[j]
            busy = max(busy, each * mine)
        # A shade below, for the pipeline adds the same passes up in another order.
        steps[i] = finish(busy * (1.0 - 1e-9), 0.0, _least_update(t, part, i, place), 0.0, t.constants)
        memories[i] = _least_memory(t, part, i, place, options)


@njit(cache=True)
def _chunk_span(t, part, i, place, blocking, qf, qb, qw, x):
    """Makespan of the pipeline with these seconds per class of chunks."""
    num, hop = place.class_of.size, _hop(t, part, i)
    cf, cb, cw = x.cf[:num], x.cb[:num], x.cw[:num]
    spread(place.class_of, qf, qb, qw, hop, blocking, cf, cb, cw)
    return span_of(part.schedule[i], cf, cb, cw, hop, blocking, part.pp[i], part.vpp[i], part.m[i])


@njit(cache=True)
def _least_span(t, part, i, place, qf, qb, qw, x):
    """The shorter of blocking and overlapped sends, where both are candidates."""
    span = np.inf
    for pp in range(2):
        if part.flags[i, 2, pp] >= 0:
            span = min(span, _chunk_span(t, part, i, place, pp == 0, qf, qb, qw, x))
    return span


@njit(cache=True)
def sweep(
    t: Tables, part: Part, options: Options, constraints: Filter, front: Staircase, prune: bool, lows: np.ndarray,
    counts_out: np.ndarray,
) -> None:  # fmt: skip
    """Offer every candidate of these structures to `front`; `lows` [S, 2] are their corners, COUNTS are added up."""
    c = t.constants
    x, corner = _scratch(t, t.again.shape[1]), _scratch(t, 1)
    for i in range(part.id.size):
        counts_out[0] += 1
        counts_out[1] += part.legal[i]
        if prune and _beaten(front, options, lows[i, 0], lows[i, 1]):
            continue
        if _device(lows[i, 1], c) > c.capacity_bytes:
            counts_out[4] += part.legal[i]
            continue
        low_step = 0.0
        if prune:
            place = place_of(t, part.layout[i], part.pp[i])
            _least_seconds(
                t, part, i, place, options, corner.tf, corner.tb, corner.tw, corner.tr, corner.low_f, corner.low_b,
                corner.low_w, corner.low_r, corner.qf, corner.qb, corner.qw,
            )  # fmt: skip
            span = _least_span(t, part, i, place, corner.qf, corner.qb, corner.qw, corner)
            low_step = finish(span, 0.0, _least_update(t, part, i, place), 0.0, c)
            if _beaten(front, options, low_step, lows[i, 1]):
                continue
        _sweep_structure(t, part, i, options, constraints, front, prune, low_step, counts_out, x)


@njit(cache=True)
def _traffic_terms(options, net, c, place, dense, expert, zero, plain, terms):
    """Data-parallel traffic of the leading ranks for each ZeRO stage below 3: `plain` [3, 2], gradients and gathers not
    overlapped (the slowest rank's), and `terms` [3, buckets, leads, 4], total and least of each (compose.bucket_terms)."""
    for z in range(3):
        plain[z, 0] = 0.0
        plain[z, 1] = 0.0
        if zero[z] < 0:
            continue
        for n in range(place.leads.size):
            d, e = dense[place.leads[n]], expert[place.leads[n]]
            grad_s, grad_latency = gradient_wire(d, e, z, net, c)
            gather_s, gather_latency = gather_wire(d, e, z, net, c)
            plain[z, 0] = max(plain[z, 0], grad_s + grad_latency)
            plain[z, 1] = max(plain[z, 1], gather_s + gather_latency)
            for k in range(options.buckets.size):
                pieces = pieces_of(c.grad_bytes * (d + e), options.buckets[k])
                terms[z, k, n, 0], terms[z, k, n, 1] = bucket_terms(grad_s, grad_latency, pieces)
                terms[z, k, n, 2], terms[z, k, n, 3] = bucket_terms(gather_s, gather_latency, pieces)


@njit(cache=True)
def _sweep_structure(t, part, i, options, constraints, front, prune, low_step, counts_out, x):
    """One structure. `spans`, `wins` are shared by ZeRO 0 and 1, whose pipelines are the same; `least` are the spans of
    each recompute choice under the cheapest flags."""
    p, v, m = part.pp[i], part.vpp[i], part.m[i]
    place = place_of(t, part.layout[i], p)
    base, again = t.base[part.row[i]], t.again[part.row[i]]
    net, c = t.nets[part.net[i]], t.constants
    code = part.schedule[i]
    split = splits_backward(code)
    flags, zero = part.flags[i], part.zero[i]
    num_classes, num_leads, num_buckets = place.counts.shape[0], place.leads.size, options.buckets.size
    flying = np.empty(place.slots.shape)
    in_flight_peak(code, p, v, m, flying)
    dense, expert = np.empty(p), np.empty(p)
    rank_params(place.held, base, dense, expert)
    least_grads = np.inf
    for rank in range(p):
        least_grads = min(least_grads, (dense[rank] + expert[rank]) * c.grad_bytes)
    fixed = fixed_bytes(t.buffer_bytes[part.row[i]], t.hop_bytes[part.row[i]], p) + WORKSPACE_BYTES
    num_plain = options.plain.shape[0]
    num = num_plain + part.num_blocks[i]
    moving = np.empty((num, p))
    saved, live = np.empty(num_classes), np.empty(num_classes)
    line = np.empty(NUM_ITEMS)
    for o in range(num):
        choice = options.plain[o, 0] if o < num_plain else 1
        layers = 0 if o < num_plain else options.block_layers[o - num_plain]
        chunk_bytes(place.counts, place.first, layers, again, choice, saved, live)
        for rank in range(p):
            moving[o, rank] = moving_bytes(rank, place.slots, flying, saved, live, line)
    spans, wins = np.full((num, 8), np.nan), np.empty((num * 8 + 1, 2, num_leads))
    least = np.full(num, np.nan)
    qf, qb, qw = x.qf[:num_classes], x.qb[:num_classes], x.qw[:num_classes]
    for q in range(4):
        choose_columns(base, again, q >> 1, q & 1, x.tf[q], x.tb[q], x.tw[q], x.tr[q])
    _cheapest(flags, x.tf, x.tb, x.tw, x.tr, x.low_f, x.low_b, x.low_w, x.low_r)
    plain, terms = np.zeros((4, 2)), np.empty((3, num_buckets, num_leads, 4))
    _traffic_terms(options, net, c, place, dense, expert, zero, plain, terms)
    held_bytes = np.empty(p)
    # Plain locals: looking arrays up in a tuple costs reference counts, which the innermost loop would feel.
    xs, ys, size, buckets, bucket_ids = front.x, front.y, front.size, options.buckets, options.bucket_ids
    use_step, use_memory, constrained = options.use_step, options.use_memory, constraints.ends.size > 0
    last = 0  # the point that beat the last candidate: it often beats the next
    priced = 0
    for z in range(4):
        if zero[z] < 0:
            continue
        for rank in range(p):
            held_bytes[rank] = static_bytes(
                rank, place.held, base, z, net[N_DP], net[N_EDP], c.grad_bytes, c.state_bytes, line
            )
        update = 0.0
        for rank in place.leads:
            update = max(update, update_seconds(dense[rank], expert[rank], z, net, c))
        for o in range(num):
            low = 0.0
            for rank in range(p):
                low = max(low, held_bytes[rank] + moving[o, rank])
            bare = low + (0.0 + fixed)
            if _device(bare, c) > c.capacity_bytes:
                counts_out[4] += _candidates(part, i, z, num_buckets)
                continue
            if prune and _beaten(front, options, low_step, bare):
                continue
            choice = options.plain[o, 0] if o < num_plain else 1
            layers = 0 if o < num_plain else options.block_layers[o - num_plain]
            extra = options.plain[o, 1] if o < num_plain else options.block_ids[o - num_plain]
            if prune:
                if np.isnan(least[o]):
                    chunk_seconds(
                        place.counts, place.first, layers, choice, x.low_f, x.low_b, x.low_w, x.low_r, split, 0, 0,
                        base, net, c, qf, qb, qw,
                    )  # fmt: skip
                    least[o] = _least_span(t, part, i, place, qf, qb, qw, x)
                if _beaten(front, options, finish(least[o], 0.0, update, 0.0, c), bare):
                    continue
            for q in range(8):
                tp, ep, pp = (q >> 2) & 1, (q >> 1) & 1, q & 1
                if flags[0, tp] < 0 or flags[1, ep] < 0 or flags[2, pp] < 0:
                    continue
                ident = part.id[i] + zero[z] + extra + flags[0, tp] + flags[1, ep] + flags[2, pp]
                g = (tp << 1) | ep
                for dp in range(2):
                    if flags[3, dp] < 0:
                        continue
                    w = o * 8 + q if z < 2 else num * 8
                    if z >= 2 or np.isnan(spans[o, q]):
                        chunk_seconds(
                            place.counts, place.first, layers, choice, x.tf[g], x.tb[g], x.tw[g], x.tr[g], split, z, dp,
                            base, net, c, qf, qb, qw,
                        )  # fmt: skip
                        span = _chunk_span(t, part, i, place, pp == 0, qf, qb, qw, x)
                        rank_windows(place, qf, qb, qw, wins[w, 0], wins[w, 1])
                        if z < 2:
                            spans[o, q] = span
                    else:
                        span = spans[o, q]
                    if prune and _beaten(front, options, finish(span, 0.0, update, 0.0, c), bare):
                        continue
                    bucketed = dp == 1 and z < 3
                    for k in range(num_buckets if bucketed else 1):
                        bucket, memory, exposed, gather = 0.0, bare, plain[z, 0], plain[z, 1]
                        if bucketed:
                            bucket = buckets[k]
                            if bucket > 0.0:
                                if bucket <= least_grads:
                                    memory = low + (staging_bytes(bucket, least_grads, dp, z) + fixed)
                                else:
                                    memory = 0.0
                                    for rank in range(p):
                                        grads = (dense[rank] + expert[rank]) * c.grad_bytes
                                        mine = staging_bytes(bucket, grads, dp, z)
                                        memory = max(memory, (held_bytes[rank] + moving[o, rank]) + (mine + fixed))
                                if _device(memory, c) > c.capacity_bytes:
                                    counts_out[4] += 1
                                    continue
                            exposed, gather = 0.0, 0.0
                            for n in range(num_leads):
                                exposed = max(exposed, hidden_behind(terms[z, k, n, 0], terms[z, k, n, 1], wins[w, 1, n]))
                                gather = max(gather, hidden_behind(terms[z, k, n, 2], terms[z, k, n, 3], wins[w, 0, n]))
                        step = finish(span, exposed, update, gather, c)
                        priced += 1
                        at_x = step if use_step else 0.0
                        at_y = memory if use_memory else 0.0
                        if last < size[0] and xs[last] <= at_x and ys[last] < at_y:
                            continue
                        by = beater(xs, ys, size[0], at_x, at_y)
                        if by >= 0:
                            last = by
                            continue
                        if constrained:
                            _derive(constraints, c, step, memory)
                            _fill(constraints, i, layers, z, tp, ep, pp, dp, bucket, options, o, num_plain)
                            if not _passes(constraints):
                                continue
                        key = ident + flags[3, dp] + (bucket_ids[k] if bucketed else 0)
                        insert(front, at_x, at_y, key)
    counts_out[2] += priced
    counts_out[3] += priced


@njit(cache=True)
def _candidates(part, i, z, num_buckets):
    """Candidates under one ZeRO stage and one recompute choice."""
    ways = 1
    for flag in range(3):
        ways *= (part.flags[i, flag, 0] >= 0) + (part.flags[i, flag, 1] >= 0)
    off = 1 if part.flags[i, 3, 0] >= 0 else 0
    on = 1 if part.flags[i, 3, 1] >= 0 else 0
    return ways * (off + on * (num_buckets if z < 3 else 1))


@njit(cache=True)
def _fill(f, i, layers, z, tp, ep, pp, dp, bucket, options, o, num_plain):
    """Write OPTION_VALUES and the structure's own values behind the derived columns."""
    v, start = f.values, NUM_DERIVED
    v[start : start + 7] = np.array([layers * 1.0, z * 1.0, tp * 1.0, ep * 1.0, pp * 1.0, dp * 1.0, bucket])
    v[start + 7] = options.plain_codes[o] if o < num_plain else options.block_code
    for j in range(f.own.shape[1]):
        v[start + 8 + j] = f.own[i, j]
