"""What every writer begins with: rows of a table to settings, and what becomes of the things a framework cannot say.

What decides whether a job fits in memory or what it learns is refused in one line; what only changes its time becomes a
note. TIME_ONLY says which is which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from results.launchers.job import Job
from results.launchers.table import Inexpressible, Row, Values

__all__ = ["TIME_ONLY", "Written", "compose", "script_head"]

TIME_ONLY = frozenset({
    "overlap_tp", "overlap_cp", "overlap_ep", "overlap_pp", "overlap_dp", "tp_chunks", "bucket_bytes",
    "expert_bucket_bytes", "prefetch_blocks", "fusion", "cuda_graph", "interleave_group", "rank_order",
    "shared_expert_overlap", "redundant_experts", "routing_skew",
})  # fmt: skip
"""Axes whose loss costs time alone (and little memory: buffers). The rest is refused where it cannot be said."""


@dataclass(slots=True)
class Written:
    """Settings in a framework's names, and a sentence for each thing that it cannot say."""

    settings: Values = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def compose(
    job: Job, rows: Sequence[Row], without: Mapping[str, tuple[object, str]], model: Callable[[], Values], *,
    framework: str, lenient: bool = False,
) -> Written:  # fmt: skip
    """Every row written; ValueError, or a note where `lenient`, for what would make it another job."""
    out = Written()
    values: Values = dict(job.strategy) | {"is_even": job.is_even, "layout_text": job.layout, "layers": [*job.layers]}
    values |= {"num_chips": job.num_chips, "global_batch": job.global_batch, "dp": job.dp, "model": dict(job.model)}

    def cannot(key: str, value: object, why: str, *, in_part: bool = False) -> None:
        told = "" if key == "model" else f" {'+'.join(map(str, value)) if isinstance(value, list) else value}"
        remedy = "give --set model=NAME" if key == "model" else f"give --set strategy.{dotted(key)}=VALUE"
        if not lenient and key not in TIME_ONLY:
            raise ValueError(f"{job.name}: {framework} has no words for {dotted(key)}{told}: {why}; {remedy}")
        how = f"written as near as {framework} can" if in_part else "not written"
        out.notes.append(f"{dotted(key)}{told} is {how}: {why}")

    try:
        out.settings |= model()
    except Inexpressible as error:
        cannot("model", "", error.why)
    for row in rows:
        try:
            out.settings |= row.write(values)
        except Inexpressible as error:
            cannot(error.key, values[error.key], error.why, in_part=bool(error.said))
            out.settings |= error.said
    for key, (neutral, why) in without.items():
        if job.strategy[key] != neutral and not _is_idle(key, job):
            cannot(key, job.strategy[key], why)
    if job.routing_skew:
        cannot("routing_skew", f"{job.routing_skew:g}", "how tokens choose experts is the data's")
    return out


def _is_idle(key: str, job: Job) -> bool:
    """Whether an axis has no effect on this job, so that its loss need not be told."""
    s = job.strategy
    return {
        "tp_chunks": s["tp"] == 1 or not s["overlap_tp"],
        "prefetch_blocks": s["zero_stage"] != 3,
        "expert_bucket_bytes": job.model["moe"] is None or not s["overlap_dp"],
        "redundant_experts": s["ep"] == 1,
        "overlap_cp": s["cp"] == 1 or s["context_parallel"] != "ring",
    }.get(key, False)


def dotted(key: str) -> str:
    """An axis as a space's YAML writes it.

    >>> dotted("overlap_dp"), dotted("rank_order")
    ('overlap.dp', 'rank_order')
    """
    head, _, tail = key.partition("_")
    return f"{head}.{tail}" if head in {"overlap", "offload"} else key


def script_head(job: Job, framework: str, version: str, notes: Sequence[str], mark: str = "#") -> str:
    """The first lines of a file: what it launches, for which version, and what it cannot say."""
    lines = [f"{job.name}: {job.num_chips} GPUs, {framework} ({version})"]
    lines += [f"note: {note}" for note in notes]
    start = "#!/bin/bash\n" if mark == "#" and framework in {"Megatron-LM", "DeepSpeed"} else ""
    return start + "".join(f"{mark} {line}\n" for line in lines)
