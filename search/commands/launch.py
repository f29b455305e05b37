"""`search launch` and `search resume`: run a search, tell how it goes, end with its front."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hardware.units import format_bytes, format_count, format_seconds
from results.report import front_table, ranked, rejection_table
from results.report.text import hanging
from results.store import RunFolder
from search.commands.answer import NOTHING_FEASIBLE, answer
from search.commands.point import model_line
from search.commands.progress import watching
from search.commands.rows import json_rows
from search.commands.runs import find_run, space_of
from search.commands.why import closest_lines, counts_line, rejections_of
from search.launch import LaunchOptions, NothingFeasible, Progress, launch, resume
from search.pool import PoolError
from search.space import Sampler, Space, SpaceError, load_space

__all__ = ["run", "run_resume"]

INTERRUPTED = 130
TOP = 15
SAMPLERS = (Sampler.AUTO, Sampler.EXHAUSTIVE)
TOKENS = "14.8e12"


def run(args: argparse.Namespace) -> int:
    """Searches every space, one after the other; the first that does not end well ends all."""
    for option, given in (("--out", args.out), ("-o", args.output)):
        if given is not None and len(args.spaces) > 1:
            raise ValueError(
                f"{option} is for one space, but got {len(args.spaces)}; leave it out, or launch one by one"
            )
    overrides = [*args.overrides, *([f"search.sampler={args.sampler}"] if args.sampler else [])]
    loaded = [_checked(load_space(name, overrides), name) for name in args.spaces]
    out = Path(args.out) if args.out is not None else None
    options = _options(args, out)
    for space in loaded:
        _say(_understood(space, str(out) if out else f"runs/{space.name}-TIMESTAMP"))
        code = _finish(args, space, partial(launch, space, options))
        if code:
            return code
    return 0


def run_resume(args: argparse.Namespace) -> int:
    """Goes on where a run stopped."""
    folder = find_run(args.run)
    space = space_of(folder)
    _say(_understood(space, str(folder.path)))
    return _finish(args, space, partial(resume, folder.path, _options(args, None)))


def _options(args: argparse.Namespace, out: Path | None) -> LaunchOptions:
    seed = getattr(args, "seed", None)
    return LaunchOptions(out=out, pool=args.pool, workers=args.workers, address=args.address, seed=seed)


def _checked(space: Space, name: str) -> Space:
    if space.options.sampler not in SAMPLERS:
        accepted = ", ".join(sampler.value for sampler in SAMPLERS)
        raise SpaceError(
            f"{name}: search.sampler: is not known; got {space.options.sampler.value}; accepted {accepted}"
        )
    return space


def _finish(args: argparse.Namespace, space: Space, work: Callable[[Progress], RunFolder]) -> int:
    """Does the work under the eyes of a watcher, and tells the outcome."""
    try:
        with watching() as watcher:
            folder = work(watcher)
    except KeyboardInterrupt as stop:
        _say([f"interrupted; go on with: search resume {shlex.quote(str(getattr(stop, 'run', 'latest')))}"])
        return INTERRUPTED
    except PoolError as error:
        raise ValueError(str(error)) from error
    except NothingFeasible as error:
        _nothing(args, error)
        return NOTHING_FEASIBLE
    _ended(args, space, folder)
    return 0


def _say(lines: list[str]) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)


def _understood(space: Space, place: str) -> list[str]:
    """What is about to be searched, in the words of the one who asked."""
    work = space.workload
    systems = [
        f"{s.num_chips} x {s.chip.name} ({s.name}), {format_bytes(s.usable_hbm_bytes)} each" for s in space.systems
    ]
    axes = " x ".join(f"{name} {len(values)}" for name, values in space.axes.items() if len(values) > 1)
    facts = {
        "model": model_line(space.model),
        "system": "; ".join([*systems[:3], *([f"{len(systems) - 3} more"] if len(systems) > 3 else [])]),
        "workload": f"{work.global_batch} sequences of {work.seq} tokens, {format_count(work.tokens)} tokens a step",
        "space": f"{format_count(space.raw_size)} points" + (f" = {axes}" if axes else ""),
        "objectives": ", ".join(f"{o.column} {'down' if o.minimise else 'up'}" for o in space.objectives),
        "constraints": "; ".join(constraint.expression.text for constraint in space.constraints),
        "reference": ", ".join(space.references),
        "run": place,
    }
    return [line for name, text in facts.items() if text for line in hanging(f"{name:<12}", text)]


def _ended(args: argparse.Namespace, space: Space, folder: RunFolder) -> None:
    front, reference, manifest = folder.read_front(), folder.read_reference(), folder.manifest
    objectives = [objective.column for objective in space.objectives]
    lines = [front_table(front, objectives, reference=reference, top=TOP).rstrip(), ""]
    lines += hanging("candidates: ", counts_line(manifest["counts"]))
    lines += hanging("took: ", ", ".join(f"{name} {format_seconds(s)}" for name, s in manifest["seconds"].items()))
    first = int(front["id"][ranked(front, objectives)[0][0]]) if len(front) else None
    lines += _next(folder.path, first)
    data = {
        "run": str(folder.path),
        "state": manifest["state"],
        "objectives": objectives,
        "counts": manifest["counts"],
        "seconds": manifest["seconds"],
        "rows": json_rows(front),
        "reference": json_rows(reference),
    }
    answer(args, text="\n".join(lines) + "\n", data=data)


def _next(path: Path, first: int | None) -> list[str]:
    run_name = shlex.quote(str(path))
    point = f"{run_name}:{first}" if first is not None else f"{run_name}:ID"
    return [
        "next:",
        f"  search show {run_name}",
        f"  search estimate {point}",
        f"  search why {run_name}",
        f"  search plan {run_name} --tokens {TOKENS}",
    ]


def _nothing(args: argparse.Namespace, error: NothingFeasible) -> None:
    rejections = rejections_of(error.reasons, {})
    lines = ["nothing is feasible", rejection_table(rejections).rstrip(), *closest_lines(error.closest)]
    lines.append(f"examples of each rule: search why {shlex.quote(str(error.run))}")
    data: dict[str, Any] = {"run": str(error.run), "rows": [], "reasons": error.reasons, "closest": error.closest}
    answer(args, text="\n".join(lines) + "\n", data=data)
