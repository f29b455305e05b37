# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""How many of each pass the critical path of a structure has: what bounds the span of every candidate. Jitted.

Counts are taken from below: by how much the span falls when a pass gets a little shorter, which no critical path
undercuts (floors.py says why that is a bound).
"""

from __future__ import annotations

import numpy as np

from estimator.chunk import chunk_seconds
from estimator.compose import AGAIN, PASSES, again_seconds, choose_columns, once_seconds, spans_of
from estimator.jit import kernel
from estimator.keep import Keep
from estimator.lanes import WIDTH, put, splat
from estimator.span_codes import DUALPIPE, INTERLEAVED

__all__ = ["all_home", "fill_columns", "find_heavy_paths", "find_paths"]

NUDGE = 1e-5  # by how much of itself a pass gets shorter to see what the span loses


@kernel
def all_home(zero):
    """A ZeRO stage with all at home and what is usual gathered ahead."""
    return Keep(zero, 1, 1.0, 0.0, 0.0, 0.0, 0.0)


@kernel
def fill_columns(base, again, flags, x):
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
    num, home, nothing = place.counts.shape[0], all_home(0), x.nothing[0]
    x.is_refined[0] = False
    fill_columns(base, again, flags, x)
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
