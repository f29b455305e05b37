"""What others do by default on the same job, as decisions; and what Daydream would predict of it.

XLA fuses as many computes as it may. PyTorch DDP closes a bucket once it holds 25 MiB, the first 1 MiB. Horovod fuses
what is made within a cycle of 5 ms, up to 64 MB; its autotuning is replaced by the best of a grid of both, which is no
worse than what it samples. BytePS cuts tensors into parts of 4 MB, first come first served, or by priority where the
next forward pass waits layer by layer; a plan waits for all gradients, so that one stands beside the others and binds
nobody. With a ring the fused computes of XLA go with Horovod's buckets, with servers with BytePS's parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from capture.traces.records import Topology
from capture.traces.synthesise import size_over_bandwidth
from search.tuner.decisions import WHOLE, Decisions, apart, fusible
from search.tuner.judge import Judge
from search.tuner.priority import layered_s

__all__ = ["Baseline", "baselines", "capped", "cycled", "daydream_s"]

MB, MIB = 1e6, 2**20
DDP_FIRST, DDP_CAP = 1.0 * MIB, 25.0 * MIB
HOROVOD_CAP, HOROVOD_CYCLE_S = 64.0 * MB, 5e-3
CYCLES_S = (1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2)
CAPS = (1.0 * MB, 4.0 * MB, 8.0 * MB, 16.0 * MB, 32.0 * MB, 64.0 * MB, 128.0 * MB)
BYTEPS_PART = 4.0 * MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A default by name. layered: forward computes wait for their own gradients, by priority (priority.py)."""

    name: str
    decisions: Decisions
    layered: bool = False


def baselines(judge: Judge) -> list[Baseline]:
    """Those that go with the job's topology; of a job whose gradients are not known, how it was recorded alone."""
    return list(_all(judge))


def _all(judge: Judge) -> Iterator[Baseline]:
    subject = judge.subject
    if subject.measured:
        yield Baseline(name="as recorded", decisions=subject.start)
    if not subject.can_cut:
        return
    plain = apart(judge.shown, part_bytes=WHOLE)
    yield Baseline(name="no fusion", decisions=plain)
    every = replace(plain, ops=fusible(judge.shown))
    if subject.wire.topology is Topology.PARAMETER_SERVER:
        yield Baseline(name="XLA, BytePS parts", decisions=replace(every, part_bytes=BYTEPS_PART))
        yield Baseline(name="BytePS (4 MB)", decisions=replace(plain, part_bytes=BYTEPS_PART))
        if layered_s(judge, plain, priority=True) is not None:
            found = replace(plain, part_bytes=BYTEPS_PART)
            yield Baseline(name="BytePS, priorities", decisions=found, layered=True)
        return
    yield Baseline(name="XLA, Horovod buckets", decisions=cycled(judge, every, HOROVOD_CAP, HOROVOD_CYCLE_S))
    yield Baseline(name="DDP (25 MiB)", decisions=capped(judge, plain, DDP_CAP, first_bytes=DDP_FIRST))
    yield Baseline(name="Horovod (64 MB, 5 ms)", decisions=cycled(judge, plain, HOROVOD_CAP, HOROVOD_CYCLE_S))
    tuned = [cycled(judge, plain, cap, cycle) for cap in CAPS for cycle in CYCLES_S]
    yield Baseline(name="Horovod autotune", decisions=min(tuned, key=lambda d: judge.look(d).seconds))


def capped(judge: Judge, decisions: Decisions, cap_bytes: float, *, first_bytes: float | None = None) -> Decisions:
    """Buckets as DDP cuts them: one is closed once it holds so much."""
    held, limit = 0.0, cap_bytes if first_bytes is None else first_bytes
    joins = []
    for gradient in judge.shown.gradients:
        held += gradient.nbytes
        joins.append(held < limit)
        if held >= limit:
            held, limit = 0.0, cap_bytes
    return replace(decisions, tensors=np.array(joins[:-1], dtype=np.bool_))


def cycled(judge: Judge, decisions: Decisions, cap_bytes: float, cycle_s: float) -> Decisions:
    """Buckets as Horovod fuses them: what is made within a cycle, up to so much; cycles start with the iteration."""
    alone = replace(decisions, tensors=np.zeros_like(decisions.tensors), cycle_s=0.0)
    ticks = np.ceil(judge.look(alone).ready / cycle_s)
    held, joins = 0.0, []
    sizes = [g.nbytes for g in judge.shown.gradients]
    for j, nbytes in enumerate(sizes):
        held += nbytes
        joins.append(j + 1 < len(sizes) and ticks[j + 1] == ticks[j] and held + sizes[j + 1] <= cap_bytes)
        if not joins[-1]:
            held = 0.0
    return replace(decisions, tensors=np.array(joins[:-1], dtype=np.bool_), cycle_s=cycle_s)


def daydream_s(judge: Judge, decisions: Decisions) -> float:
    """What size over bandwidth predicts of decisions (Daydream, Zhu et al. 2020): one operation per bucket."""
    job, cut = judge.job_of(decisions, judge.shown)
    return size_over_bandwidth(job, cut, judge.subject.wire)
