"""`search runs`, and how a command line names a run."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from pathlib import Path

from results.report import runs_table
from results.store import RUNS, RunFolder, list_runs
from search.commands.answer import answer
from search.space import Space, parse_space

__all__ = ["find_run", "run", "space_of"]


def run(args: argparse.Namespace) -> int:
    """Lists the runs of a folder."""
    rows = list_runs(Path(args.directory))
    answer(args, text=runs_table(rows), data={"runs": rows})
    return 0


def find_run(name: str) -> RunFolder:
    """The run in that folder, of that name under runs/, or the newest one (`latest`)."""
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
