"""What is tuned: a job's iterations, the wire between its workers, and how it was cut when it was recorded.

From a measured graph each iteration is a job of its own (capture/traces/what_if.py); a job of a model's size has one.
What fusing two operations saves is known of jobs of a model's size (a roofline), and told of measured ones by a profile
of fused operations; else a measured operation saves a launch, and no more than it takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from capture.traces.beside import Delays
from capture.traces.dfg import GlobalDfg
from capture.traces.lower import lower
from capture.traces.model_jobs import MODELS, Chip
from capture.traces.operations import Op
from capture.traces.records import Topology
from capture.traces.synthesise import Gradient, Job, Link, Wire
from capture.traces.what_if import Change, changed, check_topology, link_of, measured_job, message_delays, named
from estimator.tasks import Category
from estimator.tuning import graph_mark
from search.tuner.decisions import Decisions, apart, fusible

__all__ = ["LAUNCH_S", "MANY", "Subject", "measured_subject", "sized_subject"]

LATENCY_S = 50e-6  # of a message, where a trace says none: buckets would be free (an assumption)
LAUNCH_S = 5e-6  # what a framework takes to launch an operation, where nothing else is known (an assumption)
MANY = 1_000_000  # buckets on their way at once: all that are ready
WORKERS = 16
LINK = Link(bytes_per_s=12.5e9, latency_s=10e-6)  # 100 Gbit/s, as in the paper's cluster; 10 us a message (assumed)
UNKNOWN = Delays(quiet_s=np.zeros(0), busy_s=np.zeros(0))
Fused = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A job to tune.

    jobs: one per iteration. delays: of each iteration's messages, none where unknown. start:
    as recorded, or nothing fused. launch_s: of an operation. can_cut: gradients are known, not buckets of them alone.
    measured: it was recorded. assumptions: a sentence each.
    """

    name: str
    jobs: tuple[Job, ...]
    wire: Wire
    start: Decisions
    delays: tuple[Delays, ...]
    launch_s: float
    mark: str
    can_cut: bool = True
    measured: bool = False
    assumptions: tuple[str, ...] = ()

    @property
    def shown(self) -> Job:
        """The iteration that a search looks at: of the middle compute time."""
        total = np.array([float((job.seconds + job.lag_s).sum(axis=1).max()) for job in self.jobs])
        return self.jobs[int(np.argsort(total, kind="stable")[(len(total) - 1) // 2])]

    @property
    def memory_known(self) -> bool:
        """Whether forward operations tell the bytes that they keep; gradients alone are no peak."""
        job = self.jobs[0]
        forward = [category is Category.FORWARD for category in job.category]
        return job.keeps is not None and bool(job.keeps[forward].any())


def sized_subject(model: str, change: Change, *, chip: Chip | None = None, batch: int = 32) -> Subject:
    """A job of a model's size on 16 workers of a 100 Gbit/s ring, or as the change says; nothing of it was measured."""
    chip = chip or Chip()
    _check_undecided(change)
    job = MODELS[model](workers=change.workers or WORKERS, batch=batch, chip=chip)
    job = replace(job, seconds=job.seconds / change.compute)
    topology = change.topology or Topology.RING
    check_topology(change, topology)
    wire = _wire(change, LINK, topology)
    told = (
        f"a job of the size of {model}, batch {batch}: nothing of it was measured; kernels by a roofline of "
        f"{chip.flops_per_s / 1e12:g} TFLOP/s and {chip.bytes_per_s / 1e9:g} GB/s",
        f"links of {wire.link.bytes_per_s * 8 / 1e9:g} Gbit/s, {wire.link.latency_s * 1e6:g} us a message",
    )
    return Subject(
        name=model, jobs=(job,), wire=wire, start=apart(job), delays=(UNKNOWN,), launch_s=chip.launch_s,
        mark=_mark(job), assumptions=told,
    )  # fmt: skip


def _wire(change: Change, link: Link, topology: Topology) -> Wire:
    latency_s = link.latency_s if change.latency_s is None else change.latency_s
    lanes = MANY if topology is Topology.PARAMETER_SERVER else 1
    return Wire(
        topology=topology, link=Link(bytes_per_s=link.bytes_per_s * change.bandwidth, latency_s=latency_s),
        per_machine=change.per_machine, servers=change.servers, part_bytes=change.part_bytes, lanes=lanes,
        colocated=change.colocated, half_duplex=change.half_duplex,
    )  # fmt: skip


def _check_undecided(change: Change) -> None:
    """ValueError where the change says what a tuner is to find."""
    for name in ("bucket_bytes", "recompute"):
        if getattr(change, name) is not None:
            raise ValueError(f"{name} is what a tuner decides; leave it out")


def measured_subject(dfg: GlobalDfg, change: Change, *, name: str, launch_s: float | None, fused: Fused) -> Subject:
    """A measured job, of a graph without hosts. ValueError where it does not hold what tuning needs."""
    if not dfg.iterations:
        raise ValueError("a job must have at least one iteration to be tuned, but none is marked; record some")
    if len(dfg.ranks) < 2 and (change.workers or 1) < 2:
        raise ValueError(
            "a job must have at least 2 ranks to be tuned, for one has nothing to synchronise; record more, or give "
            "--what-if workers=N"
        )
    _check_undecided(change)
    dfg = named(dfg)
    link, topology, notices = link_of(dfg)
    # What messages are delayed on average is theirs whatever they carry, so partial replays have it as latency.
    usual_s = float(np.mean([message_delays(dfg, number, link).mean_s for number in dfg.iterations]))
    link = replace(link, latency_s=link.latency_s + max(usual_s, 0.0))
    if not link.latency_s:
        link = replace(link, latency_s=LATENCY_S)
        notices.append(f"the trace does not tell what a message takes beside its bytes: {LATENCY_S * 1e6:g} us")
    launch = LAUNCH_S if launch_s is None else launch_s
    jobs, delays, start, wire, can_cut = [], list[Delays](), None, None, True
    for number in dfg.iterations:
        one = measured_job(dfg, number)
        can_cut = can_cut and one.can_cut
        if not one.can_cut:  # what a bucket holds is not told: it goes as it is, or with others
            made = tuple(Gradient(name=b.names[0], nbytes=b.nbytes, op=b.op) for b in one.cut)
            one = replace(one, job=replace(one.job, gradients=made))
        job, _, wire = changed(one, link, topology, change)
        job = _told_apart(job)
        jobs.append(_with_memory(dfg, number, _with_saves(job, launch, fused)))
        delays.append(message_delays(dfg, number, link))
        if start is None:
            start = replace(apart(job, part_bytes=change.part_bytes), tensors=_as_cut(one.job, one.cut, one.can_cut))
    assert start is not None
    assert wire is not None
    _check_same(jobs)
    if wire.topology is Topology.PARAMETER_SERVER:
        wire = replace(wire, lanes=MANY)
    told = [f"{link.bytes_per_s * 8 / 1e9:.3g} Gbit/s and {link.latency_s * 1e6:.3g} us a message, by least squares"]
    told.append(
        f"running an operation with the next as one saves {launch * 1e6:g} us, a launch, and no more than either takes"
    )
    told += notices
    return Subject(
        name=name, jobs=tuple(jobs), wire=wire, start=start, delays=tuple(delays), launch_s=launch,
        mark=_mark(jobs[0]), can_cut=can_cut, measured=True, assumptions=tuple(told),
    )  # fmt: skip


def _mark(job: Job) -> str:
    return graph_mark(job.names, [(g.name, g.nbytes) for g in job.gradients])


def _told_apart(job: Job) -> Job:
    """The job with each operation and each gradient under a name of its own: what comes again is numbered."""
    names = _numbered(job.names)
    tensors = _numbered([g.name for g in job.gradients])
    made = tuple(replace(g, name=name) for g, name in zip(job.gradients, tensors, strict=True))
    return replace(job, names=tuple(names), gradients=made)


def _numbered(names: Sequence[str]) -> list[str]:
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = count = seen.get(name, 0) + 1
        out.append(name if count == 1 else f"{name} #{count}")
    return out


def _check_same(jobs: Sequence[Job]) -> None:
    first = jobs[0]
    for number, job in enumerate(jobs):
        if job.names != first.names or [g.op for g in job.gradients] != [g.op for g in first.gradients]:
            raise ValueError(
                f"every iteration must run the same operations to be tuned, but iteration {number} differs from the "
                "first; record iterations that are alike"
            )


def _as_cut(job: Job, cut: Sequence[object], can_cut: bool) -> np.ndarray:
    """Joins of gradients as they were recorded: those up to each bucket's last operation."""
    num = len(job.gradients)
    joins = np.zeros(max(num - 1, 0), np.bool_)
    if can_cut:
        ends = np.array([bucket.op for bucket in cut])  # type: ignore[attr-defined]
        ops = np.array([g.op for g in job.gradients])
        bucket = np.searchsorted(ends, ops, side="left")
        joins = bucket[1:] == bucket[:-1]
    return joins


def _with_saves(job: Job, launch_s: float, fused: Fused) -> Job:
    """The job with what fusing each compute with the next saves: measured, or a launch."""
    spent = (job.seconds + job.lag_s).mean(axis=0)
    saves = np.full(len(job.names), np.nan)
    saves[:-1] = np.minimum(launch_s, np.minimum(spent[:-1], spent[1:]))
    place = {name: k for k, name in enumerate(job.names)}
    for ops, seconds in sorted(fused.items(), key=lambda one: -len(one[0])):  # a pair has the last word
        inside = [place.get(name, -1) for name in ops]
        if inside[0] < 0 or inside != list(range(inside[0], inside[0] + len(ops))):
            raise ValueError(
                f"--fused must name operations that follow each other in the job, but {', '.join(ops[:4])} do not; "
                "name them as the trace does"
            )
        saves[inside[:-1]] = (float(spent[inside].sum()) - seconds) / (len(ops) - 1)
    job = replace(job, saves_s=saves)
    return replace(job, saves_s=np.where(np.append(fusible(job), False), saves, np.nan))


def _with_memory(dfg: GlobalDfg, number: int, job: Job) -> Job:
    """The job with the bytes that its computes keep, where they are known: those of the first rank."""
    lowered = lower(dfg, number)
    ops = lowered.ops
    mine = ops[(dfg.node[ops] == 0) & dfg.is_op(Op.COMPUTE)[ops]]
    at = {int(op): place for place, op in enumerate(ops)}
    row = [at[int(op)] for op in mine[np.argsort(dfg.start_s[mine], kind="stable")]]
    names = [dfg.names[dfg.name[ops[place]]] for place in row]
    keeps, frees = np.zeros(len(job.names)), np.zeros(len(job.names))
    k = 0
    for place, name in zip(row, names, strict=True):
        # Computes of communication, copies and reductions, stand between those of the job.
        if k < len(job.names) and name == job.names[k].partition(" #")[0]:
            keeps[k], frees[k] = lowered.tasks.alloc_bytes[place], lowered.tasks.free_bytes[place]
            k += 1
    return replace(job, keeps=keeps, frees=frees) if keeps.any() else job
