# mypy: disallow-untyped-decorators=False
"""One candidate after another through the composition: the loop behind `evaluate`, for one row or a million."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from estimator.chunk import TRAFFIC, chunk_seconds, zero_traffic
from estimator.compose import (
    AGAIN,
    ONCE,
    PASSES,
    Net,
    Tables,
    again_seconds,
    choose_columns,
    finish,
    once_seconds,
    pair_hop,
    place_of,
    program_of,
    rank_params,
    rank_windows,
    spans_of,
)
from estimator.cost.table import Again, Base
from estimator.gradients import (
    apart_seconds,
    behind_shards,
    bucketed_terms,
    gather_wire,
    gradient_wire,
    hidden_behind,
    replica_terms,
    shard_of,
    update_seconds,
)
from estimator.jit import kernel, njit
from estimator.keep import Keep, at_home, keep_of, uses_host
from estimator.lanes import WIDTH, first, put, splat
from estimator.memory import (
    RESERVED_FACTOR,
    WORKSPACE_BYTES,
    Item,
    chunk_bytes,
    hosted_bytes,
    kept_bytes,
    logits_bytes,
    moving_bytes,
    owed_bytes,
    second_set,
    static_bytes,
)
from estimator.span import alone_passes, in_flight_peak, owed_peak, scratch_rows
from estimator.span_codes import DUALPIPE, holds_pairs, splits_backward
from estimator.span_program import program_rows

__all__ = ["Out", "Rows", "compose_rows", "fixed_bytes", "staging_bytes"]


class Out(IntEnum):
    """Columns that `compose_rows` fills; the names are those of estimator/result.py."""

    STEP_TIME_S = 0
    PEAK_MEMORY_BYTES = 1
    DEVICE_MEMORY_BYTES = 2
    HOST_MEMORY_BYTES = 3
    PIPELINE_S = 4
    FORWARD_S = 5
    BACKWARD_S = 6
    RECOMPUTE_S = 7
    EXPOSED_COMM_TP_S = 8
    EXPOSED_COMM_CP_S = 9
    EXPOSED_COMM_EP_S = 10
    EXPOSED_COMM_PP_S = 11
    EXPOSED_COMM_DP_S = 12
    EXPOSED_OFFLOAD_S = 13
    EXPOSED_HOST_S = 14
    BUBBLE_S = 15
    OPTIMIZER_S = 16
    OPTIMIZER_COMM_S = 17
    JITTER_S = 18
    RECOMPUTE_FLOPS = 19
    TILE_S = 20
    MEASURED_S = 21
    ROOFLINE_S = 22
    RANK = 23


class Rows(NamedTuple):
    """Candidates as integer columns [N] (bucket in bytes): where to look and which options are on.

    `offload` [N, 4]: shares of activations, parameters, gradients and states in the host's memory.
    """

    row: np.ndarray
    net: np.ndarray
    layout: np.ndarray
    schedule: np.ndarray
    program: np.ndarray
    pp: np.ndarray
    vpp: np.ndarray
    num_micro_batches: np.ndarray
    choice: np.ndarray
    layers: np.ndarray
    overlap_tp: np.ndarray
    overlap_ep: np.ndarray
    overlap_pp: np.ndarray
    overlap_dp: np.ndarray
    zero: np.ndarray
    reshard: np.ndarray
    prefetch: np.ndarray
    offload: np.ndarray
    bucket: np.ndarray


N_DP, N_EDP, HOP_BYTE, HOP_LAT = int(Net.DP), int(Net.EDP), int(Net.HOP_PER_BYTE), int(Net.HOP_LATENCY)
ITEM_BUCKETS, ITEM_EXCHANGE, ITEM_WORK = int(Item.BUCKETS), int(Item.EXCHANGE_BUFFERS), int(Item.WORKSPACE)
ITEM_ACTIVATIONS, ITEM_LOGITS = int(Item.ACTIVATIONS), int(Item.LOGITS)
F_COMP, F_HOST, F_CP, F_TP0, F_EP0 = (int(Base[n]) for n in ("F_COMP", "F_HOST", "F_CP", "F_TP0", "F_EP0"))
B_COMP, B_HOST, B_CP, B_TP0, B_EP0 = (int(Base[n]) for n in ("B_COMP", "B_HOST", "B_CP", "B_TP0", "B_EP0"))
W_COMP, W_HOST, B_BESIDE_W, B_TILE = int(Base.W_COMP), int(Base.W_HOST), int(Base.B_BESIDE_W), int(Base.TILE_S)
R_COMP, R_HOST, R_CP, R_TP0, R_EP0 = (int(Again[n]) for n in ("R_COMP", "R_HOST", "R_CP", "R_TP0", "R_EP0"))
R_FLOPS, R_TILE = int(Again.FLOPS), int(Again.TILE_S)
(O_STEP, O_PEAK, O_DEVICE, O_HOSTED, O_PIPE, O_FWD, O_BWD, O_REC, O_TP, O_CP, O_EP, O_PP, O_DP, O_OFFLOAD, O_HOST,
 O_BUBBLE, O_OPT, O_OPTCOMM, O_JITTER, O_RFLOPS, O_TILE, O_MEAS, O_ROOF, O_RANK) = (int(o) for o in Out)  # fmt: skip


@kernel
def fixed_bytes(buffer_bytes, hop_bytes, p):
    """Exchange buffers: the widest all-to-all, and a send and a receive buffer at each stage boundary."""
    return buffer_bytes + (4.0 * hop_bytes if p > 1 else 0.0)


@kernel
def staging_bytes(bucket, dense, expert, overlap, zero, c):
    """Buckets in flight: one being filled, one on the wire; of the experts as well where they have their own.

    ZeRO-3 reduces block by block instead.
    """
    if not overlap or zero >= 3:
        return 0.0
    if c.expert_bucket < 0.0:
        return 2.0 * min(bucket, (dense + expert) * c.grad_bytes) if bucket > 0 else 0.0
    mine = 2.0 * min(bucket, dense * c.grad_bytes) if bucket > 0 else 0.0
    return mine + (2.0 * min(c.expert_bucket, expert * c.grad_bytes) if c.expert_bucket > 0.0 else 0.0)


@njit(cache=True)
def _peak_bytes(t, rows, i, place, base, again, keep, dp, dense, expert, tell, items):
    """Allocated bytes of the fullest rank, and the most that one has on its host.

    With `tell`, items of every rank go to `items` [p, Item].
    """
    p, c, net, row = rows.pp[i], t.constants, t.nets[rows.net[i]], rows.row[i]
    num_classes = place.counts.shape[0]
    saved, most, live, owed = np.empty(num_classes), np.empty(num_classes), np.empty(num_classes), np.empty(num_classes)
    words = np.empty(num_classes)
    flying, late = np.empty(place.slots.shape), np.empty((2, p, place.slots.shape[1]))
    made = program_of(t, rows.program[i], p)
    in_flight_peak(rows.schedule[i], p, rows.vpp[i], rows.num_micro_batches[i], made, flying)
    owed_peak(rows.schedule[i], p, rows.num_micro_batches[i], made, late)
    second_set(holds_pairs(rows.schedule[i]), rows.overlap_ep[i], flying)
    chunk_bytes(place.counts, place.first, rows.layers[i], again, rows.choice[i], saved, most, words, live)
    owed_bytes(place.counts, base, owed)
    exchange = fixed_bytes(t.buffer_bytes[row], t.hop_bytes[row], p)
    line, scratch = np.zeros(items.shape[1]), np.zeros(items.shape[1])
    peak, hosted = 0.0, 0.0
    for rank in range(p):
        static = static_bytes(rank, place.held, base, keep, net, c, line)
        moving = moving_bytes(rank, place.slots, flying, late, saved, most, words, owed, live, keep.activations, line)
        line[ITEM_BUCKETS] = staging_bytes(rows.bucket[i], dense[rank], expert[rank], dp, keep.zero, c)
        line[ITEM_EXCHANGE] = exchange
        line[ITEM_WORK] = WORKSPACE_BYTES
        peak = max(peak, (static + moving) + (line[ITEM_BUCKETS] + (exchange + WORKSPACE_BYTES)))
        if uses_host(keep):
            kept = kept_bytes(rank, place.slots, flying, saved, words)
            shard = shard_of(dense[rank], expert[rank], keep.zero, net)
            hosted = max(hosted, hosted_bytes(rank, place.held, base, keep, net, c, shard, kept, scratch))
        if tell:
            logits = logits_bytes(rank, place.slots, flying, place.counts, again)
            line[ITEM_LOGITS] = logits
            line[ITEM_ACTIVATIONS] -= line[ITEM_LOGITS]
            items[rank] = line
    return peak, hosted


@njit(cache=True)
def compose_rows(t: Tables, rows: Rows, gate: bool, out: np.ndarray, items: np.ndarray, stages: np.ndarray) -> None:
    """Fill `out` [N, Out]. With `gate`, rows over capacity get their memory and NaN seconds.

    `items` [p, Item] and `stages` [C, 3] (f, b, w) receive the details of the last row.
    """
    kinds = t.base.shape[1]
    cols, r = np.empty((ONCE, kinds)), np.empty((t.again.shape[1], kinds, AGAIN))
    once, repeated, traffic = np.empty(ONCE), np.empty(AGAIN), np.empty(TRAFFIC)
    waits = np.zeros((3, t.class_of.size))
    for i in range(out.shape[0]):
        p, v, m = rows.pp[i], rows.vpp[i], rows.num_micro_batches[i]
        place = place_of(t, rows.layout[i], p)
        base, again = t.base[rows.row[i]], t.again[rows.row[i]]
        net, c = t.nets[rows.net[i]], t.constants
        code, zero, choice, layers = rows.schedule[i], rows.zero[i], rows.choice[i], rows.layers[i]
        tp, ep, pp, dp = rows.overlap_tp[i], rows.overlap_ep[i], rows.overlap_pp[i], rows.overlap_dp[i]
        if net[N_DP] == 1.0 and net[N_EDP] == 1.0:  # nothing to share: ZeRO and its traffic have no effect
            zero, dp = 0, 0
        asked = Keep(
            zero, rows.reshard[i], rows.prefetch[i], rows.offload[i, 0], rows.offload[i, 1], rows.offload[i, 2],
            rows.offload[i, 3],
        )  # fmt: skip
        keep = keep_of(asked, zero, dp)
        offloads = uses_host(keep)
        num_classes, num_chunks = place.counts.shape[0], place.class_of.size
        dense, expert = np.empty(p), np.empty(p)
        rank_params(place.held, base, dense, expert)
        told_items = i == out.shape[0] - 1
        peak, hosted = _peak_bytes(t, rows, i, place, base, again, keep, dp, dense, expert, told_items, items)
        out[i, O_PEAK], out[i, O_HOSTED] = peak, hosted
        out[i, O_DEVICE] = peak * RESERVED_FACTOR + c.context_bytes
        if gate and (out[i, O_DEVICE] > c.capacity_bytes or hosted > c.host_capacity_bytes):
            out[i, O_STEP] = np.nan
            for col in range(O_PIPE, out.shape[1]):
                out[i, col] = np.nan
            continue
        choose_columns(base, again, tp, ep, cols, r)
        hop = t.hop_bytes[rows.row[i]] * net[HOP_BYTE] + net[HOP_LAT]
        # One candidate fills all lanes; lane 0 is read.
        classes, chunks = np.empty((PASSES * num_classes, WIDTH)), np.empty((PASSES * num_chunks, WIDTH))
        coupled = pair_hop(code, ep, hop, pp == 0)
        for j in range(num_classes):
            once_seconds(place.counts, j, cols, once)
            again_seconds(place.counts, place.first, j, layers, choice, r, repeated)
            zero_traffic(place.counts, j, base, net, c, traffic)
            passes = chunk_seconds(once, repeated, code, ep, keep, dp, traffic)
            if offloads:
                bare = chunk_seconds(once, repeated, code, ep, at_home(keep), dp, traffic)
                waits[0, j], waits[1, j], waits[2, j] = passes[0] - bare[0], passes[1] - bare[1], passes[2] - bare[2]
            for n in range(PASSES):
                put(classes, n * num_classes + j, splat(passes[n] + coupled if n == 1 else passes[n]))
        made = program_of(t, rows.program[i], p)
        pipe = np.empty((max(scratch_rows(p), program_rows(made)), WIDTH))
        span = first(spans_of(place.class_of, classes, chunks, pipe, hop, pp == 0, code, p, v, m, made))
        seconds = np.ascontiguousarray(chunks[:, 0]).reshape(PASSES, num_chunks)
        num_leads = place.leads.size
        windows = np.empty((2 * num_leads, WIDTH))
        rank_windows(place.leads, place.slots, classes, windows)
        each = m / 2 if code == DUALPIPE else m * 1.0
        alone = np.zeros((2, p, place.slots.shape[1]))
        if ep:
            alone_passes(code, p, v, m, made, alone)
        exposed = 0.0
        update = 0.0
        gather = 0.0
        busiest = -1.0
        told = 0.0
        last = 0
        for n in range(num_leads):
            rank = place.leads[n]
            d, e = dense[rank], expert[rank]
            if dp:
                total, least, gathers, least_gathers = bucketed_terms(d, e, zero, rows.bucket[i], net, c)
                if zero >= 3:
                    total, least = replica_terms(d, e, np.sum(place.held[rank]), net, c)
                total, least = behind_shards(total, least, d, e, np.sum(place.held[rank]), keep, net, c)
                mine = hidden_behind(total, least, windows[num_leads + n, 0])
                gather = max(gather, hidden_behind(gathers, least_gathers, windows[n, 0]))
            else:
                grad_s, grad_latency = gradient_wire(d, e, zero, net, c)
                gather_s, gather_latency = gather_wire(d, e, zero, net, c)
                mine = grad_s + grad_latency
                gather = max(gather, gather_s + gather_latency)
            mine_s = update_seconds(d, e, keep, net, c) + apart_seconds(rank, place.held, base, zero, net, c)
            update = max(update, mine_s)
            exposed = max(exposed, mine)
            busy = (
                each * (windows[n, 0] + windows[num_leads + n, 0]) + _alone_seconds(rank, place, alone, seconds) + mine
            )
            if busy > busiest:
                busiest, told, last = busy, mine, rank
        out[i, O_STEP] = finish(span, exposed, update, gather, c)
        out[i, O_PIPE] = span + exposed
        out[i, O_OPT] = update
        out[i, O_OPTCOMM] = gather + c.norm_latency_s
        out[i, O_JITTER] = c.jitter * (span + exposed + update + (gather + c.norm_latency_s) + c.fixed_host_s)
        out[i, O_RANK] = last
        _explain_rank(
            out[i],
            last,
            place,
            layers,
            choice,
            base,
            again,
            tp,
            ep,
            pp,
            hop,
            coupled,
            each,
            seconds,
            alone,
            told,
            waits,
            offloads,
            made.turn,
            code,
        )
        out[i, O_RFLOPS] = _recompute_flops(place, layers, choice, again) * m / p
        if i == out.shape[0] - 1:
            for j in range(num_chunks):
                stages[j, :] = seconds[:3, j]


@kernel
def _alone_seconds(rank, place, alone, seconds):
    """What a rank's passes without a partner take longer than those with one; `seconds` [PASSES, C]."""
    more = 0.0
    for slot in range(place.chunks.shape[1]):
        j = place.chunks[rank, slot]
        more += alone[0, rank, slot] * (seconds[3, j] - seconds[0, j])
        more += alone[1, rank, slot] * (seconds[4, j] - seconds[1, j])
    return more


@kernel
def _explain_rank(
    out, rank, place, layers, choice, base, again, tp, ep, pp, hop, coupled, each, seconds, alone, exposed,
    waits, offloads, turn, code,
):  # fmt: skip
    """Split the seconds of one rank by cause; what is left of its pipeline time is the bubble."""
    for col in range(O_FWD, O_OPT):
        if col != O_BUBBLE:
            out[col] = 0.0
    out[O_TILE] = out[O_MEAS] = out[O_ROOF] = 0.0
    counts, first = place.counts, place.first
    depth = first.shape[0] // counts.shape[0]
    last = place.class_of.size - 1
    more = _alone_seconds(rank, place, alone, seconds)
    busy = more
    out[O_EP] = more
    for slot in range(place.chunks.shape[1]):
        j, q = place.chunks[rank, slot], place.slots[rank, slot]
        busy += each * (seconds[0, j] + seconds[1, j] + seconds[2, j])
        if offloads:
            out[O_OFFLOAD] += each * (waits[0, q] + waits[1, q] + waits[2, q])
        for k in range(counts.shape[1]):
            n = each * counts[q, k]
            if n == 0:
                continue
            x = base[k]
            out[O_FWD] += n * x[F_COMP]
            out[O_BWD] += n * (x[B_COMP] + x[W_COMP])
            out[O_TP] += n * (x[F_TP0 + tp] + x[B_TP0 + tp])
            if not tp and not splits_backward(code):
                out[O_TP] += n * x[B_BESIDE_W]
            out[O_EP] += n * (x[F_EP0 + ep] + x[B_EP0 + ep])
            out[O_CP] += n * (x[F_CP] + x[B_CP])
            out[O_HOST] += n * (x[F_HOST] + x[B_HOST] + x[W_HOST])
            for s in range(3):
                out[O_TILE + s] += n * x[B_TILE + s]
            # Under block recompute, the first layers of the chunk are recomputed in full and the others not.
            full = n if layers == 0 else each * first[q * depth + min(layers, depth - 1), k]
            for part in range(2):
                again_n, a = (full, again[1 if layers > 0 else choice, k]) if part == 0 else (n - full, again[0, k])
                out[O_REC] += again_n * a[R_COMP]
                out[O_TP] += again_n * a[R_TP0 + tp]
                out[O_EP] += again_n * a[R_EP0 + ep]
                out[O_CP] += again_n * a[R_CP]
                out[O_HOST] += again_n * a[R_HOST]
                for s in range(3):
                    out[O_TILE + s] += again_n * a[R_TILE + s]
        out[O_PP] += each * coupled
        if pp == 0:
            out[O_PP] += each * hop * ((1 if j < last and j != turn else 0) + (1 if j > 0 and j != turn + 1 else 0))
    named = out[O_FWD] + out[O_BWD] + out[O_REC] + out[O_TP] + out[O_EP] + out[O_CP] + out[O_HOST] + out[O_PP]
    named += out[O_OFFLOAD]
    # What ZeRO-2 and ZeRO-3 traffic adds to each micro-batch is the rest of the rank's busy seconds.
    out[O_DP] = max(busy - named, 0.0) + exposed
    out[O_BUBBLE] = out[O_PIPE] - (named + out[O_DP])


@kernel
def _recompute_flops(place, layers, choice, again):
    """FLOPs that all chunks run again for one micro-batch, on one rank of each."""
    counts, first = place.counts, place.first
    depth = first.shape[0] // counts.shape[0]
    total = 0.0
    for q in place.class_of:
        for k in range(counts.shape[1]):
            if layers > 0:
                full = first[q * depth + min(layers, depth - 1), k]
                total += full * again[1, k, R_FLOPS] + (counts[q, k] - full) * again[0, k, R_FLOPS]
            else:
                total += counts[q, k] * again[choice, k, R_FLOPS]
    return total
