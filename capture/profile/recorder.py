"""Events of one rank, kept as tuples while an iteration runs and written as JSON lines once it has ended.

What is on the way while a job trains costs it time, so an event is a text with gaps and the numbers for them; lines are
made and written between iterations. What is written stays, whatever becomes of the job. Knows nothing of torch.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["FORMAT", "VERSION", "WARM_UP", "Recorder", "current", "line", "running"]

FORMAT, VERSION = "trainspace.trace", 1
WARM_UP = 2
"""Iterations that are not written: the first allocates and compiles, the second's memory is looked at."""
PATIENCE_S, POLL_S = 1.0, 1e-3  # for transfers that other ranks have had, and this one's threads not yet told of

Event = tuple[Any, ...]

running: list[Recorder] = []
"""Recorders of blocks that run, the innermost last."""


def current() -> Recorder | None:
    """The recorder that communication reports to, if any."""
    return running[-1] if running else None


def line(name: str, cat: str, *, tail: str = "", **fields: object) -> str:
    r"""A line with gaps for start, end and iteration, and for what `tail` has gaps for.

    >>> line("FW.fc", "FW", bytes=8) % (1, 2, 0)
    '{"ts":1,"end":2,"it":0,"name":"FW.fc","cat":"FW","bytes":8}\n'
    """
    told = json.dumps({"name": name, "cat": cat, **fields}, separators=(",", ":"))[1:-1].replace("%", "%%")
    return '{"ts":%d,"end":%d,"it":%d,' + told + tail + "}\n"


class Recorder:
    """Collects events of all threads of a rank.

    events: (text, start, end, iteration, more), appended by whoever saw them end. at: the last mark of the thread that
    computes; what follows is timed from there. iteration: the one that runs. bucket_of: of each tensor. ids: numbers
    for events that others name. under_way: transfers of other threads that have not ended.
    """

    def __init__(self, path: Path, meta: dict[str, Any], *, warm_up: int = WARM_UP) -> None:
        self.path, self.meta, self.warm_up = path, meta, warm_up
        self.events: list[Event] = []
        self.bucket_of: dict[str, int] = {}
        self.ids = itertools.count()
        self.under_way: set[int] = set()
        self.iteration, self.at, self.began = 0, 0, 0
        self.written = 0  # iterations
        self.clock: Callable[[], int] = time.time_ns
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.header_written = False
        self.file: int | None = _opened(path)

    def begin(self) -> None:
        """An iteration begins."""
        self.began = self.at = self.clock()

    def mark(self, text: str, *more: int) -> None:
        """What the computing thread did since its last mark."""
        now = self.clock()
        self.events.append((text, self.at, now, self.iteration, *more))
        self.at = now

    def started(self) -> int:
        """A transfer is under way in another thread; the number is its event's, and is discarded from `under_way`."""
        number = next(self.ids)
        self.under_way.add(number)
        return number

    def end(self) -> None:
        """The iteration has ended: its lines are written, unless it was for warming up."""
        now = self.clock()
        self.events.append((ITERATION, self.began, now, self.iteration))
        if self.iteration < self.warm_up:
            self.events[:0] = self._taken()  # what is of no iteration, or of one that another rank began before
        else:
            self.flush()
            self.written += 1
        self.iteration += 1
        self.begin()

    def flush(self) -> None:
        """Writes what was collected, in order of end. A forked child has its parent's events, and writes none."""
        if os.getpid() != self.pid or self.file is None:
            self.events.clear()
            return
        with self.lock:
            told = [event[0] % event[1:] for event in sorted(self._taken(), key=_end)]
            if not self.header_written and told:
                told.insert(0, self._header())
                self.header_written = True
            _write(self.file, "".join(told).encode())

    def _taken(self) -> list[Event]:
        """What was collected, without iterations for warming up. Other threads append meanwhile."""
        mine = self.events[: len(self.events)]
        del self.events[: len(mine)]
        return [event for event in mine if not 0 <= event[3] < self.warm_up]

    def close(self) -> None:
        """Writes the rest. A file without an iteration is taken away again."""
        if self.file is None:
            return
        until = time.monotonic() + PATIENCE_S
        while self.under_way and time.monotonic() < until:
            time.sleep(POLL_S)
        whole = [event for event in self.events if event[3] < self.iteration]
        self.events[:] = whole  # nothing of an iteration that has not ended
        self.flush()
        if os.getpid() == self.pid:
            os.close(self.file)
            if not self.written:
                self.path.unlink(missing_ok=True)
        self.file = None

    def _header(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, "meta": self.meta, "bof": self.bucket_of}) + "\n"


ITERATION = line("ITER", "ITER")


def _end(event: Event) -> int:
    end: int = event[2]
    return end


def _opened(path: Path) -> int:
    """A new file. ValueError where there is one, or where none can be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        raise ValueError(f"{path}: a recording must not replace another; give a new folder") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot write: {error.strerror}; give a folder that can be written") from error


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
