"""`search trace record`: runs a command that trains, records each of its ranks, and tells what they left."""

from __future__ import annotations

import argparse
import datetime
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from capture.profile.launched import Launched, RankFile, check_folder, launch
from hardware.units import format_bytes, format_seconds
from results.report.text import columns
from search.commands.answer import answer, tell

__all__ = ["run"]

STANDARD_ERROR = 2  # the command's words, where ours are JSON
STAMP = "trace-%Y%m%d-%H%M%S"
KINDS = (("forward", ("FW",)), ("backward", ("BW",)), ("update", ("UPD",)), ("collectives", ("COMM",)),
         ("transfers", ("SEND", "RECV")))  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the command, with --overhead once before without recording it, and tells what was recorded."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ValueError(
            "search trace record needs a command that trains; give it after --, as in `search trace record -o traces "
            "-- torchrun --nproc-per-node 2 train.py`"
        )
    folder = Path(args.output or datetime.datetime.now(tz=datetime.UTC).strftime(STAMP))
    check_folder(folder)
    try:
        return _recorded(args, command, folder)
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()


def _recorded(args: argparse.Namespace, command: Sequence[str], folder: Path) -> int:
    output = STANDARD_ERROR if args.json else None
    plain = None
    if args.overhead:
        tell("first without recording, for its seconds alone")
        with tempfile.TemporaryDirectory() as scratch:
            plain = launch(command, Path(scratch), times=True, output=output)
        _check(plain, Path(scratch))
    found = launch(command, folder, output=output)
    _check(found, folder)
    told = argparse.Namespace(**{**vars(args), "output": None})
    answer(told, text=_text(folder, found, plain), data=_data(folder, found, plain))
    return 0


def _check(found: Launched, folder: Path) -> None:
    """ValueError where the command failed or nothing trained: which rank, why, and what is kept."""
    if (dead := found.dead) is not None:
        why = {"running": "it was killed", "terminated": "it was terminated"}.get(dead.how, dead.error)
        raise ValueError(f"rank {dead.rank} died: {why}; {_kept(found.ranks, folder)}")
    if found.code != 0:
        raise ValueError(f"the command ended with exit code {found.code}; {_kept(found.ranks, folder)}")
    if not any(one.iteration_s for one in found.ranks):
        raise ValueError(
            "no training loop was seen, which is backward passes and steps of an optimizer of torch, three at least, "
            "in a Python that reads PYTHONPATH (no -I, -E or -S); nothing is kept"
        )


def _kept(ranks: Sequence[RankFile], folder: Path) -> str:
    kept = [one for one in ranks if one.iteration_s]
    if not kept:
        return "nothing is kept, for no iteration was recorded whole"
    counts = ", ".join(f"{len(one.iteration_s)} iterations of rank {one.rank}" for one in kept)
    files = f"{shlex.quote(str(folder))}/*.jsonl"
    return f"kept in {folder}: {counts}; `search trace import --whole {files}` reads those that all ranks have"


def _seconds(found: Launched) -> float:
    """The median iteration: of the slowest rank, which is what a job takes."""
    return max(median(one.iteration_s) for one in found.ranks if one.iteration_s)


def _overhead(found: Launched, plain: Launched) -> float:
    return _seconds(found) / _seconds(plain) - 1.0


def _text(folder: Path, found: Launched, plain: Launched | None) -> str:
    rows = [
        [str(one.rank), str(len(one.iteration_s)), format_seconds(median(one.iteration_s)),
         *(str(sum(one.events.get(cat, 0) for cat in cats)) for _, cats in KINDS),
         format_bytes(one.path.stat().st_size), str(one.path)]
        for one in found.ranks if one.iteration_s
    ]  # fmt: skip
    head = ["rank", "iterations", "median", *(name for name, _ in KINDS), "size", "file"]
    lines = [*columns(head, rows), ""]
    if plain is not None:
        alone = format_seconds(_seconds(plain))
        lines.append(f"overhead: {_overhead(found, plain):+.1%} of the median iteration, which takes {alone} without")
    lines.append(f"next: search trace import {shlex.quote(str(folder))}/*.jsonl -o job.dfg")
    return "\n".join(lines) + "\n"


def _data(folder: Path, found: Launched, plain: Launched | None) -> dict[str, Any]:
    return {
        "folder": str(folder), "iteration_s": _seconds(found),
        "plain_iteration_s": None if plain is None else _seconds(plain),
        "overhead": None if plain is None else _overhead(found, plain),
        "ranks": [
            {"rank": one.rank, "world": one.world, "file": str(one.path), "iterations": len(one.iteration_s),
             "iteration_s": list(one.iteration_s), "events": one.events}
            for one in found.ranks
        ],
    }  # fmt: skip
