"""Tables of measured operators that a chip brings: from files and folders to data that prices look up.

A file is CSV, gzipped or not, or Parquet with the same columns (what `search measure` writes, docs/fusion.md); a folder
stands for its tables. Of each shape a product has the median of its rows, attention the fastest kernel. Streams,
collectives and efficiencies are for `search calibrate`: by itself such a file is refused, in a folder it is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from capture.fit_attention import NOT_PREFILL
from capture.fit_products import stored
from capture.fitting import central
from capture.op_tables import Kind, OpTable, read_table, table_of
from hardware.dtype import DType
from hardware.op_times import COLUMNS, OpTimes
from hardware.system import SystemSpec
from hardware.units import US

__all__ = ["op_times", "with_tables"]

ENDINGS = (".csv", ".csv.gz", ".parquet")
SIZES = {Kind.GEMM: ("m", "n", "k"), Kind.ATTENTION: ("batch", "seq", "heads", "kv_heads", "head_dim")}
Tables = dict[str, dict[str, np.ndarray]]


def with_tables(system: SystemSpec, paths: Sequence[str | Path]) -> SystemSpec:
    """The system with tables of its chip's operators."""
    if system.segments:
        law = "tables are of one kind of chip, but the system has segments"
        raise ValueError(f"{law} ({system.told_chips}); give each segment its own")
    return replace(system, chip=replace(system.chip, times=op_times(paths)))


def op_times(paths: Sequence[str | Path]) -> OpTimes:
    """The operators of files and folders. ValueError names the file that is no such table."""
    files = [file for path in paths for file in _files(Path(path))]
    parts: dict[str, dict[str, list[np.ndarray]]] = {}
    for file, is_asked_for in files:
        table = _read(file)
        if table.kind not in SIZES:
            if is_asked_for:
                law = "tables of products and of attention are looked up"
                raise ValueError(
                    f"{file}: {law}, but this has rows of kind {table.kind.value}; give it to search calibrate"
                )
            continue
        for part, rows in _parts(table):
            parts.setdefault(table.kind.value, {}).setdefault(part, []).append(rows)
    if not parts:
        told = ", ".join(str(path) for path in paths)
        raise ValueError(
            f"{told}: a folder of measured operators has products or attention, but this has none; measure some"
        )
    whole = {kind: {part: _distinct(kind, rows) for part, rows in of.items()} for kind, of in parts.items()}
    return OpTimes.of(", ".join(Path(path).name for path in paths), whole)


def _files(path: Path) -> list[tuple[Path, bool]]:
    """Each with whether it was named by itself."""
    if not path.is_dir():
        return [(path, True)]
    found = sorted(file for file in path.iterdir() if file.name.endswith(ENDINGS))
    if not found:
        raise ValueError(f"{path}: a folder of tables has files {', '.join(ENDINGS)}, but this has none; give tables")
    return [(file, False) for file in found]


def _read(file: Path) -> OpTable:
    if file.suffix != ".parquet":
        return read_table(file)
    from results.parquet import read_texts

    names, columns = read_texts(file)
    return table_of(file, names, [(i + 1, list(row)) for i, row in enumerate(zip(*columns, strict=True))])


def _parts(table: OpTable) -> list[tuple[str, np.ndarray]]:
    """Rows [N, sizes and seconds] by format, of attention by format and pass."""
    num = table.num_rows
    rows = np.stack([*(table.numbers[name] for name in SIZES[table.kind]), table.numbers["latency_us"] * US], axis=1)
    formats = [stored(name or DType.BF16.value).value for name in table.texts.get("dtype", [DType.BF16.value] * num)]
    names = np.array(formats, dtype=object)
    good = np.ones(num, dtype=bool)
    if table.kind is Kind.ATTENTION:
        good = np.array([NOT_PREFILL not in name for name in table.texts["kernel_source"]])
        passes = table.texts.get("pass", np.array(["forward"] * num, dtype=object))
        names = names + " " + passes
    return [(str(name), rows[good & (names == name)]) for name in sorted(set(names[good]))]


def _distinct(kind: str, parts: list[np.ndarray]) -> np.ndarray:
    """One row for each shape."""
    rows = np.concatenate(parts)
    if kind == Kind.GEMM.value:
        sizes, seconds, _ = central(list(rows[:, :-1].T), rows[:, -1])
        told = np.array([float(f"{s:.9g}") for s in seconds.tolist()])  # a row's own figure, without logarithms' noise
        return np.stack([*sizes, told], axis=1)
    order = np.lexsort(tuple(rows.T[::-1]))
    rows = rows[order]
    first = np.ones(len(rows), dtype=bool)
    first[1:] = np.any(rows[1:, :-1] != rows[:-1, :-1], axis=1)
    assert rows.shape[1] == len(COLUMNS[kind])
    return rows[first]
