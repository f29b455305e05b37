"""One measured row on its way: what it ran, what it measured, what is predicted of it, and how far off that is.

Errors are fractions: predicted / measured - 1. Whatever is wrong with a row becomes the reason why it is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from estimator.model import ModelSpec
from estimator.precision import recipe
from estimator.strategy import Strategy
from estimator.tables import model_flops_per_token
from estimator.workload import Workload
from hardware.system import SystemSpec
from hardware.units import GIB
from search.configuration import Configuration, configuration
from search.measured import Measured, Row, measured_of

__all__ = ["Case", "Folds", "Predict", "case_of", "fold_of", "kin_of", "predict_case"]


class Folds(Enum):
    """What is left out when shared parameters are fitted: nothing, a model on a chip, a family."""

    NONE = "none"
    GROUP = "group"
    FAMILY = "family"


class Prediction(Protocol):
    """What scoring needs of a StepResult."""

    @property
    def step_time_s(self) -> Any:  # noqa: ANN401  # a number, or an array of one
        """Seconds of a step."""

    @property
    def reason(self) -> Any:  # noqa: ANN401  # as above
        """Why there is no step time."""


Predict = Callable[[ModelSpec, Strategy, SystemSpec, Workload], Prediction]

_COUNTERS = {
    "allocated": "peak_memory_bytes",
    "reserved": "reserved_memory_bytes",
    "nvidia-smi": "device_memory_bytes",
    "unknown": "peak_memory_bytes",
    "": "peak_memory_bytes",
}
LEAST_MFU = 1e-3  # milliseconds taken for seconds come out below; published steps are above a percent
ROUNDED_MEMORY = 1.1  # figures in GB under a column of GiB, and boxes that say more than the driver gives


@dataclass(slots=True, kw_only=True)
class Case:
    """One row on its way through prediction and scoring."""

    row: Row
    config: Configuration | None = None
    result: Prediction | None = None
    predicted_s: float | None = None
    predicted_bytes: float | None = None
    band_s: tuple[float, float] | None = None
    measured_s: float | None = None
    measured_bytes: float | None = None
    assumed: tuple[str, ...] = ()
    skipped: str | None = None

    @property
    def family(self) -> str:
        """Where it comes from."""
        return self.row.cells["family"]

    @property
    def name(self) -> str:
        """Its id, or else its place in the file."""
        return self.row.cells["case_id"] or self.row.place

    @property
    def complete(self) -> bool:
        """Whether the row takes part in scoring."""
        return self.skipped is None and self.row.cells["complete"] == "1"

    @property
    def error(self) -> float | None:
        """Of step time; None where the row is not scored on it."""
        return _error(self.predicted_s, self.measured_s) if self.complete else None

    @property
    def memory_error(self) -> float | None:
        """Of memory; None where the row is not scored on it."""
        return _error(self.predicted_bytes, self.measured_bytes) if self.complete else None

    @property
    def scored(self) -> bool:
        """Whether the row has an error of either kind."""
        return self.error is not None or self.memory_error is not None


def case_of(row: Row) -> Case:
    """What a row ran and measured. Whatever is wrong with it becomes the reason why it is skipped."""
    case = Case(row=row)
    try:
        config = configuration(row)
        case.config, case.assumed = config, config.assumed
        measured = measured_of(row, tokens=config.workload.tokens, num_gpus=config.system.num_chips)
        case.measured_s, case.measured_bytes = measured.step_time_s, measured.peak_memory_bytes
        _check_score(row, case)
        _check_units(row, config, measured)
    except ValueError as error:
        case.skipped = " ".join(str(error).split())
    return case


def predict_case(case: Case, predict: Predict) -> None:
    """Step seconds, bytes in the counter that the row was measured with, and P10 and P90 of the seconds."""
    if case.config is None:
        return
    config, column = case.config, _COUNTERS.get(case.row.cells["mem_kind"], "peak_memory_bytes")
    try:
        result = predict(config.model, config.strategy, config.system, config.workload)
        seconds, nbytes = float(result.step_time_s), float(getattr(result, column))
        if not math.isfinite(seconds):
            raise ValueError(f"no step time is predicted: {result.reason}")
    except ValueError as error:
        case.skipped = case.skipped or " ".join(str(error).split())
        return
    case.result, case.predicted_s = result, seconds
    case.predicted_bytes = nbytes if math.isfinite(nbytes) else None


def kin_of(config: Configuration) -> tuple[object, ...]:
    """A model, by its shape, on a chip: rows that differ in how they are laid out, in batch, sequence or format."""
    model, experts = config.model, config.model.moe.num_experts if config.model.moe else 0
    return model.num_layers, model.hidden, model.ffn, experts, config.system.chip.name


def fold_of(case: Case, folds: Folds) -> Hashable:
    """What a priced row is left out with: its family, or else its model on that chip."""
    assert case.config is not None
    return case.family if folds is Folds.FAMILY else kin_of(case.config)


def _check_score(row: Row, case: Case) -> None:
    if row.cells["mem_kind"] not in _COUNTERS:
        kinds = ", ".join(kind for kind in _COUNTERS if kind)
        raise row.bad("mem_kind", f"must be one of {kinds}, but got {row.cells['mem_kind']!r}")
    if row.cells["complete"] not in {"0", "1"}:
        raise row.bad("complete", f"must be 0 or 1, but got {row.cells['complete']!r}")
    if row.cells["complete"] == "1" and case.measured_s is None and case.measured_bytes is None:
        raise ValueError("complete is 1, but neither a step time nor a memory was measured")


def _check_units(row: Row, config: Configuration, measured: Measured) -> None:
    """Figures that no chip can show are in another unit than their column's."""
    model, system, work = config.model, config.system, config.workload
    if measured.step_time_s is not None:
        peak = system.peak(recipe(config.strategy.precision).gemm)
        least = model_flops_per_token(model, work.seq) * work.tokens / (system.num_chips * peak)
        column = "step_time_s" if row.has("step_time_s") else "tokens_per_s_per_gpu"
        if measured.step_time_s < least:
            law = f"must not mean a step below the {least:.3g} s that the model's FLOPs take at peak"
            raise row.bad(column, f"{law}, but got {row.cells[column]}; give seconds, or tokens per second and chip")
        if measured.step_time_s * LEAST_MFU > least:
            law = f"must not mean a step above {least / LEAST_MFU:.3g} s, {LEAST_MFU:.1%} of peak"
            raise row.bad(column, f"{law}, but got {row.cells[column]}; give seconds, or tokens per second and chip")
    room = system.chip.hbm_bytes
    if measured.peak_memory_bytes is not None and measured.peak_memory_bytes > ROUNDED_MEMORY * room:
        law = f"must be at most the {room / GIB:.4g} GiB of a {system.chip.name}"
        raise row.bad("peak_mem_gib", f"{law}, but got {row.cells['peak_mem_gib']}; give GiB")


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1
