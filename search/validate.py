"""Predicted against measured: rows → configurations → predictions → errors, the report of `search validate`.

Ranking looks at groups of rows that differ only in how they are laid out (search/measured.py names the columns). Every
row is accounted for: scored, skipped with a reason, or reported without a score because its `complete` is 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from estimator.band import evaluate_band
from estimator.result import StepResult
from search.bands import Cell, Quantiles, Residual, cell_of, predicted_band, quantile_table, quantiles_of, widened
from search.cases import Case, Folds, Predict, case_of, fold_of, kin_of, predict_case
from search.cores import Cores, remembered
from search.measured import GROUP_COLUMNS, STRATEGY_COLUMNS, Row
from search.parameters import PARAMETERS, unfitted
from search.refit import refit
from search.scores import Layout, ranking, repeat_noise, spread
from search.time_parts import seconds_by_part

__all__ = ["Folds", "examine", "validate"]


Tell = Callable[[str], None]


NUM_WORST = 10


def _silent(text: str) -> None:
    """Says nothing."""


def validate(
    rows: Iterable[Row], predict: Predict = remembered, *, folds: Folds = Folds.NONE, tell: Tell = _silent
) -> dict[str, Any]:
    """The report on measured rows, with the keys of the JSON form: plain values only, None where there is none.

    With `folds`, each row is predicted with shared parameters that were fitted to the others (search/refit.py).
    """
    return examine(rows, predict, folds=folds, tell=tell)[0]


def examine(
    rows: Iterable[Row], predict: Predict = remembered, *, folds: Folds = Folds.NONE, tell: Tell = _silent
) -> tuple[dict[str, Any], tuple[list[Residual], list[Residual]]]:
    """The report, and what is left over of step time and of memory."""
    cases = [case_of(row) for row in rows]
    if folds is not Folds.NONE:
        _leave_out(cases, folds, tell)
    for case in cases:
        predict_case(case, predict)
    residuals = _residuals(cases, folds)
    _tell_bands(cases, folds, residuals)
    families: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        families[case.family].append(case)
    noise = {name: _noise(members) for name, members in families.items()}
    report = {
        "rows": len(cases),
        "scored": sum(case.scored for case in cases),
        "skipped": dict(Counter(case.skipped for case in cases if case.skipped).most_common()),
        "families": {name: _summary(members, noise) for name, members in families.items()},
        "overall": _summary(cases, noise)
        | {
            "bands": _band_scores(cases),
            "price_sources": _price_sources(cases),
            "repeat_noise": noise,
            "worst": _worst(cases),
        },
        "cases": [_as_dict(case) for case in cases],
    }
    return report, residuals


def _leave_out(cases: Sequence[Case], folds: Folds, tell: Tell) -> None:
    """Gives every case the configuration with parameters that were fitted to the rows outside its fold."""
    priced = [(case, case.config) for case in cases if case.config is not None]
    configs = [unfitted(config) for _, config in priced]
    measured = [case.measured_s if case.complete and case.measured_s else math.nan for case, _ in priced]
    kin = [kin_of(config) for config in configs]
    labels = [fold_of(case, folds) for case, _ in priced]
    with Cores() as cores:
        found = refit(configs, measured, labels, kin, PARAMETERS, cores.step_seconds, tell)
    tell(f"predicting each of {found.num_folds} folds from the others")
    for (case, _), config in zip(priced, found.configs, strict=True):
        case.config = config


def _tell_bands(cases: Sequence[Case], folds: Folds, residuals: Sequence[Sequence[Residual]]) -> None:
    """P10 and P90 of every prediction: with the shipped errors, or those of the rows outside its fold."""
    told: dict[Hashable, list[dict[Cell, Quantiles]]] = {}
    for case in cases:
        config, result = case.config, case.result
        if config is None or not isinstance(result, StepResult):
            continue
        parts = config.model, config.strategy, config.system, config.workload
        if folds is Folds.NONE or not residuals[0]:
            band = predicted_band(*parts, result)
        else:
            fold = fold_of(case, folds)
            if fold not in told:
                told[fold] = [quantile_table([one for one in kind if one.fold != fold]) for kind in residuals]
            cell = cell_of(config.model, config.strategy, config.system)
            time, memory = (quantiles_of(cell, table) for table in told[fold])
            band = widened(evaluate_band(*parts, result), result, time, memory)
        case.band_s = float(band.step_time_p10_s), float(band.step_time_p90_s)


def _residuals(cases: Sequence[Case], folds: Folds) -> tuple[list[Residual], list[Residual]]:
    """Of step time and of memory, of the rows that are scored."""
    time: list[Residual] = []
    memory: list[Residual] = []
    for case in cases:
        for error, kind in ((case.error, time), (case.memory_error, memory)):
            if error is not None and case.config is not None:
                config = case.config
                cell = cell_of(config.model, config.strategy, config.system)
                kind.append(
                    Residual(cell=cell, group=kin_of(config), fold=fold_of(case, folds), log_ratio=-math.log1p(error))
                )
    return time, memory


def _band_scores(cases: Sequence[Case]) -> dict[str, float | None]:
    """Share of measured steps inside P10 to P90; their median width, as a share of the prediction and of the error."""
    found = [
        (low <= case.measured_s <= high, (high - low) / case.predicted_s, abs(case.error))
        for case in cases
        if case.band_s and case.error is not None and case.measured_s and case.predicted_s
        for low, high in (case.band_s,)
    ]
    if not found:
        return dict.fromkeys(("inside", "median_width", "width_over_error"))
    inside, width, error = np.array(found).T
    middle = float(np.median(width))
    return {
        "inside": float(inside.mean()),
        "median_width": middle,
        "width_over_error": middle / float(np.median(error)),
    }


def _summary(cases: Sequence[Case], noise: Mapping[str, float]) -> dict[str, Any]:
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


def _noise(cases: Sequence[Case]) -> float:
    """Of repeats in one family's own rows."""
    columns = (*GROUP_COLUMNS, *STRATEGY_COLUMNS)
    return repeat_noise(
        (tuple(case.row.cells[name] for name in columns), case.measured_s)
        for case in cases
        if case.complete and case.measured_s is not None
    )


def _worst(cases: Sequence[Case]) -> list[dict[str, Any]]:
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


def _parts(case: Case) -> dict[str, float]:
    if case.config is None or not isinstance(case.result, StepResult):
        return {}
    parts = seconds_by_part(case.config, case.result)
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _price_sources(cases: Sequence[Case]) -> dict[str, float | None]:
    """Share of the seconds of kernels by what they rest on, the mean over scored rows."""
    names = ("measured", "tile", "roofline")
    results = [case.result for case in cases if case.error is not None and isinstance(case.result, StepResult)]
    if not results:
        return dict.fromkeys(names)
    return {name: float(np.mean([r.columns[f"price_share_{name}"] for r in results])) for name in names}


def _as_dict(case: Case) -> dict[str, Any]:
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
