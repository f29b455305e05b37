"""Proposes fusion rules for a graph: chains that go through memory, and ops that read the same, as one kernel.

A draft is tried before it is told: its rule is put into the graph behind those that are chosen, and what it saves is
the difference of prices. A draft says nothing of whether such a kernel can be written; its notes say what to look at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from estimator.fusion_gain import Cost, Report, explain
from estimator.graph import Block, OpGraph
from estimator.op import Axis, Op, OpKind, Phase
from estimator.passes import Lowering, run_to
from estimator.passes.fuse.reading import rule_of_text
from estimator.precision import Role
from estimator.strategy import OwnFusion
from hardware.chip import ChipSpec

__all__ = ["Draft", "drafts_of_graph", "tried"]

STREAMING = frozenset(
    {OpKind.NORM, OpKind.ROPE, OpKind.ACTIVATION, OpKind.ELEMENTWISE, OpKind.DROPOUT, OpKind.CONV, OpKind.MIX,
     OpKind.SOFTMAX, OpKind.PERMUTE, OpKind.QUANTIZE}
)  # fmt: skip
HEAVY = (OpKind.NORM, OpKind.SOFTMAX, OpKind.CONV, OpKind.PERMUTE, OpKind.MIX, OpKind.ACTIVATION, OpKind.ROPE)
"""Of a chain, the kind that its kernel is of: whose gradient moves most, first."""
NOTES = {
    OpKind.NORM: "a norm reduces over a row: the kernel holds whole rows ({width} wide)",
    OpKind.SOFTMAX: "a softmax reduces over a row: the kernel holds whole rows",
    OpKind.PERMUTE: "rows change places: what is read stands where routing says, so that one side is not coalesced",
    OpKind.CONV: "a convolution reads the tokens before: tiles overlap",
    OpKind.DROPOUT: "a mask is kept, or drawn again from the same random numbers",
    OpKind.QUANTIZE: "scales of a block, or of the tensor, are known only when its largest value is",
    OpKind.MIX: "weights of the sum are computed: they are read for every element",
}
MAX_CHAIN = 6
MAX_PLACES = 3  # that a draft names


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A rule as plain values, where it comes from, what to review, and what it saved when tried."""

    rule: Mapping[str, Any]
    found: str
    notes: tuple[str, ...] = ()
    saved: Cost = Cost()
    share: float = 0.0  # of the seconds of the model
    fires: int = 0
    ops: tuple[tuple[str, str], ...] = ()  # by block, on which it fired
    why_not: str = ""


def drafts_of_graph(graph: OpGraph, by: Lowering) -> tuple[Draft, ...]:
    """Chains and siblings of a logical graph that the chosen rules leave, each pattern once, not tried yet."""
    fused = run_to(graph, by, "fuse")
    found: dict[str, Draft] = {}
    for kind in fused.kinds:
        block = fused.blocks[kind]
        for chain in _chains(block):
            _add(found, _chain_draft(chain, block))
        for group in _siblings(block):
            _add(found, _sibling_draft(group, block))
    return tuple(found.values())


def tried(draft: Draft, graph: OpGraph, by: Lowering, chip: ChipSpec, whole: Cost) -> Draft:
    """The draft with what its rule saves behind the chosen ones; `whole`: what the model takes with these."""
    text = json.dumps(draft.rule, sort_keys=True)
    own = OwnFusion(rule_of_text(text).name, text)
    strategy = replace(by.strategy, fusion=by.strategy.fusion | {own})
    report: Report = explain(graph, replace(by, strategy=strategy), chip, known=())
    mine = [f for f in report.firings if f.rule == own.value]
    saved = whole.minus(report.after)
    why = next((m.why for m in report.missed if m.rule == own.value), "")
    return replace(
        draft, saved=saved, share=saved.seconds / whole.seconds if whole.seconds else 0.0,
        fires=sum(f.times for f in mine), why_not=why,
        ops=tuple(sorted((f.block, op) for f in mine for op in f.ops)),
    )  # fmt: skip


def _add(found: dict[str, Draft], draft: Draft) -> None:
    key = json.dumps({k: v for k, v in draft.rule.items() if k not in {"name", "about"}}, sort_keys=True)
    if key in found:
        first = found[key]
        found[key] = replace(
            first, found=f"{first.found}; {draft.found}" if first.found.count(";") < 3 else first.found
        )
        return
    taken = {d.rule["name"] for d in found.values()}
    name = draft.rule["name"]
    free = next(n for n in (name, *(f"{name}_{i}" for i in range(2, 1000))) if n not in taken)
    found[key] = replace(draft, rule={**draft.rule, "name": free})


# --------------------------------------------------------------------------------------------------------------- chains


def _chains(block: Block) -> Iterator[Sequence[Op]]:
    """Longest runs of ops that stream memory, each the only reader of the one before."""
    readers: dict[str, list[Op]] = {}
    for op in block.of_phase(Phase.FORWARD):
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
    behind: dict[str, Op] = {}
    for op in block.of_phase(Phase.FORWARD):
        after = [r for name in op.outputs for r in readers.get(name, ())]
        if _streams(op) and len(after) == 1 and _streams(after[0]):
            behind[op.name] = after[0]
    starts = {op.name for op in block.ops} - {op.name for op in behind.values()}
    for op in block.of_phase(Phase.FORWARD):
        if op.name in starts and op.name in behind:
            chain = [op]
            while chain[-1].name in behind and len(chain) < MAX_CHAIN:
                chain.append(behind[chain[-1].name])
            yield chain


def _streams(op: Op) -> bool:
    return op.kind in STREAMING and not op.rides


def _chain_draft(chain: Sequence[Op], block: Block) -> Draft:
    kinds = [op.kind for op in chain]
    kernel = next((kind for kind in HEAVY if kind in kinds), kinds[-1])
    component = chain[kinds.index(kernel)].component if kernel in kinds else chain[-1].component
    words = [kind.value for kind in kinds]
    rule = {
        "name": "_".join(words), "about": f"{', '.join(words[:-1])} and {words[-1]} in one kernel",
        "chain": [{"kind": op.kind.value, "component": op.component.value} for op in chain],
        "result": {"kind": kernel.value, "component": component.value, "passes": 1},
    }  # fmt: skip
    between = [name for op in chain[:-1] for name in op.outputs]
    kept = {s.tensor for op in block.ops for s in op.saves} & set(between)
    notes = list(_notes(chain, block))
    if kept:
        notes.append(f"{', '.join(sorted(kept))} is kept for backward today and no longer: the kernel forms it again")
    notes.append(
        f"its gradient is told as that of one {kernel.value}: say `backward` where the kernel moves more or less"
    )
    return Draft(rule=rule, found=f"{block.kind.value}: {' > '.join(op.name for op in chain)}", notes=tuple(notes))


def _notes(ops: Iterable[Op], block: Block) -> Iterator[str]:
    for kind in dict.fromkeys(op.kind for op in ops):
        if kind in NOTES:
            op = next(o for o in ops if o.kind is kind)
            dims = block.tensors[op.inputs[0]].dims
            yield NOTES[kind].format(width=f"{_size(dims[-1].size):g}")


def _size(value: Any) -> float:  # noqa: ANN401 - a size, plain or of rows
    return float(value if isinstance(value, int | float) else value.reshape(-1)[0])


# ------------------------------------------------------------------------------------------------------------- siblings


def _siblings(block: Block) -> Iterator[Sequence[Op]]:
    """Products of one input, and ops of one kind that stream the same tensor."""
    groups: dict[tuple[Any, ...], list[Op]] = {}
    for op in block.of_phase(Phase.FORWARD):
        if op.kind in {OpKind.MATMUL, OpKind.GROUPED_MATMUL}:
            groups.setdefault((op.kind, op.inputs, op.component, op.role, op.modules), []).append(op)
        elif _streams(op):
            groups.setdefault((op.kind, op.inputs[:1], op.component, op.modules), []).append(op)
    yield from (group for group in groups.values() if len(group) > 1)


def _sibling_draft(group: Sequence[Op], block: Block) -> Draft:
    first, is_product = group[0], bool(group[0].dims)
    widths = sorted({op.dims[-1].axis.value for op in group}) if is_product else []
    pattern: dict[str, Any] = {"kind": first.kind.value, "component": first.component.value}
    pattern |= {"width": widths} if is_product else {}
    rule = {
        "name": f"joined_{'_'.join([first.kind.value, *widths])}",
        "about": f"{len(group)} ops of kind {first.kind.value} that read one input as one kernel",
        "siblings": pattern,
        "share": ["kind", "inputs", "component", "role", "modules"] if is_product else ["kind", "input", "modules"],
        "join": {"adds_widths": True} if is_product else {"at": "last"},
    }
    notes = []
    if is_product:
        notes.append("the weights are stored as one matrix, in checkpoints as well")
        if {Axis.HEADS.value, Axis.KV_HEADS.value} & set(widths) or first.role is not Role.LINEAR_INPUT:
            notes.append(
                "outputs are views of one buffer: say `keeps_views: true` where one of them is kept for backward"
            )
        if len({op.dims[-1].axis for op in group}) > 1:
            notes.append("widths are along several axes: under tensor parallelism they split differently")
    return Draft(rule=rule, found=f"{block.kind.value}: {', '.join(op.name for op in group)}", notes=tuple(notes))
