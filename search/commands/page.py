"""Works out what the page of a run shows: details of some points, where numbers come from, what was rejected.

Evaluates some points again (the best of each objective, the knee, the reference points and others that stand for the
front) for their stages, and the first of them on changed systems. Draws nothing.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from estimator.result import StageResult
from estimator.step import evaluate
from hardware.catalog import describe_system
from hardware.system import SystemSpec
from hardware.units import format_seconds
from results.pareto import spread
from results.report import ranked
from results.report.gantt import LETTERS, Lane, alive
from results.report.run_page import Detail, RunFacts, SwimLane, page_html
from results.report.text import counted
from results.schema import strategy_at
from results.store import REPORT, RunFolder
from results.table import Table
from search.bands import cell_of, model_error
from search.commands.answer import tell
from search.commands.point import model_line, work_line
from search.commands.why import counts_line, degrees_line
from search.finalists import name_of, system_of_row
from search.lane import Passes, num_passes, passes_of
from search.sensitivity import shifts_of
from search.space import Space

__all__ = ["Gathered", "Pairs", "details_of", "gathered", "place_of", "report_html", "search_pairs", "source_pairs",
           "system_facts", "write_page", "write_report"]  # fmt: skip

DETAILED = 40  # points whose stages are in the page: a few kilobytes each
SHIFTED = 12  # of these, points that are evaluated on changed systems
LANES = 8  # of these, points whose pipelines are in the page
MOST_PASSES = 20_000  # of a pipeline in the page: half a megabyte

Pairs = list[tuple[str, str]]
_TIMES = ("estimated_step_time_s", "replayed_step_time_s")
_NEGLECTED: Pairs = [
    ("time", "failures, checkpoints and other jobs; search plan counts the first two"),
    ("memory", "data loading and logging buffers, checkpoint staging, fragmentation beyond the reserve"),
    ("pipeline", "its picture shows passes without traffic; search replay has every operation"),
]


def write_report(folder: RunFolder, space: Space) -> None:
    """Writes the page of a finished run that has none yet."""
    write_page(folder, lambda: report_html(gathered(folder, space)))


def write_page(folder: RunFolder, make: Callable[[], str]) -> None:
    """Writes the page where the run has none yet. What stands in the way is told: the run is done without."""
    if (folder.path / REPORT).is_file():
        return
    start = time.perf_counter()
    try:
        with folder:
            folder.write_report(make())
            seconds, took = folder.manifest["seconds"], time.perf_counter() - start
            told = {"report": took, "total": seconds["total"] + took}
            folder.update_manifest(seconds={name: s for name, s in seconds.items() if name != "total"} | told)
    except ValueError as error:
        tell(f"no report: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """All that a page or its pictures show of a run."""

    facts: RunFacts
    front: Table
    reference: Table
    objectives: list[str]
    details: list[Detail]


def gathered(folder: RunFolder, space: Space, point: str | None = None) -> Gathered:
    """Of a run that has a front; `point` is an id of it, or the name of a reference, that is looked at first."""
    front, reference = folder.read_front(), folder.read_reference()
    objectives = [objective.column for objective in space.objectives]
    first = None if point is None else place_of(folder, front, reference, point)
    details = details_of(space, front, reference, objectives, first=first)
    facts = _facts(folder, space, front)
    return Gathered(facts=facts, front=front, reference=reference, objectives=objectives, details=details)


def report_html(shown: Gathered) -> str:
    """The page."""
    return page_html(shown.facts, shown.front, shown.reference, shown.objectives, shown.details)


def place_of(folder: RunFolder, front: Table, reference: Table, point: str) -> int:
    """Where a point stands among the rows of the front, and behind them those of the references."""
    if point.isdecimal():
        try:
            return front.find(int(point))
        except ValueError as error:
            raise ValueError(f"{folder.path}: --point: {error}") from error
    named = np.flatnonzero((reference["name"] == point) & reference["feasible"].astype(bool))
    if not len(named):
        names = ", ".join(reference["name"][reference["feasible"].astype(bool)]) or "none"
        raise ValueError(f"{folder.path}: --point must be an id of the front or a reference that fits ({names}), "
                         f"but got {point!r}")  # fmt: skip
    return len(front) + int(named[0])


def details_of(
    space: Space, front: Table, reference: Table, objectives: Sequence[str], *, first: int | None = None
) -> list[Detail]:
    """The one to begin with, marked points, reference points that fit, then points that stand for the others."""
    marked = list(ranked(front, objectives)[1])
    values = np.stack([front[name] for name in objectives], axis=1)
    references = [len(front) + i for i in np.flatnonzero(reference["feasible"]).tolist()]
    others = spread(values, marked, DETAILED - len(references))
    chosen = list(dict.fromkeys([*([] if first is None else [first]), *marked, *references, *others]))
    lanes = 0
    details = []
    for number, place in enumerate(chosen):
        row = front.row(place) if place < len(front) else reference.row(place - len(front))
        detail = _detail(space, place, row, with_shifts=number < SHIFTED, with_lane=lanes < LANES)
        lanes += detail.lane is not None
        details.append(detail)
    return details


def _detail(space: Space, place: int, row: Mapping[str, Any], *, with_shifts: bool, with_lane: bool) -> Detail:
    model, work = space.model, space.workload
    system, strategy = system_of_row(space, row), strategy_at(row)
    result = evaluate(model, strategy, system, work)
    stages = [
        {
            "rank": stage.rank, "layers": list(stage.layers), "forward_s": stage.forward_s,
            "backward_s": stage.backward_s, "memory": {name: x for name, x in stage.memory.items() if x},
        }
        for stage in result.stages
    ]  # fmt: skip
    lane, note = None, "the pipeline of this point is not in this page: search schedules draws it"
    if int(strategy.pp) == 1:
        note = "one stage: there is no pipeline"
    elif (num := num_passes(model, strategy, system, work)) > MOST_PASSES:
        note = f"{num} passes are too many for a page; search replay writes a trace of them"
    elif with_lane:
        lane = _lane(passes_of(model, strategy, system, work, result), result.stages)
    return Detail(
        row=place, finishing_rank=result.finishing_rank, usable_bytes=system.usable_hbm_bytes, stages=stages,
        shifts=shifts_of(model, strategy, system, work) if with_shifts else (),
        lane=lane, lane_note=note,
    )  # fmt: skip


def _lane(passes: Passes, stages: Sequence[StageResult]) -> SwimLane:
    """Passes by rank, times to seven digits, and what the rank with most activations holds."""
    nbytes = [stage.memory["activations"] + stage.memory["logits"] for stage in stages]
    worst = int(np.argmax(nbytes))
    simulated = passes.simulated
    lane = Lane(
        title="", passes=passes.order, start=simulated.start, end=simulated.end, worst=worst, peak_bytes=nbytes[worst]
    )
    moments, held = alive(lane)
    return SwimLane(
        kinds=["".join(LETTERS[item.kind] for item in items) for items in passes.order],
        start=[_short(times) for times in simulated.start], end=[_short(times) for times in simulated.end],
        worst=worst, moments=_short(moments), held_bytes=_short(held * lane.peak_bytes),
    )  # fmt: skip


def _short(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values.tolist()]


def _facts(folder: RunFolder, space: Space, front: Table) -> RunFacts:
    manifest, work = folder.manifest, space.workload
    closest, note = _closest(manifest)
    about = [
        ("model", model_line(space.model)),
        ("systems", "; ".join(f"{s.told_chips} ({s.name})" for s in space.systems)),
        ("workload", work_line(work)),
        ("objectives", ", ".join(f"{o.column} {'down' if o.minimise else 'up'}" for o in space.objectives)),
        ("constraints", "; ".join(c.expression.text for c in space.constraints) or "none"),
        ("run", f"{folder.path}, {folder.state}, {manifest['created']}"),
    ]
    run_name = shlex.quote(str(folder.path))
    best = ranked(front, [o.column for o in space.objectives])[0][0]
    return RunFacts(
        title=f"{manifest['name']}: {counted(len(front), 'point')}", run=str(folder.path), about=about,
        systems={system.name: system_facts(system) for system in space.systems},
        counts=counts_line(manifest["counts"], space.open_axes), rejections=list(folder.read_rejections().rows()),
        closest=closest, closest_note=note, provenance=_provenance(folder, space, front),
        commands=[
            f"search show {run_name}", f"search estimate {run_name}:{int(front['id'][best])} --ops",
            f"search replay {run_name}", f"search plan {run_name} --tokens 15e12", f"search why {run_name}",
        ],
    )  # fmt: skip


def system_facts(system: SystemSpec) -> dict[str, Any]:
    """What a drawing of ranks needs."""
    tiers = [{"name": tier.name, "span": tier.span} for tier in system.tiers]
    return {"chips_per_node": system.chips_per_node, "tiers": tiers}


def _closest(manifest: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """What just does not fit, as the sweep saw it."""
    if "closest" not in manifest:
        return [], "this run did not keep what came closest; search why tells what rejects"
    rows = [
        {
            "configuration": degrees_line(row), "device_memory_bytes": row["device_memory_bytes"],
            "short_by_bytes": row["short_by_bytes"], "remedy": row["remedy"],
        }
        for row in manifest["closest"]
    ]  # fmt: skip
    if manifest.get("sampler") not in (None, "exhaustive"):
        return rows, "of what the study tried and what does not fit in memory, what lacks the least" if rows else (
            "all that the study tried fits in memory"
        )  # fmt: skip
    if not rows:
        return [], "no structure near the capacity of its chips was too large in every option"
    return rows, "of the structures that no option makes fit in memory, those that lack the least"


def _provenance(folder: RunFolder, space: Space, front: Table) -> list[tuple[str, Pairs]]:
    manifest = folder.manifest
    systems = {system.chip.name: system for s in space.systems for system in s.parts}
    out = [
        ("Search", search_pairs(manifest)),
        ("Versions", [(name, str(v)) for name, v in manifest.get("versions", {}).items()]),
    ]
    out += [(f"Numbers of {system.name} and their sources", source_pairs(system)) for system in systems.values()]
    return [*out, ("Error bands", _bands(space, front)), ("Prices", _prices(front)), ("Replays", _replays(folder)),
            ("Assumptions", _assumptions(space)), ("Neglected", _NEGLECTED)]  # fmt: skip


def search_pairs(manifest: Mapping[str, Any]) -> Pairs:
    """How a front was found."""
    seconds = ", ".join(f"{name} {format_seconds(s)}" for name, s in manifest["seconds"].items())
    told = {
        "sampler": manifest.get("sampler"), "because": manifest.get("sampler_reason"), "seed": manifest.get("seed"),
        "workers": manifest.get("workers"), "took": seconds, "notices": "; ".join(manifest.get("notices", [])),
        "events": "; ".join(str(event.get("text", event)) for event in manifest["events"]),
    }  # fmt: skip
    return [(name, str(value)) for name, value in told.items() if value not in (None, "")]


def source_pairs(system: SystemSpec) -> Pairs:
    """Numbers of a system, each with where it comes from."""
    rows = describe_system(system, source="the space")
    told = [(row.field, f"{row.value} ({row.source})" if row.source else row.value) for row in rows]
    return [*told, *((f"{system.chip.name}: {name}", text) for name, text in system.chip.sources.items())]


def _bands(space: Space, front: Table) -> Pairs:
    """How far published steps came out from predictions, for each kind of step on the front."""
    cells = dict.fromkeys(
        cell_of(space.model, strategy_at(row), system_of_row(space, row)) for row in _one_each(front).rows()
    )
    told = []
    for cell in cells:
        error, memory = (
            f"{math.expm1(q.low):+.0%} to {math.expm1(q.high):+.0%} ({q.rows} steps)" for q in model_error(cell)
        )
        told.append((", ".join(cell), f"step time P10 to P90 {error}; memory {memory}"))
    return [*told, ("from", "left-out predictions of published steps, search/bands.yaml; docs/accuracy.md")]


def _one_each(front: Table) -> Table:
    """A row of each system and precision: error bands know no more of a strategy."""
    kinds = zip(front["system"], front["num_gpus"].tolist(), front["precision"], strict=True)
    return front.take(list({kind: i for i, kind in enumerate(kinds)}.values()))


def _prices(front: Table) -> Pairs:
    names = {"measured": "measured operators", "tile": "the tile model", "roofline": "the roofline"}
    spans = {text: front[f"price_share_{name}"] for name, text in names.items()}
    return [
        (text, f"{np.nanmin(share):.0%} to {np.nanmax(share):.0%} of priced seconds") for text, share in spans.items()
    ]


def _replays(folder: RunFolder) -> Pairs:
    """Estimates of the finalists beside their replays."""
    rows = [row for row in folder.read_replays().rows() if math.isfinite(row["replayed_step_time_s"])]
    if not rows:
        return [("finalists", "none was replayed")]
    pair = "estimated {} s, replayed {} s ({:+.1%})"
    return [(name_of(row), pair.format(*(f"{row[n]:.4g}" for n in _TIMES), row["error"])) for row in rows]


def _assumptions(space: Space) -> Pairs:
    parts = [part for system in space.systems for part in system.parts]
    texts = dict.fromkeys([*space.model.notes, *(text for system in space.systems for text in system.assumptions)])
    chips = dict.fromkeys(text for part in parts for text in part.chip.assumptions)
    return [(f"{number}", text) for number, text in enumerate([*texts, *chips], start=1)] or [
        ("none", "nothing beside")
    ]
