"""Tasks of one pass, written one after the other: the template that a schedule repeats for every micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from estimator.detail.traffic import Transfer
from estimator.tasks import Category, Shield

__all__ = ["Lane", "Script", "Visit"]


class Lane(IntEnum):
    """Streams of a rank."""

    COMPUTE = 0
    TP = 1
    CP = 2
    EP = 3
    DP = 4
    PP = 5
    DOWN = 6  # to the host
    UP = 7  # from it
    HOST = 8  # what the host computes
    REPLICAS = 9  # sums over HSDP's replicas, beside what moves among shards


@dataclass(slots=True)
class Visit:
    """One run of one block in a pass: tasks `start` to `stop`, what it waits for at first, what ends it.

    `block`: its place on the chunk, in model order. Tasks, or -1: `reduce`, its reduce-scatter; `down` and `up`, what
    it sends to the host and fetches from it.
    """

    block: int
    start: int
    stop: int
    heads: tuple[int, ...]
    tails: tuple[int, ...]
    reduce: int = -1
    down: int = -1
    up: int = -1


@dataclass(slots=True)
class Script:
    """Columns of the tasks written so far. `tail`: what the next task waits for."""

    num_links: int
    joined_s: float = 0.0  # kernels that follow one another directly become one task of up to so many seconds
    lane: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    category: list[Category] = field(default_factory=list)
    name: list[str] = field(default_factory=list)
    shield: list[Shield] = field(default_factory=list)
    launch_s: list[float] = field(default_factory=list)
    takes: list[float] = field(default_factory=list)
    loads: list[np.ndarray] = field(default_factory=list)
    alloc_bytes: list[float] = field(default_factory=list)
    free_bytes: list[float] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)
    runs: dict[int, tuple[float, float]] = field(default_factory=dict)  # kernel and launch seconds of joined kernels
    ahead: list[tuple[int, int]] = field(default_factory=list)  # gathers that may start n visits before the pass ends

    def __len__(self) -> int:
        return len(self.seconds)

    def compute(
        self, name: str, seconds: float, category: Category, *, launch_s: float = 0.0, after: list[int] | None = None,
        alloc: float = 0.0, free: float = 0.0,
    ) -> int:  # fmt: skip
        """A kernel."""
        if after is None and self._joins(category, seconds):
            return self._join(name, seconds, launch_s, alloc, free)
        nothing = np.zeros(self.num_links)
        return self._add(name, Lane.COMPUTE, Transfer(seconds, nothing, 0.0), category, Shield.NOTHING, after, launch_s,
                         alloc, free)  # fmt: skip

    def _joins(self, category: Category, seconds: float) -> bool:
        """Whether a kernel may become part of the one before it."""
        last = len(self) - 1
        if not self.joined_s or self.tail != [last] or self.seconds[last] + seconds > self.joined_s:
            return False
        begins = bool(self.visits) and self.visits[-1].stop == len(self)  # a block's tasks are its own
        return self.lane[last] == Lane.COMPUTE and self.category[last] is category and not begins

    def _join(self, name: str, seconds: float, launch_s: float, alloc: float, free: float) -> int:
        """Add a kernel to the last task: its time, its launch, the most that both hold and what is left of it.

        The device waits where launches take longer than kernels (the estimate's rule for a block). Shorter in tasks,
        not in time; what is lost is when exactly memory peaks.
        """
        last = len(self) - 1
        held = self.alloc_bytes[last] - self.free_bytes[last]
        pure, launches = self.runs.get(last, (self.seconds[last], self.launch_s[last]))
        pure, launches = pure + seconds, launches + launch_s
        self.runs[last] = (pure, launches)
        self.seconds[last] = max(pure, launches - self.launch_s[last])
        self.alloc_bytes[last] = max(self.alloc_bytes[last], held + alloc)
        self.free_bytes[last] = self.alloc_bytes[last] - (held + alloc - free)
        if not self.name[last].endswith(name):
            self.name[last] = f"{self.name[last].partition(' ... ')[0]} ... {name}"
        return last

    def transfer(
        self, name: str, lane: Lane, what: Transfer, category: Category, shield: Shield, *,
        after: list[int] | None = None, alloc: float = 0.0, free: float = 0.0,
    ) -> int:  # fmt: skip
        """A transfer on its own stream."""
        return self._add(name, lane, what, category, shield, after, 0.0, alloc, free)

    def _add(
        self, name: str, lane: Lane, what: Transfer, category: Category, shield: Shield, after: list[int] | None,
        launch_s: float, alloc: float, free: float,
    ) -> int:  # fmt: skip
        """Append a task that waits for `after` (the tail where None); it becomes the tail where `after` is None."""
        task = len(self)
        self.lane.append(int(lane))
        self.seconds.append(what.seconds)
        self.category.append(category)
        self.name.append(name)
        self.shield.append(shield)
        self.launch_s.append(launch_s)
        self.takes.append(what.takes)
        self.loads.append(what.loads)
        self.alloc_bytes.append(alloc)
        self.free_bytes.append(free)
        waits = self.tail if after is None else after
        self.edges += [(other, task) for other in waits]
        if not waits:
            self.entries.append(task)
        if after is None:
            self.tail = [task]
        return task
