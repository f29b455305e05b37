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
    choose_columns,
    chunk_seconds,
    finish,
    gather_exposed,
    gradient_exposed,
    rank_params,
    rank_windows,
    span_of,
    update_seconds,
)
from estimator.memory import ITEMS, RESERVED_FACTOR, WORKSPACE_BYTES, chunk_bytes, moving_bytes, static_bytes
from estimator.span import DUALPIPE, in_flight_peak
from search.postfix import run
from search.staircase import Staircase, insert, is_beaten

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
def _least_seconds(t, part, i, options, tf, tb, tw, tr, low_f, low_b, low_w, low_r, cf, cb, cw, blocking):
    """Seconds of each chunk (cf, cb, cw [C]) under the cheapest flags and the cheapest recompute, and those of a hop."""
    lay = t.layouts[part.layout[i]]
    counts = t.counts[lay[0] : lay[0] + lay[1]]
    first = t.first[lay[2] : lay[2] + lay[3]]
    base, again = t.base[part.row[i]], t.again[part.row[i]][options.corner :]
    net, c = t.nets[part.net[i]], t.constants
    for q in range(4):
        choose_columns(base, again, q >> 1, q & 1, tf[q], tb[q], tw[q], tr[q])
    _cheapest(part.flags[i], tf, tb, tw, tr, low_f, low_b, low_w, low_r)
    hop = t.hop_bytes[part.row[i]] * net[HOP_BYTE] + net[HOP_LAT]
    chunk_seconds(
        counts, first, 0, 0, low_f, low_b, low_w, low_r, hop, blocking, splits_backward(part.schedule[i]), 0, 0, base, net,
        c, cf, cb, cw,
    )  # fmt: skip
    return hop


@njit(cache=True)
def _least_update(t, part, i):
    """Lower bound of the optimizer update: on each rank the cheapest ZeRO stage."""
    p = part.pp[i]
    lay = t.layouts[part.layout[i]]
    net, c = t.nets[part.net[i]], t.constants
    dense, expert = np.empty(p), np.empty(p)
    rank_params(t.held[lay[4] : lay[4] + p], t.base[part.row[i]], dense, expert)
    update = 0.0
    for rank in range(p):
        least = np.inf
        for z in range(4):
            if part.zero[i, z] >= 0:
                least = min(least, update_seconds(dense[rank], expert[rank], z, net, c))
        update = max(update, least)
    return update


@njit(cache=True)
def _least_memory(t, part, i, options):
    """Lower bound of memory: on each rank the cheapest ZeRO stage and the cheapest recompute, no buckets."""
    lay = t.layouts[part.layout[i]]
    p = part.pp[i]
    counts = t.counts[lay[0] : lay[0] + lay[1]]
    first = t.first[lay[2] : lay[2] + lay[3]]
    held = t.held[lay[4] : lay[4] + p]
    chunks = t.chunks[lay[4] : lay[4] + p, : lay[5]]
    base, again = t.base[part.row[i]], t.again[part.row[i]]
    net, c = t.nets[part.net[i]], t.constants
    saved, live = np.empty(lay[1]), np.empty(lay[1])
    flying = np.empty((p, lay[5]))
    in_flight_peak(part.schedule[i], p, part.vpp[i], part.m[i], flying)
    chunk_bytes(counts, first, 0, again, options.corner, saved, live)
    rest = 0.0 + (fixed_bytes(t.buffer_bytes[part.row[i]], t.hop_bytes[part.row[i]], p) + WORKSPACE_BYTES)
    line = np.empty(NUM_ITEMS)
    memory = 0.0
    for rank in range(p):
        static = np.inf
        for z in range(4):
            if part.zero[i, z] >= 0:
                s = static_bytes(rank, held, base, z, net[N_DP], net[N_EDP], c.grad_bytes, c.state_bytes, line)
                static = min(static, s)
        memory = max(memory, (static + moving_bytes(rank, chunks, flying, saved, live, line)) + rest)
    return memory


@njit(cache=True)
def corners(t: Tables, part: Part, options: Options, steps: np.ndarray, memories: np.ndarray) -> None:
    """Lower bounds of each structure: `steps` (the busy time of its busiest rank, so cheap), `memories` [S]."""
    kinds = t.base.shape[1]
    f, b, w = np.empty((4, kinds)), np.empty((4, kinds)), np.empty((4, kinds))
    lf, lb, lw = np.empty(kinds), np.empty(kinds), np.empty(kinds)
    r, lr = np.empty((4, 1, kinds)), np.empty((1, kinds))
    deepest = np.max(t.layouts[:, 1])
    cf, cb, cw = np.empty(deepest), np.empty(deepest), np.empty(deepest)
    for i in range(part.id.size):
        lay = t.layouts[part.layout[i]]
        _least_seconds(t, part, i, options, f, b, w, r, lf, lb, lw, lr, cf, cb, cw, False)
        each = part.m[i] / 2 if part.schedule[i] == DUALPIPE else part.m[i] * 1.0
        busy = 0.0
        for rank in range(part.pp[i]):
            mine = 0.0
            for slot in range(lay[5]):
                j = t.chunks[lay[4] + rank, slot]
                mine += cf[j] + cb[j] + cw[j]
            busy = max(busy, each * mine)
        # A shade below, for the pipeline adds the same passes up in another order.
        steps[i] = finish(busy * (1.0 - 1e-9), 0.0, _least_update(t, part, i), 0.0, t.constants)
        memories[i] = _least_memory(t, part, i, options)


@njit(cache=True)
def _step_corner(t, part, i, options, f, b, w, r, lf, lb, lw, lr, cf, cb, cw):
    """Lower bound of step time through the pipeline: the cheapest flags and recompute, no exposed data-parallel traffic."""
    lay = t.layouts[part.layout[i]]
    num = lay[1]
    span = np.inf
    for pp in range(2):
        if part.flags[i, 2, pp] >= 0:
            hop = _least_seconds(t, part, i, options, f, b, w, r, lf, lb, lw, lr, cf[:num], cb[:num], cw[:num], pp == 0)
            least = span_of(
                part.schedule[i], cf[:num], cb[:num], cw[:num], hop, pp == 0, part.pp[i], part.vpp[i], part.m[i]
            )
            span = min(span, least)
    return finish(span, 0.0, _least_update(t, part, i), 0.0, t.constants)


@njit(cache=True)
def sweep(
    t: Tables, part: Part, options: Options, constraints: Filter, front: Staircase, prune: bool, lows: np.ndarray,
    counts_out: np.ndarray,
) -> None:  # fmt: skip
    """Offer every candidate of these structures to `front`; `lows` [S, 2] are their corners, COUNTS are added up."""
    kinds = t.base.shape[1]
    f, b, w = np.empty((4, kinds)), np.empty((4, kinds)), np.empty((4, kinds))
    lf, lb, lw = np.empty(kinds), np.empty(kinds), np.empty(kinds)
    r, lr = np.empty((4, 1, kinds)), np.empty((1, kinds))
    deepest = np.max(t.layouts[:, 1])
    cf, cb, cw = np.empty(deepest), np.empty(deepest), np.empty(deepest)
    c = t.constants
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
            low_step = _step_corner(t, part, i, options, f, b, w, r, lf, lb, lw, lr, cf, cb, cw)
            if _beaten(front, options, low_step, lows[i, 1]):
                continue
        _sweep_structure(t, part, i, options, constraints, front, prune, low_step, counts_out)


@njit(cache=True)
def _sweep_structure(t, part, i, options, constraints, front, prune, low_step, counts_out):
    """One structure. `spans`, `wins` are shared by ZeRO 0 and 1, whose pipelines are the same; `least` are the spans of
    each recompute choice under the cheapest flags."""
    lay = t.layouts[part.layout[i]]
    p, v, m = part.pp[i], part.vpp[i], part.m[i]
    counts = t.counts[lay[0] : lay[0] + lay[1]]
    first = t.first[lay[2] : lay[2] + lay[3]]
    held = t.held[lay[4] : lay[4] + p]
    chunks = t.chunks[lay[4] : lay[4] + p, : lay[5]]
    base, again = t.base[part.row[i]], t.again[part.row[i]]
    net, c = t.nets[part.net[i]], t.constants
    code = part.schedule[i]
    split = splits_backward(code)
    hop = t.hop_bytes[part.row[i]] * net[HOP_BYTE] + net[HOP_LAT]
    flying = np.empty((p, lay[5]))
    in_flight_peak(code, p, v, m, flying)
    dense, expert = np.empty(p), np.empty(p)
    rank_params(held, base, dense, expert)
    least_grads = np.inf
    for rank in range(p):
        least_grads = min(least_grads, (dense[rank] + expert[rank]) * c.grad_bytes)
    fixed = fixed_bytes(t.buffer_bytes[part.row[i]], t.hop_bytes[part.row[i]], p) + WORKSPACE_BYTES
    num_plain = options.plain.shape[0]
    num = num_plain + part.num_blocks[i]
    kinds, choices = base.shape[0], again.shape[0]
    moving = np.empty((num, p))
    saved, live = np.empty(lay[1]), np.empty(lay[1])
    line = np.empty(NUM_ITEMS)
    for o in range(num):
        choice = options.plain[o, 0] if o < num_plain else 1
        layers = 0 if o < num_plain else options.block_layers[o - num_plain]
        chunk_bytes(counts, first, layers, again, choice, saved, live)
        for rank in range(p):
            moving[o, rank] = moving_bytes(rank, chunks, flying, saved, live, line)
    spans = np.full((num, 8), np.nan)
    least = np.full(num, np.nan)
    low_f, low_b, low_w, low_r = np.empty(kinds), np.empty(kinds), np.empty(kinds), np.empty((choices, kinds))
    wins = np.empty((num, 8, 2, p))
    cf, cb, cw = np.empty(lay[1]), np.empty(lay[1]), np.empty(lay[1])
    tf, tb, tw = np.empty((4, kinds)), np.empty((4, kinds)), np.empty((4, kinds))
    tr = np.empty((4, choices, kinds))
    for q in range(4):
        choose_columns(base, again, q >> 1, q & 1, tf[q], tb[q], tw[q], tr[q])
    _cheapest(part.flags[i], tf, tb, tw, tr, low_f, low_b, low_w, low_r)
    held_bytes = np.empty(p)
    win_f, win_b = np.empty(p), np.empty(p)
    for z in range(4):
        if part.zero[i, z] < 0:
            continue
        update = 0.0
        for rank in range(p):
            held_bytes[rank] = static_bytes(
                rank, held, base, z, net[N_DP], net[N_EDP], c.grad_bytes, c.state_bytes, line
            )
            update = max(update, update_seconds(dense[rank], expert[rank], z, net, c))
        for o in range(num):
            low = 0.0
            for rank in range(p):
                low = max(low, held_bytes[rank] + moving[o, rank])
            bare = low + (0.0 + fixed)
            if _device(bare, c) > c.capacity_bytes:
                counts_out[4] += _candidates(part, i, z, options.buckets.size)
                continue
            if prune and _beaten(front, options, low_step, bare):
                continue
            choice = options.plain[o, 0] if o < num_plain else 1
            layers = 0 if o < num_plain else options.block_layers[o - num_plain]
            extra = options.plain[o, 1] if o < num_plain else options.block_ids[o - num_plain]
            if prune:
                if np.isnan(least[o]):
                    least[o] = np.inf
                    for pp in range(2):
                        if part.flags[i, 2, pp] >= 0:
                            chunk_seconds(
                                counts, first, layers, choice, low_f, low_b, low_w, low_r, hop, pp == 0, split, 0, 0,
                                base, net, c, cf, cb, cw,
                            )  # fmt: skip
                            least[o] = min(least[o], span_of(code, cf, cb, cw, hop, pp == 0, p, v, m))
                if _beaten(front, options, finish(least[o], 0.0, update, 0.0, c), bare):
                    continue
            for q in range(8):
                tp, ep, pp = (q >> 2) & 1, (q >> 1) & 1, q & 1
                if part.flags[i, 0, tp] < 0 or part.flags[i, 1, ep] < 0 or part.flags[i, 2, pp] < 0:
                    continue
                ident = (
                    part.id[i] + part.zero[i, z] + extra + part.flags[i, 0, tp] + part.flags[i, 1, ep]
                    + part.flags[i, 2, pp]
                )  # fmt: skip
                g = (tp << 1) | ep
                for dp in range(2):
                    if part.flags[i, 3, dp] < 0:
                        continue
                    if z < 2:
                        if np.isnan(spans[o, q]):
                            chunk_seconds(
                                counts, first, layers, choice, tf[g], tb[g], tw[g], tr[g], hop, pp == 0, split, z, dp,
                                base, net, c, cf, cb, cw,
                            )  # fmt: skip
                            spans[o, q] = span_of(code, cf, cb, cw, hop, pp == 0, p, v, m)
                            rank_windows(chunks, cf, cb, cw, wins[o, q, 0], wins[o, q, 1])
                        span = spans[o, q]
                        wf, wb = wins[o, q, 0], wins[o, q, 1]
                    else:
                        chunk_seconds(
                            counts, first, layers, choice, tf[g], tb[g], tw[g], tr[g], hop, pp == 0, split, z, dp,
                            base, net, c, cf, cb, cw,
                        )  # fmt: skip
                        span = span_of(code, cf, cb, cw, hop, pp == 0, p, v, m)
                        rank_windows(chunks, cf, cb, cw, win_f, win_b)
                        wf, wb = win_f, win_b
                    if prune and _beaten(front, options, finish(span, 0.0, update, 0.0, c), bare):
                        continue
                    last = options.buckets.size if dp == 1 and z < 3 else 1
                    for n in range(last):
                        bucket = options.buckets[n] if dp == 1 and z < 3 else 0.0
                        memory = bare
                        stage = staging_bytes(bucket, np.inf, dp, z)
                        if stage > 0.0:
                            if bucket <= least_grads:
                                memory = low + (stage + fixed)
                            else:
                                memory = 0.0
                                for rank in range(p):
                                    grads = (dense[rank] + expert[rank]) * c.grad_bytes
                                    mine = staging_bytes(bucket, grads, dp, z)
                                    memory = max(memory, (held_bytes[rank] + moving[o, rank]) + (mine + fixed))
                            if _device(memory, c) > c.capacity_bytes:
                                counts_out[4] += 1
                                continue
                        exposed = 0.0
                        gather = 0.0
                        for rank in range(p):
                            if rank > 0 and (
                                wb[rank] == wb[rank - 1] and wf[rank] == wf[rank - 1]
                                and dense[rank] == dense[rank - 1] and expert[rank] == expert[rank - 1]
                            ):  # fmt: skip
                                continue
                            exposed = max(
                                exposed, gradient_exposed(dense[rank], expert[rank], wb[rank], z, dp, bucket, net, c)
                            )
                            gather = max(
                                gather, gather_exposed(dense[rank], expert[rank], wf[rank], z, dp, bucket, net, c)
                            )
                        step = finish(span, exposed, update, gather, c)
                        counts_out[2] += 1
                        counts_out[3] += 1
                        if _beaten(front, options, step, memory):
                            continue
                        if constraints.ends.size:
                            _derive(constraints, c, step, memory)
                            _fill(constraints, i, layers, z, tp, ep, pp, dp, bucket, options, o, num_plain)
                            if not _passes(constraints):
                                continue
                        key = ident + part.flags[i, 3, dp] + (options.bucket_ids[n] if dp == 1 and z < 3 else 0)
                        insert(
                            front, step if options.use_step else 0.0, memory if options.use_memory else 0.0, key
                        )


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
