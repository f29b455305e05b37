"""From ids to rows and back: which options an id stands for, and every candidate under a structure.

Shares no loop with the jitted nest: the enumeration and the tests that hold the nest to account go through here, and
through the same batch composition as `evaluate`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from estimator.batch import Out, Rows, compose_rows
from estimator.memory import ITEMS
from estimator.step import columns_of
from search.axes import AXES
from search.space import Space
from search.structures import FLAGS, Enumeration, Structures, World

__all__ = ["compose_ids", "expand", "locate", "steps_of"]


def steps_of(space: Space) -> dict[str, int]:
    """By how much an id grows with one place on each axis."""
    steps: dict[str, int] = {}
    step = 1
    for axis in reversed(AXES):
        steps[axis.name] = step
        step *= len(space.axes[axis.name])
    return steps


def locate(space: Space, enumeration: Enumeration, ids: np.ndarray) -> np.ndarray:
    """Index of the structure of each candidate id [N]; KeyError where an id is not a legal candidate."""
    steps = steps_of(space)
    own = ids.copy()
    for name in ("recompute", "recompute_layers", "zero_stage", *(f"overlap_{f}" for f in FLAGS), "bucket_bytes"):
        own -= (ids // steps[name] % len(space.axes[name])) * steps[name]
    order = np.argsort(enumeration.structures.id)
    known = enumeration.structures.id[order]
    at = np.minimum(np.searchsorted(known, own), max(len(known) - 1, 0))
    if len(known) == 0 or (known[at] != own).any():
        raise KeyError(f"no such candidates: {ids[known[at] != own][:3].tolist() if len(known) else ids[:3].tolist()}")
    return np.asarray(order[at])


def expand(world: World, structures: Structures, i: int) -> np.ndarray:
    """Ids of every candidate under structure `i`, options without effect once."""
    c = world.choices
    recompute = np.concatenate([c.plain[:, 1], c.block_ids[: structures.num_blocks[i]]])
    flags = structures.flags[i]
    parts: list[np.ndarray] = [recompute]
    parts += [flags[f][flags[f] >= 0] for f in range(3)]
    state: list[int] = []
    for z in range(4):
        if structures.zero[i, z] < 0:
            continue
        if flags[3, 0] >= 0:
            state.append(structures.zero[i, z] + flags[3, 0])
        if flags[3, 1] >= 0:
            buckets = c.bucket_ids if z < 3 else c.bucket_ids[:1]
            state += [structures.zero[i, z] + flags[3, 1] + b for b in buckets]
    parts.append(np.array(state, dtype=np.int64))
    total = np.zeros(1, dtype=np.int64) + structures.id[i]
    for part in parts:
        total = (total[:, None] + part[None, :]).reshape(-1)
    return total


def compose_ids(
    space: Space, enumeration: Enumeration, ids: np.ndarray, *, gate: bool = False
) -> dict[str, np.ndarray]:
    """Result columns of candidates [N], in the order of `ids`; also their option columns as the sweep treats them."""
    where = locate(space, enumeration, ids)
    s = enumeration.structures
    out: dict[str, np.ndarray] = {}
    for w in np.unique(s.world[where]):
        world = enumeration.worlds[int(w)]
        mine = np.flatnonzero(s.world[where] == w)
        rows = _rows(space, world, s.take(where[mine]), ids[mine])
        composed = np.empty((len(mine), len(Out)))
        chunks = world.tables.layouts[rows.layout[-1], 7]
        compose_rows(world.tables, rows, gate, composed, np.zeros((rows.pp[-1], len(ITEMS))), np.zeros((chunks, 3)))
        columns = columns_of(composed, space.model, world.system, space.workload, world.strategy.precision)
        columns |= {name: getattr(rows, name) for name in rows._fields}
        for name, values in columns.items():
            out.setdefault(name, np.zeros(len(ids), dtype=values.dtype))[mine] = values
    return out


def _rows(space: Space, world: World, s: Structures, ids: np.ndarray) -> Rows:
    steps = steps_of(space)
    place = {name: ids // steps[name] % len(values) for name, values in space.axes.items()}

    def on(f: int) -> np.ndarray:
        step = place[f"overlap_{FLAGS[f]}"] * steps[f"overlap_{FLAGS[f]}"]
        return np.asarray(s.flags[:, f, 1] == step).astype(np.int64)

    zero_step = (place["zero_stage"] * steps["zero_stage"])[:, None]
    zero = np.argmax(s.zero == zero_step, axis=1).astype(np.int64)
    overlap_dp = on(3)
    bucket = np.where((overlap_dp == 1) & (zero < 3), np.asarray(space.axes["bucket_bytes"], float)[place["bucket_bytes"]], 0.0)
    choice, layers = _recompute(world, place["recompute"] * steps["recompute"],
                                place["recompute_layers"] * steps["recompute_layers"])  # fmt: skip
    return Rows(
        row=s.row, net=s.net, layout=s.layout, schedule=s.schedule, pp=s.pp, vpp=s.vpp,
        num_micro_batches=s.num_micro_batches, choice=choice, layers=layers, overlap_tp=on(0), overlap_ep=on(1),
        overlap_pp=on(2), overlap_dp=overlap_dp, zero=zero, bucket=bucket,
    )  # fmt: skip


def _recompute(world: World, kind: np.ndarray, layers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Table index of the recompute choice and layers of block recompute (0: not block)."""
    c = world.choices
    plain: dict[int, int] = {int(i): int(choice) for choice, i in c.plain}
    block: dict[int, int] = {int(i): int(n) for n, i in zip(c.block_layers, c.block_ids, strict=True)}
    chosen: list[Any] = [
        (plain[k], 0) if k in plain else (1, block[k + n])
        for k, n in zip(kind.tolist(), layers.tolist(), strict=True)
    ]
    pairs = np.array(chosen, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0].copy(), pairs[:, 1].copy()
