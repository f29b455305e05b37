"""Scripts placed on ranks, once for every pass of the schedule, and the tasks between them: gathers them to `Tasks`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from estimator.detail.script import Lane, Script
from estimator.detail.traffic import Transfer
from estimator.detail.turns import Turn, turns
from estimator.schedule import Kind
from estimator.tasks import CATEGORIES, SHIELDS, Category, Device, Shield, Stream, Tasks

__all__ = ["Instances"]


class _Extra(NamedTuple):
    """A task of no pass. Named as the columns of a script and of an instance."""

    rank: int
    lane: Lane
    name: str
    what: Transfer
    category: Category
    shield: Shield
    chunk: int
    micro_batch: int
    alloc_bytes: float
    free_bytes: float


@dataclass(slots=True, kw_only=True)
class Instances:
    """Each instance is one script at one place in one rank's order. `extra` tasks come after all of them.

    All instances are placed before the first edge: a task's index is that of its instance's first one plus its own.
    """

    num_links: int
    scripts: list[Script] = field(default_factory=list)
    script: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    kind: list[Kind] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    micro_batch: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    size: int = 0
    more: list[_Extra] = field(default_factory=list)
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    gates: list[int] = field(default_factory=list)
    prior: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the passes that a pass follows
    plans: dict[tuple[int, int], list[Turn]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.size + len(self.more)

    def add_script(self, script: Script) -> int:
        """Its index."""
        self.scripts.append(script)
        return len(self.scripts) - 1

    def place(self, rank: int, script: int, kind: Kind, chunk: int, micro_batch: int) -> int:
        """A new instance."""
        assert not self.more, "instances come before extra tasks"
        self.script.append(script)
        self.rank.append(rank)
        self.kind.append(kind)
        self.chunk.append(chunk)
        self.micro_batch.append(micro_batch)
        self.base.append(self.size)
        self.size += len(self.scripts[script])
        return len(self.base) - 1

    def of(self, instance: int) -> Script:
        """Its script."""
        return self.scripts[self.script[instance]]

    def entries(self, instance: int) -> list[int]:
        """Tasks that wait for nothing of their own pass."""
        return self.global_ids(instance, self.of(instance).entries)

    def tails(self, instance: int) -> list[int]:
        """Tasks whose ends end the pass."""
        return self.global_ids(instance, self.of(instance).tail)

    def global_ids(self, instance: int, tasks: Iterable[int]) -> list[int]:
        """Tasks of a script in the numbering of all."""
        base = self.base[instance]
        return [base + task for task in tasks]

    def link(self, before: Sequence[int], after: Sequence[int], *, gates: bool = False) -> None:
        """Every task of `after` waits for every one of `before`; `gates`: so does the host that launches it."""
        for b in before:
            self.before += [b] * len(after)
            self.after += after
        if gates:
            self.gates += after

    def follow(self, instance: int, *before: int) -> None:
        """The pass starts when those before it have ended; gathers of its first weights may start earlier."""
        self.prior[instance] = before
        for other in before:
            self.link(self.tails(other), self.entries(instance))
            for task, back in self.of(instance).ahead:
                self.link(self._anchor(other, back), self.global_ids(instance, [task]))

    def _anchor(self, instance: int, back: int) -> list[int]:
        """What ends the block that many blocks before the end of a pass, in passes before it where it has fewer."""
        while back > len(self.of(instance).visits):
            back -= len(self.of(instance).visits)
            if not self.prior.get(instance):
                return []
            instance = self.prior[instance][-1]
        return self.global_ids(instance, self.of(instance).visits[-back].tails)

    def alternate(self, *pair: int) -> None:
        """Kernels of two passes in turn: what a pair of passes launches."""
        key = (self.script[pair[0]], self.script[pair[1]])
        if key not in self.plans:
            self.plans[key] = turns((self.of(pair[0]), self.of(pair[1])))
        plan = self.plans[key]
        for (k, _, last), (other, first, _) in zip(plan, plan[1:], strict=False):
            self.link([self.base[pair[k]] + last], [self.base[pair[other]] + first])

    def extra(
        self, rank: int, lane: Lane, name: str, what: Transfer, category: Category, shield: Shield,
        after: Sequence[int], *, chunk: int = -1, micro_batch: int = -1, alloc: float = 0.0, free: float = 0.0,
    ) -> int:  # fmt: skip
        """A task of no pass."""
        task = len(self)
        self.more.append(_Extra(rank, lane, name, what, category, shield, chunk, micro_batch, alloc, free))
        self.link(after, [task])
        return task

    def tasks(self, devices: Sequence[Device], num_ranks: int) -> Tasks:
        """Everything as arrays; streams lane by lane, rank after rank."""
        names = sorted({n for script in self.scripts for n in script.name} | {item.name for item in self.more})
        code = {name: i for i, name in enumerate(names)}
        lengths = np.array([len(self.scripts[k]) for k in self.script], dtype=np.int64)
        first = np.cumsum([0, *(len(script) for script in self.scripts)])
        # Task t of instance i is row first[script] + (t - base) of all scripts laid end to end.
        rows = np.repeat(first[self.script] - np.array(self.base, dtype=np.int64), lengths) + np.arange(self.size)
        owner = np.repeat(np.arange(len(self.base)), lengths)

        def column(name: str, rest: Sequence[float], dtype: type = np.float64) -> np.ndarray:
            library: np.ndarray = np.array([x for script in self.scripts for x in getattr(script, name)], dtype=dtype)
            return np.concatenate([library[rows], np.array(rest, dtype=dtype)])

        def whole(name: str) -> np.ndarray:
            rest = [getattr(item, name) for item in self.more]
            return np.concatenate([np.array(getattr(self, name), np.int64)[owner], np.array(rest, dtype=np.int64)])

        def coded(name: str, codes: Mapping[Any, int]) -> np.ndarray:
            library = np.array([codes[x] for script in self.scripts for x in getattr(script, name)], dtype=np.int64)
            return np.concatenate([library[rows], np.array([codes[getattr(x, name)] for x in self.more], np.int64)])

        what = [item.what for item in self.more]
        loads = np.concatenate([load for script in self.scripts for load in script.loads]).reshape(-1, self.num_links)
        n = len(self)
        gates = np.zeros(n, dtype=np.bool_)
        gates[self.gates] = True
        before, after = self._edges()
        lane_of = column("lane", [item.lane for item in self.more], np.int64)
        used = set(lane_of.tolist())
        lanes = [lane for lane in Lane if lane <= Lane.PP or lane in used]  # the host's and replicas' where they are
        place_of = np.zeros(len(Lane), np.int64)
        place_of[lanes] = np.arange(len(lanes))
        return Tasks(
            devices=tuple(devices),
            streams=tuple(
                Stream(device=rank, name=lane.name.lower(), computes=lane is Lane.COMPUTE)
                for rank in range(num_ranks) for lane in lanes
            ),
            names=tuple(names),
            scopes=(*(self._label(i) for i in range(len(self.base))), "between passes"),
            stream=whole("rank") * len(lanes) + place_of[lane_of],
            seconds=column("seconds", [x.seconds for x in what]),
            category=coded("category", {c: i for i, c in enumerate(CATEGORIES)}),
            before=before, after=after,
            name=coded("name", code),
            scope=np.concatenate([owner, np.full(len(self.more), len(self.base))]),
            micro_batch=whole("micro_batch"), chunk=whole("chunk"),
            shield=coded("shield", {s: i for i, s in enumerate(SHIELDS)}),
            launch_s=column("launch_s", [0.0] * len(what)), gates=gates,
            takes=column("takes", [x.takes for x in what]),
            loads=np.concatenate([loads[rows], np.array([x.loads for x in what]).reshape(-1, self.num_links)]),
            alloc_bytes=column("alloc_bytes", [item.alloc_bytes for item in self.more]),
            free_bytes=column("free_bytes", [item.free_bytes for item in self.more]),
        )  # fmt: skip

    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Edges inside every instance, then those between."""
        per_script = [np.array(script.edges, dtype=np.int64).reshape(-1, 2) for script in self.scripts]
        parts = [per_script[k] + base for k, base in zip(self.script, self.base, strict=True)]
        inside = np.concatenate(parts) if parts else np.zeros((0, 2), np.int64)
        before = np.concatenate([inside[:, 0], np.array(self.before, dtype=np.int64)])
        return before, np.concatenate([inside[:, 1], np.array(self.after, dtype=np.int64)])

    def _label(self, i: int) -> str:
        short = {Kind.F: "F", Kind.B: "B", Kind.W: "W", Kind.BW: "BW"}[self.kind[i]]
        return f"{short}{self.micro_batch[i]} chunk {self.chunk[i]}"
