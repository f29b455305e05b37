# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
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

`pipeline_spans` takes WIDTH candidates that share p, v, m and hop at once; `pipeline_span` is one of its lanes.
Ladders are in span_ladder.py, the ring in span_ring.py, DualPipe's entries and exits in span_dualpipe.py.

Other schedules have no form of their own: their orders are compiled to programs and walked (program.py).

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

import numpy as np

from estimator.jit import kernel, njit
from estimator.lanes import WIDTH, fill, first, larger, load, splat
from estimator.program import Program, program
from estimator.span_codes import CODES, DUALPIPE, GPIPE, INTERLEAVED, ONE_F_ONE_B, ZB_H1
from estimator.span_dualpipe import dualpipe
from estimator.span_ladder import one_f_one_b, zb_h1
from estimator.span_program import program_rows, walk
from estimator.span_ring import interleaved
from estimator.strategy import Schedule

__all__ = ["CODES", "alone_passes", "in_flight_peak", "owed_peak", "pipeline_span", "pipeline_spans", "scratch_rows"]


@kernel
def pipeline_spans(code, f, b, w, alone_f, alone_b, hop, p, v, m, x):
    """Seconds from the first forward to the last backward in every lane (lanes.py).

    (p, v, m) must pass `check_conditions`. f, b, w: [C, WIDTH]; alone_f, alone_b: the same where no pass of another
    micro-batch runs beside it, which matters where passes run in pairs; x: scratch [scratch_rows(p), WIDTH].
    """
    if code == GPIPE:
        return _gpipe(f, b, w, hop, p, m)
    if code == ONE_F_ONE_B:
        if p == 1:
            return (
                load(alone_f, 0) + float(m - 1) * (load(f, 0) + load(b, 0) + load(w, 0)) + load(alone_b, 0) + load(w, 0)
            )
        return one_f_one_b(f, b, w, hop, p, m, x)
    if code == INTERLEAVED:
        return interleaved(f, b, w, alone_f, alone_b, hop, p, v, m, x)
    if code == ZB_H1:
        return zb_h1(f, b, w, hop, p, m, x)
    return dualpipe(f, b, w, alone_f, alone_b, hop, p, m, x)


@kernel
def scratch_rows(p):
    """Rows of lanes that any schedule needs on p ranks: DualPipe's p / 2 entries of p passes, and some vectors of p."""
    return (p // 2 + 12) * p + 2


def pipeline_span(
    schedule: Schedule, f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float, p: int, v: int, m: int,
    alone_f: np.ndarray, alone_b: np.ndarray, group: int = 0,
) -> float:  # fmt: skip
    """Makespan of one candidate under any schedule. f, b, w, alone_f, alone_b: [C]."""
    made = program(schedule, p, v, m, group)
    return float(_one_span(CODES[schedule], f, b, w, hop, p, v, m, alone_f, alone_b, made))


@njit(cache=True)
def _one_span(schedule_code, f, b, w, hop, p, v, m, alone_f, alone_b, made):
    num = f.size
    x = np.empty((5 * num + max(scratch_rows(p), program_rows(made)), WIDTH))
    for i, values in enumerate((f, b, w, alone_f, alone_b)):
        fill(values, x[i * num : (i + 1) * num])
    rows, rest = x[: 5 * num], x[5 * num :]
    if made.steps.shape[0] > 0:
        return first(walk(made, rows, hop, p, m, rest))
    return first(
        pipeline_spans(
            schedule_code, rows[:num], rows[num : 2 * num], rows[2 * num : 3 * num], rows[3 * num : 4 * num],
            rows[4 * num :], hop, p, v, m, rest,
        )
    )  # fmt: skip


@kernel
def alone_passes(schedule_code: int, p: int, v: int, m: int, made: Program, out: np.ndarray) -> None:
    """Fill `out` [2, p, local] with the forwards and the backwards that no pass of another micro-batch runs beside.

    Where passes run in pairs: interleaved with one more forward ahead, DualPipe, and 1F1B on one rank. `made`: the
    program of a schedule without a closed form, which knows such numbers itself.
    """
    out[:] = 0.0
    for i in range(p):
        if made.told.shape[0] > 0:
            for local in range(out.shape[2]):
                out[0, i, local], out[1, i, local] = made.told[i, 4, local], made.told[i, 5, local]
        elif schedule_code == INTERLEAVED:
            # The first forwards, a warm-up and one, and as many of the last backwards: of the same chunks.
            rounds, rest = divmod(min(2 * (p - 1 - i) + (v - 1) * p + 1, m * v), p * v)
            for local in range(v):
                out[:, i, local] = rounds * p + min(max(rest - local * p, 0), p)
        elif schedule_code == DUALPIPE:
            near = 0 if i < p // 2 else 1
            depth = min(i, p - 1 - i)
            inner = p // 2 - 1 - depth
            middle = 1 if inner == 0 else 0  # the middle ranks run the first pair as two passes
            out[0, i, near] = 2 * inner + depth + 1 + middle
            out[0, i, 1 - near] = inner + depth + 1
            out[1, i, near] = inner + depth + 1
            out[1, i, 1 - near] = 2 * inner + depth + 1 + middle
        elif p == 1:
            out[:, i, 0] = 1.0


@kernel
def owed_peak(schedule_code: int, p: int, m: int, made: Program, out: np.ndarray) -> None:
    """Fill `out` [2, p, local]: micro-batches in flight, and weight gradients owed, when a rank first owes most.

    Rank i of ZB-H1 owes i, and one more before it pays; DualPipe the split half of step 6, on the end ranks no more
    than step 3 (schedule.py). Zero where backwards are whole.
    """
    out[:] = 0.0
    for i in range(p):
        if made.told.shape[0] > 0:
            for local in range(out.shape[2]):
                out[0, i, local], out[1, i, local] = made.told[i, 2, local], made.told[i, 3, local]
        elif schedule_code == ZB_H1:
            out[0, i, 0] = max(min(m, p) - 1 - min(i, m - 1), 0)
            out[1, i, 0] = min(i + 1, m)
        elif schedule_code == DUALPIPE:
            near = 0 if i < p // 2 else 1
            depth = min(i, p - 1 - i)
            if depth == 0 and p > 2:
                out[0, i, near], out[1, i, 1 - near] = p - 1, 1
            else:
                out[0, i, near] = p // 2 - 1 - depth
                out[1, i, near], out[1, i, 1 - near] = depth // 2 + 1, depth - depth // 2


@kernel
def in_flight_peak(schedule_code: int, p: int, v: int, m: int, made: Program, out: np.ndarray) -> None:
    """Fill `out` [p, local] with the micro-batches alive when a rank first holds most: `schedule.in_flight`, closed."""
    for i in range(p):
        if made.told.shape[0] > 0:
            for local in range(out.shape[1]):
                out[i, local] = made.told[i, 0, local] + float(m - made.walked) * made.told[i, 1, local]
        elif schedule_code == GPIPE:
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


@kernel
def _gpipe(f, b, w, hop, p, m):
    """Two flow shops in a row: all stages once, and the slowest m - 1 times more, forward and backward."""
    total, slow_f, slow_b = splat(2.0 * hop * float(p - 1)), splat(0.0), splat(0.0)
    for i in range(p):
        full = load(b, i) + load(w, i)
        total = total + (load(f, i) + full)
        slow_f = larger(slow_f, load(f, i))
        slow_b = larger(slow_b, full)
    return total + float(m - 1) * (slow_f + slow_b)
