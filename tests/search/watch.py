"""Who watches a run in a test."""

from __future__ import annotations

from collections.abc import Callable

from search.launch import Update

__all__ = ["Watch"]


class Watch:
    """Remembers what a run tells, and does something at one of its updates."""

    def __init__(self, at: int = 0, do: Callable[[], object] = lambda: None) -> None:
        self.phases: list[str] = []
        self.updates: list[Update] = []
        self._at, self._do = at, do

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def update(self, state: Update) -> None:
        self.updates.append(state)
        if len(self.updates) == self._at:
            self._do()
