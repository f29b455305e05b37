"""What calibration found: a curve's parameters, from how many points, and how wrong they are on held-out ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from capture.fitting import Quality

__all__ = ["Chip", "Fit", "frameworks", "octaves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """What a fit must know of the device: how much it can do at most. Peaks of formats that it lacks are absent."""

    name: str
    num_sms: int
    flops_per_s: Mapping[str, float]
    hbm_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One curve of one device.

    Attributes:
        subject: what was measured: `gemm bf16`, `attention flash3`, `all_reduce nvlink`.
        values: its parameters in SI units, by name.
        errors: of held-out points, by the range of sizes that they come from; the first is of all.
        num_rows: rows of the tables behind it.
        measured_by: who measured, frameworks or sources with versions.
        remark: what a reader should know beyond the numbers.
        table: the file that the rows are of.
    """

    subject: str
    values: Mapping[str, float]
    errors: Mapping[str, Quality]
    num_rows: int
    measured_by: tuple[str, ...] = ()
    remark: str = ""
    table: str = ""

    def __post_init__(self) -> None:  # plain numbers, whatever a fit computed with
        object.__setattr__(self, "values", {name: float(value) for name, value in self.values.items()})

    @property
    def error(self) -> Quality:
        """Of all held-out points."""
        return next(iter(self.errors.values()))


def octaves(work: np.ndarray) -> np.ndarray:
    """Weights under which each doubling of the work counts alike, however many shapes it holds: [rows]."""
    octave = np.floor(np.log2(work)).astype(np.int64)
    _, at, count = np.unique(octave, return_inverse=True, return_counts=True)
    weights: np.ndarray = 1.0 / count[at]
    return weights


def frameworks(names: np.ndarray | None) -> tuple[str, ...]:
    """Who measured, each once."""
    return () if names is None else tuple(sorted({str(name) for name in names if name}))
