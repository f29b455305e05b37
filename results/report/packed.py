"""A table as bytes that a page can read: columns packed, deflated, in base64. Knows nothing of what a page shows.

A column is one value for all rows, a dictionary with codes, or numbers. Numbers are kept to seven digits (float32) but
for columns named exact. Fifty thousand rows of a front take about ten megabytes where every number differs.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from results.table import Table

__all__ = ["Packed", "packed"]

_FEW = 65536  # distinct values that a code of two bytes can tell
_ALIGNED = 8  # bytes: where a typed array of a browser may begin
_SHARE = 4  # a dictionary pays where rows repeat each value so often


@dataclass(slots=True)
class Packed:
    """Columns as `columns` describes them, their bytes, deflated in base64, as `text`."""

    num_rows: int
    columns: list[dict[str, Any]] = field(default_factory=list)
    _parts: list[bytes] = field(default_factory=list)
    _size: int = 0

    def add(self, name: str, values: NDArray[Any], *, exact: bool = False, about: Mapping[str, Any]) -> None:
        """One column; `about` goes with its description."""
        told = {"name": name, **about}
        distinct, codes = np.unique(values.astype(str) if values.dtype == object else values, return_inverse=True)
        plain = [_plain(value) for value in distinct]
        if len(distinct) == 1 and plain[0] is not None:
            self.columns.append(told | {"kind": "same", "value": plain[0]})
        elif len(distinct) < min(_FEW, max(len(values) // _SHARE, 2)) or values.dtype == object:
            self.columns.append(told | {"kind": "codes", "values": plain} | self._array(_codes(codes, len(distinct))))
        else:
            numbers = values.astype(np.float64 if exact else np.float32)
            self.columns.append(told | {"kind": "numbers"} | self._array(numbers))

    def texts(self, name: str, rows: list[list[str]]) -> None:
        """Several texts a row, from one dictionary: `starts` has num_rows + 1 places into the codes."""
        distinct = {text: code for code, text in enumerate(dict.fromkeys(text for row in rows for text in row))}
        flat = np.array([distinct[text] for row in rows for text in row], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.uint32)
        told = {"name": name, "kind": "texts", "values": list(distinct)}
        self.columns.append(told | self._array(_codes(flat, len(distinct))) | {"starts": self._array(starts)})

    @property
    def text(self) -> str:
        """All bytes, deflated, in base64."""
        return base64.b64encode(zlib.compress(b"".join(self._parts), 6)).decode("ascii")

    def _array(self, values: NDArray[Any]) -> dict[str, Any]:
        """Where an array lies, and of what type it is."""
        content = values.astype(values.dtype.newbyteorder("<")).tobytes()
        padding = -len(content) % _ALIGNED
        told = {"at": self._size, "length": len(values), "type": values.dtype.name}
        self._parts += [content, bytes(padding)]
        self._size += len(content) + padding
        return told


def packed(table: Table, about: Mapping[str, Mapping[str, Any]], exact: Collection[str] = ()) -> Packed:
    """The columns of a table that `about` describes, in its order."""
    out = Packed(len(table))
    for name, told in about.items():
        out.add(name, table[name], exact=name in exact, about=told)
    return out


def _codes(codes: NDArray[Any], count: int) -> NDArray[Any]:
    return codes.reshape(-1).astype(np.uint8 if count <= 256 else np.uint16 if count <= _FEW else np.uint32)


def _plain(value: Any) -> Any:  # noqa: ANN401 - a cell of any plain type
    """A value as JSON has it; what is not a number becomes null."""
    plain = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(plain, float) and not np.isfinite(plain) else plain
