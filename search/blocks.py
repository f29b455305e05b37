"""Blocks of work, who does them and who judges them: what every pool shares, and the pool of this process.

Answers: what became of each block, and whether one that went wrong may try again. Knows nothing of what a block means,
nor of other processes: those are `pool.py`'s. Refuses to retry for ever: a block that keeps killing its worker, or
keeps raising, becomes a `BlockFailed` row.
"""

# ruff: noqa: ANN401  # Specs, hints and values are the caller's: any type at all.

import os
import resource
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Protocol, Self

__all__ = [
    "Bench",
    "Block",
    "BlockDone",
    "BlockFailed",
    "Closing",
    "Event",
    "EventKind",
    "Hint",
    "InlinePool",
    "Pool",
    "PoolError",
    "Ran",
    "Referee",
    "Work",
    "Worker",
    "WorkerFactory",
    "describe",
]

Hint = Callable[[], Any]
_MAX_RAISES = 2  # A raise is nearly always deterministic: one more try tells a hiccup from a defect.


class Worker(Protocol):
    """What a user of the pool writes: turns one block into one value. Built once per actor, from the spec."""

    def run(self, start: int, stop: int, hint: Any) -> Any:
        """Return the value of block [start, stop). Hints and former blocks may only prune: what is merged stays."""


class WorkerFactory(Protocol):
    """A top-level callable (pickled by name) that makes a worker of a spec."""

    def __call__(self, spec: Any, /) -> Worker:
        """Return a worker; the arrays of `spec` are read-only in an actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDone:
    """A block's value, and what it took."""

    start: int
    stop: int
    value: Any
    seconds: float
    attempts: int
    worker: str
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFailed:
    """A block that cannot be done: the error row, in place of an endless retry."""

    start: int
    stop: int
    error: str
    attempts: int


class EventKind(Enum):
    """What befell a pool."""

    CRASH = "crash"
    RETRY = "retry"
    RESUBMISSION = "resubmission"
    FAILURE = "failure"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a run's history, for its manifest. `time_s` is seconds since the epoch."""

    time_s: float
    kind: EventKind
    text: str


class PoolError(RuntimeError):
    """The pool cannot go on: no worker starts, or none is left."""


class Pool(Protocol):
    """What a search asks of its workers."""

    num_workers: int
    events: list[Event]
    start_seconds: Mapping[str, float]

    def map(self, blocks: Iterable[tuple[int, int]], hint: Hint) -> Iterator[BlockDone | BlockFailed]:
        """Yield every block once, in completion order. `hint` is called right before a block is handed out."""

    def close(self) -> None:
        """Stop the workers, and whatever else the pool started."""

    def __enter__(self) -> Self:
        """Return the pool."""

    def __exit__(self, *exc: object) -> None:
        """Close the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a bench says of one run: a value, or the error in its place."""

    value: Any = None
    error: str | None = None
    seconds: float = 0.0
    worker: str = ""
    peak_rss_bytes: int = 0


class Bench:
    """A worker with a clock and a memory meter beside it: the same in an actor and inline."""

    def __init__(self, worker_factory: WorkerFactory, spec: Any) -> None:
        self._worker = worker_factory(spec)
        self.name = f"{socket.gethostname()}:{os.getpid()}"

    def run(self, start: int, stop: int, hint: Any) -> Ran:
        """Run one block; an exception of it is an answer, anything worse is not."""
        begin = time.perf_counter()
        value, error = None, None
        try:
            value = self._worker.run(start, stop, hint)
        except Exception as raised:  # The named boundary: a block that raises becomes an error row.
            error = describe(raised)
        seconds = time.perf_counter() - begin
        return Ran(value=value, error=error, seconds=seconds, worker=self.name, peak_rss_bytes=_peak_rss_bytes())


def describe(error: BaseException) -> str:
    """Type and text of an error, in one line's worth."""
    return f"{type(error).__name__}: {error}"


def _peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): kB on Linux, bytes on macOS.


@dataclass(slots=True, eq=False, kw_only=True)
class Block:
    """A block on its way: how often it was blamed, and whether it must now run by itself."""

    start: int
    stop: int
    attempts: int = 0
    raises: int = 0
    alone: bool = False

    def __str__(self) -> str:
        return f"block [{self.start}, {self.stop})"

    def done(self, ran: Ran) -> BlockDone:
        """Its row, once a run of it has a value."""
        return BlockDone(
            start=self.start,
            stop=self.stop,
            value=ran.value,
            seconds=ran.seconds,
            attempts=self.attempts + 1,
            worker=ran.worker,
            peak_rss_bytes=ran.peak_rss_bytes,
        )


class Work:
    """The blocks that wait: those to try again first, then the fresh ones, drawn as late as possible."""

    def __init__(self, blocks: Iterable[tuple[int, int]]) -> None:
        self._fresh = iter(blocks)
        self._again: deque[Block] = deque()
        self._suspects: deque[Block] = deque()

    def put_back(self, block: Block) -> None:
        """Let a block wait for its next try."""
        (self._suspects if block.alone else self._again).append(block)

    def more(self) -> bool:
        """Whether any block waits."""
        if not self._suspects and not self._again and (fresh := self.take(load=0)) is not None:
            self._again.append(fresh)
        return bool(self._suspects or self._again)

    def take(self, *, load: int) -> Block | None:
        """Next block for a worker with `load` blocks in hand; None if there is none for it now."""
        if self._suspects:
            # A suspect runs by itself, so that its next crash is its own; workers run dry to make room for it.
            return self._suspects.popleft() if load == 0 else None
        if self._again:
            return self._again.popleft()
        bounds = next(self._fresh, None)
        return None if bounds is None else Block(start=bounds[0], stop=bounds[1])


class Referee:
    """Decides who tries again and who has failed, and keeps the history."""

    def __init__(self, max_attempts: int) -> None:
        if max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, but got {max_attempts}; 3 survives stray kills")
        self.max_attempts = max_attempts
        self.events: list[Event] = []

    def note(self, kind: EventKind, text: str) -> None:
        """Write a line of history."""
        self.events.append(Event(time_s=time.time(), kind=kind, text=text))

    def outcome(self, block: Block, ran: Ran, work: Work) -> Iterator[BlockDone | BlockFailed]:
        """What a run of a block comes to, or nothing where the block goes back to be tried again."""
        if ran.error is None:
            yield block.done(ran)
        elif failed := self.raised(block, ran.error):
            yield failed
        else:
            work.put_back(block)

    def raised(self, block: Block, error: str) -> BlockFailed | None:
        """Judge a block whose worker raised `error`; None means that it may try again."""
        block.attempts += 1
        block.raises += 1
        again = block.raises < _MAX_RAISES and block.attempts < self.max_attempts
        return self._verdict(block, error, again=again)

    def crashed(self, block: Block, error: str) -> BlockFailed | None:
        """Judge a block whose worker died; None means that it may try again, by itself."""
        block.attempts += 1
        block.alone = True
        text = f"worker died {block.attempts} time(s) on it, last: {error}"
        return self._verdict(block, text, again=block.attempts < self.max_attempts)

    def _verdict(self, block: Block, error: str, *, again: bool) -> BlockFailed | None:
        if again:
            self.note(EventKind.RETRY, f"{block} tries again after attempt {block.attempts}: {error}")
            return None
        self.note(EventKind.FAILURE, f"{block} failed after {block.attempts} attempt(s): {error}")
        return BlockFailed(start=block.start, stop=block.stop, error=error, attempts=block.attempts)


class Closing(ABC):
    """`with pool:` closes it."""

    @abstractmethod
    def close(self) -> None:
        """Stop what the pool started."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class InlinePool(Closing):
    """One worker in this process: for debugging, and the oracle of the other pool's tests."""

    def __init__(self, worker_factory: WorkerFactory, spec: Any, *, max_attempts: int = 3) -> None:
        """Make the worker; an error of `worker_factory` is raised as it is."""
        begin = time.perf_counter()
        self._referee = Referee(max_attempts)
        self._bench = Bench(worker_factory, spec)
        self.num_workers = 1
        self.events = self._referee.events
        self.start_seconds: Mapping[str, float] = {"workers": time.perf_counter() - begin}

    def map(self, blocks: Iterable[tuple[int, int]], hint: Hint) -> Iterator[BlockDone | BlockFailed]:
        """Yield every block once, in the order given."""
        work = Work(blocks)
        while (block := work.take(load=0)) is not None:
            ran = self._bench.run(block.start, block.stop, hint())
            yield from self._referee.outcome(block, ran, work)

    def close(self) -> None:
        """Nothing to stop."""
