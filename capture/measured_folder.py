"""The folder that `search measure` writes and `search calibrate` reads: tables of operators, and what they are of.

`device.json` says what no table shows: memory, multiprocessors, how many ranks trained together, who measured and when.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from capture.bench import HEADERS, Measured
from capture.device import Device

__all__ = ["DEFAULT_FOLDER", "DEVICE_FILE", "Provenance", "check_new", "is_measured", "read_folder", "write_folder"]

DEVICE_FILE = "device.json"
DEFAULT_FOLDER = "measured"  # where search measure writes, and search calibrate looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What was measured, when, and what of it was left out."""

    device: Device
    date: str
    seconds: float
    distrusted: Mapping[str, int]
    unsupported: tuple[str, ...]
    not_reached: int


def check_new(folder: Path) -> None:
    """ValueError where the folder is there already and holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: --out must be a new or empty folder, but it exists; give another, or remove it")


def is_measured(folder: Path) -> bool:
    """Whether a folder was written by `write_folder`."""
    return (folder / DEVICE_FILE).is_file()


def write_folder(folder: Path, device: Device, found: Measured, date: str) -> list[Path]:
    """The tables that have rows, and the device's file last: a folder without it is not whole."""
    check_new(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for table, rows in found.rows.items():
            if rows:
                paths.append(folder / f"{table}_{device.name}.csv")
                text = io.StringIO(newline="")
                csv.writer(text, lineterminator="\n").writerows([HEADERS[table], *map(_cells, rows)])
                paths[-1].write_text(text.getvalue(), encoding="utf-8")
        about = {
            "device": device.plain(), "date": date, "seconds": round(found.took_s, 1), "distrusted": found.distrusted,
            "unsupported": found.unsupported, "not_reached": found.not_reached,
        }  # fmt: skip
        (folder / DEVICE_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{error.filename or folder}: cannot write: {error.strerror}; give another --out") from error
    return paths


def _cells(row: tuple[object, ...]) -> list[object]:
    return [f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row]


def read_folder(folder: Path) -> tuple[Provenance, list[Path]]:
    """What a folder is of, and its tables. ValueError where it is none."""
    file = folder / DEVICE_FILE
    if not file.is_file():
        raise ValueError(
            f"{folder}: a folder of measured tables has {DEVICE_FILE}, but this has none; run search measure"
        )
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        about = {field.name: raw["device"][field.name] for field in fields(Device)}
        found = Provenance(
            device=Device(**about), date=str(raw["date"]), seconds=float(raw["seconds"]),
            distrusted=dict(raw["distrusted"]), unsupported=tuple(raw["unsupported"]), not_reached=raw["not_reached"],
        )  # fmt: skip
        _check(found.device)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: not as search measure writes it ({type(error).__name__}: {error}); measure again"
        ) from error
    tables = sorted(path for path in folder.iterdir() if path.name.endswith((".csv", ".csv.gz")))
    if not tables:
        raise ValueError(f"{folder}: a folder of measured tables has CSV files, but this has none; measure again")
    return found, tables


def _check(device: Device) -> None:
    for name in ("ranks", "threads", "num_sms", "memory_bytes"):
        value = getattr(device, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
            raise ValueError(f"{name} must be a number of at least 1, but got {value!r}")
