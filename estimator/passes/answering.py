"""The graph of one rank that answers: split, traffic, fused, cast, of experts those that are hit, captured.

The fixed order of passes/__init__.py without its backward, with what only few rows have. Knows no seconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from estimator.graph import Block, BlockKind, OpGraph
from estimator.imbalance import BALANCED, Routing
from estimator.model import ModelSpec
from estimator.op import Array, Axis, Component, Dim, Group, Op, OpKind, Tensor, Traffic
from estimator.passes.balance import balance
from estimator.passes.capture import capture
from estimator.passes.collectives import insert_collectives
from estimator.passes.fuse import After, fuse
from estimator.passes.precision import insert_quantization
from estimator.passes.serving import UP_PROJECTION, grown
from estimator.passes.shard import CORE_KINDS, shard
from estimator.passes.shared import run_beside
from estimator.precision import PrecisionRecipe, Role
from estimator.strategy import Strategy

__all__ = ["OF_CONTEXT", "Shares", "distinct_experts", "lower_answer", "mixed", "packed"]

OF_CONTEXT = CORE_KINDS | {OpKind.INDEX, OpKind.SCAN}
"""Kinds whose work follows from what a token sees before it."""
INDEX_GATHER = "index.scores.gather"
OF_CACHES = frozenset({f"{UP_PROJECTION}.gather", INDEX_GATHER})


def lower_answer(
    graph: OpGraph, model: ModelSpec, strategy: Strategy, recipe: PrecisionRecipe, *, contexts: np.ndarray | None,
    sent: float, routing: Routing = BALANCED, shares: Shares | None = None,
) -> OpGraph:  # fmt: skip
    """A forward pass on one rank.

    `contexts` [R]: tokens in a decoded token's cache, of which the graph has the most; None: a prompt. `sent`: tokens
    that route to the experts of a group. `shares`: of a pass with more than one token of each sequence.
    """
    graph = _with_choice(graph)
    graph = balance(shard(graph, strategy), strategy, routing)
    graph = insert_collectives(graph, strategy, recipe)
    longest = None if contexts is None else float(contexts[-1])
    graph = _gathered(graph, strategy, recipe, longest)
    if contexts is not None and longest is not None:
        graph = grown(graph, model, longest, contexts)
    graph = fuse(graph, strategy.fusion)
    graph = fuse(insert_quantization(graph, recipe), strategy.fusion, After.QUANTIZATION)
    graph = run_beside(graph, overlap=strategy.shared_expert_overlap)
    if shares is not None:
        graph = mixed(graph, shares)
    if contexts is not None:
        graph = packed(graph)
    return capture(distinct_experts(graph, sent), strategy.cuda_graph)


def _with_choice(graph: OpGraph) -> OpGraph:
    """The choice of a word: one pass over the scores of all words."""

    def change(block: Block) -> Block:
        if block.kind is not BlockKind.HEAD:
            return block
        logits = block.ops[-1].outputs[0]
        chosen = Op(name="sample", kind=OpKind.TOPK, component=Component.HEAD, inputs=(logits,), outputs=("word",))
        tokens = block.tensors[logits].dims[0]
        return block.with_ops((*block.ops, chosen), {"word": Tensor((tokens,), Role.INDEX)})

    return graph.map(change)


def _gathered(graph: OpGraph, s: Strategy, recipe: PrecisionRecipe, longest: float | None) -> OpGraph:
    """Scores of all words on every rank before one is chosen; what is cached is there, but for the new token's part.

    An indexer's keys lie whole on every rank, which a gather of shares of a sequence knows nothing of.
    """

    def change(block: Block) -> Block:
        ops: list[Op] = []
        for op in block.ops:
            if op.name == "sample":
                payload = block.tensors[op.inputs[0]].elements * s.tp * recipe.nbytes(Role.LOGITS)
                ops.append(
                    Op(name="sample.gather", kind=OpKind.COLLECTIVE, component=op.component, group=Group.TP,
                       collective=Traffic.ALL_GATHER, payload=payload)
                )  # fmt: skip
            if longest is not None and op.name in OF_CACHES:
                op = op.but(payload=op.payload / (longest * (s.tp if op.name == INDEX_GATHER else 1.0)))
            ops.append(op)
        return block.with_ops(tuple(ops))

    return graph.map(change)


class Shares(NamedTuple):
    """Rows of a pass: `alone`, those that decode, of all its rows; `queries`, how many of them are of one sequence."""

    alone: float
    queries: float


def mixed(graph: OpGraph, shares: Shares) -> OpGraph:
    """A pass whose rows are several tokens of a sequence, or tokens of prompts besides: alike to what works row by row.

    A cache is read once for all queries of its sequence, and by them alone: what tokens of prompts see is added by
    whoever asks (inference/step.py).
    """

    def dims(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        sequences = shares.alone / shares.queries
        return tuple([d._replace(size=d.size * sequences) if d.axis is Axis.BATCH else d for d in dims])

    def change(op: Op) -> Op:
        if op.kind not in OF_CONTEXT:
            return op.but(dims=dims(op.dims)) if op.dims else op
        if op.kind in CORE_KINDS:
            query = [d._replace(size=d.size * shares.queries) if d.axis is Axis.QUERY else d for d in dims(op.dims)]
            return op.but(dims=tuple(query))
        first, *others = op.dims
        return op.but(dims=(first._replace(size=first.size * shares.alone), *others))

    def block(block: Block) -> Block:
        states = {name for op in block.ops if op.kind is OpKind.SCAN for name in op.outputs[1:]}
        tensors = {
            name: Tensor((Dim(shares.alone, Axis.POSITIONS), *t.dims) if name in states else dims(t.dims), t.role)
            for name, t in block.tensors.items()
        }
        return replace(block, ops=tuple([change(op) for op in block.ops]), tensors=tensors)

    return graph.map(block)


def packed(graph: OpGraph) -> OpGraph:
    """Fused attention with the queries that share a head of keys as rows of one product (grouped queries, latents)."""

    def change(op: Op, block: Block) -> Op:
        if op.kind is not OpKind.ATTENTION:
            return op
        batch, query, key, heads, qk, value = op.dims
        shared = block.tensors[op.inputs[1]].dims[-1].size / qk.size
        rows = query._replace(size=query.size * heads.size / shared)
        return op.but(dims=(batch, rows, key, heads._replace(size=shared), qk, value))

    return graph.map(lambda block: block.with_ops(tuple([change(op, block) for op in block.ops])))


def distinct_experts(graph: OpGraph, sent: float) -> OpGraph:
    """Products of the experts that some token visits, as many as are expected: E (1 - (1 - k/E)^tokens).

    Tokens choose k of E experts, each equally often and independently of one another. A rank holds its share of these:
    the mean over ranks, where the others wait for the one that happens to be hit most. Skewed routing hits no fewer.
    """

    def change(block: Block) -> Block:
        scores = next((op.dims[-1].size for op in block.ops if op.component is Component.ROUTER and op.dims), 0.0)
        chosen = next((block.tensors[op.outputs[0]].dims[-1].size for op in block.ops
                       if op.component is Component.ROUTER and op.kind in {OpKind.TOPK, OpKind.MIX}), 0.0)  # fmt: skip
        if not scores or not chosen:
            return block
        hit = 1.0 - (1.0 - chosen / scores) ** sent
        return replace(block, ops=tuple([_hit(op, hit) for op in block.ops]))

    return graph.map(change)


def _hit(op: Op, share: Array) -> Op:
    if op.kind is not OpKind.GROUPED_MATMUL:
        return op
    groups, *others = op.dims
    assert groups.axis is Axis.EXPERTS
    return op.but(dims=(groups._replace(size=groups.size * share), *others))
