"""Fits shared parameters to measured steps, each time without those that are to be predicted.

Letters: row i took y_i seconds and is predicted to take f_i; x_j is the logarithm of parameter j, s_j its spread
(parameters.py), w_i a row's weight. Minimised is

    sum_i w_i rho((log y_i - log f_i(x)) / NOISE) + sum_j (x_j / s_j)^2 / 2

with Huber's rho (Huber 1964, doi:10.1214/aoms/1177703732), so that a wrong row counts little. Parameters of one cause
multiply the same seconds; u_ik is the share of a row's seconds that cause k decides, found by pricing the row with that
cause alone made longer. Causes follow each other in a step, more or less, so that the fit takes

    f_i(x) = f_i(0) (1 + sum_k u_ik (exp(sum of x_j over k) - 1))

Shares are those at factors of 1 and look at no measured second: what a fold without some rows comes to depends on
the others alone. Its rows are then priced in full with these parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.configuration import Configuration
from search.parameters import Parameter

__all__ = ["Refit", "refit"]

Seconds = Callable[[Sequence[int], Sequence[Configuration]], Sequence[float]]
"""Step seconds of configurations, NaN where there are none, given with the rows that they are of."""
Tell = Callable[[str], None]
Floats = NDArray[np.float64]

NOISE = 0.05  # of log seconds: repeats of published configurations differ by 1 to 6 percent in the middle; assumption
HUBER = 1.345  # in units of NOISE: 95 % of the efficiency of least squares on normal errors (Huber 1981, section 4.5)
STEP = 0.1  # by which a cause is made longer, in log: large against rounding up of tiles, about as large as fits are
ROUNDS = 30  # of Gauss-Newton on f, with new weights each; it ends when nothing moves
STILL = 1e-6  # of a logarithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Refit:
    """`factors` by name, of a fit to all rows; `configs`: each row's own, with factors that were fitted without it."""

    factors: dict[str, float]
    configs: tuple[Configuration, ...]
    num_folds: int


def refit(
    configs: Sequence[Configuration], measured_s: Sequence[float], folds: Sequence[Hashable],
    kin: Sequence[Hashable], parameters: Sequence[Parameter], seconds: Seconds, tell: Tell,
) -> Refit:  # fmt: skip
    """Fits to the rows of every fold but one, for each fold in turn. Rows that are NaN take no part in fits.

    `kin`: which rows share their errors, such as repeats. n of them count as the square root of n.
    """
    problem = _problem(configs, np.log(np.asarray(measured_s, dtype=float)), kin, parameters, seconds, tell)
    labels = list(dict.fromkeys(folds))
    tell(
        f"fitting {len(parameters)} parameters to {int((problem.weights > 0).sum())} rows, without {len(labels)} folds"
    )
    chosen = np.empty((len(configs), len(parameters)))
    for label in labels:
        mine = np.array([fold == label for fold in folds])
        chosen[mine] = _solve(problem, problem.weights * ~mine)
    factors = np.exp(_solve(problem, problem.weights))
    return Refit(
        factors={p.name: float(factor) for p, factor in zip(parameters, factors, strict=True)},
        configs=tuple(_at(config, parameters, logs) for config, logs in zip(configs, chosen, strict=True)),
        num_folds=len(labels),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """`gap` [N]: log y - log f(0); `shares` [N, K]; `acts` [N, K, P]: 1 where parameter and row meet in a cause."""

    gap: Floats
    weights: Floats
    shares: Floats
    acts: Floats
    spreads: Floats


def _problem(
    configs: Sequence[Configuration], measured: Floats, kin: Sequence[Hashable], parameters: Sequence[Parameter],
    seconds: Seconds, tell: Tell,
) -> _Problem:  # fmt: skip
    """Prices every row as it is and with each cause made longer that some parameter of it touches."""
    causes = list(dict.fromkeys(p.cause for p in parameters))
    acts = np.zeros((len(configs), len(causes), len(parameters)))
    first: dict[tuple[int, int], Parameter] = {}
    for i, config in enumerate(configs):
        for j, parameter in enumerate(parameters):
            if parameter.touches(config):
                cause = causes.index(parameter.cause)
                acts[i, cause, j] = 1.0
                first.setdefault((i, cause), parameter)
    tell(f"pricing {len(configs)} rows, and {len(first)} with one cause of time made longer")
    longer = [parameter.scaled(configs[i], float(np.exp(STEP))) for (i, _), parameter in first.items()]
    rows = [*range(len(configs)), *(i for i, _ in first)]
    found = np.asarray(seconds(rows, [*configs, *longer]), dtype=float)
    base, ahead = found[: len(configs)], found[len(configs) :]
    shares = np.zeros((len(configs), len(causes)))
    for (i, cause), value in zip(first, ahead, strict=True):
        shares[i, cause] = (value / base[i] - 1.0) / np.expm1(STEP)
    gap = measured - np.log(base)
    counts = Counter(kin)
    known = np.isfinite(gap) & np.isfinite(shares).all(axis=1)
    return _Problem(
        gap=np.where(known, gap, 0.0), weights=known * np.array([counts[label] ** -0.5 for label in kin]),
        shares=np.where(known[:, None], shares, 0.0), acts=acts, spreads=np.array([p.spread for p in parameters]),
    )  # fmt: skip


def _solve(problem: _Problem, weights: Floats) -> Floats:
    """Logarithms of the parameters that fit best."""
    prior = np.diag(problem.spreads**-2.0)
    x: Floats = np.zeros(len(problem.spreads))
    for _ in range(ROUNDS):
        grown = problem.shares * np.exp(problem.acts @ x)
        ratio = 1.0 + (grown - problem.shares).sum(axis=1)
        jacobian = np.einsum("nk,nkp->np", grown, problem.acts) / ratio[:, None]
        left = problem.gap - np.log(ratio)
        size = np.abs(left) / NOISE
        w = weights * np.minimum(1.0, HUBER / np.maximum(size, HUBER)) / NOISE**2
        step = np.linalg.solve(jacobian.T @ (w[:, None] * jacobian) + prior, jacobian.T @ (w * left) - prior @ x)
        x = x + step
        if np.max(np.abs(step), initial=0.0) < STILL:
            break
    return x


def _at(config: Configuration, parameters: Sequence[Parameter], logs: Floats) -> Configuration:
    """The configuration with every parameter at its factor."""
    for parameter, log in zip(parameters, logs, strict=True):
        if log and parameter.touches(config):
            config = parameter.scaled(config, float(np.exp(log)))
    return config
