"""`search report`: the page of a run, which opens from disk and needs nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path

from results.files import write_bytes
from results.store import RunFolder
from search.commands.answer import NOTHING_FEASIBLE, check_writable, json_text, tell, write
from search.commands.page import report_html
from search.commands.runs import find_run, space_of

__all__ = ["finished_run", "run"]


def run(args: argparse.Namespace) -> int:
    """Writes the page; exit 3 where the run has no front to show."""
    folder = finished_run(args.run)
    if not len(folder.read_front()):
        tell(f"{folder.path}: nothing is feasible, so there is no front to show; search why {folder.path} tells why")
        return NOTHING_FEASIBLE
    if args.output is not None:
        check_writable(args, args.output)
    content = report_html(folder, space_of(folder))
    if args.output is not None:
        path = Path(args.output)
        write_bytes(path, content.encode())
    else:
        with folder:
            path = folder.write_report(content)
    told = {"run": str(folder.path), "report": str(path), "bytes": len(content.encode())}
    args.output = None  # which has the page already
    write(args, json_text(told) if args.json else f"{path}\n")
    return 0


def finished_run(name: str) -> RunFolder:
    """The run of that name; ValueError where it is still being written, or ended before it had a front."""
    folder = find_run(name)
    if folder.state != "done":
        remedy = "wait until it is done" if folder.state == "running" else f"go on with: search resume {folder.path}"
        raise ValueError(
            f"{folder.path}: only a finished run has a whole front, but this one is {folder.state}; {remedy}"
        )
    return folder
