"""Reads tables of measured operators: CSV files, gzipped or not, to columns of checked numbers.

The header decides what a table holds. A file that is no such table is refused with one line; a row that cannot be true
is left out and told, with its line and column. Knows nothing of fits.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np

from hardware.units import US

__all__ = ["Kind", "OpTable", "read_table", "table_of"]

MOST_FAULTS = 0.1  # share of rows that may be left out; with more, the file holds something else. An assumption
TOLD_FAULTS = 5  # of a file, by name
MOST_SECONDS = 3600.0  # of one operator; an assumption: longer is a wrong unit


class Kind(Enum):
    """What one row of a table measures."""

    GEMM = "gemm"
    ATTENTION = "attention"
    STREAM = "stream"  # an operation bound by memory
    COLLECTIVE = "collective"
    SHARE = "share"  # efficiency of named shapes: grouped products, attention both ways


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """The columns of one kind: counts are whole and at least 1, `seconds` is the column of microseconds."""

    counts: tuple[str, ...]
    texts: tuple[str, ...]
    optional: tuple[str, ...]
    seconds: str | None
    others: Mapping[str, str] = field(default_factory=dict)  # names that other tables give a column


_SHAPES = {
    Kind.GEMM: _Shape(counts=("m", "n", "k"), texts=("dtype",), optional=("framework",), seconds="latency_us"),
    Kind.ATTENTION: _Shape(
        counts=("batch", "seq", "heads", "kv_heads", "head_dim"), texts=("kernel_source",),
        optional=("framework", "dtype", "pass"), seconds="latency_us",
    ),
    Kind.STREAM: _Shape(counts=("bytes",), texts=("op",), optional=("dtype", "framework"), seconds="latency_us"),
    Kind.COLLECTIVE: _Shape(
        counts=("bytes", "gpus", "nodes"), texts=("collective", "gpu"), optional=("source", "version"),
        seconds="time_us", others={"op_name": "collective", "num_gpus": "gpus"},
    ),
    Kind.SHARE: _Shape(counts=(), texts=("system", "op", "shape", "kind"), optional=(), seconds=None),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """One file: its kind, numbers and texts by column [rows], and the faults of rows that were left out."""

    path: Path
    kind: Kind
    numbers: Mapping[str, np.ndarray]
    texts: Mapping[str, np.ndarray]
    faults: tuple[str, ...]

    @property
    def num_rows(self) -> int:
        """Rows that are whole."""
        return len(next(iter({**self.numbers, **self.texts}.values())))

    def where(self, chosen: np.ndarray) -> OpTable:
        """The rows of a mask."""
        return OpTable(
            path=self.path, kind=self.kind, faults=self.faults,
            numbers={name: values[chosen] for name, values in self.numbers.items()},
            texts={name: values[chosen] for name, values in self.texts.items()},
        )  # fmt: skip


def read_table(path: Path) -> OpTable:
    """The operators of one file. ValueError with file, row and column where it is no such table."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        rows = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: not CSV ({error}); give a table of operators") from error
    return table_of(path, header, rows)


def table_of(path: Path, header: Sequence[str], rows: list[tuple[int, list[str]]]) -> OpTable:
    """The operators of a file's rows, each with its line, under that header."""
    kind, columns = _columns(path, header)
    if not rows:
        raise ValueError(f"{path}: a table of operators has rows, but got none below its header; measure something")
    return _checked(path, kind, columns, header, rows)


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot read: {error.strerror or error}; give a file of measured operators"
        ) from error
    if path.suffix == ".gz" or raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not a whole gzip file ({error}); give a .csv.gz or a plain .csv") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 (byte {error.start}); give a CSV file") from error


def _columns(path: Path, header: Sequence[str]) -> tuple[Kind, dict[str, int]]:
    """The kind whose columns a header has most of, and where each stands."""
    best: tuple[int, Kind, list[str], dict[str, int]] | None = None
    for kind, shape in _SHAPES.items():
        names = [shape.others.get(name, name) for name in header]
        at = {name: i for i, name in reversed(list(enumerate(names)))}
        value = [shape.seconds] if shape.seconds else ["efficiency"]
        wanted = [*shape.counts, *shape.texts, *value]
        missing = [name for name in wanted if name not in at and name != "nodes"]  # empty: one node
        score = len(wanted) - 2 * len(missing)
        if best is None or score > best[0]:
            best = score, kind, missing, at
    assert best is not None
    _, kind, missing, at = best
    if missing:
        known = ", ".join((*_SHAPES[kind].counts, *_SHAPES[kind].texts, _SHAPES[kind].seconds or "efficiency"))
        raise ValueError(
            f"{path}, line 1: a table of operators has all columns of its kind, but {missing[0]} is missing; "
            f"{kind.value} tables, the nearest kind, have {known}"
        )
    return kind, at


def _checked(
    path: Path, kind: Kind, at: Mapping[str, int], header: Sequence[str], rows: list[tuple[int, list[str]]]
) -> OpTable:
    shape = _SHAPES[kind]
    whole = [(line, row) for line, row in rows if len(row) == len(header)]
    torn = [(line, row) for line, row in rows if len(row) != len(header)]
    faults = [f"line {line}: {len(row)} cells under {len(header)} columns" for line, row in torn]
    good = np.ones(len(whole), dtype=bool)
    numbers: dict[str, np.ndarray] = {}
    by_bus = "busbw_gbps" in at and shape.seconds is not None  # may stand in for an empty time
    for name in (*shape.counts, shape.seconds or "efficiency", *(("busbw_gbps",) if by_bus else ())):
        if name not in at:
            numbers[name] = np.ones(len(whole))  # `nodes` of tables inside one
            continue
        cells = [row[at[name]] for _, row in whole]
        numbers[name] = _numbers(cells)
        for bad, law in _offences(name, shape, numbers[name], cells, may_be_empty=by_bus and name not in shape.counts):
            for i in np.flatnonzero(bad & good)[:TOLD_FAULTS]:
                faults.append(f"line {whole[i][0]}, column {name}: {law}, but got {cells[i]!r}")
            good &= ~bad
    if by_bus:
        good &= np.isfinite(numbers[str(shape.seconds)]) | np.isfinite(numbers["busbw_gbps"])
    texts = {name: np.array([row[at[name]].strip() for _, row in whole], dtype=object)
             for name in (*shape.texts, *shape.optional) if name in at}  # fmt: skip
    num_bad = len(rows) - int(good.sum())
    if num_bad > MOST_FAULTS * len(rows):
        first = faults[0] if faults else "every row has neither a time nor a bandwidth"
        raise ValueError(
            f"{path}, {first}; {num_bad} of {len(rows)} rows are like this: check the units (times in microseconds)"
        )
    table = OpTable(path=path, kind=kind, numbers=numbers, texts=texts, faults=_told(path, faults, num_bad))
    return table.where(good)


def _offences(
    name: str, shape: _Shape, values: np.ndarray, cells: Sequence[str], *, may_be_empty: bool
) -> list[tuple[np.ndarray, str]]:
    """Which rows break which law of a column."""
    known = np.isfinite(values)
    empty = np.zeros_like(known)
    if may_be_empty and not known.all():
        empty = np.array([not cell.strip() for cell in cells])
    found = [(~known & ~empty, "must be a number")]
    if name in shape.counts:
        found.append((known & (values < 1.0), "must be at least 1"))
        found.append((known & (values != np.floor(values)), "must be whole"))
    else:
        found.append((known & (values <= 0.0), "must be above 0"))
    if name == shape.seconds:
        found.append((known & (values > MOST_SECONDS / US), f"must be below {MOST_SECONDS:g} s, in microseconds"))
    return found


def _told(path: Path, told: list[str], count: int) -> tuple[str, ...]:
    more = [f"{path}: {count - TOLD_FAULTS} more rows like these"] if count > TOLD_FAULTS else []
    return (*(f"{path}, {text}; the row is left out" for text in told[:TOLD_FAULTS]), *more)


def _numbers(cells: list[str]) -> np.ndarray:
    """Numbers of one column; NaN where a cell holds none."""
    try:
        return np.array(cells, dtype=np.float64)
    except ValueError:
        return np.array([_number(cell) for cell in cells])


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return math.nan
