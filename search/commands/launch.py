"""`search launch` and `search resume`: run a search, tell how it goes, end with its front."""

from __future__ import annotations

import argparse
import glob
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hardware.units import format_bytes, format_count, format_seconds
from results.report import front_table, ranked, rejection_table
from results.report.text import hanging
from results.store import REPORT, RunFolder, claimable
from results.table import Table
from search.choice import check_searchable, check_warm
from search.commands.answer import NOTHING_FEASIBLE, answer, check_writable, tell
from search.commands.launch_many import launch_many, resume_many
from search.commands.outcome import json_replays, read_replays, replay_lines
from search.commands.page import write_report
from search.commands.point import model_line, work_line
from search.commands.progress import watching
from search.commands.refined import refined_lines
from search.commands.rows import json_rows
from search.commands.runs import find_batch, find_run, space_of
from search.commands.served import launch_one, resume_one
from search.commands.why import closest_lines, closest_remedies, counts_line
from search.fold import folded
from search.launch import REPLAYED_TASKS, Interrupted, LaunchOptions, NothingFeasible, Progress, launch, resume
from search.pool import PoolError
from search.served import answers, load_served
from search.space import Space, load_space, shipped_spaces
from search.trials import closest_of
from search.tuner.finalists import refine_finalists

__all__ = ["run", "run_resume"]

INTERRUPTED = 130
TOP = 15
TOKENS = "14.8e12"


def run(args: argparse.Namespace) -> int:
    """Searches a space, or several one after the other (launch_many.py). All are read before the first starts."""
    if args.tune and not args.replay:
        raise ValueError("--tune refines finalists that are replayed, but --replay 0 replays none; leave one out")
    asked = {"sampler": args.sampler, "trials": args.trials, "seconds": args.seconds}
    overrides = [*args.overrides, *(f"search.{name}={value}" for name, value in asked.items() if value is not None)]
    options = _options(args)
    names = _spaces(args.spaces)
    if args.tune and len(names) > 1:
        raise ValueError(f"--tune refines the finalists of one space, but {len(names)} are given; launch them apart")
    of_requests = [name for name in names if answers(name, args.overrides)]
    if len(names) == 1 and of_requests:
        return _launch_served(args, names[0], asked, options)
    if of_requests:
        _say(hanging("left out: ", f"{', '.join(of_requests)}; a space of requests is launched by itself"))
    loaded = [load_space(name, overrides) for name in names if name not in of_requests]
    if not loaded:
        raise ValueError(f"{', '.join(names)}: spaces of requests are launched one by one; give one")
    for space in loaded:
        check_searchable(space)
    if args.output is not None:
        check_writable(args, args.output)
    warm = _warm(args.warm, loaded) if args.warm is not None else None
    out = claimable(Path(args.out)) if args.out is not None else None
    options = replace(options, out=out, warm=warm)
    if len(loaded) > 1:
        for space in loaded:
            _say([_in_short(space), *(f"{space.name}: {notice}" for notice in folded(space)[1])])
        return launch_many(args, loaded, options)
    (space,) = loaded
    _say([*_understood(space, str(out) if out else f"runs/{space.name}-TIMESTAMP"), *folded(space)[1]])
    return _finish(args, space, partial(launch, space, options))


def _launch_served(
    args: argparse.Namespace, name: str, asked: Mapping[str, object], options: LaunchOptions
) -> int:  # fmt: skip
    """A space of requests: every deployment is priced, so that no option of a sampler has a meaning."""
    if args.tune:
        raise ValueError(f"--tune refines training steps, but {name} answers requests; leave it out")
    given = [
        f"--{word}" for word, value in {**asked, "seed": args.seed, "warm": args.warm}.items() if value is not None
    ]
    if given and not (given == ["--sampler"] and args.sampler in {"auto", "exhaustive"}):
        raise ValueError(f"{given[0]} is of a sampler, but every deployment of {name} is priced; leave it out")
    space = load_served(name, args.overrides)
    if args.output is not None:
        check_writable(args, args.output)
    out = claimable(Path(args.out)) if args.out is not None else None
    return launch_one(args, space, replace(options, out=out))


def _spaces(words: Sequence[str]) -> list[str]:
    """The spaces of a command line: a word with * ? or [ that is no file is a pattern, for shells that expand none."""
    found: list[str] = []
    for word in words:
        if Path(word).exists() or not set(word) & set("*?["):
            found.append(word)
            continue
        matches = sorted(glob.glob(word))
        if not matches:
            raise ValueError(f"{word}: no file matches; accepted space files, or {', '.join(shipped_spaces())}")
        found += matches
    return found


def _warm(name: str, loaded: list[Space]) -> Path:
    """The run to start from. ValueError, before a folder is made, where it has no front or a search no use for it."""
    for space in loaded:
        check_warm(space)
    folder = find_run(name)
    folder.read_front()
    return folder.path


def run_resume(args: argparse.Namespace) -> int:
    """Goes on where a run, or a batch of runs, stopped."""
    options = _options(args)
    if (batch := find_batch(args.run)) is not None:
        return resume_many(args, batch, options)
    folder = find_run(args.run, answers=True)
    folder.check_space()
    if folder.answers:
        return resume_one(args, folder)
    space = space_of(folder)
    _say(_understood(space, str(folder.path)))
    return _finish(args, space, partial(resume, folder.path, options))


def _options(args: argparse.Namespace) -> LaunchOptions:
    given = [word for word, value in (("--workers", args.workers), ("--address", args.address)) if value is not None]
    if args.pool == "inline" and given:
        raise ValueError(f"{given[0]} is of a pool on Ray, but --pool inline runs in this process; leave one out")
    seed = getattr(args, "seed", None)
    return LaunchOptions(pool=args.pool, workers=args.workers, address=args.address, seed=seed, replay=args.replay)


def _finish(args: argparse.Namespace, space: Space, work: Callable[[Progress], RunFolder]) -> int:
    """Does the work under the eyes of a watcher, and tells the outcome."""
    try:
        with watching() as watcher:
            folder = work(watcher)
    except Interrupted as stop:
        goes_on = "go on with: search resume"
        if RunFolder.open(stop.run).state == "done":
            goes_on = "the front is written; replay its finalists with: search replay"
        _say([f"interrupted; {goes_on} {shlex.quote(str(stop.run))}"])
        return INTERRUPTED
    except PoolError as error:
        raise ValueError(str(error)) from error
    except NothingFeasible as error:
        return _nothing(args, space, error.run, error.closest)
    if not len(folder.read_front()):  # resumed after it had ended so
        return _nothing(args, space, folder.path, closest_of(folder, space))
    if args.tune:
        with folder:
            refine_finalists(folder, space, max_tasks=REPLAYED_TASKS, tell=tell)
    write_report(folder, space)
    _ended(args, space, folder)
    return 0


def _say(lines: list[str]) -> None:
    tell(*lines)


def _understood(space: Space, place: str) -> list[str]:
    """What is about to be searched, in the words of the one who asked."""
    work = space.workload
    systems = [
        f"{s.told_chips} ({s.name}), {' and '.join(format_bytes(p.usable_hbm_bytes) for p in s.parts)} each"
        for s in space.systems
    ]
    axes = " x ".join(f"{name} {len(values)}" for name, values in space.axes.items() if len(values) > 1)
    facts = {
        "model": model_line(space.model),
        "system": "; ".join([*systems[:3], *([f"{len(systems) - 3} more"] if len(systems) > 3 else [])]),
        "workload": work_line(work),
        "space": f"{format_count(space.raw_size)} points" + (f" = {axes}" if axes else ""),
        "free": ", ".join(space.open_axes),
        "objectives": ", ".join(f"{o.column} {'down' if o.minimise else 'up'}" for o in space.objectives),
        "constraints": "; ".join(constraint.expression.text for constraint in space.constraints),
        "reference": ", ".join(space.references),
        "run": place,
    }
    return [line for name, text in facts.items() if text for line in hanging(f"{name:<12}", text)]


def _in_short(space: Space) -> str:
    """One line of one space of several."""
    first, *others = space.systems
    more = f" and {len(others)} more" if others else ""
    objectives = ", ".join(o.column for o in space.objectives)
    where = f"{space.model.name} on {first.num_chips} x {first.name}{more}"
    return f"{space.name}: {where}, {format_count(space.raw_size)} points; {objectives}"


def _ended(args: argparse.Namespace, space: Space, folder: RunFolder) -> None:
    front, reference, manifest = folder.read_front(), folder.read_reference(), folder.manifest
    tuned = manifest.get("tuned", []) if args.tune else []
    objectives = [objective.column for objective in space.objectives]
    order, marks = ranked(front, objectives)
    replays, damage = read_replays(folder)
    rows = list(replays.rows())
    shown = front.take(_spread(*_finalists_first(front, order, len(marks), rows)))
    *table, _ = front_table(shown, objectives, reference=reference, replays=replays).splitlines()
    lines = [
        *table,
        f"{len(shown)} of {len(front)} points of the front, from end to end",
        *replay_lines(rows),
        *damage,
        *refined_lines(tuned, f"{shlex.quote(str(folder.path))}:{{name}}"),
        "",
    ]
    lines += hanging("candidates: ", counts_line(manifest["counts"], space.open_axes))
    lines += hanging("search: ", str(manifest.get("sampler_reason", "")))
    lines += hanging("took: ", ", ".join(f"{name} {format_seconds(s)}" for name, s in manifest["seconds"].items()))
    can_replay = not all(system.segments for system in space.systems)
    lines += [f"page: {folder.path / REPORT} (opens in a browser)"] if (folder.path / REPORT).is_file() else []
    lines += _next(folder.path, int(front["id"][order[0]]), replayed=bool(len(replays)), can_replay=can_replay)
    data = {
        "run": str(folder.path),
        "state": manifest["state"],
        "objectives": objectives,
        "counts": manifest["counts"],
        "seconds": manifest["seconds"],
        "rows": json_rows(front, space.model),
        "reference": json_rows(reference, space.model),
        "replays": json_replays(folder, rows),
        "tuned": tuned,
    }
    answer(args, text="\n".join(lines) + "\n", data=data)


def _finalists_first(
    front: Table, order: Sequence[int], num_marked: int, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[int], int]:
    """The order with replayed points behind the marked ones, and how many those are together."""
    ids = {row["id"] for row in rows}
    replayed = [place for place in order[num_marked:] if int(front["id"][place]) in ids]
    others = [place for place in order[num_marked:] if int(front["id"][place]) not in ids]
    return [*order[:num_marked], *replayed, *others], num_marked + len(replayed)


def _spread(order: Sequence[int], num_marked: int) -> list[int]:
    """The best and the knee, and of the others as many as there is room for, evenly spaced: neighbours look alike."""
    marked, others = list(order[:num_marked]), list(order[num_marked:])
    room = min(max(TOP - num_marked, 0), len(others))
    return marked + [others[(2 * i + 1) * len(others) // (2 * room)] for i in range(room)]


def _next(path: Path, first: int, *, replayed: bool, can_replay: bool) -> list[str]:
    run_name = shlex.quote(str(path))
    replay = [f"  search replay {run_name}{f':{first}' if replayed else ''}"]
    return [
        "next:",
        f"  search show {run_name}{' --tables replays' if replayed else ''}",
        f"  search estimate {run_name}:{first}",
        *(replay if can_replay else ()),
        f"  search why {run_name}",
        f"  search plan {run_name} --tokens {TOKENS}",
    ]


def _nothing(args: argparse.Namespace, space: Space, run: Path, closest: list[dict[str, Any]]) -> int:
    """Why nothing is feasible, what comes closest, and what would make that fit."""
    rejections = RunFolder.open(run).read_rejections()
    remedy = closest_remedies(space, closest)
    lines = ["nothing is feasible", rejection_table(rejections).rstrip(), *closest_lines(closest, remedy)]
    lines.append(f"the run is {run}")
    data = {
        "run": str(run),
        "rows": [],
        "rejections": list(rejections.rows()),
        "closest": closest,
        "remedies": [one.as_dict() for one in remedy],
    }
    answer(args, text="\n".join(lines) + "\n", data=data)
    return NOTHING_FEASIBLE
