"""Gives a command's answer: as text or as JSON, to standard output or to a file. Computes nothing."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from results.files import as_user_error, dump_json
from results.store import is_run

__all__ = [
    "NOTHING_FEASIBLE",
    "answer",
    "check_free",
    "check_new",
    "check_writable",
    "json_text",
    "tell",
    "write",
    "write_new",
]

NOTHING_FEASIBLE = 3
INPUTS = (
    "spaces",
    "config",
    "target",
    "tables",
    "a",
    "b",
    "files",
    "file",
    "job",
    "plan",
    "fused",
)  # of the command line: files that a command reads


def answer(args: argparse.Namespace, *, text: str, data: Any) -> None:  # noqa: ANN401 - any JSON value
    """Prints the text, or with --json the data; with -o into that file."""
    write(args, json_text(data) if args.json else text)


def write(args: argparse.Namespace, content: str) -> None:
    """To the file of -o, else to standard output."""
    if args.output is None:
        _to_standard_output(content)
        return
    path = Path(args.output)
    check_free(args, args.output)
    with as_user_error(path, "write"):
        path.write_text(content, encoding="utf-8")


def tell(*lines: str) -> None:
    """Lines on standard error. Where that is full or has lost its reader, work goes on untold."""
    with contextlib.suppress(OSError):
        print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr, flush=True)


def _to_standard_output(content: str) -> None:
    try:
        sys.stdout.write(content)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        raise
    except OSError as error:
        raise ValueError(f"standard output: cannot write: {error.strerror}; give a file with -o") from error


def check_free(args: argparse.Namespace, name: str) -> None:
    """ValueError where writing to `name` would replace a file: any without --force, with it an input or a run's."""
    path = Path(name)
    if not path.is_file():  # a device is none
        return
    given = [word for key in INPUTS for word in _words(getattr(args, key, None))]
    inputs = [*given, *(word.rpartition(":")[0] for word in given if ":" in word)]  # FILE:NAME
    if any(Path(word).is_file() and path.samefile(word) for word in inputs):
        raise ValueError(f"{path}: an output must not replace the input; give another file")
    if any(is_run(folder) for folder in path.resolve().parents[:2]):
        raise ValueError(f"{path}: an output must not replace a file of a run; give another file")
    if not args.force:
        check_new(name, remedy="remove it" if args.force is None else "--force to replace it")  # None: there is none


def check_new(name: str, *, remedy: str = "remove it") -> None:
    """ValueError where `name` exists: of files that people edit or measured, none is replaced."""
    if os.path.lexists(name):
        raise ValueError(f"{name}: must not replace a file that exists; give another name, or {remedy}")


def write_new(name: str, make: Callable[[], int]) -> int:
    """What `make` gives, which writes the new file `name`; ValueError where another has written it meanwhile."""
    try:
        return make()
    except FileExistsError:
        check_new(name)
        raise


def check_writable(args: argparse.Namespace, name: str) -> None:
    """ValueError where an answer could not be written to `name`, before long work that it would tell of."""
    check_free(args, name)
    folder = Path(name).parent
    if not folder.is_dir():
        raise ValueError(f"{name}: cannot write: {folder} is no folder; give a file in one that exists")
    if Path(name).is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{name}: cannot write there; give another file")


def _words(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else value


def json_text(data: Any) -> str:  # noqa: ANN401 - any JSON value
    r"""JSON on one line; what is not a number becomes null.

    >>> json_text({"step_time_s": float("nan")})
    '{"step_time_s": null}\n'
    """
    return dump_json(_finite(data)) + "\n"


def _finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float | np.floating) and not math.isfinite(value):
        return None
    return value
