"""The journal file of a study as lines of JSON: read after any crash, appended to durably. Knows nothing of Optuna.

A line that a crash cut is kept in a file beside the journal and left out; damage anywhere else is refused, for what
follows a lost line would mean something else.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results.files import as_user_error, dump_json, write_bytes

__all__ = ["append_records", "read_records", "set_cut_aside"]


def set_cut_aside(path: Path) -> str:
    """Moves a last line without its line break to `NAME.cut-N`; what was done in one line, empty where nothing was."""
    if not path.exists():
        return ""
    with as_user_error(path, "read"):
        content = path.read_bytes()
    tail = content[content.rfind(b"\n") + 1 :]
    if not tail:
        return ""
    side = next(p for i in itertools.count(1) if not (p := path.with_name(f"{path.name}.cut-{i}")).exists())
    write_bytes(side, tail)
    with as_user_error(path, "cut"):
        os.truncate(path, len(content) - len(tail))
    return f"{path.name} ended in the middle of a line: its {len(tail)} bytes are kept in {side.name}, the rest goes on"


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every line of the journal; ValueError that names the first that is none of Optuna's records."""
    if not path.exists():
        return []
    with as_user_error(path, "read"):
        lines = path.read_bytes().split(b"\n")[:-1]
    return [_record(path, number, line) for number, line in enumerate(lines, start=1)]


def append_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Appends one line a record, all in one write; when this returns they are on disk."""
    text = "".join(dump_json(record) + "\n" for record in records)
    with as_user_error(path, "append"), path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("op_code"), int) or "worker_id" not in record:
        record = None
    elif not all(isinstance(value, int | float) for value in record.get("values") or ()):
        record = None
    if record is None:
        raise ValueError(
            f"{path}:{number}: each line must be a record of an Optuna journal, but got {line[:60]!r}; put the file "
            "right from a copy, or launch anew with --warm"
        )
    return record
