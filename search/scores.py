"""How good predictions are: spreads of errors, and the order of layouts that compete. Knows nothing of where rows are.

Errors are fractions: predicted / measured - 1. Of them, `bias` is the mean, `mape` the mean size, `median_ape` and
`p90_ape` the 50th and 90th percentile of the size, interpolated linearly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from search.ranking import REPEAT_NOISE, kendall_tau_b, regret

__all__ = ["Layout", "ranking", "repeat_noise", "spread"]

FEWEST_REPEATS = 3  # configurations measured again and again, from which on their spread says something


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One measured step of a layout of a task. Layouts of one task compete; equal ones are repeats."""

    task: tuple[Hashable, ...]
    layout: tuple[Hashable, ...]
    predicted_s: float
    measured_s: float
    noise: float = REPEAT_NOISE


def spread(errors: Sequence[float]) -> dict[str, float | None]:
    """mape, median_ape, p90_ape and bias; None of no errors."""
    if not errors:
        return dict.fromkeys(("mape", "median_ape", "p90_ape", "bias"))
    sizes = np.abs(errors)
    return {
        "mape": float(sizes.mean()),
        "median_ape": float(np.median(sizes)),
        "p90_ape": float(np.percentile(sizes, 90)),
        "bias": float(np.mean(errors)),
    }


def repeat_noise(measured: Iterable[tuple[Hashable, float]]) -> float:
    """By how much repeats of one configuration differ in the middle; REPEAT_NOISE where too few were repeated.

    Of each configuration's times the longest over the shortest, and of these the median.

    >>> repeat_noise([("a", 1.0), ("a", 1.02), ("b", 2.0), ("b", 2.1), ("c", 1.0), ("c", 1.5), ("d", 9.0)])
    0.050000000000000044
    """
    times: dict[Hashable, list[float]] = defaultdict(list)
    for configuration, seconds in measured:
        times[configuration].append(seconds)
    apart = [max(each) / min(each) - 1 for each in times.values() if len(each) > 1]
    return max(float(np.median(apart)), REPEAT_NOISE) if len(apart) >= FEWEST_REPEATS else REPEAT_NOISE


def ranking(layouts: Iterable[Layout]) -> dict[str, float | int | None]:
    """Means over the tasks that have layouts to rank. Repeats of a layout count once, with their median.

    Steps that measure closer than the noise are equal: they say nothing of the order, and to take the one for the other
    costs nothing.
    """
    tasks: dict[tuple[Hashable, ...], dict[tuple[Hashable, ...], list[Layout]]] = defaultdict(lambda: defaultdict(list))
    for each in layouts:
        tasks[each.task][each.layout].append(each)
    taus, regrets = [], []
    for members in tasks.values():
        pairs = [np.median([(one.predicted_s, one.measured_s) for one in same], axis=0) for same in members.values()]
        predicted, measured = np.array(pairs).T
        noise = max(one.noise for same in members.values() for one in same)
        tau = kendall_tau_b(predicted, measured, noise=noise)
        if tau is not None:
            lost = regret(predicted, measured)
            taus.append(tau)
            regrets.append(lost if lost > noise else 0.0)
    return {
        "groups": len(taus),
        "tau": float(np.mean(taus)) if taus else None,
        "regret": float(np.mean(regrets)) if regrets else None,
    }
