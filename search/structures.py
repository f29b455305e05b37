"""Every legal structure of a space, with the tables that price it, and the way back from a candidate's id.

A *structure* fixes the sizes and the schedule; the remaining options (recompute, ZeRO, overlaps, buckets) are swept
under each. Nothing is priced twice: structures point into tables of distinct rows. A candidate's id is its index in the
product of all axes in canonical order. Candidates that differ in options without effect are one candidate: the first,
except that full recompute stands for a block that covers every chunk, and the smallest covering block for larger ones.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from estimator.compose import Constants, Tables
from estimator.rules import RULES, Case, check, explain
from estimator.span_codes import CODES
from estimator.step import distinct
from estimator.strategy import Recompute, RecomputeKind, Schedule, Strategy
from estimator.tables import NET_SIZES, ROW_SIZES, TableBuilder, choice_index, read_only
from hardware.system import SystemSpec
from search.axes import AXES, strategy_of
from search.balanced import LayoutFinder, with_space_layout
from search.expression import Expression, strategy_values
from search.idle import drop_repeats, effective, refused_overlaps, shares_weights, without_idle_options
from search.objective import conjuncts
from search.space import Space
from search.worlds import (
    FLAGS,
    OPTION_AXES,
    SIZES,
    WORLD_AXES,
    Choices,
    Enumeration,
    Structures,
    World,
    steps_of,
)

__all__ = ["enumerate_space", "strategy_at", "structure_filters"]

CHUNK = 1 << 18  # grid points that are checked at a time: a few tens of MB of masks
OF_STRUCTURE = frozenset({*SIZES, *WORLD_AXES, "schedule", "dp", "num_micro_batches", "num_gpus"})
Columns = dict[str, np.ndarray]
BLOCK = Recompute(kind=RecomputeKind.BLOCK)


def enumerate_space(space: Space) -> Enumeration:
    """Legal structures of a space, each priced row once. ValueError: more than 62 bits of them, or an open axis."""
    space.refuse_open()
    if space.raw_size >= 2**62:
        raise ValueError(f"the product of the axes must stay below 2^62, but is {space.raw_size:.3g}; shorten an axis")
    maker = _Maker(space)
    parts = [part for s in range(len(space.systems)) for part in maker.worlds_of(s)]
    names = list(Structures.__dataclass_fields__)
    joined = {name: np.concatenate([p[name] for p in parts]) if parts else np.zeros(0, np.int64) for name in names}
    return Enumeration(
        worlds=maker.worlds, structures=Structures(**joined), by_rule=maker.by_rule, examples=maker.examples
    )


def structure_filters(space: Space) -> tuple[list[Expression], list[Expression]]:
    """The conjuncts of all constraints: those that structures alone decide, and the others."""
    parts = [
        Expression(text=c.expression.text, steps=tuple(steps))
        for c in space.constraints
        for steps in conjuncts(c.expression.steps)
    ]
    early = [part for part in parts if OF_STRUCTURE.issuperset(part.variables)]
    return early, [part for part in parts if not OF_STRUCTURE.issuperset(part.variables)]


def strategy_at(space: Space, index: int) -> tuple[SystemSpec, Strategy]:
    """System and strategy of a candidate's id, with options that have no effect as the sweep treats them."""
    values: dict[str, Any] = {}
    for axis in reversed(AXES):
        index, place = divmod(index, len(space.axes[axis.name]))
        values[axis.name] = space.axes[axis.name][place]
    values["recompute"] = effective(space.model, values["recompute"])
    if values["recompute"].kind is not RecomputeKind.BLOCK or values["recompute_per_chunk"] is not None:
        values["recompute_layers"] = 0
    system = space.systems[index]
    strategy = with_space_layout(space, system, strategy_of(values))
    return system, without_idle_options(space.model, strategy, system)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The option axes as numbers: which recompute choices differ on a model, and how large each axis is."""

    kinds: tuple[tuple[Recompute, int], ...]  # with the place on the axis; of equal ones the first
    layers: tuple[tuple[int, int], ...]  # of block recompute, ascending, with the place on the axis
    lengths: dict[str, int]
    flags_on: dict[str, int]
    zeros: int  # depths below one layer, which block recompute refuses

    @classmethod
    def of(cls, space: Space) -> _Options:
        axes = space.axes
        kinds: dict[Recompute, int] = {}
        for place, choice in enumerate(axes["recompute"]):
            assert isinstance(choice, Recompute)
            kinds.setdefault(effective(space.model, choice), place)
        depths = [_number(n) for n in axes["recompute_layers"]]
        return cls(
            kinds=tuple(kinds.items()),
            layers=tuple(sorted((n, i) for i, n in enumerate(depths) if n >= 1)),
            lengths={name: len(axes[name]) for name in OPTION_AXES},
            flags_on={name: sum(v == 1 for v in axes[f"overlap_{name}"]) for name in FLAGS},
            zeros=sum(n < 1 for n in depths),
        )

    @property
    def total(self) -> int:
        """Combinations of all option axes."""
        return math.prod(self.lengths.values())

    @property
    def plain(self) -> tuple[tuple[Recompute, int], ...]:
        """Recompute choices without a depth."""
        return tuple((c, place) for c, place in self.kinds if c.kind is not RecomputeKind.BLOCK)

    @property
    def block(self) -> int | None:
        """Place of block recompute on the axis, if it is there."""
        return next((place for c, place in self.kinds if c.kind is RecomputeKind.BLOCK), None)


class _Maker:
    """Goes through worlds and schedules; keeps the counts."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.worlds: list[World] = []
        self.by_rule: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.steps = steps_of(space)
        self.options = _Options.of(space)
        self.filters = structure_filters(space)[0]

    def worlds_of(self, s: int) -> Iterator[Columns]:
        axes = self.space.axes
        for chosen in itertools.product(*(range(len(axes[name])) for name in WORLD_AXES)):
            places = dict(zip(WORLD_AXES, chosen, strict=True))
            strategy = strategy_of({name: axes[name][i] for name, i in places.items()})
            if strategy.recompute_per_chunk is not None:
                strategy = replace(strategy, recompute=BLOCK)  # whatever else the space asks is refused as an option
            base = s * self.steps["system"] + sum(i * self.steps[name] for name, i in places.items())
            yield from self._world(s, strategy, base, places)

    def _world(self, s: int, strategy: Strategy, base: int, places: dict[str, int]) -> Iterator[Columns]:
        system, model = self.space.systems[s], self.space.model
        priced = tuple(choice for choice, _ in self.options.plain)
        builder = TableBuilder(model, system, self.space.workload, strategy, priced)
        finder = LayoutFinder(self.space, builder)
        found: list[Columns] = []
        for place, schedule in enumerate(self.space.axes["schedule"]):
            assert isinstance(schedule, Schedule)
            start = base + place * self.steps["schedule"]
            found += self._grid(system, replace(strategy, schedule=schedule), start, places, finder)
        if not found:
            return
        joined = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        sizes = {name: joined["sizes"][:, i] for i, name in enumerate((*SIZES, "dp"))}
        row_of, rows = distinct(sizes, ROW_SIZES)
        sizes["dp_replicate"] = np.full(len(row_of), float(strategy.dp_replicate))
        sizes["copies"] = np.where(joined["schedule"] == CODES[Schedule.DUALPIPE], 2.0, 1.0)  # as rules.Case has it
        net_of, nets = distinct(sizes, NET_SIZES)
        tables = _with_corner(builder.tables(rows, nets))
        self.worlds.append(
            World(system=system, strategy=strategy, tables=tables, choices=self._choices(builder, strategy))
        )
        yield {**joined, "world": np.full(len(row_of), len(self.worlds) - 1), "row": row_of, "net": net_of}

    def _choices(self, builder: TableBuilder, strategy: Strategy) -> Choices:
        steps, options = self.steps, self.options
        per_chunk = strategy.recompute_per_chunk is not None
        kinds = () if per_chunk else options.plain
        plain = [(choice_index(builder.choices, c), place * steps["recompute"]) for c, place in kinds]
        # What chunks recompute by themselves is their first layer (estimator/layout.py), whatever the depths say.
        layers = () if options.block is None else ((1, 0),) if per_chunk else options.layers
        start = (options.block or 0) * steps["recompute"]
        buckets = [_number(b) for b in self.space.axes["bucket_bytes"]]
        return Choices(
            plain=np.array(plain, dtype=np.int64).reshape(-1, 2),
            plain_recomputes=tuple(c for c, _ in kinds),
            block_layers=np.array([n for n, _ in layers], dtype=np.int64),
            block_ids=np.array([start + place * steps["recompute_layers"] for _, place in layers], dtype=np.int64),
            told_layers=np.array([0 if per_chunk else n for n, _ in layers], dtype=np.int64),
            buckets=np.array(buckets, dtype=np.float64),
            bucket_ids=np.arange(len(buckets), dtype=np.int64) * steps["bucket_bytes"],
        )

    def _grid(
        self, system: SystemSpec, strategy: Strategy, base: int, places: dict[str, int], finder: LayoutFinder
    ) -> Iterator[Columns]:
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
            kept = self._legal(case, places, finder)
            if kept.size:
                rows = self._rows(case, kept, np.asarray(ids), finder, places)
                if len(rows["id"]):
                    yield rows

    def _legal(self, case: Case, places: dict[str, int], finder: LayoutFinder) -> np.ndarray:
        code = check(case)
        for i in np.unique(code[code > 0]):
            rejected = np.flatnonzero(code == i)
            self._reject(RULES[i - 1].name, len(rejected), explain(case, int(i), int(rejected[0])))
        ok = code == 0
        repeats = self._repeats(case, places, ok)
        repeats |= finder.repeats(case, places["layout"], ok & ~repeats)
        self._reject("no_effect", int(repeats.sum()), "")
        ok &= ~repeats
        values = {**strategy_values(case.strategy), **case.sizes, "num_gpus": float(case.system.num_chips)}
        for expression in self.filters:
            holds = np.broadcast_to(np.asarray(expression.evaluate(values), dtype=bool), ok.shape)
            self._reject("constraint", int((ok & ~holds).sum()), expression.text)
            ok &= holds
        return np.flatnonzero(ok)

    def _reject(self, rule: str, num_structures: int, example: str) -> None:
        if num_structures:
            self.by_rule[rule] += num_structures * self.options.total
            if example:
                self.examples.setdefault(rule, example)

    def _repeats(self, case: Case, places: dict[str, int], ok: np.ndarray) -> np.ndarray:
        """Points that an earlier value of an axis stands for.

        Without effect are sequence parallelism and pieces of its traffic at tp 1, the kind of cp at cp 1, the order of
        ranks at pp 1 or dp 1, buckets of experts where there are none or nothing to share, copies of experts at ep 1,
        and with nothing to share what ZeRO-3 gathers when; groups of what is not interleaved, where those of pp are
        those of 0.
        """
        repeats = np.zeros_like(ok)
        alone = {
            "sequence_parallel": case.tp == 1, "context_parallel": case.cp == 1,
            "rank_order": (case.pp == 1) | (case.dp == 1), "tp_chunks": case.tp == 1,
            "expert_bucket_bytes": ~shares_weights(case.sizes) | (case.model.moe is None),
            "shared_expert_overlap": (case.ep == 1) | (not case.model.moe or not case.model.moe.num_shared_experts),
            "reshard_after_forward": ~shares_weights(case.sizes), "prefetch_blocks": ~shares_weights(case.sizes),
            "interleave_group": np.full(ok.shape, case.strategy.schedule is not Schedule.INTERLEAVED),
            "redundant_experts": (case.ep == 1) | (case.model.moe is None),
        }  # fmt: skip
        for axis, has_no_effect in alone.items():
            idle = np.flatnonzero(ok & has_no_effect)
            for value in self.space.axes[axis][: places[axis]] if idle.size else ():
                mine = case.take(idle)
                earlier: dict[str, Any] = {axis: value}
                strategy = replace(case.strategy, **earlier)
                repeats[idle] |= check(Case(mine.model, strategy, mine.system, mine.workload, mine.sizes)) == 0
        group = case.strategy.interleave_group or case.pp
        for value in self.space.axes["interleave_group"][: places["interleave_group"]]:
            repeats |= ok & (group == (value or case.pp))
        return repeats

    def _rows(
        self, case: Case, kept: np.ndarray, ids: np.ndarray, finder: LayoutFinder, chosen: dict[str, int]
    ) -> Columns:
        s = {name: values[kept] for name, values in case.sizes.items()}
        schedule = case.strategy.schedule
        layouts, depths = finder.made(case.strategy, s)
        program_of, orders = distinct(s, ("pp", "vpp", "num_micro_batches"))
        made = [finder.builder.program(schedule, *map(int, shape)) for shape in zip(*orders.values(), strict=True)]
        shared, per_chunk = shares_weights(s), case.strategy.recompute_per_chunk is not None
        refuses = refused_overlaps(case.strategy, s)
        flags, zero = self._flags(s, shared, refuses), self._stages(shared)
        drop_repeats(chosen, s, shared, flags, zero)
        for replicas in self.space.axes["dp_replicate"][: chosen["dp_replicate"]]:  # ZeRO-0 does not see them
            zero[(s["dp"] % _number(replicas) == 0) & (s["edp"] % _number(replicas) == 0), 0] = -1
        num_blocks = self._num_blocks(depths, per_chunk=per_chunk)
        legal = self._count(flags, zero, num_blocks, num_plain=0 if per_chunk else len(self.options.plain))
        self._count_options(len(kept), refuses, int(legal.sum()), per_chunk=per_chunk)
        columns = {
            "layout": layouts, "schedule": np.full(len(kept), CODES[schedule]),
            "program": np.array(made, dtype=np.int64)[program_of],
            "pp": s["pp"].astype(np.int64), "vpp": s["vpp"].astype(np.int64),
            "num_micro_batches": s["num_micro_batches"].astype(np.int64), "id": ids[kept], "flags": flags,
            "zero": zero, "num_blocks": num_blocks, "legal": legal,
            "sizes": np.stack([s[name] for name in (*SIZES, "dp")], axis=1),
        }  # fmt: skip
        return {name: column[legal > 0] for name, column in columns.items()}

    def _flags(self, s: Columns, shared: np.ndarray, refuses: Columns) -> np.ndarray:
        """Id steps of overlap off and on [S, 4, 2]."""
        works = {"tp": s["tp"] > 1, "ep": s["ep"] > 1, "pp": s["pp"] > 1, "dp": shared}
        flags = np.full((len(shared), len(FLAGS), 2), -1, dtype=np.int64)
        for f, name in enumerate(FLAGS):
            for place, value in enumerate(self.space.axes[f"overlap_{name}"]):
                allowed = works[name] & ~refuses[name] if value == 1 and name in refuses else works[name]
                flags[allowed, f, int(value == 1)] = place * self.steps[f"overlap_{name}"]
            flags[~works[name], f, 0] = 0
        return flags

    def _stages(self, shared: np.ndarray) -> np.ndarray:
        zero = np.full((len(shared), 4), -1, dtype=np.int64)
        for place, stage in enumerate(self.space.axes["zero_stage"]):
            zero[shared, _number(stage)] = place * self.steps["zero_stage"]
        zero[~shared, 0] = 0
        return zero

    def _num_blocks(self, depths: np.ndarray, *, per_chunk: bool) -> np.ndarray:
        """Depths of block recompute that differ: those below the deepest chunk, and one that covers it.

        Full recompute, where it is a choice, stands for the covering one unless it recomputes MTP as well. Where each
        chunk has its own number, the depths do not matter.
        """
        if self.options.block is None or per_chunk:
            return np.full(len(depths), int(self.options.block is not None), dtype=np.int64)
        layers = np.array([n for n, _ in self.options.layers], dtype=np.int64)
        below = np.searchsorted(layers, depths, side="left")
        full = any(c.kind is RecomputeKind.FULL for c, _ in self.options.kinds)
        covers = (below < len(layers)) & (not full or self.space.model.num_mtp_layers > 0)
        return np.asarray(below + covers, dtype=np.int64)

    def _count(self, flags: np.ndarray, zero: np.ndarray, num_blocks: np.ndarray, num_plain: int) -> np.ndarray:
        """Candidates per structure: recompute x overlaps x (ZeRO and DP options, buckets where they act)."""
        on = flags >= 0
        ways = on[:, :3].sum(axis=2).prod(axis=1)
        stages, low = (zero >= 0).sum(axis=1), (zero[:, :3] >= 0).sum(axis=1)
        buckets = self.options.lengths["bucket_bytes"]
        state = on[:, 3, 0] * stages + on[:, 3, 1] * (low * buckets + (zero[:, 3] >= 0))
        return np.asarray((num_plain + num_blocks) * ways * state, dtype=np.int64)

    def _count_options(self, num: int, refuses: Columns, legal: int, *, per_chunk: bool) -> None:
        """Split what is not legal under `num` legal structures into rules, in their order, and repetitions."""
        n, options = self.options.lengths, self.options
        bad = options.zeros if options.block is not None else 0
        if per_chunk:  # any kind but block
            bad = (n["recompute"] - (options.block is not None)) * n["recompute_layers"]
        rest = options.total // (n["recompute"] * n["recompute_layers"])
        good = (n["recompute"] * n["recompute_layers"] - bad) * rest
        tp, ep = (good // n[f"overlap_{name}"] * options.flags_on[name] for name in ("tp", "ep"))
        both = int((refuses["tp"] & refuses["ep"]).sum()) * (tp // n["overlap_ep"] * options.flags_on["ep"])
        lost = {
            "recompute": num * bad * rest,
            "overlap_tp": int(refuses["tp"].sum()) * tp,
            "overlap_ep": int(refuses["ep"].sum()) * ep - both,
        }
        for rule in RULES:
            if lost.get(rule.name):
                self.by_rule[rule.name] += lost[rule.name]
                law = rule.law.format(recompute_layers=0)
                self.examples.setdefault(rule.name, f"{rule.name}: {law}; {rule.remedy}")
        repeated = num * options.total - legal - sum(lost.values())
        assert repeated >= 0
        if repeated:
            self.by_rule["no_effect"] += repeated


def _with_corner(tables: Tables) -> Tables:
    """The tables with one more recompute choice, the cheapest on each column; read-only, as workers see them."""
    again = np.concatenate([tables.again, tables.again.min(axis=1, keepdims=True)], axis=1)
    # Whole numbers of a recipe are int or float as it was written; jitted code is compiled for each mixture anew.
    return read_only(tables._replace(again=again, constants=Constants(*(float(x) for x in tables.constants))))


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value
