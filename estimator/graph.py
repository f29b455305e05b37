"""The one intermediate representation: blocks of ops, and the order in which a model runs them.

A model of 61 layers has five distinct blocks; each is held once with the number of times it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from estimator.layers import LayerSpec, Mlp
from estimator.op import Array, Component, Op, OpKind, Phase, Tensor, Weight
from estimator.precision import Role

__all__ = ["Block", "BlockKind", "NO_SOURCES", "OpGraph", "Origin", "Sources"]


class BlockKind:
    """Distinct blocks of a causal language model: its ends, and one kind for each distinct layer.

    MTP is what a multi-token-prediction module adds to its layer. Equal kinds are one object (`of` makes each once,
    and so does unpickling), so that they are looked up by identity.
    """

    __slots__ = ("layer", "value")
    EMBEDDING: ClassVar[BlockKind]
    POSITIONS: ClassVar[BlockKind]
    DENSE: ClassVar[BlockKind]  # attention and a dense MLP, as most layers are
    MOE: ClassVar[BlockKind]
    HEAD: ClassVar[BlockKind]
    MTP: ClassVar[BlockKind]
    _known: ClassVar[dict[str | LayerSpec, BlockKind]] = {}

    def __init__(self, value: str, layer: LayerSpec | None = None) -> None:
        self.value, self.layer = value, layer

    @classmethod
    def of(cls, what: str | LayerSpec) -> BlockKind:
        """The kind of a layer, or of an end by its name.

        >>> BlockKind.of(LayerSpec()) is BlockKind.DENSE
        True
        """
        if what not in cls._known:
            cls._known[what] = cls(what.name, what) if isinstance(what, LayerSpec) else cls(what)
        return cls._known[what]

    def __reduce__(self) -> tuple[Callable[[str | LayerSpec], BlockKind], tuple[str | LayerSpec]]:
        return BlockKind.of, (self.layer or self.value,)

    def __repr__(self) -> str:
        return f"BlockKind({self.value})"

    @property
    def is_layer(self) -> bool:
        """Whether a pipeline layout counts it as a layer."""
        return self.layer is not None


for _name in ("EMBEDDING", "POSITIONS", "HEAD", "MTP"):
    setattr(BlockKind, _name, BlockKind.of(_name.lower()))
BlockKind.DENSE = BlockKind.of(LayerSpec())
BlockKind.MOE = BlockKind.of(LayerSpec(mlp=Mlp.MOE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Ops that run one after the other, and the tensors between them. `input` is what the previous block hands over."""

    kind: BlockKind
    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]
    input: str

    def of_phase(self, *phases: Phase) -> Iterator[Op]:
        """Ops of these phases, in order."""
        return (op for op in self.ops if op.phase in phases)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Parameters of the block, each once."""
        return tuple(weight for weight, _ in self.owned().values())

    def owned(self) -> dict[str, tuple[Weight, Component]]:
        """The same by name, each with the part of the model that it belongs to."""
        return {w.name: (w, op.component) for op in self.of_phase(Phase.FORWARD) for w in op.weights}

    def with_ops(self, ops: tuple[Op, ...], tensors: Mapping[str, Tensor] | None = None) -> Block:
        """A copy with other ops, and more tensors where given."""
        return replace(self, ops=ops, tensors={**self.tensors, **tensors} if tensors else self.tensors)

    def saved(self) -> dict[tuple[str, Role], Tensor]:
        """What backward finds in memory: every saved tensor once per role, none that recompute brings back.

        A recomputed op keeps its inputs instead of what follows from them (its outputs, its statistics), unless they
        are recomputed as well.
        """
        again = {op.name: op for op in self.ops if op.phase is Phase.RECOMPUTE and op.kind is not OpKind.COLLECTIVE}
        remade: set[str] = set()
        wanted: list[tuple[str, Role]] = []
        forward = tuple(self.of_phase(Phase.FORWARD))
        values = {name for op in forward for name in (*op.inputs, *op.outputs)}
        for op in forward:
            wanted += [(save.tensor, save.role) for save in op.saves]
            if op.name in again:
                kept = {save.tensor for save in again[op.name].saves}
                remade.update(name for name in op.outputs if name not in kept)
                remade.update(save.tensor for save in op.saves if save.tensor not in values)
        stored = {name for name, _ in wanted}
        wanted += [(name, Role.ACTIVATION) for op in again.values() for name in op.inputs if name not in stored]
        return {(name, role): self.tensors[name] for name, role in wanted if name not in remade}


@dataclass(frozen=True, slots=True)
class Origin:
    """One place of a model's code: the framework's operations that it called with their number, module, line."""

    ops: tuple[tuple[str, int], ...]
    scope: str
    module: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What is known of the code behind a graph: per block the places of each op, and the modules around them.

    `modules`: the class of each module by its path; `bases`: of each class the names of its bases, the nearest first.
    """

    origins: Mapping[BlockKind, Mapping[str, tuple[Origin, ...]]] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    bases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_a(self, module: str, names: frozenset[str]) -> bool:
        """Whether a class is one of these, or has one of them among its bases."""
        return module in names or not names.isdisjoint(self.bases.get(module, ()))


NO_SOURCES = Sources()
"""Of a graph that was built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """Blocks by kind, and the model as the sequence of their kinds.

    `phase`: what the graph is a run of, train, prefill or decode. `sources` say nothing of what it computes.
    """

    name: str
    blocks: Mapping[BlockKind, Block]
    sequence: tuple[BlockKind, ...]
    phase: str = "train"
    sources: Sources = field(default=NO_SOURCES, compare=False, repr=False)

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """Kinds in order of first use: the block axis of price tables."""
        return tuple(dict.fromkeys(self.sequence))

    def map(self, change: Callable[[Block], Block]) -> OpGraph:
        """The graph with every block changed."""
        return replace(self, blocks={kind: change(block) for kind, block in self.blocks.items()})

    def num_parameters(self) -> Array:
        """Parameters of the whole model; a weight that two blocks share by name (tied embeddings) counts once."""
        total: Array = 0.0
        shared: set[str] = set()
        for kind in self.sequence:
            for weight in self.blocks[kind].weights:
                if kind.is_layer or kind is BlockKind.MTP or weight.name not in shared:
                    total = total + weight.elements
                shared.add(weight.name)
        return total
