"""Kernels that stream tensors once instead of several times: norms and activations."""

from __future__ import annotations

from estimator.graph import Block
from estimator.op import Op, OpKind
from estimator.precision import Role

__all__ = ["fused_activation", "fused_norm"]


def fused_norm(block: Block) -> Block:
    """One pass over the row, no fp32 copy kept."""

    def change(op: Op) -> Op:
        if op.kind is not OpKind.NORM:
            return op
        saves = tuple(s for s in op.saves if not (s.role is Role.FULL and s.tensor in op.inputs))
        return op.but(saves=saves, passes=1.0)

    return block.with_ops(tuple(change(op) for op in block.ops))


def fused_activation(block: Block) -> Block:
    """silu(gate) * up in one kernel: silu(gate) is neither written nor kept."""
    silu = {op.outputs[0]: op for op in block.ops if op.kind is OpKind.ACTIVATION and op.name.endswith(".silu")}

    def change(op: Op) -> Op:
        if op.kind is not OpKind.ACTIVATION or not set(op.inputs) & silu.keys():
            return op
        first = silu[op.inputs[0]]
        return op.but(inputs=(first.inputs[0], op.inputs[1]), saves=(*first.saves, op.saves[1]))

    return block.with_ops(tuple(change(op) for op in block.ops if not set(op.outputs) & silu.keys()))
