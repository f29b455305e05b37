"""What a test bed runs against each other: a tuner's plan for a job that was recorded there, and others' defaults.

Plans change what the trainer of the test bed can do: buckets, parts, what is computed again, and in which precision. It
compiles nothing, so operations are not fused, and defaults that fuse them are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from capture.testbed.setup import Setup
from capture.traces.dfg import GlobalDfg
from capture.traces.records import Topology
from capture.traces.what_if import Change
from estimator.tuning import plan_text
from search.tuner.judge import Judge
from search.tuner.planned import bucket_list
from search.tuner.subject import measured_subject
from search.tuner.tune import Options, Tuned, tune

__all__ = ["PASSES", "Contender", "contenders"]

PASSES = ("tensor_fusion", "tensor_partition")
HALF = "mixed_precision"
BYTEPS_PART = 4e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run the job, and the seconds of an iteration that the tuner predicts, None: nobody does."""

    name: str
    setup: Setup
    predicted_s: float | None
    default: bool


def contenders(recorded: GlobalDfg, base: Setup) -> tuple[Contender, ...]:
    """The plan, the plan with 16 bits, and defaults. ValueError where the recording does not hold what tuning needs."""
    subject = measured_subject(recorded, Change(), name=base.model, launch_s=None, fused={})
    options = Options(passes=PASSES)
    found = tune(subject, options)
    half = tune(subject, replace(options, passes=(*PASSES, HALF)))
    judge = Judge(subject, options.ups, options.budget_bytes)
    return (
        _planned("tuned", base, found),
        _planned("tuned, 16 bits", base, half),
        *_defaults(base, found, judge),
        Contender(name="BytePS (server, 4 MB)", predicted_s=None, default=True,
                  setup=replace(base, topology=Topology.PARAMETER_SERVER, bucket_bytes=1.0, part_bytes=BYTEPS_PART)),
    )  # fmt: skip


def _defaults(base: Setup, found: Tuned, judge: Judge) -> Iterator[Contender]:
    """Those that the trainer can run. What Horovod waits for its cycle is left out: its buckets leave when full."""
    for row in found.rows:
        if row.name != "as recorded" and not row.decisions.ops.any() and "autotune" not in row.name:
            names = tuple(bucket.tensors for bucket in bucket_list(judge, row.decisions))
            yield Contender(name=row.name, setup=replace(base, buckets=names), predicted_s=row.mean_s, default=True)


def _planned(name: str, base: Setup, found: Tuned) -> Contender:
    return Contender(
        name=name, setup=replace(base, plan=plan_text(found.plan)), predicted_s=found.plan.after.seconds, default=False
    )
