"""Shared experts beside the all-to-all of the routed ones, as Megatron-Core's --moe-shared-expert-overlap runs them.

The way into them hides the dispatch, the way out the combine; their gradients hide the way back likewise. Gradients of
their weights, which may run in a pass of their own, hide nothing here.
"""

from __future__ import annotations

from estimator.graph import Block, OpGraph
from estimator.op import Axis, Component, Group, Op, OpKind, Traffic

__all__ = ["IN", "OUT", "run_beside"]

IN, OUT = "dispatch", "combine"  # what is hidden, in `Op.beside` of the traffic and of the ops that hide it
WIDTHS = frozenset({Axis.FFN, Axis.SHARED})


def run_beside(graph: OpGraph, *, overlap: bool) -> OpGraph:
    """The forward graph with all-to-alls and the ops beside them marked; other blocks are left alone."""
    return graph.map(_marked) if overlap else graph


def _marked(block: Block) -> Block:
    travels = [op.name for op in block.ops if op.collective is Traffic.ALL_TO_ALL and op.group is Group.EP]
    shared = {op.name for op in block.ops if op.component is Component.MLP and op.kind is not OpKind.COLLECTIVE}
    if len(travels) != 2 or not shared:
        return block
    way = dict(zip(travels, (IN, OUT), strict=True))

    def change(op: Op) -> Op:
        if op.name in way:
            return op.but(beside=way[op.name])
        if op.name not in shared:
            return op
        is_out = op.kind is OpKind.MATMUL and op.dims[1].axis in WIDTHS
        return op.but(beside=OUT if is_out else IN)

    return block.with_ops(tuple([change(op) for op in block.ops]))
