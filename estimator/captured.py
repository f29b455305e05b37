"""A model whose operations were captured from its own code, in place of built from a model file.

It stands wherever a ModelSpec does: its sizes answer the rules, its graph is what is priced. The graph is held for a
few tokens; dims along axes that grow with the sequence tell it for any other length. Knows nothing of how it was
captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from estimator.build.scores import band, visible_share
from estimator.graph import Block, BlockKind, OpGraph, Origin, Sources
from estimator.layers import LayerSpec
from estimator.model import ModelSpec
from estimator.op import Array, Axis, Dim, Op, OpKind, Tensor
from estimator.parts import require_at_least

__all__ = ["CapturedGraph", "CapturedModel", "Origin"]

GROWING = frozenset({Axis.TOKENS, Axis.ROUTED, Axis.QUERY, Axis.KEY})  # as long as the sequence, or a share of it
CHOSEN = frozenset({Axis.KEY, Axis.SHARED})  # a dim of as many keys as an indexer chooses is theirs, and stays
PHASES = ("train", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedGraph:
    """The graph of one sequence of `tokens` tokens. Equal graphs have one digest.

    `origins`: per `BLOCK/OP`, a layer by the path of the first of its kind, the places that it stands for; `gradients`:
    what ran backward, by the place whose gradient it is. `unknown`: ops that are priced as memory-bound because nothing
    is known of them. `modules`, `bases`: as in graph.Sources.
    """

    graph: OpGraph
    tokens: int
    phase: str
    digest: str
    chosen_keys: int = 0  # of a query, where an indexer chooses
    origins: Mapping[str, tuple[Origin, ...]] = field(default_factory=dict)
    gradients: tuple[Origin, ...] = ()
    unknown: tuple[str, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_at_least(self, 1, "tokens")
        if self.phase not in PHASES:
            raise ValueError(f"phase must be one of {list(PHASES)}, but got {self.phase!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CapturedGraph) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def at(self, seq: int) -> OpGraph:
        """The graph of one sequence of `seq` tokens; in decode, of one token behind a cache of `seq`."""
        known: dict[tuple[Dim, ...], tuple[Dim, ...]] = {}
        chosen, behind = self.chosen_keys, self.phase == "decode"
        growing = frozenset({Axis.KEY}) if behind else GROWING

        def size(dim: Dim) -> Array:
            if chosen and dim.size == chosen and dim.axis in CHOSEN:
                return float(min(chosen, seq))
            return dim.size * seq / self.tokens if dim.axis in growing else dim.size

        def scaled(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
            if dims not in known:
                known[dims] = tuple([d._replace(size=size(d)) for d in dims])
            return known[dims]

        def change(block: Block) -> Block:
            tensors = {name: Tensor(scaled(t.dims), t.role) for name, t in block.tensors.items()}
            ops = tuple([_op(op, scaled(op.dims), block.kind.layer, seq, chosen, behind=behind) for op in block.ops])
            return replace(block, ops=ops, tensors=tensors)

        return replace(self.graph.map(change), phase=self.phase, sources=self.sources)

    @property
    def sources(self) -> Sources:
        """The code behind each op, by block."""
        layers = [kind for kind in self.graph.sequence if kind.is_layer]
        of: dict[BlockKind, dict[str, tuple[Origin, ...]]] = {}
        for key, places in self.origins.items():
            place, _, op = key.rpartition("/")
            number = place.rpartition(".")[2]
            kind = layers[int(number)] if number.isdecimal() and int(number) < len(layers) else BlockKind.of(place)
            of.setdefault(kind, {})[op] = places
        return Sources(origins=of, modules=self.modules, bases=self.bases)


def _op(op: Op, dims: tuple[Dim, ...], layer: LayerSpec | None, seq: int, chosen: int, *, behind: bool) -> Op:
    """Shares of scores depend on the length; `behind` a cache, a token sees all keys: twice the causal half."""
    if op.kind is not OpKind.SCORES or layer is None:
        return op.but(dims=dims)
    reach = min(layer.window or layer.chunk, seq)
    if op.selects:
        keys = min(chosen, seq)
        return op.but(dims=dims, visible=2.0 * keys / seq if behind else band(seq, chosen) / (seq * seq / 2))
    visible = 2.0 * (reach or seq) / seq if behind else visible_share(seq, layer)
    return op.but(dims=dims, visible=visible, reach=float(reach))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel(ModelSpec):
    """Sizes as the graph has them, and the graph."""

    captured: CapturedGraph

    __hash__ = ModelSpec.__hash__

    def num_parameters(self, include_mtp: bool = False) -> int:
        """Those of the graph, which may have weights that no size tells of."""
        return int(np.asarray(self.captured.graph.num_parameters()))

    def captured_at(self, seq: int) -> OpGraph:
        """The graph at that sequence length."""
        return self.captured.at(seq)
