"""Fused kernels that merge nothing: which members of a fusion set leave the graph of a model as it is. Prices nothing.

Asked of the graph itself, after what splits it, for whatever ways to split a space has. Equal graphs have equal prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from estimator.build import build
from estimator.graph import OpGraph
from estimator.model import ModelSpec
from estimator.passes.collectives import insert_collectives
from estimator.passes.fuse import fuse
from estimator.passes.precision import insert_quantization
from estimator.passes.shard import shard
from estimator.precision import recipe
from estimator.strategy import ContextParallel, Fusion, Strategy

__all__ = ["merged"]

TOKENS = 4096  # which ops there are does not depend on it
SPLIT = 2  # ranks of tp and of cp: every way to split has its traffic


def merged(
    model: ModelSpec, sets: Iterable[frozenset[Fusion]], axes: Mapping[str, Sequence[Any]]
) -> list[frozenset[Fusion]]:
    """Of each set the members that change something beside the others, under any precision and split of `axes`."""
    graphs = _Graphs(model, axes)
    return [graphs.without_idle(fusion) for fusion in sets]


class _Graphs:
    """The graphs of a model that a space splits, ready to be fused."""

    def __init__(self, model: ModelSpec, axes: Mapping[str, Sequence[Any]]) -> None:
        self.recipes = [recipe(str(name)) for name in axes["precision"]]
        whole = build(model, TOKENS)
        self.graphs: list[OpGraph] = []
        for splits, way in product(axes["sequence_parallel"], axes["context_parallel"]):
            assert isinstance(way, ContextParallel)
            strategy = Strategy(tp=SPLIT, cp=SPLIT, sequence_parallel=bool(splits), context_parallel=way)
            one = shard(whole, strategy)
            self.graphs += [insert_collectives(one, strategy, numbers) for numbers in self.recipes]

    def without_idle(self, fusion: frozenset[Fusion]) -> frozenset[Fusion]:
        """The set without members that change nothing, taken out one after the other."""
        fused = self._fused(fusion)
        for name in sorted(fusion, key=lambda f: f.value):
            less = fusion - {name}
            if self._fused(less) == fused:
                fusion = less
        return fusion

    def _fused(self, fusion: frozenset[Fusion]) -> list[OpGraph]:
        inside = Fusion.FUSED_QUANTIZE in fusion
        ways = zip(self.graphs, self.recipes * (len(self.graphs) // len(self.recipes)), strict=True)
        return [insert_quantization(fuse(graph, fusion), numbers, inside=inside) for graph, numbers in ways]
