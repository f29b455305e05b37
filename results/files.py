"""Durable files: a name holds the old content or the new, never half of it. Knows nothing of what the files mean."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["append_line", "as_user_error", "dump_json", "read_lines", "write_bytes"]


@contextlib.contextmanager
def as_user_error(path: Path, action: str) -> Iterator[None]:
    """Turns an operating system's refusal into a ValueError of one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: cannot {action}: {error.strerror or error}") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file atomically and durably: temporary file, fsync, rename, fsync of the folder.

    One writer a folder is assumed (store.py locks it), so the temporary name is fixed and a leftover is reused.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with as_user_error(path, "write"):
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)


def dump_json(value: Any, *, indent: int | None = None, allow_nan: bool = False) -> str:  # noqa: ANN401 - any JSON value
    """JSON text; floats are written so that they read back to the same bits, NumPy values as plain ones."""
    return json.dumps(value, indent=indent, allow_nan=allow_nan, default=_plain)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends one JSON line and waits until it is on disk. The line break commits it: a cut tail is dropped first."""
    line = dump_json(record, allow_nan=True).encode() + b"\n"
    with as_user_error(path, "append"):
        is_new = not path.exists()
        with path.open("ab+") as file:
            size = _committed_bytes(file)
            file.truncate(size)
            try:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise
        if is_new:
            _sync_folder(path.parent)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every committed line; a last line without its line break was cut by a crash and is left out."""
    if not path.exists():
        return []
    with as_user_error(path, "read"):
        lines = path.read_bytes().split(b"\n")
    return [_parse(path, number, line) for number, line in enumerate(lines[:-1], start=1)]


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _not_a_record(path, number, line) from error
    if not isinstance(record, dict):
        raise _not_a_record(path, number, line)
    return record


def _not_a_record(path: Path, number: int, line: bytes) -> ValueError:
    return ValueError(
        f"{path}:{number}: each line must be a JSON object, but got {line[:60]!r}; "
        "delete the line: what it told is worked out again"
    )


def _committed_bytes(file: Any) -> int:  # noqa: ANN401 - a binary file object
    size: int = file.seek(0, os.SEEK_END)
    end = size
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        found: int = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _plain(value: Any) -> Any:  # noqa: ANN401 - json's hook takes and gives anything
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise ValueError(f"only plain values go into JSON, but got {value!r}")
