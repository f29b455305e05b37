"""Precision: what low-precision GEMMs add to a graph. Dtypes themselves live in the recipe (estimator/precision.py)."""

from __future__ import annotations

from collections.abc import Iterator

from estimator.graph import Block, OpGraph
from estimator.op import Op, OpKind, Phase
from estimator.precision import PrecisionRecipe, Role

__all__ = ["insert_quantization", "remake_activations"]

GEMMS = frozenset({OpKind.MATMUL, OpKind.GROUPED_MATMUL, OpKind.BLOCK_MATMUL})


def insert_quantization(graph: OpGraph, recipe: PrecisionRecipe) -> OpGraph:
    """One cast per distinct input of the linear layers, where they run in fewer bytes than activations have.

    Rows that already travel in the GEMM's dtype (quantised dispatch) were cast before they left. Casts inside the
    kernel before them are a fusion rule (fused_quantize).
    """
    if recipe.gemm.nbytes >= recipe.activation.nbytes:
        return graph
    return graph.map(lambda block: block.with_ops(tuple(_with_casts(block, recipe))))


def _with_casts(block: Block, recipe: PrecisionRecipe) -> Iterator[Op]:
    cast: set[str] = set()
    for op in block.ops:
        if op.kind in GEMMS and op.role is Role.LINEAR_INPUT:
            x = op.inputs[0]
            already = recipe.nbytes(block.tensors[x].role) <= recipe.gemm.nbytes
            if x not in cast and not already:
                cast.add(x)
                yield Op(
                    name=f"{op.name}.quantize", kind=OpKind.QUANTIZE, component=op.component, inputs=(x,),
                    modules=op.modules, passes=recipe.cast_passes,
                )  # fmt: skip
        yield op


def remake_activations(graph: OpGraph, recipe: PrecisionRecipe) -> OpGraph:
    """Where the recipe says so, backward forms the activation function's output again instead of keeping it."""
    if not recipe.remake_activation:
        return graph

    def change(block: Block) -> Block:
        again = (op for op in block.of_phase(Phase.FORWARD) if op.kind is OpKind.ACTIVATION)
        return block.with_ops((*block.ops, *(op.but(phase=Phase.RECOMPUTE, saves=()) for op in again)))

    return graph.map(change)
