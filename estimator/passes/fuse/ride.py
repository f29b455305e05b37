"""Small ops that become part of the kernel before them: what passes on in registers is neither written nor read."""

from __future__ import annotations

from itertools import pairwise

from estimator.graph import Block
from estimator.op import Component, Op, OpKind
from estimator.passes.fuse.streams import one_pass
from estimator.precision import Role

__all__ = ["fused_dropout", "fused_permute", "fused_residual_norm"]


def fused_residual_norm(block: Block) -> Block:
    """A norm inside the addition to the residual stream that it follows.

    The sum is written, for the stream goes on, but not read again. Norms at the entry of a block are left alone: their
    sum ends the block before.
    """
    sums = {op.outputs[0] for op in block.ops if op.kind is OpKind.ELEMENTWISE and op.component is Component.RESIDUAL}

    def change(op: Op) -> Op:
        if op.kind is not OpKind.NORM or op.inputs[0] not in sums:
            return op
        sums.discard(op.inputs[0])  # a second norm of the same sum is a kernel of its own
        return one_pass(op).but(rides=True, held=frozenset(op.inputs))

    return block.with_ops(tuple([change(op) for op in block.ops]))


def fused_dropout(block: Block) -> Block:
    """Dropout inside the addition to the residual stream, so that only a mask is written (bias_dropout_fusion)."""
    inside = {
        before.outputs[0] for before, op in pairwise(block.ops)
        if before.kind is OpKind.DROPOUT and op.kind is OpKind.ELEMENTWISE and before.outputs[0] in op.inputs
    }  # fmt: skip

    def change(op: Op) -> Op:
        held = inside.intersection((*op.inputs, *op.outputs))
        return op.but(rides=op.kind is OpKind.ELEMENTWISE, held=held) if held else op

    return block.with_ops(tuple([change(op) for op in block.ops]))


def fused_permute(block: Block) -> Block:
    """Rows of experts go back to their tokens and add up there with what the sum is added to, in one kernel."""
    back = {
        op.outputs[0] for op in block.ops
        if op.kind is OpKind.PERMUTE and block.tensors[op.inputs[0]].role is Role.COMBINE
    }  # fmt: skip
    sums = {name: op for op in block.ops if op.kind is OpKind.ELEMENTWISE for name in op.inputs if name in back}
    adding = {op.name for op in sums.values()}

    def change(op: Op) -> Op:
        if op.kind is OpKind.PERMUTE and op.outputs[0] in sums:
            return op.but(held=frozenset({op.outputs[0]}))
        return op.but(rides=True, held=back.intersection(op.inputs)) if op.name in adding else op

    return block.with_ops(tuple([change(op) for op in block.ops]))
