"""Passes turn the logical graph of a model into the graph of one rank, in a fixed order: split, fuse, optimise."""

from __future__ import annotations

from estimator.graph import OpGraph
from estimator.imbalance import BALANCED, Routing
from estimator.passes.balance import balance
from estimator.passes.capture import capture
from estimator.passes.collectives import insert_collectives
from estimator.passes.differentiate import differentiate
from estimator.passes.fuse import fuse
from estimator.passes.precision import insert_quantization, remake_activations
from estimator.passes.recompute import recompute
from estimator.passes.shard import shard
from estimator.passes.shared import run_beside
from estimator.precision import PrecisionRecipe
from estimator.strategy import Fusion, Strategy

__all__ = ["lower", "recompute"]


def lower(graph: OpGraph, strategy: Strategy, recipe: PrecisionRecipe, routing: Routing = BALANCED) -> OpGraph:
    """Forward and backward of one rank, without recompute: shared by every recompute choice."""
    graph = shard(graph, strategy)
    graph = balance(graph, strategy, routing)
    graph = insert_collectives(graph, strategy, recipe)
    graph = fuse(graph, strategy.fusion)
    graph = insert_quantization(graph, recipe, inside=Fusion.FUSED_QUANTIZE in strategy.fusion)
    graph = run_beside(graph, overlap=strategy.shared_expert_overlap)
    return capture(remake_activations(differentiate(graph), recipe), strategy.cuda_graph)
