"""What an enumeration is made of: worlds that share tables, structures as columns of integers, options as steps of ids.

Only holds and counts; structures.py finds which are legal, nest.py sweeps them, candidates.py expands them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from estimator.compose import Tables
from estimator.cost.table import CHANGED_BY
from estimator.strategy import Recompute, Strategy
from hardware.system import SystemSpec
from search.axes import AXES
from search.space import Space

__all__ = [
    "FLAGS", "KEEP_AXES", "OPTION_AXES", "RECIPE_AXES", "SIZES", "VARIANT_AXES", "WORLD_AXES", "Choices", "Enumeration",
    "Keeps", "PriceColumns", "Structures", "Variants", "World", "steps_of",
]  # fmt: skip

SIZES = ("tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch")
WORLD_AXES = ("dp_replicate", "sequence_parallel", "context_parallel", "rank_order", "layout", "recompute_per_chunk",
              "interleave_group", "redundant_experts")  # fmt: skip
KEEP_AXES = ("reshard_after_forward", "prefetch_blocks", "offload_activations", "offload_parameters",
             "offload_gradients", "offload_states")  # fmt: skip
"""What is gathered when, and what is kept in the host's memory: options of a structure under every variant."""
RECIPE_AXES = ("precision", "fusion")
"""Variants of one structure that differ in any price of its operations; what CHANGED_BY lists changes few columns."""
VARIANT_AXES = (*RECIPE_AXES, "tp_chunks", "overlap_cp", "cuda_graph", "shared_expert_overlap", "optimizer",
                "expert_bucket_bytes")  # fmt: skip
"""All variants: axes that no rule holds against a structure (but for the engine that a precision needs)."""
OPTION_AXES = ("recompute", "recompute_layers", "zero_stage", "overlap_tp", "overlap_ep", "overlap_pp", "overlap_dp",
               "bucket_bytes")  # fmt: skip
FLAGS = ("tp", "ep", "pp", "dp")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceColumns:
    """Columns of World.prices: of each recipe `per`, its own and one for each further value of each choice.

    `choices`: places on the axes of CHANGED_BY, in its order.
    """

    recipes: int
    choices: tuple[int, ...]

    @classmethod
    def of(cls, places: Mapping[str, Sequence[int]]) -> PriceColumns:
        """`places`: of the axes of variants, which values there are."""
        recipes = 1
        for name in RECIPE_AXES:
            recipes *= len(places.get(name, (0,)))
        return cls(recipes=recipes, choices=tuple(len(places.get(name, (0,))) for name in CHANGED_BY))

    @property
    def per(self) -> int:
        """Columns of one recipe."""
        return 1 + sum(num - 1 for num in self.choices)

    def column(self, recipe: np.ndarray, choice: int, place: np.ndarray) -> np.ndarray:
        """Where a recipe stands with one choice at another place than the first; at the first, where it stands."""
        further = 1 + sum(num - 1 for num in self.choices[:choice]) + place - 1
        return np.asarray(recipe * self.per + np.where(place > 0, further, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Structures that share their tables: one system, and one value of every axis that decides which rows there are.

    The last recompute choice of the tables is none of the space's: on each column it is the cheapest, for bounds.
    `prices` [R, P + 1]: the rows of a group: of each recipe one with the first value of every other axis of variants,
    then one for each further value of an axis in CHANGED_BY, with that alone changed; last a row that is on each column
    the cheapest of them;
    `columns` says which is where. `pairs` [variants, ways to keep]: whether rules let both stand together.
    """

    system: SystemSpec
    strategy: Strategy
    tables: Tables
    prices: np.ndarray
    columns: PriceColumns
    variants: Variants
    keeps: Keeps
    pairs: np.ndarray
    choices: Choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeps:
    """Values of KEEP_AXES in one world [N].

    `ids`: what each adds to a candidate's id. `values` [N, KEEP_AXES]. `needs` [N, 2]: whether it is a candidate only
    under ZeRO-3, only with overlap of DP, for elsewhere an earlier value means the same.
    """

    ids: np.ndarray
    values: np.ndarray
    needs: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Variants:
    """Values of VARIANT_AXES in one world [V].

    `ids`: what a variant adds to a candidate's id. `price` [V, 1 + CHANGED_BY]: columns of World.prices, of its recipe
    and of what each choice changes. `constants` [V, Constants]: its numbers. `needs` [V, 3]: whether it is a candidate
    only with overlap of TP, of DP, for without them an earlier value means the same; only without overlap of EP, which
    rules refuse beside it. `at`: places on the axes, of
    those that are open here. `members`: which variants there
    are, kit after kit; kit k is members[kits[k]] to members[kits[k + 1]], and a structure names its kit.
    """

    strategies: tuple[Strategy, ...]
    ids: np.ndarray
    at: Mapping[str, np.ndarray]
    price: np.ndarray
    constants: np.ndarray
    needs: np.ndarray
    kits: np.ndarray
    members: np.ndarray

    def of(self, kit: int) -> np.ndarray:
        """The variants of a kit."""
        return self.members[self.kits[kit] : self.kits[kit + 1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The option axes of one world, as arrays for jitted code; ids are what an option adds to a candidate's id.

    `plain` [n, 2]: index into the recompute axis of the tables, id; `plain_recomputes`: the same choices.
    `block_layers`, `block_ids`: layers of block recompute, ascending; `told_layers`: what constraints see of them, 0
    where each chunk recomputes its own number. `buckets`, `bucket_ids`: bytes, in axis order.
    """

    plain: np.ndarray
    plain_recomputes: tuple[Recompute, ...]
    block_layers: np.ndarray
    block_ids: np.ndarray
    told_layers: np.ndarray
    buckets: np.ndarray
    bucket_ids: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Structures:
    """Columns [S] of every legal structure.

    `row`: group of price rows (World.prices); `kit`: which variants it has; `shared`: whether several ranks hold the
    same weights; `replicas` of HSDP. `flags` [S, 4, 2]: what turning tp, ep, pp,
    dp overlap off or on adds to the id; -1 where that is not a candidate. `zero` [S, 4]: the same for ZeRO stages.
    `num_blocks`: how many of the world's block-recompute depths apply. `legal`: candidates under the structure, at
    least 1. `sizes` [S, SIZES and dp]: for constraints and display.
    """

    world: np.ndarray
    row: np.ndarray
    kit: np.ndarray
    net: np.ndarray
    shared: np.ndarray
    replicas: np.ndarray
    layout: np.ndarray
    schedule: np.ndarray
    program: np.ndarray
    pp: np.ndarray
    vpp: np.ndarray
    num_micro_batches: np.ndarray
    id: np.ndarray
    flags: np.ndarray
    zero: np.ndarray
    num_blocks: np.ndarray
    legal: np.ndarray
    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.id)

    def take(self, index: np.ndarray | slice) -> Structures:
        """Some of the rows."""
        return Structures(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})


@dataclass(slots=True, kw_only=True)
class Enumeration:
    """All worlds and structures of a space, and what was rejected why.

    `by_rule`: candidates by the first rule that rejects them, `no_effect` for repetitions, `constraint` for what a
    constraint on structures refuses; raw = legal + all of them.
    """

    worlds: list[World] = field(default_factory=list)
    structures: Structures
    by_rule: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def legal(self) -> int:
        """Legal candidates; options without effect are counted once."""
        return int(self.structures.legal.sum())


def steps_of(space: Space) -> dict[str, int]:
    """By how much an id grows with one place on each axis, and with one `system`."""
    steps: dict[str, int] = {}
    step = 1
    for axis in reversed(AXES):
        steps[axis.name] = step
        step *= len(space.axes[axis.name])
    return {**steps, "system": step}
