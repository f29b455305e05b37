"""Reads and writes one Parquet file of a run: the only place that knows pyarrow. A file is whole or absent.

Files are small and read whole, from bytes and in the calling thread: a pool of Arrow's that still holds a Python file
when the interpreter ends may abort a process that has done its work (github.com/apache/arrow/issues/34314).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from results.files import write_bytes
from results.schema import SCHEMA_VERSION, Field, Plain
from results.table import Table

__all__ = ["read_table", "read_texts", "write_table"]

_VERSION_KEY = b"schema_version"


def write_table(path: Path, table: Table, fields: tuple[Field, ...], metadata: Mapping[str, str]) -> None:
    """Writes the table at once; units and descriptions go with each column, `metadata` with the file."""
    header = {_VERSION_KEY: str(SCHEMA_VERSION).encode()} | {k.encode(): v.encode() for k, v in metadata.items()}
    schema = pa.schema([_arrow_field(field) for field in fields], metadata=header)
    arrays = [pa.array(table[field.name], type=_arrow_type(field)) for field in fields]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
    write_bytes(path, sink.getvalue().to_pybytes())


def read_texts(path: Path) -> tuple[list[str], list[list[str]]]:
    """Names and cells, as text, of a Parquet file that others wrote; ValueError where it is none."""
    try:
        arrow = pq.ParquetFile(pa.BufferReader(path.read_bytes()), pre_buffer=False).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        cause = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a whole Parquet file ({cause}); give another") from error
    cells = [["" if cell is None else str(cell) for cell in column.to_pylist()] for column in arrow.columns]
    return list(arrow.schema.names), cells


def read_table(path: Path, fields: tuple[Field, ...]) -> Table:
    """The table of a file; ValueError when it is absent, half-written, of another version or lacks a column.

    A column with a default may be absent: older runs did not have it.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file, the run ended before it wrote it; `search resume {path.parent}` goes on"
        )
    try:
        source = pa.BufferReader(path.read_bytes())
        arrow = pq.ParquetFile(source, pre_buffer=False).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        cause = str(error).splitlines()[0]
        raise ValueError(f"{path}: not a whole Parquet file ({cause}); resume the run to write it again") from error
    version = (arrow.schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if version != str(SCHEMA_VERSION):
        raise ValueError(f"{path}: schema version must be {SCHEMA_VERSION}, but the file has {version}")
    for field in fields:
        position = arrow.schema.get_field_index(field.name)
        if position < 0 and field.default is not None:
            arrow = arrow.append_column(
                _arrow_field(field), [pa.array([field.default] * len(arrow), _arrow_type(field))]
            )
        elif position < 0 or arrow.schema.field(position).type != _arrow_type(field):
            raise ValueError(
                f"{path}: column {field.name!r} must be there as {field.kind.value}; have {arrow.schema.names}"
            )
    return Table(columns={field.name: _column(arrow[field.name], field) for field in fields})


def _arrow_type(field: Field) -> Any:  # noqa: ANN401 - pyarrow carries no types
    return {Plain.INT64: pa.int64, Plain.FLOAT64: pa.float64, Plain.STRING: pa.string, Plain.BOOL: pa.bool_}[
        field.kind
    ]()


def _arrow_field(field: Field) -> Any:  # noqa: ANN401 - pyarrow carries no types
    return pa.field(
        field.name, _arrow_type(field), nullable=False, metadata={"unit": field.unit, "description": field.description}
    )


def _column(chunks: Any, field: Field) -> np.ndarray:  # noqa: ANN401 - pyarrow carries no types
    if field.kind is Plain.STRING:
        texts = np.empty(len(chunks), dtype=object)
        texts[:] = chunks.to_pylist()
        return texts
    column: np.ndarray = chunks.to_numpy()
    return column
