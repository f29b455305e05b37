"""What a tuner may decide about a job, and the same job with that decided.

Letters: K computes of the job, G gradients, W workers; E elements, what a worker runs once micro-batches and what is
computed again are laid out; a *join* k says that k and k + 1 go together. Decides nothing itself.

Assumed: a micro-batch of 1/a takes 1/a of the seconds beyond a launch, and keeps 1/a; mixed precision halves seconds
beyond a launch, bytes kept and gradients, and leaves the update as it is. A segment that is computed again keeps its
last output and runs, before its first backward operation, what comes before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from capture.traces.synthesise import Bucket, Gradient, Job
from estimator.tasks import Category

__all__ = ["Decisions", "Laid", "Segment", "apart", "bucket_starts", "buckets_of", "fused", "fusible", "lay",
           "segments"]  # fmt: skip

HALF = 0.5
WHOLE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decisions:
    """ops [K - 1], tensors [G - 1] bool: joins of computes, and of gradients into buckets.

    part_bytes: of every bucket, infinity: whole, None: the number of parts that synchronises each bucket fastest.
    parts: of each bucket by itself, where given. recompute: segments. accumulate: micro-batches of an update. cycle_s:
    buckets leave at multiples of it, 0: at once.
    """

    ops: np.ndarray
    tensors: np.ndarray
    part_bytes: float | None = None
    recompute: frozenset[int] = frozenset()
    accumulate: int = 1
    mixed: bool = False
    cycle_s: float = 0.0
    parts: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal decisions."""
        return (*self.layout, self.ops.tobytes(), self.tensors.tobytes(), self.part_bytes, self.cycle_s, self.parts)

    @property
    def layout(self) -> tuple[frozenset[int], int, bool]:
        """What decides the elements, before any are joined."""
        return self.recompute, self.accumulate, self.mixed

    def with_op(self, k: int, joined: bool = True) -> Decisions:
        """With one join of computes set or undone."""
        ops = self.ops.copy()
        ops[k] = joined
        return replace(self, ops=ops)

    def with_tensor(self, j: int, joined: bool = True) -> Decisions:
        """With one join of gradients set or undone."""
        tensors = self.tensors.copy()
        tensors[j] = joined
        return replace(self, tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Forward computes first ... last that may be computed again, before compute `behind`; `name`: their module."""

    name: str
    first: int
    last: int
    behind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """E elements in order: the job's computes, once per micro-batch, and what is computed again.

    job: theirs, unfused. origin [E]: the compute, -1 of what is computed again. spent_s [W, E]: seconds with lags.
    joinable, saves_s [E - 1]: whether an element and the next may run as one, and what that saves. maker [G]: the
    element that makes a gradient for the last time; nbytes [G].
    """

    job: Job
    origin: np.ndarray
    spent_s: np.ndarray
    joinable: np.ndarray
    saves_s: np.ndarray
    maker: np.ndarray
    nbytes: np.ndarray


def apart(job: Job, *, part_bytes: float | None = WHOLE) -> Decisions:
    """Nothing fused: each compute alone, each gradient its own bucket."""
    return Decisions(
        ops=np.zeros(len(job.names) - 1, np.bool_), tensors=np.zeros(max(len(job.gradients) - 1, 0), np.bool_),
        part_bytes=part_bytes,
    )  # fmt: skip


def fusible(job: Job) -> np.ndarray:
    """[K - 1] bool: joins that are allowed: within one pass, forward or backward, where it is known what they save."""
    phases = (Category.FORWARD, Category.BACKWARD)
    kinds = np.array([phases.index(c) if c in phases else -1 - k for k, c in enumerate(job.category)])
    saves = np.full(len(kinds), np.nan) if job.saves_s is None else job.saves_s
    found: np.ndarray = (kinds[:-1] == kinds[1:]) & ~np.isnan(saves[:-1])
    found[max(job.waits - 1, 0) :] = False
    return found


def segments(job: Job) -> tuple[Segment, ...]:
    """What may be computed again: runs of forward computes of one module, or of about the root of their number.

    A module is a name up to its last dot. A run of one compute would save nothing: its output is kept.
    """
    forward = [k for k, c in enumerate(job.category[: job.waits]) if c is Category.FORWARD]
    runs: list[list[int]] = []
    for k in forward:
        module = _module(job.names[k])
        head = _module(job.names[runs[-1][0]]) if runs else ""
        if head and runs[-1][-1] == k - 1 and f"{module}.".startswith(f"{head}."):
            runs[-1].append(k)
        else:
            runs.append([k])
    if len(runs) * 2 > len(forward):  # modules are not told: blocks of the root, as Chen et al. (arXiv:1604.06174)
        size = max(2, round(len(forward) ** 0.5))
        runs = [forward[i : i + size] for i in range(0, len(forward), size)]
    found: list[Segment] = []
    for run in runs:
        behind = _backward_of(job, run[-1])
        if len(run) > 1 and behind is not None:
            name = _module(job.names[run[0]])
            if not name or any(one.name == name for one in found):
                name = f"{_bare(job.names[run[0]])}-{_bare(job.names[run[-1]])}"
            found.append(Segment(name=name, first=run[0], last=run[-1], behind=behind))
    return tuple(found)


def _bare(name: str) -> str:
    return name.partition(".")[2] or name


def _module(name: str) -> str:
    return _bare(name).rpartition(".")[0]


def _backward_of(job: Job, forward: int) -> int | None:
    """The first backward compute of the same name, or of a part of it."""
    bare = _bare(job.names[forward])
    return next(
        (
            k for k, c in enumerate(job.category)
            if c is Category.BACKWARD and (_bare(job.names[k]) == bare or _bare(job.names[k]).startswith(f"{bare}."))
        ),
        None,
    )  # fmt: skip


def lay(job: Job, decisions: Decisions, chosen: Sequence[Segment], launch_s: float) -> Laid:
    """The elements of a job under what decides them. `chosen`: the segments of `decisions.recompute`."""
    job = _scaled(job, decisions, launch_s)
    num, a = len(job.names), decisions.accumulate
    repeated, rest = np.arange(job.waits), np.arange(job.waits, num)
    origin = np.concatenate([np.tile(repeated, a), rest])
    micro = np.concatenate([np.repeat(np.arange(a), job.waits), np.full(len(rest), a - 1)])
    seconds, lag = job.seconds[:, origin], job.lag_s[:, origin]
    keeps = None if job.keeps is None else job.keeps[origin].copy()
    frees = None if job.frees is None else job.frees[origin].copy()
    names, category = [job.names[k] for k in origin], [job.category[k] for k in origin]
    if keeps is not None and a > 1:  # a gradient is made once and added to from then on
        made = np.zeros(num)
        np.add.at(made, [g.op for g in job.gradients], [g.nbytes for g in job.gradients])
        keeps = np.where((micro > 0) & (made[origin] > 0), np.maximum(keeps - made[origin], 0.0), keeps)
    for segment in chosen:
        inside = (origin >= segment.first) & (origin < segment.last)
        inner = slice(segment.first, segment.last)
        dropped = 0.0 if job.keeps is None else float(job.keeps[inner].sum())
        if keeps is not None:
            keeps[inside] = 0.0
        at = np.flatnonzero(origin == segment.behind)
        spent = (job.seconds[:, inner] + job.lag_s[:, inner]).sum(axis=1)
        origin = np.insert(origin, at, -1)
        seconds, lag = np.insert(seconds, at, spent[:, None], axis=1), np.insert(lag, at, 0.0, axis=1)
        keeps = None if keeps is None else np.insert(keeps, at, dropped)
        frees = None if frees is None else np.insert(frees, at, 0.0)
        for place in at[::-1].tolist():
            names.insert(place, f"RE.{segment.name}")
            category.insert(place, Category.RECOMPUTE)
    allowed = np.append(fusible(job), False)
    joinable = (origin[:-1] >= 0) & (origin[1:] == origin[:-1] + 1) & allowed[origin[:-1]]
    saves = np.zeros(num) if job.saves_s is None else np.nan_to_num(job.saves_s)
    last = np.zeros(num, np.int64)
    normal = np.flatnonzero(origin >= 0)
    last[origin[normal]] = normal
    waits = int(last[job.waits]) if job.waits < num else len(origin)
    maker = last[[g.op for g in job.gradients]] if job.gradients else np.zeros(0, np.int64)
    laid = replace(
        job, names=tuple(names), category=tuple(category), seconds=seconds, lag_s=lag, waits=waits, keeps=keeps,
        frees=frees, gradients=tuple(replace(g, op=int(k)) for g, k in zip(job.gradients, maker, strict=True)),
        saves_s=None,
    )  # fmt: skip
    return Laid(
        job=laid, origin=origin, spent_s=seconds + lag, joinable=joinable,
        saves_s=np.where(joinable, saves[origin[:-1]], 0.0), maker=maker,
        nbytes=np.array([g.nbytes for g in job.gradients]),
    )  # fmt: skip


def _scaled(job: Job, decisions: Decisions, launch_s: float) -> Job:
    """Seconds and bytes of micro-batches and of 16 bits."""
    a, half = float(decisions.accumulate), HALF if decisions.mixed else 1.0
    if a == 1.0 and half == 1.0:
        return job
    parted = np.arange(len(job.names)) < job.waits

    def shrunk(seconds: np.ndarray) -> np.ndarray:
        fixed = np.minimum(seconds, launch_s)
        return np.where(parted, fixed + (seconds - fixed) * half / a, seconds)

    made = np.zeros(len(job.names))
    np.add.at(made, [g.op for g in job.gradients], [g.nbytes for g in job.gradients])
    keeps = None if job.keeps is None else np.where(
        parted, np.maximum(job.keeps - made, 0.0) * half / a + np.minimum(job.keeps, made) * half,
        job.keeps * half,
    )  # fmt: skip
    frees = None if job.frees is None else np.where(parted, job.frees * half / a, job.frees * half)
    return replace(
        job, seconds=shrunk(job.seconds), keeps=keeps, frees=frees,
        saves_s=None if job.saves_s is None else np.where(np.isnan(job.saves_s), np.nan, shrunk(job.saves_s)),
        gradients=tuple(replace(g, nbytes=g.nbytes * half) for g in job.gradients),
    )  # fmt: skip


def fused(laid: Laid, decisions: Decisions) -> tuple[np.ndarray, np.ndarray]:
    """(first element of each group, group of each element [E]) once joined elements run as one."""
    ops = np.append(decisions.ops, False)
    join = laid.joinable & ops[laid.origin[:-1]]
    group = np.concatenate([[0], np.cumsum(~join)])
    return np.flatnonzero(np.concatenate([[True], ~join])), group


def bucket_starts(decisions: Decisions, num: int) -> np.ndarray:
    """The first gradient of each bucket."""
    return np.flatnonzero(np.concatenate([[True], ~decisions.tensors])) if num else np.zeros(0, np.int64)


def buckets_of(
    job: Job, decisions: Decisions, maker: np.ndarray, parts: np.ndarray, not_before_s: np.ndarray
) -> list[Bucket]:
    """The buckets. maker [G]: the compute of each gradient; parts, not_before_s: of each bucket."""
    first = bucket_starts(decisions, len(job.gradients)).tolist()
    found = []
    for b, (start, stop) in enumerate(zip(first, [*first[1:], len(job.gradients)], strict=True)):
        held: tuple[Gradient, ...] = job.gradients[start:stop]
        nbytes = sum(g.nbytes for g in held)
        found.append(Bucket(
            nbytes=nbytes, op=int(maker[stop - 1]), names=tuple(g.name for g in held),
            part_bytes=nbytes / float(parts[b]), not_before_s=float(not_before_s[b]),
        ))  # fmt: skip
    return found
