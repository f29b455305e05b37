"""How much an op does: FLOPs and HBM bytes, from its dims and tensors. Knows no rates."""

from __future__ import annotations

from typing import NamedTuple

from estimator.graph import Block
from estimator.op import Array, Op, OpKind, Phase, product
from estimator.precision import PrecisionRecipe, Role
from hardware.dtype import DType

__all__ = ["Work", "work"]

VECTOR_FLOPS_PER_ELEMENT = 8.0  # norms, rotations and activations take 5 to 10; all are bound by memory


class Work(NamedTuple):
    """FLOPs, bytes moved through HBM, and for GEMMs their (groups, m, k, n)."""

    flops: Array
    nbytes: Array
    dtype: DType
    matrix: bool
    gemm: tuple[Array, Array, Array, Array] = (0.0, 0.0, 0.0, 0.0)


def work(op: Op, block: Block, recipe: PrecisionRecipe) -> Work:
    """Work of one op."""
    if op.kind is OpKind.MATMUL:
        rows, inner, width = op.dims
        return _gemm(op, (1.0, rows.size, inner.size, width.size), recipe)
    if op.kind is OpKind.GROUPED_MATMUL:
        groups, routed, k, n = (d.size for d in op.dims)
        m = routed / groups
        return _gemm(op, (groups, k, m, n) if op.phase is Phase.WEIGHT_GRAD else (groups, m, k, n), recipe)
    if op.kind is OpKind.SCORES or op.kind is OpKind.CONTEXT:
        # Unfused kernels form the whole square, masked half included.
        flops = 2.0 * op.passes * product(op.dims)
        return Work(flops=flops, nbytes=_streamed(op, block, recipe), dtype=recipe.attention, matrix=True)
    if op.kind is OpKind.ATTENTION:
        batch, query, key, heads, qk, value = (d.size for d in op.dims)
        # Causal: half the square (arXiv:2307.08691, sec. 4.1). Ignores softmax: about 5 FLOPs a score against 4 * 128.
        flops = op.passes * batch * query * key * heads * (qk + value)
        return Work(flops=flops, nbytes=_streamed(op, block, recipe), dtype=recipe.attention, matrix=True)
    elements: Array = 0.0
    nbytes: Array = 0.0
    for name in (*op.inputs, *op.outputs):
        if name in op.held:
            continue
        tensor = block.tensors[name]
        elements = elements + tensor.elements
        nbytes = nbytes + tensor.elements * recipe.widths[tensor.role]
    flops = VECTOR_FLOPS_PER_ELEMENT * elements
    return Work(flops, op.passes * nbytes, DType.FP32, False)


def _gemm(op: Op, shape: tuple[Array, Array, Array, Array], recipe: PrecisionRecipe) -> Work:
    """Operands in the GEMM's dtype, the result in the activation's (gradients of weights in fp32)."""
    groups, m, k, n = shape
    dtype = recipe.gemm if op.role is Role.LINEAR_INPUT else recipe.attention
    out = recipe.grad_bytes if op.phase is Phase.WEIGHT_GRAD else recipe.activation.nbytes
    nbytes = groups * ((m * k + k * n) * dtype.nbytes + m * n * out)
    return Work(2.0 * groups * m * k * n, nbytes, dtype, True, shape)


def _streamed(op: Op, block: Block, recipe: PrecisionRecipe) -> Array:
    """Bytes of every input and output, `passes` times over."""
    total: Array = 0.0
    for name in (*op.inputs, *op.outputs):
        tensor = block.tensors[name]
        total = total + tensor.elements * recipe.widths[tensor.role]
    return op.passes * total
