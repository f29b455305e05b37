"""Runs a search from a space to a run folder: prepare, sweep on a pool, write the front. Prints nothing.

Every finished block goes to the journal before the next progress line, so a run that is killed goes on where it stopped
and ends with the same front.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from results.pareto import non_dominated
from results.store import RunFolder
from search.candidates import compose_ids
from search.choice import Choice, check_searchable, choose
from search.finalists import finalists, replayable
from search.fold import folded
from search.nest import COUNTS
from search.pool import BlockDone, BlockFailed, InlinePool, RayPool, WorkerFactory
from search.replays import replay_finalists
from search.run_rows import front_columns, hypervolume_of, reference_columns
from search.space import Keep, Space, parse_space
from search.structures import structure_filters
from search.sweep import Plan, SweepWorker, Swept, best_of, fingerprint, is_compiled, merge, warmed_up
from search.trials import check_kept, closest_to_feasible, just_missed, trial_parts
from search.watching import FIRST_RUN, Interrupted, LaunchOptions, NothingFeasible, Progress, Update

__all__ = ["Interrupted", "LaunchOptions", "NothingFeasible", "Progress", "Update", "begin", "ending_as_it_ends",
           "launch", "resume", "versions"]  # fmt: skip

REPLAYED_TASKS = 8_000_000  # of each finalist: about ten seconds; `search replay` takes half as many again
TRACE_BYTES = 25_000_000  # of each finalist: half a second to write; `search replay` writes four times as much


def launch(space: Space, options: LaunchOptions, progress: Progress) -> RunFolder:
    """A new run of `space`. Raises NothingFeasible with the run folder written, Interrupted once there is one."""
    with begin(space, options) as run:
        space, _ = folded(space)
        return _replay(_carry_out(run, space, options, progress), space, options, progress)


def begin(space: Space, options: LaunchOptions) -> RunFolder:
    """The folder of a run that has not started: `resume` carries it out."""
    space, told = folded(space)
    seed = space.options.seed if options.seed is None else options.seed
    manifest = {"seed": seed, "versions": versions(), "notices": list(told)}
    return RunFolder.create(options.out, space.name, space.resolved_yaml(), manifest)


def resume(path: Path, options: LaunchOptions, progress: Progress) -> RunFolder:
    """Goes on with an interrupted run, or one whose tables were damaged; one that is done is returned as it is."""
    run = RunFolder.open(path)
    run.check_space()
    if run.state == "done" and run.is_whole():
        return run
    with run:
        run.claim()
        space = parse_space(run.space_yaml, str(path / "space.yaml"))
        run.update_manifest(state="running")
        return _replay(_carry_out(run, space, options, progress), space, options, progress)


def _carry_out(run: RunFolder, space: Space, options: LaunchOptions, progress: Progress) -> RunFolder:
    with ending_as_it_ends(run):
        start = time.perf_counter()
        progress.phase(f"enumerating legal structures and pricing distinct rows{'' if is_compiled() else FIRST_RUN}")
        check_searchable(space)
        choice = choose(space)
        if choice.plan is None:
            return _sample(run, space, choice, options, progress)
        plan = warmed_up(choice.plan)
        check_kept(plan)
        run.update_manifest(sampler="exhaustive", sampler_reason=_why_exhaustive(plan))
        seconds = dict(plan.seconds)
        found = _sweep(run, plan, options, progress, seconds)
        progress.phase("writing the front")
        _write(run, plan, found, seconds, start)
    return run


def _replay(run: RunFolder, space: Space, options: LaunchOptions, progress: Progress) -> RunFolder:
    """Replays the finalists of a finished front. Whatever ends this early, the run stays done."""
    if not options.replay:
        return run
    start = time.perf_counter()
    try:
        traces = run.traces()
    except ValueError as error:
        traces = None
        progress.phase(f"no traces: {error}")
    objectives = [objective.column for objective in space.objectives]
    chosen = finalists(run.read_front(), run.read_reference(), objectives, options.replay)
    chosen, note = replayable(space, chosen)
    if note:
        progress.phase(note)
    try:
        replaying = replay_finalists(
            run, space, chosen, traces=traces, trace_bytes=TRACE_BYTES, max_tasks=REPLAYED_TASKS, tell=progress.phase
        )
        deque(replaying, maxlen=0)
    except KeyboardInterrupt as stop:
        raise Interrupted(run.path) from stop
    finally:
        seconds = run.manifest["seconds"]
        took = time.perf_counter() - start
        told = {"replay": took, "total": seconds["total"] + took}
        run.update_manifest(seconds={name: s for name, s in seconds.items() if name != "total"} | told)
    return run


def _sample(run: RunFolder, space: Space, choice: Choice, options: LaunchOptions, progress: Progress) -> RunFolder:
    from search.study_launch import sample  # optuna takes half a second to load, and the exact sweep needs none of it

    sample(run, space, choice, options, progress, partial(_pool, space=space, options=options))
    return run


def _why_exhaustive(plan: Plan) -> str:
    how = "bounds prune what they prove" if plan.prune else "every legal candidate is priced"
    stop = plan.space.options.max_candidates
    until = f"until {stop} are priced (search.max_candidates), so not exact where that ends it" if stop else "exact"
    return f"{until}: {how}; {plan.reason}"


@contextmanager
def ending_as_it_ends(run: RunFolder) -> Iterator[None]:
    """Leaves the state of the run true whatever happens."""
    try:
        yield
    except KeyboardInterrupt as stop:
        run.update_manifest(state="interrupted")
        raise Interrupted(run.path) from stop
    except NothingFeasible:
        run.update_manifest(state="done")
        raise
    except BaseException:
        run.update_manifest(state="failed")
        raise


class _Sweeping:
    """What a sweep has found, and whom it tells: each block goes to the journal, then the front, then the watcher."""

    def __init__(self, run: RunFolder, plan: Plan, progress: Progress) -> None:
        self.run, self.plan, self.progress = run, plan, progress
        self.fingerprint = fingerprint(plan)
        self.found = plan.warm
        self.failed: list[BlockFailed] = []
        self._best_ids: list[int] = []
        self._best: dict[str, float] = {}

    def recall(self) -> list[tuple[int, int]]:
        """Take in what the journal holds of this very plan; the blocks that are left."""
        blocks = {start: stop for start, stop in self.plan.blocks}
        done: dict[tuple[int, int], Swept] = {}
        for record in self.run.read_blocks():
            start = record.get("start")
            if record.get("plan") != self.fingerprint or not isinstance(start, int) or start not in blocks:
                continue
            part = _from_record(record)
            if part is not None and record.get("stop") == blocks[start]:
                done[start, blocks[start]] = part
        for part in done.values():
            self._merge(part)
        return [block for block in self.plan.blocks if block not in done]

    def take(self, result: BlockDone | BlockFailed, seconds: float) -> None:
        if isinstance(result, BlockFailed):
            self.failed.append(result)
            return
        self.run.append_block({"plan": self.fingerprint, **_record(result.start, result.stop, result.value)})
        self._merge(result.value)
        self.tell(seconds)

    def _merge(self, part: Swept) -> None:
        self.found = merge([self.found, part], self.plan.space, bounded=self.plan.bounded)

    def hint(self) -> Swept | None:
        """What has been found so far, all of it in the journal or the warm-up; only the nest has use for it."""
        return self.found if self.plan.bounded else None

    def is_enough(self) -> bool:
        """Whether as many candidates are priced as the space asks for."""
        most = self.plan.space.options.max_candidates
        return most is not None and _counts(self.found)["priced"] >= most

    def tell(self, seconds: float) -> None:
        counts = _counts(self.found)
        self.progress.update(
            Update(
                structures_done=counts["structures"], structures=len(self.plan.enumeration.structures),
                candidates_done=counts["covered"], legal=self.plan.enumeration.legal, seconds=seconds,
                front_size=len(self.found.ids), best=self._bests(),
            )
        )  # fmt: skip

    def _bests(self) -> dict[str, float]:
        """Best value of each objective; composed again only when another candidate holds one."""
        ids = best_of(self.plan, self.found)
        if ids.tolist() != self._best_ids:
            columns = compose_ids(self.plan.space, self.plan.enumeration, ids)
            self._best_ids = ids.tolist()
            self._best = {
                o.column: float(columns[o.column].min() if o.minimise else columns[o.column].max())
                for o in self.plan.space.objectives
            }
        return dict(self._best)


def _sweep(run: RunFolder, plan: Plan, options: LaunchOptions, progress: Progress, seconds: dict[str, float]) -> Swept:
    """The rest of the plan on a pool, block by block into the journal."""
    sweeping = _Sweeping(run, plan, progress)
    left = sweeping.recall()
    begun = time.perf_counter()
    seconds["sweep"] = 0.0
    if left and not sweeping.is_enough():
        progress.phase("starting workers" if options.pool == "inline" else "starting workers on Ray")
        with _pool(SweepWorker, plan, space=plan.space, options=options) as pool:
            run.update_manifest(workers=pool.num_workers)
            progress.phase(f"sweeping {len(left)} blocks on {pool.num_workers} worker{'s'[: pool.num_workers - 1]}")
            started = time.perf_counter()
            sweeping.tell(0.0)
            try:
                for result in pool.map(left, sweeping.hint):
                    sweeping.take(result, time.perf_counter() - started)
                    if sweeping.is_enough():
                        break
            finally:  # a crash must not be forgotten because the run ended otherwise
                seconds["sweep"] = time.perf_counter() - started
                told = [{"time_s": e.time_s, "kind": e.kind.value, "text": e.text} for e in pool.events]
                run.update_manifest(events=[*run.manifest["events"], *told])
    seconds["pool"] = time.perf_counter() - begun - seconds["sweep"]  # workers, and Ray: their start and their end
    if failed := sweeping.failed:
        what = "; ".join(f"block {b.start}:{b.stop} after {b.attempts} attempts: {b.error}" for b in failed[:3])
        raise RuntimeError(f"{len(failed)} blocks failed ({what}); `search resume {run.path}` tries them again")
    return sweeping.found


def _pool(
    factory: WorkerFactory,
    spec: Any,  # noqa: ANN401 - the pool's own
    *,
    space: Space,
    options: LaunchOptions,
) -> InlinePool | RayPool:
    if options.pool == "inline" or space.is_point:
        return InlinePool(factory, spec)
    return RayPool(factory, spec, num_workers=options.workers or space.options.workers, address=options.address)


def _record(start: int, stop: int, value: Swept) -> dict[str, Any]:
    return {"start": start, "stop": stop, "ids": value.ids.tolist(), "systems": value.systems.tolist(),
            "values": value.values.tolist(), "counts": value.counts.tolist()}  # fmt: skip


def _from_record(record: dict[str, Any]) -> Swept | None:
    """What a block found; None where its record is damaged, so that the block is swept again."""
    try:
        ids = np.array(record["ids"], dtype=np.int64)
        found = Swept(
            ids=ids, systems=np.array(record["systems"], dtype=np.int64),
            values=np.array(record["values"], dtype=np.float64).reshape(len(ids), -1) if len(ids) else np.zeros((0, 2)),
            counts=np.array(record["counts"], dtype=np.int64),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError):
        return None
    return found if ids.shape == found.systems.shape and found.counts.shape == (len(COUNTS),) else None


def _counts(found: Swept) -> dict[str, int]:
    return dict(zip(COUNTS, found.counts.tolist(), strict=True))


def _write(run: RunFolder, plan: Plan, found: Swept, seconds: dict[str, float], start: float) -> None:
    """Front, reference, rejections and counts; NothingFeasible where there is no front."""
    space = plan.space
    counts = _counts(found)
    ids, columns = final_front(plan, found)
    by_rule, examples = _rejections(plan, counts, is_empty=not len(ids))
    run.write_rejections([
        {"rule": name, "count": n, "example": examples.get(name, "")} for name, n in by_rule.items()
    ])  # fmt: skip
    run.write_reference(reference_columns(space))
    run.write_front(front_columns(space, ids, columns))
    if space.options.keep is Keep.ALL:
        for part, table in enumerate(trial_parts(plan)):
            run.write_trials(part, front_columns(space, *table, band=False))
    tally = {
        "raw": space.raw_size, "legal": plan.enumeration.legal, "fits": counts["fits"], "priced": counts["priced"],
        "front": len(ids), "by_rule": by_rule, "pruned": plan.prune,
    }  # fmt: skip
    run.update_manifest(closest=just_missed(plan))
    seconds["total"] = time.perf_counter() - start
    run.update_manifest(counts=tally, seconds=seconds, hypervolume=hypervolume_of(space, columns) if len(ids) else None)
    if not len(ids):
        raise NothingFeasible(by_rule, closest_to_feasible(plan), run.path)
    run.update_manifest(state="done")


def _rejections(plan: Plan, counts: dict[str, int], *, is_empty: bool) -> tuple[dict[str, int], dict[str, str]]:
    """Candidates by what rejects them, and examples. Where nothing is left, constraints have refused all that fits."""
    by_rule = {name: int(n) for name, n in plan.enumeration.by_rule.items() if n}
    examples = dict(plan.enumeration.examples)
    if counts["out_of_memory"]:
        by_rule["memory"] = counts["out_of_memory"]
    if is_empty and counts["fits"]:
        by_rule["constraint"] = by_rule.get("constraint", 0) + counts["fits"]
        examples["constraint"] = "; ".join(e.text for e in structure_filters(plan.space)[1])
    return by_rule, examples


def final_front(plan: Plan, found: Swept) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Ids and result columns of the front over the objectives themselves, in order of id."""
    space = plan.space
    if not len(found.ids):
        return found.ids, {}
    ids = np.sort(found.ids)
    columns = compose_ids(space, plan.enumeration, ids)
    values = np.stack([columns[o.column] for o in space.objectives], axis=1)
    keep = non_dominated(values, ids, space.higher)
    return ids[keep], {name: column[keep] for name, column in columns.items()}


def versions() -> dict[str, str]:
    """Of this package and those that a front may depend on."""
    out = {"python": platform.python_version()}
    for name in ("trainspace", "numpy", "numba", "optuna", "ray", "pyarrow"):
        try:
            out[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
            out[name] = "not installed"
    return out
