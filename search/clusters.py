"""The fastest layout of each cluster of a space, exactly: what a capacity plan chooses from. Writes nothing.

On one cluster a step that is faster is also cheaper, in money, energy and CO2 a token; so whatever a plan is asked for,
the best point of a cluster is its fastest that fits in memory and keeps the constraints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
    if (choice := choose(alone)).plan is None:
        raise ValueError(
            f"{space.name}: a plan of a space needs an exact sweep, but it is {choice.reason}; launch it, plan its run"
        )
    if tell is not None:
        tell(f"sweeping {space.name} for the fastest layout of each cluster{'' if is_compiled() else FIRST_RUN}")
    found = sweep_plan(warmed_up(choice.plan))
    columns = compose_ids(alone, choice.plan.enumeration, found.ids) if len(found.ids) else {}
    chosen = []
    for number in range(len(alone.systems)):
        mine = np.flatnonzero(found.systems == number)
        if len(mine):
            chosen.append(mine[np.lexsort((found.ids[mine], columns["step_time_s"][mine]))[0]])
    told = {name: column[chosen] for name, column in columns.items()}
    return conform(front_columns(alone, found.ids[chosen], told), FRONT_FIELDS)
