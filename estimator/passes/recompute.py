"""Recompute: forward ops that backward runs again (Chen 2016, arXiv:1604.06174; Korthikanti 2022, arXiv:2205.05198).

What memory that frees follows from the graph (graph.Block.saved): outputs of recomputed ops are not kept, their inputs
are. Attention's core, MLP and experts are plain checkpoints, whose output lives on where an op behind them keeps it:
Korthikanti's 34 sbh has attention's output in it. The other modules give theirs up (Megatron-Core's discarded outputs).
Embedding and head (the one inside MTP as well) are left alone: frameworks checkpoint transformer layers.
"""

from __future__ import annotations

from estimator.graph import Block, BlockKind, OpGraph
from estimator.op import Component, Op, Phase, Save
from estimator.strategy import Module, Recompute, RecomputeKind

__all__ = ["recompute"]

KEEPS_OUTPUT = frozenset({Module.CORE_ATTENTION.value, Module.MLP.value, Module.MOE.value})


def recompute(graph: OpGraph, choice: Recompute) -> OpGraph:
    """The graph with recomputed ops appended. Block recompute treats a block as full does; layouts say how many."""
    if choice.kind is RecomputeKind.NONE:
        return graph
    names = frozenset(module.value for module in choice.modules)

    def again(op: Op) -> bool:
        named = choice.kind is not RecomputeKind.SELECTIVE or bool(op.modules & names)
        return op.phase is Phase.FORWARD and op.component is not Component.HEAD and named

    def change(block: Block) -> Block:
        if not (block.kind.is_layer or block.kind is BlockKind.MTP):
            return block
        done = {op.name for op in block.of_phase(Phase.RECOMPUTE)}
        chosen = [op for op in block.ops if again(op) and op.name not in done]
        outside = block.ops if choice.kind is RecomputeKind.SELECTIVE else ()
        mine = done | {op.name for op in chosen}
        kept = {s.tensor: s for op in outside if op.phase is Phase.FORWARD and op.name not in mine for s in op.saves}

        def handed_on(op: Op) -> tuple[Save, ...]:
            if not kept or op.modules & names - KEEPS_OUTPUT:
                return ()
            return tuple(kept[name] for name in op.outputs if name in kept)

        copies = [_apart(op, chosen).but(phase=Phase.RECOMPUTE, saves=handed_on(op), weights=()) for op in chosen]
        return block.with_ops((*block.ops, *copies))

    return graph.map(change)


def _apart(op: Op, chosen: list[Op]) -> Op:
    """An op of a fused kernel is a kernel of its own again where the other part does not run."""
    if not op.held:
        return op
    partners = (other.outputs if op.rides else other.held for other in chosen if other is not op)
    return op if any(op.held.intersection(names) for names in partners) else op.but(rides=False, held=frozenset())
