"""A replay as plain text: finalists beside their estimates, the critical path, exposed traffic, who was busy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from estimator.tasks import CATEGORIES, Category
from estimator.timeline import CriticalPath, Exposed, MemoryCurve, Timeline, busy
from hardware.units import format_bytes, format_seconds
from results.report.terminal import arithmetic, settings
from results.report.text import WIDTH, columns, format_cell, hanging

__all__ = ["busy_strips", "critical_table", "exposed_table", "finalist_table", "memory_lines"]

RANKS = 16  # of a strip chart; of more, as many evenly chosen
_CELLS = 50
_BAR = 50
_HEAD = ("id", "estimate", "replay", "error", "peak estimate", "peak replay")
_TENTHS = "0123456789"
_NUMBERS = (
    "estimated_step_time_s", "replayed_step_time_s", "estimated_peak_memory_bytes", "replayed_peak_memory_bytes",
)  # fmt: skip


def finalist_table(replays: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]) -> str:
    """Rows of replays.parquet in their order, each with its point (a row of the front); `!` flags a difference."""
    if not replays:
        return "no finalists\n"
    cells = [[_name(row), *(_cell(row, name) for name in _NUMBERS[:2]), _difference(row),
              *(_cell(row, name) for name in _NUMBERS[2:])] for row in replays]  # fmt: skip
    header, _, *lines = columns(_HEAD, cells, left=0)
    common = _common(points)
    out = [f"{header}  why chosen", "-" * WIDTH]
    for line, row, point in zip(lines, replays, points, strict=True):
        out += hanging(line.ljust(len(header)) + "  ", f"* {row['why']}")
        out += hanging("      ", "; ".join([arithmetic(point), *(p for p in settings(point) if p not in common)]))
        out += hanging("      ", row["note"]) if row["note"] else []
    out.append("-" * WIDTH)
    return "\n".join([*out, *(hanging("all rows: ", ", ".join(common)) if common else [])]) + "\n"


def critical_table(path: CriticalPath, span_s: float) -> str:
    """Seconds on the critical path by what they went to, longest first; they sum to the span."""
    lines = [f"critical path of {len(path.tasks)} tasks, {format_seconds(span_s)}"]
    for name, seconds in sorted(path.seconds.items(), key=lambda item: -item[1]):
        if seconds > 0:
            share = seconds / span_s if span_s else 0.0
            lines.append(f"{name:<18} {format_seconds(seconds):>10} {share:>7.1%}  |{_bar(share)}")
    return "\n".join(lines) + "\n"


def exposed_table(found: Exposed, timeline: Timeline) -> str:
    """Transfers by what should have hidden them: exposed seconds of the rank that has most, and how much that is."""
    rows = []
    for (category, shield), seconds in found.seconds.items():
        worst = int(np.argmax(seconds))
        bare, total = float(seconds[worst]), float(found.total[category, shield][worst])
        share = bare / total if total > 0 else 0.0
        texts = [category.value, shield.value, format_seconds(bare), format_seconds(total), f"{share:.0%}"]
        rows.append((-bare, [*texts, timeline.tasks.devices[worst].name]))
    if not rows:
        return "no traffic\n"
    rows.sort(key=lambda row: row[0])
    header = ["traffic", "should hide behind", "exposed", "of", "share", "most on"]
    return "\n".join(columns(header, [cells for _, cells in rows], left=2)) + "\n"


def busy_strips(timeline: Timeline) -> str:
    """Per rank, time from left to right: # computes, + computes in part, - traffic alone, . neither; and its shares."""
    tasks, span = timeline.tasks, timeline.span_s
    told, chosen = busy(timeline), _spaced(len(tasks.devices))
    width = max((len(tasks.devices[d].name) for d in chosen), default=0)
    lines = [
        f"{'rank':<{width}}  {'# compute, + in part, - traffic alone, . idle':<{_CELLS}}  compute  exposed     idle"
    ]
    for d in chosen:
        shares = [
            float(x[d]) / span if span else 0.0 for x in (told.compute, told.communication - told.overlap, told.idle)
        ]
        numbers = "".join(f"{share:>9.1%}" for share in shares)
        lines.append(f"{tasks.devices[d].name:<{width}}  {_strip(timeline, d)}{numbers}")
    if len(chosen) < len(tasks.devices):
        lines.append(f"{len(chosen)} of {len(tasks.devices)} ranks")
    return "\n".join(lines) + "\n"


def memory_lines(timeline: Timeline, curves: MemoryCurve) -> str:
    """The rank that comes closest to its capacity (or holds most): peak, when, and tenths of the capacity over time."""
    full = np.where(np.isfinite(curves.capacity), curves.peak / curves.capacity, 0.0)
    worst = int(np.lexsort((-curves.peak, -full))[0])
    peak, capacity = float(curves.peak[worst]), float(curves.capacity[worst])
    limit = f" of {format_bytes(capacity)} ({peak / capacity:.1%})" if math.isfinite(capacity) else ""
    name, when = timeline.tasks.devices[worst].name, format_seconds(float(curves.when[worst]))
    lines = [f"memory of {name}, the fullest: peak {format_bytes(peak)}{limit} at {when}"]
    over = [d for d in range(len(full)) if full[d] > 1.0]
    if over:
        names = ", ".join(timeline.tasks.devices[d].name for d in over)
        lines += hanging("", f"does not fit by the replay: {names}")
    top = capacity if math.isfinite(capacity) else peak
    edges = np.linspace(0.0, timeline.span_s, _CELLS + 1)
    times, levels = curves.times[worst], curves.bytes[worst]
    cells = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        first, last = np.searchsorted(times, low, side="right") - 1, np.searchsorted(times, high, side="left")
        held = float(levels[max(int(first), 0) : max(int(last), 1)].max())
        cells.append("!" if held > top else _TENTHS[min(int(10 * held / top), 9)] if top > 0 else "0")
    return "\n".join([*lines, f"tenths of {format_bytes(top)} over time: {''.join(cells)}"]) + "\n"


def _strip(timeline: Timeline, device: int) -> str:
    tasks = timeline.tasks
    computes = np.array([stream.computes for stream in tasks.streams], dtype=np.bool_)[tasks.stream]
    mine = (tasks.device == device) & np.isfinite(timeline.start) & (tasks.category != CATEGORIES.index(Category.HOST))
    compute, either = _covered(timeline, mine & computes), _covered(timeline, mine)
    return "".join(
        "#" if c >= 0.75 else "+" if c >= 0.25 else "-" if e >= 0.25 else "."
        for c, e in zip(compute.tolist(), either.tolist(), strict=True)
    )


def _covered(timeline: Timeline, chosen: np.ndarray) -> np.ndarray:
    """Share of each cell of time in which some of the chosen tasks run."""
    which = np.flatnonzero(chosen)
    which = which[np.argsort(timeline.start[which], kind="stable")]
    if not len(which) or not timeline.span_s:
        return np.zeros(_CELLS)
    start, end = timeline.start[which], np.maximum.accumulate(timeline.end[which])
    opens = np.concatenate([[True], start[1:] > end[:-1]])
    begins = start[opens]
    ends = end[np.concatenate([opens[1:], [True]])]
    held = np.concatenate([[0.0], np.cumsum(ends - begins)])
    edges = np.linspace(0.0, timeline.span_s, _CELLS + 1)
    at = np.stack([begins, ends], axis=1).ravel()
    known = np.stack([held[:-1], held[1:]], axis=1).ravel()
    return np.diff(np.interp(edges, at, known)) / (timeline.span_s / _CELLS)


def _spaced(num: int) -> list[int]:
    if num <= RANKS:
        return list(range(num))
    return sorted({round(i * (num - 1) / (RANKS - 1)) for i in range(RANKS)})


def _bar(share: float) -> str:
    return "#" * max(round(share * _BAR), 1)


def _name(row: Mapping[str, Any]) -> str:
    return "ref" if row["id"] < 0 else str(row["id"])


def _cell(row: Mapping[str, Any], name: str) -> str:
    return format_cell(name, row[name])


def _difference(row: Mapping[str, Any]) -> str:
    if not math.isfinite(row["error"]):
        return "-"
    return f"{row['error']:+.1%}{' ' if row['agrees'] else '!'}"


def _common(points: Sequence[Mapping[str, Any]]) -> list[str]:
    phrases = [settings(point) for point in points]
    return (
        [phrase for phrase in phrases[0] if all(phrase in other for other in phrases[1:])] if len(phrases) > 1 else []
    )
