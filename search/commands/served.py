"""What launch and resume tell of runs of models that answer."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hardware.units import format_bytes, format_seconds
from results.report import rejection_table
from results.report.served import served_order, served_table
from results.report.text import counted, hanging
from results.store import REPORT, RunFolder
from results.table import Table
from search.commands.answer import NOTHING_FEASIBLE, answer, tell
from search.commands.infer import remedy_lines
from search.commands.page import write_page
from search.commands.point import model_line
from search.commands.progress import watching
from search.commands.served_page import served_html
from search.commands.served_show import counts_line, objectives_of, served_space
from search.served import ServedSpace
from search.served_launch import launch_served, resume_served
from search.served_remedies import served_remedies
from search.watching import Interrupted, LaunchOptions, NothingFeasible, Progress

__all__ = ["launch_one", "resume_one"]

INTERRUPTED = 130
TOP = 15


def launch_one(args: argparse.Namespace, space: ServedSpace, options: LaunchOptions) -> int:
    """Runs a search and tells its front."""
    place = str(options.out) if options.out else f"runs/{space.name}-TIMESTAMP"
    tell(*_understood(space, place))
    return _finish(args, space, lambda progress: launch_served(space, options, progress))


def resume_one(args: argparse.Namespace, folder: RunFolder) -> int:
    """Goes on with a run."""
    space = served_space(folder)
    tell(*_understood(space, str(folder.path)))
    return _finish(args, space, lambda progress: resume_served(folder.path, progress))


def _finish(args: argparse.Namespace, space: ServedSpace, work: Callable[[Progress], RunFolder]) -> int:
    try:
        with watching() as watcher:
            folder = work(watcher)
    except Interrupted as stop:
        tell(f"interrupted; go on with: search resume {shlex.quote(str(stop.run))}")
        return INTERRUPTED
    except NothingFeasible as error:
        return _nothing(args, space, error.run, error.closest)
    front, reference = folder.read_front(), folder.read_reference()
    if not len(front):  # resumed after it had ended so
        return _nothing(args, space, folder.path, [])
    write_page(folder, lambda: served_html(folder, space))
    manifest, first = folder.manifest, int(front["id"][served_order(front, objectives_of(space))[0][0]])
    name = shlex.quote(str(folder.path))
    lines = [
        *served_table(front, objectives_of(space), reference=reference, top=TOP).splitlines(), "",
        *hanging("deployments: ", counts_line(manifest["counts"])),
        f"took: {format_seconds(manifest['seconds']['total'])}",
        *([f"page: {folder.path / REPORT} (opens in a browser)"] if (folder.path / REPORT).is_file() else []),
        "next:", f"  search show {name}", f"  search infer {name}:{first}", f"  search why {name}",
    ]  # fmt: skip
    answer(args, text="\n".join(lines) + "\n", data=_data(folder, front, reference))
    return 0


def _data(folder: RunFolder, front: Table, reference: Table) -> dict[str, Any]:
    manifest = folder.manifest
    return {
        "run": str(folder.path), "state": folder.state, "counts": manifest["counts"], "seconds": manifest["seconds"],
        "rows": list(front.rows()), "reference": list(reference.rows()),
    }  # fmt: skip


def _understood(space: ServedSpace, place: str) -> list[str]:
    axes = " x ".join(f"{name} {len(values)}" for name, values in space.axes.items() if len(values) > 1)
    wide = f" = batch {len(space.batches)}" + (f" x {axes}" if axes else "")
    systems = [f"{s.told_chips} ({s.name}), {format_bytes(s.usable_hbm_bytes)} each" for s in space.systems]
    facts = {
        "model": model_line(space.model),
        "system": "; ".join([*systems[:3], *([f"{len(systems) - 3} more"] if len(systems) > 3 else [])]),
        "notice": "; ".join(space.notices),
        "requests": f"{space.phase.value}, {space.context} tokens, output {space.output}",
        "space": f"{counted(space.raw_size, 'point')}{wide}",
        "objectives": ", ".join(f"{o.column} {'down' if o.minimise else 'up'}" for o in space.objectives),
        "constraints": "; ".join(c.text for c in space.constraints),
        "reference": ", ".join(space.references),
        "run": place,
    }  # fmt: skip
    return [line for name, text in facts.items() if text for line in hanging(f"{name:<12}", text)]


def _nothing(args: argparse.Namespace, space: ServedSpace, run: Path, closest: list[dict[str, Any]]) -> int:
    """Why nothing is feasible, what comes closest, and what would make that fit."""
    rejections = RunFolder.open(run).read_rejections()
    found = served_remedies(space, space.point(closest[0]["id"])) if closest else []
    lines = ["nothing is feasible", rejection_table(rejections).rstrip()]
    if closest:
        lines += [f"the closest lacks {format_bytes(closest[0]['short_by_bytes'])}", *remedy_lines(found)]
    lines.append(f"the run is {run}")
    data = {"run": str(run), "rows": [], "rejections": list(rejections.rows()), "closest": closest,
            "remedies": [remedy.as_dict() for remedy in found]}  # fmt: skip
    answer(args, text="\n".join(lines) + "\n", data=data)
    return NOTHING_FEASIBLE
