"""`search replay`: the finalists of a run, or one configuration, operation by operation beside their estimates."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardware.units import format_bytes, format_seconds
from results.chrome_trace import check_free
from results.files import as_user_error
from results.report.text import hanging
from results.store import RunFolder, is_run
from search.commands.answer import NOTHING_FEASIBLE, answer, tell
from search.commands.estimate import headline
from search.commands.outcome import beside, detail, finalist_lines, json_detail, json_replay, json_replays, points_of
from search.commands.point import Point, read_point, read_row, split_run
from search.commands.refined import refined_lines
from search.commands.remedies import remedies
from search.commands.rows import summary
from search.commands.runs import find_run, space_of
from search.finalists import MORE, Finalist, finalists, key_of, name_of, replayable
from search.replays import Replayed, check_traces, known_rows, replay_finalists, replay_point, subject_of, trace_name
from search.tuner.finalists import refine_finalists, refined_row
from search.tuner.step import refine

__all__ = ["run"]

VIEWER = "https://ui.perfetto.dev"
ASKED = "asked for"


def run(args: argparse.Namespace) -> int:
    """Replays a run's finalists, one of its rows, or a configuration; exit 3 where there is nothing that fits."""
    target = args.config
    if args.trace is not None and args.no_trace:
        raise ValueError("--trace DIR writes traces and --no-trace writes none; give one of them")
    if args.reference is None and split_run(target) is None and _names_run(target):
        if args.overrides:
            raise ValueError(f"--set changes a configuration, but {target} is a run; give {target}:ID")
        return _replay_run(args, find_run(target))
    if args.top is not None:
        raise ValueError(f"--top goes with a run, but {target} is one configuration; leave it out")
    return _replay_point(args)


def _names_run(target: str) -> bool:
    """Whether a word means a run rather than a space: a folder, one of runs/, or the newest."""
    is_file = Path(target).is_file() or Path(target).suffix in {".yaml", ".yml"}
    return not is_file and (Path(target).is_dir() or target == "latest" or Path("runs", target).is_dir())


def _replay_run(args: argparse.Namespace, folder: RunFolder) -> int:
    space = space_of(folder)
    front, name = folder.read_front(), shlex.quote(str(folder.path))
    if not len(front):
        text = f"nothing to replay: no point of {folder.path} is feasible; search why {name}\n"
        answer(args, text=text, data={"run": str(folder.path), "rows": [], "best": None})
        return NOTHING_FEASIBLE
    objectives = [objective.column for objective in space.objectives]
    more = MORE if args.top is None else args.top
    chosen = finalists(front, folder.read_reference(), objectives, more)
    chosen, note = replayable(space, chosen)
    if not chosen:
        raise ValueError(f"{folder.path}: {note}")
    if note:
        tell(*hanging("", note))
    traces, prefix = _traces(args, folder)
    if traces is not None:
        check_traces(space, chosen, traces, prefix)
    with folder:
        best = _fastest(replay_finalists(folder, space, chosen, traces=traces, prefix=prefix, tell=tell))
    rows = list(known_rows(folder).values())
    points = points_of(folder, rows)
    rows = [row for row in rows if key_of(row) in points]
    lines = finalist_lines(rows, points)
    shown: dict[str, Any] | None = None
    tuned: list[dict[str, Any]] = []
    if best is not None and best.step is not None:
        row = name_of(best.row)
        lines += ["", *hanging(f"the fastest, {row}: ", summary(points[key_of(best.row)])), "", detail(best.step)]
        if args.tune:
            with folder:
                tuned = refine_finalists(folder, space, tell=tell)
        lines += [
            *_opening(traces),
            *refined_lines(tuned, f"{name}:{{name}}"),
            "next:",
            f"  search estimate {name}:{row}",
            f"  search show {name} --tables replays",
        ]
        shown = {"id": best.row["id"], "name": best.row["name"], **json_detail(best.step)}
    data = {"run": str(folder.path), "rows": json_replays(folder, rows), "best": shown, "tuned": tuned}
    answer(args, text="\n".join(lines) + "\n", data=data)
    return 0


def _fastest(done: Iterable[Replayed]) -> Replayed | None:
    """The first in order of replayed time; of the others nothing is held."""
    best: Replayed | None = None
    for one in done:
        if one.step is not None and (
            best is None or one.row["replayed_step_time_s"] < best.row["replayed_step_time_s"]
        ):
            best = one
    return best


def _replay_point(args: argparse.Namespace) -> int:
    parts = split_run(args.config)
    point = read_point(args.config, args.reference, args.overrides)
    try:
        point = point.settled()
        result = point.evaluate()
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from error
    if not result.feasible:
        return _refuse(args, point, float(result.device_memory_bytes))
    row = point.row(result)
    if parts is not None and not args.overrides:
        done = _row_of_run(args, *parts)
    else:
        folder, _ = _traces(args, None)
        path = None if folder is None else folder / trace_name(row, point.name)
        if path is not None:
            check_free(path, subject_of(point.model, point.strategy, point.system, point.workload))
        if not point.system.segments:  # which a replay refuses at once
            tell(f"replaying {args.config}")
        asked = Finalist(row=row, why=(ASKED,))
        done = replay_point(point.model, point.strategy, point.system, point.workload, finalist=asked, path=path)
    if done.step is None:
        raise ValueError(f"{args.config}: {done.row['note']}")
    tell(*point.notices)
    lines = [*headline(point), *hanging("layout    ", summary(row)), *beside(done.row), "", detail(done.step)]
    lines += hanging("", done.row["note"]) if done.row["note"] else []
    lines += _opening(Path(done.row["trace"]) if done.row["trace"] else None)
    data = {"name": point.name, "model": point.model.name, **json_replay(done.row, row), **json_detail(done.step)}
    if args.tune:
        tell(f"refining {args.config} on its replayed step")
        found = refine(point.model, point.strategy, point.system, point.workload, step=done.step)
        data["tuned"] = {"name": point.name, **refined_row(found)}
        again = shlex.quote(args.config) + ("" if args.reference is None else f" --reference {args.reference}")
        lines += refined_lines([data["tuned"]], again)
    answer(args, text="\n".join(lines) + "\n", data=data)
    return 0


def _row_of_run(args: argparse.Namespace, folder: RunFolder, row_id: str) -> Replayed:
    """Replays one row of a run, and keeps it with the run, under the reasons that it had."""
    space, row = space_of(folder), read_row(folder, row_id)
    known = known_rows(folder).get(key_of(row))
    chosen = [Finalist(row=row, why=tuple(known["why"].split(", ")) if known else (ASKED,))]
    traces, prefix = _traces(args, folder)
    if traces is not None:
        check_traces(space, chosen, traces, prefix)
    with folder:
        (done,) = replay_finalists(folder, space, chosen, traces=traces, prefix=prefix, tell=tell)
    trace = str(folder.path / done.row["trace"]) if done.row["trace"] else ""  # one outside the run is absolute
    return replace(done, row=done.row | {"trace": trace})


def _traces(args: argparse.Namespace, folder: RunFolder | None) -> tuple[Path | None, str]:
    """Where traces go, and how their names begin. A place that cannot be written is told before time is spent."""
    if args.no_trace or (args.trace is None and folder is None):
        return None, ""
    if args.trace is None:
        assert folder is not None
        place = folder.traces()
    else:
        place = Path(args.trace)
        if not args.trace or is_run(place) or (place.exists() and not place.is_dir()):
            kind = "a run" if is_run(place) else "a file" if args.trace else "empty"
            raise ValueError(f"{args.trace!r}: --trace takes a folder for traces, but it is {kind}; give another")
    probe = place / f".{os.getpid()}.probe"
    with as_user_error(place, "write traces"):
        place.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    return place, "" if args.trace is None or folder is None else f"{folder.path.resolve().name}-"


def _opening(traces: Path | None) -> list[str]:
    if traces is None:
        return ["no trace was written; --trace DIR writes one"]
    what = "trace" if traces.is_file() else "traces"
    return hanging("", f"{what}: {traces}; open in {VIEWER} (it runs in the browser, nothing is uploaded)")


def _refuse(args: argparse.Namespace, point: Point, device_bytes: float) -> int:
    """One line: why there is nothing to replay, and the fastest remedy."""
    capacity, found = point.system.usable_hbm_bytes, remedies(point)
    remedy = "no single change makes it fit: search estimate tells what comes closest"
    if found and found[0].fits:
        remedy = f"fits with {found[0].change} ({format_seconds(found[0].step_time_s)} a step)"
    reason = f"does not fit: {format_bytes(device_bytes)} of {format_bytes(capacity)} usable"
    tell(*point.notices)
    data = {"name": point.name, "feasible": False, "reason": reason, "remedies": [one.as_dict() for one in found]}
    answer(args, text=f"{args.config}: nothing to replay, {reason}; {remedy}\n", data=data)
    return NOTHING_FEASIBLE
