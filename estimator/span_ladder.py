# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""1F1B and ZB-H1: the longest path through their ladder, and both pass by pass where micro-batches are few.

Letters and method as in span.py. f, b, w, entry, leave: arrays of lanes [p, WIDTH]; `x`: scratch rows of lanes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from estimator.jit import kernel
from estimator.lanes import larger, load, put, splat

__all__ = ["ladder", "one_f_one_b", "zb_h1"]

WALKED_ROUNDS: Final = 16
"""With hop > 0 a ladder with fewer spare rounds than this (or than stages) is walked: cut rounds would show there."""


@kernel
def one_f_one_b(f, b, w, hop, p, m, x):
    """Stage s enters the ladder after p - 1 - s warm-up forwards, each as slow as the slowest stage before it."""
    if m < p:
        return _walk(f, b, w, hop, p, m, False, x)
    entry, leave, back = x[:p], x[p : 2 * p], x[2 * p : 3 * p]
    sum_f, sum_b, slow_f, slow_b = splat(-hop), splat(-hop), splat(0.0), splat(0.0)
    for s in range(p):
        full = load(b, s) + load(w, s)
        put(back, s, full)
        sum_f = sum_f + (load(f, s) + hop)
        sum_b = sum_b + (full + hop)
        slow_f = larger(slow_f, load(f, s))
        slow_b = larger(slow_b, full)
        put(entry, s, sum_f + float(p - 1 - s) * slow_f)
        put(leave, s, sum_b + float(p - 1 - s) * slow_b)  # the same read backwards in time
    return ladder(f, back, entry, leave, hop, p, m - p, x[3 * p :])


@kernel
def ladder(f, b, entry, leave, hop, p, spare, x):
    """Longest walk on the ladder of f and b.

    `entry[s]`: up to and with the first (F, s); `leave[e]`: from the last (B, e) to the end, with it. From (F, s) to
    (B, e) over the turn at stage c >= s, e there are `spare` + s + e - c rounds besides.
    """
    if hop > 0.0 and spare < max(p, WALKED_ROUNDS):
        return _ladder_walk(f, b, entry, leave, hop, p, spare, x[:p], x[p : 2 * p])
    slope, path_f, path_b = x[:p], x[p : 2 * p], x[2 * p : 3 * p]  # path_*[c]: from stage 0 to c
    slopes(f, b, f, 0.0, hop, p, slope, x[3 * p :])
    ahead, after = x[3 * p : 4 * p], x[4 * p : 5 * p]  # entries and exits less the way to them
    sum_f, sum_b = splat(-hop), splat(-hop)
    for c in range(p):
        sum_f = sum_f + (load(f, c) + hop)
        sum_b = sum_b + (load(b, c) + hop)
        put(path_f, c, sum_f)
        put(path_b, c, sum_b)
        put(ahead, c, load(entry, c) - sum_f)
        put(after, c, load(leave, c) - sum_b)
    # Over stages beyond c: enter and come back to c, leave c and turn.
    far_in, far_out, best = splat(-np.inf), splat(-np.inf), splat(0.0)
    for c in range(p - 1, -1, -1):
        g = load(slope, c)
        near_in, near_out = splat(-np.inf), splat(-np.inf)
        for s in range(c + 1):
            rounds = float(s) * g
            near_in = larger(near_in, load(ahead, s) + rounds)
            near_out = larger(near_out, load(after, s) + rounds)
        both = near_in + near_out
        if spare < c:
            both = _constrained(ahead, after, g, c, spare)
        here_f, here_b = load(path_f, c), load(path_b, c)
        best = larger(best, here_f + both + here_b + float(spare - c) * g)
        best = larger(best, far_in + near_out + float(spare) * g)
        best = larger(best, near_in + far_out + float(spare) * g)
        if spare + c > 0:
            best = larger(best, far_in - here_b + far_out - here_f + float(spare + c) * g)
        far_in = larger(far_in, load(entry, c) + here_b)
        far_out = larger(far_out, load(leave, c) + here_f)
    return best


@kernel
def _ladder_walk(f, b, entry, leave, hop, p, spare, sent, free):
    """The same pass by pass: step k runs (F, i) and (B, i) on every stage that has not left, k <= spare + i."""
    best = splat(0.0)
    for k in range(spare + p):
        lowest, above = max(k - spare, 0), splat(0.0)
        for i in range(p - 1, lowest - 1, -1):
            if k == 0:
                put(sent, i, load(entry, i))
            elif i > 0:
                put(sent, i, larger(load(free, i), load(sent, i - 1) + hop) + load(f, i))
            else:
                put(sent, i, larger(load(free, i), 0.0) + load(f, i))
        for i in range(p - 1, lowest - 1, -1):
            begin = larger(load(sent, i), above)
            if k == spare + i:
                best = larger(best, begin + load(leave, i))
            end = begin + load(b, i)
            put(free, i, end)
            above = end + hop
    return best


@kernel
def _constrained(ahead, after, g, c, spare):
    """Entry and exit below c where few micro-batches leave no round to spare: s + e >= c - spare must hold."""
    best, out, e = splat(-np.inf), splat(-np.inf), c + 1
    for s in range(c + 1):
        while e > max(c - spare - s, 0):
            e -= 1
            out = larger(out, load(after, e) + float(e) * g)
        best = larger(best, load(ahead, s) + float(s) * g + out)
    return best


@kernel
def slopes(f, b, w, share, hop, p, out, means):
    """Largest seconds a micro-batch of any round through each stage; `share` 1 counts w at the round's lower turn."""
    if hop == 0.0:
        for c in range(p):
            put(out, c, load(f, c) + load(b, c) + share * load(w, c))
        return
    for c in range(p):
        put(out, c, splat(0.0))
    for i in range(p):
        total = share * load(w, i) - 2.0 * hop
        for j in range(i, p):
            total = total + (load(f, j) + load(b, j) + 2.0 * hop)
            put(means, j, total / float(j - i + 1))
        widest = splat(0.0)
        for j in range(p - 1, i - 1, -1):
            widest = larger(widest, load(means, j))
            put(out, j, larger(load(out, j), widest))


@kernel
def _walk(f, b, w, hop, p, m, split, x):
    """1F1B or ZB-H1 (split) pass by pass: at step k rank i runs F(k + p - 1 - i), B(k) and, split, W(k - i)."""
    sent, free = x[:p], x[p : 2 * p]
    for i in range(p):
        put(sent, i, splat(0.0))
        put(free, i, splat(0.0))
    for k in range(1 - p, m):
        for i in range(p - 1, -1, -1):
            if 0 <= k + p - 1 - i < m:
                begin = load(free, i)
                if i > 0:
                    begin = larger(begin, load(sent, i - 1) + hop)
                end = begin + load(f, i)
                put(sent, i, end)
                put(free, i, end)
        if k < 0:
            continue
        above = splat(0.0)
        for i in range(p - 1, -1, -1):
            end = larger(load(free, i), above) + load(b, i)
            above = end + hop
            if not split:
                put(free, i, end + load(w, i))
                above = above + load(w, i)
            elif k >= i:
                put(free, i, end + load(w, i))
            else:
                put(free, i, end)
    span = splat(0.0)
    for i in range(p):
        if split:
            span = larger(span, load(free, i) + float(min(i, m)) * load(w, i))
        else:
            span = larger(span, load(free, i))
    return span


@kernel
def zb_h1(f, b, w, hop, p, m, x):
    """The ladder, with w paid at each turn (B, i) -> (F, i). Entered after B(i, i), the last without a W before it."""
    if m < 2 * p:
        return _walk(f, b, w, hop, p, m, True, x)
    entry, leave, slope = x[:p], x[p : 2 * p], x[2 * p : 3 * p]
    _zb_entry(f, b, hop, p, entry, x[3 * p : 4 * p], x[4 * p : 5 * p])
    _zb_leave(b, w, hop, p, leave)
    slopes(f, b, w, 1.0, hop, p, slope, x[3 * p : 4 * p])
    best = splat(0.0)
    for c in range(p):
        g = load(slope, c)
        # Arrive in (B, c) from stages i >= c, or in (F, c) from i < c and turn; likewise for leaving.
        into, out, path_b = splat(-np.inf), load(leave, c) + float(c) * g, splat(0.0)
        for i in range(c, p):
            into = larger(into, load(entry, i) + path_b - float(i) * g)
            path_b = path_b + (load(b, i) + hop)
        path_f, turn, back = load(f, c), load(b, c), float(c + 1) * g
        for i in range(c - 1, -1, -1):
            path_f = path_f + (load(f, i) + hop)
            into = larger(into, load(entry, i) + load(w, i) + path_f + turn - back)
        path_f, turn, back = load(f, c), load(w, c), float(c - 1) * g
        for e in range(c + 1, p):
            path_f = path_f + (load(f, e) + hop)
            out = larger(out, turn + path_f + load(b, e) + load(leave, e) + back)
        path_b = splat(0.0)
        for e in range(c - 1, -1, -1):
            path_b = path_b + (load(b, e) + hop)
            out = larger(out, path_b + load(leave, e) + float(e) * g)
        best = larger(best, into + out + float(m - p) * g)
    return best


@kernel
def _zb_entry(f, b, hop, p, entry, sent, free):
    """End of B(i, i) on each rank: 1F1B without weight gradients, from the end of the warm-up on."""
    total, slow = splat(-hop), splat(0.0)
    for i in range(p):
        total = total + (load(f, i) + hop)
        slow = larger(slow, load(f, i))
        ready = total + float(p - 1 - i) * slow
        put(sent, i, ready)
        put(free, i, ready)
    for k in range(p):
        above = splat(0.0)
        if k > 0:
            for i in range(p - 1, k - 1, -1):
                put(sent, i, larger(load(free, i), load(sent, i - 1) + hop) + load(f, i))
        for i in range(p - 1, k - 1, -1):
            above = larger(load(sent, i), above) + load(b, i)
            put(free, i, above)
            above = above + hop
        put(entry, k, load(free, k))


@kernel
def _zb_leave(b, w, hop, p, leave):
    """Longest path after the last B that a forward precedes: p - 1 - e more of W, B at some stage, then r + 1 of W."""
    for e in range(p):
        path, slow, longest = splat(0.0), splat(0.0), splat(0.0)
        for r in range(e, -1, -1):
            slow = larger(slow, load(b, r) + load(w, r))
            longest = larger(longest, path + float(p - 1 - e) * slow + float(r + 1) * load(w, r))
            if r > 0:
                path = path + (load(b, r - 1) + hop)
        put(leave, e, longest)
