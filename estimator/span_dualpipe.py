# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""DualPipe: with both directions alike, its main step is a ladder of p / 2 stages.

Letters and method as in span.py; phases as in schedule.py. f, b, w: arrays of lanes [p, WIDTH]; alone_f, alone_b: the
same outside the overlapped pairs; `x`: scratch rows.
"""

from __future__ import annotations

from estimator.jit import kernel
from estimator.lanes import larger, load, put, splat
from estimator.span_ladder import ladder

__all__ = ["dualpipe"]


@kernel
def dualpipe(f, b, w, alone_f, alone_b, hop, p, m, x):
    """Rank p - 1 - i runs as rank i does.

    Stage h of the ladder has "forward" f[h] + (b + w)[p-1-h] (pair 0) and
    "backward" f[p-1-h] + (b + w)[h] (pair 1).
    """
    half = p // 2
    ahead, back, entry, leave = x[:half], x[half:p], x[p : p + half], x[p + half : 2 * p]
    for h in range(half):
        far = p - 1 - h
        put(ahead, h, load(f, h) + (load(b, far) + load(w, far)))
        put(back, h, load(f, far) + (load(b, h) + load(w, h)))
    rest = x[2 * p :]
    _entry(f, b, w, alone_f, alone_b, hop, half, entry, rest[:half], rest[half:p], rest[p : p + half], rest[2 * p :])
    _leave(f, b, w, alone_b, hop, half, leave, rest[:half], rest[half:p], rest[p : p + half], rest[2 * p :])
    put(back, half - 1, load(back, half - 1) + hop)  # the other middle rank's pair 0 feeds this rank's pair 1
    for h in range(half):
        put(leave, h, load(leave, h) + load(back, h))
    return ladder(ahead, back, entry, leave, hop, half, m // 2 - p, rest)


@kernel
def _entry(f, b, w, alone_f, alone_b, hop, half, entry, free, sent_f, sent_b, ends):
    """End of the first pair 0 of step 4 on each rank: steps 1 to 3, pass by pass.

    `ends` [half * p]: end of each phase-0 forward by rank and micro-batch.
    """
    p = 2 * half
    for h in range(half):  # step 1
        now, cost = splat(0.0), load(alone_f, h)
        for n in range(2 * (half - 1 - h)):
            if h > 0:
                now = larger(now, load(ends, (h - 1) * p + n) + hop)
            now = now + cost
            put(ends, h * p + n, now)
        put(free, h, now)
    for j in range(half):  # step 2: ranks h >= j; sent_f holds the last phase-1 forward of each rank
        for h in range(j, half):
            n = 2 * (half - 1 - h) + j
            now = load(free, h)
            if h > 0:
                now = larger(now, load(ends, (h - 1) * p + n) + hop)
            now = now + load(alone_f, h)
            put(free, h, now)
            put(ends, h * p + n, now)
        above = load(ends, (half - 1) * p + j)
        for h in range(half - 1, j - 1, -1):
            above = larger(load(free, h), above + hop) + load(alone_f, p - 1 - h)
            put(free, h, above)
            put(sent_f, h, above)
    for j in range(half - 1):  # step 3: ranks h < half - 1 - j; sent_b holds the last phase-1 gradient of each rank
        under = splat(-hop)
        for h in range(half - 1 - j):
            far = p - 1 - h
            under = larger(load(free, h), under + hop) + load(alone_b, far)
            put(sent_b, h, under)
            end = larger(under + load(w, far), load(sent_f, h + 1) + hop) + load(alone_f, far)
            put(sent_f, h, end)
            put(free, h, end)
    for h in range(half):  # the first pair 0; the middle rank runs it as two passes
        far = p - 1 - h
        ready_f, ready_b = splat(0.0), splat(0.0)
        if h > 0:
            ready_f, ready_b = load(ends, (h - 1) * p + p - 1 - h) + hop, load(sent_b, h - 1) + hop
        begin = larger(load(free, h), ready_f)
        if h == half - 1:
            put(entry, h, larger(begin + load(alone_f, h), ready_b) + (load(alone_b, far) + load(w, far)))
        else:
            put(entry, h, larger(begin, ready_b) + load(f, h) + (load(b, far) + load(w, far)))


@kernel
def _leave(f, b, w, alone_b, hop, half, leave, tail_1, tail_0, ranks, last):
    """Longest path after the last pair 1 of step 4 on each rank: steps 8 to 5, pass by pass and backwards in time.

    `last` [half * half]: by rank, tail from each phase-0 gradient of step 7; `ranks`: then from the end of step 6.
    """
    p = 2 * half
    for h in range(half):
        far, inner = p - 1 - h, half - 1 - h
        # The owed weight gradients in turn belong to step 6's passes h + 1 ... (odd: phase 0), then to step 7's.
        owed = splat(0.0)
        for q in range(inner, inner + h + 1):  # step 8
            owed = owed + load(w, far if q <= h and (h + 1 + q) % 2 == 0 else h)
        for j in range(inner - 1, -1, -1):  # step 7
            if h > 0:
                owed = larger(owed, hop + load(last, (h - 1) * half + j + 1))
            owed = owed + load(alone_b, h)
            put(last, h * half + j, owed)
            owed = owed + load(w, far if j <= h and (h + 1 + j) % 2 == 0 else h)
        put(ranks, h, owed)
    for i in range(half - 1, -1, -1):  # step 6: ranks h >= i; tail_1, tail_0 from the i-th gradient of each phase
        for h in range(i, half):
            far = p - 1 - h
            after = load(ranks, h) if i == h else load(tail_1, h)
            if h > 0:
                after = larger(after, hop + (load(last, (h - 1) * half) if i == h else load(tail_0, h - 1)))
            after = after + load(alone_b, h)
            if 2 * i + 1 <= h:
                after = after + load(w, h)
            put(tail_0, h, after)
            if h == half - 1:
                after = after + hop  # into the other middle rank
            else:
                after = larger(after, hop + load(tail_1, h + 1))
            after = after + load(alone_b, far)
            if 2 * i <= h:
                after = after + load(w, far)
            put(tail_1, h, after)
    for j in range(half - 2, -1, -1):  # step 5: ranks h <= half - 2 - j; tail_1 from backward 1, tail_0 from the pair
        for h in range(half - 2 - j, -1, -1):
            after = load(tail_1, h)
            if h > 0:
                after = larger(after, hop + load(tail_0, h - 1))
            put(tail_0, h, after + load(f, p - 1 - h) + (load(b, h) + load(w, h)))
        for h in range(half - 2 - j, -1, -1):
            far = p - 1 - h
            put(tail_1, h, larger(load(tail_0, h), hop + load(tail_1, h + 1)) + (load(alone_b, far) + load(w, far)))
    for h in range(half):
        end = load(tail_1, h)
        put(leave, h, larger(end, hop + load(tail_0, h - 1)) if h > 0 else end)
