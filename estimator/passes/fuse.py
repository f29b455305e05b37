"""Fusion: kernels that do several ops at once and keep less. Runs inside a shard and knows no parallelism."""

from __future__ import annotations

from estimator.graph import Block, OpGraph
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor
from estimator.precision import Role
from estimator.strategy import Fusion

__all__ = ["LOSS_CHUNKS", "fuse"]

LOSS_CHUNKS = 16.0  # token chunks of a fused projection + loss; assumption, as common open kernels choose by memory


def fuse(graph: OpGraph, fusion: frozenset[Fusion]) -> OpGraph:
    """The graph with the chosen kernels in place; the order of rules does not matter."""
    rules = {
        Fusion.FLASH_ATTENTION: _flash_attention,
        Fusion.FUSED_NORM: _fused_norm,
        Fusion.FUSED_ACTIVATION: _fused_activation,
        Fusion.FUSED_LOSS: _fused_loss,
    }
    for name in sorted(fusion, key=lambda f: f.value):
        graph = graph.map(rules[name])
    return graph


def _flash_attention(block: Block) -> Block:
    """Scores, softmax and context become one kernel (Dao 2023, arXiv:2307.08691).

    It keeps q, k, v, the output and a log-sum-exp per row and head.
    """
    ops = {op.kind: op for op in block.ops}
    if OpKind.SCORES not in ops:
        return block
    scores, context = ops[OpKind.SCORES], ops[OpKind.CONTEXT]
    out = context.outputs[0]
    batch, query, _, heads = scores.dims[:4]
    lse = "attention.lse"
    act = Role.ACTIVATION
    inputs = (*scores.inputs, context.inputs[1])
    fused = scores.but(
        name="attention.core", kind=OpKind.ATTENTION, dims=(*scores.dims, context.dims[4]), inputs=inputs,
        outputs=(out,), 
        saves=(*(Save(name, act) for name in inputs), Save(out, Role.ATTENTION_OUTPUT), Save(lse, Role.FULL)),
    )  # fmt: skip
    gone = {OpKind.SCORES, OpKind.SOFTMAX}
    kept = tuple(fused if op.kind is OpKind.CONTEXT else op for op in block.ops if op.kind not in gone)
    return block.with_ops(kept, {lse: Tensor((batch, query, heads), Role.FULL)})


def _fused_norm(block: Block) -> Block:
    """One pass over the row, no fp32 copy kept."""

    def change(op: Op) -> Op:
        if op.kind is not OpKind.NORM:
            return op
        saves = tuple(s for s in op.saves if not (s.role is Role.FULL and s.tensor in op.inputs))
        return op.but(saves=saves, passes=1.0)

    return block.with_ops(tuple(change(op) for op in block.ops))


def _fused_activation(block: Block) -> Block:
    """silu(gate) * up in one kernel: silu(gate) is neither written nor kept."""
    silu = {op.outputs[0]: op for op in block.ops if op.kind is OpKind.ACTIVATION and op.name.endswith(".silu")}

    def change(op: Op) -> Op:
        if op.kind is not OpKind.ACTIVATION or not set(op.inputs) & silu.keys():
            return op
        first = silu[op.inputs[0]]
        return op.but(inputs=(first.inputs[0], op.inputs[1]), saves=(*first.saves, op.saves[1]))

    return block.with_ops(tuple(change(op) for op in block.ops if not set(op.outputs) & silu.keys()))


def _fused_loss(block: Block) -> Block:
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
