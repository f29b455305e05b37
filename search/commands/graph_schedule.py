"""`search graph schedule`: what overlap the data of a graph allow, op by op on streams, and what hides what."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from estimator.detail.unroll import stage_of
from estimator.list_schedule import STREAMS, StageWork, list_schedule
from estimator.overlaps import Overlap, overlaps
from estimator.passes import lower, recompute
from estimator.tasks import CATEGORIES
from estimator.timeline import Timeline, busy, critical_path, exposed
from hardware.catalog import cluster, usual_clusters
from hardware.units import format_seconds
from results.chrome_trace import write_trace
from results.report.text import clip, columns, hanging
from search.commands.answer import answer, tell
from search.commands.graph_fuse import read_lowering
from search.commands.graph_subject import is_configuration
from search.commands.point import read_point
from search.replays import subject_of

__all__ = ["run"]

MOST_HIDERS = 3
MAX_TASKS = 2_000_000
VIEWER = "https://ui.perfetto.dev"


def run(args: argparse.Namespace) -> int:
    """Schedules one stage of a configuration, or a model on one chip."""
    work, name, told, subject = _stage(args) if is_configuration(args.config) else _model(args)
    per_block = max(len(block.ops) for block in work.graphs[True].blocks.values())
    if len(work.blocks) * per_block * work.num > MAX_TASKS:
        raise ValueError(f"--micro-batches must make at most {MAX_TASKS} tasks, but {work.num} make more; take fewer")
    timeline = list_schedule(work)
    if args.trace is not None:
        write_trace(Path(args.trace), timeline, subject=subject, about={"name": name, "of": told})
    found = overlaps(timeline)
    answer(args, text=_text(name, told, timeline, found, args.trace), data=_data(name, told, timeline, found))
    return 0


def _stage(args: argparse.Namespace) -> tuple[StageWork, str, str, str]:
    for word in ("seq", "precision", "chip"):
        if getattr(args, word) is not None:
            raise ValueError(f"--{word} is for a model, but {args.config} is a configuration, which says it; use --set")
    point = read_point(args.config, args.reference, args.overrides)
    try:
        point = point.settled()
        if point.system.segments:
            raise ValueError(f"a stage runs on chips of one kind, but got {point.system.told_chips}; name one cluster")
        stage, num = args.stage or 0, args.micro_batches or 1
        work = stage_of(point.model, point.strategy, point.system, point.workload, stage, num)
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from error
    tell(*point.notices)
    batches = "one micro-batch" if num == 1 else f"{num} micro-batches"
    told = f"stage {stage} of {int(np.asarray(point.strategy.pp))} on {point.system.name}, {batches}"
    subject = subject_of(point.model, point.strategy, point.system, point.workload)
    return work, point.name, told, f"schedule {subject} {stage} {num}"


def _model(args: argparse.Namespace) -> tuple[StageWork, str, str, str]:
    """All layers on one chip: what runs beside what is then nothing, unless a graph brings traffic."""
    if args.stage is not None:
        raise ValueError(f"--stage is for a configuration, but {args.config} is a model; leave it out")
    subject, num = read_lowering(args, args.config), args.micro_batches or 1
    by, names = subject.by, usual_clusters(subject.chip.name)
    system = cluster(names[0])
    plain = lower(subject.graph, by.strategy, by.recipe, by.routing)
    graphs = {False: plain, True: recompute(plain, by.strategy.recompute)}
    work = StageWork(graphs=graphs, blocks=tuple((kind, False) for kind in plain.sequence), strategy=by.strategy,
                     system=system, recipe=by.recipe, num=num)  # fmt: skip
    return work, subject.name, subject.told, f"schedule {subject.name} {subject.told} {num}"


def _text(name: str, told: str, timeline: Timeline, found: tuple[Overlap, ...], trace: str | None) -> str:
    data = _data(name, told, timeline, found)
    parts = (("compute_s", "of kernels"), ("exposed_s", "of traffic that none of them hides"), ("idle_s", "idle"))
    told_parts = ", ".join(f"{format_seconds(data[key])} {what}" for key, what in parts if data[key])
    in_all = (
        f"{format_seconds(data['span_s'])}: {told_parts}; one op after the other {format_seconds(data['serial_s'])}"
    )
    lines = [
        f"{name}: {told}",
        "every op as early as its data allow; other stages answer at once",
        "",
        *hanging("", in_all),
        "",
        *columns(["stream", "busy", "of the time", "tasks"], [
            [s["stream"], format_seconds(s["busy_s"]), f"{s['share']:.0%}", str(s["tasks"])]
            for s in data["streams"] if s["tasks"]
        ]),
        "",
        "critical path",
        *columns(["what", "seconds", "share"], [
            [what, format_seconds(s), f"{s / data['span_s']:.0%}"]
            for what, s in sorted(data["critical_path_s"].items(), key=lambda item: -item[1]) if s > 0
        ]),
    ]  # fmt: skip
    if found:
        rows = [
            [o.category.value, clip(o.name, 34), format_seconds(o.total_s),
             format_seconds(o.exposed_s) if o.exposed_s else "-",
             clip(", ".join(list(o.hidden_by)[:MOST_HIDERS]) or "-", 34)]
            for o in found
        ]  # fmt: skip
        lines += ["", "what hides what", *columns(["for", "traffic", "seconds", "exposed", "hidden by"], rows, left=2)]
    if trace is not None:
        lines += ["", *hanging("", f"trace: {trace}; open in {VIEWER}")]
    return "\n".join(lines) + "\n"


def _data(name: str, told: str, timeline: Timeline, found: tuple[Overlap, ...]) -> dict[str, Any]:
    tasks, state = timeline.tasks, busy(timeline)
    lasts = timeline.end - timeline.start
    shares = exposed(timeline).seconds
    by_category: dict[str, float] = {}
    for (category, _), seconds in shares.items():
        by_category[category.value] = by_category.get(category.value, 0.0) + float(seconds.sum())
    span = timeline.span_s
    return {
        "name": name, "of": told, "span_s": span, "compute_s": float(state.compute.sum()),
        "traffic_s": float(state.communication.sum()), "overlap_s": float(state.overlap.sum()),
        "exposed_s": float((state.communication - state.overlap).sum()), "idle_s": float(state.idle.sum()),
        "serial_s": float(tasks.seconds.sum()), "num_tasks": len(tasks),
        "streams": [
            {"stream": stream, "busy_s": float(lasts[tasks.stream == i].sum()),
             "share": float(lasts[tasks.stream == i].sum() / span) if span else 0.0,
             "tasks": int((tasks.stream == i).sum())}
            for i, stream in enumerate(STREAMS)
        ],
        "critical_path_s": critical_path(timeline).seconds,
        "exposed_by_s": by_category,
        "seconds_by": {c.value: float(lasts[tasks.category == code].sum()) for code, c in enumerate(CATEGORIES)
                       if (tasks.category == code).any()},
        "traffic": [
            {"category": o.category.value, "name": o.name, "total_s": o.total_s, "hidden_s": o.hidden_s,
             "exposed_s": o.exposed_s, "hidden_by_s": o.hidden_by}
            for o in found
        ],
    }  # fmt: skip
