"""The command line, `search COMMAND`: parses, calls the command's module, turns what goes wrong into an exit code.

0 done; 1 a defect of ours; 2 bad input; 3 nothing feasible; 130 interrupted. Only the chosen command's module is
loaded, so that help answers at once. Computes and prints nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from search.arguments import Commands, Parser, add_all

__all__ = ["main"]

DEFECT, BAD_INPUT, INTERRUPTED = 1, 2, 130
TRACEBACK = "SEARCH_TRACEBACK"

EPILOG = """\
start here:
  search launch spaces/deepseek_v3.yaml      every layout worth considering
  search show latest                         the front of the newest run
  search estimate latest:ID                  one of its points in full
exit codes: 0 done, 1 a defect of ours, 2 bad input, 3 nothing feasible, 130 interrupted (resumable)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    _open_streams()
    words = sys.argv[1:] if argv is None else list(argv)
    wants_traceback = "--traceback" in words or os.environ.get(TRACEBACK, "0") not in {"", "0"}
    try:
        code = _run(words)
        sys.stdout.flush()
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except (ValueError, OSError) as error:
        if wants_traceback:
            traceback.print_exc()
        return _say(_sentence(error), BAD_INPUT)
    except Exception as error:
        if wants_traceback:
            traceback.print_exc()
        hint = "" if wants_traceback else f"; run again with --traceback or {TRACEBACK}=1 and report what it prints"
        return _say(f"a defect of ours: {type(error).__name__}: {_sentence(error)}{hint}", DEFECT)
    return code


def _open_streams() -> None:
    """Gives a process that was started with closed streams (`>&-`) ones that lead nowhere.

    Otherwise the next file that is opened would get the number of the stream, and what is printed.
    """
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115 - lives as long as the process


def _run(words: Sequence[str]) -> int:
    from importlib.metadata import entry_points

    parser = _parser()
    if not words:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}; see `{args.prog} --help`")
    if entry_points(group="trainspace.cost_backends"):  # of other packages; most machines have none
        importlib.import_module("search.backends").load_backends()  # before any module has its own chain of them
    command = importlib.import_module(f"search.commands.{args.module}")
    code: int = getattr(command, args.function)(args)
    return code


def _sentence(error: BaseException) -> str:
    """The message on one line; of an operating system's refusal, what it says about which file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__


def _say(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # where nobody can be told, the exit code is what is left
        print(f"search: {text}", file=sys.stderr)
    return code


class _Version(argparse.Action):
    """Looks the version up when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:  # noqa: ANN401 - argparse's own
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"trainspace {version('trainspace')}")
        except PackageNotFoundError:
            print("trainspace, not installed")
        parser.exit()


def _parser() -> Parser:
    parser = Parser(
        prog="search",
        description="Prices every way to lay a model's training over a cluster, and keeps those worth considering.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    add_all(Commands(parser.add_subparsers(metavar="COMMAND", required=True)))
    return parser
