"""How far one configuration can be stretched in memory: micro-batch, sequence, chips, recompute; all else as it is.

Exact: every value that a question offers is evaluated, none is inferred from another. Values that a rule forbids are
left out. Memory is the device's, held against what a plan may fill.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from estimator.result import StepResult
from estimator.step import evaluate
from estimator.strategy import Recompute, RecomputeKind
from search.commands.point import Point
from search.commands.remedies import modules_of

__all__ = ["LONGEST", "QUESTIONS", "SEQUENCE_STEP", "Fit", "fits_of"]

SEQUENCE_STEP = 1024
LONGEST = 1_048_576  # tokens: a thousand evaluations
QUESTIONS = ("micro_batch", "seq", "num_gpus", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The answer to one question: the best value that fits, what it takes, and the next one that does not.

    `value` is None where nothing fits. `next_value` is the closest beyond that is legal and too large; None: there is
    none. `legal` of `tried` values passed every rule.
    """

    question: str
    now: int | str
    value: int | str | None
    step_time_s: float
    device_memory_bytes: float
    num_gpus: int
    next_value: int | str | None
    next_over_bytes: float
    tried: int
    legal: int


@dataclass(frozen=True, slots=True)
class _Priced:
    value: int | str
    result: StepResult
    num_gpus: int
    over_bytes: float


def fits_of(point: Point, *, longest: int = LONGEST) -> list[Fit]:
    """The four answers, in the order of QUESTIONS."""
    return [_micro_batch(point), _sequence(point, longest), _chips(point), _recompute(point)]


def _micro_batch(point: Point) -> Fit:
    """The largest micro-batch that divides what a replica gets of the global batch."""
    s = point.strategy
    dp = point.system.num_chips // int(s.tp * s.cp * s.pp)
    sizes = _divisors(max(point.workload.global_batch // max(dp, 1), 1))
    priced = _priced(point, ((n, replace(point, strategy=replace(s, micro_batch=n))) for n in sizes))
    return _fit("micro_batch", int(s.micro_batch), priced, len(sizes), key=lambda one: -int(one.value))


def _sequence(point: Point, longest: int) -> Fit:
    """The longest sequence among multiples of SEQUENCE_STEP; the batch keeps its sequences."""
    if longest < SEQUENCE_STEP:
        raise ValueError(f"--longest must be at least {SEQUENCE_STEP} tokens, the shortest tried, but got {longest}")
    lengths = range(SEQUENCE_STEP, longest + 1, SEQUENCE_STEP)
    priced = _priced(point, ((n, replace(point, workload=replace(point.workload, seq=n))) for n in lengths))
    return _fit("seq", point.workload.seq, priced, len(lengths), key=lambda one: -int(one.value))


def _chips(point: Point) -> Fit:
    """The fewest chips: as many replicas as divide the batch, of the same model-parallel sizes."""
    s = point.strategy
    replicas = _divisors(max(point.workload.global_batch // int(s.micro_batch), 1))
    inner = int(s.tp * s.cp * s.pp)

    def variants() -> Iterator[tuple[int, Point]]:
        for dp in replicas:
            try:
                system = point.system.with_chips(inner * dp)
            except ValueError:  # segments grow alike, tiers reach so far
                continue
            yield inner * dp, replace(point, system=system)

    priced = _priced(point, variants())
    return _fit("num_gpus", point.system.num_chips, priced, len(replicas), key=lambda one: int(one.value))


def _recompute(point: Point) -> Fit:
    """The fastest recompute that fits: none, any set of the model's modules, the first layers of chunks, all."""
    s = replace(point.strategy, recompute_per_chunk=None, recompute_layers=0)
    options = [(str(choice), replace(s, recompute=choice)) for choice in _choices(point)]
    block = Recompute(kind=RecomputeKind.BLOCK)
    chunk = -(-point.model.num_layers // int(s.pp * s.vpp))
    options += [(f"block of {n}", replace(s, recompute=block, recompute_layers=n)) for n in range(1, chunk + 1)]
    priced = _priced(point, ((name, replace(point, strategy=strategy)) for name, strategy in options))
    now = str(point.strategy.recompute)
    if point.strategy.recompute.kind is RecomputeKind.BLOCK:
        now = f"block of {int(point.strategy.recompute_layers)}"
    return _fit("recompute", now, priced, len(options), key=lambda one: float(one.result.step_time_s))


def _choices(point: Point) -> Iterator[Recompute]:
    modules = sorted(modules_of(point), key=lambda module: module.value)
    yield Recompute()
    for count in range(1, len(modules) + 1):
        for chosen in itertools.combinations(modules, count):
            yield Recompute(kind=RecomputeKind.SELECTIVE, modules=frozenset(chosen))
    yield Recompute(kind=RecomputeKind.FULL)


def _priced(point: Point, variants: Iterable[tuple[int | str, Point]]) -> list[_Priced]:
    """Every legal variant with its price."""
    found = []
    for value, other in variants:
        try:
            result = evaluate(other.model, other.strategy, other.system, other.workload)
        except ValueError:  # a rule forbids it
            continue
        over = float(result.device_memory_bytes) - other.system.usable_hbm_bytes
        if not result.feasible and over <= 0.0:  # it is the host that is full
            over = float(result.host_memory_bytes) - other.system.chip.host_memory_bytes
        found.append(_Priced(value, result, other.system.num_chips, over))
    return found


def _fit(question: str, now: int | str, priced: list[_Priced], tried: int, key: Callable[[_Priced], float]) -> Fit:
    """The best of what fits by `key`; beyond it, the next by `key` that does not fit."""
    fitting = [one for one in priced if one.result.feasible]
    best = min(fitting, key=key, default=None)
    beyond = [one for one in priced if not one.result.feasible and (best is None or key(one) < key(best))]
    near = max(beyond, key=key, default=None) if best is not None else min(
        beyond, key=lambda one: one.over_bytes, default=None
    )  # fmt: skip
    return Fit(
        question=question, now=now, value=None if best is None else best.value,
        step_time_s=np.nan if best is None else float(best.result.step_time_s),
        device_memory_bytes=np.nan if best is None else float(best.result.device_memory_bytes),
        num_gpus=0 if best is None else best.num_gpus, next_value=None if near is None else near.value,
        next_over_bytes=np.nan if near is None else near.over_bytes, tried=tried, legal=len(priced),
    )  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
