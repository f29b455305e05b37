"""Tunes one job: baselines, a search from each of them that fits, and the plan of the best by a full replay.

The plan is never slower than the job as it was, nor than any baseline that fits the budget: whatever a search finds
stands beside them, and the fastest mean over the iterations is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import numpy as np

from estimator.tuning import Outcome, TunedPrecision, TuningPlan
from hardware.units import format_bytes
from search.tuner.baselines import Baseline, baselines, daydream_s
from search.tuner.budget import fitted, with_memory_of
from search.tuner.chain import STEPS, walk
from search.tuner.climb import climb
from search.tuner.decisions import WHOLE, Decisions, apart
from search.tuner.judge import Judge, SpeedUps
from search.tuner.moves import Pass
from search.tuner.passes import DEFAULT, known_passes
from search.tuner.planned import bucket_cap_mb, bucket_list, decided, fused_names
from search.tuner.priority import layered_s
from search.tuner.sampled import TRIALS, sample
from search.tuner.subject import Subject

__all__ = ["DRIVERS", "Options", "Row", "Tuned", "chosen_passes", "plan_row", "tune"]

DRIVERS = ("alg1", "mcmc", "optuna")
REPLAYED = 3_000_000  # operations that the iterations of one row may have together; of more, fewer are replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to search with. budget_bytes: of a worker. steps: of a chain; trials: of a study."""

    passes: tuple[str, ...] = DEFAULT
    driver: str = "alg1"
    ups: SpeedUps = field(default_factory=SpeedUps)
    budget_bytes: float = float("inf")
    seed: int = 0
    steps: int = STEPS
    trials: int = TRIALS


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to run the job. seconds [I]: of each iteration, replayed.

    layered: the next forward pass waits layer by layer, which no plan asks of a trainer: told, and never the best.
    """

    name: str
    seconds: np.ndarray
    peak_bytes: float
    daydream_s: float
    num_buckets: int
    num_ops: int
    fits: bool
    decisions: Decisions
    layered: bool = False

    @property
    def mean_s(self) -> float:
        """Of an iteration."""
        return float(self.seconds.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What tuning came to. rows: the baselines; best: the plan's. search_s: without baselines and final replays."""

    plan: TuningPlan
    rows: tuple[Row, ...]
    best: Row
    search_s: float
    judged: int
    replays: int
    partial_replays: int

    @property
    def best_baseline(self) -> Row | None:
        """The fastest that fits and waits as the plan does, where one does."""
        return min((row for row in self.rows if row.fits and not row.layered), key=lambda row: row.mean_s, default=None)


def chosen_passes(text: str | None, without: str | None = None) -> tuple[str, ...]:
    """Names with commas between; ValueError with the nearest name where one is not known."""
    names = list(DEFAULT) if text is None else [word.strip() for word in text.split(",")]
    leave = [] if without is None else [word.strip() for word in without.split(",")]
    known = known_passes()
    for option, given in (("--passes", names), ("--without", leave)):
        for name in given:
            if name not in known:
                near = get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"have {', '.join(known)}"
                raise ValueError(f"{option} takes names of passes, but {name!r} is none; {hint}")
    left = tuple(name for name in dict.fromkeys(names) if name not in leave)
    if not left:
        raise ValueError("a tuner needs at least one pass, but none is left; leave --without out")
    return left


def tune(subject: Subject, options: Options) -> Tuned:
    """Searches, and decides by full replays. ValueError for what cannot be tuned or does not fit."""
    if subject.jobs[0].workers < 2:
        raise ValueError(
            "a job must have at least 2 workers to be tuned, for one has nothing to synchronise; give more"
        )
    if options.driver not in DRIVERS:
        raise ValueError(f"--driver must be one of {', '.join(DRIVERS)}, but is {options.driver!r}")
    if options.budget_bytes < float("inf") and not subject.memory_known:
        raise ValueError(
            "--memory-budget needs the bytes that operations keep, but the trace tells none; record with sizes, or "
            "leave the budget out"
        )
    judge = Judge(subject, options.ups, options.budget_bytes)
    passes = [known_passes()[name] for name in options.passes]
    known = baselines(judge)
    rows = [_layered(judge, one) if one.layered else _row(judge, one.name, one.decisions) for one in known]
    began = time.perf_counter()
    origin = replace(subject.start, part_bytes=subject.start.part_bytes or WHOLE)
    saving = fitted(judge, origin, passes)
    starts = _starts(judge, known, saving, options.passes)
    found = [_driven(judge, start, passes, options) for start in starts]
    search_s = time.perf_counter() - began
    before = next((row for row in rows if row.name == "as recorded"), None) or _row(judge, "no fusion", origin)
    fits = [row for row in rows if row.fits and not row.layered and _allowed(judge, row.decisions, options.passes)]
    ends = [_row(judge, "tuned", one) for one in _distinct(found)]
    best = min([*ends, *fits], key=lambda row: row.mean_s)
    plan = _plan(judge, before, best, options)
    if any(row.layered for row in rows) and layered_s(judge, best.decisions, priority=True) is not None:
        rows.append(_layered(judge, Baseline(name="tuned, priorities", decisions=best.decisions, layered=True)))
    return Tuned(
        plan=plan, rows=tuple(rows), best=replace(best, name="tuned"), search_s=search_s, judged=judge.judged,
        replays=judge.replays, partial_replays=judge.sync.replays,
    )  # fmt: skip


def plan_row(subject: Subject, options: Options, plan: TuningPlan, source: str) -> Row:
    """What a plan comes to on a job; ValueError where it is for another."""
    judge = Judge(subject, options.ups, options.budget_bytes)
    return _row(judge, "the plan given", decided(judge, plan, source))


def _allowed(judge: Judge, decisions: Decisions, passes: Sequence[str]) -> bool:
    """Whether a baseline changes nothing that a pass which is off would have to."""
    start = judge.subject.start
    same_ops = "op_fusion" in passes or np.array_equal(decisions.ops, start.ops)
    same_tensors = "tensor_fusion" in passes or (
        np.array_equal(decisions.tensors, start.tensors) and not decisions.cycle_s
    )
    same_parts = "tensor_partition" in passes or decisions.part_bytes == start.part_bytes
    return bool(same_ops and same_tensors and (same_parts or len(judge.sync.parts) == 1))


def _starts(judge: Judge, known: Sequence[Baseline], saving: Decisions, passes: Sequence[str]) -> list[Decisions]:
    """The job as it was, nothing fused, and each baseline, with the memory passes' change; those that fit."""
    given = [saving]
    if judge.subject.can_cut:
        given.append(apart(judge.shown))
    given += [one.decisions for one in known]
    changed = [with_memory_of(one, saving) for one in given if _allowed(judge, one, passes)]
    return _distinct([one for one in changed if judge.look(one).peak_bytes <= judge.budget_bytes] or [saving])


def _distinct(given: Sequence[Decisions]) -> list[Decisions]:
    known: dict[object, Decisions] = {}
    for one in given:
        known.setdefault(one.key, one)
    return list(known.values())


def _driven(judge: Judge, start: Decisions, passes: Sequence[Pass], options: Options) -> Decisions:
    drive: dict[str, Callable[[], Decisions]] = {
        "alg1": lambda: climb(judge, start, passes),
        "mcmc": lambda: walk(judge, start, passes, seed=options.seed, steps=options.steps),
        "optuna": lambda: sample(judge, start, passes, seed=options.seed, trials=options.trials),
    }
    return drive[options.driver]()


def _row(judge: Judge, name: str, decisions: Decisions) -> Row:
    """Replays iterations in full, the one that is looked at among them."""
    first = judge.replayed(decisions)
    look = judge.look(decisions)
    subject = judge.subject
    size = len(look.first) * subject.jobs[0].workers + len(look.nbytes) * subject.jobs[0].workers ** 2 * 2
    others = [job for job in subject.jobs if job is not judge.shown][: max(REPLAYED // max(size, 1) - 1, 0)]
    done = [first, *(judge.replayed(decisions, job) for job in others)]
    peak = max(one.peak_bytes for one in done)
    return Row(
        name=name, seconds=np.array([one.seconds for one in done]), peak_bytes=peak,
        daydream_s=daydream_s(judge, decisions), num_buckets=len(look.nbytes), num_ops=len(look.first),
        fits=peak <= judge.budget_bytes, decisions=decisions,
    )  # fmt: skip


def _layered(judge: Judge, one: Baseline) -> Row:
    """The iteration that is looked at, with priorities."""
    seconds = layered_s(judge, one.decisions, priority=True)
    assert seconds is not None
    row = _row(judge, one.name, one.decisions)
    return replace(row, seconds=np.array([seconds]), layered=True)


def _outcome(row: Row, known: bool) -> Outcome:
    low, high = np.quantile(row.seconds, (0.1, 0.9)).tolist()
    mean = row.mean_s
    return Outcome(
        seconds=mean, p10_s=min(low, mean), p90_s=max(high, mean), peak_bytes=row.peak_bytes if known else None
    )


def _plan(judge: Judge, before: Row, best: Row, options: Options) -> TuningPlan:
    subject, decisions = judge.subject, best.decisions
    told = list(subject.assumptions)
    if len(best.seconds) < len(subject.jobs):
        told.append(f"{len(best.seconds)} of {len(subject.jobs)} iterations are replayed, for all would take long")
    if options.budget_bytes < float("inf"):
        told.append(f"a worker holds at most {format_bytes(options.budget_bytes)}")
    return TuningPlan(
        graph=subject.mark, workers=judge.shown.workers, topology=subject.wire.topology.value,
        buckets=bucket_list(judge, decisions), bucket_cap_mb=bucket_cap_mb(judge, decisions),
        fused_ops=fused_names(judge, decisions),
        recompute=tuple(judge.segments[s].name for s in sorted(decisions.recompute)), accumulate=decisions.accumulate,
        precision=TunedPrecision.MIXED if decisions.mixed else TunedPrecision.AS_RECORDED,
        before=_outcome(before, subject.memory_known), after=_outcome(best, subject.memory_known),
        driver=options.driver, assumptions=tuple(told),
    )  # fmt: skip
