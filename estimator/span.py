# mypy: disallow-untyped-decorators=False
"""How long a pipeline takes, fast: the longest path through each schedule's order, without walking the order.

The truth is `schedule.simulate(schedule.order(...), ...)`; these forms are called tens of millions of times in a
search. Letters as in schedule.py: p ranks, v chunks a rank, m micro-batches; f, b, w: [C] seconds of a micro-batch on
each model chunk (forward, input gradient with recompute, weight gradient); hop: latency of an edge between ranks.

How. Between warm-up and cool-down 1F1B, ZB-H1 and DualPipe are one *ladder*: a path is a walk on states (F, i), (B, i)
with moves (F, i) -> (F, i+1), (F, i) -> (B, i), (B, i) -> (B, i-1), (B, i) -> (F, i), and m fixes the number of moves
between an entry and an exit. A walk is a simple path plus rounds; with hop = 0 every round splits into rounds
(F, c) (B, c) of one stage, so the best walk spends all of them at the costliest stage c it visits. The span is the
maximum over c, entry and exit of entry + rounds * lambda_c + exit. Entries and exits are closed forms or recurrences
over about p^2 / 2 passes. Interleaved schedules are a ring, of which a few groups of p micro-batches are walked.
Nothing grows with m.

Exact (to rounding) for any f, b, w, equal or not:
- GPipe with any hop;
- 1F1B, ZB-H1 and DualPipe at hop = 0; with any hop where they are walked pass by pass: 1F1B at m < p + WALKED_ROUNDS,
  ZB-H1 at m < 2p, DualPipe at m < 2p + 2 WALKED_ROUNDS;
- interleaved on equal stages, and on any stages where m is no more than is walked (3 groups at v >= 4, 8 at v = 1).

Elsewhere, worst error over some thousand shapes (p up to 16) with times 0.5 to 2 drawn per chunk, or b in [1, 2.5] f,
w in [0.5, 1] f and heavy first and last stages, hop up to 0.2 f: 1F1B 0.7 %, ZB-H1 0.01 %, DualPipe 0.2 % (with
hop > 0 lambda_c is the largest mean of any round through c, as if rounds could be cut anywhere); interleaved 1.3 %,
1.7 % at v = 1 (paths that have not reached the costliest rank in the groups walked, or take two groups to return).

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

UNREACHED: Final = -1e300
"""Longest path to a state that no path reaches."""

NO_NAN: Final = {"nnan", "nsz"}
"""Lets maxima run as vector instructions; sums keep their order, so results do not change."""

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


@njit(cache=True, fastmath=NO_NAN)
def _gpipe(f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float, p: int, m: int) -> float:
    """Two flow shops in a row: all stages once, and the slowest m - 1 times more, forward and backward."""
    total, slow_f, slow_b = 2.0 * hop * (p - 1), 0.0, 0.0
    for i in range(p):
        total += f[i] + (b[i] + w[i])
        slow_f = max(slow_f, f[i])
        slow_b = max(slow_b, b[i] + w[i])
    return total + (m - 1) * (slow_f + slow_b)


@njit(cache=True, fastmath=NO_NAN)
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


@njit(cache=True, fastmath=NO_NAN)
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
    slope, path_f, path_b = scratch[0], scratch[1], scratch[2]  # path_*[c]: from stage 0 to c
    _slopes(f, b, f, 0.0, hop, p, slope)
    sum_f, sum_b = -hop, -hop
    for c in range(p):
        sum_f += f[c] + hop
        sum_b += b[c] + hop
        path_f[c], path_b[c] = sum_f, sum_b
    far_in, far_out, best = -np.inf, -np.inf, 0.0  # over stages beyond c: enter and come back to c, leave c and turn
    for c in range(p - 1, -1, -1):
        g = slope[c]
        near_in, near_out = -np.inf, -np.inf
        for s in range(c + 1):
            near_in = max(near_in, entry[s] - path_f[s] + s * g)
            near_out = max(near_out, leave[s] - path_b[s] + s * g)
        both = near_in + near_out
        if spare < c:
            both = _constrained(entry, leave, path_f, path_b, g, c, spare)
        best = max(best, path_f[c] + both + path_b[c] + (spare - c) * g)
        best = max(best, far_in + near_out + spare * g)
        best = max(best, near_in + far_out + spare * g)
        if spare + c > 0:
            best = max(best, far_in - path_b[c] + far_out - path_f[c] + (spare + c) * g)
        far_in = max(far_in, entry[c] + path_b[c])
        far_out = max(far_out, leave[c] + path_f[c])
    return best


@njit(cache=True, fastmath=NO_NAN)
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


@njit(cache=True, fastmath=NO_NAN)
def _constrained(
    entry: np.ndarray,
    leave: np.ndarray,
    path_f: np.ndarray,
    path_b: np.ndarray,
    g: float,
    c: int,
    spare: int,
) -> float:
    """Entry and exit below c where few micro-batches leave no round to spare: s + e >= c - spare must hold."""
    best, out, e = -np.inf, -np.inf, c + 1
    for s in range(c + 1):
        while e > max(c - spare - s, 0):
            e -= 1
            out = max(out, leave[e] - path_b[e] + e * g)
        best = max(best, entry[s] - path_f[s] + s * g + out)
    return best


@njit(cache=True, fastmath=NO_NAN)
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


@njit(cache=True, fastmath=NO_NAN)
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


@njit(cache=True, fastmath=NO_NAN)
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


@njit(cache=True, fastmath=NO_NAN)
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


@njit(cache=True, fastmath=NO_NAN)
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


@njit(cache=True, fastmath=NO_NAN)
def _interleaved(f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float, p: int, v: int, m: int) -> float:
    """Every rank runs forward t + (v-1) p + p-1-i and backward t - (p-1-i) at step t, each fed by step t - 1.

    That is a ring: what leaves rank p - 1 enters rank 0 for the next chunk one step later. Some groups of p
    micro-batches are walked; each further group adds the largest gain of a path that returns to its state.
    """
    if p == 1:
        hop = 0.0
    # Long enough for a path to reach the costliest rank from any other: in steps, and in micro-batches for small p.
    walked = min(m, max(2 + max(6 // v, 1), (15 + p) // p) * p)
    total, period = walked * v, p * v
    late = total - period  # every rank still has forwards and backwards
    state = np.zeros((6, p))
    sent, free, cost_f, cost_b = state[0], state[1], state[2], state[3]
    gain = 0.0
    at_f = at_b = local_f = local_b = 0  # which rank starts another chunk at this step, forwards and backwards
    for t in range(1 - period, total + p - 1):
        if t == 0:
            free[:] = sent
        if walked < m:
            if t == late - period:
                state[4, :] = sent
                state[5, :] = free
            elif t == late:
                gain = _group_gain(f, b, w, hop, p, v, local_f, at_f, local_b, at_b, state)
        # Forwards: fed around the ring but for the model's input. Ranks below low_f have none left.
        low_f = t + period - total
        if low_f < p:
            before = sent[p - 1] + hop if local_f > 0 else 0.0
            cost_f[at_f] = f[local_f * p + at_f]
            at_f, local_f = _next_chunk(at_f, local_f, p, v)
            last = sent if t < 0 else free
            if low_f <= 0:
                for i in range(p):
                    leaving = sent[i] + hop
                    sent[i] = max(last[i], before) + cost_f[i]
                    before = leaving
            else:
                for i in range(p - 1, low_f - 1, -1):
                    sent[i] = max(last[i], sent[i - 1] + hop) + cost_f[i]
                for i in range(low_f):
                    sent[i] = free[i]
        if t < 0:
            continue
        # Backwards: fed around the ring but for the loss. Ranks below low_b have none yet, above high_b none left.
        before = free[0] + hop if local_b > 0 else 0.0
        chunk = (v - local_b) * p - 1 - at_b
        cost_b[p - 1 - at_b] = b[chunk] + w[chunk]
        at_b, local_b = _next_chunk(at_b, local_b, p, v)
        last = sent if low_f < p else free
        low_b, high_b = max(p - 1 - t, 0), min(total + p - 2 - t, p - 1)
        if low_b == 0 and high_b == p - 1:
            for i in range(p - 1):
                free[i] = max(last[i], free[i + 1] + hop) + cost_b[i]
        else:
            for i in range(low_b):
                free[i] = sent[i]
            for i in range(low_b, min(high_b, p - 2) + 1):
                free[i] = max(last[i], free[i + 1] + hop) + cost_b[i]
        if high_b == p - 1:
            free[p - 1] = max(last[p - 1], before) + cost_b[p - 1]
    span = 0.0
    for i in range(p):
        span = max(span, free[i])
    return span + (m - walked) // p * gain


@njit(cache=True, inline="always")
def _next_chunk(at: int, local: int, p: int, v: int) -> tuple[int, int]:
    """Which rank starts another chunk at the next step, and its number there: one rank a step, in turn."""
    if at + 1 < p:
        return at + 1, local
    return 0, (local + 1 if local + 1 < v else 0)


@njit(cache=True, fastmath=NO_NAN)
def _group_gain(
    f: np.ndarray,
    b: np.ndarray,
    w: np.ndarray,
    hop: float,
    p: int,
    v: int,
    local_f: int,
    at_f: int,
    local_b: int,
    at_b: int,
    state: np.ndarray,
) -> float:
    """Seconds of a further group in the steady ring: the costliest rank's, or more where a path changes ranks.

    `state`: [6, p] as in `_interleaved`: now and, in its last two rows, a group before. No later group gains more than
    the largest difference, so where that is the costliest rank's time the paths need not be searched.
    """
    busiest, gained = 0.0, 0.0
    for i in range(p):
        busy = 0.0
        for local in range(v):
            busy += f[local * p + i] + b[local * p + i] + w[local * p + i]
        busiest = max(busiest, p * busy)
        gained = max(gained, max(state[0, i] - state[4, i], state[1, i] - state[5, i]))
    if gained <= busiest * (1.0 + 1e-12):
        return busiest
    # Longest path from each state (column: sent of each rank, then free) to each state (row) over one group.
    sent, free = np.full((p + 1, 2 * p), UNREACHED), np.full((p + 1, 2 * p), UNREACHED)
    cost_f, cost_b = state[2].copy(), state[3].copy()
    for i in range(p):
        sent[i + 1, i] = 0.0  # row 0 of sent and row p of free: what comes around the ring
        free[i, p + i] = 0.0
    for _ in range(p * v):
        open_f, open_b = hop if local_f > 0 else UNREACHED, hop if local_b > 0 else UNREACHED
        cost_f[at_f] = f[local_f * p + at_f]
        at_f, local_f = _next_chunk(at_f, local_f, p, v)
        chunk = (v - local_b) * p - 1 - at_b
        cost_b[p - 1 - at_b] = b[chunk] + w[chunk]
        at_b, local_b = _next_chunk(at_b, local_b, p, v)
        for x in range(2 * p):
            sent[0, x] = sent[p, x] + open_f - hop
            free[p, x] = free[0, x] + open_b - hop
        for i in range(p, 0, -1):
            cost = cost_f[i - 1]
            for x in range(2 * p):
                sent[i, x] = max(free[i - 1, x], sent[i - 1, x] + hop) + cost
        for i in range(p):
            cost = cost_b[i]
            for x in range(2 * p):
                free[i, x] = max(sent[i + 1, x], free[i + 1, x] + hop) + cost
    for i in range(p):
        busiest = max(busiest, max(sent[i + 1, i], free[i, p + i]))
    return busiest


@njit(cache=True, fastmath=NO_NAN)
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


@njit(cache=True, fastmath=NO_NAN)
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


@njit(cache=True, fastmath=NO_NAN)
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
