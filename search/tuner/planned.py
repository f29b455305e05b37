"""Decisions as a plan that a trainer applies, and a plan as decisions on the same graph. Judges nothing."""

from __future__ import annotations

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
    place = {name: k for k, name in enumerate(job.names)}
    tensor = {gradient.name: j for j, gradient in enumerate(job.gradients)}
    ops, tensors = np.zeros(len(job.names) - 1, np.bool_), np.zeros(len(job.gradients) - 1, np.bool_)
    for group in plan.fused_ops:
        ops[[place[name] for name in group[:-1]]] = True
    for bucket in plan.buckets:
        tensors[[tensor[name] for name in bucket.tensors[:-1]]] = True
    segment = {one.name: s for s, one in enumerate(judge.segments)}
    told = [max(round(b.nbytes / b.part_bytes), 1) for b in plan.buckets if b.part_bytes is not None]
    return Decisions(
        ops=ops, tensors=tensors, part_bytes=judge.subject.start.part_bytes, parts=tuple(told),
        recompute=frozenset(segment[name] for name in plan.recompute), accumulate=plan.accumulate,
        mixed=plan.precision is TunedPrecision.MIXED,
    )  # fmt: skip
