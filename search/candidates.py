"""From ids to rows and back: which options an id stands for, and every candidate under a structure.

Shares no loop with the jitted nest: the enumeration and the tests that hold the nest to account go through here, and
through the same batch composition as `evaluate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from estimator.batch import Out, Rows, compose_rows
from estimator.compose import Constants
from estimator.memory import ITEMS
from estimator.span_codes import CODES
from estimator.step import columns_of
from estimator.strategy import Recompute, RecomputeKind
from search.expression import strategy_values
from search.prices import with_rows_of
from search.program import text_code
from search.space import Space
from search.worlds import FLAGS, KEEP_AXES, OPTION_AXES, SIZES, VARIANT_AXES, Enumeration, Structures, World, steps_of

__all__ = ["batches", "compose_ids", "expand", "known_values", "lean", "locate", "schedule_codes"]

BLOCK = Recompute(kind=RecomputeKind.BLOCK)
MANY = 1_000_000  # candidates that are composed for the sake of the smallest: half a second


def locate(space: Space, enumeration: Enumeration, ids: np.ndarray) -> np.ndarray:
    """Index of the structure of each candidate id [N]; KeyError where an id has none."""
    steps = steps_of(space)
    own = ids.copy()
    for name in (*OPTION_AXES, *VARIANT_AXES, *KEEP_AXES):
        own -= (ids // steps[name] % len(space.axes[name])) * steps[name]
    order = np.argsort(enumeration.structures.id)
    known = enumeration.structures.id[order]
    at = np.minimum(np.searchsorted(known, own), max(len(known) - 1, 0))
    if len(known) == 0 or (known[at] != own).any():
        raise KeyError(f"no such candidates: {ids[known[at] != own][:3].tolist() if len(known) else ids[:3].tolist()}")
    return np.asarray(order[at])


def expand(world: World, structures: Structures, i: int) -> np.ndarray:
    """Ids of every candidate under structure `i`, options without effect once."""
    v, keeps, parts = world.variants, world.keeps, [np.zeros(0, np.int64)]
    for variant in v.of(int(structures.kit[i])):
        for k, needs in enumerate(keeps.needs):
            if world.pairs[variant, k] and (structures.shared[i] or not needs[0]):
                parts.append(_under(world, structures, i, int(variant), needs) + keeps.ids[k])
    return np.concatenate(parts)


def lean(world: World, structures: Structures, i: int) -> np.ndarray:
    """Ids under structure `i` among which to look for the least memory: all, or where these are too many a few.

    Then it is the first variant and the first of each flag and bucket: all that memory depends on much is there.
    """
    if structures.legal[i] <= MANY:
        return expand(world, structures, i)
    few, first = structures.take(np.array([i])), int(world.variants.of(int(structures.kit[i]))[0])
    for flags in few.flags[0]:
        flags[1] = -1 if flags[0] >= 0 else flags[1]
    c = replace(world.choices, buckets=world.choices.buckets[:1], bucket_ids=world.choices.bucket_ids[:1])
    world, keeps, parts = replace(world, choices=c), world.keeps, []
    for k, needs in enumerate(keeps.needs):
        if world.pairs[first, k] and (few.shared[0] or not needs[0]):
            parts.append(_under(world, few, 0, first, needs) + keeps.ids[k])
    return np.concatenate(parts)


def _under(world: World, structures: Structures, i: int, variant: int, keep_needs: np.ndarray) -> np.ndarray:
    """Ids of every candidate of one variant of a structure under one way to keep, but for what this adds."""
    c, (needs_tp, needs_dp, no_ep) = world.choices, world.variants.needs[variant]
    needs_third, needs_ahead = keep_needs
    recompute = np.concatenate([c.plain[:, 1], c.block_ids[: structures.num_blocks[i]]])
    flags = structures.flags[i].copy()
    if needs_tp:
        flags[0, 0] = -1
    if no_ep:
        flags[1, 1] = -1
    if needs_dp or needs_ahead:
        flags[3, 0] = -1
    parts: list[np.ndarray] = [recompute]
    parts += [flags[f][flags[f] >= 0] for f in range(3)]
    state: list[int] = []
    for z in range(3 if needs_third else 0, 3 if needs_dp else 4):
        if structures.zero[i, z] < 0:
            continue
        if flags[3, 0] >= 0:
            state.append(structures.zero[i, z] + flags[3, 0])
        if flags[3, 1] >= 0:
            buckets = c.bucket_ids if z < 3 else c.bucket_ids[:1]
            state += [structures.zero[i, z] + flags[3, 1] + b for b in buckets]
    parts.append(np.array(state, dtype=np.int64))
    total = np.zeros(1, dtype=np.int64) + structures.id[i] + world.variants.ids[variant]
    for part in parts:
        total = (total[:, None] + part[None, :]).reshape(-1)
    return total


def batches(enumeration: Enumeration, index: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Ids of every candidate under some structures, about `size` at a time."""
    held: list[np.ndarray] = []
    num = 0
    for i in index:
        held.append(expand(enumeration.worlds[enumeration.structures.world[i]], enumeration.structures, int(i)))
        num += len(held[-1])
        if num >= size:
            yield np.concatenate(held)
            held, num = [], 0
    if held:
        yield np.concatenate(held)


def compose_ids(
    space: Space, enumeration: Enumeration, ids: np.ndarray, *, gate: bool = False
) -> dict[str, np.ndarray]:
    """Result columns of candidates [N], in the order of `ids`. With `gate`, seconds of what does not fit are NaN."""
    out: dict[str, np.ndarray] = {}
    for mine, world, rows, structures, variant in _rows_by_world(space, enumeration, ids):
        composed = np.empty((len(mine), len(Out)))
        chunks = world.tables.layouts[rows.layout[-1], 7]
        constants = Constants(*world.variants.constants[variant].tolist())
        tables, row = with_rows_of(world, variant, structures.row)
        tables, rows = tables._replace(constants=constants), rows._replace(row=row)
        compose_rows(tables, rows, gate, composed, np.zeros((rows.pp[-1], len(ITEMS))), np.zeros((chunks, 3)))
        strategy = world.variants.strategies[variant]
        columns = columns_of(composed, space.model, world.system, space.workload, strategy)
        for name, values in columns.items():
            out.setdefault(name, np.empty(len(ids), dtype=values.dtype))[mine] = values
    return out


def known_values(space: Space, enumeration: Enumeration, ids: np.ndarray) -> dict[str, np.ndarray]:
    """What constraints ask of candidates [N] besides results: sizes, options as the sweep treats them, text codes."""
    out: dict[str, np.ndarray] = {}
    for mine, world, rows, structures, variant in _rows_by_world(space, enumeration, ids):
        told = strategy_values(world.variants.strategies[variant])
        values = {name: value for name, value in told.items() if name not in OPTION_AXES}
        values |= {name: structures.sizes[:, i] for i, name in enumerate((*SIZES, "dp"))}
        values |= {f"overlap_{name}": getattr(rows, f"overlap_{name}") for name in FLAGS}
        told_layers = rows.layers if world.strategy.recompute_per_chunk is None else 0
        values |= {
            "num_micro_batches": rows.num_micro_batches, "schedule": schedule_codes()[rows.schedule],
            "dp_replicate": np.where(rows.zero > 0, structures.replicas, 1),
            "reshard_after_forward": np.where(rows.zero == 3, rows.reshard, 1),
            "prefetch_blocks": np.where((rows.zero == 3) & (rows.overlap_dp == 1), rows.prefetch, 1),
            **{name: rows.offload[:, i] for i, name in enumerate(KEEP_AXES[2:])},
            "zero_stage": rows.zero, "bucket_bytes": rows.bucket, "recompute_layers": told_layers,
            "recompute": _recompute_codes(world, rows), "num_gpus": world.system.num_chips,
        }  # fmt: skip
        for name, value in values.items():
            out.setdefault(name, np.empty(len(ids)))[mine] = value
    return out


def schedule_codes() -> np.ndarray:
    """Text code of each schedule by its integer code."""
    out = np.zeros(max(CODES.values()) + 1)
    for schedule, code in CODES.items():
        out[code] = text_code(schedule.value)
    return out


def _recompute_codes(world: World, rows: Rows) -> np.ndarray:
    by_choice = np.zeros(world.tables.again.shape[1])
    for (choice, _), recompute in zip(world.choices.plain, world.choices.plain_recomputes, strict=True):
        by_choice[choice] = text_code(str(recompute))
    return np.where(rows.layers > 0, text_code(RecomputeKind.BLOCK.value), by_choice[rows.choice])


def _rows_by_world(
    space: Space, enumeration: Enumeration, ids: np.ndarray
) -> Iterator[tuple[np.ndarray, World, Rows, Structures, int]]:
    """Places in `ids`, world, rows to compose (of groups of price rows), structures and variant of its candidates."""
    where = locate(space, enumeration, ids)
    world_of, steps = enumeration.structures.world[where], steps_of(space)
    own = sum((ids // steps[n] % len(space.axes[n]) * steps[n] for n in VARIANT_AXES), np.zeros(len(ids), np.int64))
    for w in np.unique(world_of):
        world, of_world = enumeration.worlds[int(w)], np.flatnonzero(world_of == w)
        order = np.argsort(world.variants.ids)
        variant_of = order[np.searchsorted(world.variants.ids[order], own[of_world])]
        for variant in np.unique(variant_of):
            mine = of_world[variant_of == variant]
            structures = enumeration.structures.take(where[mine])
            yield mine, world, _rows(space, world, structures, ids[mine]), structures, int(variant)


def _rows(space: Space, world: World, s: Structures, ids: np.ndarray) -> Rows:
    steps = steps_of(space)
    place = {name: ids // steps[name] % len(space.axes[name]) for name in OPTION_AXES}

    def on(f: int) -> np.ndarray:
        step = place[f"overlap_{FLAGS[f]}"] * steps[f"overlap_{FLAGS[f]}"]
        return np.asarray(s.flags[:, f, 1] == step).astype(np.int64)

    zero_step = (place["zero_stage"] * steps["zero_stage"])[:, None]
    zero = np.argmax(s.zero == zero_step, axis=1).astype(np.int64)
    overlap_dp = on(3)
    acts = (overlap_dp == 1) & (zero < 3)
    bucket = np.where(acts, world.choices.buckets[place["bucket_bytes"]], 0.0)
    choice, layers = _recompute(space, world, place["recompute"], place["recompute_layers"])
    if world.strategy.recompute_per_chunk is not None:
        layers = np.ones_like(layers)  # the layout knows what each chunk recomputes
    keep = [np.array(space.axes[n], dtype=np.float64)[ids // steps[n] % len(space.axes[n])] for n in KEEP_AXES]
    return Rows(
        row=s.row, net=s.net, layout=s.layout, schedule=s.schedule,
        program=s.program, pp=s.pp, vpp=s.vpp, num_micro_batches=s.num_micro_batches, choice=choice, layers=layers,
        overlap_tp=on(0), overlap_ep=on(1), overlap_pp=on(2), overlap_dp=overlap_dp, zero=zero,
        reshard=keep[0].astype(np.int64),
        prefetch=keep[1], offload=np.stack(keep[2:], axis=1), bucket=bucket,
    )  # fmt: skip


def _recompute(space: Space, world: World, kind: np.ndarray, depth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Table index of the recompute choice, and layers of block recompute (0: not block)."""
    c, steps = world.choices, steps_of(space)
    # Block recompute shares the column of full, which is the second where there are blocks (TableBuilder).
    choice_at = np.ones(len(space.axes["recompute"]), dtype=np.int64)
    choice_at[c.plain[:, 1] // steps["recompute"]] = c.plain[:, 0]
    is_block = np.array([r == BLOCK for r in space.axes["recompute"]])
    layers_at = np.array(space.axes["recompute_layers"], dtype=np.int64)
    return choice_at[kind], np.where(is_block[kind], layers_at[depth], 0)
