"""`search trace replay`: a measured job replayed iteration by iteration beside what it took, and where time went."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from capture.traces.dfg import GlobalDfg, build
from capture.traces.replay import Iteration, TraceReplay, replay_trace
from capture.traces.trace_file import read_traces
from estimator.breakdown import breakdown, stragglers
from estimator.timeline import Timeline, critical_path
from hardware.units import format_bytes, format_count, format_seconds
from results.chrome_trace import check_free, write_trace
from results.report.occupancy import breakdown_table, straggler_table
from results.report.replay import critical_table
from results.report.text import hanging
from search.commands.answer import answer
from search.commands.trace_change import change_lines, json_change, predicted, read_change
from search.commands.trace_measured import measured_step

__all__ = ["json_timeline", "read_job", "run"]

NOTES = 8  # of a text: each rank has one on its clock


def read_job(path: str, *, hosts: bool = True) -> GlobalDfg:
    """The global graph of a file of `search trace import`. hosts: with what launching processors do as operations."""
    try:
        return build(read_traces(path).traces, hosts=hosts)
    except ValueError as error:
        raise ValueError(_of_file(path, error)) from error


def _of_file(path: str, error: ValueError) -> str:
    text = str(error)
    return text if text.startswith(path) else f"{path}: {text}"


def run(args: argparse.Namespace) -> int:
    """Replays the job as it was measured, and with --what-if as it was not."""
    subject = f"trace {Path(args.file).name}"
    if args.trace is not None:
        check_free(Path(args.trace), subject)
    if args.measured:
        return _show_measured(args, subject)
    if args.iteration is not None:
        raise ValueError("--iteration goes with --measured, for a replay takes all of them; leave it out")
    if args.alone is not None and args.what_if is None:
        raise ValueError("--alone goes with --what-if, for a replay as measured needs none; leave it out")
    change = None if args.what_if is None else read_change(args.what_if)
    dfg = read_job(args.file)
    try:
        done, bare = replay_trace(dfg), replay_trace(dfg.without_lags())
        pauses = dfg.without_lags(but_pauses=True)
        paused = replay_trace(pauses) if pauses.lag_s.any() else None
    except ValueError as error:
        raise ValueError(_of_file(args.file, error)) from error
    shown = done.median
    timeline = shown.timeline
    text, data = _text(dfg, done, bare, paused, shown), _data(args, dfg, done, bare, paused, shown)
    if change is not None:
        try:
            plain = read_job(args.file, hosts=False)
            alone = None if args.alone is None else read_job(args.alone, hosts=False)
            found, same = predicted(plain, change, with_hosts=dfg, alone=alone)
        except ValueError as error:
            raise ValueError(_of_file(args.file, error)) from error
        lines = change_lines(args.what_if, found, same, done.measured_s)
        lines += [line for note in found.notices for line in hanging("note: ", note)]
        text += "\n" + "\n".join(lines) + "\n"
        data["change"] = json_change(args.what_if, found, same, plain)
        timeline = found.shown.run()
    if args.trace is not None:
        about = {"what": args.what_if or "as measured", "iteration": float(shown.number)}
        written = write_trace(Path(args.trace), timeline, subject=subject, about=about)
        text += f"trace: {written.path}\n"
        data["trace"] = str(written.path)
    answer(args, text=text, data=data)
    return 0


def _show_measured(args: argparse.Namespace, subject: str) -> int:
    """Where the time of one iteration went as it was recorded; ranks may be missing."""
    if args.what_if is not None:
        raise ValueError("--what-if replays and --measured does not; give one of them")
    timeline, about = measured_step(args.file, args.iteration)
    names = [device.name for device in timeline.tasks.devices]
    data: dict[str, Any] = {"file": args.file, "about": about, **json_timeline(timeline, names), "trace": None}
    lines = [f"{about}, {format_seconds(timeline.span_s)}", critical_table(critical_path(timeline), timeline.span_s)]
    lines += [breakdown_table(breakdown(timeline), names), straggler_table(stragglers(timeline), names)]
    if args.trace is not None:
        data["trace"] = str(write_trace(Path(args.trace), timeline, subject=subject, about={"what": about}).path)
        lines.append(f"trace: {args.trace}")
    answer(args, text="\n".join(lines), data=data)
    return 0


def _text(dfg: GlobalDfg, done: TraceReplay, bare: TraceReplay, paused: TraceReplay | None, shown: Iteration) -> str:
    timeline, names = shown.timeline, [f"rank {rank}" for rank in dfg.ranks]
    lines = [
        f"{len(dfg.ranks)} ranks, {len(done.iterations)} iterations, {format_count(len(dfg))} operations, "
        f"{format_count(len(dfg.before))} edges",
        f"measured  {_spread(done.measured_s)} an iteration",
        f"replayed  {_spread(done.replayed_s)}: {done.mean_error:+.2%} (worst iteration {done.worst_error:+.2%})",
        f"order     {_spread(bare.replayed_s)}: {bare.mean_error:+.2%} by dependencies alone, without the host's time",
    ]
    if paused is not None:
        pauses = f"{paused.mean_error:+.2%} with the pauses of threads that launch, as of Python"
        lines.append(f"pauses    {_spread(paused.replayed_s)}: {pauses}")
    if shown.peak_bytes.any():
        lines.append(_memory(dfg, shown))
    lines += ["", f"iteration {shown.number}:", critical_table(critical_path(timeline), timeline.span_s)]
    lines += [breakdown_table(breakdown(timeline), names), straggler_table(stragglers(timeline), names)]
    for note in dfg.notices[:NOTES]:
        lines += hanging("note: ", note)
    lines += [f"note: {len(dfg.notices) - NOTES} more with --json"] if len(dfg.notices) > NOTES else []
    return "\n".join(lines) + "\n"


def _memory(dfg: GlobalDfg, shown: Iteration) -> str:
    """The peak beside that of samples: of the iteration, else of one that was only watched for them."""
    peak, sampled, where = float(shown.peak_bytes.max()), shown.sampled_bytes, ""
    if np.isnan(sampled).all():
        sampled, where = (
            np.array([np.fmax.reduce(held, initial=np.nan) for _, held in dfg.memory]),
            " in another iteration",
        )
    if np.isnan(sampled).all():
        return f"memory    {format_bytes(peak)} at most, of tensors whose size is known"
    most = float(np.nanmax(sampled))
    return f"memory    {format_bytes(peak)} at most, sampled {format_bytes(most)}{where}: {peak / most - 1.0:+.2%}"


def _spread(seconds: np.ndarray) -> str:
    return f"{format_seconds(float(seconds.mean()))} ± {format_seconds(float(seconds.std()))}"


def _data(
    args: argparse.Namespace,
    dfg: GlobalDfg,
    done: TraceReplay,
    bare: TraceReplay,
    paused: TraceReplay | None,
    shown: Iteration,
) -> dict[str, Any]:
    return {
        "file": args.file, "ranks": list(dfg.ranks), "operations": len(dfg), "edges": len(dfg.before),
        "measured_s": float(done.measured_s.mean()), "measured_std_s": float(done.measured_s.std()),
        "replayed_s": float(done.replayed_s.mean()), "replayed_std_s": float(done.replayed_s.std()),
        "error": done.mean_error, "worst_error": done.worst_error, "order_alone_error": bare.mean_error,
        "order_and_pauses_error": None if paused is None else paused.mean_error,
        "iterations": [
            {"iteration": one.number, "measured_s": one.measured_s, "replayed_s": one.replayed_s, "error": one.error,
             "rank_s": one.rank_s.tolist(), "peak_bytes": one.peak_bytes.tolist(),
             "sampled_bytes": one.sampled_bytes.tolist()}
            for one in done.iterations
        ],
        "shown": {"iteration": shown.number, **json_timeline(shown.timeline, [f"rank {rank}" for rank in dfg.ranks])},
        "notices": list(dfg.notices), "trace": None, "change": None,
    }  # fmt: skip


def json_timeline(timeline: Timeline, names: Sequence[str]) -> dict[str, Any]:
    """Where the time of a timeline went, measured or simulated."""
    found = breakdown(timeline)
    return {
        "span_s": timeline.span_s, "critical_path_s": critical_path(timeline).seconds,
        "ranks": [
            {"name": name, "compute_s": float(found.compute_s[d]), "non_compute_s": float(found.non_compute_s[d]),
             "idle_s": float(found.idle_s[d]), "communication_s": float(found.communication_s[d]),
             "overlap_s": float(found.overlap_s[d]), "overlap_share": float(found.overlap_share[d]),
             "waits_s": {cause.value: float(seconds[d]) for cause, seconds in found.waits_s.items()}}
            for d, name in enumerate(names)
        ],
        "stragglers": [
            {"name": names[one.device], "compute_s": one.compute_s, "beyond_median_s": one.beyond_s,
             "critical_s": one.critical_s, "late": one.late}
            for one in stragglers(timeline)
        ],
    }  # fmt: skip
