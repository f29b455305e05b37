"""Balance: what routing skew and redundant experts make of the rank that the others wait for.

Ops and tensors of routed rows grow to those of the fullest rank of experts, weights to the experts that a rank holds
with its share of the copies. Time, traffic, saved activations and buffers follow from the sizes.

Every layer is taken at its own fullest rank: all wait for it at the next all-to-all, so seconds add up like that. Bytes
do so only if the same rank is fullest in every layer, which is the worst case. Rows that a rank sends are counted like
those that it receives, and so is their permutation.
"""

from __future__ import annotations

from dataclasses import replace

from estimator.graph import Block, OpGraph
from estimator.imbalance import Routing
from estimator.op import Array, Axis, Dim, Op, OpKind, Tensor, Weight
from estimator.strategy import Strategy

__all__ = ["balance"]

CHANGED = frozenset({Axis.ROUTED, Axis.EXPERTS})


def balance(graph: OpGraph, strategy: Strategy, routing: Routing) -> OpGraph:
    """The share of the fullest rank, of a graph that `shard` has split evenly."""
    if not routing.skew and not strategy.redundant_experts:
        return graph
    return graph.map(_Uneven(strategy, routing).block)


class _Uneven:
    """Sizes of one strategy's fullest rank."""

    def __init__(self, s: Strategy, routing: Routing) -> None:
        self.load: Array = routing.load_factor(s.ep, s.redundant_experts)
        self.copies: Array = s.redundant_experts * (s.ep > 1) / s.ep  # one rank has nothing to even out

    def block(self, block: Block) -> Block:
        if not any(op.kind is OpKind.GROUPED_MATMUL for op in block.ops):
            return block
        tensors = {name: Tensor(self.dims(t.dims), t.role) for name, t in block.tensors.items()}
        return replace(block, ops=tuple([self.op(op) for op in block.ops]), tensors=tensors)

    def op(self, op: Op) -> Op:
        if op.kind is not OpKind.GROUPED_MATMUL:
            return op.but(dims=self.dims(op.dims))
        weights = tuple([Weight(w.name, self.dims(w.dims), w.expert, w.linear) for w in op.weights])
        return op.but(dims=self.dims(op.dims), weights=weights, load=self.load)

    def dims(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        if not any(d.axis in CHANGED for d in dims):
            return dims
        return tuple([self.dim(d) for d in dims])

    def dim(self, d: Dim) -> Dim:
        if d.axis is Axis.ROUTED:
            return d._replace(size=d.size * self.load)
        return d._replace(size=d.size + self.copies) if d.axis is Axis.EXPERTS else d
