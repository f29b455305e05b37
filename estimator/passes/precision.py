"""Precision: what low-precision GEMMs add to a graph. Dtypes themselves live in the recipe (estimator/precision.py)."""

from __future__ import annotations

from collections.abc import Iterator

from estimator.graph import Block, OpGraph
from estimator.op import Op, OpKind, Phase, Traffic
from estimator.precision import PrecisionRecipe, Role

__all__ = ["insert_quantization", "narrow_gathers", "remake_activations"]

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


def narrow_gathers(graph: OpGraph, recipe: PrecisionRecipe) -> OpGraph:
    """Tensor-parallel gathers of what linear layers read travel in the format of their products, scales included.

    Each rank casts the rows that it has, ahead of the gather: so do Transformer Engine's column-parallel layers with
    inputs and its row-parallel ones with gradients (all-gather of quantized tensors), and torchao's Float8Colwise-
    Parallel. Reductions stay as wide as activations.
    """
    share = recipe.nbytes(Role.LINEAR_INPUT) / recipe.activation.nbytes
    return graph if share >= 1.0 else graph.map(lambda block: _with_narrow_gathers(block, share))


def _with_narrow_gathers(block: Block, share: float) -> Block:
    linear = {op.name for op in block.ops if op.kind is OpKind.MATMUL and op.role is Role.LINEAR_INPUT}
    return block.with_ops(tuple(
        op.but(payload=op.payload * share)
        if op.collective is Traffic.ALL_GATHER and op.partners and linear.issuperset(op.partners) else op
        for op in block.ops
    ))  # fmt: skip


def remake_activations(graph: OpGraph, recipe: PrecisionRecipe) -> OpGraph:
    """Where the recipe says so, backward forms the activation function's output again instead of keeping it."""
    if not recipe.remake_activation:
        return graph

    def change(block: Block) -> Block:
        again = (op for op in block.of_phase(Phase.FORWARD) if op.kind is OpKind.ACTIVATION)
        return block.with_ops((*block.ops, *(op.but(phase=Phase.RECOMPUTE, saves=()) for op in again)))

    return graph.map(change)
