# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Interleaved schedules: a ring of ranks, of which a few groups of p micro-batches are walked.

Letters and method as in span.py. f, b, w, alone_f, alone_b: arrays of lanes [C, WIDTH]; `x`: scratch rows of lanes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from estimator.jit import kernel, njit
from estimator.lanes import WIDTH, below, larger, load, put, splat

__all__ = ["interleaved"]

UNREACHED: Final = -1e300
"""Longest path to a state that no path reaches."""


@kernel
def interleaved(f, b, w, alone_f, alone_b, hop, p, v, m, x):
    """Every rank runs forward t + (v-1) p + p-1-i and backward t - (p-1-i) at step t, each fed by step t - 1.

    That is a ring: what leaves rank p - 1 enters rank 0 for the next chunk one step later. Some groups of p
    micro-batches are walked; each further group adds the largest gain of a path that returns to its state.

    Where passes run in pairs (schedule.side_by_side), a backward runs beside the forward after it: forwards up to rank
    i's first backward are alone, and so are as many of its last backwards.
    """
    if p == 1:
        hop = 0.0
    # Long enough for a path to reach the costliest rank from any other: in steps, and in micro-batches for small p.
    walked = min(m, max(2 + max(6 // v, 1), (15 + p) // p) * p)
    total, period = walked * v, p * v
    late = total - period  # every rank still has forwards and backwards
    sent, free, cost_f, cost_b = x[:p], x[p : 2 * p], x[2 * p : 3 * p], x[3 * p : 4 * p]
    rows = x[8 * p + 2 :]  # the same outside pairs, and of a step in which some ranks have a partner
    lone_f, lone_b, step_f, step_b = rows[:p], rows[p : 2 * p], rows[2 * p : 3 * p], rows[3 * p : 4 * p]
    for i in range(4 * p):
        put(x, i, splat(0.0))
        put(rows, i, splat(0.0))
    gain = splat(0.0)
    at_f = at_b = local_f = local_b = 0  # which rank starts another chunk at this step, forwards and backwards
    for t in range(1 - period, total + p - 1):
        if walked < m:
            if t == late - period:
                for i in range(2 * p):
                    put(x, 4 * p + i, load(x, i))
            elif t == late:
                gain = _group_gain(f, b, w, hop, p, v, local_f, at_f, local_b, at_b, x)
        low_f = t + period - total
        if low_f < p:
            before = load(sent, p - 1) + hop if local_f > 0 else splat(0.0)
            put(cost_f, at_f, load(f, local_f * p + at_f))
            put(lone_f, at_f, load(alone_f, local_f * p + at_f))
            at_f, local_f = _next_chunk(at_f, local_f, p, v)
        else:
            before = splat(0.0)
        if t < 0:
            _forwards(sent, sent, lone_f, before, hop, p, low_f)
            if t == -1:
                for i in range(p):
                    put(free, i, load(sent, i))
            continue
        around = load(free, 0) + hop if local_b > 0 else splat(0.0)
        chunk = (v - local_b) * p - 1 - at_b
        put(cost_b, p - 1 - at_b, load(b, chunk) + load(w, chunk))
        put(lone_b, p - 1 - at_b, load(alone_b, chunk) + load(w, chunk))
        at_b, local_b = _next_chunk(at_b, local_b, p, v)
        now_f, now_b = cost_f, cost_b
        if t < p:
            now_f = step_f
            for i in range(p):
                put(step_f, i, load(lone_f, i) if i <= p - 1 - t else load(cost_f, i))
        if low_f >= 0:
            now_b = step_b
            for i in range(p):
                put(step_b, i, load(lone_b, i) if i <= low_f else load(cost_b, i))
        if low_f <= 0 and t >= p - 1:
            _both(sent, free, now_f, now_b, before, around, hop, p)
            continue
        if low_f < p:
            _forwards(sent, free, now_f, before, hop, p, low_f)
        _backwards(sent if low_f < p else free, sent, free, now_b, around, hop, p, p - 1 - t, total + p - 2 - t)
    span = splat(0.0)
    for i in range(p):
        span = larger(span, load(free, i))
    return span + float((m - walked) // p) * gain


@kernel
def _both(sent, free, cost_f, cost_b, before, around, hop, p):
    """A step in which every rank runs a forward and a backward: fed around the ring but for input and loss."""
    own = load(free, 0)
    for i in range(p - 1):
        leaving = load(sent, i) + hop
        end = larger(own, before) + load(cost_f, i)
        put(sent, i, end)
        own = load(free, i + 1)
        put(free, i, larger(end, own + hop) + load(cost_b, i))
        before = leaving
    end = larger(own, before) + load(cost_f, p - 1)
    put(sent, p - 1, end)
    put(free, p - 1, larger(end, around) + load(cost_b, p - 1))


@kernel
def _forwards(sent, last, cost_f, before, hop, p, low):
    """Forwards of a step: fed around the ring but for the model's input. Ranks below `low` have none left."""
    if low <= 0:
        for i in range(p):
            leaving = load(sent, i) + hop
            put(sent, i, larger(load(last, i), before) + load(cost_f, i))
            before = leaving
    else:
        for i in range(p - 1, low - 1, -1):
            put(sent, i, larger(load(last, i), load(sent, i - 1) + hop) + load(cost_f, i))
        for i in range(low):
            put(sent, i, load(last, i))


@kernel
def _backwards(last, sent, free, cost_b, around, hop, p, low, high):
    """Backwards of a step: fed around the ring but for the loss.

    Ranks below `low` have none yet, above `high` none left.
    """
    for i in range(low):
        put(free, i, load(sent, i))
    for i in range(max(low, 0), min(high, p - 2) + 1):
        put(free, i, larger(load(last, i), load(free, i + 1) + hop) + load(cost_b, i))
    if high >= p - 1:
        put(free, p - 1, larger(load(last, p - 1), around) + load(cost_b, p - 1))


@njit(cache=True, inline="always")
def _next_chunk(at, local, p, v):
    """Which rank starts another chunk at the next step, and its number there: one rank a step, in turn."""
    if at + 1 < p:
        return at + 1, local
    return 0, (local + 1 if local + 1 < v else 0)


@njit(cache=True)
def _group_gain(f, b, w, hop, p, v, local_f, at_f, local_b, at_b, x):
    """Seconds of a further group in the steady ring: the costliest rank's, or more where a path changes ranks.

    `x`: rows of `interleaved`: sent, free, costs, and sent and free a group before. No later group gains more than the
    largest difference, so where that is the costliest rank's time the paths need not be searched.
    """
    busiest, gained = splat(0.0), splat(0.0)
    for i in range(p):
        busy = splat(0.0)
        for local in range(v):
            chunk = local * p + i
            busy = busy + (load(f, chunk) + load(b, chunk) + load(w, chunk))
        busiest = larger(busiest, float(p) * busy)
        grown = larger(load(x, i) - load(x, 4 * p + i), load(x, p + i) - load(x, 5 * p + i))
        gained = larger(gained, grown)
    unclear = below(busiest * (1.0 + 1e-12), gained)
    if unclear == 0:
        return busiest
    out, rest = x[6 * p : 6 * p + 1], x[6 * p + 1 : 8 * p + 2]
    put(out, 0, busiest)
    cost_f, cost_b = np.empty(p), np.empty(p)
    for lane in range(WIDTH):
        if (unclear >> lane) & 1:
            for state in range(0, 2 * p, WIDTH):
                for i in range(p):
                    cost_f[i], cost_b[i] = x[2 * p + i, lane], x[3 * p + i, lane]
                longest = _best_return(
                    f, b, w, lane, state, hop, p, v, local_f, at_f, local_b, at_b, cost_f, cost_b, rest
                )
                out[0, lane] = max(out[0, lane], longest)
    return load(out, 0)


@kernel
def _best_return(f, b, w, lane, state, hop, p, v, local_f, at_f, local_b, at_b, cost_f, cost_b, x):
    """Longest path of candidate `lane` over one group from a state back to it.

    For WIDTH states, of which `state` is the first: sent of each rank, then free. The lanes of `x` are those states.
    """
    sent, free = x[:p], x[p : 2 * p]
    for i in range(2 * p):
        put(x, i, splat(UNREACHED))
        if state <= i < state + WIDTH:
            x[i, i - state] = 0.0
    for _ in range(p * v):
        open_f, open_b = hop if local_f > 0 else UNREACHED, hop if local_b > 0 else UNREACHED
        cost_f[at_f] = f[local_f * p + at_f, lane]
        at_f, local_f = _next_chunk(at_f, local_f, p, v)
        chunk = (v - local_b) * p - 1 - at_b
        cost_b[p - 1 - at_b] = b[chunk, lane] + w[chunk, lane]
        at_b, local_b = _next_chunk(at_b, local_b, p, v)
        own = load(free, 0)
        before, around = load(sent, p - 1) + open_f - hop, own + open_b - hop
        for i in range(p):
            leaving = load(sent, i)
            end = larger(own, before + hop) + cost_f[i]
            put(sent, i, end)
            own = load(free, i + 1) if i + 1 < p else around
            put(free, i, larger(end, own + hop) + cost_b[i])
            before = leaving
    longest = 0.0
    for i in range(state, min(state + WIDTH, 2 * p)):
        longest = max(longest, x[i, i - state])
    return longest
