"""A fusion rule: which ops of a block become one kernel, or part of one, and what that keeps, reads and writes.

Only says; match.py finds the ops, rewrite.py changes the block, reading.py makes rules of YAML (docs/fusion.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from types import MappingProxyType

from estimator.op import Axis, Component, OpKind
from estimator.passes.fuse.guard import Guard
from estimator.precision import Role

__all__ = ["PHASES", "After", "Case", "Change", "DimRef", "Join", "Keep", "NewTensor", "Pattern", "Ref", "Result",
           "Rule", "Share"]  # fmt: skip

PHASES = ("train", "prefill", "decode")
NOTHING: Mapping[str, object] = MappingProxyType({})


class After(Enum):
    """Behind which pass a rule works."""

    COLLECTIVES = "collectives"
    QUANTIZATION = "quantization"  # where casts have been put in


class Share(Enum):
    """What siblings have in common."""

    KIND = "kind"
    COMPONENT = "component"
    ROLE = "role"
    MODULES = "modules"
    INPUTS = "inputs"
    INPUT = "input"  # the first
    READER = "reader"  # the first op that reads their first output


@dataclass(frozen=True, slots=True)
class Ref:
    """Tensors of a match: of the op of a `label`, or of all of them ("") those that come in or go out.

    `side`: inputs, outputs or saves; `place`: the one of that number; `tensor`: simply that one.
    """

    label: str = ""
    side: str = ""
    place: int | None = None
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class DimRef:
    """A dim of an op (`side` "dims"), or of one of its tensors, its size times `factor`."""

    label: str
    side: str
    place: int
    number: int
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that only the fused kernel has."""

    name: str
    dims: tuple[DimRef, ...]
    role: Role


@dataclass(frozen=True, slots=True)
class Keep:
    """Tensors kept for backward, in the format of `role` (None: as they were, or as activations).

    `only`: of saves, those in the format of that role.
    """

    ref: Ref
    role: Role | None = None
    only: Role | None = None


Formula = tuple[tuple[Ref, float], ...]
"""How often tensors go through memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What an op must be; what is empty holds of any.

    Edges: it `reads` the first of these labels that is there (as its input number `slot`, where given), or `feeds` one.
    """

    kinds: frozenset[OpKind] = frozenset()
    components: frozenset[Component] = frozenset()
    names: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    classes: frozenset[str] = frozenset()
    widths: frozenset[Axis] = frozenset()
    roles: frozenset[Role] = frozenset()
    reads: tuple[str, ...] = ()
    slot: int | None = None
    feeds: str = ""
    next: bool = False
    optional: bool = False
    alone: bool = False  # nothing else reads what it reads

    @property
    def is_plain(self) -> bool:
        """Whether it asks for a kind alone."""
        return not (self.components or self.names or self.scopes or self.classes or self.widths or self.roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What becomes of an op that stays. None: as it was."""

    passes: float | None = None
    forgets: Role | None = None
    rides: bool | None = None
    holds: tuple[Ref, ...] | None = None
    inputs: tuple[Ref, ...] | None = None
    outputs: tuple[Ref, ...] | None = None
    saves: tuple[Keep, ...] | None = None
    traffic: Formula = ()
    backward: Formula = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The one op that stands for all of a match, in the place of `at` and otherwise like the op `like`."""

    like: str
    at: str
    kind: OpKind | None = None
    component: Component | None = None
    name: str = ""
    dims: tuple[DimRef, ...] | None = None
    inputs: tuple[Ref, ...] | None = None
    outputs: tuple[Ref, ...] | None = None
    saves: tuple[Keep, ...] | None = None
    passes: float | None = None
    traffic: Formula = ()
    backward: Formula = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """One op for siblings, at the place of the first or the last of them."""

    last: bool = False
    adds_widths: bool = False  # it is as wide as all of them
    keeps_views: bool = False  # outputs are views of one buffer: while one is kept, all are


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way in which a rule fires: a graph of patterns, siblings, or the ops of a module; and what follows.

    `once`: labels whose op is in one match only.
    """

    patterns: Mapping[str, Pattern] = field(default_factory=dict)
    share: tuple[Share, ...] = ()  # of siblings, whose one pattern is `patterns[""]`
    modules: frozenset[str] = frozenset()
    when: Guard | None = None
    once: frozenset[str] = frozenset()
    changes: tuple[tuple[str, Change], ...] = ()
    result: Result | None = None
    join: Join | None = None
    tensors: tuple[NewTensor, ...] = ()
    line: int = 0
    needs: tuple[frozenset[OpKind], ...] = field(init=False)  # kinds of which a block must have one each
    told: tuple[tuple[str, Change], ...] = field(init=False)  # changes that say how often tensors move

    def __post_init__(self) -> None:
        needs = [p.kinds for p in self.patterns.values() if p.kinds and not p.optional]
        object.__setattr__(self, "needs", tuple(needs))
        told = [(label, change) for label, change in self.changes if change.traffic or change.backward]
        object.__setattr__(self, "told", tuple(told))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """A named rule. Rules of one pass work in order of priority, the highest first, and of name."""

    name: str
    about: str
    cases: tuple[Case, ...]
    priority: int = 0
    phases: frozenset[str] = frozenset(PHASES)
    chips: tuple[str, ...] = ()
    after: After = After.COLLECTIVES
    place: str = ""

    def fits(self, chip: str) -> bool:
        """Whether there is such a kernel for a chip of that name."""
        return not self.chips or any(fnmatchcase(chip, pattern) for pattern in self.chips)
