"""Fits matrix products: memory's bandwidth from thin ones, the tile model's rate, ramp and slowdown from the others.

seconds = kernel_s + max(tiles (1 + x), bytes / bandwidth) + quantisation, x = slowdown T / (T + STEADY_S) for T seconds
of tiles: a product that lasts draws the power that clocks fall under, as every product inside a training step does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from capture.fits import Chip, Fit, frameworks
from capture.fitting import Parameter, Quality, central, fit, held_out, quality
from capture.op_tables import OpTable
from estimator.cost.curves import tile_seconds
from hardware.dtype import DType
from hardware.units import US

__all__ = ["THIN", "fit_bandwidth", "fit_products", "product_seconds"]

THIN = 16  # rows up to which a product only reads its weight
LARGE_BYTES = 2.0**30  # of a weight: far beyond the L2 of any chip here (126 MB), so that it comes from memory
SMALL_BYTES = 2.0**18  # a tenth of a microsecond of these chips' memory
STEADY_S = 1e-3  # seconds after which half of the slowdown shows; assumption: power is controlled within milliseconds
LEAST_ROWS, LEAST_WIDTH = 256, 512  # of products that the tile model is fitted to: those of training
FEWEST = 8  # points of a fit
RANGES: Mapping[str, int] = {"m, n, k from 1024": 1024, "from 4096": 4096}
STORED = {"fp8_block": DType.FP8}  # formats of tables that are a way to scale another one


def stored(name: str) -> DType:
    """The number format of a table's dtype."""
    return STORED.get(name) or DType(name)


def product_seconds(
    m: np.ndarray, n: np.ndarray, k: np.ndarray, *, width: float, chip: Chip, flops_per_s: float, ramp_k: float,
    slowdown: float, bytes_per_s: float, kernel_s: float, cast_bytes: float,
) -> np.ndarray:  # fmt: skip
    """Seconds of a measured product; `cast_bytes` per element of its input are moved to quantise that."""
    tiles = tile_seconds(1.0, m, k, n, num_sms=chip.num_sms, flops_per_s=flops_per_s, ramp_k=ramp_k)
    tiles = np.asarray(tiles) * (1.0 + slowdown * tiles / (tiles + STEADY_S))
    moved = ((m * k + k * n) * width + m * n * 2.0) / bytes_per_s
    return kernel_s + np.maximum(tiles, moved) + cast_bytes * m * k / bytes_per_s


def fit_bandwidth(table: OpTable, chip: Chip) -> Fit | None:
    """Achieved share of memory's bandwidth, and the floor of a kernel: kernel_s + bytes / (peak share).

    From thin products: the floor is the median of those that read next to nothing, the share what the best tenth reach
    of those whose weight is in no cache, with the fastest framework of each shape. Memory is no slower than the best
    that was seen of it. None without both kinds in 16-bit (else 32-bit) numbers.
    """
    dtype = next((d for d in ("bf16", "fp16", "fp32") if d in set(table.texts["dtype"])), None)
    if dtype is None:
        return None
    width = stored(dtype).nbytes
    thin = table.where((table.texts["dtype"] == dtype) & (table.numbers["m"] <= THIN))
    if not thin.num_rows:
        return None
    (m, n, k), seconds = _fastest([thin.numbers[name] for name in "mnk"], thin.numbers["latency_us"] * US)
    moved = (m * k + k * n) * width + m * n * 2.0
    small, large, out = moved < SMALL_BYTES, k * n * width >= LARGE_BYTES, held_out(m, n, k)
    if (large & ~out).sum() < FEWEST or (small & ~out).sum() < FEWEST:
        return None
    kernel_s = float(np.median(seconds[small & ~out]))
    rates = moved[large & ~out] / (seconds[large & ~out] - kernel_s)
    share = float(np.quantile(rates, 0.9)) / chip.hbm_bytes_per_s
    used = small | large
    predicted = kernel_s + moved / (chip.hbm_bytes_per_s * share)
    errors = {name: quality(predicted[part & out], seconds[part & out], int((used & ~out).sum()))
              for name, part in (("all", used), (f"weights from {LARGE_BYTES / 2**20:.0f} MiB", large))}  # fmt: skip
    return Fit(
        subject=f"memory, thin products {dtype}", values={"kernel_s": kernel_s, "hbm_efficiency": share},
        errors=errors, num_rows=int(thin.num_rows), measured_by=frameworks(thin.texts.get("framework")),
    )  # fmt: skip


def _fastest(sizes: list[np.ndarray], seconds: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    order = np.lexsort((seconds, *reversed(sizes)))
    ordered = [size[order] for size in sizes]
    first = np.ones(len(order), dtype=bool)
    first[1:] = np.any([size[1:] != size[:-1] for size in ordered], axis=0)
    return [size[first] for size in ordered], seconds[order][first]


def fit_products(table: OpTable, chip: Chip, dtype: str, memory: Mapping[str, float], slowdown: float | None) -> Fit:
    """The tile model's parameters of one format.

    `memory`: kernel_s and hbm_efficiency, as `fit_bandwidth` found them. `slowdown`: that of another format of the
    chip; None fits it, where products are there that end before clocks fall and products that do not. ValueError with
    fewer than eight products of training's sizes.
    """
    rows = table.where(table.texts["dtype"] == dtype)
    (m, n, k), seconds, _ = central([rows.numbers[name] for name in "mnk"], rows.numbers["latency_us"] * US)
    used = (m >= LEAST_ROWS) & (np.minimum(n, k) >= LEAST_WIDTH)
    if used.sum() < FEWEST:
        law = f"a fit of {dtype} products needs {FEWEST} shapes with m from {LEAST_ROWS} and n, k from {LEAST_WIDTH}"
        raise ValueError(f"{table.path}, column m: {law}, but got {int(used.sum())}; measure larger products")
    m, n, k, seconds = m[used], n[used], k[used], seconds[used]
    form = stored(dtype)
    peak, bandwidth = chip.flops_per_s[form.value], chip.hbm_bytes_per_s * memory["hbm_efficiency"]
    casts = form.nbytes < 2.0
    steady = slowdown is None and seconds.min() < 0.1 * STEADY_S and seconds.max() > 3.0 * STEADY_S
    out = held_out(m, n, k)
    start, floor = (0.05 if steady else slowdown or 0.0), memory["kernel_s"] / US
    parameters = (
        Parameter(start=0.7, low=0.01, high=1.0, step=0.05),
        Parameter(start=128.0, low=0.0, high=2048.0, step=64.0),
        Parameter(start=start, low=0.0, high=1.0, step=0.05 if steady else 0.0),
        Parameter(start=3.0 if casts else 0.0, low=0.0, high=50.0, step=1.0 if casts else 0.0),
        Parameter(start=floor, low=0.0, high=100.0 * floor, step=0.5 * floor),
    )

    def predict(at: np.ndarray, where: np.ndarray) -> np.ndarray:
        return product_seconds(
            m[where], n[where], k[where], width=form.nbytes, chip=chip, flops_per_s=peak * at[0], ramp_k=at[1],
            slowdown=at[2], bytes_per_s=bandwidth, kernel_s=at[4] * US, cast_bytes=at[3],
        )  # fmt: skip

    seen = ~out
    found = fit(lambda at: predict(at, seen), seconds[seen], parameters)
    values = {
        "gemm_efficiency": found[0],
        "gemm_ramp_k": found[1],
        "slowdown": found[2],
        "gemm_kernel_s": found[4] * US,
    }
    if casts:
        values["cast_bytes"] = found[3]
    return Fit(
        subject=f"gemm {dtype}", values=values, errors=_by_size(lambda w: predict(found, w), m, n, k, seconds, out),
        num_rows=rows.num_rows, measured_by=frameworks(rows.texts.get("framework")),
    )  # fmt: skip


def _by_size(
    predict: Callable[[np.ndarray], np.ndarray], m: np.ndarray, n: np.ndarray, k: np.ndarray, seconds: np.ndarray,
    out: np.ndarray,
) -> dict[str, Quality]:  # fmt: skip
    least = np.minimum(np.minimum(n, k), m)
    parts = {"all": out} | {name: out & (least >= size) for name, size in RANGES.items()}
    num_fitted = int((~out).sum())
    return {name: quality(predict(part), seconds[part], num_fitted) for name, part in parts.items()}
