"""A small column table, the form in which fronts travel between store, reports and plans. Knows no file format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of equal length, `[N]` each; strings are object arrays.

    >>> table = Table(columns={"id": np.array([7, 3]), "step_time_s": np.array([2.0, 1.0])})
    >>> len(table), table.sort("step_time_s").row(0)
    (2, {'id': 3, 'step_time_s': 1.0})
    """

    columns: Mapping[str, NDArray[Any]]

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns of a table must have one length, but got {lengths}")

    def __len__(self) -> int:
        return next((len(column) for column in self.columns.values()), 0)

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self.columns:
            raise ValueError(f"unknown column {name!r}; have {list(self.columns)}")
        return self.columns[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in order."""
        return tuple(self.columns)

    def take(self, indices: Sequence[int] | NDArray[Any]) -> Table:
        """The rows at these positions, in this order."""
        chosen = np.asarray(indices, dtype=np.intp)
        return Table(columns={name: column[chosen] for name, column in self.columns.items()})

    def where(self, mask: NDArray[np.bool_]) -> Table:
        """The rows whose `mask [N]` is true."""
        return self.take(np.flatnonzero(mask))

    def sort(self, by: str, *, descending: bool = False) -> Table:
        """Rows ordered by one column; equal values keep their order, NaN comes last."""
        column = self[by]
        if column.dtype == object:
            order = sorted(range(len(self)), key=lambda i: column[i], reverse=descending)
            return self.take(order)
        keys = column.astype(np.float64) if column.dtype.kind in "fb" else column
        return self.take(np.argsort(-keys if descending else keys, kind="stable"))

    def row(self, index: int) -> dict[str, Any]:
        """One row as plain Python values."""
        return {name: _plain(column[index]) for name, column in self.columns.items()}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row as plain Python values."""
        return (self.row(i) for i in range(len(self)))

    def find(self, row_id: int) -> int:
        """Position of the row with this id; ValueError when there is none."""
        hits = np.flatnonzero(self["id"] == row_id)
        if not len(hits):
            known = ", ".join(map(str, self["id"][:5].tolist()))
            have = f"the first of {len(self)} ids are {known}" if known else "there is no row"
            raise ValueError(f"no row has id {row_id}; {have}")
        return int(hits[0])


def _plain(value: Any) -> Any:  # noqa: ANN401 - cells are of any plain type
    return value.item() if isinstance(value, np.generic) else value
