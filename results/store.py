"""Run folders: what a search leaves behind, readable after any crash. Decides nothing, deletes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from estimator.mapping import shown, told_kind
from results.files import append_line, as_user_error, dump_json, read_lines, write_bytes
from results.schema import (
    FRONT_FIELDS,
    REJECTION_FIELDS,
    REPLAY_FIELDS,
    SCHEMA_VERSION,
    SERVED_FIELDS,
    Field,
    conform,
)
from results.table import Table

__all__ = ["REPORT", "STATES", "RunFolder", "claimable", "folder_name", "fresh_folder", "is_run", "list_runs"]

STATES = ("running", "interrupted", "done", "failed")
RUNS = Path("runs")

_MANIFEST = "manifest.json"
REPORT = "report.html"
_SPACE_HASH = "space_sha256"
_NOT_NUMBERS = ("by_rule", "pruned")  # of counts: a mapping, a flag
_LOCK = ".lock"
_LOCK_ATTEMPTS = 5  # a reader that asks whether the run is alive holds the lock for microseconds
_LOCK_WAIT_S = 0.02

Columns = Mapping[str, Sequence[Any] | NDArray[Any]]


def _empty_manifest() -> dict[str, Any]:
    return {
        "state": "running",
        "counts": {},
        "seconds": {},
        "workers": None,
        "sampler": None,
        "seed": None,
        "versions": {},
        "hypervolume": None,
        "events": [],
    }


class RunFolder:
    """One run on disk. Many may read; the first write claims the folder, and one process at a time can hold it."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        """For `create` and `open`."""
        self.path = path
        self._manifest = manifest
        self._release: weakref.finalize[..., Any] | None = None

    @classmethod
    def create(cls, out: Path | None, name: str, resolved_yaml: str, manifest: dict[str, Any]) -> Self:
        """A new run in `out`, which must be new or empty, or in `runs/NAME-TIMESTAMP`."""
        path = fresh_folder(name) if out is None else claimable(out)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        content = resolved_yaml.encode()
        header = {"schema_version": SCHEMA_VERSION, "name": name, "created": now, _SPACE_HASH: _hash(content)}
        run = cls(path, header | _empty_manifest() | manifest)
        run.claim()
        if present := sorted(p.name for p in path.iterdir() if p.name != _LOCK):  # another run was quicker
            raise ValueError(f"{path}: a run needs a new or empty folder, but it holds {present[:3]}")
        write_bytes(path / "space.yaml", content)
        run.update_manifest()
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """A run that exists; ValueError when the folder is missing, is no run, or is of another version."""
        path = Path(path)
        if not path.is_dir():
            raise ValueError(f"{path}: no such run folder; `search runs` lists them")
        file = path / _MANIFEST
        if not file.is_file():
            raise ValueError(f"{path}: not a run folder, it has no {_MANIFEST}; `search runs` lists runs")
        try:
            manifest = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
        except (ValueError, OSError) as error:
            raise ValueError(f"{file}: must be JSON, but cannot be read ({error})") from error
        _check_manifest(file, manifest)
        return cls(path, manifest)

    @property
    def manifest(self) -> dict[str, Any]:
        """A copy of the manifest as this process last read or wrote it."""
        copy: dict[str, Any] = json.loads(dump_json(self._manifest))
        return copy

    @property
    def state(self) -> str:
        """As in the manifest, but a run that says `running` while no process holds it was interrupted."""
        state: str = self._manifest["state"]
        return "interrupted" if state == "running" and not self._is_held() else state

    @property
    def answers(self) -> bool:
        """Whether its rows are of a model that answers, not of one that trains."""
        return bool(self._manifest.get("answers", False))

    @property
    def fields(self) -> tuple[Field, ...]:
        """Columns of its front, reference and trials."""
        return SERVED_FIELDS if self.answers else FRONT_FIELDS

    @property
    def space_yaml(self) -> str:
        """The resolved space."""
        file = self.path / "space.yaml"
        with as_user_error(file, "read"):
            content = file.read_bytes()
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file}: must be UTF-8, but is damaged at byte {error.start}; put it right from a copy"
            ) from error

    def check_space(self) -> None:
        """ValueError where space.yaml is not the one that the run was made with: another space is another run."""
        known, file = self._manifest.get(_SPACE_HASH), self.path / "space.yaml"
        if known is not None and known != _hash(self.space_yaml.encode()):  # older runs know none
            raise ValueError(f"{file}: a run keeps the space that it was made with, but this file was changed since; "
                             f"put it back, or launch it as a run of its own: search launch {file}")  # fmt: skip

    def claim(self) -> None:
        """Becomes the only writer until `close`; ValueError names the process that already is."""
        if self._release is not None:
            return
        with as_user_error(self.path, "write to the run folder"):
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                _lock(descriptor, self.path)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            except BaseException:
                os.close(descriptor)
                raise
        self._release = weakref.finalize(self, os.close, descriptor)  # closing the descriptor frees the lock

    def close(self) -> None:
        """Lets another process write."""
        if self._release is not None:
            self._release()
            self._release = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def update_manifest(self, **changes: Any) -> None:  # noqa: ANN401 - any JSON value
        """Replaces these top-level keys and writes the manifest."""
        updated = self._manifest | changes
        if updated["state"] not in STATES:
            raise ValueError(f"state must be one of {list(STATES)}, but got {updated['state']!r}")
        try:
            text = dump_json(updated, indent=2)
        except ValueError as error:
            raise ValueError(f"{self.path / _MANIFEST}: numbers must be finite and values plain ({error})") from error
        self.claim()
        write_bytes(self.path / _MANIFEST, text.encode() + b"\n")
        self._manifest = json.loads(text)

    def write_front(self, table: Columns) -> None:
        """Writes `front.parquet`; columns as in `fields`."""
        self._write("front.parquet", table, self.fields)

    def read_front(self) -> Table:
        """The front; ValueError when there is none yet or its file is damaged."""
        return self._read("front.parquet", self.fields)

    def write_reference(self, table: Columns) -> None:
        """Writes `reference.parquet`: the points that the space names."""
        self._write("reference.parquet", table, self.fields)

    def read_reference(self) -> Table:
        """The reference points; no rows when the space names none."""
        if not (self.path / "reference.parquet").exists():
            return _empty(self.fields)
        return self._read("reference.parquet", self.fields)

    def write_rejections(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes `rejections.parquet`: one row {rule, count, example} per rule."""
        columns = {field.name: [row.get(field.name, field.default) for row in rows] for field in REJECTION_FIELDS}
        self._write("rejections.parquet", columns, REJECTION_FIELDS)

    def read_rejections(self) -> Table:
        """Rule, count and example; ValueError when not written yet."""
        return self._read("rejections.parquet", REJECTION_FIELDS)

    def write_trials(self, part: int, table: Columns) -> None:
        """Writes one part of `trials/`; a part that is written again (a resumed block) replaces itself."""
        self._write(f"trials/part-{part:06d}.parquet", table, self.fields)

    def read_trials(self) -> Table:
        """Every part in order, as one table; no rows when the run kept none."""
        import numpy as np

        files = sorted((self.path / "trials").glob("part-*.parquet"))
        parts = [self._read(f"trials/{file.name}", self.fields) for file in files] or [_empty(self.fields)]
        return Table(columns={name: np.concatenate([part[name] for part in parts]) for name in parts[0].names})

    def write_replays(self, table: Columns) -> None:
        """Writes `replays.parquet`: what the finalists came to; columns as in schema.REPLAY_FIELDS."""
        self._write("replays.parquet", table, REPLAY_FIELDS)

    def read_replays(self) -> Table:
        """The finalists as they were replayed; no rows when none was. ValueError when the file is damaged."""
        if not (self.path / "replays.parquet").exists():
            return _empty(REPLAY_FIELDS)
        return self._read("replays.parquet", REPLAY_FIELDS)

    def write_report(self, content: str) -> Path:
        """Writes `report.html`, the page of the run."""
        self.claim()
        write_bytes(self.path / REPORT, content.encode())
        return self.path / REPORT

    def traces(self) -> Path:
        """The folder of the traces, `replays/`, made where it is missing."""
        self.claim()
        return self._room("replays")

    def is_whole(self) -> bool:
        """Whether every table that a finished run has can be read."""
        try:
            for file in ("front.parquet", "reference.parquet"):
                self._read(file, self.fields)
            self.read_rejections()
            self.read_trials()
            self.read_replays()
        except ValueError:
            return False
        return True

    def append_block(self, record: dict[str, Any]) -> None:
        """Journals a finished block; when this returns, the record survives a crash."""
        self.claim()
        append_line(self._room("journal") / "blocks.jsonl", record)

    def read_blocks(self) -> list[dict[str, Any]]:
        """Every journalled block; a last line that a crash cut is left out, another bad line is a ValueError."""
        return read_lines(self.path / "journal" / "blocks.jsonl")

    def _write(self, file: str, columns: Columns, fields: tuple[Field, ...]) -> None:
        from results.parquet import write_table  # pyarrow loads slowly, and `search runs` needs none of it

        table = conform(columns, fields)
        self.claim()
        folder, _, name = file.rpartition("/")
        write_table(self._room(folder) / name, table, fields, {"run": self._manifest["name"]})

    def _read(self, file: str, fields: tuple[Field, ...]) -> Table:
        from results.parquet import read_table

        return read_table(self.path / file, fields)

    def _room(self, name: str) -> Path:
        room = self.path / name
        with as_user_error(room, "make the folder"):
            room.mkdir(exist_ok=True)
        return room

    def _is_held(self) -> bool:
        if self._release is not None:
            return True
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


def is_run(folder: Path) -> bool:
    """Whether a folder looks like a run."""
    return all((folder / name).is_file() for name in (_MANIFEST, "space.yaml"))


def list_runs(directory: Path = RUNS) -> list[dict[str, Any]]:
    """One row per run of a folder and of the batches in it, newest first; what cannot be read has an `error`."""
    if not Path(directory).is_dir():
        raise ValueError(f"{directory}: no such folder of runs")
    folders = [path for path in sorted(Path(directory).iterdir()) if path.is_dir()]
    batches = [path for path in folders if not is_run(path) and any(is_run(inner) for inner in path.glob("*"))]
    inside = [inner for batch in batches for inner in sorted(batch.iterdir()) if is_run(inner)]
    rows = [_run_row(path) for path in folders if path not in batches] + [_run_row(path) for path in inside]
    return sorted(rows, key=lambda row: (row["created"], row["path"]), reverse=True)


def _run_row(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"path": str(path), "name": path.name, "state": "unreadable", "created": ""}
    row |= {"front": None, "seconds": None, "error": ""}
    try:
        run = RunFolder.open(path)
    except ValueError as error:
        return row | {"error": str(error)}
    manifest = run.manifest
    facts = {"front": manifest["counts"].get("front"), "seconds": manifest["seconds"].get("total")}
    return row | facts | {"name": manifest["name"], "state": run.state, "created": manifest["created"]}


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _check_manifest(file: Path, manifest: object) -> None:
    if not isinstance(manifest, dict):
        raise ValueError(f"{file}: must be a JSON object, but got {told_kind(manifest)}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        found = manifest.get("schema_version")
        raise ValueError(f"{file}: schema version must be {SCHEMA_VERSION}, but the run has {found!r}")
    if missing := sorted({"name", "created", *_empty_manifest()} - set(manifest)):
        raise ValueError(f"{file}: every run states {missing[0]!r}, but this one does not")
    if manifest["state"] not in STATES:
        raise ValueError(f"{file}: state must be one of {list(STATES)}, but got {manifest['state']!r}")
    for key, empty in (("name", ""), ("created", ""), ("counts", {}), ("seconds", {}), ("events", [])):
        if not isinstance(manifest[key], type(empty)):
            raise ValueError(f"{file}: {key} must be {told_kind(empty)}, but got {shown(manifest[key])}")
    for key in ("counts", "seconds"):
        for name, value in manifest[key].items():
            if name not in _NOT_NUMBERS and not isinstance(value, int | float | None):
                raise ValueError(f"{file}: {key}.{name} must be a number, but got {value!r}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"numbers must be finite, but one is {name}")


def folder_name(name: str) -> str:
    """What a run of that name may call its folder.

    >>> folder_name("a b"), folder_name("..")
    ('a-b', 'run')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def fresh_folder(name: str) -> Path:
    """A new folder `runs/NAME-TIMESTAMP`."""
    stem = folder_name(name)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    for attempt in range(1, 1000):
        path = RUNS / (f"{stem}-{stamp}" + (f"-{attempt}" if attempt > 1 else ""))
        with as_user_error(path, "make the run folder"), contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise ValueError(f"{RUNS}: a run needs a new folder, but 999 of {stem}-{stamp} exist; give --out")


def claimable(out: Path) -> Path:
    """The folder `out`, made where it is missing; ValueError where it can hold no new run."""
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: --out must be a new or empty folder, but it is a file")
    with as_user_error(out, "make the run folder"):
        out.mkdir(parents=True, exist_ok=True)
        present = sorted(path.name for path in out.iterdir())
    if present:
        raise ValueError(f"{out}: --out must be a new or empty folder, but it holds {present[:3]}; nothing was touched")
    return out


def _lock(descriptor: int, path: Path) -> None:
    for _ in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_WAIT_S)
        else:
            return
    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
    raise ValueError(f"{path}: only one process may write to a run, and process {holder} does; wait for it or stop it")


def _empty(fields: tuple[Field, ...]) -> Table:
    return conform({field.name: [] for field in fields}, fields)
