"""The vocabulary projection and its loss as one kernel."""

from __future__ import annotations

from estimator.graph import Block
from estimator.op import Axis, Component, Dim, Op, OpKind, Tensor
from estimator.precision import Role

__all__ = ["LOSS_CHUNKS", "fused_loss"]

LOSS_CHUNKS = 16.0  # token chunks of a fused projection + loss; assumption, as common open kernels choose by memory


def fused_loss(block: Block) -> Block:
    """Projection and loss in chunks of tokens: logits live one chunk at a time, their gradient is taken at once."""
    losses = [op for op in block.ops if op.kind is OpKind.LOSS]
    if not losses:
        return block
    logits = losses[0].inputs[0]
    tokens, vocab = block.tensors[logits].dims
    chunk = Tensor((Dim(tokens.size / LOSS_CHUNKS, Axis.TOKENS), vocab), Role.LOGITS)

    def change(op: Op) -> Op:
        if op.kind is OpKind.LOSS:
            return op.but(inputs=("logits.chunk",), saves=(), passes=2.0 * LOSS_CHUNKS)
        if op.component is Component.HEAD and logits in op.outputs:
            return op.but(outputs=("logits.chunk",))
        return op

    return block.with_ops(tuple(change(op) for op in block.ops), {"logits.chunk": chunk})
