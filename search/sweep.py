"""The exact sweep of a space: what can be lost to a bound is never dropped, what cannot is never priced.

`prepare` enumerates and bounds (`survey`), then warms a front up on the most promising structures and orders the rest
into blocks (`warmed_up`); a `SweepWorker` sweeps blocks. Where bounds are not proven (objective.exactness), workers
enumerate every candidate instead. The front is the same for any order, worker count or crash: only strictly dominated
candidates go, and of equal ones the lowest id stays.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from estimator.strategy import RecomputeKind
from estimator.tables import model_flops_per_token
from results.pareto import non_dominated
from search.candidates import batches, compose_ids, known_values, schedule_codes
from search.expression import KNOWN_NAMES, Expression, strategy_values
from search.nest import COUNTS, DERIVED, OPTION_VALUES, Filter, Kinds, Options, Part, corners, sweep
from search.objective import exactness
from search.program import text_code
from search.space import Keep, Space
from search.staircase import Staircase, new_staircase
from search.structures import enumerate_space, structure_filters
from search.tree import grown
from search.watching import is_compiled_here
from search.worlds import SIZES, VARIANT_AXES, WORLD_AXES, Enumeration, Structures, Variants, World

__all__ = ["Plan", "SweepWorker", "Swept", "best_of", "fingerprint", "is_compiled", "measure_rate", "merge", "prepare",
           "survey", "sweep_inline", "sweep_plan", "warmed_up"]  # fmt: skip

WARM_UP = (256, 768)
"""Structures whose first variants are swept before workers start: promising ones, then those farthest ahead of these.

Half a second for a front on which little is missing, so what one worker finds hardly matters to the others.
"""
BLOCK = 256  # structures of one block: tens of milliseconds
FIRST_BLOCK, GROWTH, LAST_BLOCK = 8, 1.05, 512
"""Where bounds prune: the most promising structures take longest and lower the front most, so they are soon shared."""
PAIRS = 64  # of a structure whose rate is measured: most structures of wide spaces have tens of thousands
ENUMERATED = 1 << 16  # candidates composed at a time where all are enumerated
OF_WORLD = tuple(name for name in WORLD_AXES if name in KNOWN_NAMES and name not in OPTION_VALUES)
OWN_VALUES = (*SIZES, "dp", "num_micro_batches", "schedule", *OF_WORLD)
VARIANT_VALUES = tuple(name for name in VARIANT_AXES if name in KNOWN_NAMES)
"""What constraints may look at of a structure, and of its variants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What one block found, and the counts of nest.COUNTS.

    `ids` [N] of non-dominated candidates and their `values`: [N, 2] (step time, memory; 0 where no objective looks at
    it), non-dominated per system, where bounds are proven; else the objectives [N, K].
    """

    ids: np.ndarray
    systems: np.ndarray
    values: np.ndarray
    counts: np.ndarray


@dataclass(slots=True, kw_only=True)
class Plan:
    """A space ready to sweep. `order` [S']: structures that bounds could not rule out, most promising first.

    `bounded`: swept by the nest, else enumerated; `prune`: what bounds rule out is skipped. `reason` says why.
    """

    space: Space
    enumeration: Enumeration
    bounded: bool
    reason: str
    prune: bool
    lows: np.ndarray
    order: np.ndarray
    blocks: list[tuple[int, int]]
    warm: Swept
    seconds: dict[str, float] = field(default_factory=dict)


def uses(space: Space) -> tuple[bool, bool]:
    """Whether objectives look at step time, and at memory."""
    follows = {o.follows for o in space.objectives}
    return "step" in follows, "memory" in follows


def survey(space: Space, *, prune: bool = True) -> Plan:
    """Enumerate and bound; no block is cut and nothing swept yet. `prune` off prices everything that fits."""
    start = time.perf_counter()
    enumeration = enumerate_space(space)
    enumerated = time.perf_counter()
    bounded, reason = _exactness(space)
    prune = prune and bounded and space.options.keep is Keep.FRONT  # who keeps all wants all counted
    n = len(enumeration.structures)
    plan = Plan(
        space=space, enumeration=enumeration, bounded=bounded, reason=reason, prune=prune, lows=np.zeros((n, 2)),
        order=np.arange(n), blocks=[], warm=_nothing(),
    )  # fmt: skip
    plan.lows = SweepWorker(plan).corners()
    plan.seconds = {"enumerate": enumerated - start, "bound": time.perf_counter() - enumerated}
    return plan


def prepare(space: Space, *, prune: bool = True) -> Plan:
    """Enumerate, bound, warm up, order."""
    return warmed_up(survey(space, prune=prune))


def warmed_up(plan: Plan) -> Plan:
    """A surveyed plan, ready to sweep: its most promising structures swept, the rest that is left cut into blocks."""
    start = time.perf_counter()
    space, legal, n = plan.space, plan.enumeration.structures.legal, len(plan.order)
    worker = SweepWorker(plan)
    if plan.prune and n:
        alive, ahead = _promising_first(plan.lows), np.zeros(n)
        for num in WARM_UP:
            first = alive[np.argsort(-ahead, kind="stable")[:num]]
            plan.warm = merge([plan.warm, worker.first_variants(first)], space, bounded=True)
            alive = alive[~worker.beaten(alive, plan.warm)]
            ahead = worker.ahead(alive, plan.warm)
        plan.warm.counts[:2] = n - len(alive), legal.sum() - legal[alive].sum()
        plan.order = alive
    plan.blocks = _blocks(len(plan.order), space.options.block_size, growing=plan.prune)
    plan.seconds = {
        "enumerate": plan.seconds["enumerate"],
        "warm_up": plan.seconds["bound"] + time.perf_counter() - start,
    }
    return plan


def _blocks(num: int, size: int | None, *, growing: bool) -> list[tuple[int, int]]:
    """Cuts of `num` structures: of one size, or growing."""
    grows = growing and size is None
    blocks, start, length = [], 0, float(FIRST_BLOCK if grows else size or BLOCK)
    while start < num:
        blocks.append((start, min(start + int(length), num)))
        start = blocks[-1][1]
        if grows:
            length = min(length * GROWTH, LAST_BLOCK)
    return blocks


def _exactness(space: Space) -> tuple[bool, str]:
    """Whether the nest may be used, and why (not): bounds must be proven, and constraints within its reach."""
    bounded, reason = exactness(space.objectives, space.constraints)
    for expression in structure_filters(space)[1] if bounded else ():
        if beyond := sorted(set(expression.variables).difference(DERIVED, OPTION_VALUES, OWN_VALUES, VARIANT_VALUES)):
            return (
                False,
                f"{expression.text!r} looks at {beyond[0]}, which bounds do not follow, so all are enumerated",
            )
    return bounded, reason


def _nothing() -> Swept:
    return Swept(ids=np.zeros(0, np.int64), systems=np.zeros(0, np.int64), values=np.zeros((0, 2)),
                 counts=np.zeros(len(COUNTS), np.int64))  # fmt: skip


def _promising_first(lows: np.ndarray) -> np.ndarray:
    """Order of structures: the front of lower corners, then the others, each by the product of step time and memory.

    Little adds to a front that has been through the first: most of the others then close at their corner.
    """
    behind = np.ones(len(lows), dtype=bool)
    behind[non_dominated(lows, np.arange(len(lows)))] = False
    return np.lexsort((np.log(lows).sum(axis=1), behind))


class SweepWorker:
    """Sweeps blocks of a plan. Holds tables, and the front that it knows of."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.found = _nothing()
        self.structures = plan.enumeration.structures
        self.worlds = plan.enumeration.worlds
        self.systems = list(plan.space.systems)
        self.options = [self._options(world) for world in self.worlds]
        self.tables = [world.tables for world in self.worlds]
        self.kinds = [_kinds(world, world.variants) for world in self.worlds]
        self.scales = [self._scale(world) for world in self.worlds]
        system = [self.systems.index(world.system) for world in self.worlds]
        self.system_of_world = np.array(system, dtype=np.int64)

    def run(self, start: int, stop: int, hint: Swept | None) -> Swept:
        """Sweep structures `order[start:stop]`; returns what the hint, a front found so far, has not.

        What this worker has found itself prunes as well, and is told again until a hint has it: an answer may be lost.
        """
        index = self.plan.order[start:stop]
        if not self.plan.bounded:
            return self.enumerate(index)
        hint = hint or _nothing()
        known = merge([self.found, hint], self.plan.space, bounded=True)
        part = self.sweep(index, known)
        self.found = merge([known, part], self.plan.space, bounded=True)
        new = ~np.isin(self.found.ids, hint.ids)
        return Swept(ids=self.found.ids[new], systems=self.found.systems[new], values=self.found.values[new],
                     counts=part.counts)  # fmt: skip

    def corners(self) -> np.ndarray:
        """Lower bounds (step, memory) of all structures [S, 2]."""
        lows = np.zeros((len(self.structures), 2))
        for w, index in self._by_world(np.arange(len(self.structures))):
            steps, memories = np.empty(len(index)), np.empty(len(index))
            part = _part(self.structures.take(index))
            corners(self.tables[w], part, self.kinds[w], self.options[w], steps, memories)
            lows[index] = np.stack([steps, memories], axis=1)
        return lows

    def beaten(self, index: np.ndarray, found: Swept) -> np.ndarray:
        """Which structures a found front rules out as a whole."""
        out = np.zeros(len(index), dtype=bool)
        for mine, (x, y), (low_x, low_y) in self._beside(index, found):
            at = np.searchsorted(x, low_x, side="right") - 1  # as staircase.beater, for all at once
            near = np.maximum(at, 0)
            if len(x):
                out[mine] = (at >= 0) & ((y[near] < low_y) | ((y[near] == low_y) & (x[near] < low_x)))
        return out

    def ahead(self, index: np.ndarray, found: Swept) -> np.ndarray:
        """How far the corners of structures lie ahead of a found front: log of what both must grow by to meet it."""
        out = np.empty(len(index))
        for mine, front, lows in self._beside(index, found):
            (x, y), (low_x, low_y) = (np.log(np.where(part > 0, part, 1.0)) for part in (front, lows))
            at = np.searchsorted(x - y, low_x - low_y)  # x - y ascends along a staircase
            out[mine] = np.minimum(np.append(x, np.inf)[at] - low_x, np.append(np.inf, y)[at] - low_y)
        return out

    def _beside(self, index: np.ndarray, found: Swept) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each system: places of its structures in `index`, its front [2, N], and their corners [2, mine]."""
        step, memory = uses(self.plan.space)
        system_of = self._system_of(index)
        for s in np.unique(system_of):
            mine = np.flatnonzero(system_of == s)
            x, y, _ = _seeded(found, int(s)).points()
            yield mine, np.stack([x, y]), (self.plan.lows[index[mine]] * np.array([step, memory])).T

    def sweep(self, index: np.ndarray, hint: Swept | None) -> Swept:
        """The nest over some structures, in their order; returns what is new against the hint."""
        counts = np.zeros(len(COUNTS), np.int64)
        ids, systems, values = [], [], []
        system_of = self._system_of(index)
        for s in np.unique(system_of):
            front = _seeded(hint, int(s)) if hint is not None else new_staircase()
            for w, mine in self._by_world(index[system_of == s]):
                self._sweep_world(w, mine, front, counts)
            x, y, key = front.points()
            new = ~np.isin(key, hint.ids) if hint is not None else np.ones(len(key), dtype=bool)
            ids.append(key[new])
            systems.append(np.full(int(new.sum()), s))
            values.append(np.stack([x[new], y[new]], axis=1))
        if not ids:
            return _nothing()
        return Swept(
            ids=np.concatenate(ids), systems=np.concatenate(systems), values=np.concatenate(values), counts=counts
        )

    def first_variants(self, index: np.ndarray) -> Swept:
        """What some structures have under the first variant of each alone: most of a front for little, uncounted.

        First on their axes are the values that are expected to win. Blocks sweep these structures again, and count.
        """
        whole, self.kinds = self.kinds, [_kinds(world, _firsts(world.variants)) for world in self.worlds]
        found = self.sweep(index, None)
        self.kinds = whole
        return replace(found, counts=np.zeros_like(found.counts))

    def _sweep_world(self, w: int, index: np.ndarray, front: Staircase, counts: np.ndarray) -> None:
        part = self.structures.take(index)
        sweep(
            self.tables[w], _part(part), self.kinds[w], self.options[w], self._filter(w, part), front,
            self.plan.prune, np.ascontiguousarray(self.plan.lows[index]), counts,
        )  # fmt: skip

    def enumerate(self, index: np.ndarray) -> Swept:
        """Every candidate of some structures, composed in batches; for objectives without proven bounds."""
        space, counts = self.plan.space, np.zeros(len(COUNTS), np.int64)
        higher = space.higher
        best_ids, best = np.zeros(0, np.int64), np.zeros((0, len(space.objectives)))
        counts[0] = len(index)
        for ids in batches(self.plan.enumeration, index, ENUMERATED):
            columns = compose_ids(space, self.plan.enumeration, ids, gate=True)
            fits = ~np.isnan(columns["step_time_s"])
            counts[1] += len(ids)
            counts[2] += int(fits.sum())
            counts[3] += int(fits.sum())
            counts[4] += int((~fits).sum())
            keep = fits & self._satisfies(ids, columns)
            values = np.stack([columns[o.column][keep] for o in space.objectives], axis=1)
            best_ids, best = np.concatenate([best_ids, ids[keep]]), np.concatenate([best, values])
            if len(best_ids):
                stay = non_dominated(best, best_ids, higher)
                best_ids, best = best_ids[stay], best[stay]
        return Swept(ids=best_ids, systems=np.zeros(len(best_ids), np.int64), values=best, counts=counts)

    def _satisfies(self, ids: np.ndarray, columns: dict[str, np.ndarray]) -> np.ndarray:
        ok = np.ones(len(ids), dtype=bool)
        left = structure_filters(self.plan.space)[1]
        known = {**columns, **known_values(self.plan.space, self.plan.enumeration, ids)} if left else {}
        for expression in left:
            ok &= np.asarray(expression.evaluate(known), dtype=bool)
        return ok

    def _by_world(self, index: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        world = self.structures.world[index]
        for w in np.unique(world):
            yield int(w), index[world == w]

    def _system_of(self, index: np.ndarray) -> np.ndarray:
        return np.asarray(self.system_of_world[self.structures.world[index]])

    def _options(self, world: World) -> Options:
        step, memory = uses(self.plan.space)
        c = world.choices
        codes = [text_code(str(recompute)) for recompute in c.plain_recomputes]
        return Options(
            plain=np.array(c.plain), plain_codes=np.array(codes, dtype=np.float64),
            block_layers=np.array(c.block_layers), block_ids=np.array(c.block_ids),
            told_layers=np.array(c.told_layers), block_code=text_code(RecomputeKind.BLOCK.value),
            buckets=np.array(c.buckets), bucket_ids=np.array(c.bucket_ids), corner=world.tables.again.shape[1] - 1,
            use_step=step, use_memory=memory,
        )  # fmt: skip

    def _scale(self, world: World) -> np.ndarray:
        """What turns step time into the columns that follow from it (nest.Filter.scale)."""
        space, system = self.plan.space, world.system
        tokens = float(space.workload.tokens)
        flops = model_flops_per_token(space.model, space.workload.seq) * tokens / system.num_chips
        return np.array([tokens, system.num_chips, flops, system.half_peak, system.price_usd_per_s, system.power_w,
                         system.co2_kg_per_s], dtype=float)  # fmt: skip

    def _filter(self, w: int, part: Structures) -> Filter:
        """Constraints of the space as programs over DERIVED, OPTION_VALUES, OWN_VALUES and VARIANT_VALUES."""
        world = self.worlds[w]
        names = (*DERIVED, *OPTION_VALUES, *OWN_VALUES, *VARIANT_VALUES)
        active: list[Expression] = structure_filters(self.plan.space)[1] if self.plan.bounded else []
        programs = [expression.program(names) for expression in active]
        own = np.zeros((len(part) if programs else 0, len(OWN_VALUES)))
        of_variant = np.zeros((len(world.variants.ids) if programs else 0, len(VARIANT_VALUES)))
        if programs:
            texts: dict[str, Any] = strategy_values(world.strategy)
            own[:, : len(SIZES) + 1] = part.sizes
            own[:, OWN_VALUES.index("num_micro_batches")] = part.num_micro_batches
            for name in OF_WORLD:
                own[:, OWN_VALUES.index(name)] = texts[name]
            for v, strategy in enumerate(world.variants.strategies):
                told: dict[str, Any] = strategy_values(strategy)
                of_variant[v] = [told[name] for name in VARIANT_VALUES]
            own[:, OWN_VALUES.index("schedule")] = schedule_codes()[part.schedule]
        return Filter(
            opcodes=np.concatenate([p[0] for p in programs]) if programs else np.zeros(0, np.int64),
            operands=np.concatenate([p[1] for p in programs]) if programs else np.zeros(0),
            ends=np.cumsum([len(p[0]) for p in programs], dtype=np.int64), values=np.zeros(len(names)),
            stack=np.zeros(max((e.stack_size for e in active), default=1)), own=own, of_variant=of_variant,
            scale=self.scales[w],
        )  # fmt: skip


def _firsts(variants: Variants) -> Variants:
    """Of each kit the first variant alone: the first value of every axis."""
    kits = variants.kits
    return replace(variants, members=variants.members[kits[:-1]], kits=np.arange(len(kits)))


def _kinds(world: World, v: Variants) -> Kinds:
    keeps = world.keeps.values
    hosts = np.unique(keeps[:, 2:], axis=0, return_index=True)[1]
    num = len(hosts)  # the last four of KEEP_AXES vary fastest
    shares, share_of = np.unique(keeps[:num, 2], return_inverse=True)
    rests, rest_of = np.unique(keeps[:num, 3:], axis=0, return_inverse=True)
    return Kinds(
        prices=np.array(world.prices), ids=np.array(v.ids), needs=np.array(v.needs), tree=grown(v, world.columns),
        gathers=keeps[::num, :2].copy(), hosts=keeps[:num, 2:].copy(), share_of=share_of.astype(np.int64),
        shares=shares, rest_of=rest_of.reshape(-1).astype(np.int64), rests=np.ascontiguousarray(rests),
        keep_ids=np.array(world.keeps.ids), keep_needs=np.array(world.keeps.needs), pairs=np.array(world.pairs),
    )  # fmt: skip


def _part(s: Structures) -> Part:
    return Part(row=s.row, kit=s.kit, net=s.net, shared=s.shared, replicas=s.replicas, layout=s.layout,
                schedule=s.schedule, program=s.program, pp=s.pp, vpp=s.vpp, m=s.num_micro_batches, id=s.id,
                flags=s.flags, zero=s.zero, num_blocks=s.num_blocks, legal=s.legal)  # fmt: skip


def _seeded(found: Swept, system: int) -> Staircase:
    """The front of one system as a staircase: its points differ, and each has the least memory of all as fast."""
    front, mine = new_staircase(), np.flatnonzero(found.systems == system)
    mine = mine[np.argsort(found.values[mine, 0])]
    n = len(mine)
    front.x[:n], front.y[:n], front.id[:n], front.size[0] = *found.values[mine].T, found.ids[mine], n
    return front


def merge(parts: list[Swept], space: Space, *, bounded: bool) -> Swept:
    """One front of several, per system where bounded. Parts without points only count."""
    counts = np.sum([p.counts for p in parts], axis=0)
    parts = [p for p in parts if len(p.ids)] or parts[:1]
    if bounded and len(parts) == 1:  # a front of staircases already
        return replace(parts[0], counts=counts)
    ids = np.concatenate([p.ids for p in parts])
    systems = np.concatenate([p.systems for p in parts])
    values = np.concatenate([p.values for p in parts])
    higher = None if bounded else space.higher
    keep = [
        np.flatnonzero(systems == s)[non_dominated(values[systems == s], ids[systems == s], higher)]
        for s in np.unique(systems)
    ]
    kept = np.concatenate(keep) if keep else np.zeros(0, np.int64)
    kept = kept[np.unique(ids[kept], return_index=True)[1]] if len(kept) else kept
    return Swept(ids=ids[kept], systems=systems[kept], values=values[kept], counts=counts)


def sweep_inline(space: Space, *, prune: bool = True, reverse: bool = False) -> Swept:
    """The whole sweep in this process; `reverse` goes through blocks the other way (the front must not change)."""
    return sweep_plan(prepare(space, prune=prune), reverse=reverse)


def sweep_plan(plan: Plan, *, reverse: bool = False) -> Swept:
    """The blocks of a plan one after the other, in this process."""
    worker, found = SweepWorker(plan), plan.warm
    for start, stop in reversed(plan.blocks) if reverse else plan.blocks:
        part = worker.run(start, stop, found if plan.bounded else None)
        found = merge([found, part], plan.space, bounded=plan.bounded)
    return found


def best_of(plan: Plan, found: Swept) -> np.ndarray:
    """Ids of which one is best at each objective: on each system the fastest and the smallest, if bounded."""
    if not plan.bounded:
        signs = np.array([objective.sign for objective in plan.space.objectives])
        return found.ids[np.argmin(found.values * signs, axis=0)] if len(found.ids) else found.ids
    best = [np.zeros(0, np.int64)]
    for s in np.unique(found.systems):
        mine = np.flatnonzero(found.systems == s)
        best.append(found.ids[mine[np.argmin(found.values[mine], axis=0)]])
    return np.unique(np.concatenate(best))


def fingerprint(plan: Plan) -> str:
    """Tells apart plans whose blocks hold other structures, or other prices."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (plan.enumeration.structures.id, plan.lows, plan.order, np.array(plan.bounded)):
        digest.update(part.tobytes())
    return digest.hexdigest()


def is_compiled() -> bool:
    """Whether the machine code of the nest is loaded or on disk; else the first call compiles it, for minutes."""
    return is_compiled_here(sweep)


def measure_rate(space: Space, seconds: float = 10.0) -> tuple[float, int]:
    """Candidates priced per second on one core without pruning, and how many were.

    Structures in a shuffled order, each with PAIRS of its variants and ways to keep, or all where these are fewer.
    """
    plan = prepare(space, prune=False)
    worker, rng = SweepWorker(plan), np.random.default_rng(0)
    order, whole = rng.permutation(len(plan.order)), [kinds.pairs for kinds in worker.kinds]
    worker.sweep(order[:1], None)
    priced, start, size = 0, time.perf_counter(), 16
    for first in range(0, len(order), size):
        for w, pairs in enumerate(whole):
            some = np.zeros_like(pairs)
            there = np.flatnonzero(pairs)
            some.flat[rng.choice(there, min(PAIRS, len(there)), replace=False)] = True
            worker.kinds[w] = worker.kinds[w]._replace(pairs=some)
        priced += int(worker.sweep(order[first : first + size], None).counts[COUNTS.index("priced")])
        if time.perf_counter() - start > seconds:
            break
    return priced / (time.perf_counter() - start), priced
