"""Several runs that were launched together: one folder each, and one index of what came of them. Decides nothing.

The folder holds a run folder per space and `index.json`, which is replaced whenever a run begins or ends, so that a
reader sees at any time what is done, what is under way and what waits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from results.files import as_user_error, dump_json, write_bytes
from results.store import RunFolder, claimable, folder_name, fresh_folder

__all__ = ["ENDED", "INDEX", "OUTCOMES", "BatchIndex", "Entry", "folder_names", "is_batch"]

INDEX = "index.json"
VERSION = 1
OUTCOMES = ("waiting", "running", "interrupted", "done", "nothing feasible", "failed")
"""What becomes of a run of a batch."""
ENDED = frozenset({"done", "nothing feasible"})
"""Outcomes that a resumed batch leaves as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One run of a batch. `run`: its folder, from the batch's. `best`: the best value of each objective, by column."""

    run: str
    name: str
    model: str
    systems: tuple[str, ...]
    num_gpus: tuple[int, ...]
    outcome: str = "waiting"
    sampler: str | None = None
    legal: int | None = None
    front: int | None = None
    best: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    error: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome must be one of {list(OUTCOMES)}, but got {self.outcome!r}")


@dataclass(slots=True)
class BatchIndex:
    """The index of one batch on disk, and its entries in order of launch."""

    path: Path
    created: str
    entries: list[Entry]

    @classmethod
    def create(cls, out: Path | None, entries: Sequence[Entry]) -> Self:
        """A new batch in `out`, which must be new or empty, or in `runs/batch-TIMESTAMP`."""
        path = fresh_folder("batch") if out is None else claimable(out)
        made = cls(path, datetime.now(UTC).isoformat(timespec="seconds"), list(entries))
        made._write()
        return made

    @classmethod
    def open(cls, path: Path) -> Self:
        """A batch that exists; ValueError where its index is missing or damaged."""
        file = Path(path) / INDEX
        with as_user_error(file, "read"):
            content = file.read_bytes()
        try:
            data = json.loads(content)
            if data["version"] != VERSION:
                raise ValueError(f"version must be {VERSION}, but is {data['version']!r}")
            entries = [_entry(row) for row in data["runs"]]
            return cls(Path(path), str(data["created"]), entries)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: must be the index of a batch of runs, but is damaged ({error})") from error

    def folder(self, entry: Entry) -> Path:
        """The run folder of an entry."""
        return self.path / entry.run

    def settle(self, number: int, **changes: Any) -> None:  # noqa: ANN401 - fields of Entry
        """Writes what is new of one run."""
        self.entries[number] = replace(self.entries[number], **changes)
        self._write()

    def rows(self) -> list[dict[str, Any]]:
        """The entries as plain rows, with the outcome that the run folders tell where nobody is at work any more."""
        return [asdict(entry) | self._now(entry) for entry in self.entries]

    def _now(self, entry: Entry) -> dict[str, str]:
        if not self.folder(entry).is_dir():
            return {"outcome": "failed", "error": f"{self.folder(entry)}: no such run folder any more"}
        return {"outcome": self._outcome(entry)}

    def _outcome(self, entry: Entry) -> str:
        if entry.outcome != "running":
            return entry.outcome
        try:
            state = RunFolder.open(self.folder(entry)).state
        except ValueError:
            return "failed"
        return state if state != "done" else entry.outcome

    def _write(self) -> None:
        data = {"version": VERSION, "created": self.created, "runs": [asdict(entry) for entry in self.entries]}
        write_bytes(self.path / INDEX, (dump_json(data, indent=2) + "\n").encode())


_TEXT = ("run", "name", "model", "outcome", "error")
_NUMBERS = ("legal", "front", "seconds")


def _entry(row: dict[str, Any]) -> Entry:
    """A row of the file, each field of the kind that it must be; ValueError names the one that is not."""
    known = {f.name for f in fields(Entry)}
    if unknown := sorted(set(row) - known):
        raise ValueError(f"a run has no {unknown[0]!r}")
    entry = Entry(**{**row, "systems": tuple(row["systems"]), "num_gpus": tuple(row["num_gpus"])})
    checks = {
        **{name: isinstance(getattr(entry, name), str) for name in _TEXT},
        **{name: isinstance(getattr(entry, name), int | float | None) for name in _NUMBERS},
        "sampler": isinstance(entry.sampler, str | None),
        "systems": bool(entry.systems) and all(isinstance(name, str) for name in entry.systems),
        "num_gpus": len(entry.num_gpus) == len(entry.systems) and all(isinstance(n, int) for n in entry.num_gpus),
        "best": isinstance(entry.best, dict) and all(isinstance(x, int | float) for x in entry.best.values()),
    }
    for name, good in checks.items():
        if not good:
            raise ValueError(f"{name} of a run cannot be {getattr(entry, name)!r}")
    if folder_names([entry.run]) != [entry.run]:
        raise ValueError(f"run must be the name of a folder of the batch, but is {entry.run!r}")
    return entry


def folder_names(names: Sequence[str]) -> list[str]:
    """A folder for each run: its name, numbered where that is taken.

    >>> folder_names(["a b", "c", "c"])
    ['a-b', 'c', 'c-2']
    """
    taken: list[str] = []
    for name in names:
        stem = folder_name(name)
        number, chosen = 1, stem
        while chosen in taken:
            number += 1
            chosen = f"{stem}-{number}"
        taken.append(chosen)
    return taken


def is_batch(path: Path) -> bool:
    """Whether a folder holds several runs and their index."""
    return (path / INDEX).is_file()
