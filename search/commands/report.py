"""`search report`: the page of a run, which opens from disk and needs nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from results.files import write_bytes
from results.store import RunFolder, is_run
from search.commands.answer import NOTHING_FEASIBLE, check_free, check_writable, json_text, tell, write
from search.commands.page import Gathered, gathered, report_html
from search.commands.runs import find_run, space_of
from search.commands.served_page import served_html
from search.commands.served_show import served_space

__all__ = ["finished_run", "run"]

ENDINGS = (".html", ".htm")


def run(args: argparse.Namespace) -> int:
    """Writes the page; exit 3 where the run has no front to show."""
    folder = finished_run(args.run, answers=True)
    if not len(folder.read_front()):
        tell(f"{folder.path}: nothing is feasible, so there is no front to show; search why {folder.path} tells why")
        return NOTHING_FEASIBLE
    if args.output is not None:
        check_writable(args, args.output)
        if Path(args.output).suffix not in ENDINGS:
            raise ValueError(f"{args.output}: a page's name must end in .html; --png DIR makes pictures")
    if args.png is not None:
        _check_pictures(args, Path(args.png))
    if folder.answers:
        return _answers(args, folder)
    shown = gathered(folder, space_of(folder), args.point)
    told: dict[str, Any] = {"run": str(folder.path)}
    if args.png is not None:
        told["pictures"] = [str(path) for path in _pictures(Path(args.png), shown)]
    if args.png is None or args.output is not None:
        told |= _page(args, folder, report_html(shown))
    args.output = None  # which has the page already
    lines = [str(told["report"])] if "report" in told else []
    write(args, json_text(told) if args.json else "\n".join([*lines, *told.get("pictures", ())]) + "\n")
    return 0


def _page(args: argparse.Namespace, folder: RunFolder, content: str) -> dict[str, object]:
    """Writes the page to the file of -o, or into the run."""
    if args.output is not None:
        path = Path(args.output)
        write_bytes(path, content.encode())
    else:
        with folder:
            path = folder.write_report(content)
    return {"report": str(path), "bytes": len(content.encode())}


def _answers(args: argparse.Namespace, folder: RunFolder) -> int:
    """The page of a run of answers."""
    if args.png is not None:
        raise ValueError(f"--png is for runs of training, but {folder.path} answers; its page has all but the files")
    told = _page(args, folder, served_html(folder, served_space(folder), args.point))
    args.output = None
    write(args, json_text({"run": str(folder.path), **told}) if args.json else f"{told['report']}\n")
    return 0


def _check_pictures(args: argparse.Namespace, folder: Path) -> None:
    """ValueError where the folder is none for pictures, or holds some that --force does not let go."""
    from results.report.run_pictures import NAMES

    if is_run(folder) or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"{folder}: --png takes a folder for pictures, but it is {'a run' if is_run(folder) else 'a file'}"
        )
    for name in NAMES:
        check_free(args, str(folder / f"{name}.png"))


def _pictures(folder: Path, shown: Gathered) -> list[Path]:
    """The same as PNG files."""
    from results.report.run_pictures import save_pictures

    return save_pictures(folder, shown.facts, shown.front, shown.reference, shown.objectives, shown.details)


def finished_run(name: str, *, answers: bool = False) -> RunFolder:
    """The run of that name, of training unless `answers`; ValueError where it has no whole front, yet or for good."""
    folder = find_run(name, answers=answers)
    if folder.state != "done":
        remedy = "wait until it is done" if folder.state == "running" else f"go on with: search resume {folder.path}"
        raise ValueError(
            f"{folder.path}: only a finished run has a whole front, but this one is {folder.state}; {remedy}"
        )
    return folder
