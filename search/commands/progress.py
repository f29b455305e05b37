"""Tells people how a search goes, on standard error: a live bar on a terminal, a line every two seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from hardware.units import format_count, format_seconds
from results.report.text import format_cell

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

__all__ = ["Lines", "LiveBar", "State", "progress_line", "watching"]

INTERVAL_S = 2.0


class State(Protocol):
    """What is told: `search.launch.Update`."""

    @property
    def structures_done(self) -> int: ...  # noqa: D102
    @property
    def structures(self) -> int: ...  # noqa: D102
    @property
    def candidates_done(self) -> int: ...  # noqa: D102
    @property
    def legal(self) -> int: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102
    @property
    def front_size(self) -> int: ...  # noqa: D102
    @property
    def best(self) -> Mapping[str, float]: ...  # noqa: D102


def progress_line(state: State) -> str:
    """Share done, rate, time left, front and best so far, on one line."""
    share = state.candidates_done / state.legal if state.legal else 1.0
    rate = state.candidates_done / state.seconds if state.seconds > 0 else 0.0
    left = (state.legal - state.candidates_done) / rate if rate else float("inf")
    parts = [
        f"{share:.0%} of {format_count(state.legal)} candidates",
        f"{format_count(round(rate))}/s",
        f"{format_seconds(left)} left" if left < float("inf") else "- left",
        f"front {state.front_size}",
        *(f"best {name} {format_cell(name, value)}" for name, value in state.best.items()),
    ]
    return ", ".join(parts)


class Lines:
    """Plain lines, at most one every two seconds besides new phases."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def phase(self, text: str) -> None:
        """Says what starts now."""
        print(text, file=sys.stderr, flush=True)

    def update(self, state: State) -> None:
        """Says how far it is, if it is time to."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + INTERVAL_S
            print(progress_line(state), file=sys.stderr, flush=True)

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

    def phase(self, text: str) -> None:
        """Says what starts now."""
        self._bar.update(self._task, description=text)

    def update(self, state: State) -> None:
        """Moves the bar."""
        self._bar.update(
            self._task, total=max(state.legal, 1), completed=state.candidates_done, description=progress_line(state)
        )

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
