"""CUDA graphs: which kernels the device gets in one launch, captured once and replayed. Knows no seconds.

Megatron-Core captures attention, or layers as far as shapes are static: where experts take any number of rows, what
does not touch these (its scopes `attn`, `moe_router`, `moe_preprocess`; docs.nvidia.com/megatron-core, "CUDA Graph").
Collectives inside a graph do not end it; an op that is not captured does.
"""

from __future__ import annotations

from estimator.graph import Block, OpGraph
from estimator.op import Axis, Component, Op, OpKind, Phase, Save
from estimator.precision import Role
from estimator.strategy import CudaGraph

__all__ = ["capture"]

ATTENTION = frozenset(
    {Component.ATTENTION, Component.LINEAR_ATTENTION, Component.INDEXER, Component.NORM, Component.RESIDUAL}
)
BUFFER = "graph.gradient"


def capture(graph: OpGraph, scope: CudaGraph) -> OpGraph:
    """The graph with captured ops marked.

    A captured layer keeps the buffer in which the gradient of its output arrives: inputs of a graph have fixed
    addresses (torch.cuda.make_graphed_callables makes one for each graph; its static input is what backward reads
    anyway). A whole captured iteration plans its memory like an eager one.
    """
    if scope is CudaGraph.NONE:
        return graph

    def change(block: Block) -> Block:
        if scope is not CudaGraph.FULL and not block.kind.is_layer:
            return block
        ops = [op.but(captured=True) if _is_captured(op, block, scope) else op for op in block.ops]
        first = next((i for i, op in enumerate(ops) if op.captured and op.phase is Phase.FORWARD), None)
        if scope is CudaGraph.FULL or first is None:
            return block.with_ops(tuple(ops))
        ops[first] = ops[first].but(saves=(*ops[first].saves, Save(BUFFER, Role.ACTIVATION)))
        return block.with_ops(tuple(ops), {BUFFER: block.tensors[block.input]})

    return graph.map(change)


def _is_captured(op: Op, block: Block, scope: CudaGraph) -> bool:
    if op.kind is OpKind.COLLECTIVE:
        return False
    if scope is CudaGraph.ATTENTION:
        return op.component in ATTENTION
    return scope is CudaGraph.FULL or _is_static(op, block)


def _is_static(op: Op, block: Block) -> bool:
    """Whether every shape is known before tokens are routed."""
    dims = [*op.dims, *(dim for name in (*op.inputs, *op.outputs) for dim in block.tensors[name].dims)]
    return all(dim.axis is not Axis.ROUTED or dim.units for dim in dims)
