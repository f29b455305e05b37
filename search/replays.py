"""Replays configurations in detail, keeps what they came to as rows of a run and as traces. Prints nothing.

Rows are written as each replay ends, so an interruption loses none; replaying again replaces rows of the same points.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from estimator.build import build
from estimator.detail.step import ReplayedStep, replay_step
from estimator.detail.unroll import MAX_TASKS, TooLarge
from estimator.model import ModelSpec
from estimator.part import part_names
from estimator.passes import lower
from estimator.precision import recipe
from estimator.strategy import Strategy
from estimator.timeline import critical_path, exposed
from estimator.workload import Workload
from hardware.system import SystemSpec
from hardware.units import format_bytes
from results.chrome_trace import MAX_BYTES, check_free, write_trace
from results.schema import REPLAY_CRITICAL, REPLAY_EXPOSED, REPLAY_FIELDS, conform, strategy_at, strategy_columns
from results.store import RunFolder
from results.trace_selection import ALL
from search.finalists import AGREEMENT, PARTIAL, Finalist, Key, key_of, name_of, reranked, system_of_row
from search.plain import plain
from search.space import Space

__all__ = ["Replayed", "check_traces", "known_rows", "replay_finalists", "replay_point", "subject_of", "trace_name"]

SUFFIX = ".json.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One row of replays.parquet, and the replay itself; None where there was none (the row's note says why)."""

    row: dict[str, Any]
    step: ReplayedStep | None


def replay_finalists(
    run: RunFolder, space: Space, chosen: Sequence[Finalist], *, traces: Path | None, prefix: str = "",
    trace_bytes: int = MAX_BYTES, max_tasks: int | None = None, tell: Callable[[str], None] = lambda _: None,
) -> Iterator[Replayed]:  # fmt: skip
    """Replays finalists of a run one by one; each is a row of the run, and a trace in `traces` unless that is None.

    What cannot be replayed is a row with a note. Ranks are those among all rows that the run has.
    """
    if why := _unreadable(run):
        tell(f"{why}: the rows that it had are lost, and the file is written anew")
    rows = known_rows(run)
    for number, finalist in enumerate(chosen, start=1):
        tell(f"replaying {number} of {len(chosen)}: {_told(finalist)}")
        path = None if traces is None else _path_of(finalist, space, traces, prefix)
        done = replay_point(
            space.model, strategy_at(finalist.row, space.fusion_rules), system_of_row(space, finalist.row),
            space.workload, finalist=finalist, path=path, trace_bytes=trace_bytes, max_tasks=max_tasks,
        )  # fmt: skip
        if path is not None and done.row["trace"]:
            is_own = path.parent == run.path / "replays"
            done = replace(done, row=done.row | {"trace": f"replays/{path.name}" if is_own else str(path.resolve())})
        rows[finalist.key] = done.row
        ordered = reranked(list(rows.values()))
        run.write_replays({field.name: [row[field.name] for row in ordered] for field in REPLAY_FIELDS})
        yield done
        del done  # of a large step, one at a time is enough


def known_rows(run: RunFolder) -> dict[Key, dict[str, Any]]:
    """What was replayed before, by key; a file that is damaged counts as none, for replays write it anew."""
    try:
        return {key_of(row): row for row in run.read_replays().rows()}
    except ValueError:
        return {}


def _unreadable(run: RunFolder) -> str:
    """What is wrong with the rows of former replays; empty where nothing is."""
    try:
        run.read_replays()
    except ValueError as error:
        return str(error).partition(";")[0]
    return ""


def replay_point(
    model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload, *, finalist: Finalist,
    path: Path | None, trace_bytes: int = MAX_BYTES, max_tasks: int | None = None,
) -> Replayed:  # fmt: skip
    """Replays one point that is legal and fits, with its trace in `path` unless that is None.

    A step that is too large to replay, a trace that cannot be written or does not hold all, and memory that the replay
    finds too small are notes in the row.
    """
    begin = time.perf_counter()
    try:
        step = replay_step(model, strategy, system, workload, max_tasks=max_tasks)
    except TooLarge as error:
        later = "; `search replay` of this point does it" if error.num_tasks <= MAX_TASKS else ""
        return Replayed(row=_empty_row(finalist) | {"note": f"not replayed: {_sentence(error)}{later}"}, step=None)
    except (ValueError, MemoryError) as error:
        return Replayed(row=_empty_row(finalist) | {"note": f"not replayed: {_sentence(error)}"}, step=None)
    row = _row(finalist, step) | {"replay_s": time.perf_counter() - begin}
    notes = _overfull(step)
    if path is not None:
        about = {
            "name": _told(finalist), "model": model.name, "system": system.told_chips,
            "estimated_step_time_s": row["estimated_step_time_s"], "replayed_step_time_s": row["replayed_step_time_s"],
        }  # fmt: skip
        subject = subject_of(model, strategy, system, workload)
        try:
            written = write_trace(
                path, step.timeline, subject=subject, about=about, max_bytes=trace_bytes,
                parts=part_names(lower(build(model, workload.seq), strategy, recipe(strategy.precision))),
            )  # fmt: skip
        except ValueError as error:
            notes.append(f"no trace: {_sentence(error)}")
        else:
            row["trace"] = str(path)
            notes += [] if written.ops == ALL else [f"{PARTIAL} {written.ops}"]
    return Replayed(row=row | {"note": "; ".join(notes)}, step=step)


def _overfull(step: ReplayedStep) -> list[str]:
    """What the replay says against the estimate's memory: ranks that would run out."""
    if not step.overfull:
        return []
    first, devices = step.overfull[0], step.timeline.tasks.devices
    peak, room = (format_bytes(x) for x in (step.peak_memory_bytes[first], devices[first].capacity_bytes))
    more = f" and {len(step.overfull) - 1} more ranks do" if len(step.overfull) > 1 else ""
    return [f"does not fit by the replay: {devices[first].name} takes {peak} of {room}{more}"]


def subject_of(model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> str:
    """A name for exactly this configuration, by which a trace is known again."""
    choices = {name: str(column[0]) for name, column in strategy_columns(strategy, 0).items()}
    content = [plain(model), plain(system), plain(workload), choices]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def trace_name(row: Mapping[str, Any], name: str, *, whole: bool = False) -> str:
    """File name of the trace of a row, or of a configuration of that name; `whole` tells on which system."""
    stem = str(row["id"]) if row["id"] >= 0 else name
    stem += f"-{row['system']}-{int(row['num_gpus'])}" if whole and row["id"] < 0 else ""
    return (re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "point") + SUFFIX


def _path_of(finalist: Finalist, space: Space, folder: Path, prefix: str) -> Path:
    return folder / (prefix + trace_name(finalist.row, finalist.row["name"], whole=len(space.systems) > 1))


def check_traces(space: Space, chosen: Sequence[Finalist], folder: Path, prefix: str) -> None:
    """ValueError where a trace of these would replace something else, before any time is spent."""
    for finalist in chosen:
        system = system_of_row(space, finalist.row)
        strategy = strategy_at(finalist.row, space.fusion_rules)
        subject = subject_of(space.model, strategy, system, space.workload)
        check_free(_path_of(finalist, space, folder, prefix), subject)


def _told(finalist: Finalist) -> str:
    return f"{name_of(finalist.row)} ({', '.join(finalist.why)})"


def _sentence(error: BaseException) -> str:
    return " ".join(str(error).split()) or "out of memory"


def _row(finalist: Finalist, step: ReplayedStep) -> dict[str, Any]:
    row = _empty_row(finalist)
    estimated = float(step.estimate.step_time_s)
    critical = critical_path(step.timeline).seconds
    by_category = {name: np.zeros(len(step.timeline.tasks.devices)) for name in REPLAY_EXPOSED}
    for (category, _), seconds in exposed(step.timeline).seconds.items():
        if category.value in by_category:
            by_category[category.value] = by_category[category.value] + seconds
    return row | {
        "estimated_step_time_s": estimated,
        "replayed_step_time_s": float(step.step_time_s),
        "error": step.error,
        "replayed_pipeline_s": float(step.pipeline_s),
        "estimated_peak_memory_bytes": float(step.estimate.peak_memory_bytes),
        "replayed_peak_memory_bytes": float(np.max(step.peak_memory_bytes)),
        **{f"critical_{name}_s": float(critical.get(name, 0.0)) for name in REPLAY_CRITICAL},
        **{f"exposed_{name}_s": float(seconds.max(initial=0.0)) for name, seconds in by_category.items()},
        "events": int(np.isfinite(step.timeline.start).sum()),
        "agrees": abs(step.error) <= AGREEMENT,
        "fits": not step.overfull,
    }


def _empty_row(finalist: Finalist) -> dict[str, Any]:
    """A row that was not replayed: what the estimate says of it."""
    row = finalist.row
    cells: dict[str, Any] = {f.name: math.nan for f in REPLAY_FIELDS}
    cells |= {
        "id": int(row["id"]), "name": row["name"], "system": row["system"],
        "num_gpus": int(row["num_gpus"]), "why": ", ".join(finalist.why),
        "estimated_step_time_s": float(row["step_time_s"]),
        "estimated_peak_memory_bytes": float(row["peak_memory_bytes"]),
        "events": 0, "trace": "", "agrees": False, "fits": True, "rank_estimated": 0, "rank_replayed": 0, "note": "",
    }  # fmt: skip
    return conform({name: [cell] for name, cell in cells.items()}, REPLAY_FIELDS).row(0)
