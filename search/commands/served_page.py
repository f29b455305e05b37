"""Works out what the page of a run of answers shows: parts of a token, memory, groups of ranks, sensitivity, sources.

The page is that of a run of training (search/commands/page.py) over other columns. Evaluates some points again on
changed systems; of the others, rows say everything. Draws nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from estimator.inference.step import NEGLECTED, infer
from hardware.system import SystemSpec
from hardware.units import format_bytes
from results.pareto import spread
from results.report.run_page import Detail, RunFacts, Shift, page_html
from results.report.served import ITEMS, choices, degrees, served_order, served_subject
from results.report.text import counted
from results.store import RunFolder
from results.table import Table
from search.commands.page import DETAILED, SHIFTED, Pairs, place_of, search_pairs, source_pairs, system_facts
from search.commands.point import model_line
from search.commands.served_show import counts_line, objectives_of
from search.sensitivity import varied
from search.served import ServedPoint, ServedSpace

__all__ = ["served_html"]


def served_html(folder: RunFolder, space: ServedSpace, point: str | None = None) -> str:
    """The page of a run that has a front; `point` is an id of it, or a reference, that is looked at first."""
    front, reference = folder.read_front(), folder.read_reference()
    objectives = objectives_of(space)
    subject = served_subject(objectives, space.phase.value)
    first = None if point is None else place_of(folder, front, reference, point)
    details = _details(space, front, reference, objectives, first, subject.whole)
    return page_html(_facts(folder, space, front), front, reference, list(objectives), details, subject)


def _details(
    space: ServedSpace, front: Table, reference: Table, objectives: Mapping[str, bool], first: int | None, whole: str
) -> list[Detail]:
    marked = [*([] if first is None else [first]), *served_order(front, objectives)[1]]
    references = [len(front) + i for i in np.flatnonzero(reference["feasible"]).tolist()]
    values = np.stack([front[name] for name in objectives], axis=1)
    others = spread(values, [place for place in marked if place < len(front)], DETAILED - len(references))
    details = []
    for number, place in enumerate(dict.fromkeys([*marked, *references, *others])):
        row = front.row(place) if place < len(front) else reference.row(place - len(front))
        details.append(_detail(space, place, row, whole, with_shifts=number < SHIFTED))
    return details


def _detail(space: ServedSpace, place: int, row: Mapping[str, Any], whole: str, *, with_shifts: bool) -> Detail:
    """The fullest rank by item, and the deployment on changed systems."""
    system = next(s for s in space.systems if s.name == row["system"] and s.num_chips == row["num_gpus"])
    point = space.point(int(row["id"])) if row["id"] >= 0 else ServedPoint(system, *space.references[row["name"]])
    memory = {item: float(row[column]) for item, column in ITEMS.items() if row[column]}
    pp = int(row["pp"])
    stage = {"rank": "with most", "layers": [-(-space.model.num_layers // pp)], "forward_s": float(row[whole]),
             "backward_s": 0.0, "memory": memory}  # fmt: skip
    shifts = []
    for what, factor, changed in _changed(space, system) if with_shifts else ():
        result = infer(space.model, point.deployment, changed, space.requests(point.batch))
        shifts.append(
            Shift(
                what=what, factor=factor, step_time_s=float(result.columns[whole]),
                peak_memory_bytes=float(result.columns["peak_memory_bytes"]), feasible=bool(result.feasible),
            )
        )  # fmt: skip
    note = "one stage: there is no pipeline" if pp == 1 else f"{counted(pp, 'stage')}, of which no picture is made"
    return Detail(row=place, finishing_rank=0, usable_bytes=system.usable_hbm_bytes, stages=[stage], shifts=shifts,
                  lane_note=note)  # fmt: skip


def _changed(space: ServedSpace, system: SystemSpec) -> list[tuple[str, float, SystemSpec]]:
    """What is 20 % up or down, without the routing of training."""
    return [(what, factor, changed) for what, factor, changed, _ in varied(space.model, system, None)]


def _closest(manifest: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """What just does not fit."""
    return [
        {
            "configuration": "; ".join([degrees(row), *choices(row)]), "short_by_bytes": row["short_by_bytes"],
            "device_memory_bytes": row["device_memory_bytes"],
            "remedy": f"search infer {name}:{row['id']} tells what would make it fit",
        }
        for row in manifest.get("closest", [])
    ]  # fmt: skip


def _facts(folder: RunFolder, space: ServedSpace, front: Table) -> RunFacts:
    manifest, name = folder.manifest, shlex.quote(str(folder.path))
    objectives = objectives_of(space)
    best = int(front["id"][served_order(front, objectives)[0][0]])
    about = [
        ("model", model_line(space.model)),
        ("systems", "; ".join(f"{s.told_chips} ({s.name}), {format_bytes(s.usable_hbm_bytes)} each"
                              for s in space.systems)),
        ("requests", f"{space.phase.value}, {counted(space.context, 'token')}, output {space.output}"),
        ("objectives", ", ".join(f"{name} {'down' if down else 'up'}" for name, down in objectives.items())),
        ("constraints", "; ".join(c.text for c in space.constraints) or "none"),
        ("run", f"{folder.path}, {folder.state}, {manifest['created']}"),
    ]  # fmt: skip
    chips = {part.chip.name: part for system in space.systems for part in system.parts}
    assumed = dict.fromkeys([*space.model.notes, *space.notices,
                             *(text for part in chips.values() for text in part.chip.assumptions)])  # fmt: skip
    provenance: list[tuple[str, Pairs]] = [
        ("Search", search_pairs(manifest)),
        ("Versions", [(key, str(value)) for key, value in manifest.get("versions", {}).items()]),
        *((f"Numbers of {part.name} and their sources", source_pairs(part)) for part in chips.values()),
        ("Assumptions", [(str(number), text) for number, text in enumerate(assumed, start=1)]),
        ("Neglected", [("answers", NEGLECTED)]),
    ]
    return RunFacts(
        title=f"{manifest['name']}: {counted(len(front), 'point')}", run=str(folder.path), about=about,
        systems={system.name: system_facts(system) for system in space.systems}, counts=counts_line(manifest["counts"]),
        rejections=list(folder.read_rejections().rows()), closest=_closest(manifest, name),
        closest_note="of the deployments that do not fit in memory, the one that lacks the least",
        provenance=provenance, commands=[f"search show {name}", f"search infer {name}:{best}", f"search why {name}"],
    )  # fmt: skip
