"""Fits grouped products of experts against single ones of the same table: what each expert costs besides its tiles.

seconds = max(tiles, bytes / bandwidth) + experts * group_s, with the rate that the table's own single products reach
(tables of efficiencies differ from others in it by a third). Forward and gradients of inputs only: those of weights
write fp32. Nothing in the estimator uses it: docs/hardware.md says why.
"""

from __future__ import annotations

import re

import numpy as np

from capture.fits import Chip, Fit
from capture.fitting import Parameter, fit, held_out, quality
from capture.op_tables import OpTable
from estimator.cost.curves import tile_seconds
from hardware.units import US

__all__ = ["fit_grouped"]

FEWEST = 12  # points of a fit
RAMP_K = 128.0  # of the tile model, where the table cannot tell it from the rate
FORMAT = "dtype=bf16"


def fit_grouped(table: OpTable, chip: Chip, hbm_efficiency: float) -> Fit | None:
    """What each expert costs; None with fewer than a dozen grouped or single bf16 products."""
    texts, share = table.texts, table.numbers["efficiency"]
    measured = texts["kind"] == "measured"
    single = measured & (texts["op"] == "matmul")
    stage = np.array(["stage=bwd_grad_w" not in shape and FORMAT in shape for shape in texts["shape"]])
    grouped = measured & (texts["op"] == "group_matmul") & stage
    if single.sum() < FEWEST or grouped.sum() < FEWEST:
        return None
    peak = chip.flops_per_s["bf16"]
    rate = peak * _single_share(_sizes(table, single, ("b", "m", "k", "n")), share[single], chip, peak)
    groups, m, n, k = _sizes(table, grouped, ("ng", "M", "N", "K"))
    seconds = 2.0 * groups * m * n * k / (share[grouped] * peak)
    tiles = np.asarray(tile_seconds(groups, m, k, n, num_sms=chip.num_sms, flops_per_s=rate, ramp_k=RAMP_K))
    bound = np.maximum(tiles, 2.0 * groups * (m * k + k * n + m * n) / (chip.hbm_bytes_per_s * hbm_efficiency))
    out = held_out(groups, m, n, k)
    each = (Parameter(start=5.0, low=0.0, high=1e3, step=2.0),)
    found = fit(lambda at: (bound + groups * at[0] * US)[~out], seconds[~out], each)
    predicted = bound + groups * found[0] * US
    parts = {"all": out, "m below 512 an expert": out & (m < 512), "from 512": out & (m >= 512)}
    errors = {name: quality(predicted[w], seconds[w], int((~out).sum())) for name, w in parts.items()}
    values = {"group_s": found[0] * US, "single_share": rate / peak}
    return Fit(subject="grouped bf16", values=values, errors=errors, num_rows=int(grouped.sum()))


def _single_share(sizes: list[np.ndarray], share: np.ndarray, chip: Chip, peak: float) -> float:
    """The share of peak that single products of the table reach in the tile model."""
    b, m, k, n = sizes
    tiles = np.asarray(tile_seconds(b, m, k, n, num_sms=chip.num_sms, flops_per_s=peak, ramp_k=RAMP_K))
    return float(np.median(tiles / (2.0 * b * m * k * n / (share * peak))))


def _sizes(table: OpTable, chosen: np.ndarray, names: tuple[str, ...]) -> list[np.ndarray]:
    """Numbers of the `name=value` lists of some rows. ValueError where one is missing."""
    found = []
    for shape in table.texts["shape"][chosen]:
        hits = [re.search(rf"(?:^|[ ,]){name}=(\d+)", shape) for name in names]
        numbers = [float(hit.group(1)) for hit in hits if hit]
        if len(numbers) < len(names):
            law = f"{table.path}, column shape: a shape of this kind has {', '.join(names)}"
            raise ValueError(f"{law}, but got {shape!r}; write each as name=number")
        found.append(numbers)
    return list(np.array(found).T)
