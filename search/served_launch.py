"""Runs a search over deployments from a space to a run folder. Prints nothing; begins again where it was stopped."""

from __future__ import annotations

import time
from pathlib import Path

from results.store import RunFolder
from search.launch import ending_as_it_ends, versions
from search.served import ServedSpace, parse_served
from search.served_sweep import Found, columns_of, reference_rows, sweep_served, volume
from search.watching import LaunchOptions, NothingFeasible, Progress, Update

__all__ = ["launch_served", "resume_served"]


def launch_served(space: ServedSpace, options: LaunchOptions, progress: Progress) -> RunFolder:
    """A new run. Raises NothingFeasible with the run folder written, Interrupted once there is one."""
    manifest = {"answers": True, "seed": None, "versions": versions()}
    with RunFolder.create(options.out, space.name, space.resolved_yaml(), manifest) as run:
        return _carry_out(run, space, progress)


def resume_served(path: Path, progress: Progress) -> RunFolder:
    """The run again from its start, which takes seconds; one that is done is returned as it is."""
    run = RunFolder.open(path)
    run.check_space()
    if run.state == "done" and run.is_whole():
        return run
    with run:
        run.claim()
        run.update_manifest(state="running")
        return _carry_out(run, parse_served(run.space_yaml, str(path / "space.yaml")), progress)


def _carry_out(run: RunFolder, space: ServedSpace, progress: Progress) -> RunFolder:
    with ending_as_it_ends(run):
        start = time.perf_counter()
        progress.phase(f"pricing {space.raw_size} deployments")

        def tell(done: int, found: Found) -> None:
            progress.update(
                Update(
                    structures_done=done, structures=space.raw_size, candidates_done=done, legal=space.raw_size,
                    seconds=time.perf_counter() - start, front_size=len(found.rows), best=_best(space, found),
                    what="deployments",
                )
            )  # fmt: skip

        found = sweep_served(space, tell)
        swept = time.perf_counter() - start
        _write(run, space, found)
        seconds = {"sweep": swept, "total": time.perf_counter() - start}
        counts = {"raw": space.raw_size, "legal": found.legal, "fits": found.fits, "priced": found.priced,
                  "front": len(found.rows), "by_rule": found.by_rule, "pruned": False}  # fmt: skip
        run.update_manifest(
            counts=counts, seconds=seconds, workers=1, sampler="exhaustive",
            sampler_reason="exact: every deployment that fits is priced", hypervolume=volume(space, found.rows),
        )  # fmt: skip
        if not found.rows:
            raise NothingFeasible(found.by_rule, [found.closest] if found.closest else [], run.path)
        run.update_manifest(state="done")
    return run


def _best(space: ServedSpace, found: Found) -> dict[str, float]:
    values = {o.column: [row[o.column] for row in found.rows] for o in space.objectives}
    return {o.column: (min if o.minimise else max)(values[o.column]) for o in space.objectives if found.rows}


def _write(run: RunFolder, space: ServedSpace, found: Found) -> None:
    """Front, reference points, and what was rejected."""
    run.write_rejections(
        [{"rule": rule, "count": n, "example": found.examples[rule]} for rule, n in found.by_rule.items()]
    )
    run.write_reference(columns_of(list(reference_rows(space))))
    told = {name: x for name, x in (found.closest or {}).items() if x == x}  # a manifest has no NaN
    run.update_manifest(closest=[told] if told else [])
    run.write_front(columns_of(found.rows))
