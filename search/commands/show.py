"""`search show`: the front of a run as a table, CSV, JSON or picture."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hardware.units import format_seconds
from results.files import write_bytes
from results.report import csv_text, front_table, ranked, scatter
from results.report.text import columns, counted, hanging
from results.store import RunFolder
from results.table import Table
from search.commands.answer import answer, check_writable, write
from search.commands.outcome import finalist_lines, json_replays, points_of, read_replays
from search.commands.rows import json_rows, ordered, ordered_table, select
from search.commands.runs import find_run, space_of
from search.commands.served_show import show_served
from search.finalists import key_of, name_of
from search.space import Space
from search.study_curve import curve, is_study, reference_of

__all__ = ["run"]

GROWTH_LINES = 12
FEW, PLOT = 3, (80, 12)  # points that make a plot, and its columns and lines
WATERFALLS = 30  # points of a workbook, side by side
TOKENS = "15e12"
BAR = 40  # characters


def run(args: argparse.Namespace) -> int:
    """Shows one table of a run."""
    folder = find_run(args.run, answers=True)
    if folder.answers:
        return show_served(args, folder)
    if args.tables == "replays":
        return _show_replays(args, folder)
    space = space_of(folder)
    objectives = [objective.column for objective in space.objectives]
    table = _table(folder, args.tables)
    if args.where is not None:
        table = select(table, args.where)
    reference = folder.read_reference() if args.tables == "front" else None
    replays, damage = read_replays(folder) if args.tables == "front" else (None, [])
    if args.picture is not None:
        check_writable(args, args.picture)
        if Path(args.picture).suffix != ".png":
            raise ValueError(f"{args.picture}: a picture's name must end in .png, but got {Path(args.picture).name!r}")
        title = f"{folder.manifest['name']}: {counted(len(table), 'point')}"
        _draw(Path(args.picture), table, reference, objectives, title)
    if args.xlsx is not None:
        _save_workbook(args, folder, space, table, objectives)
    rows = _in_order(table, args.by, objectives)
    rows = rows.take(range(len(rows))[: args.top])
    if args.csv:
        write(args, csv_text(rows))
        return 0
    data: dict[str, Any] = {"run": str(folder.path), "rows": json_rows(rows, space.model)}
    if reference is not None:
        data["reference"] = json_rows(reference, space.model)
    if replays is not None:
        data["replays"] = json_replays(folder, list(replays.rows()))
    text = _text(args, table, rows, reference, objectives, replays)
    if args.tables == "front" and is_study(folder):
        growth, share_of = _growth(args, folder)
        data["hypervolume"] = growth
        text += _growth_text(growth, share_of)
    elif args.exact is not None:
        raise ValueError(
            f"--exact is held against the front of a study, but {folder.path} was not sampled; leave it out"
        )
    lines = [text.rstrip("\n"), *damage, *_unfinished(folder)]
    if args.tables == "front" and args.by is None:
        lines += _drawn(table, reference, objectives) + _next(folder, rows, reference)
    answer(args, text="\n".join(lines) + "\n", data=data)
    return 0


def _unfinished(folder: RunFolder) -> list[str]:
    """That a run has not ended, so that more may come."""
    if folder.state == "done":
        return []
    remedy = "it goes on" if folder.state == "running" else f"go on with: search resume {shlex.quote(str(folder.path))}"
    return hanging("", f"the run is {folder.state}, this is what it has found so far; {remedy}")


def _drawn(table: Table, reference: Table | None, objectives: Sequence[str]) -> list[str]:
    """The points as a small plot in characters, where there are some to tell apart."""
    if len(table) < FEW:
        return []
    x, y = [*objectives, *(name for name in ("step_time_s", "peak_memory_bytes") if name not in objectives)][:2]
    return ["", *scatter(table, x, y, reference=reference, width=PLOT[0], height=PLOT[1]).rstrip().splitlines()]


def _next(folder: RunFolder, rows: Table, reference: Table | None) -> list[str]:
    """What to type next, about the first row."""
    if not len(rows):
        return []
    name, best = shlex.quote(str(folder.path)), int(rows["id"][0])
    named = [] if reference is None else [row["name"] for row in reference.rows() if row["feasible"]]
    beside = shlex.quote(named[0]) if named else int(rows["id"][1]) if len(rows) > 1 else None
    return [
        "next:",
        f"  search estimate {name}:{best}",
        *([] if beside is None else [f"  search compare {name}:{beside} {name}:{best}"]),
        f"  search fit {name}:{best}",
        f"  search plan {name} --tokens {TOKENS}",
        f"  search export {name}:{best} --to megatron-lm",
        f"  search report {name}",
    ]


def _save_workbook(
    args: argparse.Namespace, folder: RunFolder, space: Space, table: Table, objectives: Sequence[str]
) -> None:
    """The rows, waterfalls of the marked ones, and the operations of the first as formulas."""
    from results.report.workbook import workbook_bytes
    from search.commands.workbook_parts import about_of, chip_of, op_rows

    if Path(args.xlsx).suffix != ".xlsx":
        raise ValueError(f"{args.xlsx}: a workbook's name must end in .xlsx, but got {Path(args.xlsx).name!r}")
    check_writable(args, args.xlsx)
    if not len(table):
        raise ValueError(f"{args.xlsx}: a workbook needs at least one row, but the table is empty; widen --where")
    rows = _in_order(table, None, objectives)
    priced = rows.where(np.isfinite(rows["step_time_s"]))
    marked = [(name_of(row), place) for place, row in enumerate(priced.rows())][:WATERFALLS]
    ops = op_rows(space, priced.row(0)) if len(priced) else []
    chip = chip_of(space, priced.row(0)) if len(priced) else {}
    content = workbook_bytes(priced, marked, ops, chip, about_of(folder, space))
    write_bytes(Path(args.xlsx), content)


def _show_replays(args: argparse.Namespace, folder: RunFolder) -> int:
    """The finalists in order of replayed time, or by a column."""
    refused = {"--where": args.where, "--picture": args.picture, "--xlsx": args.xlsx}
    if given := [name for name, value in refused.items() if value is not None]:
        raise ValueError(f"{given[0]} is for points, but --tables replays shows replays; leave one of them out")
    table = folder.read_replays()
    if args.by is not None:
        table = table.sort("id").sort(args.by)
    table = table.take(range(len(table))[: args.top])
    if args.csv:
        write(args, csv_text(table))
        return 0
    rows = list(table.rows())
    points = points_of(folder, rows)
    rows = [row for row in rows if key_of(row) in points]
    nothing = f"no replays yet; search replay {shlex.quote(str(folder.path))} makes them"
    text = "\n".join(finalist_lines(rows, points) if rows else [nothing]) + "\n"
    answer(args, text=text, data={"run": str(folder.path), "rows": json_replays(folder, rows)})
    return 0


def _growth(args: argparse.Namespace, folder: RunFolder) -> tuple[list[dict[str, Any]], str]:
    """Hypervolume of a study by round, and of what `share` is a share."""
    if args.exact is None:
        points = curve(folder, space_of(folder), None)
        whole, share_of = (points[-1].hypervolume if points else 0.0), "of the last"
    else:
        exact, space = find_run(args.exact), space_of(folder)
        _check_same_question(exact, space_of(exact), space)
        whole, reference = reference_of(exact)
        points, share_of = curve(folder, space, reference), f"of the front of {exact.path}"
    rows = [asdict(point) | {"share": point.hypervolume / whole if whole > 0 else 1.0} for point in points]
    return rows, share_of


def _check_same_question(exact: RunFolder, other: Space, space: Space) -> None:
    """ValueError where fronts of two spaces have no common measure; what their axes offer may differ."""
    for name in ("model", "systems", "workload", "objectives"):
        if getattr(other, name) != getattr(space, name):
            raise ValueError(
                f"--exact must be a run of the same model, system, workload and objectives, but {exact.path} has "
                f"another {name.removesuffix('s')}; give a run of {space.name}"
            )


def _growth_text(growth: list[dict[str, Any]], share_of: str) -> str:
    """Where the hypervolume grew, in at most as many lines as a screen can spare."""
    if not growth:
        return ""
    picked = [growth[i] for i in sorted({*np.linspace(0, len(growth) - 1, GROWTH_LINES).round().astype(int).tolist()})]
    cells = [
        [format_seconds(p["seconds"]), str(p["trials"]), f"{p['share']:.2%}", "#" * round(BAR * min(p["share"], 1.0))]
        for p in picked
    ]
    told = hanging("", f"hypervolume of the study against its time (log10 axes), as share {share_of}:")
    head = "\n".join(["", *told]) + "\n"
    return head + "\n".join(columns(["time", "trials", "share", ""], cells, left=0)).rstrip() + "\n"


def _in_order(table: Table, by: str | None, objectives: Sequence[str]) -> Table:
    """By one column, or as a front is read; points that have no price (an illegal reference) come last."""
    if by is not None:
        return ordered(table, by)
    priced = np.all([np.isfinite(table[name]) for name in objectives], axis=0)
    rank = np.full(len(table), len(table))
    rank[np.flatnonzero(priced)[ranked(table.where(priced), objectives)[0]]] = range(int(priced.sum()))
    return table.take(np.argsort(rank, kind="stable"))


def _text(
    args: argparse.Namespace, table: Table, rows: Table, reference: Table | None, objectives: Sequence[str],
    replays: Table | None,
) -> str:  # fmt: skip
    if not len(table):
        if args.where:
            return f"no rows in {args.tables} where {args.where}\n"
        rejected = f"; search why {shlex.quote(args.run)} tells what was rejected" if args.tables == "front" else ""
        return f"no rows in {args.tables}{rejected}\n"
    if args.by is not None:
        shown = list(dict.fromkeys([args.by, *objectives]))
        return ordered_table(rows, shown) + f"{len(rows)} of {len(table)} rows\n"
    if args.tables == "reference":
        return front_table(table.take([]), objectives, reference=table)
    what = "points that were tried" if args.tables == "trials" else "points of the front"
    return front_table(table, objectives, reference=reference, replays=replays, top=args.top, what=what)


def _table(folder: RunFolder, name: str) -> Table:
    if name == "reference":
        return folder.read_reference()
    return folder.read_trials() if name == "trials" else folder.read_front()


def _draw(path: Path, table: Table, reference: Table | None, objectives: Sequence[str], title: str) -> None:
    from results.report.picture import save_front

    axes = [*objectives, *(name for name in ("step_time_s", "peak_memory_bytes") if name not in objectives)]
    save_front(path, table, x=axes[0], y=axes[1], reference=reference, title=title)
