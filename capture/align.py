"""Puts the clocks of all ranks of a traced job on that of its first (dPRO, arXiv:2205.02473, section 4.2).

Unknown: theta_i, by which node i's clock must be moved; theta_0 = 0. In this order:
1. *Bounds* that messages and collectives put on differences (capture/traces/bounds.py): what is feasible at all.
2. *Minimum delay*: a message of a size takes d(size) on every link, and waits for the rest of its time. The offsets
   with the least sum of waits, none below zero: a linear program over the fastest message of each pair of nodes and
   size, and the likeliest offsets where waits are exponential. Robust, and the point where the objective below starts.
3. *The paper's objective*: a1 O1 + a2 O2 under the dependencies. O1: the variance of the seconds of alike RECVs, each
   clipped by its SEND, RECV.end + theta_j - max(RECV.start + theta_j, SEND.start + theta_i). The maximum makes it not
   convex: its branches are fixed, a quadratic program is solved, and that is repeated. O2: nodes of one machine share a
   clock. Each term is weighted by its own spread, so what is noisy moves little.
A trace with collectives only has no messages: it is aligned by *equal ends*, for all ranks of an all-reduce end
together: the least sum of distances to an end that is common (a median, deaf to a few late ranks).

Per node: offset, feasible interval, and whether the interval is narrow enough to mean anything. Neglects drift: bounds
that contradict each other are refused. The only door of cvxpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from capture.traces.bounds import Ends, Fastest, Messages, Reach, ends_of, fastest, messages_of, reach
from capture.traces.joined import join, missing_ranks
from capture.traces.records import RankTrace

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Alignment", "Mode", "align", "moved", "solve", "variance"]

ROUNDS = 4  # of fixing the branches: enough in trials, more changes nothing
SETTLED_S = 1e-9
UNDECIDED = 1e-9  # a pull to the start, far below what any message says
SAME_MACHINE_S = 1e-6  # how far clocks of one machine may be apart in O2 (an assumption: it is one clock)
MAX_SHARE = 1.5
"""A node is identifiable where its interval, per message that bounds it, is at most this many median transfers …"""
MAX_SPREAD = 0.25
"""… or, by equal ends, where half of its ends agree with the others' within this share of a median transfer."""
MAX_TERMS = 20_000  # of equal ends: more collectives say no more
MIN_SPREAD_S = 1e-6
US = 1e-6  # variables are microseconds from the start: solvers like numbers near 1


class Mode(Enum):
    """What the offsets were found from."""

    MESSAGES = "messages"
    EQUAL_ENDS = "equal ends"
    ONE_NODE = "one node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """[R] each: offset_s is added to a node's clock; [low_s, high_s] is feasible; identifiable: narrow enough.

    start_s: offsets by minimum delay (or by equal ends), before the paper's objective. transfer_s: the median transfer
    after alignment. rounds: quadratic programs solved.
    """

    mode: Mode
    ranks: tuple[int, ...]
    offset_s: np.ndarray
    low_s: np.ndarray
    high_s: np.ndarray
    identifiable: np.ndarray
    start_s: np.ndarray
    transfer_s: float
    rounds: int
    num_messages: int
    num_collectives: int


def align(traces: Sequence[RankTrace], *, same_machine: bool = True, solver: str = "CLARABEL") -> Alignment:
    """Offsets of all nodes. ValueError where ranks are missing, nothing joins them, or bounds contradict each other.

    same_machine: nodes that say they are of one machine share its clock (O2).
    """
    if lacking := missing_ranks(traces):
        told = ", ".join(map(str, lacking[:8])) + (" …" if len(lacking) > 8 else "")
        are = f"rank {told} is" if len(lacking) == 1 else f"ranks {told} are"
        raise ValueError(f"{traces[0].source}: clocks are aligned for all ranks, but {are} missing; import them too")
    events = join(traces)
    ranks = tuple(trace.rank for trace in events.traces)
    if len(ranks) == 1:
        zero = np.zeros(1)
        return Alignment(mode=Mode.ONE_NODE, ranks=ranks, offset_s=zero, low_s=zero, high_s=zero, start_s=zero,
                         identifiable=np.ones(1, np.bool_), transfer_s=0.0, rounds=0, num_messages=0,
                         num_collectives=0)  # fmt: skip
    messages, ends = messages_of(events), ends_of(events)
    if not len(messages) and not len(ends.end_s):
        raise ValueError(
            f"{events.traces[0].source}: clocks are aligned by transfers between ranks, but there are none; record "
            "communication too"
        )
    machines = [trace.machine for trace in events.traces] if same_machine else [None] * len(ranks)
    return solve(ranks, messages, ends, machines, solver=solver)


def solve(
    ranks: tuple[int, ...], messages: Messages, ends: Ends, machines: Sequence[str | None], *, solver: str = "CLARABEL"
) -> Alignment:
    """Offsets from what was observed; `align` does it for traces."""
    found = reach(len(ranks), messages, ends)
    rounds, agree = 0, np.full(len(ranks), np.inf)
    if len(messages):
        fast = fastest(messages)
        start = _by_minimum_delay(len(ranks), fast, found, solver)
        offset, rounds = _by_objective(start, messages, fast, found, machines, solver)
        transfer_s = float(np.median(_clipped(messages, offset)[0]))
    else:
        offset = start = _by_equal_ends(ends, found, machines, solver)
        late = np.nanmax(ends.start_s + offset, axis=1)[:, None]
        transfer_s = float(np.nanmedian(np.maximum(ends.end_s + offset - late, 0.0)))
        apart = ends.end_s + offset
        agree = np.nanmedian(np.abs(apart - np.nanmedian(apart, axis=1, keepdims=True)), axis=0)
    low, high = 0.0 - found.upper_s[0], found.upper_s[:, 0]
    hops = np.maximum(found.hops[0] + found.hops[:, 0], 1)
    with np.errstate(invalid="ignore"):
        narrow = ((high - low) / hops <= MAX_SHARE * transfer_s) | (agree <= MAX_SPREAD * transfer_s)
    narrow[0] = True
    return Alignment(
        mode=Mode.MESSAGES if len(messages) else Mode.EQUAL_ENDS, ranks=ranks, offset_s=offset, low_s=low, high_s=high,
        identifiable=narrow, start_s=start, transfer_s=transfer_s, rounds=rounds, num_messages=len(messages),
        num_collectives=len(ends.end_s),
    )  # fmt: skip


def moved(traces: Sequence[RankTrace], alignment: Alignment) -> tuple[RankTrace, ...]:
    """The traces on the first rank's clock, in order of rank; each notes by how much it was moved."""
    out = []
    for trace, offset, low, high, sure in zip(
        sorted(traces, key=lambda trace: trace.rank), alignment.offset_s.tolist(), alignment.low_s.tolist(),
        alignment.high_s.tolist(), alignment.identifiable.tolist(), strict=True,
    ):  # fmt: skip
        told = "" if sure else "; its interval is too wide to identify it"
        interval = f"{low * 1e6:+.1f} to {high * 1e6:+.1f} us"
        note = f"clock of rank {trace.rank} moved by {offset * 1e6:+.1f} us, feasible {interval}{told}"
        notices = tuple(n for n in trace.notices if not n.startswith(f"clock of rank {trace.rank} moved"))
        out.append(replace(trace, epoch_ns=trace.epoch_ns + round(offset * 1e9), notices=(*notices, note)))
    return tuple(out)


def _cvxpy() -> ModuleType:
    try:
        import cvxpy
    except ImportError as error:
        raise ValueError("alignment needs cvxpy, which is not installed; pip install 'trainspace[align]'") from error
    return cvxpy


def _by_minimum_delay(num: int, fast: Fastest, found: Reach, solver: str) -> np.ndarray:
    """The offsets [R] with which messages wait least, where fastest = d(size) + theta_i - theta_j + wait.

    Least squares without waits come first, for numbers near 1. What no message decides stays as small as can be.
    """
    rows, num_sizes = np.arange(len(fast.seconds)), int(fast.size.max(initial=0)) + 1
    matrix = np.zeros((len(rows), num + num_sizes))
    matrix[rows, fast.source] += 1.0
    matrix[rows, fast.target] -= 1.0
    matrix[rows, num + fast.size] = 1.0
    square = matrix[:, 1:].T @ matrix[:, 1:]  # a start needs no more digits than the normal equations keep
    solution = np.linalg.lstsq(square, matrix[:, 1:].T @ fast.seconds, rcond=None)[0]
    start = np.concatenate([[0.0], solution[: num - 1]])

    cp = _cvxpy()
    moves, sizes = cp.Variable(num), cp.Variable(num_sizes, nonneg=True)
    apart = (fast.seconds - start[fast.source] + start[fast.target]) / US
    waits = apart - sizes[fast.size] - moves[fast.source] + moves[fast.target]
    share = fast.count / fast.count.sum()
    limits = [waits >= 0.0, moves[0] == 0.0, *_limits(moves, start, found)]
    _solve(cp, cp.sum(cp.multiply(share, waits)) + UNDECIDED * cp.sum_squares(moves), limits, solver)
    offset = start + US * np.asarray(moves.value, dtype=np.float64)
    return offset - offset[0]


def _clipped(messages: Messages, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of each RECV with its start clipped by its SEND, and whether the SEND was later, [P] each."""
    apart = offset[messages.source] - offset[messages.target]
    late = messages.sent_s + apart > messages.posted_s
    start = np.where(late, messages.sent_s + apart, messages.posted_s)
    return messages.end_s - start, late


def _by_objective(
    start: np.ndarray, messages: Messages, fast: Fastest, found: Reach, machines: Sequence[str | None], solver: str
) -> tuple[np.ndarray, int]:
    """The paper's objective from a start that holds as well as minima are known, branch by branch: offsets, rounds."""
    cp = _cvxpy()
    moves = cp.Variable(len(start))  # from the start
    fixed = [cp.sum_squares(cp.multiply(US / fast.spread_s, moves[fast.source] - moves[fast.target]))]
    fixed += _machine_terms(cp, moves, start, machines)
    limits = [moves[0] == 0.0, *_limits(moves, start, found)]
    offset, rounds = start, 0
    while rounds < ROUNDS:
        mine, other, weight, wanted = variance(messages, offset)
        terms = list(fixed)
        if len(mine):
            apart = (wanted - start[other] + start[mine]) / US
            terms.append(cp.sum_squares(cp.multiply(US * np.sqrt(weight), moves[other] - moves[mine] - apart)))
        _solve(cp, sum(terms), limits, solver)
        before, offset = offset, start + US * np.asarray(moves.value, dtype=np.float64)
        rounds += 1
        if np.abs(offset - before).max() < SETTLED_S:
            break
    return offset - offset[0], rounds


def variance(messages: Messages, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """O1 with its branches fixed, as sum of weight (theta_target - theta_source - wanted)^2: source, target, weight,
    wanted, one per family that has messages of both branches.

    With x_k = c_k + b_k delta (b_k = 1 where the SEND was later), sum (x_k - mean x)^2 = A (delta + B / A)^2 + C where
    A = sum (b_k - mean b)^2 and B = sum (b_k - mean b) (c_k - mean c). Divided by the family's variance at `offset`.
    """  # noqa: D205 - one sentence
    seconds, late = _clipped(messages, offset)
    b = late.astype(np.float64)
    c = np.where(late, messages.end_s - messages.sent_s, messages.end_s - messages.posted_s)
    delta = offset[messages.target] - offset[messages.source]
    num = int(messages.family.max(initial=-1)) + 1
    count = np.maximum(np.bincount(messages.family, minlength=num), 1)

    def centred(values: np.ndarray) -> np.ndarray:
        return values - (np.bincount(messages.family, weights=values, minlength=num) / count)[messages.family]

    # c is large where clocks are far apart; relative to the present delta it is seconds of a transfer.
    b_, c_ = centred(b), centred(c + b * delta)
    a = np.bincount(messages.family, weights=b_ * b_, minlength=num)
    cross = np.bincount(messages.family, weights=b_ * c_, minlength=num)
    spread = np.bincount(messages.family, weights=centred(seconds) ** 2, minlength=num) / np.maximum(count - 1, 1)
    mixed = np.flatnonzero(a > 0.0)
    first = np.zeros(num, dtype=np.int64)
    first[messages.family[::-1]] = np.arange(len(messages))[::-1]
    at = first[mixed]
    usual = float(np.median(spread[mixed])) if len(mixed) else 0.0  # a small family may look exact by chance
    weight = a[mixed] / np.maximum(np.maximum(spread[mixed], usual), MIN_SPREAD_S**2)
    return messages.source[at], messages.target[at], weight, delta[at] - cross[mixed] / a[mixed]


def _machine_terms(cp: Any, moves: Any, start: np.ndarray, machines: Sequence[str | None]) -> list[Any]:
    """O2: distance of each node's offset from the mean of its machine."""
    terms = []
    for machine in dict.fromkeys(machine for machine in machines if machine is not None):
        mine = [i for i, of in enumerate(machines) if of == machine]
        if len(mine) > 1:
            theta = moves[mine] + start[mine] / US
            terms.append(cp.sum_squares(theta - cp.sum(theta) / len(mine)) * (US / SAME_MACHINE_S) ** 2)
    return terms


def _limits(moves: Any, start: np.ndarray, found: Reach) -> list[Any]:
    """Dependencies: no message is there before it was sent. Only bounds that no path of others implies are given."""
    i, j = np.nonzero(np.isfinite(found.upper_s) & (found.hops == 1))
    return [moves[i] - moves[j] <= (found.upper_s[i, j] - start[i] + start[j]) / US] if len(i) else []


def _by_equal_ends(ends: Ends, found: Reach, machines: Sequence[str | None], solver: str) -> np.ndarray:
    """Offsets with the least sum of distances between the ends of ranks and a common end of each collective."""
    cp = _cvxpy()
    step = max(1, -(-ends.end_s.size // MAX_TERMS))
    end = ends.end_s[::step]
    start = -np.nanmedian(end - end[:, :1], axis=0) if not np.isnan(end[:, 0]).any() else np.zeros(end.shape[1])
    start = np.nan_to_num(start)
    middle = np.nanmedian(end + start, axis=1, keepdims=True)
    which, node = np.nonzero(~np.isnan(end))
    moves, common = cp.Variable(end.shape[1]), cp.Variable(len(end))
    apart = moves[node] - common[which] + ((end + start - middle) / US)[which, node]
    terms = [cp.norm1(apart), *_machine_terms(cp, moves, start, machines)]
    _solve(cp, sum(terms), [moves[0] == 0.0, *_limits(moves, start, found)], solver)
    offset = start + US * np.asarray(moves.value, dtype=np.float64)
    return offset - offset[0]


def _solve(cp: Any, objective: Any, limits: list[Any], solver: str) -> None:
    if solver not in cp.installed_solvers():
        have = ", ".join(cp.installed_solvers())
        raise ValueError(f"a solver must be one that is installed, but {solver!r} is not; have {have}")
    problem = cp.Problem(cp.Minimize(objective), limits)
    try:
        problem.solve(solver=solver)
    except cp.error.SolverError as error:
        raise ValueError(f"{solver} must find offsets, but failed ({error}); try another --solver") from error
    if problem.status not in ("optimal", "optimal_inaccurate"):
        raise ValueError(f"{solver} must find offsets, but says {problem.status}; try another --solver")
