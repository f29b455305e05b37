"""Puts fused kernels into a block: one op for several, or ops that change. Knows no parallelism and no seconds."""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Sequence
from typing import TypeVar

from estimator.graph import Block
from estimator.op import Dim, Op, OpKind, Save, Tensor
from estimator.passes.fuse.match import Match
from estimator.passes.fuse.rule import Case, Change, DimRef, Formula, Join, Keep, Ref, Result
from estimator.precision import Role

__all__ = ["applied", "changed", "refusal"]

T = TypeVar("T")
PRODUCTS = frozenset({OpKind.MATMUL, OpKind.GROUPED_MATMUL, OpKind.BLOCK_MATMUL})
MEASURED = frozenset({OpKind.SCORES, OpKind.CONTEXT, OpKind.INDEX, OpKind.SCAN, OpKind.ATTENTION})


def applied(case: Case, match: Match, block: Block) -> Block:
    """The block with one match of a case fused."""
    if case.join is not None:
        return _joined(case.join, list(match.values()), block)
    if case.result is not None:
        return _merged(case, case.result, match, block)
    return changed(case, [match], block)


def refusal(case: Case, match: Match, block: Block) -> str:
    """Why a match cannot become one op, although it was found; empty where it can."""
    for label, change in case.told:
        told = match.get(label) if change.traffic or change.backward else None
        if told is not None and told.kind in PRODUCTS | MEASURED:
            return f"the traffic of {told.name} follows from its sizes: no formula holds of it"
    result = case.result
    if result is None:
        return ""
    return _unmergeable(result, match, block)


def _unmergeable(result: Result, match: Match, block: Block) -> str:
    parts = [op.name for op in match.values()]
    if any(op.kind in PRODUCTS for op in match.values()):
        product = next(op.name for op in match.values() if op.kind in PRODUCTS)
        return f"{product} is a product, whose gradients are its own: let the others ride on it"
    if result.kind is not OpKind.ATTENTION and any(op.kind in MEASURED for op in match.values()):
        name = next(op.name for op in match.values() if op.kind in MEASURED)
        return f"{name} is of attention or a recurrence, of which only attention is known as one kernel"
    at = _of(match, result.at).name
    known = {block.input}
    made = {name for op in match.values() for name in op.outputs}
    for op in block.ops:
        if op.name == at:
            known |= made
        elif op.name not in parts:
            late = [name for name in op.inputs if name in made and name not in known]
            if late:
                return f"{op.name} reads {late[0]} before {at} ends"
    return ""


def _of(match: Match, label: str) -> Op:
    ops = list(match.values())
    return match[label] if label in match else ops[0] if label == "first" else ops[-1]


# ---------------------------------------------------------------------------------------------------- one op of several


def _merged(case: Case, result: Result, match: Match, block: Block) -> Block:
    view = _View(match, block, case)
    ops = list(match.values())
    like, at, parts = _of(match, result.like), _of(match, result.at), {op.name for op in ops}
    inputs = view.names(result.inputs) if result.inputs is not None else view.incoming
    outputs = view.names(result.outputs) if result.outputs is not None else view.outgoing(at)
    view.inputs, view.outputs = inputs, outputs
    saves = view.saves(result.saves) if result.saves is not None else view.kept()
    one = like.but(
        name=result.name or at.name, kind=result.kind or like.kind, component=result.component or like.component,
        dims=like.dims if result.dims is None else tuple(view.dim(ref) for ref in result.dims), inputs=inputs,
        outputs=outputs, saves=saves, passes=_passes(result, like.passes),
        weights=tuple([w for op in ops for w in op.weights]), streams=view.streams(result.traffic),
        back=view.streams(result.backward),
    )  # fmt: skip
    kept = [one if op.name == at.name else op for op in block.ops if op.name == at.name or op.name not in parts]
    return block.with_ops(_renamed(kept, parts, one.name), view.made)


def _passes(told: Result | Change, before: float) -> float:
    """A formula says how often tensors move, unless passes over it are said as well."""
    return told.passes if told.passes is not None else 1.0 if told.traffic else before


def _joined(join: Join, group: list[Op], block: Block) -> Block:
    """One op with the inputs, outputs, weights and kept tensors of all siblings, each once."""
    first, at = group[0], group[-1 if join.last else 0]
    saves = _once(x for op in group for x in op.saves)
    outputs = _once(x for op in group for x in op.outputs)
    dims = first.dims
    if join.adds_widths:
        *inner, width = dims
        total = sum((op.dims[-1].size for op in group[1:]), width.size)
        dims = (*inner, width._replace(size=total))
    if join.keeps_views:
        kept = {save.tensor for op in block.ops for save in op.saves}
        if not kept.isdisjoint(outputs):
            saves = _once((*saves, *(Save(name, Role.ACTIVATION) for name in outputs)))
    one = first.but(
        name=_name([op.name for op in group]), inputs=_once(x for op in group for x in op.inputs), outputs=outputs,
        saves=saves, weights=tuple(w for op in group for w in op.weights), dims=dims,
    )  # fmt: skip
    parts = {op.name for op in group}
    ops = [one if op.name == at.name else op for op in block.ops if op.name == at.name or op.name not in parts]
    return block.with_ops(_renamed(ops, parts, one.name))


def _renamed(ops: Iterable[Op], parts: set[str], name: str) -> tuple[Op, ...]:
    """Ops whose partners go by the name of the kernel that these became."""
    return tuple(
        [
            op.but(partners=_once(name if p in parts else p for p in op.partners))
            if op.partners and not parts.isdisjoint(op.partners)
            else op
            for op in ops
        ]
    )


def _name(names: list[str]) -> str:
    """`attention.q_proj`, `attention.k_proj` -> `attention.q_proj+k_proj`."""
    scope = os.path.commonprefix(names).rpartition(".")[0]
    skip = len(scope) + 1 if scope else 0
    return "+".join([names[0], *(name[skip:] for name in names[1:])])


def _once(items: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


# ------------------------------------------------------------------------------------------------------ ops that change


def changed(case: Case, found: Sequence[Match], block: Block) -> Block:
    """The block with all these matches of a case that changes ops."""
    new: dict[str, Op] = {}
    tensors: dict[str, Tensor] = {}
    for match in found:
        view = _View(match, block, case)
        tensors |= view.made
        for label, change in case.changes:
            if label in match:
                new[match[label].name] = _change(change, match[label], view)
    return block.with_ops(tuple([new.get(op.name, op) for op in block.ops]), tensors)


def _change(change: Change, op: Op, view: _View) -> Op:
    made: dict[str, object] = {}
    if change.passes is not None:
        made["passes"] = change.passes
    if change.rides is not None:
        made["rides"] = change.rides
    if change.holds is not None:
        mine = {*op.inputs, *op.outputs}
        made["held"] = frozenset(name for name in view.names(change.holds) if name in mine)
    if change.inputs is not None:
        made["inputs"] = view.names(change.inputs)
    if change.outputs is not None:
        made["outputs"] = view.names(change.outputs)
    if change.saves is not None:
        made["saves"] = view.saves(change.saves)
    elif change.forgets is not None:
        made["saves"] = tuple([s for s in op.saves if s.role is not change.forgets or s.tensor not in op.inputs])
    if change.traffic:
        made["passes"] = _passes(change, op.passes)
        made["streams"] = view.streams(change.traffic)
    if change.backward:
        made["back"] = view.streams(change.backward)
    return op.but(**made)


class _View:
    """What references of a rule mean in one match."""

    def __init__(self, match: Match, block: Block, case: Case) -> None:
        self.match, self.block = match, block
        self.inputs: tuple[str, ...] | None = None
        self.outputs: tuple[str, ...] = ()
        self.made = {t.name: Tensor(tuple(self.dim(ref) for ref in t.dims), t.role) for t in case.tensors}

    @property
    def incoming(self) -> tuple[str, ...]:
        """What the ops read that none of them makes."""
        made = {name for op in self.match.values() for name in op.outputs}
        return _once(name for op in self.match.values() for name in op.inputs if name not in made)

    def outgoing(self, at: Op) -> tuple[str, ...]:
        """What the last op makes, and what else of theirs others read."""
        parts = {op.name for op in self.match.values()}
        others = {name for op in self.block.ops if op.name not in parts for name in op.inputs}
        return _once((*at.outputs, *(n for op in self.match.values() for n in op.outputs if n in others)))

    def kept(self) -> tuple[Save, ...]:
        """What the ops keep, but for what no longer goes through memory."""
        made = {name for op in self.match.values() for name in op.outputs} - set(self.outputs)
        return _once(s for op in self.match.values() for s in op.saves if s.tensor not in made)

    def names(self, refs: Sequence[Ref]) -> tuple[str, ...]:
        return _once(name for ref in refs for name in self.named(ref))

    def named(self, ref: Ref) -> tuple[str, ...]:
        if ref.tensor:
            return (ref.tensor,)
        if not ref.label:
            if ref.side == "inputs":
                return self.incoming if self.inputs is None else self.inputs
            return self.outputs or self.outgoing(list(self.match.values())[-1])
        if ref.label not in self.match and ref.label not in {"first", "last"}:
            return ()
        op = _of(self.match, ref.label)
        found = tuple(s.tensor for s in op.saves) if ref.side == "saves" else getattr(op, ref.side)
        return tuple(found) if ref.place is None else tuple(found[ref.place : ref.place + 1])

    def saves(self, keeps: Sequence[Keep]) -> tuple[Save, ...]:
        return _once(save for keep in keeps for save in self.saved(keep))

    def saved(self, keep: Keep) -> list[Save]:
        ref = keep.ref
        if ref.side != "saves":
            return [Save(name, keep.role or Role.ACTIVATION) for name in self.named(ref)]
        if ref.label not in self.match:
            return []
        of = self.match[ref.label].saves
        some = of if ref.place is None else of[ref.place : ref.place + 1]
        return [Save(s.tensor, keep.role or s.role) for s in some if keep.only is None or s.role is keep.only]

    def dim(self, ref: DimRef) -> Dim:
        op = _of(self.match, ref.label)
        dims = op.dims if ref.side == "dims" else self.block.tensors[getattr(op, ref.side)[ref.place]].dims
        found = dims[ref.number]
        return found if ref.factor == 1.0 else found._replace(size=found.size * ref.factor)

    def streams(self, formula: Formula) -> tuple[tuple[str, float], ...]:
        """How often each tensor moves."""
        times: dict[str, float] = {}
        for ref, n in formula:
            for name in self.named(ref):
                times[name] = times.get(name, 0.0) + n
        return tuple((name, n) for name, n in times.items() if n)
