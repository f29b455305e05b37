"""Measures sampling: what exact inner sweeps save against plain Optuna, and how near samplers come to an exact front.

All in one process and one thread, machine code compiled before the clock starts. The exact front gives the reference.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from estimator.step import evaluate
from results.pareto import hypervolume, non_dominated, worst
from results.store import RunFolder
from search.axes import strategy_of
from search.blocks import InlinePool
from search.dimensions import Dimensions
from search.pricer import Pricer
from search.space import Sampler, Space, load_space
from search.study import Study
from search.study_launch import STARTS
from search.study_run import Budget, StudyRun
from search.sweep import prepare, sweep_plan

__all__ = ["hypervolume_share", "optuna_speedup"]

SHARE = 0.99  # of the exact hypervolume
CAP_S = 120.0  # after which plain Optuna is given up, and the ratio is a lower bound
SEEDS = 3
GENERATION = 50  # trials asked at a time of plain Optuna: one generation
NEVER = 1e9  # objectives of what is illegal: real, and worse than anything


def optuna_speedup(name: str) -> float:
    """Wall time of plain Optuna to 99 % of the exact hypervolume over that of a study, both NSGA-II.

    Plain: one trial per configuration over every axis by itself, priced by `evaluate`; illegal ones are infeasible. The
    study's time holds its survey, and is the median of three seeds. Where plain Optuna does not get there within CAP_S,
    the true ratio is larger.
    """
    space = load_space(name)
    exact = _Exact(space)
    Pricer(dims := Dimensions.of(space)).price(dims.starts(1)[0])
    ours = statistics.median(_study_s(space, exact, seed) for seed in range(SEEDS))
    return _plain_s(space, exact) / ours


def hypervolume_share(name: str, sampler: Sampler, trials: int) -> float:
    """Share of the exact hypervolume after so many configurations, the sampler left to itself from the start."""
    space = load_space(name)
    exact, shares = _Exact(space), [0.0]
    with _work(space, sampler, 0, trials, 0) as work:
        work.go(InlinePool(Pricer, work.dimensions), lambda state: shares.append(exact.share(_front(state))))
    return shares[-1]


class _Exact:
    """The exact hypervolume of a space, and what share of it points have."""

    def __init__(self, space: Space) -> None:
        plan = prepare(space)
        assert plan.bounded
        assert [o.column for o in space.objectives] == ["step_time_s", "peak_memory_bytes"]
        values = sweep_plan(plan).values
        self.reference = worst(values)
        self.value = hypervolume(values, self.reference)

    def share(self, values: np.ndarray) -> float:
        """Of points [N, 2]."""
        return hypervolume(values, self.reference) / self.value if len(values) else 0.0


@contextmanager
def _work(space: Space, sampler: Sampler, seed: int, trials: int, starts: int) -> Iterator[StudyRun]:
    """A study in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder, "run"), space.name, space.resolved_yaml(), {"seed": seed})
        (run.path / "journal").mkdir()
        dimensions = Dimensions.of(space)
        study = Study(
            run.path / "journal" / "study.log", name=space.name, fingerprint="", sampler=sampler, seed=seed,
            levels=dimensions.parameters, higher=space.higher,
        )  # fmt: skip
        for code in dimensions.starts(starts) if starts else ():
            study.enqueue(dimensions.parameters_of(code))
        yield StudyRun(run, dimensions, study, Budget(trials=trials))
        run.close()


def _front(work: StudyRun) -> np.ndarray:
    return np.array([[row.values[o.column] for o in work.space.objectives] for row in work.front_rows()])


class _Reached(Exception):
    """The share is reached."""


def _study_s(space: Space, exact: _Exact, seed: int) -> float:
    start = time.perf_counter()

    def look(work: StudyRun) -> None:
        if exact.share(_front(work)) >= SHARE:
            raise _Reached

    with _work(space, Sampler.NSGA2, seed, 1_000_000, STARTS) as work:
        try:
            work.go(InlinePool(Pricer, work.dimensions), look)
        except _Reached:
            return time.perf_counter() - start
    raise RuntimeError(f"a study of {space.name} must reach {SHARE:.0%} of the exact hypervolume, but did not")


def _plain_s(space: Space, exact: _Exact) -> float:
    """Seconds to the share, or CAP_S."""
    start = time.perf_counter()
    axes = {name: values for name, values in space.axes.items() if len(values) > 1}
    front = np.zeros((0, len(space.objectives)))
    with tempfile.TemporaryDirectory() as folder:
        study = Study(
            Path(folder, "study.log"), name=space.name, fingerprint="", sampler=Sampler.NSGA2, seed=0,
            levels={name: len(values) for name, values in axes.items()}, higher=[False] * len(space.objectives),
        )  # fmt: skip
        price = _pricer(space)
        while time.perf_counter() - start < CAP_S:
            for trial, places in study.ask(GENERATION):
                values, slack = price({name: axes[name][int(place)] for name, place in places.items()})
                study.tell(trial, values, slack, {})
                if all(x <= 0 for x in slack.values()):
                    front = np.concatenate([front, [values]])
            front = front[non_dominated(front, np.arange(len(front)))]
            if exact.share(front) >= SHARE:
                return time.perf_counter() - start
    return CAP_S


def _pricer(space: Space) -> Callable[[dict[str, object]], tuple[list[float], dict[str, float]]]:
    fixed = {name: values[0] for name, values in space.axes.items()}
    usable = space.system.usable_hbm_bytes

    def price(chosen: dict[str, object]) -> tuple[list[float], dict[str, float]]:
        try:
            result = evaluate(space.model, strategy_of({**fixed, **chosen}), space.system, space.workload)
        except ValueError:
            return [NEVER] * len(space.objectives), {"legal": 1.0, "memory": 0.0}
        need = float(result.columns["device_memory_bytes"]) / usable - 1.0
        return [float(result.columns[o.column]) for o in space.objectives], {"legal": 0.0, "memory": need}

    return price
