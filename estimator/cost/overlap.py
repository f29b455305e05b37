"""Which GEMMs a tensor-parallel collective is cut up with, and what the pair takes side by side.

A gather runs ahead of the GEMMs that read its output, as a ring of copies that take nothing of the chip: they start on
the rows that a rank has itself, then go on piece by piece. A reduction runs behind the GEMM that makes its input: its
last piece has nothing left to hide behind. Backward's duals pair likewise; the gather of an input that only the weight
gradient reads runs in one piece beside the input gradient. So are the defaults of Transformer Engine's user buffers
(ring_exchange on copy engines, pipeline, bulk). Pieces of a GEMM run on several streams: tiles of the next fill the
last wave of the one before, so that cutting costs no waves, only what pieces read twice. Refuses nothing: a collective
without a partner is exposed. Neglects the host's launches of the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from estimator.graph import Block
from estimator.op import Array, Component, Op, Phase, Traffic, larger
from estimator.strategy import Chunks

__all__ = ["SLOWDOWN", "Side", "Traffics", "added_seconds", "beside", "cuts", "partners", "pieces", "side"]

SLOWDOWN = 0.15  # share of a chip that hidden traffic takes: 20 of 132 SMs (DeepSeek-V3, arXiv:2412.19437, sec. 3.2.2)
GATHERS = frozenset({Traffic.ALL_GATHER, Traffic.COPY})


class Side(Enum):
    """Where a collective runs, seen from its GEMMs."""

    AHEAD = "ahead"  # piece by piece; the rank's own rows, 1/tp of all, hide the first
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


class Traffics(NamedTuple):
    """Seconds of the collectives beside some GEMMs: of a gather's first piece and a reduction's last, and of the rest.

    `copied` takes nothing of the chip, `driven` SLOWDOWN of it.
    """

    first: Array = 0.0
    last: Array = 0.0
    copied: Array = 0.0
    driven: Array = 0.0

    def plus(self, op: Op, seconds: Array, num: int) -> Traffics:
        """With one more collective, in `num` pieces."""
        where, piece = side(op), seconds / num
        if where is Side.AHEAD:
            return self._replace(first=self.first + piece, copied=self.copied + (seconds - piece))
        if where is Side.BEHIND:
            return self._replace(last=self.last + piece, driven=self.driven + (seconds - piece))
        return self._replace(driven=self.driven + seconds)


def added_seconds(whole: Array, cut: Array, t: Traffics, tp: Array) -> Array:
    """What a fused pair takes beyond its GEMMs by themselves.

    `whole`, `cut`: seconds of the GEMMs uncut and in pieces. What the rank's own rows leave of the first piece is
    exposed, the last piece too, and all else runs beside: e + max(cut + SLOWDOWN driven, traffic) - whole.
    """
    first = larger(t.first - whole / tp, 0.0)
    window = cut + SLOWDOWN * t.driven
    return first + t.last + (larger(window, (t.first - first) + t.copied + t.driven) - whole)
