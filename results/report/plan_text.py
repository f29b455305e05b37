"""A plan as plain text of at most 100 columns: points, answers, curves, assumptions. Prints nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.units import format_count, format_seconds
from results.goodput import Goodput, Reliability
from results.plan import Plan
from results.plan_answers import Answers, Curve
from results.report.terminal import arithmetic
from results.report.text import WIDTH, clip, columns, format_cell, hanging
from results.table import Table

__all__ = ["answer_lines", "assumed_pairs", "curve_lines", "plan_table", "point_phrase"]

_BAR = 30


def plan_table(front: Table, points: Plan, order: Sequence[int] | NDArray[np.intp]) -> str:
    """What the points at these places take: days, GPU-hours, cost, energy, CO2, and their degrees."""
    rows = [
        [
            _id(front.row(i)),
            format_cell("step_time_s", front["step_time_s"][i]),
            f"{points.goodput[i]:.1%}",
            _amount(points.days[i], 1),
            _amount(points.gpu_hours[i]),
            _amount(points.cost_usd[i]),
            _amount(points.energy_kwh[i] / 1e3),
            _amount(points.co2_kg[i] / 1e3),
        ]
        for i in order
    ]
    head = ["id", "step", "goodput", "days", "GPU-hours", "USD", "MWh", "t CO2"]
    header, rule, *numbers = columns(head, rows, left=0)
    start = len(rule) + 2
    lines = [f"{header:<{start}}configuration", "-" * WIDTH]
    systems = set(front["system"][list(order)])
    for line, i in zip(numbers, order, strict=True):
        row = front.row(i)
        where = f"; {clip(row['system'])}" if len(systems) > 1 else ""
        lines += hanging(f"{line:<{start}}", arithmetic(row) + where)
    return "\n".join(lines) + "\n"


def point_phrase(front: Table, points: Plan, place: int) -> str:
    """A point in a few words: chips, cluster, days, cost."""
    row = front.row(place)
    spares = f" and {points.spare_gpus[place]:.0f} spare" if points.spare_gpus[place] else ""
    takes = f"{_amount(points.days[place], 1)} days, {_amount(points.cost_usd[place])} USD"
    return f"{row['num_gpus']:.0f}{spares} chips of {clip(row['system'])} (id {_id(row)}): {takes}"


def answer_lines(front: Table, points: Plan, best: Answers, limits: str) -> list[str]:
    """Fewest chips, cheapest, quickest, and the cheapest of each cluster where there are several."""
    within = f" {limits}" if limits else ""
    told = {
        f"fewest chips{within}": best.fewest_gpus, f"cheapest{within}": best.cheapest,
        f"quickest{within}": best.quickest,
    }  # fmt: skip
    lines = []
    for name, place in told.items():
        if place is not None:
            lines += hanging(f"{name}: ", point_phrase(front, points, place))
    if len(best.cheapest_by_system) > 1:
        lines += ["", f"cheapest of each cluster{within}:"]
        for place in best.cheapest_by_system:
            lines += hanging("  ", point_phrase(front, points, place))
    return lines


def curve_lines(front: Table, points: Plan, bent: Sequence[Curve]) -> list[str]:
    """Days and efficiency against chips, a table a cluster; the knee is marked."""
    lines: list[str] = []
    for curve in bent:
        cells = [
            [
                f"{front['num_gpus'][place]:.0f}", _amount(points.days[place], 1), _amount(points.cost_usd[place]),
                f"{efficiency:.0%}", "#" * max(1, round(_BAR * min(efficiency, 1.0))) + " knee" * (place == curve.knee),
            ]
            for place, efficiency in zip(curve.places, curve.efficiency, strict=True)
        ]  # fmt: skip
        head = ["chips", "days", "USD", "work per GPU-hour", ""]
        table = columns(head[:4], [row[:4] for row in cells], left=0)
        bars = ["", "", *(row[4] for row in cells)]
        title = f"scaling of {clip(curve.system)}, the fastest of each size"
        lines += ["", title, *(f"  {line}  {bar}".rstrip() for line, bar in zip(table, bars, strict=True))]
    return lines


def assumed_pairs(
    reliability: Reliability | None, good: Goodput | None, kept: NDArray[np.intp]
) -> list[tuple[str, str]]:
    """What a plan assumes of failures, and what came of it over the points that are kept, or over all where none is."""
    if reliability is None or good is None:
        return [("failures", "not counted: steps run back to back, without checkpoints")]
    r = reliability

    def span(values: NDArray[np.float64], text: Any) -> str:  # noqa: ANN401 - a formatter
        shown = values[kept] if len(kept) else values
        low, high = float(shown.min()), float(shown.max())
        return text(low) if low == high else f"{text(low)} to {text(high)}"

    def seconds(x: float) -> str:
        return format_seconds(x) if math.isfinite(x) else "never"

    written = "given" if r.checkpoint_s is not None else (
        f"{r.checkpoint_bytes_per_parameter:g} bytes a parameter at {r.node_write_bytes_per_s / 1e9:g} GB/s a node"
    )  # fmt: skip
    rate = "the catalogue's" if r.chip_failures_per_hour is None else f"{r.chip_failures_per_hour:g} an hour and chip"
    spares = "given" if r.spare_nodes is not None else f"the fewest for {r.up_target:.1%} of the time"
    return [
        ("failures", f"one every {span(good.mtbf_s, seconds)}; rate {rate}"),
        ("checkpoints", f"{span(good.checkpoint_s, seconds)} each ({written}), every {span(good.interval_s, seconds)}"),
        ("restarts", f"{format_seconds(r.restart_s)} each"),
        ("spare nodes", f"{span(good.spare_nodes, lambda x: f'{x:.0f}')} ({spares})"),
        ("repairs", f"{format_seconds(r.repair_s)} each, after {r.broken_share:.0%} of failures"),
    ]  # fmt: skip


def _id(row: Mapping[str, Any]) -> str:
    return "ref" if row["id"] < 0 else str(row["id"])


def _amount(x: float, decimals: int = 0) -> str:
    """A sum in full up to a hundred million (days: thousand), then shortened; a dash where it is unknown or endless."""
    if not math.isfinite(x):
        return "-"
    return f"{x:,.{decimals}f}" if x < (1e5 if decimals else 1e8) else format_count(x)
