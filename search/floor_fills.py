# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Least seconds along paths and least bytes of leading ranks, as floors add them up (floors.py). Jitted.

Each `fill_` fills one part of Floors for a row of prices.
"""

from __future__ import annotations

import numpy as np

from estimator.chunk import chunk_seconds, host_seconds
from estimator.compose import AGAIN, again_seconds, once_seconds
from estimator.cost.overlap import SLOWDOWN
from estimator.gradients import apart_seconds, gather_wire, gradient_wire, update_seconds
from estimator.jit import kernel
from estimator.keep import Keep, keep_of
from estimator.memory import chunk_bytes, moving_bytes, owed_bytes, static_bytes
from estimator.span_codes import splits_backward
from search.bounds import choice_of
from search.floor_paths import all_home
from search.floor_tables import GROUP

__all__ = ["along_all", "fill_bunches", "fill_bytes", "fill_exposed", "fill_home", "fill_units", "fill_updates",
           "fill_zero", "gathered_by"]  # fmt: skip


@kernel
def _along(counts, once, repeated, traffic, code, ep, out):
    """Seconds of forwards, backwards and weight gradients along a path with all at home and no ZeRO traffic: `out` [3].

    `counts` [PASSES, Q].
    """
    tf, tb, tw = 0.0, 0.0, 0.0
    home = all_home(0)
    for j in range(once.shape[0]):
        f, b, w, alone_f, alone_b = chunk_seconds(once[j], repeated[j], code, ep, home, 0, traffic[j])
        tf += counts[0, j] * f + counts[3, j] * alone_f
        tb += counts[1, j] * b + counts[4, j] * alone_b
        tw += counts[2, j] * w
    out[0], out[1], out[2] = tf, tb, tw


@kernel
def fill_zero(counts, once, repeated, traffic, flags, code, ep, keep, ahead, out):
    """Seconds along both paths [B, Q] on each class under ZeRO-2 or 3, the less of without and with overlap of DP.

    Traffic may move from one pass to the next, but the three together take no less where a pass gets longer: as many of
    each as the path has of all, and what it has more of one at what that takes without traffic. Into `out`, where less
    than what is there.
    """
    home = all_home(0)
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
def along_all(counts, once, repeated, traffic, code, ep, keep, zero):
    """Seconds along a path with the host, on each class no less than what ZeRO makes of it, `zero` [Q]."""
    total = 0.0
    home = all_home(0)
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
def fill_home(flags, code, place, options, num, num_plain, used, x):
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
def fill_bytes(c, net, base, again, flags, zero, place, flying, late, options, kinds, num, num_plain, used, x):
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
            static_bytes(rank, place.held, base, all_home(z), net, c, line)
            x.still[z, n, 0], x.still[z, n, 1], x.still[z, n, 2] = line[0], line[1], line[2]
            static_bytes(rank, place.held, base, Keep(z, 1, 1.0, 0.0, 1.0, 1.0, 0.0), net, c, line)
            x.still[z, n, 3], x.still[z, n, 4] = line[0], line[1]
        gathers = kinds.gathers.shape[0] if zero[3] >= 0 else 0
        x.ahead[gathers, n] = np.inf
        for g in range(gathers):
            x.ahead[g, n] = np.inf
            asked = gathered_by(kinds.gathers, 3, g)
            for dp in range(2):
                if flags[3, dp] >= 0:
                    static_bytes(rank, place.held, base, keep_of(asked, 3, dp), net, c, line)
                    x.ahead[g, n] = min(x.ahead[g, n], line[3])
            x.ahead[gathers, n] = min(x.ahead[gathers, n], x.ahead[g, n])


@kernel
def fill_bunches(flags, leads, num, used, x):
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
def fill_exposed(c, net, flags, zero, place, x):
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
def fill_updates(c, net, base, zero, rests, place, x):
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


@kernel
def gathered_by(gathers, z, g):
    """A ZeRO stage with all at home, stage 3 under one way to gather."""
    if z < 3:
        return all_home(z)
    return Keep(z, int(gathers[g, 0]), gathers[g, 1], 0.0, 0.0, 0.0, 0.0)


@kernel
def fill_units(z, reshards, flags, code, place, ep, x):
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
