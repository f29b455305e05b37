"""P10 and P90 of a prediction: how far measured steps came out from predictions that were made without them.

Residuals are log(measured / predicted) of published steps, each predicted with parameters that were fitted without its
model on that chip (`search validate --cross-validate group`). They are told by cell: number of chips, dense or MoE,
silicon and format, one inside the other. Where few models on a chip lie in a cell, its quantiles are drawn towards
those of the cell around it. What is shipped is a table of quantiles, bands.yaml, with where it comes from.

A prediction's own causes of spread (estimator/band.py: routing skew and the slowest chip) are independent of how wrong
the model is, so that both add up in quadrature, each side for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import yaml

from estimator.band import HIGH, LOW, Band, evaluate_band
from estimator.model import ModelSpec
from estimator.precision import recipe
from estimator.result import StepResult, Value
from estimator.strategy import Strategy
from estimator.workload import Workload
from hardware.system import SystemSpec
from search.parameters import EIGHT_BITS, FOUR_BITS, silicon_of

__all__ = ["Cell", "Quantiles", "Residual", "cell_of", "model_error", "predicted_band", "quantile_table",
           "quantiles_of", "table_text", "widened"]  # fmt: skip

TABLE = Path(__file__).with_name("bands.yaml")
# Models on a chip that the cell around counts for: with fewer of its own, a cell hardly has a P10; assumption.
PRIOR_GROUPS = 8.0
NAMES = ("low", "high", "rows", "groups")
Cell = tuple[str, ...]
"""Scale, kind, silicon and format of a step, or the first few of them: a cell around others."""
Table = Mapping[Cell, "Quantiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """P10 and P90 of log(measured / predicted), never on the wrong side of 0, and what they rest on."""

    low: float
    high: float
    rows: int = 0
    groups: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """One left-out step. `group`: which steps share their errors, a model on a chip; `fold`: all that was left out."""

    cell: Cell
    group: Hashable
    fold: Hashable
    log_ratio: float


def cell_of(model: ModelSpec, strategy: Strategy, system: SystemSpec) -> Cell:
    """The innermost cell of a configuration.

    >>> from hardware.catalog import cluster
    >>> from estimator.model_io import load_model
    >>> import spaces
    >>> cell_of(load_model("llama3_8b", [spaces.MODELS]), Strategy(), cluster("dgx_h100", 512))
    ('to 1024 chips', 'dense', 'Hopper', '16 bits')
    """
    multiplied = recipe(strategy.precision).gemm
    bits = "8 bits" if multiplied in EIGHT_BITS else "4 bits" if multiplied in FOUR_BITS else "16 bits"
    scale = next((f"to {most} chips" for most in (8, 128, 1024) if system.num_chips <= most), "more chips")
    return scale, "MoE" if model.moe else "dense", silicon_of(system.chip), bits


def quantile_table(residuals: Sequence[Residual]) -> dict[Cell, Quantiles]:
    """Quantiles of every cell that has residuals, from the outside in."""
    table: dict[Cell, Quantiles] = {}
    depths = range(max((len(one.cell) for one in residuals), default=0) + 1)
    for depth in depths:
        for cell in dict.fromkeys(one.cell[:depth] for one in residuals):
            mine = [one for one in residuals if one.cell[:depth] == cell]
            table[cell] = _quantiles(mine, table[cell[:-1]] if cell else None)
    return table


def _quantiles(residuals: Sequence[Residual], around: Quantiles | None) -> Quantiles:
    """Of one cell, drawn towards the cell around it."""
    counts = Counter(one.group for one in residuals)
    n = len(counts)
    values = np.array([one.log_ratio for one in residuals])
    weights = np.array([counts[one.group] ** -0.5 for one in residuals])
    # Of n groups, the next one lies below the k-th lowest with probability k / (n + 1) (Weibull 1939), whose own place
    # among them is (k - 1/2) / n.
    shift = (0.5 - LOW) / n
    low, high = (_weighted(values, weights, level) for level in (max(LOW - shift, 0.0), min(HIGH + shift, 1.0)))
    if around is not None:
        own = n / (n + PRIOR_GROUPS)
        low, high = own * low + (1.0 - own) * around.low, own * high + (1.0 - own) * around.high
    return Quantiles(low=min(low, 0.0), high=max(high, 0.0), rows=len(residuals), groups=n)


def _weighted(values: np.ndarray, weights: np.ndarray, quantile: float) -> float:
    order = np.argsort(values)
    rank = np.cumsum(weights[order]) - weights[order] / 2
    return float(np.interp(quantile * weights.sum(), rank, values[order]))


def quantiles_of(cell: Cell, table: Table) -> Quantiles:
    """Of the innermost known cell around one; nothing is known of how wrong the model is where no step was left out."""
    around = (table[cell[:depth]] for depth in range(len(cell), -1, -1) if cell[:depth] in table)
    return next(around, Quantiles(low=0.0, high=0.0))


def widened(band: Band, middle: StepResult, time: Quantiles, memory: Quantiles) -> Band:
    """The band of a prediction with the model's own error around it.

    `device_memory_p90_bytes` stays: whether routing fits is another question than whether the model is right.
    """
    step, peak = middle.columns["step_time_s"], middle.columns["peak_memory_bytes"]
    return replace(
        band,
        step_time_p10_s=_end(step, band.step_time_p10_s, time.low, -1.0),
        step_time_p90_s=_end(step, band.step_time_p90_s, time.high, 1.0),
        peak_memory_p10_bytes=_end(peak, band.peak_memory_p10_bytes, memory.low, -1.0),
        peak_memory_p90_bytes=_end(peak, band.peak_memory_p90_bytes, memory.high, 1.0),
    )


def _end(middle: Value, end: Value, log_ratio: float, side: float) -> Value:
    """The end of a band and that of the model's error, in quadrature of their logarithms."""
    found = middle * np.exp(side * np.hypot(np.log(np.asarray(end) / middle), log_ratio))
    return found if isinstance(middle, np.ndarray) else float(found)


def predicted_band(
    model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload, result: StepResult
) -> Band:
    """P10 and P90 around an evaluation, with the shipped quantiles of its cell."""
    band = evaluate_band(model, strategy, system, workload, result)
    return widened(band, result, *model_error(cell_of(model, strategy, system)))


def model_error(cell: Cell) -> tuple[Quantiles, Quantiles]:
    """Shipped quantiles of step time and of memory."""
    time, memory = _shipped()
    return quantiles_of(cell, time), quantiles_of(cell, memory)


@cache
def _shipped() -> tuple[Table, Table]:
    data = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    time, memory = (
        {tuple(row["cell"]): Quantiles(**{key: row[key] for key in NAMES}) for row in data[name]}
        for name in ("step_time", "memory")
    )
    return time, memory


def table_text(time: Table, memory: Table, source: str) -> str:
    """A table as it is shipped; `source` says which steps it is of."""
    lines = [
        "# P10 and P90 of log(measured / predicted) of published training steps that the fit left out, by cell, each",
        "# drawn towards the cell around it (search/bands.py). Written by",
        "#   search validate CSV --cross-validate group --bands FILE",
        f"source: {source!r}",
    ]
    for name, table in (("step_time", time), ("memory", memory)):
        lines.append(f"{name}:")
        for cell, q in table.items():
            inside = ", ".join(f'"{word}"' for word in cell)
            lines.append(
                f"  - {{cell: [{inside}], low: {q.low:.4f}, high: {q.high:.4f}, rows: {q.rows}, groups: {q.groups}}}"
            )
    return "\n".join(lines) + "\n"
