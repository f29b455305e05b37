"""What a tuner decided for one data-parallel job, as plain data that a trainer applies: a plan, its file, its graph.

A plan says how gradients are put into buckets and parts, which operations run as one, what is computed again instead of
kept, over how many micro-batches gradients accumulate, and in which precision; beside it the seconds and bytes that
were predicted before and after. It is for one graph: the names of its operations and gradients, and the gradients'
bytes. Seconds, ranks and links are not part of that, so a plan may be tried on another recording of the same job.
Decides nothing, and applies nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from estimator.graph_json import check_keys, read_json, read_list, read_mapping, read_text, read_whole
from estimator.mapping import shown

__all__ = ["Outcome", "PlanBucket", "TunedPrecision", "TuningPlan", "graph_mark", "is_plan_text", "plan_text",
           "read_plan"]  # fmt: skip

FORMAT, VERSION = "trainspace-plan", 1
KEYS = ("format", "version", "graph", "workers", "topology", "buckets", "bucket_cap_mb", "fused_ops", "recompute",
        "accumulate", "precision", "before", "after", "driver", "assumptions")  # fmt: skip


class TunedPrecision(Enum):
    """In what the operations of the job compute and its gradients travel."""

    AS_RECORDED = "as_recorded"
    MIXED = "mixed"  # 16-bit compute and gradients, the update as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanBucket:
    """Gradients that travel together. tensors: in the order in which they are made.

    nbytes: of all of them, as they travel. part_bytes: into which a tree or servers cut it, None: it goes whole.
    """

    tensors: tuple[str, ...]
    nbytes: float
    part_bytes: float | None = None

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("a bucket must hold at least one tensor, but holds none; leave it out")
        for name, value in (("nbytes", self.nbytes), ("part_bytes", self.part_bytes)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} of a bucket must be more than 0, but is {value}; give bytes such as 25e6")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Predicted seconds of an iteration with their band (P10, P90), and bytes of a rank; None: memory is not known."""

    seconds: float
    p10_s: float
    p90_s: float
    peak_bytes: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.p10_s <= self.seconds <= self.p90_s < math.inf:
            raise ValueError(
                f"p10_s <= seconds <= p90_s must hold from 0 on, but they are {self.p10_s}, {self.seconds}, "
                f"{self.p90_s}; predict them anew"
            )
        if self.peak_bytes is not None and not 0 <= self.peak_bytes < math.inf:
            raise ValueError(f"peak_bytes must be at least 0, but is {self.peak_bytes}; leave it out where not known")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPlan:
    """What to change in one job.

    graph: the mark of the graph it is for (`graph_mark`). workers, topology: what the prediction assumes. buckets:
    every gradient once, in the order in which they leave. bucket_cap_mb: the cap (MiB, as DDP counts) under which DDP's
    own rule is fastest. fused_ops: names of operations that run as one, each group in order. recompute:
    modules whose activations are computed again. accumulate: micro-batches of an update. before, after: the job as it
    was and with the plan. driver: what searched. assumptions: what the figures rest on, a sentence each.
    """

    graph: str
    workers: int
    topology: str
    buckets: tuple[PlanBucket, ...]
    bucket_cap_mb: float
    before: Outcome
    after: Outcome
    fused_ops: tuple[tuple[str, ...], ...] = ()
    recompute: tuple[str, ...] = ()
    accumulate: int = 1
    precision: TunedPrecision = TunedPrecision.AS_RECORDED
    driver: str = ""
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _once([name for bucket in self.buckets for name in bucket.tensors], "a tensor", "bucket")
        _once([name for group in self.fused_ops for name in group], "an operation", "group of fused_ops")
        _once(list(self.recompute), "a module", "place in recompute")
        if any(len(group) < 2 for group in self.fused_ops):
            raise ValueError("a group of fused_ops must have at least two operations; leave out what runs alone")
        if self.workers < 1 or self.accumulate < 1:
            raise ValueError(f"workers and accumulate must be at least 1, but are {self.workers} and {self.accumulate}")
        if not 0 < self.bucket_cap_mb < math.inf:
            raise ValueError(f"bucket_cap_mb must be more than 0, but is {self.bucket_cap_mb}; give MiB such as 25")

    @property
    def gain(self) -> float:
        """Share by which an iteration gets shorter."""
        return 1.0 - self.after.seconds / self.before.seconds if self.before.seconds else 0.0

    def require_graph(self, mark: str, source: str = "the job") -> None:
        """ValueError where the plan is for a graph of another mark."""
        if self.graph != mark:
            raise ValueError(
                f"{source}: a plan must be for the graph it is applied to, but this one is for {self.graph} and the "
                f"graph here is {mark}; tune this job"
            )

    def require_tensors(self, names: Iterable[str], source: str = "the job") -> None:
        """ValueError where a trainer's parameters are not those of the plan; the first one that differs is named."""
        have, told = set(names), {name for bucket in self.buckets for name in bucket.tensors}
        if have == told:
            return
        name = min(have ^ told)
        lacks = "the plan has and the model has not" if name in told else "the model has and the plan has not"
        raise ValueError(
            f"{source}: a plan must be for the model it is applied to, but there is a tensor {name!r} that {lacks} "
            f"({len(have ^ told)} such); tune this job"
        )


def _once(names: Sequence[str], what: str, place: str) -> None:
    seen = set[str]()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} must stand in one {place}, but {name!r} stands in two; leave one out")
        seen.add(name)


def graph_mark(ops: Iterable[str], tensors: Iterable[tuple[str, float]]) -> str:
    """What tells graphs apart: names of operations in order, and (name, bytes) of gradients in the order they are made.

    >>> graph_mark(["FW", "BW"], [("weight", 4.0)]) == graph_mark(["FW", "BW"], [("weight", 8.0)])
    False
    """
    content = [list(ops), [[name, float(nbytes)] for name, nbytes in tensors]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def plan_text(plan: TuningPlan) -> str:
    """The file's content; reading it gives the same plan to the bit."""
    content = {
        "format": FORMAT, "version": VERSION, "graph": plan.graph, "workers": plan.workers, "topology": plan.topology,
        "buckets": [
            {"tensors": list(b.tensors), "nbytes": b.nbytes, "part_bytes": b.part_bytes} for b in plan.buckets
        ],
        "bucket_cap_mb": plan.bucket_cap_mb, "fused_ops": [list(group) for group in plan.fused_ops],
        "recompute": list(plan.recompute), "accumulate": plan.accumulate, "precision": plan.precision.value,
        "before": _outcome_json(plan.before), "after": _outcome_json(plan.after), "driver": plan.driver,
        "assumptions": list(plan.assumptions),
    }  # fmt: skip
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _outcome_json(outcome: Outcome) -> dict[str, float | None]:
    return {key: getattr(outcome, key) for key in Outcome.__dataclass_fields__}


def is_plan_text(text: str) -> bool:
    """Whether a file claims to be a plan, of any version."""
    return text[:200].lstrip().startswith("{") and f'"{FORMAT}"' in text[:200]


def read_plan(path: str | Path, text: str | None = None) -> TuningPlan:
    """The plan of a file, or of its text; ValueError names file, place, rule and value."""
    content = read_json(path, text)
    try:
        return _plan(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _plan(whole: Mapping[str, Any]) -> TuningPlan:
    if whole.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT!r}, but got {shown(whole.get('format'))}; give a plan of a tuner")
    if whole.get("version") != VERSION:
        raise ValueError(f"version must be {VERSION}, but got {shown(whole.get('version'))}; tune the job again")
    check_keys(whole, KEYS, "the plan")
    known = [precision.value for precision in TunedPrecision]
    if whole["precision"] not in known:
        raise ValueError(f"precision must be one of {', '.join(known)}, but got {shown(whole['precision'])}")
    return TuningPlan(
        graph=read_text(whole["graph"], "graph"), workers=read_whole(whole["workers"], "workers"),
        topology=read_text(whole["topology"], "topology"),
        buckets=tuple(_bucket(b, f"buckets.{i}") for i, b in enumerate(read_list(whole["buckets"], "buckets"))),
        bucket_cap_mb=_number(whole["bucket_cap_mb"], "bucket_cap_mb"),
        fused_ops=tuple(
            _texts(g, f"fused_ops.{i}") for i, g in enumerate(read_list(whole["fused_ops"], "fused_ops"))
        ),
        recompute=_texts(whole["recompute"], "recompute"), accumulate=read_whole(whole["accumulate"], "accumulate"),
        precision=TunedPrecision(whole["precision"]), before=_outcome(whole["before"], "before"),
        after=_outcome(whole["after"], "after"), driver=read_text(whole["driver"], "driver"),
        assumptions=_texts(whole["assumptions"], "assumptions"),
    )  # fmt: skip


def _bucket(value: object, where: str) -> PlanBucket:
    given = read_mapping(value, where)
    check_keys(given, ("tensors", "nbytes", "part_bytes"), where)
    part = given["part_bytes"]
    return PlanBucket(
        tensors=_texts(given["tensors"], f"{where}.tensors"), nbytes=_number(given["nbytes"], f"{where}.nbytes"),
        part_bytes=None if part is None else _number(part, f"{where}.part_bytes"),
    )  # fmt: skip


def _outcome(value: object, where: str) -> Outcome:
    given = read_mapping(value, where)
    check_keys(given, tuple(Outcome.__dataclass_fields__), where)
    peak = given["peak_bytes"]
    seconds = {key: _number(given[key], f"{where}.{key}") for key in ("seconds", "p10_s", "p90_s")}
    return Outcome(**seconds, peak_bytes=None if peak is None else _number(peak, f"{where}.peak_bytes"))


def _texts(value: object, where: str) -> tuple[str, ...]:
    return tuple(read_text(item, f"{where}.{i}") for i, item in enumerate(read_list(value, where)))


def _number(value: object, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{where} must be a number of at least 0, but got {shown(value)}")
    return float(value)  # type: ignore[arg-type]
