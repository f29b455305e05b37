"""Fits a few parameters to many measured seconds, and says how wrong they are on shapes they have not seen.

Errors are absolute logarithms of predicted over measured, so that a slow and a fast outlier weigh alike and the curve
is central between frameworks. One shape in four is held out, by a key of its sizes: all frameworks' rows of it, always
the same ones. Knows nothing of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Parameter", "Quality", "central", "fit", "held_out", "quality", "relative"]

HELD_OUT_OF = 4
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, near 2^64 over the golden ratio: Fibonacci hashing, Knuth vol. 3, 6.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One number to find between its bounds; `step` is where the search starts to look around, `scale` of log steps."""

    start: float
    low: float
    high: float
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How a curve does on held-out points: relative errors of their seconds."""

    num_fitted: int
    num_held_out: int
    mean: float
    median: float
    p90: float
    bias: float


def held_out(*sizes: np.ndarray, apart: bool = False) -> np.ndarray:
    """Which points a fit does not see: a quarter of the distinct shapes. [rows].

    Whole numbers reach the key's low bits one round after their own: shapes that differ in the last size alone are held
    out together, unless they are told `apart`, as small tables want it.
    """
    key = np.zeros(len(sizes[0]), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for size in (*sizes, np.zeros(len(sizes[0]))) if apart else sizes:
            key = (key ^ np.asarray(size, dtype=np.float64).view(np.uint64)) * _MIX
            key ^= key >> np.uint64(29)
    return key % np.uint64(HELD_OUT_OF) == 0


def central(sizes: Sequence[np.ndarray], seconds: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Distinct shapes, the median of the seconds of each (in logarithms), and how many rows it had."""
    order = np.lexsort((seconds, *reversed(sizes)))
    sorted_sizes = [np.asarray(size)[order] for size in sizes]
    changes = np.ones(len(order), dtype=bool)
    changes[1:] = np.any([size[1:] != size[:-1] for size in sorted_sizes], axis=0)
    first = np.flatnonzero(changes)
    count = np.diff(np.append(first, len(order)))
    ranked = np.log(seconds[order])  # ascending within a shape
    middle = 0.5 * (ranked[first + (count - 1) // 2] + ranked[first + count // 2])
    return [size[first] for size in sorted_sizes], np.exp(middle), count


def relative(predicted: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """Predicted over measured, less 1."""
    return predicted / measured - 1.0


def quality(predicted: np.ndarray, measured: np.ndarray, num_fitted: int) -> Quality:
    """The errors of held-out points; NaN where there are none."""
    if not len(measured):
        return Quality(num_fitted=num_fitted, num_held_out=0, mean=np.nan, median=np.nan, p90=np.nan, bias=np.nan)
    error = relative(predicted, measured)
    size = np.abs(error)
    return Quality(
        num_fitted=num_fitted, num_held_out=len(measured), mean=float(size.mean()), median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)), bias=float(np.median(error)),
    )  # fmt: skip


def fit(
    predict: Callable[[np.ndarray], np.ndarray], measured: np.ndarray, parameters: Sequence[Parameter], *,
    weights: np.ndarray | None = None, shrinks: int = 9,
) -> np.ndarray:  # fmt: skip
    """The parameters of least mean |log(predicted / measured)|: pattern search (Hooke and Jeeves 1961) inside bounds.

    Deterministic and without derivatives, which the whole waves of the tile model lack.
    """
    target = np.log(measured)
    share = None if weights is None else weights / weights.sum()

    def loss(at: np.ndarray) -> float:
        error = np.abs(np.log(predict(at)) - target)
        return float(error.mean() if share is None else error @ share)

    low, high = (np.array([getattr(p, name) for p in parameters]) for name in ("low", "high"))
    best, steps = np.array([p.start for p in parameters]), np.array([p.step for p in parameters])
    least = loss(best)
    while shrinks:
        before = best.copy()
        for i, step in enumerate(steps):
            for sign in (1.0, -1.0):
                tried = best.copy()
                tried[i] = np.clip(tried[i] + sign * step, low[i], high[i])
                if tried[i] != best[i] and (value := loss(tried)) < least:
                    best, least = tried, value
                    break
        if np.any(best != before):
            tried = np.clip(2.0 * best - before, low, high)  # on along the same line
            if (value := loss(tried)) < least:
                best, least = tried, value
        else:
            steps, shrinks = 0.5 * steps, shrinks - 1
    return best
