# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Floors: what no candidate under a node of variants undercuts, for every way to keep and every recompute. Jitted.

Step time. A pipeline's span is the longest of many paths, each a sum of the seconds of passes, so the passes of one
critical path bound the span of every candidate that takes no less anywhere (span.py: a span is a maximum of sums with
counts that depend on p, v, m alone). `find_paths` finds such counts once per structure, at its corner; a candidate then
costs a dot product. Counts are taken from below: by how much the span falls when a pass gets a little shorter, which
no critical path undercuts. What the host moves takes at least its share of the path; exposed traffic at least what
nothing hides.

Memory. Static bytes are linear in the shares on the host, and those of activations a maximum of two such lines, so all
ways to keep follow from a few numbers of each leading rank.

Everything is monotone in prices, so under a node's cheapest row it holds for all leaves. SHADE is left for rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from estimator.batch import fixed_bytes
from estimator.chunk import TRAFFIC, chunk_seconds, host_seconds, zero_traffic
from estimator.compose import (
    AGAIN,
    ONCE,
    PASSES,
    again_seconds,
    choose_columns,
    finish,
    once_seconds,
    rank_params,
    spans_of,
)
from estimator.cost.overlap import SLOWDOWN
from estimator.gradients import apart_seconds, gather_wire, gradient_wire, update_seconds
from estimator.jit import kernel, njit
from estimator.keep import Keep, keep_of
from estimator.lanes import WIDTH, put, splat
from estimator.memory import ITEMS, WORKSPACE_BYTES, chunk_bytes, moving_bytes, owed_bytes, static_bytes
from estimator.span_codes import DUALPIPE, INTERLEAVED, splits_backward
from search.bounds import choice_of, device
from search.staircase import is_beaten, last_at_most

__all__ = ["Floors", "Opened", "find_heavy_paths", "find_paths", "hold_floors", "new_floors", "new_opened", "opened_at"]

SHADE = 1.0 - 1e-7  # of step time: counts from differences are good to 1e-8
MEMORY_SHADE = 1.0 - 1e-12
NUDGE = 1e-5  # by how much of itself a pass gets shorter to see what the span loses
GROUP = 8  # recomputes that are held against the front together before one by one
NUM_ITEMS = len(ITEMS)


class Opened(NamedTuple):
    """What may still add to the front: `each` [kinds, H, E, recomputes], where any is `some` [kinds, H, E] and `used`.

    Kinds: ZeRO stages 0, 1, 2, stage 3 under every way to gather, and under any. H: shares on the host. E: EP overlap
    off, on.
    """

    each: np.ndarray
    some: np.ndarray
    used: np.ndarray
    is_root: bool


@njit(cache=True)
def new_opened(levels, num, num_hosts, num_gathers):
    """Everything open, on each of some levels [levels, ...]."""
    kinds = 4 + num_gathers
    return Opened(
        np.ones((levels, kinds, num_hosts, 2, num), np.bool_), np.ones((levels, kinds, num_hosts, 2), np.bool_),
        np.ones((levels, num), np.bool_), True,
    )  # fmt: skip


@njit(cache=True)
def opened_at(opened, level):
    """What is open on one level."""
    return Opened(opened.each[level], opened.some[level], opened.used[level], level == 0)


class Floors(NamedTuple):
    """Scratch for the largest structure. Letters: E 2, EP overlap off and on; B 2, sends that block and that do not.

    Paths: `counts` [3, E, B, PASSES, Q], passes of the path at the corner on each class of chunks, then of paths where
    ZeRO-2 and ZeRO-3 are heavy (`is_refined`: these are there); `start` [E, B], the span beyond those of the first;
    `anchor` [PASSES, Q], `classes` and `spans` in lanes.

    Seconds: `cols`, `r` of one pair of flags; `least` [E, ONCE, K], `least_again` [E, choices, K, AGAIN] under the
    cheapest TP overlap; of chunks `once` [E, Q, ONCE], `repeated` [E, recomputes + 1, Q, AGAIN], the last recompute a
    corner of all; `traffic` [Q, TRAFFIC], `nothing` likewise. Along the path at the corner `dots` [E, recomputes + 1,
    B, 3], the passes with all at home and no ZeRO traffic; `held` [E, recomputes + 1, B, 2], activations on the host's
    link; `unit` [B, 5], weights and gradients there. `zero_dots` [2, E, recomputes + 1, B, Q], classes under ZeRO-2 or
    3 along both paths, where `done` [E, recomputes]; `more` [B], the sum of the corner's; `zeros` [Q]. `update` [4,
    rests], `exposed` [4, 2].

    Bytes of leading ranks: `moving` [E, shares, recomputes, leads] and the least of all recomputes `lowest`; `still`
    [4, leads, 5], weights, gradients, states whole, weights and gradients on the way to the host; `ahead` [gatherings
    + 1, leads], gathered weights, last the least; `sums` [leads], scratch; `bytes` [5, Q] and `line`, scratch.

    `bunch_*`: the least of every GROUP recomputes; `ceilings`: what the front asks of their memory.
    """

    counts: np.ndarray
    start: np.ndarray
    classes: np.ndarray
    anchor: np.ndarray
    cols: np.ndarray
    r: np.ndarray
    least: np.ndarray
    least_again: np.ndarray
    once: np.ndarray
    repeated: np.ndarray
    traffic: np.ndarray
    dots: np.ndarray
    zero_dots: np.ndarray
    done: np.ndarray
    held: np.ndarray
    moving: np.ndarray
    lowest: np.ndarray
    still: np.ndarray
    ahead: np.ndarray
    update: np.ndarray
    unit: np.ndarray
    sums: np.ndarray
    dense: np.ndarray
    expert: np.ndarray
    bytes: np.ndarray
    line: np.ndarray
    exposed: np.ndarray
    bunch_dots: np.ndarray
    bunch_held: np.ndarray
    bunch_moving: np.ndarray
    ceilings: np.ndarray
    more: np.ndarray
    zeros: np.ndarray
    nothing: np.ndarray
    spans: np.ndarray
    is_refined: np.ndarray


@njit(cache=True)
def new_floors(t, num, num_hosts, num_shares, num_gathers):
    """Scratch for the largest structure of these tables, `num` recomputes, and so many ways to keep."""
    kinds, most = t.base.shape[1], np.max(t.layouts[:, 1])
    ranks, leads, choices = np.max(t.layouts[:, 5]), np.max(t.layouts[:, 9]), t.again.shape[1]
    return Floors(
        np.zeros((3, 2, 2, PASSES, most)), np.zeros((2, 2)), np.empty((PASSES * most, WIDTH)),
        np.empty((PASSES, most)),
        np.empty((ONCE, kinds)), np.empty((choices, kinds, AGAIN)),
        np.empty((2, ONCE, kinds)), np.empty((2, choices, kinds, AGAIN)),
        np.empty((2, most, ONCE)), np.empty((2, num + 1, most, AGAIN)), np.empty((most, TRAFFIC)),
        np.zeros((2, num + 1, 2, 3)), np.zeros((2, 2, num + 1, 2, most)), np.empty((2, num), np.bool_),
        np.zeros((2, num + 1, 2, 2)), np.empty((2, num_shares, num, leads)),
        np.empty((2, num_shares, leads)), np.empty((4, leads, 5)), np.empty((num_gathers + 1, leads)),
        np.empty((4, num_hosts)), np.zeros((2, 5)), np.empty(leads), np.empty(ranks), np.empty(ranks),
        np.empty((5, most)), np.empty(NUM_ITEMS), np.empty((4, 2)),
        np.empty((2, num, 2, 3)), np.empty((2, num, 2, 2)), np.empty((2, num_shares, num, leads)), np.empty(num),
        np.zeros(2), np.zeros(most), np.zeros((most, TRAFFIC)), np.empty((1, WIDTH)),
        np.zeros(1, np.bool_),
    )  # fmt: skip


@kernel
def _home(zero):
    """A ZeRO stage with all at home and what is usual gathered ahead."""
    return Keep(zero, 1, 1.0, 0.0, 0.0, 0.0, 0.0)


@kernel
def _fill_columns(base, again, flags, x):
    """Columns under the cheapest TP overlap, for EP overlap off and on."""
    for ep in range(2):
        first = True
        for tp in range(2):
            if flags[1, ep] < 0 or flags[0, tp] < 0:
                continue
            cols, r, least, least_r = x.cols, x.r, x.least[ep], x.least_again[ep]
            choose_columns(base, again, tp, ep, cols, r)
            for i in range(cols.shape[0]):
                for k in range(cols.shape[1]):
                    least[i, k] = cols[i, k] if first else min(least[i, k], cols[i, k])
            for i in range(r.shape[0]):
                for k in range(r.shape[1]):
                    for n in range(AGAIN):
                        least_r[i, k, n] = r[i, k, n] if first else min(least_r[i, k, n], r[i, k, n])
            first = False


@kernel
def find_paths(base, again, flags, hop, code, p, v, m, place, made, corner, chunks, pipe, x):
    """Fill the first `counts` and `start` at the corner of a structure: cheapest row, recompute, overlaps, at home."""
    num, home, nothing = place.counts.shape[0], _home(0), x.nothing[0]
    x.is_refined[0] = False
    _fill_columns(base, again, flags, x)
    for ep in range(2):
        if flags[1, ep] < 0:
            continue
        for j in range(num):
            once, repeated = x.once[ep, j], x.repeated[ep, 0, j]
            once_seconds(place.counts, j, x.least[ep], once)
            again_seconds(place.counts, place.first, j, 0, corner, x.least_again[ep], repeated)
            _anchor(x.anchor, j, chunk_seconds(once, repeated, code, ep, home, 0, nothing))
        for pp in range(2):
            x.start[ep, pp] = np.inf
            if flags[2, pp] >= 0:
                x.start[ep, pp] = _count_passes(
                    x.anchor, hop, pp == 0, code, p, v, m, place, made, chunks, pipe, x.classes, x.spans,
                    x.counts[0, ep, pp],
                )  # fmt: skip


@kernel
def find_heavy_paths(flags, zero, hop, code, p, v, m, place, made, hosts, num, used, chunks, pipe, x):
    """Fill the other `counts`: where ZeRO-2, or 3, the host and the longest recompute take most, others are critical.

    After `hold_floors` of the same row, whose seconds these are.
    """
    x.is_refined[0] = True
    host = hosts[hosts.shape[0] - 1]
    for ep in range(2):
        if flags[1, ep] < 0:
            continue
        longest, at = -1.0, 0
        for o in range(num):
            mine = 0.0
            for j in range(place.counts.shape[0] if used[o] else 0):
                mine += x.repeated[ep, o, j, 0]
            if used[o] and mine > longest:
                longest, at = mine, o
        for z in range(2, 4):
            keep = Keep(z if zero[z] >= 0 else 0, 1, 1.0, host[0], host[1], host[2], host[3])
            dp = 1 if flags[3, 1] >= 0 else 0
            for j in range(place.counts.shape[0]):
                passes = chunk_seconds(x.once[ep, j], x.repeated[ep, at, j], code, ep, keep, dp, x.traffic[j])
                _anchor(x.anchor, j, passes)
            for pp in range(2):
                if flags[2, pp] >= 0:
                    _count_passes(
                        x.anchor, hop, pp == 0, code, p, v, m, place, made, chunks, pipe, x.classes, x.spans,
                        x.counts[z - 1, ep, pp],
                    )  # fmt: skip


@kernel
def _anchor(anchor, j, passes):
    for n in range(PASSES):
        anchor[n, j] = passes[n]


@kernel
def _count_passes(anchor, hop, blocking, code, p, v, m, place, made, chunks, pipe, all_classes, spans, counts):
    """How many of each pass the critical path of `anchor` [PASSES, Q] has: `counts`; and what it takes beside these."""
    num = place.counts.shape[0]
    classes = all_classes[: PASSES * num]
    alone = p == 1 or code == INTERLEAVED or code == DUALPIPE or made.steps.shape[0] > 0
    whole, gone = 0.0, 0.0
    for n in range(PASSES):
        for j in range(num):
            counts[n, j] = 0.0
    # The first lane of all is the anchor itself, each further one has one pass of one class shorter.
    at = lane = 0
    while lane == 0 or at < PASSES * num:
        for i in range(PASSES * num):
            put(classes, i, splat(anchor[i // num, i % num]))
        first = at
        lane = 1
        while lane < WIDTH and at < PASSES * num:
            n, j = at // num, at % num
            if anchor[n, j] > 0.0 and (n < 3 or alone):
                classes[at, lane] = anchor[n, j] * (1.0 - NUDGE)
                lane += 1
            at += 1
        put(spans, 0, spans_of(place.class_of, classes, chunks, pipe, hop, blocking, code, p, v, m, made))
        whole = spans[0, 0]
        lane = 1
        for i in range(first, at):
            n, j = i // num, i % num
            if anchor[n, j] > 0.0 and (n < 3 or alone):
                counts[n, j] = max((whole - spans[0, lane]) / (anchor[n, j] * NUDGE), 0.0)
                gone += counts[n, j] * anchor[n, j]
                lane += 1
    return whole - gone


@kernel
def _along(counts, once, repeated, traffic, code, ep, out):
    """Seconds of forwards, backwards and weight gradients along a path with all at home and no ZeRO traffic: `out` [3].

    `counts` [PASSES, Q].
    """
    tf, tb, tw = 0.0, 0.0, 0.0
    home = _home(0)
    for j in range(once.shape[0]):
        f, b, w, alone_f, alone_b = chunk_seconds(once[j], repeated[j], code, ep, home, 0, traffic[j])
        tf += counts[0, j] * f + counts[3, j] * alone_f
        tb += counts[1, j] * b + counts[4, j] * alone_b
        tw += counts[2, j] * w
    out[0], out[1], out[2] = tf, tb, tw


@kernel
def _fill_zero(counts, once, repeated, traffic, flags, code, ep, keep, ahead, out):
    """Seconds along both paths [B, Q] on each class under ZeRO-2 or 3, the less of without and with overlap of DP.

    Traffic may move from one pass to the next, but the three together take no less where a pass gets longer: as many of
    each as the path has of all, and what it has more of one at what that takes without traffic. Into `out`, where less
    than what is there.
    """
    home = _home(0)
    splits = splits_backward(code)
    for dp in range(1 if ahead else 0, 2):  # to gather ahead of others needs overlap
        if flags[3, dp] < 0:
            continue
        asked = keep_of(keep, keep.zero, dp)
        for j in range(once.shape[0]):
            f, b, w, alone_f, alone_b = chunk_seconds(once[j], repeated[j], code, ep, home, 0, traffic[j])
            zf, zb, zw, zaf, zab = chunk_seconds(once[j], repeated[j], code, ep, asked, dp, traffic[j])
            for pp in range(2):
                if flags[2, pp] < 0:
                    continue
                cf, cb, cw = counts[pp, 0, j], counts[pp, 1, j], counts[pp, 2, j]
                lone_f, lone_b = counts[pp, 3, j], counts[pp, 4, j]
                if ep == 0:  # then no pass has another beside it
                    cf, cb, lone_f, lone_b = cf + lone_f, cb + lone_b, 0.0, 0.0
                common = min(min(cf, cb), cw) if splits else min(cf, cb)  # else W is inside B
                lone = 0.0 if splits else min(lone_f, lone_b)
                more = (cf - common) * f + (cb - common) * b + max(cw - common, 0.0) * w + lone * (zaf + zab)
                more += (lone_f - lone) * alone_f + (lone_b - lone) * alone_b
                out[pp, j] = min(out[pp, j], common * ((zf + zb) + zw) + more)


@kernel
def _along_all(counts, once, repeated, traffic, code, ep, keep, zero):
    """Seconds along a path with the host, on each class no less than what ZeRO makes of it, `zero` [Q]."""
    total = 0.0
    home = _home(0)
    for j in range(once.shape[0]):
        f, b, w, alone_f, alone_b = chunk_seconds(once[j], repeated[j], code, ep, home, 0, traffic[j])
        if keep.activations + keep.parameters + keep.gradients > 0.0:
            ahead, back, last = host_seconds(repeated[j, 3], b, w, code, keep, traffic[j])
            f, b, w, alone_f, alone_b = (
                max(f, ahead),
                max(b, back),
                max(w, last),
                max(alone_f, ahead),
                max(alone_b, back),
            )
        mine = counts[0, j] * f + counts[1, j] * b + counts[2, j] * w + counts[3, j] * alone_f + counts[4, j] * alone_b
        total += max(mine, zero[j])
    return total


@kernel
def _fill_home(flags, code, place, options, num, num_plain, used, x):
    """Seconds along the path of every recompute with all at home and no ZeRO traffic, and of the host's link.

    Behind them, as one more recompute, the least on each column.
    """
    # Plain locals, here and below: looking arrays up in a tuple costs reference counts.
    classes, all_counts, dots, held = place.counts.shape[0], x.counts[0], x.dots, x.held
    r, traffic, first, blocks = x.least_again, x.traffic, place.first, place.counts
    moved = Keep(0, 1, 1.0, 1.0, 0.0, 0.0, 0.0)
    for ep in range(2):
        if flags[1, ep] < 0:
            continue
        corner, once, all_repeated, own_r = x.repeated[ep, num], x.once[ep, :classes], x.repeated[ep], r[ep]
        corner[:classes] = np.inf
        for j in range(classes):
            once_seconds(blocks, j, x.least[ep], once[j])
        for o in range(num + 1):
            repeated = all_repeated[o]
            if o < num:
                if not used[o]:
                    continue
                choice, layers = choice_of(options, num_plain, o)
                for j in range(classes):
                    again_seconds(blocks, first, j, layers, choice, own_r, repeated[j])
                    for n in range(AGAIN):
                        corner[j, n] = min(corner[j, n], repeated[j, n])
            for pp in range(2):
                if flags[2, pp] < 0:
                    continue
                counts, ahead, back = all_counts[ep, pp], 0.0, 0.0
                _along(counts, once, repeated, traffic, code, ep, dots[ep, o, pp])
                for j in range(classes):
                    down, fetch, _ = host_seconds(repeated[j, 3], 0.0, 0.0, code, moved, traffic[j])
                    ahead += (counts[0, j] + counts[3, j]) * down
                    back += (counts[1, j] + counts[4, j]) * fetch
                held[ep, o, pp, 0], held[ep, o, pp, 1] = ahead, back


@kernel
def _fill_bytes(c, net, base, again, flags, zero, place, flying, late, options, kinds, num, num_plain, used, x):
    """What ranks hold: `moving` and `lowest` of activations, `still` and `ahead` of the rest."""
    classes, line = place.counts.shape[0], x.line
    saved, most, live, owed = x.bytes[0, :classes], x.bytes[1, :classes], x.bytes[2, :classes], x.bytes[3, :classes]
    logits = x.bytes[4, :classes]
    owed_bytes(place.counts, base, owed)
    shares = kinds.shares
    x.lowest[:] = np.inf
    for o in range(num):
        if not used[o]:
            continue
        choice, layers = choice_of(options, num_plain, o)
        chunk_bytes(place.counts, place.first, layers, again, choice, saved, most, logits, live)
        for ep in range(2):
            if flags[1, ep] < 0:
                continue
            for n in range(place.leads.size):
                for a in range(shares.size):
                    now = moving_bytes(
                        place.leads[n], place.slots, flying[ep], late, saved, most, logits, owed, live, shares[a], line
                    )
                    x.moving[ep, a, o, n] = now
                    x.lowest[ep, a, n] = min(x.lowest[ep, a, n], now)
    for n in range(place.leads.size):
        rank = place.leads[n]
        for z in range(4):
            if zero[z] < 0:
                continue
            static_bytes(rank, place.held, base, _home(z), net, c, line)
            x.still[z, n, 0], x.still[z, n, 1], x.still[z, n, 2] = line[0], line[1], line[2]
            static_bytes(rank, place.held, base, Keep(z, 1, 1.0, 0.0, 1.0, 1.0, 0.0), net, c, line)
            x.still[z, n, 3], x.still[z, n, 4] = line[0], line[1]
        gathers = kinds.gathers.shape[0] if zero[3] >= 0 else 0
        x.ahead[gathers, n] = np.inf
        for g in range(gathers):
            x.ahead[g, n] = np.inf
            asked = _gathered(kinds.gathers, 3, g)
            for dp in range(2):
                if flags[3, dp] >= 0:
                    static_bytes(rank, place.held, base, keep_of(asked, 3, dp), net, c, line)
                    x.ahead[g, n] = min(x.ahead[g, n], line[3])
            x.ahead[gathers, n] = min(x.ahead[gathers, n], x.ahead[g, n])


@kernel
def _fill_bunches(flags, leads, num, used, x):
    """Of every GROUP recomputes the least: neighbours fall together."""
    x.bunch_dots[:], x.bunch_held[:], x.bunch_moving[:] = np.inf, np.inf, np.inf
    for ep in range(2):
        if flags[1, ep] < 0:
            continue
        for o in range(num):
            if not used[o]:
                continue
            bunch = o // GROUP
            for pp in range(2):
                for n in range(3):
                    x.bunch_dots[ep, bunch, pp, n] = min(x.bunch_dots[ep, bunch, pp, n], x.dots[ep, o, pp, n])
                for n in range(2):
                    x.bunch_held[ep, bunch, pp, n] = min(x.bunch_held[ep, bunch, pp, n], x.held[ep, o, pp, n])
            for a in range(x.moving.shape[1]):
                for n in range(leads):
                    x.bunch_moving[ep, a, bunch, n] = min(x.bunch_moving[ep, a, bunch, n], x.moving[ep, a, o, n])


@kernel
def _fill_exposed(c, net, flags, zero, place, x):
    """Per ZeRO stage, without and with overlap of DP: traffic at the ends of a step that nothing hides."""
    for z in range(4):
        if zero[z] < 0:
            continue
        grads, gathers, least_grads, least_gathers = 0.0, 0.0, 0.0, 0.0
        for rank in place.leads:
            wire, latency = gradient_wire(x.dense[rank], x.expert[rank], z, net, c)
            grads, least_grads = max(grads, wire + latency), max(least_grads, SLOWDOWN * wire)
            wire, latency = gather_wire(x.dense[rank], x.expert[rank], z, net, c)
            gathers, least_gathers = max(gathers, wire + latency), max(least_gathers, SLOWDOWN * wire)
        x.exposed[z, 0] = grads + gathers if flags[3, 0] >= 0 else np.inf
        x.exposed[z, 1] = least_grads + least_gathers if flags[3, 1] >= 0 else np.inf


@kernel
def _fill_updates(c, net, base, zero, rests, place, x):
    """Least seconds of the optimizer under each ZeRO stage and each of `rests`: shares on the host but activations'."""
    for z in range(4):
        if zero[z] < 0:
            continue
        for i in range(rests.shape[0]):
            x.update[z, i] = 0.0
        for rank in place.leads:
            apart, dense, expert = apart_seconds(rank, place.held, base, z, net, c), x.dense[rank], x.expert[rank]
            for i in range(rests.shape[0]):
                keep = Keep(z, 1, 1.0, 0.0, rests[i, 0], rests[i, 1], rests[i, 2])
                x.update[z, i] = max(x.update[z, i], update_seconds(dense, expert, keep, net, c) + apart)


@njit(cache=True, inline="always")
def _span_floor(start, dots, held, more, unit, ep, at, share_a, q, share_g):
    """Lower bound of the span along the path of recompute `at`, the less of both ways to send.

    `more` [B]: seconds along the path that it takes at least anyhow; `unit` [B, 5]: what all weights on the way up take
    on the host's link ahead of forward and of backward, and all gradients on the way down beside F, B and W.
    """
    span = np.inf
    for pp in range(2):
        down, fetch = share_a * held[ep, at, pp, 0], share_a * held[ep, at, pp, 1]
        tf = max(dots[ep, at, pp, 0], max(down + share_g * unit[pp, 2], q * unit[pp, 0]))
        tb = max(dots[ep, at, pp, 1], max(fetch + q * unit[pp, 1], share_g * unit[pp, 3]))
        tw = max(dots[ep, at, pp, 2], share_g * unit[pp, 4])
        span = min(span, start[ep, pp] + max((tf + tb) + tw, more[pp]))
    return span


@njit(cache=True, inline="always")
def _memory_floor(sums, moving, ep, a, at, fixed):
    """Lower bound of memory: the fullest of the leading ranks."""
    most = 0.0
    for n in range(sums.size):
        most = max(most, sums[n] + moving[ep, a, at, n])
    return (most + fixed) * MEMORY_SHADE


@kernel
def _beaten(front, options, step, memory):
    """Whether a point of the front beats what takes no less than this, but for rounding, and so many bytes."""
    return is_beaten(front, step * SHADE if options.use_step else 0.0, memory if options.use_memory else 0.0)


@kernel
def _ceiling(front, options, step):
    """Bytes beyond which the front beats all that takes at least `step`; infinite where it asks nothing of memory."""
    if not options.use_memory:
        return np.inf
    i = last_at_most(front.x, front.size[0], step * SHADE if options.use_step else 0.0)
    return front.y[i] if i >= 0 else np.inf


@kernel
def hold_floors(
    t, c, net, base, again, row, flags, zero, variant, code, p, place, flying, late, options, kinds, num, num_plain,
    front, above, below, x,
):  # fmt: skip
    """Which of what is open above a node is open below it (Opened); whether any.

    Closed is what does not fit, and what a point of the front beats strictly.
    """
    _fill_columns(base, again, flags, x)
    for j in range(place.counts.shape[0]):
        zero_traffic(place.counts, j, base, net, c, x.traffic[j])
    _fill_home(flags, code, place, options, num, num_plain, above.used, x)
    _fill_bytes(c, net, base, again, flags, zero, place, flying, late, options, kinds, num, num_plain, above.used, x)
    _fill_bunches(flags, place.leads.size, num, above.used, x)
    rank_params(place.held, base, x.dense, x.expert)
    _fill_exposed(c, net, flags, zero, place, x)
    _fill_updates(c, net, base, zero, kinds.rests, place, x)
    below.used[:] = False
    fixed = fixed_bytes(t.buffer_bytes[row], t.hop_bytes[row], p) + WORKSPACE_BYTES
    gathers, hosts, found = kinds.gathers, kinds.hosts.shape[0], False
    classes = place.counts.shape[0]
    any_gather, is_root, third = 3 + gathers.shape[0], above.is_root, False
    below.some[:] = False
    for step in range(-1, any_gather):
        # At the root first stage 3 as a whole, the least of all ways to gather: mostly that closes all of them.
        kind = any_gather if step < 0 else step
        z, g = min(kind, 3), max(kind - 3, 0)
        whole = kind == any_gather
        if zero[z] < 0 or (whole and not is_root):
            continue
        if z == 3 and is_root and not whole and not third:
            continue
        ahead = z == 3 and not whole and kinds.keep_needs[g * hosts, 1] > 0
        if ahead and flags[3, 1] < 0:
            continue
        exposed = x.exposed[z, 1] if ahead else min(x.exposed[z, 0], x.exposed[z, 1])
        x.done[:] = False
        source = any_gather if is_root and z == 3 and not whole else kind
        for ep in range(2):
            if flags[1, ep] < 0:
                continue
            corner, more = x.zero_dots[0, ep, num], x.more
            for pp in range(2):
                for j in range(classes):
                    corner[pp, j] = 0.0 if z < 2 else np.inf
            start = 0 if whole else g
            for one in range(start, start if z < 2 else gathers.shape[0] if whole else g + 1):
                needs = z == 3 and kinds.keep_needs[one * hosts, 1] > 0
                if not needs or flags[3, 1] >= 0:
                    _fill_zero(
                        x.counts[0, ep], x.once[ep, :classes], x.repeated[ep, num], x.traffic, flags, code, ep,
                        _gathered(gathers, z, one), needs, corner,
                    )  # fmt: skip
            for pp in range(2):
                more[pp] = 0.0
                for j in range(classes):
                    more[pp] += corner[pp, j]
            _fill_units(z, z < 3 or (not whole and gathers[g, 0] > 0.0), flags, code, place, ep, x)
            opens = _hold_kind(
                c, flags, variant, code, classes, options, kinds, num, front, above, below, kind, source, whole, z,
                g, ahead, ep, exposed, fixed, x.start, x.dots, x.held, x.zero_dots, x.unit, x.moving, x.lowest,
                x.bunch_dots, x.bunch_held, x.bunch_moving, x.sums[: place.leads.size], x.update, x.still, x.ahead,
                x.ceilings, x.done, x.counts, x.once, x.repeated, x.traffic, more, x.zeros, x.is_refined,
            )  # fmt: skip
            third |= opens and whole
            found |= opens and not whole
    return found


@kernel
def _gathered(gathers, z, g):
    """A ZeRO stage with all at home, stage 3 under one way to gather."""
    if z < 3:
        return _home(z)
    return Keep(z, int(gathers[g, 0]), gathers[g, 1], 0.0, 0.0, 0.0, 0.0)


@kernel
def _fill_units(z, reshards, flags, code, place, ep, x):
    """What all weights and all gradients take at least on the host's link along the path, `unit` [B, 5].

    Beside passes of no length, for no term of the host falls where a pass gets longer (chunk.py).
    """
    unit, traffic, all_counts = x.unit, x.traffic, x.counts
    weights = Keep(z, 1 if reshards else 0, 1.0, 0.0, 1.0, 0.0, 0.0)
    grads = Keep(z, 1, 1.0, 0.0, 0.0, 1.0, 0.0)
    for pp in range(2):
        for n in range(5):
            unit[pp, n] = 0.0
        for j in range(place.counts.shape[0] if flags[2, pp] >= 0 else 0):
            ahead = all_counts[0, ep, pp, 0, j] + all_counts[0, ep, pp, 3, j]
            back = all_counts[0, ep, pp, 1, j] + all_counts[0, ep, pp, 4, j]
            up, fetch, _ = host_seconds(0.0, 0.0, 0.0, code, weights, traffic[j])
            f, b, w = host_seconds(0.0, 0.0, 0.0, code, grads, traffic[j])
            unit[pp, 0] += ahead * up
            unit[pp, 1] += back * fetch
            unit[pp, 2] += ahead * f
            unit[pp, 3] += back * b
            unit[pp, 4] += all_counts[0, ep, pp, 2, j] * w


@kernel
def _hold_kind(
    c, flags, variant, code, classes, options, kinds, num, front, above, below, kind, source, whole, z, g, ahead, ep,
    exposed, fixed, start, dots, held, zero_dots, unit, moving, least, bunch_dots, bunch_held, bunch_moving, sums,
    update, still, gathered, ceilings, done, counts, once, repeated, traffic, more, nothing, refined,
):  # fmt: skip
    """The same of one kind of ZeRO, or of stage 3 as a `whole`, and one flag of EP; `source`: whose openness counts.

    The arrays are those of Floors, one by one for speed.
    """
    hosts, share_of, rest_of = kinds.hosts, kinds.share_of, kinds.rest_of
    some, is_open, used = below.some, below.each, below.used
    some_above, is_above = (some, is_open) if source != kind else (above.some, above.each)
    found, heavy, is_refined = False, 2 if z == 3 else 1, 1 if refined[0] else 0
    quickest = update[z, 0]
    for i in range(1, kinds.rests.shape[0]):
        quickest = min(quickest, update[z, i])
    # What the front asks of memory with all at home: the host makes no step shorter.
    span = _span_floor(start, dots, held, more, unit, ep, num, 0.0, 0.0, 0.0)
    ceiling = _ceiling(front, options, finish(span, exposed, quickest, 0.0, c))
    for bunch in range((num + GROUP - 1) // GROUP):
        span = _span_floor(start, bunch_dots, bunch_held, more, unit, ep, bunch, 0.0, 0.0, 0.0)
        ceilings[bunch] = _ceiling(front, options, finish(span, exposed, quickest, 0.0, c))
    for h in range(hosts.shape[0]):
        if not some_above[source, h, ep]:
            continue
        if variant >= 0 and not whole and not kinds.pairs[variant, g * hosts.shape[0] + h]:
            continue
        a, share, q, gr, st = share_of[h], hosts[h, 0], hosts[h, 1], hosts[h, 2], hosts[h, 3]
        for n in range(sums.size):
            weights, grads = still[z, n, 0], still[z, n, 1]
            own = weights + q * (still[z, n, 3] - weights) + (grads + gr * (still[z, n, 4] - grads))
            sums[n] = own + (1.0 - st) * still[z, n, 2] + (gathered[g, n] if z == 3 else 0.0)
        most = 0.0
        for n in range(sums.size):
            most = max(most, sums[n] + least[ep, a, n])
        memory = (most + fixed) * MEMORY_SHADE
        if memory > ceiling or device(memory, c) > c.capacity_bytes:
            continue
        seconds = update[z, rest_of[h]]
        any_open = False
        for first in range(0, num, GROUP):
            bunch, last = first // GROUP, min(first + GROUP, num)
            for o in range(first, last):
                is_open[kind, h, ep, o] = False
            memory = _memory_floor(sums, bunch_moving, ep, a, bunch, fixed)
            if memory > ceilings[bunch] or device(memory, c) > c.capacity_bytes:
                continue
            span = _span_floor(start, bunch_dots, bunch_held, more, unit, ep, bunch, share, q, gr)
            if _beaten(front, options, finish(span, exposed, seconds, 0.0, c), memory):
                continue
            for o in range(first, last if whole else first):
                is_open[kind, h, ep, o] = any_open = True
            for o in range(last if whole else first, last):
                if not is_above[source, h, ep, o]:
                    continue
                memory = _memory_floor(sums, moving, ep, a, o, fixed)
                if device(memory, c) > c.capacity_bytes:
                    continue
                span = _span_floor(start, dots, held, more, unit, ep, o, share, q, gr)
                if _beaten(front, options, finish(span, exposed, seconds, 0.0, c), memory):
                    continue
                if z >= 2 and not done[ep, o]:
                    for path in range(1 + is_refined):
                        for pp in range(2):
                            for j in range(classes):
                                zero_dots[path, ep, o, pp, j] = np.inf
                        _fill_zero(
                            counts[0 if path == 0 else heavy, ep], once[ep, :classes], repeated[ep, o], traffic, flags,
                            code, ep, _gathered(kinds.gathers, z, g), ahead, zero_dots[path, ep, o],
                        )  # fmt: skip
                    done[ep, o] = True
                if z >= 2 or is_refined or share + q + gr > 0.0:
                    asked = _gathered(kinds.gathers, z, g)
                    asked = Keep(asked.zero, asked.reshard, asked.prefetch, share, q, gr, st)
                    span = np.inf
                    for pp in range(2):
                        if flags[2, pp] < 0:
                            continue
                        longest = 0.0
                        for path in range(1 + is_refined):
                            along = _along_all(
                                counts[0 if path == 0 else heavy, ep, pp], once[ep, :classes], repeated[ep, o], traffic,
                                code, ep, asked, zero_dots[path, ep, o, pp] if z >= 2 else nothing,
                            )  # fmt: skip
                            longest = max(longest, along + (start[ep, pp] if path == 0 else 0.0))
                        span = min(span, longest)
                    if _beaten(front, options, finish(span, exposed, seconds, 0.0, c), memory):
                        continue
                is_open[kind, h, ep, o] = used[o] = True
                any_open = True
        some[kind, h, ep] = any_open
        found |= any_open
    return found
