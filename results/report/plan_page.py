"""A plan as one HTML page that needs nothing else: plain SVG, no script, no network. Works nothing out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from results.colours import STROKES
from results.plan import Plan
from results.plan_answers import Curve
from results.report.terminal import arithmetic
from results.table import Table

__all__ = ["plan_page"]

WIDTH, HEIGHT, LEFT, BOTTOM = 760.0, 420.0, 70.0, 46.0
DASHES = ("none", "8 3", "2 3", "8 3 2 3", "14 4", "4 4", "1 5", "10 2 2 2")  # say what the colours say
STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:1em auto;max-width:72em;padding:0 1em;color:#222}"
    "svg{max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#333}.scroll{overflow-x:auto}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}"
    "th,td{padding:.15em .6em;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}"
    "th:last-child,td:last-child{text-align:left;white-space:normal}dt{color:#555}dd{margin:0 0 .4em}"
)


def plan_page(
    title: str, front: Table, points: Plan, order: NDArray[np.intp], bent: Sequence[Curve],
    told: Sequence[tuple[str, str]],
) -> str:  # fmt: skip
    """The page: scaling curves, what each point takes, answers and assumptions as (heading, text)."""
    pairs = "".join(f"<dt>{escape(head)}</dt><dd>{escape(text)}</dd>" for head, text in told)
    picture = _curves(front, points, bent) if bent else "<p>One size of each cluster: there is no curve to draw.</p>"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<dl>{pairs}</dl>\n<h2>Scaling</h2>\n{picture}\n"
        f'<h2>Points</h2>\n<div class="scroll">{_table(front, points, order)}</div>\n</body></html>\n'
    )


def _table(front: Table, points: Plan, order: NDArray[np.intp]) -> str:
    head = (
        "id",
        "cluster",
        "chips",
        "spare",
        "step s",
        "goodput",
        "days",
        "GPU-hours",
        "USD",
        "MWh",
        "t CO2",
        "layout",
    )
    rows = []
    for i in order.tolist():
        row = front.row(i)
        cells = [
            str(row["id"]), row["system"], f"{row['num_gpus']:.0f}", f"{points.spare_gpus[i]:.0f}",
            f"{row['step_time_s']:.4g}", f"{points.goodput[i]:.1%}", f"{points.days[i]:,.1f}",
            f"{points.gpu_hours[i]:,.0f}", f"{points.cost_usd[i]:,.0f}", f"{points.energy_kwh[i] / 1e3:,.0f}",
            f"{points.co2_kg[i] / 1e3:,.0f}", arithmetic(row),
        ]  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _curves(front: Table, points: Plan, bent: Sequence[Curve]) -> str:
    """Days against chips on log axes; a ring marks each knee, a thin line what twice the chips would do at best."""
    places = [place for curve in bent for place in curve.places if math.isfinite(points.days[place])]
    gpus, days = front["num_gpus"][places], points.days[places]
    x, y = _Log(gpus, LEFT, WIDTH - 150.0), _Log(days, HEIGHT - BOTTOM, 14.0)
    parts = [
        *(_tick(x.at(v), HEIGHT - BOTTOM + 16.0, f"{v:,.0f}", "middle") for v in sorted(set(gpus.tolist()))),
        *(_tick(LEFT - 6.0, y.at(v) + 4.0, f"{v:,g}", "end") for v in y.ticks()),
        *(f'<line x1="{LEFT}" x2="{WIDTH - 150:.0f}" y1="{y.at(v):.1f}" y2="{y.at(v):.1f}" stroke="#ddd"/>'
          for v in y.ticks()),
        _tick((LEFT + WIDTH - 150.0) / 2, HEIGHT - 8.0, "chips", "middle"), _tick(14.0, 12.0, "days", "start"),
    ]  # fmt: skip
    for number, curve in enumerate(bent):
        hue, dash = STROKES[number % len(STROKES)], DASHES[number % len(DASHES)]
        spots = [
            (x.at(front["num_gpus"][p]), y.at(points.days[p]), p) for p in curve.places if math.isfinite(points.days[p])
        ]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in spots)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{hue}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        for a, b, place in spots:
            text = f"{front['num_gpus'][place]:.0f} x {curve.system}: {points.days[place]:,.1f} days"
            ring = f'<circle cx="{a:.1f}" cy="{b:.1f}" r="9" fill="none" stroke="{hue}" stroke-width="2"/>'
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{hue}"><title>{escape(text)}</title></circle>')
            parts.append(ring if place == curve.knee else "")
        top = 24.0 + 18.0 * number
        parts.append(
            f'<line x1="{WIDTH - 140:.0f}" x2="{WIDTH - 112:.0f}" y1="{top}" y2="{top}" stroke="{hue}" '
            f'stroke-width="3" stroke-dasharray="{dash}"/>' + _tick(WIDTH - 106.0, top + 4.0, curve.system, "start")
        )
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" width="{WIDTH:.0f}" role="img" aria-label="days against chips">'
        f"{''.join(parts)}</svg>\n<p>Log axes, the fastest layout of each size. A ring marks the knee.</p>"
    )


def _tick(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


class _Log:
    """Values to pixels on a log axis."""

    def __init__(self, values: NDArray[np.float64], first: float, last: float) -> None:
        self.low, self.high = float(values.min()) / 1.1, float(values.max()) * 1.1
        self.first, self.last = first, last

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> list[float]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [lead * 10.0**n for n in powers for lead in (1, 2, 5) if self.low <= lead * 10.0**n <= self.high]
