"""What hides what on a timeline: of each kind of transfer how long it takes, and which compute covers how much of it.

Measured off the times alone, like estimator/timeline.py; seconds are those of one rank, summed over the devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estimator.tasks import CATEGORIES, Category
from estimator.timeline import Timeline

__all__ = ["Overlap", "overlaps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Transfers of one name. `hidden_s` while their device computes, by what it computes; the others are `exposed_s`.

    Each transfer counts in full, also where two run at the same time.
    """

    category: Category
    name: str
    total_s: float
    hidden_s: float
    exposed_s: float
    hidden_by: dict[str, float]


def overlaps(timeline: Timeline) -> tuple[Overlap, ...]:
    """Transfers by category and name, the most exposed first."""
    tasks = timeline.tasks
    computes = np.array([s.computes for s in tasks.streams], dtype=np.bool_)[tasks.stream]
    ran = np.isfinite(timeline.end) & (timeline.end > timeline.start)
    sends = ran & ~computes & (tasks.category != CATEGORIES.index(Category.HOST))
    totals: dict[tuple[int, int], float] = {}
    hidden: dict[tuple[int, int], dict[int, float]] = {}
    for device in range(len(tasks.devices)):
        kernels = np.flatnonzero(ran & computes & (tasks.device == device))
        kernels = kernels[np.argsort(timeline.start[kernels], kind="stable")]
        begin, end = timeline.start[kernels], timeline.end[kernels]
        for i in np.flatnonzero(sends & (tasks.device == device)).tolist():
            key = int(tasks.category[i]), int(tasks.name[i])
            start, stop = timeline.start[i], timeline.end[i]
            totals[key] = totals.get(key, 0.0) + float(stop - start)
            by = hidden.setdefault(key, {})
            # One kernel at a time: those that end behind its start and begin before its end.
            for k in range(int(np.searchsorted(end, start, "right")), int(np.searchsorted(begin, stop, "left"))):
                name = int(tasks.name[kernels[k]])
                by[name] = by.get(name, 0.0) + float(min(end[k], stop) - max(begin[k], start))
    found = []
    for (category, name), total in totals.items():
        by = hidden[category, name]
        covered = min(sum(by.values()), total)
        found.append(
            Overlap(
                category=CATEGORIES[category], name=tasks.names[name], total_s=total, hidden_s=covered,
                exposed_s=total - covered,
                hidden_by={tasks.names[n]: s for n, s in sorted(by.items(), key=lambda item: -item[1])},
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda o: (-o.exposed_s, o.category.value, o.name)))
