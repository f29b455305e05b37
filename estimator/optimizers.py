"""Optimizers: bytes of state that a parameter has, and the products that orthogonalise a matrix. Knows no seconds.

Every rule updates an fp32 master copy from gradients; they differ in their moments.

- `adam`: two moments in the recipe's format.
- `adam_8bit`: two moments in blocks of 2048 bytes with an fp32 scale each; those of embeddings stay in fp32 (Dettmers
  2021, arXiv:2110.02861, sections 2.1 and 2.3).
- `sgd`: one moment, the momentum.
- `muon`: matrices have one moment, whose Newton-Schulz iterate is the update; embedding, head and all that is no matrix
  go by Adam (Jordan 2024; Liu 2025, arXiv:2502.16982, section 2).

Muon orthogonalises the matrix that a tensor-parallel rank holds, without its neighbours: Megatron-Core's default
(`--muon-tp-mode blockwise`); Moonlight and Kimi-K2 trained without tensor parallelism.
"""

from __future__ import annotations

from estimator.op import Array, Axis, Component, Dim, Op, OpKind, Weight, larger, smaller
from estimator.precision import PrecisionRecipe, Role
from estimator.strategy import Optimizer

__all__ = ["ITERATIONS", "gathered_bytes", "is_matrix", "iteration", "more_state_bytes", "state_bytes"]

ITERATIONS = 5.0  # of Newton-Schulz (Jordan 2024; arXiv:2502.16982, section 2.1)
BLOCK = 2048.0  # quantised values that share a scale of 4 bytes: arXiv:2110.02861, section 2.1
TABLES = frozenset({Axis.VOCAB, Axis.POSITIONS})


def state_bytes(optimizer: Optimizer, r: PrecisionRecipe) -> float:
    """Bytes of state of a parameter in a matrix that is neither embedding nor head."""
    moments = {
        Optimizer.ADAM: 2 * r.moment_bytes,
        Optimizer.ADAM_8BIT: 2 * (1 + 4 / BLOCK),
        Optimizer.SGD: r.moment_bytes,
        Optimizer.MUON: r.moment_bytes,
    }
    return r.master_bytes + moments[optimizer]


def more_state_bytes(optimizer: Optimizer, r: PrecisionRecipe, weight: Weight, component: Component) -> float:
    """What a parameter of `weight` has beyond that."""
    if optimizer is Optimizer.MUON:
        return 0.0 if is_matrix(weight) else r.moment_bytes
    wide = optimizer is Optimizer.ADAM_8BIT and component is Component.EMBEDDING
    return 2 * (4 - (1 + 4 / BLOCK)) if wide else 0.0


def gathered_bytes(optimizer: Optimizer) -> float:
    """Bytes of a gradient that ranks which share its matrix gather before the update; -1: no rule looks at matrices.

    The momentum of a sharded matrix travels in bf16 (arXiv:2502.16982, section 2.3: at most 5/4 of Adam's traffic).
    """
    return {Optimizer.MUON: 2.0, Optimizer.ADAM_8BIT: 0.0}.get(optimizer, -1.0)


def is_matrix(weight: Weight) -> bool:
    """Whether Muon orthogonalises it: two dims (and one of experts), none of them a table's."""
    dims = _matrix(weight)
    return len(dims) == 2 and not TABLES.intersection(dim.axis for dim in dims)


def _matrix(weight: Weight) -> tuple[Dim, ...]:
    return tuple(dim for dim in weight.dims if dim.axis is not Axis.EXPERTS)


def iteration(weight: Weight) -> tuple[Array, tuple[Op, ...]]:
    """The matrices of a weight, and the products of one Newton-Schulz step on all of them: X X', A A, and B X.

    Ignores sums of matrices and their norm, which the products' kernels take along.
    """
    count: Array = 1.0
    for dim in weight.dims:
        if dim.axis is Axis.EXPERTS:
            count = dim.size
    a, b = (dim.size for dim in _matrix(weight))
    short, long = smaller(a, b), larger(a, b)
    shapes = ((short, long, short), (short, short, short), (short, short, long))
    return count, tuple(_product(weight, count, *shape) for shape in shapes)


def _product(weight: Weight, count: Array, m: Array, k: Array, n: Array) -> Op:
    sizes = (count, count * m, k, n) if weight.expert else (m, k, n)
    kind = OpKind.GROUPED_MATMUL if weight.expert else OpKind.MATMUL
    dims = tuple(Dim(size, Axis.HIDDEN) for size in sizes)
    return Op(name=weight.name, kind=kind, component=Component.MLP, dims=dims, role=Role.ACTIVATION)
