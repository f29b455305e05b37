"""Kernels that stream tensors once instead of several times: norms, activations, the router."""

from __future__ import annotations

from estimator.graph import Block
from estimator.op import Component, Op, OpKind
from estimator.precision import Role

__all__ = ["fused_activation", "fused_norm", "fused_router", "fused_softmax", "one_pass"]


def fused_norm(block: Block) -> Block:
    """One pass over the row, no fp32 copy kept."""
    return block.with_ops(tuple(one_pass(op) if op.kind is OpKind.NORM else op for op in block.ops))


def one_pass(norm: Op) -> Op:
    """A norm that reads its row once and keeps no fp32 copy of it."""
    saves = tuple(s for s in norm.saves if not (s.role is Role.FULL and s.tensor in norm.inputs))
    return norm.but(saves=saves, passes=1.0)


def fused_router(block: Block) -> Block:
    """Scores, choice of experts and their weights in one pass over the router's logits."""
    return block.with_ops(tuple(op.but(passes=1.0) if _chooses_experts(op) else op for op in block.ops))


def fused_softmax(block: Block) -> Block:
    """Scale, mask and softmax of written scores in one pass (Megatron-LM's masked_softmax_fusion)."""
    return block.with_ops(tuple(op.but(passes=1.0) if op.kind is OpKind.SOFTMAX else op for op in block.ops))


def _chooses_experts(op: Op) -> bool:
    return op.kind is OpKind.TOPK and op.component is Component.ROUTER


def fused_activation(block: Block) -> Block:
    """silu(gate) * up in one kernel: silu(gate) is neither written nor kept."""
    silu = {op.outputs[0]: op for op in block.ops if op.kind is OpKind.ACTIVATION and op.name.endswith(".silu")}

    def change(op: Op) -> Op:
        if op.kind is not OpKind.ACTIVATION or not set(op.inputs) & silu.keys():
            return op
        first = silu[op.inputs[0]]
        return op.but(inputs=(first.inputs[0], op.inputs[1]), saves=(*first.saves, op.saves[1]))

    return block.with_ops(tuple(change(op) for op in block.ops if not set(op.outputs) & silu.keys()))
