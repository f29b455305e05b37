"""How commands take their arguments: the parser, options that all share, and readers of numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = ["Commands", "Parser", "add_set", "number_such_as", "positive", "tokens", "whole"]

MOST_TOKENS = 10**9  # of a sequence, as in a space


class Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage: a mistake takes one line here.

    `forms`, of commands: options that say in which form an answer comes, of which one may be given.
    """

    forms: Any

    def error(self, message: str) -> NoReturn:
        """Law and offence are argparse's; the remedy is the help."""
        raise ValueError(f"{message}; see `{self.prog} --help`")


class Commands:
    """Adds commands that share --json, -o, --force and --traceback."""

    def __init__(self, actions: Any) -> None:  # noqa: ANN401 - argparse keeps the type to itself
        self.actions = actions

    def add(
        self, name: str, module: str, text: str, *, function: str = "run", example: str = "", keeps: bool = False
    ) -> Parser:
        """A command that runs `function` of search/commands/`module`.py with its arguments.

        One that `keeps` replaces no file whatever is asked, and has no --force.
        """
        parser: Parser = self.actions.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example: {example}" if example else None,
            allow_abbrev=False,
        )
        parser.set_defaults(module=module, function=function, prog=parser.prog)
        parser.forms = parser.add_mutually_exclusive_group()
        parser.forms.add_argument("--json", action="store_true", help="plain JSON, SI units in the key names")
        parser.add_argument("-o", dest="output", metavar="FILE", help="write there instead of to standard output")
        if keeps:
            parser.set_defaults(force=None)
        else:
            parser.add_argument("--force", action="store_true", help="replace FILE where it exists")
        parser.add_argument(
            "--traceback", action="store_true", default=argparse.SUPPRESS, help="show where an error came from"
        )
        return parser

    def group(self, name: str, text: str) -> Commands:
        """A command with commands of its own, as in `search trace import`."""
        parser: Parser = self.actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        return Commands(parser.add_subparsers(metavar="COMMAND", required=True))


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, but got {text!r}")
    return int(text)


def tokens(text: str) -> int:
    """The length of a sequence: a whole number from 1 to MOST_TOKENS."""
    if not text.isdecimal() or not 1 <= int(text) <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to {MOST_TOKENS}, but got {text[:80]!r}")
    return int(text)


def whole(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, but got {text!r}")
    return int(text)


def number_such_as(example: str) -> Callable[[str], float]:
    """A reader of positive numbers whose refusals name one of the right size."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number such as {example}, but got {text!r}") from None
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a positive number such as {example}, but got {text!r}")
        return value

    return read


def add_set(parser: argparse.ArgumentParser) -> None:
    """Adds --set, values over those of a file."""
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="strategy.tp=[1,2], repeatable",
    )
