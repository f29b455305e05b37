"""Commands that help to decide: report."""

from __future__ import annotations

from search.arguments.parser import Commands

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
    report = commands.add(
        "report", "report", "the run as one page that opens from disk", example="search report latest -o front.html"
    )
    report.add_argument("run", metavar="RUN", help="a run folder, its name under runs/, or latest")
