"""Which points of a grid of sizes the rules let through, under one strategy after another. Prices nothing.

A rule is evaluated once for each combination of the values that it looks at: what it read of a strategy is recorded,
and a strategy with the same values there gets the same answer. So most rules are checked once for a whole space, and a
strategy costs a few bitwise ands.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from estimator.rules import RULES, Case, Rule, explain
from estimator.strategy import Offload, Strategy
from hardware.system import SystemSpec
from search.axes import strategy_of
from search.space import Space
from search.worlds import SIZES, VARIANT_AXES

__all__ = ["Rejected", "Slab", "meshes", "pairs_of", "refusal_of", "slabs", "told_of"]

Told = dict[str, Any]
Rejected = dict[str, tuple[int, str]]
"""By rule: how many points it refuses, and an example."""

CHUNK = 1 << 18  # grid points that are checked at a time: a few tens of MB of masks
OF_VARIANTS_ALONE = frozenset({"engine", "cuda_graph", "launches", "offload", "sparse_kernel"})
"""Rules that look at one axis under a structure, the model and the chip: checked before all others, value by value."""
OF_PAIRS = frozenset({"optimizer"})
"""Rules that look at the optimizer and at what is kept on the host, and at nothing else."""
CHECKED = OF_VARIANTS_ALONE | OF_PAIRS | {"options"}  # the reader of a space holds each value to its range
OF_VARIANT = frozenset({*VARIANT_AXES, "overlap"})
MESH = SIZES[:3]
"""tp, cp and pp: what rule `world` looks at, the first that looks at sizes. Its degrees vary slowest in a grid."""
WORLD = next(rule for rule in RULES if rule.name == "world")
DERIVED_FROM = {"dp": (), "num_micro_batches": (), "edp": (), "copies": ("schedule",)}
"""What sizes that rules.Case derives depend on, beside SIZES and the system."""


class _Recorder:
    """A strategy that notes which of its fields are read."""

    def __init__(self, strategy: Strategy, seen: set[str]) -> None:
        self._strategy, self._seen = strategy, seen

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the strategy has
        self._seen.add(name)
        return getattr(self._strategy, name)


class _Sizes(dict[str, np.ndarray]):
    """Sizes of a case that note which are read."""

    def __init__(self, sizes: dict[str, np.ndarray], seen: set[str]) -> None:
        super().__init__(sizes)
        self._seen = seen

    def __getitem__(self, name: str) -> np.ndarray:
        self._seen.add(name)
        return super().__getitem__(name)


def refusal_of(space: Space, system: SystemSpec, axis: str, value: object) -> tuple[str, str]:
    """The rule that refuses a value of an axis of variants on this model and chip, and why; empty where none does."""
    case = Case.of(space.model, strategy_of({axis: value}), system, space.workload)
    for code, rule in enumerate(RULES, start=1):
        if rule.name in OF_VARIANTS_ALONE and not np.all(rule.ok(case)):
            return rule.name, explain(case, code)
    return "", ""


def pairs_of(
    space: Space, system: SystemSpec, strategies: Sequence[Strategy], shares: np.ndarray
) -> tuple[np.ndarray, Rejected]:
    """Which variants and `shares` on the host [N, 4] rules let stand together [V, N]; else the rule, and why."""
    ok = np.ones((len(strategies), len(shares)), dtype=bool)
    refused: Rejected = {}
    known: dict[tuple[object, bytes], tuple[str, str]] = {}
    for v, strategy in enumerate(strategies):
        for k, share in enumerate(shares):
            key = (strategy.optimizer, share.tobytes())
            if key not in known:
                offload = Offload(**{f.name: float(x) for f, x in zip(fields(Offload), share, strict=True)})
                case = Case.of(space.model, replace(strategy, offload=offload), system, space.workload)
                rules = ((code, rule) for code, rule in enumerate(RULES, start=1) if rule.name in OF_PAIRS)
                broken = next(((code, rule) for code, rule in rules if not np.all(rule.ok(case))), None)
                known[key] = ("", "") if broken is None else (broken[1].name, explain(case, broken[0]))
            rule_name, why = known[key]
            if rule_name:
                ok[v, k] = False
                refused[rule_name] = (refused.get(rule_name, (0, ""))[0] + 1, why)
    return ok, refused


@dataclass(slots=True)
class Slab:
    """Some points of a grid, with the answer of each rule to whatever has been asked.

    `flat` [N]: their places in the product of SIZES.
    """

    space: Space
    system: SystemSpec
    flat: np.ndarray
    index: tuple[np.ndarray, ...]
    sizes: dict[str, np.ndarray]
    _known: dict[str, dict[tuple[str, ...], dict[tuple[Any, ...], np.ndarray]]] = field(default_factory=dict)
    _last: tuple[Strategy, Case] | None = None

    @classmethod
    def of(cls, space: Space, system: SystemSpec, flat: np.ndarray) -> Slab:
        """The points of a grid at some places."""
        index = np.unravel_index(flat, tuple(len(space.axes[name]) for name in SIZES))
        values = [np.array(space.axes[name], dtype=np.float64) for name in SIZES]
        sizes = {name: v[i] for name, v, i in zip(SIZES, values, index, strict=True)}
        return cls(space, system, flat, index, sizes)

    def case(self, strategy: Strategy) -> Case:
        """These points under a strategy; the last one asked for is kept."""
        if self._last is None or self._last[0] is not strategy:
            case = Case.of(self.space.model, strategy.with_sizes(self.sizes), self.system, self.space.workload)
            self._last = strategy, case
        return self._last[1]

    def ok(self, rule: Rule, strategy: Strategy, told: Told) -> np.ndarray:
        """Which points a rule lets through [N]; `told`: what `told_of` says of the strategy."""
        known = self._known.setdefault(rule.name, {})
        for reads, answers in known.items():
            mask = answers.get(tuple(told[name] for name in reads))
            if mask is not None:
                return mask
        case, seen = self.case(strategy), set[str]()
        watched: Any = _Recorder(case.strategy, seen)
        sizes = _Sizes(case.sizes, seen)
        mask = np.broadcast_to(rule.ok(Case(case.model, watched, case.system, case.workload, sizes)), self.flat.shape)
        reads = _reads(seen, told)
        if rule.name not in CHECKED and (variants := OF_VARIANT.intersection(reads)):
            law = f"rule {rule.name} looks at {', '.join(sorted(variants))}, whose values share one legality here"
            raise AssertionError(f"{law}; move it from VARIANT_AXES to WORLD_AXES (search/worlds.py)")
        known.setdefault(reads, {})[tuple(told[name] for name in reads)] = mask
        return mask

    def admits(self, strategy: Strategy) -> np.ndarray:
        """Points that all rules let through [N]."""
        alive, told = np.ones(self.flat.shape, dtype=bool), told_of(strategy)
        for rule in RULES:
            alive &= self.ok(rule, strategy, told)
        return alive

    def legal(self, strategy: Strategy, rejected: Rejected, known: Collection[str] = ()) -> np.ndarray:
        """The same; `rejected` gets how many each rule refuses first, and an example unless it is `known`."""
        alive, told = np.ones(self.flat.shape, dtype=bool), told_of(strategy)
        for code, rule in enumerate(RULES, start=1):
            alive = self._sift(code, rule, strategy, told, alive, rejected, known)
        return alive

    def _sift(
        self, code: int, rule: Rule, strategy: Strategy, told: Told, alive: np.ndarray, rejected: Rejected,
        known: Collection[str] = (),
    ) -> np.ndarray:  # fmt: skip
        mask = self.ok(rule, strategy, told)
        refused = alive & ~mask
        if num := int(np.count_nonzero(refused)):
            before, example = rejected.get(rule.name, (0, ""))
            if not example and rule.name not in known:
                first = np.flatnonzero(refused)[:1]
                example = explain(self.case(strategy).take(first), code)
            rejected[rule.name] = (before + num, example)
            return alive & mask
        return alive

    def common(self, strategy: Strategy, rejected: Rejected) -> np.ndarray:
        """Points that the first rules let through [N], as far as these look at sizes alone."""
        alive, told = np.ones(self.flat.shape, dtype=bool), told_of(strategy)
        for code, rule in enumerate(RULES, start=1):
            if rule.name in CHECKED:
                continue
            self.ok(rule, strategy, told)
            if any(self._known[rule.name]):
                break
            alive = self._sift(code, rule, strategy, told, alive, rejected)
        return alive


def meshes(space: Space, system: SystemSpec) -> np.ndarray:
    """Places [M] in the product of tp, cp and pp that rule `world` lets through, ascending.

    Degree by degree: a product that divides the chips is one of degrees that do, so what the first alone rule out is
    never multiplied out, and ranges of hundreds of degrees cost what their divisors cost.
    """
    places, kept = np.zeros(1, dtype=np.int64), {name: np.ones(1) for name in MESH}
    for name in MESH:
        values = np.array(space.axes[name], dtype=np.float64)
        kept = {other: np.repeat(v, len(values)) for other, v in kept.items()} | {name: np.tile(values, len(places))}
        places = (places[:, None] * len(values) + np.arange(len(values))).ravel()
        case = Case.of(space.model, Strategy().with_sizes(kept), system, space.workload)
        ok = np.broadcast_to(WORLD.ok(case), places.shape)
        places, kept = places[ok], {other: v[ok] for other, v in kept.items()}
        if not len(places):
            break
    return places


def slabs(space: Space, system: SystemSpec, strategy: Strategy, rejected: Rejected) -> Iterator[Slab]:
    """Every combination of SIZES on one system, a chunk at a time, but for what no strategy makes legal."""
    whole = math.prod(len(space.axes[name]) for name in MESH)
    under = math.prod(len(space.axes[name]) for name in SIZES[len(MESH) :])
    kept = meshes(space, system)
    if len(kept) < whole:
        gap = np.flatnonzero(kept != np.arange(len(kept)))
        first = Slab.of(space, system, np.array([int(gap[0]) if len(gap) else len(kept)]) * under)
        why = explain(first.case(strategy), 1 + RULES.index(WORLD))
        rejected[WORLD.name] = ((whole - len(kept)) * under, why)
    for start in range(0, len(kept) * under, CHUNK):
        mesh, place = np.divmod(np.arange(start, min(start + CHUNK, len(kept) * under)), under)
        slab = Slab.of(space, system, kept[mesh] * under + place)
        alive = slab.common(strategy, rejected)
        if alive.any():
            yield Slab.of(space, system, slab.flat[alive])


def told_of(strategy: Strategy) -> Told:
    """Every field of a strategy by name, those of `overlap` and `offload` as sizes besides."""
    return {f.name: getattr(strategy, f.name) for f in fields(strategy)} | strategy.sizes()


def _reads(seen: set[str], told: Told) -> tuple[str, ...]:
    """Fields of a strategy, other than SIZES, on which what was read depends."""
    of: set[str] = set()
    for name in seen - set(SIZES):
        of.update(DERIVED_FROM.get(name, (name,)))
    if of - set(told):  # a size that Case derives, of which nothing is known here
        of = set(told) - set(SIZES)
    return tuple(sorted(of))
