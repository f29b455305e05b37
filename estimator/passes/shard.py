"""Split: every dim becomes the share of one rank. Axes decide; op names and layer kinds do not.

An op or tensor with a tensor-parallel axis holds all tokens of its TP group, split or shared by its ranks; one without
holds 1/tp of them under sequence parallelism (Korthikanti 2022, arXiv:2205.05198, section 4.2).
"""

from __future__ import annotations

from dataclasses import replace

from estimator.graph import Block, OpGraph
from estimator.op import Array, Axis, Dim, Op, OpKind, Tensor, Weight, larger, rounded_up
from estimator.strategy import ContextParallel, Strategy

__all__ = ["CORE_KINDS", "TENSOR_PARALLEL", "is_tensor_parallel", "shard"]

TENSOR_PARALLEL = frozenset({Axis.HEADS, Axis.KV_HEADS, Axis.FFN, Axis.VOCAB, Axis.SHARED})
CORE_KINDS = frozenset({OpKind.SCORES, OpKind.CONTEXT, OpKind.ATTENTION})


def shard(graph: OpGraph, strategy: Strategy) -> OpGraph:
    """The share of one rank, for sizes as numbers or arrays `[R]`."""
    return graph.map(_Split(strategy).block)


def is_tensor_parallel(dims: tuple[Dim, ...]) -> bool:
    """Whether any of these dims is split over tp."""
    for dim in dims:  # a plain loop: asked for every op and tensor of a price row
        if dim.axis in TENSOR_PARALLEL:
            return True
    return False


class _Split:
    """Shares under one strategy; shapes recur over ops and blocks, so each is split once."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.known: dict[tuple[Dim, ...], tuple[Dim, ...]] = {}

    def block(self, block: Block) -> Block:
        tensors = {name: Tensor(self.local(t.dims), t.role) for name, t in block.tensors.items()}
        return replace(block, ops=tuple([self.op(op) for op in block.ops]), tensors=tensors)

    def op(self, op: Op) -> Op:
        dims = self.local(op.dims)
        if op.kind in CORE_KINDS and self.strategy.context_parallel is ContextParallel.ULYSSES:
            # Ulysses (Jacobs 2023, arXiv:2309.14509): inside the core a rank holds the whole sequence of 1/cp of its
            # heads.
            per_head = {Axis.QUERY: self.strategy.cp, Axis.HEADS: 1.0 / self.strategy.cp}
            dims = tuple(Dim(d.size * per_head.get(d.axis, 1.0), d.axis, d.units) for d in dims)
        if not op.weights:
            return op.but(dims=dims)
        weights = tuple([Weight(w.name, self.local(w.dims), w.expert, w.linear) for w in op.weights])
        return op.but(dims=dims, weights=weights)

    def local(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """The share of a shape; with a tensor-parallel axis in it, all tokens of the TP group."""
        if dims not in self.known:
            whole = is_tensor_parallel(dims)
            self.known[dims] = tuple([Dim(_size(d, self.strategy, whole), d.axis, d.units) for d in dims])
        return self.known[dims]


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
        return size / dim.units * larger(dim.units / s.tp, 1.0)
    if axis is Axis.VOCAB:  # padded to a multiple of units * tp, as Megatron does
        return rounded_up(size / (dim.units * s.tp)) * dim.units
    if axis is Axis.EXPERTS:
        return size / s.ep
    if axis is Axis.EXPERT_FFN:
        return size / s.etp
    if axis is Axis.ROUTED:  # the mean: every token-parallel rank sends as many rows as it receives (passes/balance.py)
        tokens_split = s.cp * s.tp if s.sequence_parallel else s.cp
        return size * s.micro_batch / tokens_split * s.etp
    return size
