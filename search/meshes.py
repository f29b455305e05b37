"""Legal meshes of a space, and which structures are legal under each: the coordinates in which a study samples.

A *mesh* is a system and one value of tp, cp, pp, ep and etp. What else makes a structure (schedule, chunks,
micro-batch, sequence parallelism ...) is conditional: a share in [0, 1) picks among what is legal under the mesh and
the choices before it, so that a sampler sees one fixed box, every point of which is legal. Prices nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from estimator.memory import RESERVED_FACTOR
from results.pareto import non_dominated
from search.sweep import Plan
from search.worlds import WORLD_AXES, steps_of

__all__ = ["CHOICES", "MESH", "Meshes"]

MESH = ("system", "tp", "cp", "pp", "ep", "etp")
CHOICES = ("schedule", "vpp", "micro_batch", *WORLD_AXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Structures that may fit, by mesh: the most promising mesh first.

    `structures` [S']: indices into the plan's, mesh by mesh; those of mesh i stand at first[i] to first[i + 1].
    `places` [S', CHOICES]: their place on each conditional axis.
    """

    structures: np.ndarray
    first: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, plan: Plan) -> Meshes:
        """Meshes in layers of their lower corners (step, memory), within a layer from fast to small.

        So a low index promises much, and neighbours are alike. Structures whose corner does not fit are left out, for
        none of their candidates would; all are kept where none fits.
        """
        index = _may_fit(plan)
        ids = plan.enumeration.structures.id[index]
        steps = steps_of(plan.space)
        sizes = {name: len(values) for name, values in plan.space.axes.items()} | {"system": len(plan.space.systems)}
        place = {name: ids // steps[name] % sizes[name] for name in (*MESH, *CHOICES)}
        own = np.stack([place[name] for name in MESH], axis=1).reshape(-1, len(MESH))
        _, mesh = np.unique(own, axis=0, return_inverse=True)
        mesh = mesh.reshape(-1)
        lows = np.full((int(mesh.max(initial=-1)) + 1, 2), np.inf)
        np.minimum.at(lows, mesh, plan.lows[index])
        rank = np.empty(len(lows), dtype=np.int64)
        rank[_by_promise(lows)] = np.arange(len(lows))
        order = np.lexsort((ids, rank[mesh]))
        counts = np.bincount(rank[mesh], minlength=len(lows))
        return cls(
            structures=index[order],
            first=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            places=np.stack([place[name][order] for name in CHOICES], axis=1).reshape(-1, len(CHOICES)),
        )

    def __len__(self) -> int:
        return len(self.first) - 1

    def structure(self, mesh: int, shares: Mapping[str, float]) -> int:
        """The structure that a mesh and shares in [0, 1] of the conditional choices mean."""
        rows = np.arange(self.first[mesh], self.first[mesh + 1])
        for column, name in enumerate(CHOICES):
            legal = np.unique(self.places[rows, column])
            chosen = legal[min(int(shares.get(name, 0.0) * len(legal)), len(legal) - 1)]
            rows = rows[self.places[rows, column] == chosen]
        assert len(rows) == 1
        return int(self.structures[rows[0]])

    def coordinates(self, structure: int) -> tuple[int, dict[str, float]]:
        """Mesh and shares of a structure, each in the middle of its interval; KeyError where it cannot fit."""
        found = np.flatnonzero(self.structures == structure)
        if not len(found):
            raise KeyError(structure)
        at = int(found[0])
        mesh = int(np.searchsorted(self.first, at, side="right")) - 1
        rows = np.arange(self.first[mesh], self.first[mesh + 1])
        shares: dict[str, float] = {}
        for column, name in enumerate(CHOICES):
            legal = np.unique(self.places[rows, column])
            chosen = self.places[at, column]
            shares[name] = (int(np.searchsorted(legal, chosen)) + 0.5) / len(legal)
            rows = rows[self.places[rows, column] == chosen]
        return mesh, shares


def _may_fit(plan: Plan) -> np.ndarray:
    """Structures whose memory corner is within the gate, or all where none is."""
    constants = [world.tables.constants for world in plan.enumeration.worlds]
    context, capacity = (
        np.array([getattr(c, name) for c in constants], dtype=float) for name in ("context_bytes", "capacity_bytes")
    )
    world = plan.enumeration.structures.world
    fits = plan.lows[:, 1] * RESERVED_FACTOR + context[world] <= capacity[world] if len(world) else np.zeros(0, bool)
    return np.flatnonzero(fits) if fits.any() else np.arange(len(world))


def _by_promise(lows: np.ndarray) -> np.ndarray:
    """Positions layer by layer of the front, each layer by its first column; equal corners side by side."""
    if not len(lows):
        return np.zeros(0, np.int64)
    corners, which = np.unique(lows, axis=0, return_inverse=True)
    left, layer_of = np.arange(len(corners)), np.empty(len(corners), dtype=np.int64)
    for number in itertools.count():
        if not len(left):
            break
        layer = left[non_dominated(corners[left], left)]
        layer_of[layer] = number
        left = np.setdiff1d(left, layer)
    which = which.reshape(-1)
    return np.lexsort((which, layer_of[which]))
