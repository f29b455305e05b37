"""Which GEMMs a tensor-parallel collective is cut up with, and what the pair takes side by side.

A gather runs ahead of the GEMMs that read its output: they start on its first piece. A reduction runs behind the GEMM
that makes its input: its last piece has nothing left to hide behind. Backward's duals pair likewise; the gather of an
input that only the weight gradient reads runs in one piece beside the input gradient. Refuses nothing: a collective
without a partner is exposed. Neglects the host's launches of the pieces and pieces of unequal size.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from estimator.graph import Block
from estimator.op import Array, Component, Op, Phase, Traffic, larger
from estimator.strategy import Chunks

__all__ = ["SLOWDOWN", "Side", "added_seconds", "beside", "cuts", "partners", "pieces", "side"]

SLOWDOWN = 0.15  # share of a chip that hidden traffic takes: 20 of 132 SMs (DeepSeek-V3, arXiv:2412.19437, sec. 3.2.2)
GATHERS = frozenset({Traffic.ALL_GATHER, Traffic.COPY})


class Side(Enum):
    """Where a collective runs, seen from its GEMMs."""

    AHEAD = "ahead"  # piece by piece; its first piece is exposed
    BEHIND = "behind"  # piece by piece; its last piece is exposed
    WHOLE = "whole"  # in one piece beside them, for they do not wait for one another


def partners(block: Block) -> dict[str, tuple[str, ...]]:
    """GEMMs of each tensor-parallel collective of a block, by op name; both are of the collective's phase.

    A recomputed op has its forward's name, and its partners may not be recomputed: look at the ops of one phase only.
    """
    return {op.name: op.partners for op in block.ops if op.partners}


MIXERS = frozenset({Component.ATTENTION, Component.LINEAR_ATTENTION, Component.MAMBA})


def side(op: Op) -> Side:
    """On which side of its partners a collective runs."""
    if op.beside == "whole":
        return Side.WHOLE
    return Side.AHEAD if op.collective in GATHERS else Side.BEHIND


def pieces(op: Op, chunks: Chunks) -> int:
    """Pieces of a collective and of the GEMMs beside it. The vocabulary's counts as the way into an MLP."""
    if side(op) is Side.WHOLE:
        return 1
    # Column-parallel layers gather in forward and reduce in backward, row-parallel ones the other way round.
    into = (op.collective in GATHERS) != (op.phase is Phase.BACKWARD)
    if op.component in MIXERS:
        return chunks.attention_in if into else chunks.attention_out
    return chunks.mlp_in if into else chunks.mlp_out


def cuts(ops: Iterable[Op], chunks: Chunks) -> dict[str, int]:
    """Pieces of each GEMM among the ops of one phase that has a collective to run beside."""
    found: dict[str, int] = {}
    for op in ops:
        for name in op.partners:
            found[name] = max(found.get(name, 1), pieces(op, chunks))
    return found


def beside(window: Array, traffic: Array) -> Array:
    """What overlapped traffic adds to the seconds of its window: it takes SLOWDOWN of the chip while it runs."""
    return larger(window + SLOWDOWN * traffic, traffic) - window


def added_seconds(whole: Array, cut: Array, exposed: Array, hidden: Array) -> Array:
    """What a fused pair takes beyond its GEMMs by themselves.

    `whole`, `cut`: seconds of the GEMMs uncut and in pieces; `exposed`, `hidden`: of one piece of the collective and of
    the others: exposed + max(cut + SLOWDOWN * hidden, hidden) - whole.
    """
    return exposed + beside(cut, hidden) + (cut - whole)
