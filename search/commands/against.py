"""Where a running job stands on a front, and what the best of it would change, in the framework's own words."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import numpy as np

from hardware.units import format_bytes, format_seconds
from results.launchers.recognise import flags_of
from results.report.text import hanging
from results.store import RunFolder
from results.table import Table
from search.commands.answer import answer
from search.commands.compare import Side, comparison_data, comparison_text, side_of
from search.commands.export import job_of_point
from search.commands.point import Point, read_point, split_run
from search.commands.runs import find_run, space_of
from search.launch_files import Configured
from search.space import Space

__all__ = ["against"]


def against(args: argparse.Namespace, mine: Point, found: Configured) -> int:
    """Compares an imported job with a point of a run: the one named, or the best that needs no more memory."""
    parts = split_run(args.against)
    folder, row = parts if parts is not None else (find_run(args.against), "")
    space, front = space_of(folder), folder.read_front()
    a = side_of("A", mine, args.file)
    chosen = row or _best(front, a, folder)
    b = side_of("B", read_point(f"{folder.path}:{chosen}", None, []), f"{folder.path}:{chosen}")
    standing = _standing(a, front, space)
    changes, notes = _changes(a, b, found.imported.framework)
    lines = hanging("", _place(standing, a, len(front), space))
    lines += ["", f"A: {args.file}; B: {folder.path}:{chosen}"]
    text = "\n".join(lines) + "\n\n" + comparison_text(a, b) + "\n" + _flags(changes, notes, found)
    data = {
        "job": {"dominated_by": standing, "front": len(front), "objectives": [o.column for o in space.objectives]},
        "best": {"id": chosen, "run": str(folder.path)},
        "changes": [{"name": name, "job": x, "best": y} for name, (x, y) in changes.items()],
        "notes": notes,
        **comparison_data(a, b),
    }
    answer(args, text=text, data=data)
    return 0


def _best(front: Table, a: Side, folder: RunFolder) -> str:
    """The id of the fastest point that is better in time and needs no more memory; else of the fastest of all."""
    if not len(front):
        raise ValueError(f"{folder.path}: the front is empty; give a run that found something")
    fits = front["device_memory_bytes"] <= float(a.result.device_memory_bytes)
    fits &= front["step_time_s"] < float(a.result.step_time_s)
    kept = np.flatnonzero(fits) if fits.any() else np.arange(len(front))
    return str(int(front["id"][kept[np.argmin(front["step_time_s"][kept])]]))


def _standing(a: Side, front: Table, space: Space) -> list[int]:
    """Ids of points that are at least as good in every objective and better in one."""
    if not len(front):
        return []
    better, worse = np.zeros(len(front), dtype=bool), np.zeros(len(front), dtype=bool)
    for objective in space.objectives:
        sign = 1.0 if objective.minimise else -1.0
        theirs, mine = sign * front[objective.column], sign * float(a.row[objective.column])
        better |= theirs < mine
        worse |= theirs > mine
    return [int(i) for i in front["id"][better & ~worse]]


def _place(dominating: list[int], a: Side, size: int, space: Space) -> str:
    step, memory = format_seconds(float(a.result.step_time_s)), format_bytes(float(a.result.device_memory_bytes))
    names = " and ".join(o.column for o in space.objectives)
    told = f"the job takes {step} a step and {memory} a chip"
    other = [
        *([f"model {a.point.model.name} for {space.model.name}"] if a.point.model != space.model else []),
        *(
            []
            if a.point.system in space.systems
            else [f"system {a.point.system.name}, {a.point.system.num_chips} chips"]
        ),
        *([] if a.point.workload == space.workload else ["another workload"]),
    ]
    beside = f"; the run is of another question ({', '.join(other)})" if other else ""
    if not dominating:
        return f"{told}: no point of the front, of {size}, is better in {names}{beside}"
    ids = ", ".join(map(str, dominating[:5])) + (", ..." if len(dominating) > 5 else "")
    return f"{told}; better in {names}: {len(dominating)} of {size} points of the front ({ids}){beside}"


def _changes(a: Side, b: Side, framework: str) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Names of the framework whose values differ; notes for what it cannot say of the best."""
    (mine, _), (best, notes) = (flags_of(job_of_point(side.point), framework) for side in (a, b))
    differ = {
        name: (mine.get(name, "-"), best.get(name, "-"))
        for name in dict.fromkeys([*mine, *best])
        if mine.get(name) != best.get(name)
    }
    return differ, notes


def _flags(changes: Mapping[str, tuple[str, str]], notes: list[str], found: Configured) -> str:
    lines = [f"what B would change, in the words of {found.imported.framework} (- is left out)"]
    for name, (x, y) in changes.items():
        lines += hanging(f"  {name:<44}", f"{x} -> {y}")
    lines += [] if changes else ["  nothing"]
    for note in notes:
        lines += hanging("note: ", note)
    if found.left:
        lines += hanging("not taken over from the file: ", ", ".join(found.left))
    for line in found.imported.assumed:
        lines += hanging("assumed: ", line)
    return "\n".join(lines) + "\n"
