"""A graph as one HTML page that needs nothing else: its tree of scopes to fold, a bar per metric, parts by colour.

No network and no script: scopes fold as `details` elements do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from estimator.hierarchy import METRICS, GraphHierarchy, Node
from estimator.part import Part
from hardware.units import format_bytes, format_count, format_seconds
from results.colours import PART_COLOURS, on
from results.graph_export.view import GraphView, kind_of, shape_of

__all__ = ["page"]

OPEN_TO = 2  # depth of scopes that are unfolded at first
TITLES = {
    "flops": "FLOPs", "read_bytes": "read", "written_bytes": "written", "link_bytes": "sent",
    "parameters": "parameters", "seconds": "seconds", "ops": "ops",
}  # fmt: skip
STYLE = """\
body{font:14px/1.5 sans-serif;margin:2em auto;max-width:100em;color:#222}
summary,.head{display:grid;grid-template-columns:minmax(24em,2fr) 5em repeat(var(--n),minmax(7em,1fr));gap:.6em}
summary{cursor:pointer}.name{padding-left:calc(1.2em*var(--d))}
.name::before{content:"\\25B8\\00A0"}details[open]>summary .name::before{content:"\\25BE\\00A0"}
.n{text-align:right;position:relative}
.bar{position:absolute;left:0;bottom:0;height:3px;background:#888}.head{font-weight:bold;border-bottom:1px solid #888}
.part{border-radius:3px;padding:0 .5em;font-size:12px;margin-left:.5em}
.mix{display:flex;height:1.6em;margin:.3em 0 1em}
.mix span{overflow:hidden;white-space:nowrap;font-size:12px;padding:.2em 0}
table{border-collapse:collapse;font-size:12px;margin:.2em 0 .6em 1.2em}td,th{border:1px solid #ddd;padding:.1em .5em}
td{text-align:right}td.t,th{text-align:left}"""
OP_COLUMNS = ("op", "kind", "phase", "dims", "FLOPs", "read", "written", "sent", "seconds", "bound", "source")


def page(view: GraphView) -> str:
    """The page."""
    tree = GraphHierarchy(view.name, view.entries)
    whole = {metric: tree.aggregate(tree.root, metric) for metric in METRICS}
    shown = [m for m in METRICS if whole[m] and not math.isnan(whole[m])]
    mixes = [line for metric in shown if metric != "ops" for line in _mix(tree, metric)]
    head = "".join(f'<span class="n">{escape(TITLES[m])}</span>' for m in shown)
    title = escape(f"{view.name}: {view.told}")
    return "\n".join([
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style></head>",
        f'<body style="--n:{len(shown)}"><h1>{escape(view.name)}</h1><p>{escape(view.told)}; amounts of a scope are of '
        "all its runs, those of an operation of one.</p>",
        f"<p>{_legend(tree)}</p>",
        *mixes,
        f'<div class="head"><span>scope</span><span class="n">times</span>{head}</div>',
        *_scope(tree, tree.root, shown, whole, view),
        "</body></html>",
    ]) + "\n"  # fmt: skip


def _legend(tree: GraphHierarchy) -> str:
    return " ".join(f'<span class="part" style="{_paint(part)}">{part.value}</span>' for part in tree.by_part("ops"))


def _mix(tree: GraphHierarchy, metric: str) -> Iterator[str]:
    """One metric by part, as a bar of the parts' colours."""
    found = tree.by_part(metric)
    whole = math.fsum(found.values())
    yield f"<div>{escape(TITLES[metric])} by part</div>"
    pieces = [
        f'<span style="{_paint(part)};width:{100 * value / whole:.3f}%" title="{part.value} {value / whole:.1%}">'
        f"{part.value if value > 0.06 * whole else ''}</span>"
        for part, value in found.items() if value
    ]  # fmt: skip
    yield f'<div class="mix">{"".join(pieces)}</div>'


def _paint(part: Part) -> str:
    return f"background:{PART_COLOURS[part]};color:{on(PART_COLOURS[part])}"


def _scope(
    tree: GraphHierarchy, node: Node, shown: list[str], whole: dict[str, float], view: GraphView
) -> Iterator[str]:  # fmt: skip
    part = "" if node.part is None else f'<span class="part" style="{_paint(node.part)}">{node.part.value}</span>'
    cells = []
    for metric in shown:
        value = tree.aggregate(node, metric)
        bar = f'<span class="bar" style="width:{100 * value / whole[metric]:.2f}%"></span>' if value else ""
        cells.append(f'<span class="n">{_amount(metric, value)}{bar}</span>')
    name = f'<span class="name" style="--d:{node.depth}">{escape(node.path[-1])}{part}</span>'
    line = f'{name}<span class="n">{node.times or ""}</span>{"".join(cells)}'
    yield f"<details{' open' if node.depth < OPEN_TO else ''}><summary>{line}</summary>"
    for child in node.children:
        yield from _scope(tree, child, shown, whole, view)
    if node.own:
        yield _op_table(node, view)
    yield "</details>"


def _op_table(node: Node, view: GraphView) -> str:
    rows = ["".join(f"<th>{escape(name)}</th>" for name in OP_COLUMNS)]
    for entry in node.own:
        op = entry.op
        words = (op.name, kind_of(op), op.phase.value, shape_of(op))
        numbers = [_amount(m, getattr(entry, m)) for m in ("flops", "read_bytes", "written_bytes", "link_bytes")]
        seconds = "" if math.isnan(entry.seconds) else format_seconds(entry.seconds)
        said = (f"{entry.bound}, {entry.source}" if entry.bound else "", view.source_of(entry))
        rows.append("".join([
            *(f'<td class="t">{escape(word)}</td>' for word in words),
            *(f"<td>{number}</td>" for number in (*numbers, seconds)),
            *(f'<td class="t">{escape(word)}</td>' for word in said),
        ]))  # fmt: skip
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _amount(metric: str, value: float) -> str:
    if not value:
        return "-"
    if metric == "seconds":
        return format_seconds(value)
    return format_bytes(value) if metric.endswith("_bytes") else format_count(value)
