"""Tells people how a search goes, on standard error: a live bar on a terminal, a line every two seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from hardware.units import format_count, format_seconds
from results.report.text import WIDTH, format_cell, wrap
from search.commands.answer import tell

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from search.launch import Update

__all__ = ["Lines", "LiveBar", "progress_line", "watching"]

INTERVAL_S = 2.0
TOLD_FROM = 0.1  # of the structures: the first are the most promising, and slow, for they leave most to price


def progress_line(state: Update, since: Update | None = None) -> str:
    """Share done, rate since an earlier state, time left once it can be told, front and best so far, on one line."""
    share = min(state.candidates_done / state.legal, 1.0) if state.legal else 1.0  # a last round may go beyond
    covered, seconds = state.candidates_done, state.seconds
    if since is not None:  # what a warm-up or an earlier process covered says nothing of the rate now
        covered, seconds = covered - since.candidates_done, seconds - since.seconds
    pace = []
    if covered > 0 and seconds > 0:
        left_s = max(state.legal - state.candidates_done, 0) * seconds / covered
        pace = [f"{format_count(round(covered / seconds))}/s"]
        if state.structures_done >= TOLD_FROM * state.structures:
            pace.append(f"{format_seconds(left_s)} left")
    parts = [
        f"{share:.1%} of {format_count(state.legal)} {state.what}",
        *pace,
        f"front {state.front_size}",
        *(f"best {name} {format_cell(name, value)}" for name, value in state.best.items()),
    ]
    return ", ".join(parts)


class Lines:
    """Plain lines, at most one every two seconds besides new phases."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._first: Update | None = None

    def phase(self, text: str) -> None:
        """Says what starts now."""
        tell(*wrap(text, WIDTH))

    def update(self, state: Update) -> None:
        """Says how far it is, if it is time to."""
        self._first = self._first or state
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + INTERVAL_S
            tell(*wrap(progress_line(state, self._first), WIDTH))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Nothing is left open."""


class LiveBar:
    """A bar that is redrawn in place, phases above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        text = TextColumn("{task.description}", markup=False)
        self._bar: RichProgress = Progress(
            BarColumn(bar_width=24), text, console=Console(stderr=True), transient=True, refresh_per_second=8
        )
        self._task = self._bar.add_task("", total=None)
        self._first: Update | None = None

    def phase(self, text: str) -> None:
        """Says what starts now."""
        self._bar.update(self._task, description=text)

    def update(self, state: Update) -> None:
        """Moves the bar; the first time at once, for a short sweep ends before the bar would draw itself."""
        begins = self._first is None
        self._first = self._first or state
        line = progress_line(state, self._first)
        self._bar.update(self._task, total=max(state.legal, 1), completed=state.candidates_done, description=line)
        if begins:
            self._bar.refresh()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()


@contextmanager
def watching() -> Iterator[Lines | LiveBar]:
    """The one that suits standard error."""
    with LiveBar() if sys.stderr.isatty() else Lines() as watcher:
        yield watcher
