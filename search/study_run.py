"""A study at work: rounds of ask, price, tell until a budget is spent. Every round is on disk before the next begins.

What is priced is remembered by canonical configuration: one that comes again costs nothing and is told from memory. Of
each configuration the study is told the representative, and whatever of its own front nothing beats that was found
before: so the front of what was told is the front of everything priced. Prints nothing and writes no table.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from results.pareto import non_dominated
from results.store import RunFolder
from search.dimensions import Dimensions
from search.nest import COUNTS
from search.pool import BlockFailed, InlinePool, RayPool
from search.pricer import MEMORY, Priced, objectives_of
from search.space import SearchOptions
from search.study import Study

__all__ = ["BATCH", "STALE", "Budget", "Row", "StudyRun", "fingerprint"]

BATCH = 16
"""Trials of a round: fixed, so that a run does not depend on how many workers there are."""

STALE = 20
"""Rounds in a row that bring nothing new before a study ends: the sampler repeats itself, or has seen all there is."""

PRICED = COUNTS.index("priced")
Asked = list[tuple[Any, dict[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a study ends: after so many configurations, seconds or candidates (None: no limit), or stale rounds."""

    trials: int
    seconds: float | None = None
    candidates: int | None = None
    stale: int = STALE


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One result that a study was told: id in the run, configuration, id in its narrowed space, columns, verdict."""

    id: int
    code: int
    local: int
    values: dict[str, float]
    reason: str
    capacity_bytes: float


@dataclass(slots=True, kw_only=True)
class _Known:
    """What memory holds of a configuration: objectives of its representative; None where nothing of it is legal."""

    values: list[float] | None
    slack: dict[str, float]
    id: int


@dataclass(slots=True, kw_only=True)
class _Round:
    """One line of the journal."""

    asked: int
    seconds: float
    results: list[dict[str, Any]] = field(default_factory=list)


class StudyRun:
    """Memory, front and counts of a study; `run` is its folder, `pool` prices codes."""

    def __init__(self, run: RunFolder, dimensions: Dimensions, study: Study | None, budget: Budget) -> None:
        self.run, self.dimensions, self.budget = run, dimensions, budget
        self._study = study
        self.space = dimensions.space
        self.mark = fingerprint(dimensions)
        self.rows: list[Row] = []
        self.front: list[int] = []  # positions in rows
        self.counts = np.zeros(len(COUNTS), np.int64)
        self.rules: dict[str, int] = {}
        self.asked, self.seconds = 0, 0.0
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._next_id, self._stale = 0, 0
        self._higher = self.space.higher

    @property
    def study(self) -> Study:
        """The study; there is none where nothing can be sampled."""
        assert self._study is not None
        return self._study

    @property
    def evaluated(self) -> int:
        """Configurations priced, each once."""
        return len(self._known)

    def recall(self) -> None:
        """Take in what the journal of rounds holds of this very study."""
        for number, record in enumerate(self.run.read_blocks(), start=1):
            if record.get("study") == self.mark:
                try:
                    self._recall(record)
                except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                    file = self.run.path / "journal" / "blocks.jsonl"
                    raise ValueError(
                        f"{file}:{number}: a round must be whole, but this one is damaged"
                        f" ({type(error).__name__}: {error}); delete the line: what it told is worked out again"
                    ) from error

    def _recall(self, record: dict[str, Any]) -> None:
        self.asked += int(record["asked"])
        self.seconds = float(record["seconds"])
        for result in record["results"]:
            if self.dimensions.canonical(int(result["code"])) not in self._known:  # a line may stand there twice
                self._remember(result)

    def missing(self) -> list[int]:
        """Codes that the study was told and the rounds do not hold, for a crash cut their line."""
        codes = [self.dimensions.code(parameters) for parameters in self.study.told()]
        return list(dict.fromkeys(c for c in codes if self.dimensions.canonical(c) not in self._known))

    def is_over(self) -> str:
        """Why the study ends here; empty while it goes on."""
        if self.evaluated >= self.budget.trials:
            return f"{self.evaluated} configurations are priced"
        if self.budget.seconds is not None and self.seconds >= self.budget.seconds:
            return f"{self.budget.seconds:g} s have passed"
        if self.budget.candidates is not None and self.counts[PRICED] >= self.budget.candidates:
            return f"{self.counts[PRICED]} candidates are priced"
        if self.evaluated >= self.dimensions.num_configurations:
            return "every configuration is priced"
        return f"{self._stale} rounds brought nothing new" if self._stale >= self.budget.stale else ""

    def go(self, pool: InlinePool | RayPool, tell: Callable[[StudyRun], None]) -> str:
        """Rounds until the budget is spent; why it ended. RuntimeError where a configuration cannot be priced."""
        began = time.perf_counter() - self.seconds
        if missing := self.missing():
            self._write(_Round(asked=0, seconds=self.seconds), self._price(missing, pool))
        while not (why := self.is_over()):
            asked = self.study.ask(BATCH)
            codes = [self.dimensions.code(parameters) for _, parameters in asked]
            fresh = {self.dimensions.canonical(code): code for code in reversed(codes)}
            new = [code for key, code in fresh.items() if key not in self._known]
            priced = self._price(sorted(new), pool)
            self._stale = 0 if new else self._stale + 1
            self.seconds = time.perf_counter() - began
            self._tell(asked, codes, priced)
            tell(self)
        return why

    def front_rows(self) -> list[Row]:
        """The front of everything priced, in order of id."""
        return sorted((self.rows[i] for i in self.front), key=lambda row: row.id)

    def _price(self, codes: list[int], pool: InlinePool | RayPool) -> dict[int, Priced]:
        priced: dict[int, Priced] = {}
        failed: list[BlockFailed] = []
        for result in pool.map([(code, code + 1) for code in codes], lambda: None) if codes else ():
            if isinstance(result, BlockFailed):
                failed.append(result)
            else:
                priced[result.start] = result.value
        if failed:
            what = "; ".join(f"configuration {b.start} after {b.attempts} attempts: {b.error}" for b in failed[:3])
            raise RuntimeError(f"{len(failed)} configurations failed ({what}); `search resume {self.run.path}` goes on")
        return priced

    def _tell(self, asked: Asked, codes: list[int], priced: dict[int, Priced]) -> None:
        """Tell every trial of a round in the order asked, and journal it."""
        this = _Round(asked=len(asked), seconds=self.seconds)
        by_key = {self.dimensions.canonical(code): (code, result) for code, result in priced.items()}
        for (trial, _), code in zip(asked, codes, strict=True):
            key = self.dimensions.canonical(code)
            more: list[Row] = []
            if key not in self._known:
                more = self._enter(*by_key[key], this)
            known = self._known[key]
            if known.values is None:
                self.study.give_up(trial)
                continue
            self.study.tell(trial, known.values, known.slack, {"id": known.id})
            for row in more:
                self.study.add(trial, self._objectives(row), self._slack(row, known), {"id": row.id})
        self.asked += len(asked)
        self._flush(this)
        self.study.flush()

    def _write(self, this: _Round, priced: dict[int, Priced]) -> None:
        for code in sorted(priced):
            self._enter(code, priced[code], this)
        self._flush(this)

    def _flush(self, this: _Round) -> None:
        self.run.append_block(
            {"study": self.mark, "asked": this.asked, "seconds": this.seconds, "evaluated": self.evaluated,
             "results": this.results}
        )  # fmt: skip

    def _enter(self, code: int, result: Priced, this: _Round) -> list[Row]:
        """Remember a new configuration and journal it; its rows besides the representative."""
        local = result.ids.tolist()
        closed = not self.dimensions.free
        ids = local if closed else list(range(self._next_id, self._next_id + len(local)))
        keep = self._worth_telling(result, ids)
        record = {
            "code": code, "ids": [ids[i] for i in keep], "local": [local[i] for i in keep], "num": len(local),
            "columns": {name: column[keep].tolist() for name, column in result.columns.items()},
            "slack": result.slack, "counts": result.counts.tolist(), "rules": result.rules,
            "capacity": result.capacity_bytes,
        }  # fmt: skip
        this.results.append(record)
        return self._remember(record)[1:]

    def _worth_telling(self, result: Priced, ids: list[int]) -> list[int]:
        """Positions of the representative and of what joins the front of what was found before."""
        if not len(ids) or not result.is_feasible:
            return list(range(len(ids)))[:1]
        found = [self.rows[i] for i in self.front]
        values = [*(self._objectives(row) for row in found), *objectives_of(self.space, result.columns).tolist()]
        kept = non_dominated(values, [*(row.id for row in found), *ids], self._higher) - len(found)
        return [0, *(int(i) for i in kept if i > 0)]

    def _remember(self, record: dict[str, Any]) -> list[Row]:
        """Take one journalled configuration into memory, rows, front and counts."""
        code, slack = int(record["code"]), {name: float(x) for name, x in record["slack"].items()}
        key = self.dimensions.canonical(code)
        reason = next((name for name, x in slack.items() if x > 0), "")
        rows = [
            Row(
                id=int(record["ids"][i]),
                code=code,
                local=int(record["local"][i]),
                reason=reason,
                values={name: float(column[i]) for name, column in record["columns"].items()},
                capacity_bytes=float(record["capacity"]),
            )  # fmt: skip
            for i in range(len(record["ids"]))
        ]
        self._next_id += int(record["num"])
        self.counts += np.array(record["counts"], dtype=np.int64)
        for name, number in record["rules"].items():
            self.rules[name] = self.rules.get(name, 0) + int(number)
        first = self._objectives(rows[0]) if rows else None
        self._known[key] = _Known(values=first, slack=slack, id=rows[0].id if rows else -1)
        start = len(self.rows)
        self.rows += rows
        if rows and not reason:
            self._join(range(start, len(self.rows)))
        return rows

    def _join(self, new: Iterable[int]) -> None:
        places = [*self.front, *new]
        values = [self._objectives(self.rows[i]) for i in places]
        kept = non_dominated(values, [self.rows[i].id for i in places], self._higher)
        self.front = [places[int(i)] for i in kept]

    def _slack(self, row: Row, known: _Known) -> dict[str, float]:
        """As Priced.slack, of another row of a feasible configuration."""
        return {**known.slack, MEMORY: row.values["device_memory_bytes"] / row.capacity_bytes - 1.0}

    def _objectives(self, row: Row) -> list[float]:
        return [row.values[o.column] for o in self.space.objectives]


def fingerprint(dimensions: Dimensions) -> str:
    """Tells apart studies of other spaces, prices or parameters; how a space is searched is no part of it."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(replace(dimensions.space, options=SearchOptions()).resolved_yaml().encode())
    digest.update(repr(sorted(dimensions.parameters.items())).encode())
    for part in (dimensions.plan.enumeration.structures.id, dimensions.plan.lows, dimensions.meshes.structures):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()
