"""What replays came to, as lines and as JSON: the finalists side by side, one of them in full. Replays nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from estimator.timeline import busy, critical_path, exposed, memory
from hardware.units import format_bytes, format_count, format_seconds
from results.report.replay import busy_strips, critical_table, exposed_table, finalist_table, memory_lines
from results.report.text import counted, format_cell, hanging
from results.schema import REPLAY_CRITICAL, REPLAY_EXPOSED, REPLAY_FIELDS, conform, strategy_json
from results.store import RunFolder
from results.table import Table
from search.finalists import AGREEMENT, PARTIAL, Key, key_of, name_of, order_line

if TYPE_CHECKING:
    from estimator.detail.step import ReplayedStep  # shows of a run load no replay

__all__ = [
    "beside",
    "detail",
    "finalist_lines",
    "json_detail",
    "json_replay",
    "json_replays",
    "points_of",
    "read_replays",
    "replay_lines",
]

Row = Mapping[str, Any]


def points_of(folder: RunFolder, rows: Sequence[Row]) -> dict[Key, dict[str, Any]]:
    """The priced points of a run behind rows of its replays, by key."""
    wanted = {key_of(row) for row in rows}
    found: dict[Key, dict[str, Any]] = {}
    for read in (folder.read_reference, folder.read_front, folder.read_trials):
        if wanted <= found.keys():
            break
        found |= {key_of(row): row for row in read().rows() if row["feasible"] and key_of(row) in wanted}
    return found


def read_replays(folder: RunFolder) -> tuple[Table, list[str]]:
    """The replays of a run; where they are damaged none, and a line that says so: the front is worth showing alone."""
    try:
        return folder.read_replays(), []
    except ValueError as error:
        name = shlex.quote(str(folder.path))
        return conform({field.name: [] for field in REPLAY_FIELDS}, REPLAY_FIELDS), hanging(
            "", f"{error}: `search replay {name}` does so"
        )


def json_replays(folder: RunFolder, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every row of the replays whose point is in the run."""
    points = points_of(folder, rows)
    return [json_replay(row, points[key_of(row)]) for row in rows if key_of(row) in points]


def finalist_lines(rows: Sequence[Row], points: Mapping[Key, Row]) -> list[str]:
    """The finalists in order of replayed time, and where the replay contradicts the estimate."""
    table = finalist_table(rows, [points[key_of(row)] for row in rows]).splitlines()
    return [*table, *_differences(rows)]


def replay_lines(rows: Sequence[Row]) -> list[str]:
    """What the replays of a run say of its front; none where there are none."""
    done = [row for row in rows if row["rank_replayed"]]
    lines = []
    if done:
        widest = max(abs(row["error"]) for row in done)
        lines += [
            f"{counted(len(done), 'finalist')} replayed, the estimate is off by {widest:.1%} at most",
            *_differences(rows),
        ]
    for row in rows:
        note = row["note"].partition(PARTIAL)[0].rstrip("; ")  # what a trace leaves out stands last
        lines += hanging(f"{name_of(row)}: ", note) if note else []
    return lines


def _differences(rows: Sequence[Row]) -> list[str]:
    """Which finalists differ by more than the estimate may, and what became of the ranking; none where all is well."""
    away = [row for row in rows if row["rank_replayed"] and not row["agrees"]]
    lines = []
    if away:
        names = ", ".join(f"{name_of(row)} ({row['error']:+.1%})" for row in away)
        lines += hanging("! ", f"the estimate is off by more than {AGREEMENT:.0%}, trust the replay: {names}")
    if over := [name_of(row) for row in rows if not row["fits"]]:
        lines += hanging(
            "! ", f"more memory than there is by the replay, ranked behind all that fit: {', '.join(over)}"
        )
    changed = order_line(rows)
    return [*lines, *(hanging("", changed) if changed else [])]


def beside(row: Row) -> list[str]:
    """One replay beside its estimate."""
    flag = "" if row["agrees"] else f", more than {AGREEMENT:.0%}: trust the replay"
    times = [format_cell(name, row[name]) for name in ("replayed_step_time_s", "estimated_step_time_s")]
    step = f"{times[0]}, estimate {times[1]}"
    held = f"{format_bytes(row['replayed_peak_memory_bytes'])}, estimate "
    held += format_bytes(row["estimated_peak_memory_bytes"])
    tasks = f"{format_count(row['events'])} tasks, unrolled and replayed in {format_seconds(row['replay_s'])}"
    return [
        *hanging("step      ", f"{step} ({row['error']:+.1%}{flag})"),
        *hanging("pipeline  ", format_cell("replayed_pipeline_s", row["replayed_pipeline_s"])),
        *hanging("memory    ", f"{held} (allocated, worst rank{'' if row['fits'] else '; does not fit'})"),
        *hanging("replayed  ", tasks),
    ]


def detail(step: ReplayedStep) -> str:
    """One replay in full: critical path, exposed traffic, who was busy, memory of the fullest rank."""
    timeline = step.timeline
    return "\n".join(
        (
            critical_table(critical_path(timeline), timeline.span_s),
            exposed_table(exposed(timeline), timeline),
            busy_strips(timeline),
            memory_lines(timeline, memory(timeline)),
        )
    )


def json_replay(row: Row, point: Row) -> dict[str, Any]:
    """One row of replays.parquet for JSON: reasons as a list, seconds by category nested, the strategy beside."""
    nested = {f"critical_{name}_s" for name in REPLAY_CRITICAL} | {f"exposed_{name}_s" for name in REPLAY_EXPOSED}
    flat = {name: value for name, value in row.items() if name not in nested}
    return flat | {
        "why": row["why"].split(", "),
        "strategy": strategy_json(point),
        "critical_path_s": {name: row[f"critical_{name}_s"] for name in REPLAY_CRITICAL},
        "exposed_comm_s": {name: row[f"exposed_{name}_s"] for name in REPLAY_EXPOSED},
    }


def json_detail(step: ReplayedStep) -> dict[str, Any]:
    """One replay in full for JSON; lists over ranks are in their order."""
    timeline = step.timeline
    told, curves, bare = busy(timeline), memory(timeline), exposed(timeline)
    ranks = [
        {
            "name": device.name, "num_ranks": device.num_ranks, "compute_s": float(told.compute[d]),
            "communication_s": float(told.communication[d]), "overlap_s": float(told.overlap[d]),
            "idle_s": float(told.idle[d]), "peak_memory_bytes": float(curves.peak[d]),
            "peak_at_s": float(curves.when[d]), "capacity_bytes": float(curves.capacity[d]),
        }
        for d, device in enumerate(timeline.tasks.devices)
    ]  # fmt: skip
    traffic = [
        {"category": category.value, "shield": shield.value, "exposed_s": np.asarray(seconds).tolist(),
         "total_s": np.asarray(bare.total[category, shield]).tolist()}
        for (category, shield), seconds in bare.seconds.items()
    ]  # fmt: skip
    return {
        "span_s": timeline.span_s,
        "critical_path_s": dict.fromkeys(REPLAY_CRITICAL, 0.0) | critical_path(timeline).seconds,
        "exposed": traffic,
        "ranks": ranks,
    }
