"""How well predictions order competing layouts: Kendall's tau-b and the regret of following them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["REPEAT_NOISE", "kendall_tau_b", "regret"]

REPEAT_NOISE = 0.01
"""Measured steps closer than this fraction count as equal: repeats of one configuration differ by about as much."""


def kendall_tau_b(predicted: ArrayLike, measured: ArrayLike, *, noise: float = REPEAT_NOISE) -> float | None:
    """Agreement of two orders, from -1 to 1; None where all of `measured` is equal.

    Kendall 1945, Biometrika 33(3): tau_b = (C - D) / sqrt((n0 - n1)(n0 - n2)), n1 and n2 the tied pairs of either side.
    Predictions that are all equal say nothing, and get 0.

    >>> kendall_tau_b([1.0, 2.0, 3.0], [10.0, 30.0, 20.0], noise=0)  # 2 pairs agree, 1 does not
    0.3333333333333333
    """
    first, second = np.triu_indices(np.size(measured), k=1)
    told, truth = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    told_sign = np.sign(told[first] - told[second])
    gap = truth[first] - truth[second]
    truth_sign = np.where(np.abs(gap) <= noise * np.minimum(truth[first], truth[second]), 0.0, np.sign(gap))
    untied = float(np.count_nonzero(told_sign)) * float(np.count_nonzero(truth_sign))
    if not np.any(truth_sign):
        return None
    return float(np.sum(told_sign * truth_sign)) / untied**0.5 if untied else 0.0


def regret(predicted: ArrayLike, measured: ArrayLike) -> float:
    """How much longer the step of the layout that is predicted to be the fastest is than the fastest measured one.

    Of layouts that are predicted to be equally fast, any could be taken: their mean counts.

    >>> regret([1.0, 2.0], [11.0, 10.0])
    0.10000000000000009
    """
    told, truth = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    return float(truth[told == told.min()].mean() / truth.min() - 1)
