"""The report of `search validate` as one HTML page that needs nothing else: plain SVG, no script, no network.

Shows predicted against measured on log axes, a histogram of errors per family, and errors against scale, sequence and
format. Computes no score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from results.colours import MANY
from results.report.validation import Report, validation_table

__all__ = ["Told", "validation_page"]

WIDTH, HEIGHT, MARGIN = 560.0, 360.0, 48.0
WORST_SHOWN = 0.5  # errors beyond it are drawn at the edge
BINS = 20
STYLE = (
    "body{font:15px/1.4 sans-serif;margin:2em auto;max-width:75em;color:#222}"
    "svg{background:#fff;border:1px solid #ddd;margin:.3em}"
    "text{font:11px sans-serif;fill:#444}pre{font-size:12px;overflow:auto}.grid{stroke:#ddd}.one{stroke:#888}"
    "figure{display:inline-block;margin:0}figcaption{font-size:13px}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a row says of itself that errors may follow; nothing where a cell is empty."""

    num_gpus: float | None
    seq: float | None
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dot:
    """A scored case."""

    name: str
    family: str
    predicted_s: float
    measured_s: float
    error: float
    told: Told


def validation_page(report: Report, told: Sequence[Told], title: str) -> str:
    """The page; `told` has one entry for each of the report's cases."""
    dots = [
        _Dot(
            name=case["case_id"], family=case["family"], predicted_s=case["predicted_step_time_s"],
            measured_s=case["measured_step_time_s"], error=case["error"], told=about,
        )
        for case, about in zip(report["cases"], told, strict=True)
        if case["error"] is not None
    ]  # fmt: skip
    colours = {name: MANY[i % len(MANY)] for i, name in enumerate(sorted({dot.family for dot in dots}))}
    figures = [_scatter(dots, colours)] if dots else []
    figures += [_residuals(dots, colours, "chips", lambda t: t.num_gpus), _residuals(
        dots, colours, "tokens of a sequence", lambda t: t.seq), _by_format(dots, colours)] if dots else []  # fmt: skip
    figures += [_histogram(name, [d.error for d in dots if d.family == name], colours[name]) for name in colours]
    legend = " ".join(f'<span style="color:{c}">&#9679;</span> {escape(name)}' for name, c in colours.items())
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<p>{legend}</p>\n"
        + "\n".join(figures)
        + f"\n<pre>{escape(validation_table(report))}</pre>\n</body></html>\n"
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """Values to pixels, on a log axis or a plain one."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.first + min(max(share, 0.0), 1.0) * (self.last - self.first)

    def ticks(self) -> list[float]:
        if not self.is_log:
            return [self.low + (self.high - self.low) * i / 4 for i in range(5)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        return [10.0**n for n in range(first, last + 1) if self.low <= 10.0**n <= self.high]


def _across(low: float, high: float, *, is_log: bool) -> _Scale:
    return _Scale(low, high, MARGIN, WIDTH - 10, is_log)


def _upward(low: float, high: float, *, is_log: bool = False) -> _Scale:
    return _Scale(low, high, HEIGHT - MARGIN, 10, is_log)


def _scatter(dots: Sequence[_Dot], colours: Mapping[str, str]) -> str:
    seconds = [s for dot in dots for s in (dot.predicted_s, dot.measured_s)]
    low, high = min(seconds) / 1.2, max(seconds) * 1.2
    x, y = _across(low, high, is_log=True), _upward(low, high, is_log=True)
    lines = [
        f'<line class="{"one" if factor == 1 else "grid"}" x1="{x.at(low):.1f}" y1="{y.at(low * factor):.1f}" '
        f'x2="{x.at(high):.1f}" y2="{y.at(high * factor):.1f}"/>'
        for factor in (1 / 1.1, 1, 1.1)
    ]
    circles = [_circle(x.at(d.measured_s), y.at(d.predicted_s), d, colours) for d in dots]
    caption = "predicted against measured seconds of a step, log axes; lines at equal and 10 % apart"
    return _figure([*_axes(x, y, "measured s", "predicted s"), *lines, *circles], caption)


def _residuals(dots: Sequence[_Dot], colours: Mapping[str, str], label: str, of: Callable[[Told], float | None]) -> str:
    known = [(value, dot) for dot in dots if (value := of(dot.told)) is not None and value > 0]
    if not known:
        return ""
    values = [value for value, _ in known]
    x = _across(min(values) / 1.2, max(values) * 1.2, is_log=True)
    y = _upward(-WORST_SHOWN, WORST_SHOWN)
    circles = [_circle(x.at(value), y.at(dot.error), dot, colours) for value, dot in known]
    return _figure([*_axes(x, y, label, "error"), _zero(x, y), *circles], f"error against {label}")


def _by_format(dots: Sequence[_Dot], colours: Mapping[str, str]) -> str:
    names = sorted({dot.told.precision or "not said" for dot in dots})
    x = _across(-0.5, len(names) - 0.5, is_log=False)
    y = _upward(-WORST_SHOWN, WORST_SHOWN)
    placed = []
    for i, name in enumerate(names):
        members = [dot for dot in dots if (dot.told.precision or "not said") == name]
        for n, dot in enumerate(members):  # side by side, in the order of the table
            placed.append(_circle(x.at(i + 0.7 * (n + 0.5) / len(members) - 0.35), y.at(dot.error), dot, colours))
        placed.append(f'<text x="{x.at(i):.1f}" y="{HEIGHT - MARGIN + 16}" text-anchor="middle">{escape(name)}</text>')
    return _figure([*_axes(None, y, "format", "error"), _zero(x, y), *placed], "error by format")


def _histogram(name: str, errors: Sequence[float], colour: str) -> str:
    width, height = WIDTH / 2, HEIGHT / 2
    counts = [0] * BINS
    for error in errors:
        place = (error + WORST_SHOWN) / (2 * WORST_SHOWN) * BINS
        counts[min(max(int(place), 0), BINS - 1)] += 1
    bar = (width - 20) / BINS
    tallest = max(counts)
    parts = [
        f'<rect x="{10 + i * bar:.1f}" y="{height - 20 - count / tallest * (height - 40):.1f}" width="{bar - 1:.1f}" '
        f'height="{count / tallest * (height - 40):.1f}" fill="{colour}"><title>{count}</title></rect>'
        for i, count in enumerate(counts)
        if count
    ]
    parts += [
        f'<text x="{10 + share * (width - 20):.1f}" y="{height - 6}" text-anchor="middle">{text}</text>'
        for share, text in ((0.04, f"{-WORST_SHOWN:.0%}"), (0.5, "0"), (0.96, f"+{WORST_SHOWN:.0%}"))
    ]
    parts.append(f'<line class="one" x1="{width / 2}" y1="10" x2="{width / 2}" y2="{height - 20}"/>')
    return _figure(parts, f"errors of {name} ({len(errors)})", width, height)


def _circle(x: float, y: float, dot: _Dot, colours: Mapping[str, str]) -> str:
    told = f"{dot.name} ({dot.family}): {dot.predicted_s:.4g} s, measured {dot.measured_s:.4g} s, {dot.error:+.1%}"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colours[dot.family]}" fill-opacity=".7">'
        f"<title>{escape(told)}</title></circle>"
    )


def _axes(x: _Scale | None, y: _Scale, across: str, upward: str) -> list[str]:
    bottom = HEIGHT - MARGIN
    parts = [
        f'<text x="{(WIDTH + MARGIN) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>',
        f'<text x="14" y="{bottom / 2}" transform="rotate(-90 14 {bottom / 2})" text-anchor="middle">{upward}</text>',
    ]
    for value in x.ticks() if x else ():
        assert x is not None
        at = x.at(value)
        parts += [
            f'<line class="grid" x1="{at:.1f}" y1="10" x2="{at:.1f}" y2="{bottom}"/>',
            f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>',
        ]
    for value in y.ticks():
        at = y.at(value)
        text = f"{value:g}" if y.is_log else f"{value:+.0%}"
        parts += [
            f'<line class="grid" x1="{MARGIN}" y1="{at:.1f}" x2="{WIDTH - 10}" y2="{at:.1f}"/>',
            f'<text x="{MARGIN - 4}" y="{at + 4:.1f}" text-anchor="end">{text}</text>',
        ]
    return parts


def _zero(x: _Scale, y: _Scale) -> str:
    return f'<line class="one" x1="{x.first}" y1="{y.at(0):.1f}" x2="{x.last}" y2="{y.at(0):.1f}"/>'


def _figure(parts: Sequence[str], caption: str, width: float = WIDTH, height: float = HEIGHT) -> str:
    return (
        f'<figure><svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}">{"".join(parts)}</svg>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
