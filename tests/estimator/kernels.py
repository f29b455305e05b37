"""Shipped fusion rules once more, each as a function by hand: what the rules of rules.yaml are held against."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Hashable, Iterable
from itertools import pairwise
from typing import TypeVar

from estimator.graph import Block
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor
from estimator.precision import Role
from estimator.strategy import Fusion

__all__ = ["BY_HAND", "casts_inside", "fused_by_hand"]

GEMMS = frozenset({OpKind.MATMUL, OpKind.GROUPED_MATMUL})
LOSS_CHUNKS = 16.0
T = TypeVar("T")


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


def fused_qkv(block: Block) -> Block:
    """Projections of one input to the widths of heads as one GEMM.

    Its outputs are views of one buffer: as long as backward needs one of them (v, which no rotation copies), all stay.
    """

    def change(op: Op, block: Block) -> Op:
        kept = {save.tensor for other in block.ops for save in other.saves}
        views = tuple(Save(name, Role.ACTIVATION) for name in op.outputs) if kept & set(op.outputs) else ()
        return op.but(saves=(*op.saves, *(save for save in views if save not in op.saves)))

    return _projections(block, frozenset({Axis.HEADS, Axis.KV_HEADS}), change)


def fused_gate_up(block: Block) -> Block:
    """Gate and up projections, of experts as well, as one GEMM."""
    return _projections(block, frozenset({Axis.FFN, Axis.EXPERT_FFN}))


def fused_mla_projections(block: Block) -> Block:
    """Down-projections of latent attention, of queries and of keys and values, as one GEMM."""
    return _projections(block, frozenset({Axis.LATENT}))


def fused_rope(block: Block) -> Block:
    """Rotations that feed one op as one kernel; what copies parts of one tensor beside them (MLA's k and v), too."""
    readers = {name: op.name for op in reversed(block.ops) for name in op.inputs}

    def rotated(op: Op) -> Hashable:
        return readers.get(op.outputs[0]) if op.kind is OpKind.ROPE else None

    def copied(op: Op) -> Hashable:
        is_copy = op.kind is OpKind.ELEMENTWISE and op.component is Component.ATTENTION
        return op.inputs[0] if is_copy else None

    for key in (rotated, copied):
        for group in _groups(block, lambda op, key=key: (key(op), op.modules) if key(op) else None):  # type: ignore[misc]
            block = _replaced(block, group, _joined(group), at=group[-1])
    return block


def _projections(
    block: Block, axes: frozenset[Axis], change: Callable[[Op, Block], Op] = lambda op, _: op
) -> Block:  # fmt: skip
    """GEMMs of one input whose outputs run along these axes as one, at the place of the first."""

    def key(op: Op) -> Hashable:
        is_one = op.kind in GEMMS and op.dims[-1].axis in axes
        return (op.kind, op.inputs, op.component, op.role, op.modules) if is_one else None

    for group in _groups(block, key):
        *inner, width = group[0].dims
        total = sum((op.dims[-1].size for op in group[1:]), width.size)
        joined = _joined(group).but(dims=(*inner, width._replace(size=total)))
        block = _replaced(block, group, change(joined, block), at=group[0])
    return block


def _groups(block: Block, key: Callable[[Op], Hashable]) -> list[list[Op]]:
    """Ops of a block that share a key other than None, two and more."""
    found: dict[Hashable, list[Op]] = {}
    for op in block.ops:
        if (k := key(op)) is not None:
            found.setdefault(k, []).append(op)
    return [group for group in found.values() if len(group) > 1]


def _joined(group: list[Op]) -> Op:
    """One op with the inputs, outputs, weights and kept tensors of all, each once."""
    return group[0].but(
        name=_name([op.name for op in group]), inputs=_once(x for op in group for x in op.inputs),
        outputs=_once(x for op in group for x in op.outputs), saves=_once(x for op in group for x in op.saves),
        weights=tuple(w for op in group for w in op.weights),
    )  # fmt: skip


def _once(items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


def _name(names: list[str]) -> str:
    """`attention.q_proj`, `attention.k_proj` -> `attention.q_proj+k_proj`."""
    scope = os.path.commonprefix(names).rpartition(".")[0]
    skip = len(scope) + 1 if scope else 0
    return "+".join([names[0], *(name[skip:] for name in names[1:])])


def _replaced(block: Block, group: list[Op], one: Op, at: Op) -> Block:
    """The block with `one` in the place of `at` instead of the group; collectives name it as their partner."""
    names = {op.name for op in group}
    ops = []
    for op in block.ops:
        if op.name == at.name:
            ops.append(one)
        elif op.name not in names:
            partners = _once(one.name if name in names else name for name in op.partners)
            ops.append(op if partners == op.partners else op.but(partners=partners))
    return block.with_ops(tuple(ops))


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


BY_HAND = {
    Fusion.FLASH_ATTENTION: flash_attention,
    Fusion.FUSED_NORM: fused_norm,
    Fusion.FUSED_ACTIVATION: fused_activation,
    Fusion.FUSED_LOSS: fused_loss,
    Fusion.FUSED_QKV: fused_qkv,
    Fusion.FUSED_GATE_UP: fused_gate_up,
    Fusion.FUSED_MLA_PROJECTIONS: fused_mla_projections,
    Fusion.FUSED_ROPE: fused_rope,
    Fusion.FUSED_RESIDUAL_NORM: fused_residual_norm,
    Fusion.FUSED_PERMUTE: fused_permute,
    Fusion.FUSED_DROPOUT: fused_dropout,
    Fusion.FUSED_SOFTMAX: fused_softmax,
    Fusion.FUSED_ROUTER: fused_router,
}


def fused_by_hand(graph, fusion):
    for name in sorted(fusion, key=lambda f: f.value):
        if name in BY_HAND:
            graph = graph.map(BY_HAND[name])
    return graph


def casts_inside(block):
    """Casts of what norms and activations write, as they write it."""
    casting = {name for op in block.ops if op.kind in {OpKind.NORM, OpKind.ACTIVATION} for name in op.outputs}

    def change(op):
        is_inside = op.kind is OpKind.QUANTIZE and op.inputs[0] in casting
        return op.but(rides=True, held=frozenset(op.inputs)) if is_inside else op

    return block.with_ops(tuple(change(op) for op in block.ops))
