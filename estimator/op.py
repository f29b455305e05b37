"""One operation: what it computes, on which logical axes, what it keeps for backward. Knows no seconds.

Sizes are float64, plain or of shape `[R]` (one per distinct row of a batch): FLOP-sized products overflow int64. Plain
floats and arrays go through the same arithmetic in the same order, so both give the same bits; floats are faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from estimator.precision import Role, Tag

__all__ = ["Axis", "Array", "Component", "Dim", "Group", "Op", "OpKind", "Phase", "Save", "Tensor", "Traffic",
           "Weight", "larger", "product", "rounded_up", "smaller"]  # fmt: skip

Array = float | np.ndarray


def larger(a: Array, b: Array) -> Array:
    """The larger of two sizes, element by element where one is an array."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return a if a >= b else b


def smaller(a: Array, b: Array) -> Array:
    """The smaller of two sizes, element by element where one is an array."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return a if a <= b else b


def rounded_up(a: Array) -> Array:
    """The next whole number.

    >>> rounded_up(2.5)
    3.0
    """
    return np.ceil(a) if isinstance(a, np.ndarray) else float(math.ceil(a))


class Axis(Tag):
    """Logical axes. Sharding is a table over them (passes/shard.py), the same for built and captured graphs."""

    BATCH = "batch"  # sequences of a micro-batch
    TOKENS = "tokens"  # batch x sequence, flattened
    QUERY = "query"
    KEY = "key"
    HIDDEN = "hidden"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    HEAD = "head"  # inside one head
    LATENT = "latent"  # low-rank bottleneck of MLA
    FFN = "ffn"
    VOCAB = "vocab"
    ROUTER = "router"  # one score per expert
    EXPERTS = "experts"
    ROUTED = "routed"  # token rows handled by the experts of a rank
    EXPERT_FFN = "expert_ffn"
    POSITIONS = "positions"
    SHARED = "shared"  # what all heads read (one head of keys): whole on every tensor-parallel rank, of all its tokens


class OpKind(Tag):
    """What an op computes. Order of `dims` in parentheses."""

    MATMUL = "matmul"  # (m, k, n), with a weight k x n
    GROUPED_MATMUL = "grouped_matmul"  # (groups, rows of all groups, k, n)
    BLOCK_MATMUL = "block_matmul"  # (m, blocks, k, n): each block of columns with a weight of its own
    SCORES = "scores"  # (batch, query, key, heads, qk head dim): q k^T
    CONTEXT = "context"  # (batch, query, key, heads, v head dim): p v
    ATTENTION = "attention"  # (batch, query, key, heads, qk head dim, v head dim), fused, causal
    INDEX = "index"  # (m, key, heads, head dim): causal scores of every head, added up
    SCAN = "scan"  # (m, heads, multiply-adds per token and head): a recurrence in chunks, as matrix products
    SOFTMAX = "softmax"
    NORM = "norm"
    ROPE = "rope"
    ACTIVATION = "activation"
    ELEMENTWISE = "elementwise"
    DROPOUT = "dropout"
    CONV = "conv"  # causal, a few taps per channel
    MIX = "mix"  # weighted sums of streams, the weights computed
    EMBEDDING = "embedding"
    PERMUTE = "permute"
    TOPK = "topk"
    LOSS = "loss"
    QUANTIZE = "quantize"
    COLLECTIVE = "collective"


class Phase(Tag):
    """When an op runs."""

    FORWARD = "forward"
    BACKWARD = "backward"  # gradient of the inputs
    WEIGHT_GRAD = "weight_grad"
    RECOMPUTE = "recompute"


class Component(Tag):
    """Part of the model an op belongs to."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    ROUTER = "router"
    EXPERTS = "experts"
    NORM = "norm"
    RESIDUAL = "residual"
    LINEAR_ATTENTION = "linear_attention"
    MAMBA = "mamba"
    INDEXER = "indexer"
    HYPER = "hyper"
    HEAD = "head"
    MTP = "mtp"


class Traffic(Tag):
    """What a communication op does. A payload is the whole buffer: the output of a gather, the input of the others."""

    COPY = "copy"  # nothing in forward; its dual sums gradients (the f operator of Megatron, arXiv:1909.08053)
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    RING = "ring"  # each rank's share passes every other rank: the traffic of an all-gather, in steps


class Group(Tag):
    """Rank groups."""

    TP = "tp"
    CP = "cp"
    EP = "ep"
    ETP = "etp"


class Dim(NamedTuple):
    """A size along a logical axis. `units`: how many indivisible pieces it holds (heads); 0: any split is even.

    Of routed rows: the experts that have a fixed number of rows each; 0: routing decides how many rows there are.
    """

    size: Array
    axis: Axis
    units: int = 0


def product(dims: tuple[Dim, ...]) -> Array:
    """Elements of a shape, left to right so that scalars and batches round alike."""
    total: Array = 1.0
    for dim in dims:
        total = total * dim.size
    return total


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value between ops; `elements` is their number."""

    dims: tuple[Dim, ...]
    role: Role = Role.ACTIVATION
    elements: Array = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", product(self.dims))


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter. `expert`: reduced over expert-data-parallel ranks. `linear`: a GEMM weight that recipes may cast."""

    name: str
    dims: tuple[Dim, ...]
    expert: bool = False
    linear: bool = True

    @property
    def elements(self) -> Array:
        """Number of parameters."""
        return product(self.dims)


@dataclass(frozen=True, slots=True)
class Save:
    """A tensor kept from forward to backward, stored in the dtype of `role`."""

    tensor: str
    role: Role


@dataclass(frozen=True, kw_only=True)  # no slots: passes copy hundreds of ops per price row, and a dict copies at once
class Op:
    """One operation of a block.

    `inputs` and `outputs` name tensors of the block; `modules` are the recompute names (strategy.Module values) it
    belongs to; `passes` is how often a memory-bound op streams its tensors (1 when fused). `saves` of an op that runs
    again are what the first run keeps all the same. An op that `rides` is part of the kernel before it, not launched
    by itself; what is `held` stays on the chip between the two.
    """

    name: str
    kind: OpKind
    component: Component
    dims: tuple[Dim, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    saves: tuple[Save, ...] = ()
    weights: tuple[Weight, ...] = ()
    modules: frozenset[str] = frozenset()
    phase: Phase = Phase.FORWARD
    role: Role = Role.LINEAR_INPUT  # of GEMM inputs: picks the engine
    passes: float = 1.0
    rides: bool = False
    held: frozenset[str] = frozenset()  # tensors that it neither reads from memory nor writes there
    captured: bool = False  # launched by a CUDA graph together with its captured neighbours
    collective: Traffic | None = None
    group: Group | None = None
    payload: Array = 0.0  # bytes of the whole buffer
    beside: str = ""  # the window it may hide in: 'gemm' or 'whole' (cost/overlap.py), 'block', 'attention'
    partners: tuple[str, ...] = ()  # GEMMs of the block and phase that a tensor-parallel collective runs beside
    max_domains: int = 0  # node-limited all-to-all; 0: no limit
    fanout: float = 1.0  # rows of a token in an all-to-all
    load: Array = 1.0  # rows of the fullest rank over the mean: experts under routing skew
    visible: float = 1.0  # of the causal half of the scores, what a window or a choice of keys leaves
    reach: float = 0.0  # tokens back to which attention sees; 0: all
    selects: bool = False  # every query reads keys of its own
    detached: bool = False  # takes no gradient further: a GEMM still has that of its weight
    partial: bool = False  # its partial sums are reduced with those of a later op
    kept: bool = False  # what a collective brought is kept, so backward does not bring it again
    streams: tuple[tuple[str, float], ...] = ()  # how often each tensor moves, where a fusion rule says so
    back: tuple[tuple[str, float], ...] = ()  # the same of its gradient, tensors by the name that they have forward

    def but(self, **changes: object) -> Op:
        """A copy with some fields changed: dataclasses.replace at a tenth of its cost."""
        made = object.__new__(Op)
        made.__dict__.update(self.__dict__)
        made.__dict__.update(changes)
        return made
