"""How the front of a study grew: hypervolume against wall time, from the journal of its rounds. Draws nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from results.pareto import hypervolume, non_dominated, worst
from results.store import RunFolder
from search.space import Space

__all__ = ["CurvePoint", "curve", "is_study", "reference_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """After one round: seconds of the study, configurations priced, hypervolume of the front so far."""

    seconds: float
    trials: int
    hypervolume: float


def is_study(folder: RunFolder) -> bool:
    """Whether a run sampled."""
    return folder.manifest.get("sampler") not in (None, "exhaustive")


def reference_of(folder: RunFolder) -> tuple[float, list[float]]:
    """Hypervolume and reference of a finished run; ValueError where it has none."""
    found = folder.manifest["hypervolume"]
    if not isinstance(found, dict):
        raise ValueError(f"{folder.path}: --exact must be a finished run with a front of positive objectives")
    return float(found["value"]), [float(x) for x in found["reference"]]


def curve(folder: RunFolder, space: Space, reference: Sequence[float] | None) -> list[CurvePoint]:
    """One point a round, on log10 axes; `reference` None: the worst of each objective over the last front.

    No points where an objective is not positive, or before anything feasible was found.
    """
    rounds = [record for record in folder.read_blocks() if "study" in record]
    rounds = [record for record in rounds if record["study"] == rounds[-1]["study"]]
    higher = space.higher
    front, fronts = np.zeros((0, len(higher))), []
    for record in rounds:
        front = np.concatenate([front, *(_values(space, result) for result in record["results"])])
        if len(front):
            front = front[non_dominated(front, np.arange(len(front)), higher)]
        fronts.append(front)
    if not len(front) or (front <= 0).any() or any((f <= 0).any() for f in fronts):
        return []
    corner = worst(front, higher) if reference is None else np.array(reference)
    return [
        CurvePoint(
            seconds=float(record["seconds"]),
            trials=int(record["evaluated"]),
            hypervolume=hypervolume(found, corner, higher) if len(found) else 0.0,
        )  # fmt: skip
        for record, found in zip(rounds, fronts, strict=True)
    ]


def _values(space: Space, result: dict[str, Any]) -> np.ndarray:
    """Objectives of what one configuration added [N, K]; none where it is not feasible."""
    none = np.zeros((0, len(space.objectives)))
    if not result["ids"] or any(slack > 0 for slack in result["slack"].values()):
        return none
    return np.stack([np.array(result["columns"][o.column], dtype=float) for o in space.objectives], axis=1)
