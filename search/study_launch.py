"""Carries out a run by sampling, as launch.py does by the exact sweep: study, workers, tables. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from results.schema import strategy_at as strategy_of_row
from results.store import RunFolder
from search.choice import Choice
from search.dimensions import Dimensions
from search.nest import COUNTS
from search.pool import InlinePool, RayPool
from search.pricer import CONSTRAINTS, MEMORY, Pricer
from search.run_rows import columns_of_rows, hypervolume_of, reference_columns, row_of, with_band
from search.space import Sampler, Space
from search.structures import strategy_at, structure_filters
from search.study import Study
from search.study_journal import set_cut_aside
from search.study_run import BATCH, STALE, Budget, Row, StudyRun, fingerprint
from search.sweep import is_compiled
from search.trials import closest_tried, missed_when_tried
from search.watching import FIRST_RUN, LaunchOptions, NothingFeasible, Progress, Update

__all__ = ["TRIALS", "sample"]

TRIALS = 1_000
"""Configurations priced where neither --trials nor --seconds says otherwise."""

STARTS = 3 * BATCH
"""Promising structures that a study tries before its sampler is asked."""

UNLIMITED = 10**9

STALE_OF = {Sampler.GP: 2}
"""Stale rounds after which a study ends where more take too long: a Gaussian process is fitted anew for every ask."""

PoolOf = Callable[[Any, Any], InlinePool | RayPool]


def sample(
    run: RunFolder, space: Space, choice: Choice, options: LaunchOptions, progress: Progress, pool_of: PoolOf
) -> None:
    """Begin or go on with the study of a run, and write what it found. NothingFeasible where nothing is."""
    start = time.perf_counter()
    run.update_manifest(sampler=choice.sampler.value, sampler_reason=choice.reason)
    progress.phase(f"surveying the structures that can be sampled{'' if is_compiled() else FIRST_RUN}")
    dimensions = Dimensions.of(space)
    seconds = {"survey": time.perf_counter() - start}
    if len(dimensions.meshes):
        study, told = _opened(run, dimensions, choice, options, progress)
        work = StudyRun(run, dimensions, study, _budget(space, choice))
        work.recall()
        why = _go(run, work, pool_of, progress, seconds, choice)
    else:
        work, told, why = StudyRun(run, dimensions, None, Budget(trials=0)), {}, "no structure is legal"
    progress.phase("writing the front")
    _write(run, work, seconds, start, {"ended": why, **told})


def _opened(
    run: RunFolder, dimensions: Dimensions, choice: Choice, options: LaunchOptions, progress: Progress
) -> tuple[Study, dict[str, Any]]:
    """The study of the run folder, with what it is to try first where it is new; what the manifest says of that."""
    path = run.path / "journal" / "study.log"
    path.parent.mkdir(exist_ok=True)
    events = run.manifest["events"]
    if note := set_cut_aside(path):
        progress.phase(note)
        run.update_manifest(events=[*events, {"time_s": time.time(), "kind": "journal", "text": note}])
    study = Study(
        path, name=str(run.manifest["name"]), fingerprint=fingerprint(dimensions), sampler=choice.sampler,
        seed=int(run.manifest["seed"]), levels=dimensions.parameters,
        higher=dimensions.space.higher,
    )  # fmt: skip
    told: dict[str, Any] = {}
    if study.is_new:
        first: list[int] = []
        if options.warm is not None:
            first, told = _warm(options.warm, dimensions)
            progress.phase(told["warm"]["text"])
        for code in dict.fromkeys([*first, *dimensions.starts(STARTS)]):
            study.enqueue(dimensions.parameters_of(code))
        study.flush()
    return study, told


def _warm(path: Path, dimensions: Dimensions) -> tuple[list[int], dict[str, Any]]:
    """Configurations of a former run's front that exist in this space, and how many do not."""
    front = RunFolder.open(path).read_front()
    systems = {system.name: system for system in dimensions.space.systems}
    codes = []
    for row in front.rows():
        system = systems.get(row["system"])
        code = (
            None if system is None else dimensions.code_of(system, strategy_of_row(row, dimensions.space.fusion_rules))
        )
        codes.append(code)
    taken = sum(code is not None for code in codes)
    text = f"warm start from {path}: {taken} points of its front taken, {len(codes) - taken} not legal here"
    found = list(dict.fromkeys(code for code in codes if code is not None))
    return found, {"warm": {"run": str(path), "taken": taken, "not_taken": len(codes) - taken, "text": text}}


def _budget(space: Space, choice: Choice) -> Budget:
    options = space.options
    default = TRIALS if options.seconds is None else UNLIMITED
    return Budget(
        trials=options.trials or default, seconds=options.seconds, candidates=options.max_candidates,
        stale=STALE_OF.get(choice.sampler, STALE),
    )  # fmt: skip


def _go(
    run: RunFolder, work: StudyRun, pool_of: PoolOf, progress: Progress, seconds: dict[str, float], choice: Choice
) -> str:
    if why := work.is_over():
        return why
    begun = time.perf_counter()
    progress.phase("starting workers")
    with pool_of(Pricer, work.dimensions) as pool:
        seconds["pool"] = time.perf_counter() - begun
        run.update_manifest(workers=pool.num_workers)
        workers = f"{pool.num_workers} worker{'s'[: pool.num_workers - 1]}"
        progress.phase(f"sampling with {choice.sampler.value} on {workers}: {choice.reason}")
        begun = time.perf_counter()
        try:
            why = work.go(pool, lambda state: progress.update(_update(state)))
        finally:  # a crash must not be forgotten because the run ended otherwise
            told = [{"time_s": e.time_s, "kind": e.kind.value, "text": e.text} for e in pool.events]
            run.update_manifest(events=[*run.manifest["events"], *told])
    seconds["study"] = time.perf_counter() - begun
    return why


def _update(work: StudyRun) -> Update:
    space = work.space
    front = work.front_rows()
    best: dict[str, float] = {}
    for objective in space.objectives if front else ():
        values = [row.values[objective.column] for row in front]
        best[objective.column] = min(values) if objective.minimise else max(values)
    whole = min(work.budget.trials, work.dimensions.num_configurations)
    return Update(
        structures_done=work.evaluated, structures=whole, candidates_done=work.evaluated, legal=whole,
        seconds=work.seconds, front_size=len(front), best=best, what="trials",
    )  # fmt: skip


def _write(run: RunFolder, work: StudyRun, seconds: dict[str, float], start: float, study: dict[str, Any]) -> None:
    """Front, reference, trials, rejections and counts; NothingFeasible where there is no front."""
    space, front = work.space, work.front_rows()
    by_rule = _by_rule(work, is_empty=not front)
    late = "; ".join(expression.text for expression in structure_filters(space)[1])
    run.write_rejections([
        {"rule": name, "count": n, "example": late if name == "constraint" else ""} for name, n in by_rule.items()
    ])  # fmt: skip
    run.write_reference(reference_columns(space))
    table = columns_of_rows([_table_row(work, row, band=True) for row in front])
    run.write_front(table)
    run.write_trials(0, columns_of_rows([_table_row(work, row) for row in work.rows]))
    run.update_manifest(closest=missed_when_tried(run.read_trials(), space))
    seconds["total"] = time.perf_counter() - start
    values = {o.column: np.array(table[o.column]) for o in space.objectives}
    run.update_manifest(
        counts=_tally(work, by_rule, len(front)), seconds=seconds,
        hypervolume=hypervolume_of(space, values) if front else None,
        study={"trials": work.asked, "evaluated": work.evaluated, "told": len(work.rows), **study},
    )  # fmt: skip
    if not front:
        raise NothingFeasible(by_rule, closest_tried(run.read_trials(), space), run.path)
    run.update_manifest(state="done")


def _tally(work: StudyRun, by_rule: dict[str, int], num_front: int) -> dict[str, Any]:
    """Counts of what the study examined: nothing else was enumerated."""
    counts = dict(zip(COUNTS, work.counts.tolist(), strict=True))
    return {
        "raw": work.space.raw_size, "examined": counts["covered"] + sum(work.rules.values()),
        "legal": counts["covered"], "fits": counts["fits"], "priced": counts["priced"], "front": num_front,
        "by_rule": by_rule, "pruned": work.dimensions.plan.prune,
    }  # fmt: skip


def _by_rule(work: StudyRun, *, is_empty: bool) -> dict[str, int]:
    counts = dict(zip(COUNTS, work.counts.tolist(), strict=True))
    out = dict(work.rules)
    if counts["out_of_memory"]:
        out["memory"] = counts["out_of_memory"]
    if is_empty and counts["fits"]:
        out["constraint"] = counts["fits"]
    return out


def _table_row(work: StudyRun, row: Row, *, band: bool = False) -> dict[str, Any]:
    system, strategy = strategy_at(
        work.dimensions.narrowed(row.code) if work.dimensions.free else work.space, row.local
    )
    reason = {MEMORY: "memory", CONSTRAINTS: "constraint"}.get(row.reason, "")
    values = with_band(work.space, system, strategy, row.values) if band else row.values
    return row_of(work.space, system, strategy, values) | {"id": row.id, "feasible": not reason, "reason": reason}
