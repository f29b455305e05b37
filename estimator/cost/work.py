"""How much an op does: FLOPs and HBM bytes, from its dims and tensors. Knows no rates."""

from __future__ import annotations

from typing import NamedTuple

from estimator.graph import Block
from estimator.op import Array, Op, OpKind, Phase, product
from estimator.precision import PrecisionRecipe, Role
from hardware.dtype import DType

__all__ = ["Work", "work", "written_bytes"]

PRODUCTS = frozenset({OpKind.MATMUL, OpKind.GROUPED_MATMUL, OpKind.BLOCK_MATMUL})
WHOLE = frozenset(
    {OpKind.SCAN, OpKind.INDEX, OpKind.SCORES, OpKind.CONTEXT, OpKind.ATTENTION}
)  # of them nothing is held
VECTOR_FLOPS_PER_ELEMENT = 8.0  # norms, rotations and activations take 5 to 10; all are bound by memory


class Work(NamedTuple):
    """FLOPs, bytes moved through HBM, and for GEMMs their (groups, m, k, n).

    `behind`: of the bytes, those that move when a tile's arithmetic is done, so that it does not hide them.
    """

    flops: Array
    nbytes: Array
    dtype: DType
    matrix: bool
    gemm: tuple[Array, Array, Array, Array] = (0.0, 0.0, 0.0, 0.0)
    behind: Array = 0.0


def work(op: Op, block: Block, recipe: PrecisionRecipe) -> Work:
    """Work of one op."""
    if op.kind is OpKind.MATMUL:
        rows, inner, width = op.dims
        return _gemm(op, (1.0, rows.size, inner.size, width.size), recipe)
    if op.kind is OpKind.GROUPED_MATMUL:
        groups, routed, k, n = (d.size for d in op.dims)
        m = routed / groups
        return _gemm(op, (groups, k, m, n) if op.phase is Phase.WEIGHT_GRAD else (groups, m, k, n), recipe)
    if op.kind is OpKind.BLOCK_MATMUL:
        rows, blocks, inner, width = op.dims
        m, groups, k, n = rows.size, blocks.size, inner.size, width.size
        return _gemm(op, (groups, k, m, n) if op.phase is Phase.WEIGHT_GRAD else (groups, m, k, n), recipe)
    if op.kind is OpKind.SCAN:
        return Work(2.0 * op.passes * product(op.dims), _scanned(op, block, recipe), recipe.attention, True)
    if op.kind is OpKind.INDEX:
        # The causal half of the scores. Ignores ReLU and the sum over heads: 3 FLOPs against 2 * 128.
        flops = op.passes * product(op.dims) * op.visible
        return Work(flops, _streamed(op, block, recipe), recipe.attention, True)
    if op.kind is OpKind.SCORES or op.kind is OpKind.CONTEXT:
        # Unfused kernels form the whole square, masked half included.
        flops = 2.0 * op.passes * product(op.dims)
        return Work(flops=flops, nbytes=_streamed(op, block, recipe), dtype=recipe.attention, matrix=True)
    if op.kind is OpKind.ATTENTION:
        batch, query, key, heads, qk, value = (d.size for d in op.dims)
        # Causal: half the square (arXiv:2307.08691, sec. 4.1). Ignores softmax: about 5 FLOPs a score against 4 * 128.
        flops = op.passes * batch * query * key * heads * (qk + value) * op.visible
        moved = _streamed(op, block, recipe)
        if op.selects:  # one head of keys, which are values too, read entry by entry: neighbours share nothing
            entries = batch * query * (key / 2.0 * op.visible)
            moved = moved + op.passes * entries * qk * recipe.activation.nbytes
        return Work(flops=flops, nbytes=moved, dtype=recipe.attention, matrix=True)
    if op.streams:
        return _told(op, block, recipe)
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


def written_bytes(op: Op, block: Block, recipe: PrecisionRecipe) -> Array:
    """Of the bytes that `work` counts, those written to HBM; it reads the others."""
    amount = work(op, block, recipe)
    if op.kind in PRODUCTS:
        groups, m, _, n = amount.gemm
        return groups * m * n * (recipe.grad_bytes if op.phase is Phase.WEIGHT_GRAD else recipe.activation.nbytes)
    total: Array = 0.0
    if op.streams:
        outputs = {name: times for name, times in op.streams if name in op.outputs}
        for name, times in outputs.items():
            total = total + times * block.tensors[name].elements * recipe.widths[block.tensors[name].role]
        return op.passes * total
    for name in op.outputs:
        if name not in op.held or op.kind in WHOLE:
            total = total + block.tensors[name].elements * recipe.widths[block.tensors[name].role]
    return op.passes * total


def _told(op: Op, block: Block, recipe: PrecisionRecipe) -> Work:
    """Of a kernel whose rule says how often each tensor moves."""
    elements: Array = 0.0
    nbytes: Array = 0.0
    for name, times in op.streams:
        tensor = block.tensors[name]
        elements = elements + tensor.elements
        nbytes = nbytes + times * tensor.elements * recipe.widths[tensor.role]
    return Work(VECTOR_FLOPS_PER_ELEMENT * elements, op.passes * nbytes, DType.FP32, False)


def _gemm(op: Op, shape: tuple[Array, Array, Array, Array], recipe: PrecisionRecipe) -> Work:
    """Operands in the GEMM's dtype, the result in the activation's.

    Gradients of weights are added to those of earlier micro-batches: read and written, in the gradients' dtype, behind
    the products (in the epilogue of each tile where that is fused, else in a kernel of its own, which also reads the
    product; ignored).
    """
    groups, m, k, n = shape
    dtype = recipe.gemm if op.role is Role.LINEAR_INPUT else recipe.attention
    operands, result = groups * ((m * k + k * n) * dtype.nbytes), groups * m * n
    if recipe.stored_weight_bytes and op.role is Role.LINEAR_INPUT:  # made wider on its way to the engine
        operands = groups * (m * k * dtype.nbytes + k * n * recipe.stored_weight_bytes)
    if op.phase is Phase.WEIGHT_GRAD:
        summed = result * (2.0 * recipe.grad_bytes)
        return Work(2.0 * groups * m * k * n, operands + summed, dtype, True, shape, summed)
    return Work(2.0 * groups * m * k * n, operands + result * recipe.activation.nbytes, dtype, True, shape)


def _streamed(op: Op, block: Block, recipe: PrecisionRecipe) -> Array:
    """Bytes of every input and output, `passes` times over."""
    total: Array = 0.0
    for name in (*op.inputs, *op.outputs):
        tensor = block.tensors[name]
        total = total + tensor.elements * recipe.widths[tensor.role]
    return op.passes * total


def _scanned(op: Op, block: Block, recipe: PrecisionRecipe) -> Array:
    """Bytes of a scan: what it writes beside its output, the states of its chunks, it reads again."""
    states: Array = 0.0
    for name in (op.inputs if op.phase is Phase.BACKWARD else op.outputs)[1:]:
        states = states + block.tensors[name].elements * recipe.widths[block.tensors[name].role]
    return _streamed(op, block, recipe) + op.passes * states
