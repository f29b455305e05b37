"""Fits operations bound by memory: kernel_s + bytes / (peak share), the achieved bandwidth against size."""

from __future__ import annotations

import numpy as np

from capture.fits import Chip, Fit, frameworks, octaves
from capture.fitting import Parameter, central, fit, held_out, quality
from capture.op_tables import OpTable
from hardware.units import US

__all__ = ["fit_streams"]

FEWEST = 8  # points of a fit


def fit_streams(table: OpTable, chip: Chip) -> Fit | None:
    """One curve through all streaming operations of a table; None with fewer than eight sizes."""
    names, at_name = np.unique(table.texts["op"].astype(str), return_inverse=True)
    (op, nbytes), seconds, _ = central(
        [at_name.astype(np.float64), table.numbers["bytes"]], table.numbers["latency_us"] * US
    )
    if len(seconds) < FEWEST:
        return None
    out = held_out(op, nbytes, apart=True)
    seen = ~out
    floor = float(seconds.min()) / US

    def predict(at: np.ndarray, where: np.ndarray) -> np.ndarray:
        return at[0] * US + nbytes[where] / (chip.hbm_bytes_per_s * at[1])

    found = fit(
        lambda at: predict(at, seen), seconds[seen],
        (Parameter(start=floor, low=0.0, high=100.0 * floor, step=0.5 * floor),
         Parameter(start=0.7, low=0.005, high=1.0, step=0.1)),
        weights=octaves(nbytes[seen]),
    )  # fmt: skip
    return Fit(
        subject="memory, streams", values={"kernel_s": found[0] * US, "hbm_efficiency": found[1]},
        errors={"all": quality(predict(found, out), seconds[out], int(seen.sum()))}, num_rows=table.num_rows,
        measured_by=frameworks(table.texts.get("framework")), remark=", ".join(names),
    )  # fmt: skip
