"""Fused kernels that merge nothing: which members of a fusion set leave the graph of a model as it is. Prices nothing.

Asked of the graph itself, after what splits it, for whatever ways to split and whatever chips a space has. Equal graphs
have equal prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from estimator.build import build
from estimator.graph import OpGraph
from estimator.model import ModelSpec
from estimator.passes.collectives import insert_collectives
from estimator.passes.fuse import After, for_chip, fuse, rule_of
from estimator.passes.precision import insert_quantization
from estimator.passes.shard import shard
from estimator.precision import PrecisionRecipe, recipe
from estimator.strategy import ContextParallel, Fusion, OwnFusion, Strategy

__all__ = ["Kernels", "merged"]

Kernels = frozenset[Fusion | OwnFusion]
TOKENS = 4096  # which ops there are does not depend on it
SPLIT = 2  # ranks of tp and of cp: every way to split has its traffic


def merged(
    model: ModelSpec, sets: Iterable[Kernels], axes: Mapping[str, Sequence[Any]], chips: Iterable[str]
) -> list[Kernels]:
    """Of each set the members that change something beside the others, on any chip, precision and split of `axes`."""
    graphs = _Graphs(model, axes, tuple(dict.fromkeys(chips)))
    return [graphs.without_idle(kernels) for kernels in sets]


class _Graphs:
    """The graphs of a model that a space splits, ready to be fused, each with the recipe of its numbers."""

    def __init__(self, model: ModelSpec, axes: Mapping[str, Sequence[Any]], chips: tuple[str, ...]) -> None:
        recipes = [recipe(str(name)) for name in axes["precision"]]
        whole, self.chips = build(model, TOKENS), chips
        self.graphs: list[tuple[OpGraph, PrecisionRecipe]] = []
        for splits, way in product(axes["sequence_parallel"], axes["context_parallel"]):
            assert isinstance(way, ContextParallel)
            strategy = Strategy(tp=SPLIT, cp=SPLIT, sequence_parallel=bool(splits), context_parallel=way)
            one = shard(whole, strategy)
            self.graphs += [(insert_collectives(one, strategy, numbers), numbers) for numbers in recipes]

    def without_idle(self, kernels: Kernels) -> Kernels:
        """The set without members that change nothing, taken out one after the other."""
        fused = self._fused(kernels)
        for kernel in sorted(kernels, key=lambda k: rule_of(k).name):
            if self._fused(less := kernels - {kernel}) == fused:
                kernels = less
        return kernels

    def _fused(self, kernels: Kernels) -> list[OpGraph]:
        own = [for_chip(kernels, chip) for chip in self.chips]
        return [
            fuse(insert_quantization(fuse(graph, mine), numbers), mine, After.QUANTIZATION)
            for graph, numbers in self.graphs
            for mine in own
        ]
