"""Ops of one kind that read the same tensor, or feed the same op, as one kernel: one launch, one read, one GEMM."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from estimator.graph import Block
from estimator.op import Axis, Component, Op, OpKind, Save
from estimator.precision import Role

__all__ = ["fused_gate_up", "fused_mla_projections", "fused_qkv", "fused_rope"]

GEMMS = frozenset({OpKind.MATMUL, OpKind.GROUPED_MATMUL})
T = TypeVar("T")


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
