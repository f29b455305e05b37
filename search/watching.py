"""Who starts a run and who watches it: options of a launch, what a run tells on its way, and how it can end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "COMPILING", "FIRST_RUN", "Interrupted", "LaunchOptions", "NothingFeasible", "Progress", "Update",
    "is_compiled_here",
]  # fmt: skip


FIRST_RUN = "; compiling the sweep (first run only, two to three minutes)"
COMPILING = "compiling the estimator (first run only, one to three minutes)"


def is_compiled_here(function: Any) -> bool:  # noqa: ANN401 - numba's types
    """Whether the machine code of a jitted function is loaded or on disk; else its first call compiles it."""
    if function.signatures:
        return True
    name = f"*.{function.py_func.__qualname__}-{function.py_func.__code__.co_firstlineno}.*.nbi"
    return any(Path(str(function.stats.cache_path)).glob(name))  # the folder of these sources (estimator/jit.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Where a search runs and where it writes.

    `replay`: finalists that are replayed besides the best of each objective, the knee and the reference points; 0: none
    are, nor those. `warm`: a former run whose front a study tries first.
    """

    out: Path | None = None
    pool: str = "ray"
    workers: int | None = None
    address: str | None = None
    seed: int | None = None
    replay: int = 0
    warm: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """How far a sweep is. `candidates_done` counts legal candidates that were priced or ruled out.

    `best`: the best value so far of each objective, by column. The first update tells what the warm-up and earlier
    processes have done, at 0 seconds.
    """

    structures_done: int
    structures: int
    candidates_done: int
    legal: int
    seconds: float
    front_size: int
    best: dict[str, float]
    what: str = "candidates"
    """What `candidates_done` and `legal` count: a study counts trials."""


class Progress(Protocol):
    """Who watches a run."""

    def phase(self, text: str) -> None:
        """A new phase begins."""

    def update(self, state: Update) -> None:
        """A block is done."""


class Interrupted(KeyboardInterrupt):
    """The user stopped a run, which is in a folder by then."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.run = run


class NothingFeasible(Exception):
    """No candidate fits: why, and what comes closest."""

    def __init__(self, reasons: dict[str, int], closest: list[dict[str, Any]], run: Path) -> None:
        super().__init__("nothing is feasible")
        self.reasons, self.closest, self.run = reasons, closest, run
