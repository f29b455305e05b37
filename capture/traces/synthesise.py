"""A data-parallel job that nobody ran, as tasks: other buckets, workers, topology or links than were measured.

A job is what each worker computes, in order, the gradients that this makes, and how they are bucketed and sent. Compute
is given (measured, or of a model); a transfer takes latency + bytes / rate on its link, one at a time. A bucket leaves
a worker once its last gradient is made and copied, and `lanes` buckets are under way at once; what follows the wait
(the update) starts once all buckets are back. Prices no compute, knows no file.

A transfer slows compute of its worker down by what the link says of bytes. A server has one link in and one out, whose
rate all workers share; where servers outnumber workers, theirs count.

Neglected: links that different pairs of workers share, protocol phases of small messages, compute of a worker beside
what it sends to a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from capture.traces.records import Topology
from capture.traces.topologies import Flow, flow, num_steps
from estimator.replay import replay
from estimator.tasks import CATEGORIES, Category, Device, Stream, Tasks
from estimator.timeline import Timeline

__all__ = ["Bucket", "Gradient", "Job", "Link", "Synthetic", "Wire", "buckets", "size_over_bandwidth", "sync_alone_s",
           "synthesise"]  # fmt: skip

MOST = 20_000_000  # transfers and edges of an iteration: some gigabytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A message takes latency_s + bytes / bytes_per_s on the wire, and then its worker reduce_s_per_byte to add it up.

    Meanwhile it takes host_s_per_byte of its worker's compute.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    reduce_s_per_byte: float = 0.0
    host_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_s < np.inf or not 0.0 <= self.latency_s < np.inf:
            raise ValueError(
                f"a link must carry more than 0 bytes a second with a latency of at least 0 s, but has "
                f"{self.bytes_per_s} and {self.latency_s}; measure it anew"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How buckets travel. inner: within a machine, None: as between them. lanes: buckets under way at once.

    part_bytes: into which a tree and servers cut a bucket, infinity: not at all. colocated: the first workers serve,
    and buckets begin with them in turn. half_duplex: both directions between two workers take turns.
    """

    topology: Topology
    link: Link
    inner: Link | None = None
    per_machine: int = 1
    servers: int = 1
    part_bytes: float = float("inf")
    lanes: int = 1
    colocated: bool = False
    half_duplex: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """A tensor that compute number `op` makes."""

    name: str
    nbytes: float
    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that travel together, the last made by compute number `op`.

    part_bytes: into which a tree or servers cut this one, None: as the wire says. not_before_s: it waits so long.
    """

    nbytes: float
    op: int
    names: tuple[str, ...]
    part_bytes: float | None = None
    not_before_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What W workers do, K computes each, in order.

    names, category [K]. seconds, lag_s [W, K]: of each compute, and of the host before it. release_s [W]: when each
    worker begins. waits: the first compute that waits for all buckets, K where none does. gradients in the order in
    which they are made. copy_s_per_byte: into a bucket. keeps [K]: bytes that a compute keeps; frees [K]: (bytes, at
    the end of which compute they go); base_bytes live all the time. saves_s [K]: what running a compute and the next
    one as one saves, NaN where they may not.
    """

    names: tuple[str, ...]
    category: tuple[Category, ...]
    seconds: np.ndarray
    lag_s: np.ndarray
    release_s: np.ndarray
    waits: int
    gradients: tuple[Gradient, ...]
    copy_s_per_byte: float = 0.0
    keeps: np.ndarray | None = None
    frees: np.ndarray | None = None
    base_bytes: float = 0.0
    saves_s: np.ndarray | None = None

    @property
    def workers(self) -> int:
        """W."""
        return len(self.seconds)

    def of_workers(self, workers: int) -> Job:
        """The same job on more or fewer workers: they do what those measured do, in turn."""
        who = np.arange(workers) % self.workers
        return replace(self, seconds=self.seconds[who], lag_s=self.lag_s[who], release_s=self.release_s[who])


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Tasks of one iteration. ready: see replay. bucket [N]: of a transfer or copy, -1 else."""

    tasks: Tasks
    ready: np.ndarray
    bucket: np.ndarray

    def run(self) -> Timeline:
        """When everything runs."""
        return replay(self.tasks, ready=self.ready)


def buckets(gradients: Sequence[Gradient], bucket_bytes: float) -> list[Bucket]:
    """Gradients in the order in which they are made; a bucket is closed once it holds `bucket_bytes` or more (as DDP).

    >>> [b.nbytes for b in buckets([Gradient(name=str(k), nbytes=3.0, op=k) for k in range(5)], 5.0)]
    [6.0, 6.0, 3.0]
    """
    if not bucket_bytes > 0:
        raise ValueError(f"a bucket must hold more than 0 bytes, but is to hold {bucket_bytes}; give such as 25e6")
    found: list[Bucket] = []
    held: list[Gradient] = []
    for k, gradient in enumerate(gradients):
        held.append(gradient)
        nbytes = sum(g.nbytes for g in held)
        if nbytes >= bucket_bytes or k == len(gradients) - 1:
            found.append(Bucket(nbytes=nbytes, op=max(g.op for g in held), names=tuple(g.name for g in held)))
            held = []
    return found


def synthesise(job: Job, cut: Sequence[Bucket], wire: Wire) -> Synthetic:
    """The job with its gradients cut into these buckets, sent over this wire."""
    return _Plan(job, cut, wire).made()


class _Plan:
    """Tasks in blocks: computes of all workers, copies, transfers bucket by bucket."""

    def __init__(self, job: Job, cut: Sequence[Bucket], wire: Wire) -> None:
        self.job, self.cut, self.wire = job, cut, wire
        steps = sum(num_steps(wire.topology, job.workers, parts=self._parts(bucket), per_machine=wire.per_machine)
                    for bucket in cut)  # fmt: skip
        if steps > MOST:
            raise ValueError(
                f"a synthesised iteration must have at most {MOST:,} transfers and edges, but this has {steps:,}; "
                f"give fewer workers, or larger bucket_bytes or part_bytes"
            )
        self.flows = [self._flow(bucket, number) for number, bucket in enumerate(cut)]
        served = wire.servers if any(f.num_servers for f in self.flows) else 0
        self.nodes = job.workers + served
        parts = np.cumsum([0, *map(self._parts, cut)])
        self.first = parts % max(wire.servers, 1)  # parts go round the servers from bucket to bucket
        self.streams: list[Stream] = []
        self.place: dict[tuple[int, str], int] = {}
        self.edges: list[np.ndarray] = []

    def _parts(self, bucket: Bucket) -> int:
        part_bytes = self.wire.part_bytes if bucket.part_bytes is None else bucket.part_bytes
        return max(1, int(np.ceil(bucket.nbytes / part_bytes)))

    def _flow(self, bucket: Bucket, number: int) -> Flow:
        wire = self.wire
        return flow(wire.topology, self.job.workers, parts=self._parts(bucket), servers=wire.servers,
                    per_machine=wire.per_machine, colocated=wire.colocated,
                    first=number % wire.servers if wire.colocated else 0)  # fmt: skip

    def _stream(self, device: int, name: str, *, computes: bool = False) -> int:
        key = (device, name)
        if key not in self.place:
            self.place[key] = len(self.streams)
            self.streams.append(Stream(device=device, name=name, computes=computes))
        return self.place[key]

    def made(self) -> Synthetic:
        job, w, k = self.job, self.job.workers, len(self.job.names)
        grid = np.arange(w * k).reshape(w, k)
        compute = np.array([self._stream(r, "compute", computes=True) for r in range(w)])
        self.copies = job.copy_s_per_byte > 0.0
        made = {bucket.op for bucket in self.cut}
        stream, seconds = [np.repeat(compute, k)], [job.seconds.ravel()]
        category = [np.tile([CATEGORIES.index(c) for c in job.category], w)]
        name, bucket_of = [np.tile(np.arange(k), w)], [np.full(w * k, -1)]
        num = w * k
        # A worker's computes in order, each behind its host's lag; a copy comes right behind the last gradient.
        copy = np.full((len(self.cut), w), -1)
        for b, bucket in enumerate(self.cut if self.copies else ()):
            copy[b] = num + np.arange(w)
            num += w
            stream.append(compute)
            seconds.append(np.full(w, bucket.nbytes * job.copy_s_per_byte))
            category.append(np.full(w, CATEGORIES.index(Category.OTHER)))
            name.append(np.full(w, k))
            bucket_of.append(np.full(w, b))
        late = np.argwhere(job.lag_s > 0.0)
        lag = np.full((w, k), -1)
        if len(late):
            lag[late[:, 0], late[:, 1]] = num + np.arange(len(late))
            host = np.array([self._stream(r, "host before compute") for r in range(w)])
            num += len(late)
            stream.append(host[late[:, 0]])
            seconds.append(job.lag_s[late[:, 0], late[:, 1]])
            category.append(np.full(len(late), CATEGORIES.index(Category.HOST)))
            name.append(np.full(len(late), k + 1))
            bucket_of.append(np.full(len(late), -1))
        entry = np.where(lag >= 0, lag, grid)
        self.edges.append(np.stack([lag[lag >= 0], grid[lag >= 0]], axis=1))
        behind = {op: [b for b, bucket in enumerate(self.cut) if bucket.op == op] for op in made} if self.copies else {}
        for op in range(k):
            last = grid[:, op]
            for b in behind.get(op, ()):
                self.edges.append(np.stack([last, copy[b]], axis=1))
                last = copy[b]
            if op + 1 < k:
                self.edges.append(np.stack([last, entry[:, op + 1]], axis=1))
        ready = np.zeros(num)
        ready[entry[:, 0]] = job.release_s
        waits, takes = [ready], [np.zeros(num)]
        backs: list[np.ndarray] = []  # of each bucket (worker, transfer) pairs that bring it back
        for b, (bucket, f) in enumerate(zip(self.cut, self.flows, strict=True)):
            first = num
            num += len(f.source)
            stream.append(self._links(f, int(self.first[b])))
            seconds.append(self._seconds(f, bucket.nbytes))
            takes.append(self._takes(f, bucket.nbytes, seconds[-1]))
            category.append(np.full(len(f.source), CATEGORIES.index(Category.DP)))
            name.append(np.full(len(f.source), k + 2))
            bucket_of.append(np.full(len(f.source), b))
            waits.append(np.where(f.begins >= 0, bucket.not_before_s, 0.0))
            hands = copy[b] if self.copies else grid[:, bucket.op]
            worker = np.concatenate([f.begins[f.begins >= 0], f.posts[f.posts >= 0]])
            moves = first + np.concatenate([np.flatnonzero(f.begins >= 0), np.flatnonzero(f.posts >= 0)])
            self.edges += [np.stack([f.before, f.after], axis=1) + first, np.stack([hands[worker], moves], axis=1)]
            self._one_after_another(backs, b, worker, moves)
            backs.append(f.ends + [0, first])
            if job.waits < k:
                self.edges.append(np.stack([f.ends[:, 1] + first, entry[f.ends[:, 0], job.waits]], axis=1))
        return self._assembled(stream, seconds, category, name, bucket_of, np.concatenate(waits),
                               np.concatenate(takes))  # fmt: skip

    def _one_after_another(self, backs: list[np.ndarray], b: int, worker: np.ndarray, transfer: np.ndarray) -> None:
        """A worker starts on a bucket once it has back the one `lanes` before."""
        before = backs[b - self.wire.lanes] if b >= self.wire.lanes else np.zeros((0, 2), np.int64)
        for r in np.unique(worker).tolist() if len(before) else ():
            done, begins = before[before[:, 0] == r, 1], transfer[worker == r]
            self.edges.append(np.stack([np.repeat(done, len(begins)), np.tile(begins, len(done))], axis=1))

    def _links(self, f: Flow, first: int) -> np.ndarray:
        """A link is that between two workers; a server's, in or out, is shared by all of them. first: server."""
        w, pairs = self.job.workers, np.stack([f.source, f.target], axis=1)
        if f.num_servers:
            serves, fewer = pairs >= w, f.num_servers <= w
            pairs = np.where(serves, w + (pairs - w + first) % self.wire.servers, pairs)
            pairs = np.where(serves if fewer else ~serves, pairs, -1)
        elif self.wire.colocated and w > 2:
            pushes = f.begins >= 0
            pairs = np.where(np.stack([pushes, ~pushes], axis=1), -1, pairs)
        elif self.wire.half_duplex:
            pairs = np.sort(pairs, axis=1)
        unique, which = np.unique(pairs, axis=0, return_inverse=True)
        made = []
        for source, target in unique.tolist():
            name = f"link {source}>{target}" if source >= 0 <= target else "link in" if source < 0 else "link out"
            made.append(self._stream(target if target >= 0 else source, name))
        return np.array(made, dtype=np.int64)[np.ravel(which)]

    def _seconds(self, f: Flow, nbytes: float) -> np.ndarray:
        outer, inner = self.wire.link, self.wire.inner or self.wire.link
        rate = np.where(f.inner, inner.bytes_per_s, outer.bytes_per_s)
        adds = np.where(f.inner, inner.reduce_s_per_byte, outer.reduce_s_per_byte)
        return np.where(f.inner, inner.latency_s, outer.latency_s) + f.share * nbytes * (1.0 / rate + adds)

    def _takes(self, f: Flow, nbytes: float, seconds: np.ndarray) -> np.ndarray:
        """Share of its host's compute that each transfer takes while it is under way."""
        cost = f.share * nbytes * self.wire.link.host_s_per_byte
        return np.divide(cost, seconds, out=np.zeros(len(cost)), where=seconds > 0.0)

    def _assembled(
        self, stream: list[np.ndarray], seconds: list[np.ndarray], category: list[np.ndarray], name: list[np.ndarray],
        bucket_of: list[np.ndarray], ready: np.ndarray, takes: np.ndarray,
    ) -> Synthetic:  # fmt: skip
        job, k, num = self.job, len(self.job.names), len(ready)
        edges = np.concatenate([np.zeros((0, 2), np.int64), *self.edges])
        alloc, free = np.zeros(num), np.zeros(num)
        for at, per_op in ((alloc, job.keeps), (free, job.frees)):
            if per_op is not None:
                at[: job.workers * k] = np.tile(per_op, job.workers)
        devices = [Device(name=f"worker {r}", base_bytes=job.base_bytes) for r in range(job.workers)]
        devices += [Device(name=f"server {s}") for s in range(self.nodes - job.workers)]
        nothing, none = np.zeros(num), np.full(num, -1)
        tasks = Tasks(
            devices=tuple(devices), streams=tuple(self.streams), names=(*job.names, "copy", "lag", "transfer"),
            scopes=("",), stream=np.concatenate(stream), seconds=np.concatenate(seconds),
            category=np.concatenate(category), before=edges[:, 0].copy(), after=edges[:, 1].copy(),
            name=np.concatenate(name), scope=np.zeros(num, np.int64), micro_batch=none, chunk=none,
            shield=np.zeros(num, np.int64), launch_s=nothing, gates=np.zeros(num, np.bool_), takes=takes,
            loads=np.zeros((num, 0)), alloc_bytes=alloc, free_bytes=free,
        )  # fmt: skip
        return Synthetic(tasks=tasks, ready=ready, bucket=np.concatenate(bucket_of))


def sync_alone_s(workers: int, nbytes: float, wire: Wire) -> float:
    """t_sync(s, k): seconds to synchronise one bucket of s bytes in its k parts when nothing else runs."""
    nothing = Job(names=("made",), category=(Category.BACKWARD,), seconds=np.zeros((workers, 1)),
                  lag_s=np.zeros((workers, 1)), release_s=np.zeros(workers), waits=1, gradients=())  # fmt: skip
    return synthesise(nothing, [Bucket(nbytes=nbytes, op=0, names=())], wire).run().span_s


def size_over_bandwidth(job: Job, cut: Sequence[Bucket], wire: Wire) -> float:
    """The baseline of Daydream (Zhu et al. 2020): one worker, one operation per bucket of size / bandwidth; seconds.

    The size is what crosses a worker's link one way, 2 (n - 1) / n of the bucket in an all-reduce. No latency, no
    chunks, no waiting for other workers.
    """
    n = job.workers
    share = 1.0 if wire.topology is Topology.PARAMETER_SERVER else 2.0 * (n - 1) / n
    done, wire_free = 0.0, 0.0
    made: dict[int, float] = {}
    compute = job.seconds[0] + job.lag_s[0]
    for op, seconds in enumerate(compute.tolist()):
        if op == job.waits:
            for bucket in sorted(cut, key=lambda bucket: bucket.op):
                wire_free = max(wire_free, made[bucket.op]) + share * bucket.nbytes / wire.link.bytes_per_s
            done = max(done, wire_free)
        done += seconds
        made[op] = done
    return done
