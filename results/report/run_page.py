"""A run as one HTML page that needs nothing else: data, style and scripts in one file, no network.

The page shows; what it shows is given: a front, what the run counted, and details of some of its points
(search/reporting.py works them out). Scripts and style are the files of results/report/page, in the order of SCRIPTS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from estimator.result import COLUMNS
from results.colours import ITEM_COLOURS, PASS_COLOURS, STROKES
from results.files import dump_json
from results.report.breakdown import TIME_TERMS
from results.report.gantt import LETTERS, WORDS
from results.report.packed import Packed, packed
from results.report.terminal import arithmetic, ranked, settings
from results.schema import FRONT_FIELDS, STRATEGY_NAMES, Field, Plain
from results.table import Table

__all__ = ["TRAINING", "Detail", "RunFacts", "Shift", "Subject", "SwimLane", "page_html"]

SCRIPTS = ("data.js", "draw.js", "pareto.js", "parallel.js", "point.js", "pipeline.js", "ranks.js", "tables.js",
           "main.js")  # fmt: skip
_LEFT_OUT = frozenset({"id", "name", "reason", "reserved_memory_bytes"})  # told otherwise, or in proportion to another


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the rows of a page are of: columns, the one that `terms` sum to, and how a row is told and marked.

    `each`: what takes that long, in words; `command`: what tells of a row in full.
    """

    fields: Sequence[Field]
    better: Mapping[str, str]
    whole: str
    each: str
    band: Sequence[str]
    terms: Sequence[str]
    choices: Sequence[str]
    items: Mapping[str, str]
    command: str
    told: Callable[[Mapping[str, Any]], list[str]]
    marks: Callable[[Table, Sequence[str]], Mapping[int, Sequence[str]]]


TRAINING = Subject(
    fields=FRONT_FIELDS, better={column.name: column.better for column in COLUMNS}, whole="step_time_s", each="a step",
    band=("step_time_p10_s", "step_time_p90_s"), terms=TIME_TERMS, choices=STRATEGY_NAMES, items=ITEM_COLOURS,
    command="search estimate", told=lambda row: [arithmetic(row), *settings(row)],
    marks=lambda front, objectives: ranked(front, objectives)[1],
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """What a point comes to on a changed system or workload: `what` by `factor`. Infeasible: it no longer fits.

    `step_time_s`: of what answers, the seconds of its token or prompt.
    """

    what: str
    factor: float
    step_time_s: float
    peak_memory_bytes: float
    feasible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SwimLane:
    """A pipeline's passes by rank: letters of kinds, seconds of start and end; activations of the fullest rank."""

    kinds: Sequence[str]
    start: Sequence[Sequence[float]]
    end: Sequence[Sequence[float]]
    worst: int
    moments: Sequence[float]
    held_bytes: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """One point in full: `row` its place among front and reference rows, one after the other."""

    row: int
    finishing_rank: int
    usable_bytes: float
    stages: Sequence[Mapping[str, Any]]
    shifts: Sequence[Shift] = ()
    lane: SwimLane | None = None
    lane_note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a page tells beside points. `systems`: chips, chips a node and tiers by name; `notes`: (heading, text)."""

    title: str
    run: str
    about: Sequence[tuple[str, str]]
    systems: Mapping[str, Mapping[str, Any]]
    counts: str
    rejections: Sequence[Mapping[str, Any]]
    closest: Sequence[Mapping[str, Any]]
    closest_note: str
    provenance: Sequence[tuple[str, Sequence[tuple[str, str]]]]
    commands: Sequence[str] = field(default_factory=tuple)


def page_html(
    facts: RunFacts, front: Table, reference: Table, objectives: Sequence[str], details: Sequence[Detail],
    subject: Subject = TRAINING,
) -> str:  # fmt: skip
    """The page; `details` are of rows of the front, or of the reference rows behind them."""
    rows = _joined(front, reference)
    data = {
        "title": facts.title, "run": facts.run, "num_front": len(front), "num_rows": len(rows),
        "objectives": [{"name": name, "better": subject.better[name]} for name in objectives],
        "terms": list(subject.terms), "strategy": list(subject.choices), "command": subject.command,
        "whole": {"name": subject.whole, "each": subject.each, "band": list(subject.band)},
        "marks": {str(place): list(told) for place, told in subject.marks(front, objectives).items()},
        "systems": facts.systems, "counts": facts.counts, "rejections": list(facts.rejections),
        "closest": list(facts.closest), "closest_note": facts.closest_note,
        "provenance": [[head, [list(pair) for pair in pairs]] for head, pairs in facts.provenance],
        "details": [asdict(detail) for detail in details], "hues": list(STROKES), "items": dict(subject.items),
        "passes": {LETTERS[kind]: [hue, WORDS[kind].partition(" ")[2]] for kind, hue in PASS_COLOURS.items()},
    }  # fmt: skip
    table = _packed(rows, objectives, subject)
    named = zip(rows["id"].tolist(), rows["name"].tolist(), strict=True)
    data |= {"columns": table.columns, "ids": [name if number < 0 else str(number) for number, name in named]}
    asset = files("results.report").joinpath("page")
    script = "\n".join(asset.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    return asset.joinpath("page.html").read_text(encoding="utf-8").format(
        title=escape(facts.title), style=asset.joinpath("report.css").read_text(encoding="utf-8"),
        about="".join(f"<dt>{escape(head)}</dt><dd>{escape(text)}</dd>" for head, text in facts.about),
        commands="".join(f"<code>{escape(line)}</code>" for line in facts.commands),
        data=_script_json(data), bytes=table.text, script=script,
    )  # fmt: skip


def _joined(front: Table, reference: Table) -> Table:
    return Table(columns={name: np.concatenate([front[name], reference[name]]) for name in front.names})


def _packed(rows: Table, objectives: Sequence[str], subject: Subject) -> Packed:
    about = {
        f.name: {"unit": f.unit, "about": f.description, "better": subject.better.get(f.name, ""),
                 "is_text": f.kind is Plain.STRING}
        for f in subject.fields if f.name not in _LEFT_OUT
    }  # fmt: skip
    shown = {name: told for name, told in about.items() if _has_something(rows, name)}
    out = packed(rows, shown, exact=[*objectives, subject.whole])
    out.texts("told", [subject.told(row) for row in rows.rows()])
    return out


def _has_something(rows: Table, name: str) -> bool:
    """Whether a column has any value: what is nowhere known is left out."""
    column = rows[name]
    return column.dtype.kind != "f" or bool(np.isfinite(column).any())


def _script_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element."""
    return dump_json(_finite(data)).replace("</", "<\\/").replace("<!--", "<\\!--")


def _finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
