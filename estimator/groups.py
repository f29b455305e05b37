"""Which ranks are in a group: how many, and how far apart. Ranks count tp, cp, dp, pp from the inside out.

Expert groups fold over the same ranks: etp innermost, then ep. Knows nothing of links.
"""

from __future__ import annotations

import numpy as np

from estimator.graph import Block, OpGraph
from estimator.op import Array, Group, OpKind
from estimator.strategy import Strategy

__all__ = ["between_ranks", "size_and_stride"]


def size_and_stride(group: Group, strategy: Strategy) -> tuple[Array, Array]:
    """Members of a group, and the ranks from one to the next."""
    s = strategy
    return {Group.TP: (s.tp, 1.0), Group.CP: (s.cp, s.tp), Group.ETP: (s.etp, 1.0), Group.EP: (s.ep, s.etp)}[group]


def between_ranks(graph: OpGraph, strategy: Strategy) -> OpGraph:
    """The graph without the traffic of groups of one, which goes nowhere.

    Passes keep it, at no cost, for the rows of a batch that have larger groups.
    """
    lone = {group for group in (Group.TP, Group.CP, Group.EP, Group.ETP)
            if np.max(size_and_stride(group, strategy)[0]) == 1}  # fmt: skip

    def change(block: Block) -> Block:
        kept = [op for op in block.ops if op.kind is not OpKind.COLLECTIVE or op.group not in lone]
        return block.with_ops(tuple(kept))

    return graph.map(change)
