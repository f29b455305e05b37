"""The part of a model that an op is of, as pictures and tables show it: finer than `Component`. Knows no colours."""

from __future__ import annotations

from estimator.graph import OpGraph
from estimator.op import Component, Op, OpKind
from estimator.precision import Tag

__all__ = ["Part", "part_names", "part_of"]


class Part(Tag):
    """What a reader tells apart."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    ROTARY = "rotary"
    LINEAR_ATTENTION = "linear_attention"
    SCAN = "scan"  # Mamba-2
    INDEXER = "indexer"
    MLP = "mlp"
    ROUTER = "router"
    EXPERTS = "experts"
    SHARED_EXPERTS = "shared_experts"
    NORM = "norm"
    RESIDUAL = "residual"
    HYPER = "hyper"
    HEAD = "head"
    MTP = "mtp"
    COMMUNICATION = "communication"


BY_KIND = {OpKind.COLLECTIVE: Part.COMMUNICATION, OpKind.ROPE: Part.ROTARY, OpKind.NORM: Part.NORM}
BY_COMPONENT = {c: Part.SCAN if c is Component.MAMBA else Part(c.value) for c in Component}
SHARED = "shared"  # begins the names of the ops of shared experts, which are MLPs otherwise (build/mlp.py)


def part_of(op: Op) -> Part:
    """Norms and rotations are parts of their own wherever they stand, and so is traffic."""
    if op.kind in BY_KIND:
        return BY_KIND[op.kind]
    if op.name.partition(".")[0] == SHARED:
        return Part.SHARED_EXPERTS
    return BY_COMPONENT[op.component]


def part_names(graph: OpGraph) -> dict[str, Part]:
    """The part that the ops of each name are of."""
    return {op.name: part_of(op) for block in graph.blocks.values() for op in block.ops}
