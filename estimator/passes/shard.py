"""Split: every dim becomes the share of one rank. Axes decide; op names and layer kinds do not.

An op or tensor with a tensor-parallel axis holds all tokens of its TP group; one without holds 1/tp of them under
sequence parallelism (Korthikanti 2022, arXiv:2205.05198, section 4.2).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from estimator.graph import Block, OpGraph
from estimator.op import Array, Axis, Dim, Op, OpKind, Tensor, Weight
from estimator.strategy import ContextParallel, Strategy

__all__ = ["TENSOR_PARALLEL", "is_tensor_parallel", "shard"]

TENSOR_PARALLEL = frozenset({Axis.HEADS, Axis.KV_HEADS, Axis.FFN, Axis.VOCAB})
CORE_KINDS = frozenset({OpKind.SCORES, OpKind.CONTEXT, OpKind.ATTENTION})


def shard(graph: OpGraph, strategy: Strategy) -> OpGraph:
    """The share of one rank, for sizes as numbers or arrays `[R]`."""
    return graph.map(lambda block: _shard_block(block, strategy))


def is_tensor_parallel(dims: tuple[Dim, ...]) -> bool:
    """Whether any of these dims is split over tp."""
    return any(dim.axis in TENSOR_PARALLEL for dim in dims)


def _shard_block(block: Block, s: Strategy) -> Block:
    tensors = {
        name: Tensor(_local(t.dims, s, whole_tokens=is_tensor_parallel(t.dims)), t.role)
        for name, t in block.tensors.items()
    }
    return replace(block, ops=tuple(_shard_op(op, s) for op in block.ops), tensors=tensors)


def _shard_op(op: Op, s: Strategy) -> Op:
    weights = tuple(Weight(w.name, _local(w.dims, s, whole_tokens=True), w.expert, w.linear) for w in op.weights)
    dims = _local(op.dims, s, whole_tokens=is_tensor_parallel(op.dims))
    if op.kind in CORE_KINDS and s.context_parallel is ContextParallel.ULYSSES:
        # Ulysses (Jacobs 2023, arXiv:2309.14509): inside the core a rank holds the whole sequence of 1/cp of its heads.
        per_head = {Axis.QUERY: s.cp, Axis.HEADS: 1.0 / np.asarray(s.cp, dtype=np.float64)}
        dims = tuple(Dim(d.size * per_head.get(d.axis, 1.0), d.axis, d.units) for d in dims)
    return replace(op, dims=dims, weights=weights)


def _local(dims: tuple[Dim, ...], s: Strategy, *, whole_tokens: bool) -> tuple[Dim, ...]:
    return tuple(Dim(_size(dim, s, whole_tokens), dim.axis, dim.units) for dim in dims)


def _size(dim: Dim, s: Strategy, whole_tokens: bool) -> Array:
    axis, size = dim.axis, dim.size
    if axis is Axis.BATCH:
        return size * s.micro_batch
    if axis is Axis.TOKENS:
        split = s.cp if whole_tokens or not s.sequence_parallel else s.cp * s.tp
        return size * s.micro_batch / split
    if axis is Axis.QUERY:
        return size / s.cp
    if axis in {Axis.HEADS, Axis.FFN}:
        return size / s.tp
    if axis is Axis.KV_HEADS:  # fewer heads than ranks: every rank still holds one
        return size / dim.units * np.maximum(dim.units / s.tp, 1.0)
    if axis is Axis.VOCAB:  # padded to a multiple of units * tp, as Megatron does
        return np.ceil(size / (dim.units * s.tp)) * dim.units
    if axis is Axis.EXPERTS:
        return size / s.ep
    if axis is Axis.EXPERT_FFN:
        return size / s.etp
    if axis is Axis.ROUTED:  # balanced routing: every token-parallel rank sends as many rows as it receives
        tokens_split = s.cp * s.tp if s.sequence_parallel else s.cp
        return size * s.micro_batch / tokens_split * s.etp
    return size
