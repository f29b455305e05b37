"""`search launch` of several spaces, and `search resume` of such a batch: one folder each, one index.

A space that ends badly does not end the others: its line in the index says why, and the exit code tells the worst.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from results.batch_index import ENDED, INDEX, BatchIndex, Entry, folder_names
from results.report.batch import batch_table
from results.store import RunFolder
from search.commands.answer import NOTHING_FEASIBLE, answer, tell
from search.commands.page import write_report
from search.commands.progress import watching
from search.commands.runs import space_of
from search.launch import Interrupted, LaunchOptions, NothingFeasible, begin, resume
from search.pool import PoolError, one_session
from search.space import Space

__all__ = ["launch_many", "resume_many"]

DEFECT, BAD_INPUT, INTERRUPTED = 1, 2, 130
DEFECTS = (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError)
"""What wrong code of ours raises, besides what is bad input by its kind."""


def launch_many(args: argparse.Namespace, spaces: Sequence[Space], options: LaunchOptions) -> int:
    """Makes the batch and every run folder in it, then carries the runs out one after the other."""
    names = folder_names([space.name for space in spaces])
    entries = [
        Entry(
            run=name, name=space.name, model=space.model.name, systems=tuple(s.name for s in space.systems),
            num_gpus=tuple(s.num_chips for s in space.systems),
        )
        for name, space in zip(names, spaces, strict=True)
    ]  # fmt: skip
    batch = BatchIndex.create(options.out, entries)
    for space, entry in zip(spaces, entries, strict=True):
        begin(space, replace(options, out=batch.folder(entry))).close()
    tell(f"batch of {len(spaces)}: {batch.path}")
    return _carry_out(args, batch, options)


def resume_many(args: argparse.Namespace, path: Path, options: LaunchOptions) -> int:
    """Goes on with every run of a batch that has not ended; those that failed are tried again."""
    return _carry_out(args, BatchIndex.open(path), options)


def _carry_out(args: argparse.Namespace, batch: BatchIndex, options: LaunchOptions) -> int:
    worst = 0
    left = [n for n, row in enumerate(batch.rows()) if row["outcome"] not in ENDED]
    with _workers(options) if left else nullcontext():
        for number in left:
            code = _carry_out_one(batch, number, options)
            if code == INTERRUPTED:
                tell(f"interrupted; go on with: search resume {shlex.quote(str(batch.path))}")
                return code
            worst = max(worst, code, key=[0, NOTHING_FEASIBLE, BAD_INPUT, DEFECT].index)
    rows = batch.rows()
    if not worst and any(row["outcome"] == "nothing feasible" for row in rows):
        worst = NOTHING_FEASIBLE
    text = batch_table(rows) + "\n".join(_next(batch, rows)) + "\n"
    answer(args, text=text, data={"batch": str(batch.path), "runs": [_absolute(batch, row) for row in rows]})
    return worst


def _workers(options: LaunchOptions) -> AbstractContextManager[None]:
    """One Ray for all runs, where they run on it."""
    return nullcontext() if options.pool == "inline" else one_session(options.address, options.workers)


def _carry_out_one(batch: BatchIndex, number: int, options: LaunchOptions) -> int:
    entry = batch.entries[number]
    path = batch.folder(entry)
    tell(f"[{number + 1}/{len(batch.entries)}] {entry.run}")
    batch.settle(number, outcome="running", error="")
    try:
        with watching() as watcher:
            folder = resume(path, options, watcher)
        if len(folder.read_front()):
            write_report(folder, space_of(folder))
            batch.settle(number, outcome="done", **_facts(folder))
            return 0
        return _nothing(batch, number)
    except Interrupted:
        batch.settle(number, outcome="interrupted")
        return INTERRUPTED
    except NothingFeasible:
        return _nothing(batch, number)
    except (ValueError, OSError, PoolError) as error:
        return _failed(batch, number, str(error), BAD_INPUT)
    except (RuntimeError, MemoryError) as error:
        return _failed(batch, number, str(error), DEFECT)
    except DEFECTS as error:
        return _failed(batch, number, f"a defect of ours: {type(error).__name__}: {error}; {_retried(path)}", DEFECT)


def _nothing(batch: BatchIndex, number: int) -> int:
    path = batch.folder(batch.entries[number])
    why = f"nothing is feasible; reasons: search why {shlex.quote(str(path))}"
    batch.settle(number, outcome="nothing feasible", error=why, **_facts(RunFolder.open(path)))
    return NOTHING_FEASIBLE


def _retried(path: Path) -> str:
    """How a defect shows where it is."""
    return f"report what this prints: search resume {shlex.quote(str(path))} --traceback"


def _failed(batch: BatchIndex, number: int, why: str, code: int) -> int:
    sentence = " ".join(why.split())
    tell(f"failed: {sentence}")
    batch.settle(number, outcome="failed", error=sentence)
    return code


def _facts(folder: RunFolder) -> dict[str, Any]:
    """What the index tells of a finished run."""
    manifest, front, space = folder.manifest, folder.read_front(), space_of(folder)
    best = {
        o.column: float(front[o.column].min() if o.minimise else front[o.column].max())
        for o in space.objectives
        if len(front)
    }
    return {
        "sampler": manifest["sampler"],
        "legal": manifest["counts"].get("legal"),
        "front": len(front),
        "best": best,
        "seconds": manifest["seconds"].get("total"),
    }


def _absolute(batch: BatchIndex, row: dict[str, Any]) -> dict[str, Any]:
    return row | {"run": str(batch.path / row["run"])}


def _next(batch: BatchIndex, rows: Sequence[dict[str, Any]]) -> list[str]:
    place = shlex.quote(str(batch.path))
    lines = [f"index: {batch.path / INDEX}", "next:", f"  search runs {place}"]
    if done := [row for row in rows if row["outcome"] == "done"]:
        lines.append(f"  search show {shlex.quote(str(batch.path / done[0]['run']))}")
    if any(row["outcome"] not in ENDED for row in rows):
        lines.append(f"  search resume {place}")
    return lines
