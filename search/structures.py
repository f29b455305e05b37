"""Every legal structure of a space, as columns of integers, with the tables that price them.

A *structure* fixes the sizes and the schedule; the remaining options (recompute, ZeRO, overlaps, buckets) are swept
under each. Nothing is priced twice: structures point into tables of distinct rows. A candidate's id is its index in the
product of all axes in canonical order; of candidates that an option without effect would repeat, the first stays.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from estimator.build import build
from estimator.compose import Tables
from estimator.graph import BlockKind
from estimator.model import ModelSpec
from estimator.rules import RULES, Case, check, explain, paired
from estimator.span import CODES
from estimator.step import distinct
from estimator.strategy import Module, Recompute, RecomputeKind, Schedule, Strategy
from estimator.tables import NET_SIZES, ROW_SIZES, TableBuilder, choice_index
from hardware.system import SystemSpec
from search.axes import AXES, strategy_of
from search.expression import strategy_values
from search.objective import Constraint
from search.space import Space

__all__ = ["FLAGS", "Choices", "Enumeration", "Structures", "World", "enumerate_space", "strategy_at"]

SIZES = ("tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch")
WORLD_AXES = ("sequence_parallel", "context_parallel", "precision", "fusion", "layout", "optimizer")
OPTION_AXES = ("recompute", "recompute_layers", "zero_stage", "overlap_tp", "overlap_ep", "overlap_pp", "overlap_dp",
               "bucket_bytes")  # fmt: skip
FLAGS = ("tp", "ep", "pp", "dp")
CHUNK = 1 << 18  # grid points that are checked at a time: a few tens of MB of masks


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Structures that share their tables: one system and one value of every axis that decides which ops exist."""

    system: SystemSpec
    strategy: Strategy
    tables: Tables
    choices: Choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The option axes of one world, as arrays for jitted code; ids are what an option adds to a candidate's id.

    `plain` [n, 2]: index into the recompute axis of the tables, id. `block_layers`, `block_ids`: layers, ascending. `buckets`, `bucket_ids`: bytes, id.
    """

    plain: np.ndarray
    block_layers: np.ndarray
    block_ids: np.ndarray
    buckets: np.ndarray
    bucket_ids: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Structures:
    """Columns [S] of every legal structure.

    `flags` [S, 4, 2]: what turning tp, ep, pp, dp overlap off or on adds to the id; -1 where that is not a candidate.
    `zero` [S, 4]: the same for ZeRO stages. `num_blocks`: how many of the world's block-recompute depths apply.
    `legal`: candidates under the structure.
    """

    world: np.ndarray
    row: np.ndarray
    net: np.ndarray
    layout: np.ndarray
    schedule: np.ndarray
    pp: np.ndarray
    vpp: np.ndarray
    num_micro_batches: np.ndarray
    id: np.ndarray
    flags: np.ndarray
    zero: np.ndarray
    num_blocks: np.ndarray
    legal: np.ndarray
    sizes: np.ndarray  # [S, SIZES + dp], for constraints and display

    def __len__(self) -> int:
        return len(self.id)

    def take(self, index: np.ndarray | slice) -> Structures:
        """Some of the rows."""
        return Structures(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})


@dataclass(slots=True, kw_only=True)
class Enumeration:
    """All worlds and structures of a space, and what was rejected why."""

    worlds: list[World] = field(default_factory=list)
    structures: Structures
    by_rule: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def legal(self) -> int:
        """Legal candidates; options without effect are counted once."""
        return int(self.structures.legal.sum())


def enumerate_space(space: Space) -> Enumeration:
    """Legal structures of a space, each priced row once. Raises ValueError where the product exceeds 63 bits."""
    if space.raw_size >= 2**62:
        raise ValueError(f"the product of the axes must stay below 2^62, but is {space.raw_size:.3g}; shorten an axis")
    maker = _Maker(space)
    parts = [part for s in range(len(space.systems)) for part in maker.worlds_of(s)]
    names = list(Structures.__dataclass_fields__)
    joined = {name: np.concatenate([p[name] for p in parts]) if parts else np.zeros(0) for name in names}
    return Enumeration(
        worlds=maker.worlds, structures=Structures(**joined), by_rule=maker.by_rule, examples=maker.examples
    )


def strategy_at(space: Space, index: int) -> tuple[SystemSpec, Strategy]:
    """System and strategy of a candidate's id, with options that have no effect as the sweep treats them."""
    values: dict[str, Any] = {}
    for axis in reversed(AXES):
        index, place = divmod(index, len(space.axes[axis.name]))
        values[axis.name] = space.axes[axis.name][place]
    recompute = values["recompute"]
    if recompute.kind is not RecomputeKind.BLOCK:
        values["recompute_layers"] = 0
    system = space.systems[index]
    return system, without_idle_options(space.model, strategy_of(values), system)


def without_idle_options(model: ModelSpec, s: Strategy, system: SystemSpec) -> Strategy:
    """A scalar strategy with options that change nothing written as off: what a person would launch."""
    dp = system.num_chips // (s.tp * s.cp * s.pp)
    shared = dp * s.cp > 1 or s.tp * s.cp * dp // (s.etp * s.ep) > 1
    off: dict[str, int] = {}
    off |= {"overlap_tp": 0} if s.tp == 1 else {}
    off |= {"overlap_ep": 0} if s.ep == 1 else {}
    off |= {"overlap_pp": 0} if s.pp == 1 else {}
    off |= {"overlap_dp": 0, "zero_stage": 0} if not shared else {}
    dp_overlap = off.get("overlap_dp", s.overlap.dp)
    off |= {"bucket_bytes": 0} if not dp_overlap or s.zero_stage >= 3 else {}
    return s.with_sizes(off)


class _Maker:
    """Goes through worlds and schedules; keeps the counts."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.worlds: list[World] = []
        self.by_rule: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.steps: dict[str, int] = {}
        step = 1
        for axis in reversed(AXES):
            self.steps[axis.name] = step
            step *= len(space.axes[axis.name])
        self.system_step = step
        self.options = math.prod(len(space.axes[name]) for name in OPTION_AXES)
        self.filters = [c for c in space.constraints if not c.needs_result and _of_structure(c)]

    def worlds_of(self, s: int) -> Iterator[dict[str, np.ndarray]]:
        axes = self.space.axes
        for places in itertools.product(*(range(len(axes[name])) for name in WORLD_AXES)):
            fixed = {name: axes[name][i] for name, i in zip(WORLD_AXES, places, strict=True)}
            base = s * self.system_step + sum(i * self.steps[n] for n, i in zip(WORLD_AXES, places, strict=True))
            yield from self._world(s, strategy_of(fixed), base, dict(zip(WORLD_AXES, places, strict=True)))

    def _world(self, s: int, strategy: Strategy, base: int, places: dict[str, int]) -> Iterator[dict[str, np.ndarray]]:
        system, model = self.space.systems[s], self.space.model
        kinds = self._recomputes(model)
        builder = TableBuilder(model, system, self.space.workload, strategy, tuple(c for c, _ in kinds if c))
        found: list[dict[str, np.ndarray]] = []
        for place, schedule in enumerate(self.space.axes["schedule"]):
            assert isinstance(schedule, Schedule)
            shaped = strategy_of({**_structure_of(strategy), "schedule": schedule})
            start = base + place * self.steps["schedule"]
            found += self._grid(system, shaped, start, places, builder)
        if not found:
            return
        joined = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        sizes = {name: joined["sizes"][:, i] for i, name in enumerate((*SIZES, "dp"))}
        row_of, rows = distinct(sizes, ROW_SIZES)
        net_of, nets = distinct(sizes, (*NET_SIZES, "dp"))
        tables = builder.tables(rows, nets)
        choices = self._choices(builder, kinds)
        self.worlds.append(World(system=system, strategy=strategy, tables=tables, choices=choices))
        n = len(row_of)
        yield {**joined, "world": np.full(n, len(self.worlds) - 1), "row": row_of, "net": net_of}

    def _recomputes(self, model: ModelSpec) -> list[tuple[Recompute, int]]:
        """Recompute choices that differ on this model, each with its place on the axis; the first of equals stays."""
        present = _modules(model)
        seen: dict[tuple[RecomputeKind, frozenset[Any]], int] = {}
        out: list[tuple[Recompute, int]] = []
        for place, choice in enumerate(self.space.axes["recompute"]):
            assert isinstance(choice, Recompute)
            effective = choice.modules & present
            idle = choice.kind is RecomputeKind.SELECTIVE and not effective
            key = (RecomputeKind.NONE if idle else choice.kind, effective)
            if key not in seen:
                seen[key] = place
                out.append((Recompute() if idle else choice, place))
        return out

    def _choices(self, builder: TableBuilder, kinds: list[tuple[Recompute, int]]) -> Choices:
        axes, steps = self.space.axes, self.steps
        plain = [
            (choice_index(builder.choices, c), i * steps["recompute"])
            for c, i in kinds
            if c.kind is not RecomputeKind.BLOCK
        ]
        block = [i for c, i in kinds if c.kind is RecomputeKind.BLOCK]
        layers = sorted((int(n), i) for i, n in enumerate(axes["recompute_layers"]) if n >= 1) if block else []  # type: ignore[call-overload,operator]
        buckets = list(enumerate(axes["bucket_bytes"]))
        return Choices(
            plain=np.array(plain, dtype=np.int64).reshape(-1, 2),
            block_layers=np.array([n for n, _ in layers], dtype=np.int64),
            block_ids=np.array(
                [block[0] * steps["recompute"] + i * steps["recompute_layers"] for _, i in layers], dtype=np.int64
            ),
            buckets=np.array([float(b) for _, b in buckets]),  # type: ignore[arg-type]
            bucket_ids=np.array([i * steps["bucket_bytes"] for i, _ in buckets], dtype=np.int64),
        )

    def _grid(
        self, system: SystemSpec, strategy: Strategy, base: int, places: dict[str, int], builder: TableBuilder
    ) -> Iterator[dict[str, np.ndarray]]:
        """Legal points of the size grid under one schedule, a chunk at a time."""
        axes = self.space.axes
        shape = tuple(len(axes[name]) for name in SIZES)
        values = [np.array(axes[name], dtype=np.float64) for name in SIZES]
        for start in range(0, math.prod(shape), CHUNK):
            flat = np.arange(start, min(start + CHUNK, math.prod(shape)))
            index = np.unravel_index(flat, shape)
            sizes = {name: v[i] for name, v, i in zip(SIZES, values, index, strict=True)}
            ids = base + sum(i.astype(np.int64) * self.steps[n] for n, i in zip(SIZES, index, strict=True))
            case = Case.of(self.space.model, strategy.with_sizes(sizes), system, self.space.workload)
            kept = self._legal(case, places)
            if kept.size:
                yield self._rows(case, kept, np.asarray(ids), builder)

    def _legal(self, case: Case, places: dict[str, int]) -> np.ndarray:
        code = check(case)
        for i in np.unique(code[code > 0]):
            rule = RULES[i - 1]
            rejected = np.flatnonzero(code == i)
            self.by_rule[rule.name] += len(rejected) * self.options
            self.examples.setdefault(rule.name, explain(case, int(i), int(rejected[0])))
        ok = code == 0
        # An axis without effect keeps its first value only: sequence parallelism at tp 1, the kind of cp at cp 1.
        idle = np.zeros_like(ok)
        if places["sequence_parallel"] > 0:
            idle |= case.tp == 1
        if places["context_parallel"] > 0:
            idle |= case.cp == 1
        self.by_rule["no_effect"] += int((ok & idle).sum()) * self.options
        ok &= ~idle
        for constraint in self.filters:
            values = {**strategy_values(case.strategy), **case.sizes, "num_gpus": float(case.system.num_chips)}
            holds = np.broadcast_to(np.asarray(constraint.expression.evaluate(values)), ok.shape)
            self.by_rule["constraint"] += int((ok & ~holds).sum()) * self.options
            self.examples.setdefault("constraint", constraint.expression.text)
            ok &= holds
        return np.flatnonzero(ok)

    def _rows(self, case: Case, kept: np.ndarray, ids: np.ndarray, builder: TableBuilder) -> dict[str, np.ndarray]:
        s = {name: values[kept] for name, values in case.sizes.items()}
        schedule = case.strategy.schedule
        place_of, places = distinct(s, ("pp", "vpp"))
        layouts = [builder.layout(schedule, int(p), int(v)) for p, v in zip(places["pp"], places["vpp"], strict=True)]
        depths = np.array([builder.depth(i) for i in layouts])[place_of]
        flags, illegal = self._flags(case, s)
        shared = (s["dp"] * s["cp"] > 1) | (s["edp"] > 1)
        zero = self._stages(shared)
        num_blocks = self._num_blocks(depths, case.model)
        legal = self._count(flags, zero, num_blocks)
        self._count_idle(len(kept), illegal, int(legal.sum()))
        return {
            "layout": np.array(layouts, dtype=np.int64)[place_of], "schedule": np.full(len(kept), CODES[schedule]),
            "pp": s["pp"].astype(np.int64), "vpp": s["vpp"].astype(np.int64),
            "num_micro_batches": s["num_micro_batches"].astype(np.int64), "id": ids[kept], "flags": flags,
            "zero": zero, "num_blocks": num_blocks, "legal": legal,
            "sizes": np.stack([s[name] for name in (*SIZES, "dp")], axis=1),
        }  # fmt: skip

    def _flags(self, case: Case, s: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Id steps of overlap off and on [S, 4, 2], and which structures refuse tp and ep overlap."""
        n = len(s["tp"])
        shared = (s["dp"] * s["cp"] > 1) | (s["edp"] > 1)
        works = {"tp": s["tp"] > 1, "ep": s["ep"] > 1, "pp": s["pp"] > 1, "dp": shared}
        side_by_side = (paired(case.strategy.schedule) | (s["pp"] == 1)) & (s["num_micro_batches"] >= 2)
        refuses = {
            "tp": works["tp"] & (not case.strategy.sequence_parallel),
            "ep": works["ep"] & ~side_by_side,
        }
        flags = np.full((n, len(FLAGS), 2), -1, dtype=np.int64)
        for f, name in enumerate(FLAGS):
            values = self.space.axes[f"overlap_{name}"]
            for place, value in enumerate(values):
                allowed = works[name] if value == 0 else works[name] & ~refuses.get(name, np.zeros(n, dtype=bool))
                flags[allowed, f, int(value == 1)] = place * self.steps[f"overlap_{name}"]
            flags[~works[name], f, 0] = 0
        return flags, refuses

    def _stages(self, shared: np.ndarray) -> np.ndarray:
        zero = np.full((len(shared), 4), -1, dtype=np.int64)
        for place, stage in enumerate(self.space.axes["zero_stage"]):
            zero[shared, int(stage)] = place * self.steps["zero_stage"]  # type: ignore[call-overload]
        zero[~shared, 0] = 0
        return zero

    def _num_blocks(self, depths: np.ndarray, model: ModelSpec) -> np.ndarray:
        """Block-recompute depths that differ: those below the deepest chunk, and one that covers it where full does not
        already (full recomputes MTP as well)."""
        kinds = {c.kind for c in self.space.axes["recompute"] if isinstance(c, Recompute)}
        if RecomputeKind.BLOCK not in kinds:
            return np.zeros(len(depths), dtype=np.int64)
        layers = np.sort([int(n) for n in self.space.axes["recompute_layers"] if n >= 1])  # type: ignore[call-overload,operator]
        below = np.searchsorted(layers, depths, side="left")
        covers = (below < len(layers)) & (RecomputeKind.FULL not in kinds or model.num_mtp_layers > 0)
        return np.asarray(below + covers, dtype=np.int64)

    def _count(self, flags: np.ndarray, zero: np.ndarray, num_blocks: np.ndarray) -> np.ndarray:
        """Candidates per structure: recompute x overlaps x (ZeRO and DP options, buckets where they act)."""
        plain = sum(1 for c, _ in self._recomputes(self.space.model) if c.kind is not RecomputeKind.BLOCK)
        on = flags >= 0
        ways = on[:, :3].sum(axis=2).prod(axis=1)
        stages, low = (zero >= 0).sum(axis=1), (zero[:, :3] >= 0).sum(axis=1)
        buckets = len(self.space.axes["bucket_bytes"])
        off_dp, on_dp = on[:, 3, 0], on[:, 3, 1]
        state = off_dp * stages + on_dp * (low * buckets + (zero[:, 3] >= 0))
        return np.asarray((plain + num_blocks) * ways * state, dtype=np.int64)

    def _count_idle(self, num: int, refuses: dict[str, np.ndarray], legal: int) -> None:
        left = num * self.options
        for name in ("tp", "ep"):
            values = self.space.axes[f"overlap_{name}"]
            share = self.options * sum(1 for v in values if v == 1) // len(values)
            lost = int(refuses[name].sum()) * share
            if lost:
                self.by_rule[f"overlap_{name}"] += lost
                rule = next(r for r in RULES if r.name == f"overlap_{name}")
                self.examples.setdefault(rule.name, f"{rule.law}; {rule.remedy}")
            left -= lost
        self.by_rule["no_effect"] += max(left - legal, 0)


def _structure_of(strategy: Strategy) -> dict[str, object]:
    return {name: getattr(strategy, name) for name in WORLD_AXES}


def _modules(model: ModelSpec) -> frozenset[Any]:
    """Recompute modules that this model has."""
    blocks = build(model, 2).blocks
    names = {name for kind, block in blocks.items() if kind is not BlockKind.HEAD for op in block.ops for name in op.modules}
    return frozenset(module for module in Module if module.value in names)


def _of_structure(constraint: Constraint) -> bool:
    """Whether a constraint looks at nothing that is swept under a structure."""
    return not set(constraint.expression.variables) & {*OPTION_AXES}
