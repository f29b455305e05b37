"""Predicted against measured: rows → configurations → predictions → errors, the report of `search validate`.

Ranking looks at groups of rows that differ only in how they are laid out (search/measured.py names the columns). Every
row is accounted for: scored, skipped with a reason, or reported without a score because its `complete` is 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from estimator.band import evaluate_band
from estimator.model import ModelSpec
from estimator.precision import recipe
from estimator.result import StepResult
from estimator.strategy import Strategy
from estimator.tables import model_flops_per_token
from estimator.workload import Workload
from hardware.system import SystemSpec
from hardware.units import GIB
from search.configuration import Configuration, configuration
from search.cores import Cores, remembered
from search.measured import GROUP_COLUMNS, STRATEGY_COLUMNS, Measured, Row, measured_of
from search.parameters import PARAMETERS
from search.refit import refit
from search.scores import Layout, ranking, repeat_noise, spread
from search.time_parts import seconds_by_part

__all__ = ["Folds", "validate"]


class Prediction(Protocol):
    """What scoring needs of a StepResult."""

    @property
    def step_time_s(self) -> Any:  # noqa: ANN401  # a number, or an array of one
        """Seconds of a step."""

    @property
    def reason(self) -> Any:  # noqa: ANN401  # as above
        """Why there is no step time."""


Predict = Callable[[ModelSpec, Strategy, SystemSpec, Workload], Prediction]

Tell = Callable[[str], None]


class Folds(Enum):
    """What is left out when shared parameters are fitted: nothing, a model on a chip, a family."""

    NONE = "none"
    GROUP = "group"
    FAMILY = "family"


def _silent(text: str) -> None:
    """Says nothing."""


_COUNTERS = {
    "allocated": "peak_memory_bytes",
    "reserved": "reserved_memory_bytes",
    "nvidia-smi": "device_memory_bytes",
    "unknown": "peak_memory_bytes",
    "": "peak_memory_bytes",
}
NUM_WORST = 10
LEAST_MFU = 1e-3  # milliseconds taken for seconds come out below; published steps are above a percent
ROUNDED_MEMORY = 1.1  # figures in GB under a column of GiB, and boxes that say more than the driver gives


@dataclass(slots=True, kw_only=True)
class _Case:
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


def validate(
    rows: Iterable[Row], predict: Predict = remembered, *, folds: Folds = Folds.NONE, tell: Tell = _silent
) -> dict[str, Any]:
    """The report on measured rows, with the keys of the JSON form: plain values only, None where there is none.

    With `folds`, each row is predicted with shared parameters that were fitted to the others (search/refit.py).
    """
    cases = [_case(row) for row in rows]
    if folds is not Folds.NONE:
        _leave_out(cases, folds, tell)
    for case in cases:
        _predict(case, predict)
    families: dict[str, list[_Case]] = defaultdict(list)
    for case in cases:
        families[case.family].append(case)
    noise = {name: _noise(members) for name, members in families.items()}
    return {
        "rows": len(cases),
        "scored": sum(case.scored for case in cases),
        "skipped": dict(Counter(case.skipped for case in cases if case.skipped).most_common()),
        "families": {name: _summary(members, noise) for name, members in families.items()},
        "overall": _summary(cases, noise),
        "cases": [_as_dict(case) for case in cases],
        "repeat_noise": noise,
        "price_sources": _price_sources(cases),
        "worst": _worst(cases),
    }


def _case(row: Row) -> _Case:
    """What a row ran and measured. Whatever is wrong with it becomes the reason why it is skipped."""
    case = _Case(row=row)
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


def _leave_out(cases: Sequence[_Case], folds: Folds, tell: Tell) -> None:
    """Gives every case the configuration with parameters that were fitted to the rows outside its fold."""
    priced = [(case, case.config) for case in cases if case.config is not None]
    configs = [config for _, config in priced]
    measured = [case.measured_s if case.complete and case.measured_s else math.nan for case, _ in priced]
    kin = [_kin(config) for config in configs]
    labels = kin if folds is Folds.GROUP else [case.family for case, _ in priced]
    with Cores() as cores:
        found = refit(configs, measured, labels, kin, PARAMETERS, cores.step_seconds, tell)
    tell(f"predicting each of {found.num_folds} folds from the others")
    for (case, _), config in zip(priced, found.configs, strict=True):
        case.config = config


def _kin(config: Configuration) -> tuple[object, ...]:
    """A model, by its shape, on a chip: rows that differ in how they are laid out, in batch, sequence or format."""
    model, experts = config.model, config.model.moe.num_experts if config.model.moe else 0
    return model.num_layers, model.hidden, model.ffn, experts, config.system.chip.name


def _predict(case: _Case, predict: Predict) -> None:
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
    if isinstance(result, StepResult):
        found = evaluate_band(config.model, config.strategy, config.system, config.workload, result)
        case.band_s = float(found.step_time_p10_s), float(found.step_time_p90_s)


def _check_score(row: Row, case: _Case) -> None:
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


def _summary(cases: Sequence[_Case], noise: Mapping[str, float]) -> dict[str, Any]:
    """Scores of one family, or of all rows."""
    return {
        "n": sum(case.scored for case in cases),
        "step_time": spread([case.error for case in cases if case.error is not None]),
        "memory": spread([case.memory_error for case in cases if case.memory_error is not None]),
        "ranking": ranking(
            Layout(
                task=(case.family, *(case.row.cells[name] for name in GROUP_COLUMNS)),
                layout=tuple(case.row.cells[name] for name in STRATEGY_COLUMNS),
                predicted_s=case.predicted_s,
                measured_s=case.measured_s,
                noise=noise[case.family],
            )
            for case in cases
            if case.complete and case.predicted_s is not None and case.measured_s is not None
        ),
    }


def _noise(cases: Sequence[_Case]) -> float:
    """Of repeats in one family's own rows."""
    columns = (*GROUP_COLUMNS, *STRATEGY_COLUMNS)
    return repeat_noise(
        (tuple(case.row.cells[name] for name in columns), case.measured_s)
        for case in cases
        if case.complete and case.measured_s is not None
    )


def _worst(cases: Sequence[_Case]) -> list[dict[str, Any]]:
    """The rows that are furthest off, with the parts of their predicted seconds, largest first."""
    wrong = sorted((case for case in cases if case.error is not None), key=lambda case: -abs(case.error or 0.0))
    return [
        {
            "case_id": case.name,
            "error": case.error,
            "predicted_step_time_s": case.predicted_s,
            "measured_step_time_s": case.measured_s,
            "seconds": _parts(case),
        }
        for case in wrong[:NUM_WORST]
    ]


def _parts(case: _Case) -> dict[str, float]:
    if case.config is None or not isinstance(case.result, StepResult):
        return {}
    parts = seconds_by_part(case.config, case.result)
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _price_sources(cases: Sequence[_Case]) -> dict[str, float | None]:
    """Share of the seconds of kernels by what they rest on, the mean over scored rows."""
    names = ("measured", "tile", "roofline")
    results = [case.result for case in cases if case.error is not None and isinstance(case.result, StepResult)]
    if not results:
        return dict.fromkeys(names)
    return {name: float(np.mean([r.columns[f"price_share_{name}"] for r in results])) for name in names}


def _as_dict(case: _Case) -> dict[str, Any]:
    return {
        "case_id": case.name,
        "family": case.family,
        "predicted_step_time_s": case.predicted_s,
        "p10_s": case.band_s and case.band_s[0],
        "p90_s": case.band_s and case.band_s[1],
        "measured_step_time_s": case.measured_s,
        "error": case.error,
        "predicted_peak_memory_bytes": case.predicted_bytes,
        "measured_peak_memory_bytes": case.measured_bytes,
        "memory_error": case.memory_error,
        "assumed": list(case.assumed),
        "skipped": case.skipped,
    }
