"""`search runs`, and how a command line names a run."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from pathlib import Path

from results.batch_index import BatchIndex, is_batch
from results.report import runs_table
from results.report.batch import batch_table
from results.store import RUNS, RunFolder, list_runs
from search.commands.answer import answer
from search.space import Space, parse_space

__all__ = ["find_batch", "find_run", "run", "space_of"]


def run(args: argparse.Namespace) -> int:
    """Lists the runs of a folder, or of a batch as its index has them."""
    if (batch := find_batch(args.directory)) is not None:
        index = BatchIndex.open(batch)
        answer(args, text=batch_table(index.rows()), data={"batch": str(batch), "runs": index.rows()})
        return 0
    rows = list_runs(Path(args.directory))
    answer(args, text=runs_table(rows), data={"runs": rows})
    return 0


def find_batch(name: str) -> Path | None:
    """The folder of several runs in that place or of that name under runs/; None where it is none."""
    return next((path for path in (Path(name), RUNS / name) if name and is_batch(path)), None)


def find_run(name: str, *, answers: bool = False) -> RunFolder:
    """The run in that folder, of that name under runs/, or the newest one (`latest`).

    Runs of models that answer are refused but where `answers` allows for them: their rows have other columns.
    """
    folder = _found(name)
    if folder.answers and not answers:
        rule = f"{name}: a run of a model that answers is told by search show, search why and search infer RUN:ID"
        raise ValueError(f"{rule}; give a run of training")
    return folder


def _found(name: str) -> RunFolder:
    if (batch := find_batch(name)) is not None:
        runs = ", ".join(str(batch / entry.run) for entry in BatchIndex.open(batch).entries)
        raise ValueError(f"{name}: a batch holds several runs; give one of {runs}")
    for path in (Path(name), RUNS / name):
        if path.is_dir() and name:
            return RunFolder.open(path)
    if name == "latest":
        return RunFolder.open(_newest())
    known = [path.name for path in RUNS.iterdir() if path.is_dir()] if RUNS.is_dir() else []
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name!r} is no run{hint}; accepted a run folder, a name of `search runs`, latest")


def space_of(folder: RunFolder) -> Space:
    """The space that a run searches."""
    return parse_space(folder.space_yaml, str(folder.path / "space.yaml"), folder.path)


def _newest() -> Path:
    rows = [row for row in list_runs(RUNS) if not row["error"]] if RUNS.is_dir() else []
    if not rows:
        raise ValueError("latest: there is no run in runs/ yet; `search launch SPACE` makes one")
    return Path(rows[0]["path"])
