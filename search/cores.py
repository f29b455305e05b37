"""Prices configurations on all cores of this machine. What is wrong with one is its answer, not the end of all.

Configurations that differ in their system alone share what is expensive, the operations of a rank: each core keeps its
share of a list from call to call, by places, and remembers the operations of these.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from types import TracebackType
from typing import Self

from estimator.model import ModelSpec
from estimator.result import StepResult
from estimator.step import evaluate
from estimator.strategy import Strategy
from estimator.workload import Workload
from hardware.system import SystemSpec
from search.configuration import Configuration
from search.pool import usable_cpus

__all__ = ["Cores", "remembered"]

# Forked workers start with what is compiled and cached here. Elsewhere than on Linux, system libraries have threads of
# their own, which a fork may leave in the middle of something.
_START = "fork" if sys.platform == "linux" else "spawn"


@lru_cache(maxsize=4096)
def remembered(model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload) -> StepResult:
    """`evaluate` of one scalar strategy, once: tables of measured steps repeat configurations."""
    return evaluate(model, strategy, system, workload)


class Cores:
    """A process for each core, or this one alone where there is one.

    >>> with Cores(1) as cores:
    ...     cores.step_seconds([], [])
    []
    """

    def __init__(self, count: int | None = None) -> None:
        count = usable_cpus() if count is None else count
        context = multiprocessing.get_context(_START)
        self._workers = [ProcessPoolExecutor(1, mp_context=context) for _ in range(count)] if count > 1 else []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.shutdown(wait=True, cancel_futures=True)

    def step_seconds(self, places: Sequence[int], configs: Sequence[Configuration]) -> list[float]:
        """Seconds of a step of each; NaN where it is illegal. Those of equal `places` go to the same core."""
        if not self._workers:
            return _step_seconds(configs)
        count = len(self._workers)
        shares = [[i for i, place in enumerate(places) if place % count == core] for core in range(count)]
        asked = [
            worker.submit(_step_seconds, [configs[i] for i in share])
            for worker, share in zip(self._workers, shares, strict=True)
        ]
        found = [0.0] * len(configs)
        for share, answer in zip(shares, asked, strict=True):
            for i, seconds in zip(share, answer.result(), strict=True):
                found[i] = seconds
        return found


def _step_seconds(configs: Sequence[Configuration]) -> list[float]:
    return [_one(config) for config in configs]


def _one(config: Configuration) -> float:
    try:
        return float(remembered(config.model, config.strategy, config.system, config.workload).step_time_s)
    except ValueError:
        return float("nan")
