"""What a pass proposes: a change of decisions, and what it may look at to find one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from search.tuner.decisions import Decisions
from search.tuner.judge import Judge, Look, Replayed

__all__ = ["Move", "Pass", "Seen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Joins to set and to undo, and other fields of decisions. sure: a theorem says that it does not lose."""

    ops: tuple[int, ...] = ()
    tensors: tuple[int, ...] = ()
    ops_apart: tuple[int, ...] = ()
    tensors_apart: tuple[int, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    sure: bool = False

    def applied(self, decisions: Decisions) -> Decisions:
        """The decisions with this changed."""
        ops, tensors = decisions.ops, decisions.tensors
        if self.ops or self.ops_apart:
            ops = ops.copy()
            ops[list(self.ops)], ops[list(self.ops_apart)] = True, False
        if self.tensors or self.tensors_apart:
            tensors = tensors.copy()
            tensors[list(self.tensors)], tensors[list(self.tensors_apart)] = True, False
        return replace(decisions, ops=ops, tensors=tensors, **self.fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a pass looks at: decisions and what they come to. enabled: names of the passes that are on.

    free_ops [K - 1], free_tensors [G - 1]: joins that are open; the coarsened view has settled the others. classes
    [K - 1]: joins alike in blocks that repeat have one number. number: of the round, from 0.
    """

    judge: Judge
    decisions: Decisions
    look: Look
    replayed: Replayed
    enabled: frozenset[str]
    free_ops: np.ndarray
    free_tensors: np.ndarray
    classes: np.ndarray
    number: int


class Pass(Protocol):
    """Proposes alternatives, of each of which at most one is taken. saves_memory: it runs when over the budget."""

    name: str
    saves_memory: bool

    def propose(self, seen: Seen) -> Iterable[tuple[Move, ...]]:
        """Alternatives in order of the critical path, the likeliest of each first."""
        ...
