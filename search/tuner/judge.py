"""What decisions come to: seconds of an iteration, exactly by replay, or quickly from partial replays.

The quick judge replays each bucket's communication alone (sync.py) and puts it behind the computes that make it: what a
worker computes is a chain, and buckets leave one after the other, so ends are sums and running maxima. Parameter
servers with many buckets under way push and pull parts as two queues. That is exact on a ring, and on servers where all
workers are alike; where they are not, the parts of one worker queue behind all of another's, so every candidate is
replayed. A tree's next bucket counts as begun once all workers have the last: too long, by up to 5 %. What transfers
take of their workers' compute, where that was measured, a full replay alone knows; it decides at the end of each round.

Letters: W workers, E elements, P groups of joined elements, B buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from capture.traces.beside import delayed
from capture.traces.records import Topology
from capture.traces.synthesise import Bucket, Job, Synthetic, synthesise
from estimator.replay import replay
from estimator.tasks import CATEGORIES, Category, Device, Stream, Tasks
from estimator.timeline import critical_path, memory
from search.tuner.decisions import (
    Decisions,
    Laid,
    Segment,
    bucket_starts,
    buckets_of,
    fused,
    lay,
    segments,
)
from search.tuner.subject import MANY, Subject
from search.tuner.sync import Sync

__all__ = ["Judge", "Look", "Replayed", "SpeedUps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUps:
    """What makes a search quick.

    coarse: computes without a gradient join the one behind them, gradients of one compute are one. partial: candidates
    are judged from partial replays. symmetry: equal workers are replayed as one, and equal blocks are joined alike.
    """

    coarse: bool = True
    partial: bool = True
    symmetry: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One iteration under decisions. group_end [P], first [P]: of the slowest worker; the first element of each group.

    of_bucket [B]: the group that makes it. ready, start, end, dur, nbytes [B]; parts [B]. peak_bytes: 0 where memory is
    not known.
    """

    seconds: float
    peak_bytes: float
    first: np.ndarray
    group: np.ndarray
    group_s: np.ndarray
    group_end: np.ndarray
    of_bucket: np.ndarray
    ready: np.ndarray
    start: np.ndarray
    end: np.ndarray
    dur: np.ndarray
    nbytes: np.ndarray
    parts: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A full replay. path_groups, path_buckets: what its critical path runs through, in order."""

    seconds: float
    peak_bytes: float
    path_groups: np.ndarray
    path_buckets: np.ndarray


class Judge:
    """Judges decisions on one subject; counts what it replays."""

    def __init__(self, subject: Subject, ups: SpeedUps, budget_bytes: float = float("inf")) -> None:
        self.subject, self.ups, self.shown, self.budget_bytes = subject, ups, subject.shown, budget_bytes
        self.sync = Sync(subject.jobs[0].workers, subject.wire)
        self.segments: tuple[Segment, ...] = segments(subject.jobs[0])
        self.judged = self.replays = 0
        self._laid: dict[tuple[int, object], Laid] = {}
        self._known: dict[object, float] = {}
        self.piped = subject.wire.topology is Topology.PARAMETER_SERVER and subject.wire.lanes >= MANY
        self.quick = ups.partial and (not self.piped or _alike(self.shown))

    def seconds(self, decisions: Decisions) -> float:
        """Of the iteration that is looked at, as the speed-ups say: from partial replays, or replayed.

        Infinity where it does not fit the budget.
        """
        key = decisions.key
        if key not in self._known:
            self.judged += 1
            found = self.look(decisions) if self.quick else self.replayed(decisions)
            self._known[key] = found.seconds if found.peak_bytes <= self.budget_bytes else float("inf")
        return self._known[key]

    def laid(self, decisions: Decisions, job: Job) -> Laid:
        """The elements of a job, made once for each layout."""
        key = id(job), decisions.layout
        if key not in self._laid:
            chosen = [self.segments[s] for s in sorted(decisions.recompute)]
            self._laid[key] = lay(job, decisions, chosen, self.subject.launch_s)
        return self._laid[key]

    def look(self, decisions: Decisions, job: Job | None = None) -> Look:
        """An iteration from partial replays."""
        job = job or self.shown
        laid = self.laid(decisions, job)
        first, group = fused(laid, decisions)
        spent = self._spent(laid, decisions, first)
        starts = bucket_starts(decisions, len(laid.nbytes))
        num = len(starts)
        nbytes = np.add.reduceat(laid.nbytes, starts) if num else np.zeros(0)
        maker = group[laid.maker]
        ends = np.append(starts[1:], len(maker)) - 1
        made = maker[ends] if num else np.zeros(0, np.int64)
        copies = nbytes * job.copy_s_per_byte
        if job.copy_s_per_byte:
            spent = spent.copy()
            spent += np.bincount(made, weights=copies, minlength=len(first))
        until = np.cumsum(spent, axis=1) + job.release_s[: len(spent), None]
        done = until.max(axis=0)
        copied = np.cumsum(copies)
        last = np.searchsorted(made, made, side="right") - 1
        ready = done[made] - (copied[last] - copied) if num else np.zeros(0)
        if decisions.cycle_s:
            ready = np.ceil(ready / decisions.cycle_s) * decisions.cycle_s
        parts = np.array(decisions.parts) if decisions.parts else self.sync.parts_of(nbytes, decisions.part_bytes)
        start, end, dur = self._sent(ready, nbytes, parts)
        wait = int(group[laid.job.waits]) if laid.job.waits < len(group) else len(first)
        back = float(end.max()) if num else 0.0
        before = float(done[wait - 1]) if wait else 0.0
        after = float(spent[:, wait:].sum(axis=1).max()) if wait < len(first) else 0.0
        return Look(
            seconds=max(before, back) + after, peak_bytes=_peak(laid.job, first), first=first, group=group,
            group_s=spent.max(axis=0), group_end=done, of_bucket=made, ready=ready, start=start, end=end, dur=dur,
            nbytes=nbytes, parts=parts,
        )  # fmt: skip

    def _spent(self, laid: Laid, decisions: Decisions, first: np.ndarray) -> np.ndarray:
        """[W, P] seconds of each group with its lags; one row where workers are folded."""
        seconds = laid.spent_s
        if self.ups.symmetry and _alike(laid.job):
            seconds = seconds[:1]
        ops = np.append(decisions.ops, False)
        join = laid.joinable & ops[laid.origin[:-1]]
        saved = np.append(0.0, np.where(join, laid.saves_s, 0.0))
        return np.maximum(np.add.reduceat(seconds - saved, first, axis=1), 0.0)

    def _sent(
        self, ready: np.ndarray, nbytes: np.ndarray, parts: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Start, end and seconds alone of each bucket."""
        if not len(ready):
            return ready, ready, ready
        alone = self.sync.seconds(nbytes, parts)
        if not self.piped:
            start, end = _queue(ready, alone)
            return start, end, alone
        bucket, line, each = self.parts_of(nbytes, parts)
        start, end = np.full(len(ready), np.inf), np.zeros(len(ready))
        for server in np.unique(line).tolist():
            mine = np.flatnonzero(line == server)
            pushed, there = _queue(ready[bucket[mine]], each[mine])
            _, back = _queue(there, each[mine])
            np.minimum.at(start, bucket[mine], pushed)
            np.maximum.at(end, bucket[mine], back)
        return start, end, alone

    def parts_of(self, nbytes: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each part of each bucket: the bucket, the link that all workers' parts pass, and seconds on it.

        As synthesise.py has it: a server's link takes all workers' parts one by one; a bucket that is on more servers
        than there are workers passes the workers' own links, which here are line S.
        """
        wire, workers = self.subject.wire, self.shown.workers
        bucket = np.repeat(np.arange(len(parts)), parts)
        number = np.arange(len(bucket))  # parts go round the servers from bucket to bucket
        shared = (np.minimum(parts, wire.servers) <= workers)[bucket]
        alone = (wire.link.latency_s + nbytes / parts / wire.link.bytes_per_s)[bucket]
        return bucket, np.where(shared, number % wire.servers, wire.servers), np.where(shared, workers, 1) * alone

    def job_of(self, decisions: Decisions, job: Job) -> tuple[Job, list[Bucket]]:
        """The job and its buckets as they would run."""
        laid, look = self.laid(decisions, job), self.look(decisions, job)
        first, group = look.first, look.group
        inner = laid.job
        ops = np.append(decisions.ops, False)
        join = laid.joinable & ops[laid.origin[:-1]]
        saved = np.append(0.0, np.where(join, laid.saves_s, 0.0))
        lag = inner.lag_s[:, first]
        seconds = np.maximum(np.add.reduceat(laid.spent_s - saved, first, axis=1) - lag, 0.0)
        size = np.diff(np.append(first, len(group)))
        names = tuple(
            inner.names[f] if n == 1 else f"{inner.names[f]} +{n - 1}"
            for f, n in zip(first.tolist(), size.tolist(), strict=True)
        )
        wait = int(group[inner.waits]) if inner.waits < len(group) else len(first)
        maker = group[laid.maker]
        made = replace(
            inner, names=names, category=tuple(inner.category[f] for f in first.tolist()), seconds=seconds, lag_s=lag,
            waits=wait, gradients=tuple(replace(g, op=int(k)) for g, k in zip(inner.gradients, maker, strict=True)),
            keeps=None if inner.keeps is None else np.add.reduceat(inner.keeps, first),
            frees=None if inner.frees is None else np.add.reduceat(inner.frees, first),
        )  # fmt: skip
        not_before_s = look.ready if decisions.cycle_s else np.zeros(len(look.ready))
        return made, buckets_of(made, decisions, maker, look.parts, not_before_s)

    def replayed(self, decisions: Decisions, job: Job | None = None) -> Replayed:
        """An iteration in full; of equal workers, one for all where the answer is the same."""
        job = job or self.shown
        index = next(i for i, one in enumerate(self.subject.jobs) if one is job)
        self.replays += 1
        made, cut = self.job_of(decisions, job)
        delays = self.subject.delays[index]
        exact = self.subject.wire.topology is Topology.RING or self.piped
        if self.ups.symmetry and exact and not len(delays) and _alike(job):
            return _read(_folded(made, cut, self.look(decisions, job), self), len(made.names))
        done = delayed(synthesise(made, cut, self.subject.wire), delays, index)
        return _read(done, len(made.names))


def _alike(job: Job) -> bool:
    """Whether all workers take the same seconds."""
    same = (job.seconds == job.seconds[:1]).all() and (job.lag_s == job.lag_s[:1]).all()
    return bool(same and (job.release_s == job.release_s[0]).all())


def _peak(job: Job, first: np.ndarray) -> float:
    """Most bytes that a chain of groups holds at once: what a group keeps from its start on, less what ended before."""
    if job.keeps is None or job.frees is None:
        return 0.0
    held = np.cumsum(np.add.reduceat(job.keeps, first))
    gone = np.cumsum(np.add.reduceat(job.frees, first))
    return float(job.base_bytes + np.max(held - np.concatenate([[0.0], gone[:-1]])))


def _queue(ready: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of what is served one after the other, first come first served; ready must not fall."""
    through = np.cumsum(seconds)
    end = through + np.maximum.accumulate(ready - (through - seconds))
    return end - seconds, end


def _folded(job: Job, cut: list[Bucket], look: Look, judge: Judge) -> Synthetic:
    """One worker for all: its chain of computes and copies, and each bucket as one transfer, or its parts as two."""
    k, num = len(job.names), len(cut)
    wire, workers = judge.subject.wire, job.workers
    copies = np.array([b.nbytes * job.copy_s_per_byte for b in cut])
    copied = job.copy_s_per_byte > 0.0
    chain = np.concatenate([np.arange(k), np.repeat(look.of_bucket, int(copied))])
    order = np.argsort(chain, kind="stable")  # a copy comes right behind the compute that makes its bucket
    own = np.concatenate([job.seconds[0] + job.lag_s[0], copies if copied else np.zeros(0)])
    edges = [np.stack([order[:-1], order[1:]], axis=1)]
    made = k + np.arange(num) if copied else look.of_bucket
    at = len(own)
    seconds, stream, bucket_of = [own], [np.zeros(at, np.int64)], [np.full(at, -1)]
    not_before = [np.zeros(at)]
    waits = np.array([b.not_before_s for b in cut])
    streams = [Stream(device=0, name="compute", computes=True)]
    if judge.piped:
        bucket, line, each = judge.parts_of(look.nbytes, look.parts)
        push, pull = at + np.arange(len(bucket)), at + len(bucket) + np.arange(len(bucket))
        streams += [
            Stream(device=0, name=f"server {s} {way}") for s in range(wire.servers + 1) for way in ("in", "out")
        ]
        edges += [np.stack([made[bucket], push], axis=1), np.stack([push, pull], axis=1)]
        seconds += [each, each]
        stream += [1 + 2 * line, 2 + 2 * line]
        bucket_of += [bucket, bucket]
        not_before += [waits[bucket], np.zeros(len(bucket))]
        back = pull
    else:
        back = at + np.arange(num)
        streams.append(Stream(device=0, name="link"))
        edges.append(np.stack([made, back], axis=1))
        seconds.append(look.dur)
        stream.append(np.ones(num, np.int64))
        bucket_of.append(np.arange(num))
        not_before.append(waits)
    if job.waits < k:
        edges.append(np.stack([back, np.full(len(back), job.waits)], axis=1))
    total = sum(map(len, seconds))
    alloc, free = np.zeros(total), np.zeros(total)
    if job.keeps is not None and job.frees is not None:
        alloc[:k], free[:k] = job.keeps, job.frees
    codes = [CATEGORIES.index(c) for c in job.category]
    kinds = np.full(total, CATEGORIES.index(Category.DP))
    kinds[:k], kinds[k:at] = codes, CATEGORIES.index(Category.OTHER)
    of = Tasks.of(
        devices=[Device(name="each worker", num_ranks=workers, base_bytes=job.base_bytes)], streams=streams,
        stream=np.concatenate(stream), seconds=np.concatenate(seconds), edges=np.concatenate(edges),
        names=(*job.names, *["copy"] * (at - k), *["transfer"] * (total - at)), alloc_bytes=alloc, free_bytes=free,
    )  # fmt: skip
    ready = np.concatenate(not_before)
    ready[order[0]] = job.release_s[0]
    return Synthetic(tasks=replace(of, category=kinds), ready=ready, bucket=np.concatenate(bucket_of))


def _read(done: Synthetic, num: int) -> Replayed:
    """Runs tasks, and says what their critical path runs through. num: computes of a worker."""
    timeline = replay(done.tasks, ready=done.ready)
    path = critical_path(timeline).tasks
    name, moves = done.tasks.name[path], done.tasks.category[path] == CATEGORIES.index(Category.DP)
    groups, sent = name[~moves & (name < num)], done.bucket[path[moves]]
    return Replayed(
        seconds=timeline.span_s, peak_bytes=float(memory(timeline).peak.max()), path_groups=_ordered(groups),
        path_buckets=_ordered(sent),
    )  # fmt: skip


def _ordered(values: np.ndarray) -> np.ndarray:
    """Each value once, in order of its first place."""
    _, first = np.unique(values, return_index=True)
    return values[np.sort(first)]
