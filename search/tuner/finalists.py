"""Refines the finalists of a run on their replayed steps, and keeps with the run what that gained. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from results.schema import strategy_at
from results.store import RunFolder
from search.finalists import key_of, name_of, system_of_row
from search.replays import known_rows
from search.space import Space
from search.tuner.step import Refined, changes, refine

__all__ = ["MOST", "refine_finalists", "refined_row"]

MOST = 3  # finalists refined: the fastest by their replays


def refine_finalists(
    run: RunFolder, space: Space, *, max_tasks: int | None = None, tell: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:  # fmt: skip
    """One row for each finalist that was replayed and fits, fastest first; the manifest keeps them as `tuned`."""
    replayed = [row for row in known_rows(run).values() if row["rank_replayed"] and row["fits"]]
    replayed.sort(key=lambda row: row["replayed_step_time_s"])
    points = {key_of(row): row for read in (run.read_reference, run.read_front) for row in read().rows()}
    found = []
    for row in [row for row in replayed if key_of(row) in points][:MOST]:
        point = points[key_of(row)]
        tell(f"refining {name_of(row)} on its replayed step")
        try:
            done = refine(
                space.model, strategy_at(point, space.fusion_rules), system_of_row(space, point), space.workload,
                max_tasks=max_tasks,
            )  # fmt: skip
        except ValueError as error:
            tell(f"{name_of(row)} is not refined: {error}")
            continue
        found.append({"id": int(row["id"]), "name": name_of(row), **refined_row(done)})
    run.update_manifest(tuned=found)
    return found


def refined_row(done: Refined) -> dict[str, Any]:
    """What a refinement came to, as plain values."""
    return {
        "before_s": done.before_s, "after_s": done.after_s, "gain": done.gain, "changes": changes(done),
        "replays": done.replays,
    }  # fmt: skip
