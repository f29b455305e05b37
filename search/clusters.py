"""The fastest layout of each cluster of a space, exactly: what a capacity plan chooses from. Writes nothing.

On one cluster a step that is faster is also cheaper, in money, energy and CO2 a token; so whatever a plan is asked for,
the best point of a cluster is its fastest that fits in memory and keeps the constraints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from results.schema import FRONT_FIELDS, conform
from results.table import Table
from search.candidates import compose_ids
from search.choice import check_searchable, choose
from search.fold import folded
from search.objective import Objective
from search.run_rows import front_columns
from search.space import Space
from search.sweep import is_compiled, sweep_plan, warmed_up
from search.watching import FIRST_RUN

__all__ = ["fastest_of_each"]


def fastest_of_each(space: Space, tell: Callable[[str], None] | None = None) -> Table:
    """One row a cluster on which something is feasible, in the order of the space; ids are those of the space.

    ValueError where a space cannot be swept exactly; `tell` is told when the sweep begins.
    """
    check_searchable(space)
    alone, _ = folded(replace(space, objectives=(Objective(column="step_time_s", minimise=True),)))
    found: dict[str, list[Any]] = {field.name: [] for field in FRONT_FIELDS}
    for number, system in enumerate(alone.systems):
        # A space of one cluster: where bounds are not proven, the front of all would keep the fastest cluster alone.
        one = replace(alone, systems=(system,))
        if (choice := choose(one)).plan is None:
            why = f"a plan of a space needs an exact sweep, but it is {choice.reason}"
            raise ValueError(f"{space.name}: {why}; launch it, plan its run")
        if tell is not None and not number:
            tell(f"sweeping {space.name} for the fastest layout of each cluster{'' if is_compiled() else FIRST_RUN}")
        ids = np.sort(sweep_plan(warmed_up(choice.plan)).ids)[:1]  # equally fast ones: the first
        if len(ids):
            row = front_columns(one, ids, compose_ids(one, choice.plan.enumeration, ids))
            row["id"] = [int(ids[0]) + number * one.raw_size]  # the system is the outermost axis of an id
            for name, cells in row.items():
                found[name] += cells
    return conform(found, FRONT_FIELDS)
