# mypy: disallow-untyped-decorators=False
"""How long a pipeline takes, fast: the longest path through each schedule's order, without walking the order.

The truth is `schedule.simulate(schedule.order(...), ...)`; these forms are called tens of millions of times in a
search. Letters as in schedule.py: p ranks, v chunks a rank, m micro-batches; f, b, w: [C] seconds of a micro-batch on
each model chunk (forward, input gradient with recompute, weight gradient); hop: latency of an edge between ranks.

How. Between warm-up and cool-down 1F1B, ZB-H1 and DualPipe are one *ladder*: a path is a walk on states (F, i), (B, i)
with moves (F, i) -> (F, i+1), (F, i) -> (B, i), (B, i) -> (B, i-1), (B, i) -> (F, i), and the number of moves between an
entry and an exit is fixed by m. A walk is a simple path plus rounds; with hop = 0 every round splits into rounds (F, c)
(B, c) of one stage, so the best walk spends all of them at the costliest stage c it visits. The span is the maximum
over c, entry and exit of entry + rounds * lambda_c + exit. Entries and exits are closed forms or a recurrence over
about p^2 / 2 passes; nothing grows with m.

Exact (to rounding) for any f, b, w, equal or not:
- GPipe with any hop;
- 1F1B, ZB-H1 and DualPipe at hop = 0, and 1F1B at m < p and ZB-H1 at m < 2p with any hop (walked pass by pass);
- interleaved with any hop: walked until a round of p micro-batches adds the same time to every rank, or to its end.
With hop > 0 lambda_c is the largest mean of any round through c, taken as if rounds could be cut anywhere: HOP_ERROR.
Every form is a maximum of sums of f, b, w and hop with counts that depend on p, v, m alone, hence non-decreasing.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit

from estimator.strategy import Schedule

__all__ = ["CODES", "in_flight_peak", "pipeline_span"]

GPIPE: Final = 0
ONE_F_ONE_B: Final = 1
INTERLEAVED: Final = 2
ZB_H1: Final = 3
DUALPIPE: Final = 4

WALKED_ROUNDS: Final = 16
"""With hop > 0 a ladder with fewer spare rounds than this (or than stages) is walked: cut rounds would show there."""

WALKED_GROUPS: Final = 3
"""Groups of p micro-batches that an interleaved schedule walks before it extrapolates."""

CODES: Final[dict[Schedule, int]] = {
    Schedule.GPIPE: GPIPE,
    Schedule.ONE_F_ONE_B: ONE_F_ONE_B,
    Schedule.INTERLEAVED: INTERLEAVED,
    Schedule.ZB_H1: ZB_H1,
    Schedule.DUALPIPE: DUALPIPE,
}
"""Integer by which jitted code names a schedule."""


@njit(cache=True)
def pipeline_span(
    schedule_code: int, f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float, p: int, v: int, m: int
) -> float:
    """Seconds from the first forward to the last backward; (p, v, m) must pass `check_conditions`. f, b, w: [C]."""
    if schedule_code == GPIPE:
        return _gpipe(f, b, w, hop, p, m)
    if schedule_code == ONE_F_ONE_B:
        return _one_f_one_b(f, b, w, hop, p, m)
    if schedule_code == INTERLEAVED:
        return _interleaved(f, b, w, hop, p, v, m)
    if schedule_code == ZB_H1:
        return _zb_h1(f, b, w, hop, p, m)
    return _dualpipe(f, b, w, hop, p, m)


@njit(cache=True)
def in_flight_peak(schedule_code: int, p: int, v: int, m: int, out: np.ndarray) -> None:
    """Fill `out` [p, local] with the micro-batches alive when a rank first holds most: `schedule.in_flight`, closed."""
    for i in range(p):
        if schedule_code == GPIPE:
            out[i, 0] = m
        elif schedule_code == ONE_F_ONE_B:
            out[i, 0] = min(m, p - i)
        elif schedule_code == ZB_H1:
            out[i, 0] = min(m, p)
        elif schedule_code == INTERLEAVED:
            # Warm-up and one forward: whole rounds of p micro-batches on each chunk, then part of a round.
            rounds, rest = divmod(min(2 * (p - 1 - i) + (v - 1) * p + 1, m * v), p * v)
            for local in range(v):
                out[i, local] = rounds * p + min(max(rest - local * p, 0), p)
        else:
            near = 0 if i < p // 2 else 1  # local chunk of the direction that enters at the nearer end
            depth = min(i, p - 1 - i)
            out[i, near] = p - depth
            out[i, 1 - near] = depth + 1


# ------------------------------------------------------------------------------------------------------- the schedules


@njit(cache=True)
def _gpipe(f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float, p: int, m: int) -> float:
    """Two flow shops in a row: all stages once, and the slowest m - 1 times more, forward and backward."""
    total, slow_f, slow_b = 2.0 * hop * (p - 1), 0.0, 0.0
    for i in range(p):
        total += f[i] + (b[i] + w[i])
        slow_f = max(slow_f, f[i])
        slow_b = max(slow_b, b[i] + w[i])
    return total + (m - 1) * (slow_f + slow_b)


@njit(cache=True)
def _one_f_one_b(f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float, p: int, m: int) -> float:
    """Stage s enters the ladder after p - 1 - s warm-up forwards, each as slow as the slowest stage before it."""
    if m < p:
        return _walk(f, b, w, hop, p, m, False)
    scratch = np.empty((6, p))
    entry, leave, back = scratch[0], scratch[1], scratch[2]
    sum_f, sum_b, slow_f, slow_b = -hop, -hop, 0.0, 0.0
    for s in range(p):
        back[s] = b[s] + w[s]
        sum_f += f[s] + hop
        sum_b += back[s] + hop
        slow_f = max(slow_f, f[s])
        slow_b = max(slow_b, back[s])
        entry[s] = sum_f + (p - 1 - s) * slow_f
        leave[s] = sum_b + (p - 1 - s) * slow_b  # the same read backwards in time
    return _ladder(f, back, entry, leave, hop, p, m - p, scratch[3:])


@njit(cache=True)
def _ladder(
    f: np.ndarray,
    b: np.ndarray,
    entry: np.ndarray,
    leave: np.ndarray,
    hop: float,
    p: int,
    spare: int,
    scratch: np.ndarray,
) -> float:
    """Longest walk on the ladder of f and b: [p].

    `entry[s]`: up to and with the first (F, s); `leave[e]`: from the last (B, e) to the end, with it. From (F, s) to
    (B, e) over the turn at stage c >= s, e there are `spare` + s + e - c rounds besides.
    """
    if hop > 0.0 and spare < max(p, WALKED_ROUNDS):
        return _ladder_walk(f, b, entry, leave, hop, p, spare, scratch[0], scratch[1])
    slope, beyond_b, beyond_f = scratch[0], scratch[1], scratch[2]
    _slopes(f, b, f, 0.0, hop, p, slope)
    sum_f, sum_b = -hop, -hop
    for c in range(p):
        sum_f += f[c] + hop
        sum_b += b[c] + hop
        beyond_b[c] = entry[c] + sum_b
        beyond_f[c] = leave[c] + sum_f
    far_in, far_out, best = -np.inf, -np.inf, 0.0
    for c in range(p - 1, -1, -1):
        g = slope[c]
        # Prefix sums up to c are what beyond_* adds to entry and leave.
        to_b, to_f = beyond_b[c] - entry[c], beyond_f[c] - leave[c]
        near_in, near_out = -np.inf, -np.inf
        for s in range(c + 1):
            near_in = max(near_in, entry[s] - (beyond_f[s] - leave[s]) + s * g)
            near_out = max(near_out, leave[s] - (beyond_b[s] - entry[s]) + s * g)
        both = near_in + near_out
        if spare < c:
            both = _constrained(entry, leave, beyond_b, beyond_f, g, c, spare)
        rounds = (spare - c) * g
        best = max(best, to_f + both + to_b + rounds)
        best = max(best, far_in - to_b + c * g + near_out + to_b + rounds)
        best = max(best, to_f + near_in + far_out - to_f + c * g + rounds)
        if spare + c > 0:
            best = max(best, far_in - to_b + far_out - to_f + 2 * c * g + rounds)
        far_in = max(far_in, beyond_b[c])
        far_out = max(far_out, beyond_f[c])
    return best


@njit(cache=True)
def _ladder_walk(
    f: np.ndarray,
    b: np.ndarray,
    entry: np.ndarray,
    leave: np.ndarray,
    hop: float,
    p: int,
    spare: int,
    sent: np.ndarray,
    free: np.ndarray,
) -> float:
    """The same pass by pass: step k runs (F, i) and (B, i) on every stage that has not left, k <= spare + i."""
    best = 0.0
    for k in range(spare + p):
        lowest, above = max(k - spare, 0), 0.0
        for i in range(p - 1, lowest - 1, -1):
            if k == 0:
                sent[i] = entry[i]
            else:
                sent[i] = max(free[i], sent[i - 1] + hop if i > 0 else 0.0) + f[i]
        for i in range(p - 1, lowest - 1, -1):
            begin = max(sent[i], above)
            if k == spare + i:
                best = max(best, begin + leave[i])
            free[i] = begin + b[i]
            above = free[i] + hop
    return best


@njit(cache=True)
def _constrained(
    entry: np.ndarray,
    leave: np.ndarray,
    beyond_b: np.ndarray,
    beyond_f: np.ndarray,
    g: float,
    c: int,
    spare: int,
) -> float:
    """Entry and exit below c where few micro-batches leave no round to spare: s + e >= c - spare must hold."""
    best, out, e = -np.inf, -np.inf, c + 1
    for s in range(c + 1):
        while e > max(c - spare - s, 0):
            e -= 1
            out = max(out, leave[e] - (beyond_b[e] - entry[e]) + e * g)
        best = max(best, entry[s] - (beyond_f[s] - leave[s]) + s * g + out)
    return best


@njit(cache=True)
def _slopes(f: np.ndarray, b: np.ndarray, w: np.ndarray, share: float, hop: float, p: int, out: np.ndarray) -> None:
    """Largest seconds a micro-batch of any round through each stage; `share` 1 counts w at the round's lower turn."""
    if hop == 0.0:
        for c in range(p):
            out[c] = f[c] + b[c] + share * w[c]
        return
    for c in range(p):
        out[c] = 0.0
    means = np.empty(p)
    for i in range(p):
        total = share * w[i] - 2.0 * hop
        for j in range(i, p):
            total += f[j] + b[j] + 2.0 * hop
            means[j] = total / (j - i + 1)
        widest = 0.0
        for j in range(p - 1, i - 1, -1):
            widest = max(widest, means[j])
            out[j] = max(out[j], widest)


@njit(cache=True)
def _walk(f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float, p: int, m: int, split: bool) -> float:
    """1F1B or ZB-H1 (split) pass by pass: at step k rank i runs F(k + p - 1 - i), B(k) and, split, W(k - i)."""
    scratch = np.zeros((2, p))
    sent, free = scratch[0], scratch[1]
    for k in range(1 - p, m):
        for i in range(p - 1, -1, -1):
            if 0 <= k + p - 1 - i < m:
                begin = free[i]
                if i > 0:
                    begin = max(begin, sent[i - 1] + hop)
                sent[i] = begin + f[i]
                free[i] = sent[i]
        if k < 0:
            continue
        above = 0.0
        for i in range(p - 1, -1, -1):
            above = max(free[i], above) + b[i]
            free[i] = above
            above += hop
            if not split:
                free[i] += w[i]
                above += w[i]
            elif k >= i:
                free[i] += w[i]
    span = 0.0
    for i in range(p):
        span = max(span, free[i] + (min(i, m) * w[i] if split else 0.0))
    return span


@njit(cache=True)
def _zb_h1(f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float, p: int, m: int) -> float:
    """The ladder, with w paid at each turn (B, i) -> (F, i). Entered after B(i, i), the last without a W before it."""
    if m < 2 * p:
        return _walk(f, b, w, hop, p, m, True)
    scratch = np.empty((5, p))
    entry, leave, slope = scratch[0], scratch[1], scratch[2]
    _zb_entry(f, b, hop, p, entry, scratch[3], scratch[4])
    _zb_leave(b, w, hop, p, leave)
    _slopes(f, b, w, 1.0, hop, p, slope)
    best = 0.0
    for c in range(p):
        g = slope[c]
        # Arrive in (B, c) from stages i >= c, or in (F, c) from i < c and turn; likewise for leaving.
        into, out, path_b = -np.inf, leave[c] + c * g, 0.0
        for i in range(c, p):
            into = max(into, entry[i] + path_b - i * g)
            path_b += b[i] + hop
        path_f = f[c]
        for i in range(c - 1, -1, -1):
            path_f += f[i] + hop
            into = max(into, entry[i] + w[i] + path_f + b[c] - (c + 1) * g)
        path_f = f[c]
        for e in range(c + 1, p):
            path_f += f[e] + hop
            out = max(out, w[c] + path_f + b[e] + leave[e] + (c - 1) * g)
        path_b = 0.0
        for e in range(c - 1, -1, -1):
            path_b += b[e] + hop
            out = max(out, path_b + leave[e] + e * g)
        best = max(best, into + out + (m - p) * g)
    return best


@njit(cache=True)
def _zb_entry(
    f: np.ndarray, b: np.ndarray, hop: float, p: int, entry: np.ndarray, sent: np.ndarray, free: np.ndarray
) -> None:
    """End of B(i, i) on each rank: 1F1B without weight gradients, from the end of the warm-up on."""
    total, slow = -hop, 0.0
    for i in range(p):
        total += f[i] + hop
        slow = max(slow, f[i])
        sent[i] = total + (p - 1 - i) * slow
        free[i] = sent[i]
    for k in range(p):
        above = 0.0
        if k > 0:
            for i in range(p - 1, k - 1, -1):
                sent[i] = max(free[i], sent[i - 1] + hop) + f[i]
        for i in range(p - 1, k - 1, -1):
            above = max(sent[i], above) + b[i]
            free[i] = above
            above += hop
        entry[k] = free[k]


@njit(cache=True)
def _zb_leave(b: np.ndarray, w: np.ndarray, hop: float, p: int, leave: np.ndarray) -> None:
    """Longest path after the last B that a forward precedes: p - 1 - e more of W, B at some stage, then r + 1 of W."""
    for e in range(p):
        path, slow, longest = 0.0, 0.0, 0.0
        for r in range(e, -1, -1):
            slow = max(slow, b[r] + w[r])
            longest = max(longest, path + (p - 1 - e) * slow + (r + 1) * w[r])
            if r > 0:
                path += b[r - 1] + hop
        leave[e] = longest


# -------------------------------------------------------------------------------------------------------- interleaved


@njit(cache=True)
def _interleaved(f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float, p: int, v: int, m: int) -> float:
    """Every rank runs forward t + (v-1) p + p-1-i and backward t - (p-1-i) at step t, each fed by step t - 1.

    That is a ring: what leaves rank p - 1 enters rank 0 for the next chunk one step later. At most WALKED_GROUPS groups
    of p micro-batches are walked; each further group adds the largest gain of a path that returns to its state.
    """
    if p == 1:
        hop = 0.0
    walked = min(m, WALKED_GROUPS * p)
    total, period = walked * v, p * v
    scratch = np.zeros((6, p))
    sent, free, cost_f, cost_b = scratch[0], scratch[1], scratch[2], scratch[3]
    back = b + w
    gain = 0.0
    for t in range(1 - period, total + p - 1):
        if walked < m:
            if t == p - 1:
                scratch[4:] = scratch[:2]
            elif t == p - 1 + period:
                gain = _group_gain(t, f, back, hop, p, v, scratch)
        low_f, low_b, high_b = max(t + period - total, 0), max(p - 1 - t, 0), min(total + p - 2 - t, p - 1)
        # Forwards: rank (t - 1) % p starts another chunk.
        if low_f < p:
            _start_chunk(t - 1 + period, f, p, v, False, cost_f)
        before = sent[p - 1] + hop
        if (t - 1 + period) // p % v == 0:  # rank 0 reads the model's input
            before = 0.0
        for i in range(min(low_f, p)):  # no forwards left
            before = sent[i] + hop
            sent[i] = free[i]
        for i in range(low_f, p):
            leaving = sent[i] + hop
            sent[i] = max(free[i], before) + cost_f[i]
            before = leaving
        # Backwards: rank p - 1 - t % p starts another chunk.
        if t < 0:
            for i in range(p):
                free[i] = sent[i]
            continue
        _start_chunk(t, back, p, v, True, cost_b)
        before = free[0] + hop
        if t // p % v == 0:  # rank p - 1 starts from the loss
            before = 0.0
        if high_b < p - 1:
            before = free[high_b + 1] + hop
        for i in range(high_b, low_b - 1, -1):
            leaving = free[i] + hop
            free[i] = max(sent[i], before) + cost_b[i]
            before = leaving
        for i in range(min(low_b, p)):  # no backwards yet
            free[i] = sent[i]
    return free.max() + (m - walked) // p * gain


@njit(cache=True)
def _start_chunk(t: int, seconds: np.ndarray, p: int, v: int, mirrored: bool, cost: np.ndarray) -> None:
    """One rank starts another chunk at each step: ranks in order, or mirrored with the last chunk first."""
    local, i = t // p % v, t % p
    if mirrored:
        cost[p - 1 - i] = seconds[(v - local) * p - 1 - i]
    else:
        cost[i] = seconds[local * p + i]


@njit(cache=True)
def _group_gain(t: int, f: np.ndarray, back: np.ndarray, hop: float, p: int, v: int, state: np.ndarray) -> float:
    """Seconds of a further group in the steady ring: the costliest rank's, or more where a path changes ranks.

    `state`: [6, p] as in `_interleaved`: now and, in its last two rows, a group before. No group gains more than the
    largest difference, so where that is the costliest rank's time the paths need not be searched.
    """
    busiest, gained = 0.0, 0.0
    for i in range(p):
        busy = 0.0
        for local in range(v):
            busy += f[local * p + i] + back[local * p + i]
        busiest = max(busiest, p * busy)
        gained = max(gained, state[0, i] - state[4, i], state[1, i] - state[5, i])
    if gained <= busiest * (1.0 + 1e-12):
        return busiest
    # Longest path from each state (column: sent of each rank, then free) to each state (row) over one group.
    sent, free = np.full((p + 1, 2 * p), -np.inf), np.full((p + 1, 2 * p), -np.inf)
    cost_f, cost_b = state[2].copy(), state[3].copy()
    for i in range(p):
        sent[i + 1, i] = 0.0  # row 0 of sent and row p of free: what comes around the ring
        free[i, p + i] = 0.0
    for step in range(t, t + p * v):
        _start_chunk(step - 1 + p * v, f, p, v, False, cost_f)
        _start_chunk(step, back, p, v, True, cost_b)
        open_f = hop if (step - 1 + p * v) // p % v != 0 else -np.inf
        open_b = hop if step // p % v != 0 else -np.inf
        for x in range(2 * p):
            sent[0, x] = sent[p, x] + open_f
            free[p, x] = free[0, x] + open_b
        for i in range(p, 0, -1):
            for x in range(2 * p):
                sent[i, x] = max(free[i - 1, x], sent[i - 1, x] + (hop if i > 1 else 0.0)) + cost_f[i - 1]
        for i in range(p):
            for x in range(2 * p):
                free[i, x] = max(sent[i + 1, x], free[i + 1, x] + (hop if i < p - 1 else 0.0)) + cost_b[i]
    for i in range(p):
        busiest = max(busiest, sent[i + 1, i], free[i, p + i])
    return busiest


@njit(cache=True)
def _dualpipe(f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float, p: int, m: int) -> float:
    """With both directions alike, rank p - 1 - i runs as rank i does, and the main step is a ladder of p / 2 stages.

    Stage h of the ladder has "forward" f[h] + (b + w)[p-1-h] (pair 0) and "backward" f[p-1-h] + (b + w)[h] (pair 1).
    """
    half = p // 2
    scratch = np.empty((8, half))
    ahead, back, entry, leave = scratch[0], scratch[1], scratch[2], scratch[3]
    for h in range(half):
        far = p - 1 - h
        ahead[h] = f[h] + (b[far] + w[far])
        back[h] = f[far] + (b[h] + w[h])
    _dualpipe_entry(f, b, w, hop, half, entry, scratch[4], scratch[5], scratch[6])
    _dualpipe_leave(f, b, w, hop, half, leave, scratch[4], scratch[5], scratch[6])
    back[half - 1] += hop  # the other middle rank's pair 0 feeds this rank's pair 1
    for h in range(half):
        leave[h] += back[h]
    return _ladder(ahead, back, entry, leave, hop, half, m // 2 - p, scratch[5:])


@njit(cache=True)
def _dualpipe_entry(
    f: np.ndarray,
    b: np.ndarray,
    w: np.ndarray,
    hop: float,
    half: int,
    entry: np.ndarray,
    free: np.ndarray,
    sent_f: np.ndarray,
    sent_b: np.ndarray,
) -> None:
    """End of the first pair 0 of step 4 on each rank: steps 1 to 3, pass by pass. Phases as in schedule.py."""
    p = 2 * half
    ends = np.empty((half, p))  # end of each phase-0 forward by rank and micro-batch
    for h in range(half):  # step 1
        now = 0.0
        for n in range(2 * (half - 1 - h)):
            now = max(now, ends[h - 1, n] + hop if h > 0 else 0.0) + f[h]
            ends[h, n] = now
        free[h] = now
    for j in range(half):  # step 2: ranks h >= j; sent_f holds the last phase-1 forward of each rank
        for h in range(j, half):
            n = 2 * (half - 1 - h) + j
            free[h] = max(free[h], ends[h - 1, n] + hop if h > 0 else 0.0) + f[h]
            ends[h, n] = free[h]
        above = ends[half - 1, j]
        for h in range(half - 1, j - 1, -1):
            above = max(free[h], above + hop) + f[p - 1 - h]
            free[h] = above
            sent_f[h] = above
    for j in range(half - 1):  # step 3: ranks h < half - 1 - j; sent_b holds the last phase-1 gradient of each rank
        below = -hop
        for h in range(half - 1 - j):
            far = p - 1 - h
            below = max(free[h], below + hop) + b[far]
            sent_b[h] = below
            sent_f[h] = max(below + w[far], sent_f[h + 1] + hop) + f[far]
            free[h] = sent_f[h]
    for h in range(half):  # the first pair 0; the middle rank runs it as two passes
        far = p - 1 - h
        ready_f, ready_b = 0.0, 0.0
        if h > 0:
            ready_f, ready_b = ends[h - 1, p - 1 - h] + hop, sent_b[h - 1] + hop
        begin = max(free[h], ready_f)
        if h == half - 1:
            entry[h] = max(begin + f[h], ready_b) + (b[far] + w[far])
        else:
            entry[h] = max(begin, ready_b) + f[h] + (b[far] + w[far])


@njit(cache=True)
def _dualpipe_leave(
    f: np.ndarray,
    b: np.ndarray,
    w: np.ndarray,
    hop: float,
    half: int,
    leave: np.ndarray,
    tail_1: np.ndarray,
    tail_0: np.ndarray,
    ranks: np.ndarray,
) -> None:
    """Longest path after the last pair 1 of step 4 on each rank: steps 8 to 5, pass by pass and backwards in time."""
    p = 2 * half
    last = np.empty((half, half))  # by rank: tail from each phase-0 gradient of step 7, then from the end of step 6
    for h in range(half):
        far, inner = p - 1 - h, half - 1 - h
        # The owed weight gradients in turn belong to step 6's passes h + 1 ... (odd: phase 0), then to step 7's.
        owed = 0.0
        for q in range(inner, inner + h + 1):  # step 8
            owed += w[far] if q <= h and (h + 1 + q) % 2 == 0 else w[h]
        for j in range(inner - 1, -1, -1):  # step 7
            if h > 0:
                owed = max(owed, hop + last[h - 1, j + 1])
            owed += b[h]
            last[h, j] = owed
            owed += w[far] if j <= h and (h + 1 + j) % 2 == 0 else w[h]
        ranks[h] = owed
    for i in range(half - 1, -1, -1):  # step 6: ranks h >= i; tail_1, tail_0 from the i-th gradient of each phase
        for h in range(i, half):
            far = p - 1 - h
            after = ranks[h] if i == h else tail_1[h]
            if h > 0:
                after = max(after, hop + (last[h - 1, 0] if i == h else tail_0[h - 1]))
            tail_0[h] = after + b[h] + (0.0 if 2 * i + 1 > h else w[h])
            after = tail_0[h]
            if h == half - 1:
                after += hop  # into the other middle rank
            else:
                after = max(after, hop + tail_1[h + 1])
            tail_1[h] = after + b[far] + (0.0 if 2 * i > h else w[far])
    for j in range(half - 2, -1, -1):  # step 5: ranks h <= half - 2 - j; tail_1 from backward 1, tail_0 from the pair
        for h in range(half - 2 - j, -1, -1):
            far = p - 1 - h
            after = tail_1[h]
            if h > 0:
                after = max(after, hop + tail_0[h - 1])
            tail_0[h] = after + f[far] + (b[h] + w[h])
        for h in range(half - 2 - j, -1, -1):
            far = p - 1 - h
            tail_1[h] = max(tail_0[h], hop + tail_1[h + 1]) + (b[far] + w[far])
    for h in range(half):
        leave[h] = max(tail_1[h], hop + tail_0[h - 1]) if h > 0 else tail_1[h]
