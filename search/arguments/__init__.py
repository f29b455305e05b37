"""What each command takes. One room per kind of command; none imports a command, so that help answers at once."""

from __future__ import annotations

from search.arguments import decisions, graphs, hardware, inference, launchers, points, runs, searches, traces
from search.arguments.parser import Commands, Parser

__all__ = ["Commands", "Parser", "add_all"]


def add_all(commands: Commands) -> None:
    """Adds every command, in the order of the help."""
    for room in (searches, runs, decisions, points, launchers, inference, graphs, traces, hardware):
        room.add(commands)
