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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from estimator.rules import RULES, Case
from estimator.span_codes import CODES
from estimator.step import distinct
from estimator.strategy import RankOrder, Recompute, RecomputeKind, Schedule, Strategy
from estimator.tables import choice_index
from hardware.system import SystemSpec
from search.axes import AXES, strategy_of
from search.balanced import Admits, LayoutFinder, with_space_layout
from search.expression import Expression, strategy_values
from search.family import Columns, Family, keeps_of, variants_of
from search.idle import effective, refused_overlaps, refuses_ep, shares_weights, without_idle_options
from search.legality import Rejected, Slab, pairs_of, refusal_of, slabs
from search.objective import conjuncts
from search.space import Space
from search.worlds import (
    FLAGS,
    KEEP_AXES,
    OPTION_AXES,
    SIZES,
    VARIANT_AXES,
    WORLD_AXES,
    Choices,
    Enumeration,
    Keeps,
    Structures,
    World,
    steps_of,
)

__all__ = ["enumerate_space", "strategy_at", "structure_filters"]

SHARED = frozenset({"dp_replicate", "rank_order", "layout", "interleave_group"})
"""Of the axes that are neither sizes nor variants, those whose values share price rows."""
OF_STRUCTURE = frozenset({*SIZES, *WORLD_AXES, "schedule", "dp", "num_micro_batches", "num_gpus"})
BLOCK = Recompute(kind=RecomputeKind.BLOCK)


def enumerate_space(space: Space) -> Enumeration:
    """Legal structures of a space, each priced row once. ValueError: more than 62 bits of them, or an open axis."""
    space.refuse_open()
    if space.raw_size >= 2**62:
        raise ValueError(f"the product of the axes must stay below 2^62, but is {space.raw_size:.3g}; shorten an axis")
    maker = _Maker(space)
    for s in range(len(space.systems)):
        maker.system(s)
    names, parts = list(Structures.__dataclass_fields__), maker.parts
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
    """Goes through systems, worlds and schedules; keeps the counts."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.worlds: list[World] = []
        self.parts: list[Columns] = []
        self.by_rule: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.steps = steps_of(space)
        self.options = _Options.of(space)
        self.filters = structure_filters(space)[0]
        self.num_variants = self.num_refusing_ep = 0  # of the system at hand, with what they keep

    def system(self, s: int) -> None:
        """Structures on one system."""
        axes, system = self.space.axes, self.space.systems[s]
        places, left = self._places(system)
        if not all(places.values()):
            return
        first = {name: axes[name][places[name][0]] for name in VARIANT_AXES}
        keeps = keeps_of(self.space, {name: places[name] for name in KEEP_AXES}, self.steps)
        some = variants_of(self.space, system, {}, {name: places[name] for name in VARIANT_AXES}, self.steps)
        pairs, refused = pairs_of(self.space, system, some.strategies, keeps.values[:, 2:])
        for rule, (num, example) in refused.items():
            self.by_rule[rule] += num * (left // pairs.size)
            self.examples.setdefault(rule, example)
        self.num_variants = int(pairs.sum())
        self.num_refusing_ep = int(pairs[[refuses_ep(self.space.model, s) for s in some.strategies]].sum())
        if not self.num_variants:
            return
        worlds = [*itertools.product(*(range(len(axes[name])) for name in WORLD_AXES))]
        families: dict[tuple[int, ...], Family] = {}
        rejected: Rejected = {}
        for slab in slabs(self.space, system, strategy_of(first), rejected):
            for chosen in worlds:
                at = dict(zip(WORLD_AXES, chosen, strict=True))
                values = {name: axes[name][i] for name, i in at.items()}
                key = tuple(i for name, i in at.items() if name not in SHARED)
                if key not in families:
                    families[key] = self._family(system, values, places, keeps, pairs)
                base = s * self.steps["system"] + sum(i * self.steps[name] for name, i in at.items())
                self._world(slab, strategy_of({**values, **first}), base, at, families[key])
        self._reject_all(rejected, len(worlds) * len(axes["schedule"]))
        for family in families.values():
            if family.found:
                world, columns = family.world(self._choices(family))
                self.worlds.append(world)
                self.parts.append({**columns, "world": np.full(len(columns["row"]), len(self.worlds) - 1)})

    def _places(self, system: SystemSpec) -> tuple[dict[str, list[int]], int]:
        """Values of the axes under a structure, but for options, by their place: those that nothing refuses.

        And how many points of the space these leave.
        """
        axes = self.space.axes
        places = {name: [*range(len(axes[name]))] for name in (*VARIANT_AXES, *KEEP_AXES)}
        left = self.steps["system"]
        for name in places:
            each = left // len(axes[name])
            for place, value in enumerate(axes[name]):
                rule, example = refusal_of(self.space, system, name, value)
                if rule:
                    places[name].remove(place)
                    self.by_rule[rule] += each
                    self.examples.setdefault(rule, example)
            left = each * len(places[name])
        return places, left

    def _family(
        self, system: SystemSpec, values: dict[str, object], places: dict[str, list[int]], keeps: Keeps,
        pairs: np.ndarray,
    ) -> Family:  # fmt: skip
        under = {name: places[name] for name in VARIANT_AXES}
        return Family(
            space=self.space, system=system, places=under,
            variants=variants_of(self.space, system, _as_block(values), under, self.steps),
            keeps=keeps, pairs=pairs, choices=tuple(choice for choice, _ in self.options.plain),
        )  # fmt: skip

    def _world(self, slab: Slab, strategy: Strategy, base: int, at: dict[str, int], family: Family) -> None:
        if strategy.recompute_per_chunk is not None:
            strategy = replace(strategy, recompute=BLOCK)  # whatever else the space asks is refused as an option
        for place, schedule in enumerate(self.space.axes["schedule"]):
            assert isinstance(schedule, Schedule)
            scheduled, rejected = replace(strategy, schedule=schedule), dict[str, tuple[int, str]]()
            alive = np.flatnonzero(slab.legal(scheduled, rejected, self.examples))
            self._reject_all(rejected, 1)
            if not len(alive):
                continue
            sizes = {name: values[alive] for name, values in slab.sizes.items()}
            case = Case.of(self.space.model, scheduled.with_sizes(sizes), slab.system, self.space.workload)
            kept = self._kept(case, at, family.finder(scheduled), partial(_admitted, slab, scheduled, alive))
            if not len(kept):
                continue
            ids = base + place * self.steps["schedule"] + np.zeros(len(kept), dtype=np.int64)
            for name, index in zip(SIZES, slab.index, strict=True):
                ids += index[alive[kept]].astype(np.int64) * self.steps[name]
            rows = self._rows(case.take(kept), ids, family)
            if len(rows["id"]):
                family.found.append(rows)

    def _choices(self, family: Family) -> Choices:
        steps, options, choices = self.steps, self.options, family.finder(family.strategy).builder.choices
        per_chunk = family.strategy.recompute_per_chunk is not None
        kinds = () if per_chunk else options.plain
        plain = [(choice_index(choices, c), place * steps["recompute"]) for c, place in kinds]
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

    def _kept(self, case: Case, at: dict[str, int], finder: LayoutFinder, admits: Admits) -> np.ndarray:
        """Of legal points those that no earlier value of an axis stands for, and that constraints let through."""
        ok = np.ones(case.tp.shape, dtype=bool)
        repeats = self._repeats(case, at, admits)
        repeats |= finder.repeats(case, at["layout"], ~repeats, admits)
        self._reject("no_effect", int(repeats.sum()), "")
        ok &= ~repeats
        values = {**strategy_values(case.strategy), **case.sizes, "num_gpus": float(case.system.num_chips)}
        for expression in self.filters:
            holds = np.broadcast_to(np.asarray(expression.evaluate(values), dtype=bool), ok.shape)
            self._reject("constraint", int((ok & ~holds).sum()), expression.text)
            ok &= holds
        return np.flatnonzero(ok)

    def _reject_all(self, rejected: Rejected, times: int) -> None:
        for rule, (num, example) in rejected.items():
            self._reject(rule, num * times, example)

    def _reject(self, rule: str, num_structures: int, example: str) -> None:
        if num_structures:
            self.by_rule[rule] += num_structures * self.options.total * self.num_variants
            if example:
                self.examples.setdefault(rule, example)

    def _repeats(self, case: Case, at: dict[str, int], admits: Admits) -> np.ndarray:
        """Points that an earlier value of an axis stands for.

        Without effect are sequence parallelism at tp 1, the kind of cp at cp 1, the order of ranks at pp 1 or dp 1,
        copies of experts at ep 1, groups of what is not interleaved; those of pp are those of 0.
        """
        repeats = np.zeros(case.tp.shape, dtype=bool)
        alone = {
            "sequence_parallel": case.tp == 1, "context_parallel": case.cp == 1,
            "rank_order": (case.pp == 1) | (case.dp == 1),
            "interleave_group": np.full(case.tp.shape, case.strategy.schedule is not Schedule.INTERLEAVED),
            "redundant_experts": (case.ep == 1) | (case.model.moe is None),
        }  # fmt: skip
        for axis, has_no_effect in alone.items():
            for value in self.space.axes[axis][: at[axis]] if has_no_effect.any() else ():
                repeats |= has_no_effect & admits({axis: value})
        group = case.strategy.interleave_group or case.pp
        for value in self.space.axes["interleave_group"][: at["interleave_group"]]:
            repeats |= group == (value or case.pp)
        return repeats

    def _rows(self, case: Case, ids: np.ndarray, family: Family) -> Columns:
        """Columns of structures, but for those that have no candidate."""
        s, strategy = case.sizes, case.strategy
        layouts, depths = family.finder(strategy).made(strategy, s)
        program_of, orders = distinct(s, ("pp", "vpp", "num_micro_batches"))
        builder = family.finder(strategy).builder
        made = [builder.program(strategy.schedule, *map(int, shape)) for shape in zip(*orders.values(), strict=True)]
        shared, per_chunk = shares_weights(s), strategy.recompute_per_chunk is not None
        refuses = refused_overlaps(strategy, s)
        flags, zero = self._flags(s, shared, refuses), self._stages(shared)
        replicas = self.space.axes["dp_replicate"]
        for earlier in replicas[: replicas.index(int(s["dp_replicate"][0]))]:  # ZeRO-0 does not see them
            zero[(s["dp"] % _number(earlier) == 0) & (s["edp"] % _number(earlier) == 0), 0] = -1
        num_blocks = self._num_blocks(depths, per_chunk=per_chunk)
        kits, num_plain = family.kits(s), 0 if per_chunk else len(self.options.plain)
        ways = family.ways[kits] * np.where(shared[:, None, None, None, None], 1, np.array([1, 0, 0]))
        legal = self._count(flags, zero, num_blocks, num_plain, ways)
        refuses["shared"] = (s["ep"] > 1) & ~refuses["ep"]  # overlap of EP, under variants that refuse it
        self._count_options(len(ids), refuses, int(legal.sum()), per_chunk=per_chunk)
        columns = {
            "layout": layouts, "schedule": np.full(len(ids), CODES[strategy.schedule]), "kit": kits,
            "program": np.array(made, dtype=np.int64)[program_of],
            "shared": shared.astype(np.int64), "replicas": s["dp_replicate"].astype(np.int64),
            "order": np.full(len(ids), [*RankOrder].index(strategy.rank_order)),
            "pp": s["pp"].astype(np.int64), "vpp": s["vpp"].astype(np.int64),
            "num_micro_batches": s["num_micro_batches"].astype(np.int64), "id": ids, "flags": flags,
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

    def _count(
        self, flags: np.ndarray, zero: np.ndarray, num_blocks: np.ndarray, num_plain: int, ways: np.ndarray
    ) -> np.ndarray:
        """Candidates per structure: recompute x variants x overlaps x (ZeRO and DP options, buckets where they act).

        `ways` [S, 2, 2, 2, 3]: those of its kit (Family.ways).
        """
        on = flags >= 0
        stages, low, third = (zero >= 0).sum(axis=1), (zero[:, :3] >= 0).sum(axis=1), zero[:, 3] >= 0
        below = on[:, 3, 1] * low * self.options.lengths["bucket_bytes"]
        any_stage = below + on[:, 3, 0] * stages + on[:, 3, 1] * third
        tp = np.stack([on[:, 0].sum(axis=1), on[:, 0, 1]], axis=1)
        ep = np.stack([on[:, 1].sum(axis=1), on[:, 1, 0]], axis=1)
        ways = (ways * (tp[:, :, None] * ep[:, None, :])[:, :, None, :, None]).sum(axis=(1, 3))  # [S, DP, keeps]
        free = np.stack([any_stage, third * on[:, 3].sum(axis=1), third * on[:, 3, 1]], axis=1)
        both = (ways[:, 0] * free).sum(axis=1) + ways[:, 1, 0] * below
        return np.asarray((num_plain + num_blocks) * on[:, 2].sum(axis=1) * both, dtype=np.int64)

    def _count_options(self, num: int, refuses: Columns, legal: int, *, per_chunk: bool) -> None:
        """Split what is not legal under `num` legal structures into rules, in their order, and repetitions."""
        n, options, total = self.options.lengths, self.options, self.options.total * self.num_variants
        bad = options.zeros if options.block is not None else 0
        if per_chunk:  # any kind but block
            bad = (n["recompute"] - (options.block is not None)) * n["recompute_layers"]
        rest = total // (n["recompute"] * n["recompute_layers"])
        good = (n["recompute"] * n["recompute_layers"] - bad) * rest
        tp, ep = (good // n[f"overlap_{name}"] * options.flags_on[name] for name in ("tp", "ep"))
        both = int((refuses["tp"] & refuses["ep"]).sum()) * (tp // n["overlap_ep"] * options.flags_on["ep"])
        shared = ep // self.num_variants * self.num_refusing_ep
        shared_tp = shared // n["overlap_tp"] * options.flags_on["tp"]
        lost = {
            "recompute": num * bad * rest,
            "overlap_tp": int(refuses["tp"].sum()) * tp,
            "overlap_ep": int(refuses["ep"].sum()) * ep - both,
            "shared_expert_overlap": int(refuses["shared"].sum()) * shared
            - int((refuses["shared"] & refuses["tp"]).sum()) * shared_tp,
        }
        for rule in RULES:
            if lost.get(rule.name):
                self.by_rule[rule.name] += lost[rule.name]
                law = rule.law.format(recompute_layers=0)
                self.examples.setdefault(rule.name, f"{rule.name}: {law}; {rule.remedy}")
        repeated = num * total - legal - sum(lost.values())
        assert repeated >= 0
        if repeated:
            self.by_rule["no_effect"] += repeated


def _admitted(slab: Slab, strategy: Strategy, points: np.ndarray, other: Mapping[str, Any]) -> np.ndarray:
    """Which of some points rules let through with other values of some fields."""
    return slab.admits(replace(strategy, **other))[points]


def _as_block(values: dict[str, object]) -> dict[str, object]:
    """Chunks that recompute their own number of layers do so as blocks."""
    return values if values["recompute_per_chunk"] is None else {**values, "recompute": BLOCK}


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value
