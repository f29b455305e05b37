"""Kernels of attention."""

from __future__ import annotations

from estimator.graph import Block
from estimator.op import OpKind, Save, Tensor
from estimator.precision import Role

__all__ = ["flash_attention"]


def flash_attention(block: Block) -> Block:
    """Scores, softmax, dropout and context become one kernel (Dao 2023, arXiv:2307.08691).

    It keeps q, k, v, the output and a log-sum-exp per row and head; a mask is drawn again from the same random numbers.
    Ignores the time that drawing them takes.
    """
    ops = {op.kind: op for op in block.ops}
    if OpKind.SCORES not in ops:
        return block
    scores, context = ops[OpKind.SCORES], ops[OpKind.CONTEXT]
    out = context.outputs[0]
    batch, query, _, heads = scores.dims[:4]
    lse = "attention.lse"
    act = Role.ACTIVATION
    inputs = tuple(dict.fromkeys((*scores.inputs, context.inputs[1])))  # keys may be the values too
    chosen = (save for save in scores.saves if save.role is Role.INDEX)
    fused = scores.but(
        name="attention.core", kind=OpKind.ATTENTION, dims=(*scores.dims, context.dims[4]), inputs=inputs,
        outputs=(out,), 
        saves=(*(Save(name, act) for name in inputs), Save(out, Role.ATTENTION_OUTPUT), Save(lse, Role.FULL), *chosen),
    )  # fmt: skip
    kept = tuple(
        fused if op is context else op
        for op in block.ops
        if op.kind not in {OpKind.SCORES, OpKind.SOFTMAX} and context.inputs[0] not in op.outputs
    )
    return block.with_ops(kept, {lse: Tensor((batch, query, heads), Role.FULL)})
