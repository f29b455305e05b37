"""`search trace tune`: a job's defaults beside what a tuner makes of it, and the plan that a trainer applies."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from capture.traces.model_jobs import MODELS
from capture.traces.what_if import Change
from estimator.tuning import Outcome, plan_text, read_plan
from hardware.units import format_bytes, format_count, format_seconds
from results.report.text import columns, hanging
from search.commands.answer import answer, check_writable, write
from search.commands.trace_change import read_change
from search.commands.trace_replay import read_job
from search.tuner.fused_file import read_fused
from search.tuner.judge import SpeedUps
from search.tuner.subject import Subject, measured_subject, sized_subject
from search.tuner.tune import DRIVERS, Options, Row, Tuned, chosen_passes, plan_row, tune

__all__ = ["run", "tuned_lines"]

SAME_JOB = (
    "what_if",
    "batch",
    "fused",
    "launch_s",
    "memory_budget",
    "passes",
    "without",
)  # without them, it is another
NAMED = 6  # things that a line names before it counts the rest


def run(args: argparse.Namespace) -> int:
    """Tunes, tells what changes and what it gains, and writes the plan of -o."""
    if args.output is not None:
        check_writable(args, args.output)
    options = _options(args)
    subject = _subject(args)
    given = None if args.plan is None else read_plan(args.plan)
    try:
        checked = None if given is None else plan_row(subject, options, given, args.plan)
        found = tune(subject, options)
    except ValueError as error:
        raise ValueError(f"{args.job}: {error}") from error
    if args.output is not None:
        write(args, plan_text(found.plan))
    told = argparse.Namespace(**{**vars(args), "output": None})
    answer(told, text=_text(args, subject, found, checked), data=_data(args, subject, found, checked))
    return 0


def _options(args: argparse.Namespace) -> Options:
    if args.driver not in DRIVERS:
        raise ValueError(f"--driver must be one of {', '.join(DRIVERS)}, but is {args.driver!r}")
    ups = SpeedUps(coarse=not args.no_coarse, partial=not args.no_partial, symmetry=not args.no_symmetry)
    return Options(
        passes=chosen_passes(args.passes, args.without), driver=args.driver, ups=ups, seed=args.seed,
        budget_bytes=args.memory_budget or float("inf"),
    )  # fmt: skip


def _subject(args: argparse.Namespace) -> Subject:
    change = Change() if args.what_if is None else read_change(args.what_if)
    if args.job in MODELS and not Path(args.job).exists():
        for option in ("fused", "launch_s"):
            if getattr(args, option) is not None:
                raise ValueError(f"--{option.replace('_', '-')} is of a measured job, but {args.job} is of a model's "
                                 "size; leave it out")  # fmt: skip
        return sized_subject(args.job, change, batch=args.batch or 32)
    if args.batch is not None:
        raise ValueError(f"--batch is of a model's size, but {args.job} is measured; leave it out")
    if not Path(args.job).exists():
        raise ValueError(f"{args.job}: must be a file of `search trace import -o`, or one of {', '.join(MODELS)}")
    fused = {} if args.fused is None else read_fused(args.fused)
    dfg = read_job(args.job, hosts=False)
    try:
        return measured_subject(dfg, change, name=Path(args.job).name, launch_s=args.launch_s, fused=fused)
    except ValueError as error:
        raise ValueError(f"{args.job}: {error}") from error


def _text(args: argparse.Namespace, subject: Subject, found: Tuned, checked: Row | None) -> str:
    job, plan = subject.shown, found.plan
    total = sum(g.nbytes for g in job.gradients)
    lines = [
        f"{subject.name}: {job.workers} workers, {subject.wire.topology.value}, {len(job.names)} operations, "
        f"{len(job.gradients)} gradients of {format_bytes(total)}",
        "",
        *tuned_lines(subject, found, checked),
        "",
        *_changes(found),
    ]
    spent = f"{format_seconds(found.search_s)}: {format_count(found.judged)} candidates judged, {found.replays} replays"
    lines += hanging("search    ", f"{spent}, {found.partial_replays} partial")
    lines += [line for note in plan.assumptions for line in hanging("assumed   ", note)]
    again = f"  search trace tune {shlex.quote(args.job)}"
    for option in SAME_JOB:
        value = getattr(args, option)
        again += "" if value is None else f" --{option.replace('_', '-')} {shlex.quote(f'{value}')}"
    if args.output is None:
        lines += ["next:", f"{again} -o plan.json"]
    else:
        lines += [f"plan      {args.output}", "next:", f"{again} --plan {shlex.quote(args.output)}"]
    return "\n".join(lines) + "\n"


def tuned_lines(subject: Subject, found: Tuned, checked: Row | None = None) -> list[str]:
    """The table: baselines, the plan that was given, and what was found."""
    best = found.best_baseline or found.best
    rows = [*found.rows, *([checked] if checked else []), found.best]
    memory = subject.memory_known
    head = ["", "an iteration", "to the best", "size/bandwidth", "buckets", "operations"]
    told = [
        [row.name, format_seconds(row.mean_s),
         f"{row.mean_s / best.mean_s - 1.0:+.1%}", format_seconds(row.daydream_s), str(row.num_buckets),
         str(row.num_ops), *([format_bytes(row.peak_bytes) + ("" if row.fits else ", over")] if memory else [])]
        for row in rows
    ]  # fmt: skip
    return columns([*head, *(["peak memory"] if memory else [])], told)


def _changes(found: Tuned) -> list[str]:
    plan, best = found.plan, found.best_baseline
    told = "no default fits the budget" if best is None else (
        f"{1.0 - found.best.mean_s / best.mean_s:.1%} against {best.name}, the best default"
    )  # fmt: skip
    before = _before(found)
    if best is None or best.name != before:
        told += f"; {plan.gain:.1%} against {before}"
    lines = hanging("gain      ", told)
    after: Outcome = plan.after
    if after.p90_s > after.p10_s:
        lines += hanging(
            "band      ", f"{format_seconds(after.p10_s)} to {format_seconds(after.p90_s)} of an iteration"
        )
    sizes = [format_bytes(bucket.nbytes) for bucket in plan.buckets]
    lines += hanging("buckets   ", f"{_some(sizes)} (nearest by one cap: bucket_cap_mb={plan.bucket_cap_mb:.3g})")
    parts = [format_bytes(bucket.part_bytes) for bucket in plan.buckets if bucket.part_bytes is not None]
    if parts:
        lines += hanging("parts     ", _some(parts))
    if plan.fused_ops:
        groups = [f"{group[0]} … {group[-1]} ({len(group)})" for group in plan.fused_ops]
        lines += hanging("fused     ", _some(groups))
    if plan.recompute:
        lines += hanging("again     ", _some(list(plan.recompute)))
    if plan.accumulate > 1:
        lines += hanging("batches   ", f"gradients of {plan.accumulate} micro-batches before they are sent")
    if plan.precision.value == "mixed":
        lines += hanging("precision ", "16 bits for compute and gradients")
    return lines


def _before(found: Tuned) -> str:
    return next((row.name for row in found.rows if row.name == "as recorded"), "no fusion")


def _some(texts: list[str]) -> str:
    more = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _data(args: argparse.Namespace, subject: Subject, found: Tuned, checked: Row | None) -> dict[str, Any]:
    plan, best = found.plan, found.best_baseline
    rows = [*found.rows, *([checked] if checked else []), found.best]
    return {
        "job": args.job, "workers": plan.workers, "topology": plan.topology, "operations": len(subject.shown.names),
        "gradients": len(subject.shown.gradients), "graph": plan.graph, "driver": plan.driver,
        "rows": [
            {"name": row.name, "iteration_s": row.mean_s, "iterations_s": row.seconds.tolist(), "fits": row.fits,
             "size_over_bandwidth_s": row.daydream_s, "buckets": row.num_buckets, "operations": row.num_ops,
             "peak_bytes": row.peak_bytes if subject.memory_known else None}
            for row in rows
        ],
        "best_default": None if best is None else best.name,
        "gain_over_best_default": None if best is None else 1.0 - found.best.mean_s / best.mean_s, "gain": plan.gain,
        "search_s": found.search_s, "candidates": found.judged, "replays": found.replays,
        "partial_replays": found.partial_replays, "bucket_cap_mb": plan.bucket_cap_mb,
        "bucket_bytes": [bucket.nbytes for bucket in plan.buckets], "fused_ops": [list(g) for g in plan.fused_ops],
        "recompute": list(plan.recompute), "accumulate": plan.accumulate, "precision": plan.precision.value,
        "assumptions": list(plan.assumptions), "plan": args.output,
    }  # fmt: skip
