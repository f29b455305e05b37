"""Decisions as a plan that a trainer applies, and a plan as decisions on the same graph. Judges nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from estimator.tuning import PlanBucket, TunedPrecision, TuningPlan
from search.tuner.baselines import capped
from search.tuner.decisions import Decisions
from search.tuner.judge import Judge

__all__ = ["bucket_cap_mb", "bucket_list", "decided", "fused_names"]

MIB = 2**20
NEAR = 1e-3  # of an iteration: caps that near are as fast


def bucket_list(judge: Judge, decisions: Decisions) -> tuple[PlanBucket, ...]:
    """Buckets in the order in which they leave; parts where the topology cuts buckets."""
    job, cut = judge.job_of(decisions, judge.shown)
    cuts = len(judge.sync.parts) > 1
    return tuple(
        PlanBucket(tensors=b.names, nbytes=b.nbytes, part_bytes=b.part_bytes if cuts else None) for b in cut if b.names
    )


def fused_names(judge: Judge, decisions: Decisions) -> tuple[tuple[str, ...], ...]:
    """Names of computes that run as one, in order."""
    names, groups = judge.shown.names, list[list[str]]()
    for k in np.flatnonzero(decisions.ops).tolist():
        if groups and groups[-1][-1] == names[k]:
            groups[-1].append(names[k + 1])
        else:
            groups.append([names[k], names[k + 1]])
    return tuple(tuple(group) for group in groups)


def bucket_cap_mb(judge: Judge, decisions: Decisions) -> float:
    """The cap in MiB under which DDP's own rule, one cap for all buckets, is fastest; the largest of those as fast."""
    sizes = judge.look(decisions).nbytes
    tried = np.unique(np.concatenate([sizes, np.geomspace(0.25 * MIB, max(float(sizes.sum()), MIB), 25)]))
    plain = replace(decisions, cycle_s=0.0)
    seconds = np.array([judge.look(capped(judge, plain, float(cap))).seconds for cap in tried])
    return float(tried[np.flatnonzero(seconds <= seconds.min() * (1.0 + NEAR))[-1]] / MIB)


def decided(judge: Judge, plan: TuningPlan, source: str) -> Decisions:
    """A plan's decisions on a graph; ValueError where it is for another."""
    plan.require_graph(judge.subject.mark, source)
    job = judge.shown
    made = [gradient.name for gradient in job.gradients]
    plan.require_tensors(made, source)
    ops = _joins(job.names, plan.fused_ops, f"{source}: fused_ops")
    tensors = _joins(made, [bucket.tensors for bucket in plan.buckets], f"{source}: buckets")
    segment = {one.name: s for s, one in enumerate(judge.segments)}
    for name in plan.recompute:
        if name not in segment:
            raise ValueError(
                f"{source}: recompute must name modules of the job, but {name!r} is none that can be computed again; "
                "tune this job"
            )
    told = [max(round(b.nbytes / b.part_bytes), 1) for b in plan.buckets if b.part_bytes is not None]
    return Decisions(
        ops=ops, tensors=tensors, part_bytes=judge.subject.start.part_bytes, parts=tuple(told),
        recompute=frozenset(segment[name] for name in plan.recompute), accumulate=plan.accumulate,
        mixed=plan.precision is TunedPrecision.MIXED,
    )  # fmt: skip


def _joins(names: Sequence[str], groups: Sequence[Sequence[str]], where: str) -> np.ndarray:
    """[K - 1] which of the names are joined with the next; ValueError where a group is no run of them."""
    place = {name: k for k, name in enumerate(names)}
    joins = np.zeros(max(len(names) - 1, 0), np.bool_)
    for group in groups:
        inside = [place.get(name, -1) for name in group]
        if inside[0] < 0 or inside != list(range(inside[0], inside[0] + len(group))):
            raise ValueError(
                f"{where} must hold names that follow each other in the job, but {', '.join(group[:4])} do not; tune "
                "this job"
            )
        joins[inside[:-1]] = True
    return joins
