"""How a model is laid over a cluster: the choices a search makes. Knows nothing of what they cost.

Structure fields (schedule, recompute, ZeRO stage, precision ...) are plain Python values and decide *which* ops exist.
Size fields (tp, pp, micro_batch ...) are numbers, or float64 arrays of shape `[N]`, and decide *how big* ops are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import numpy as np

__all__ = [
    "Chunks",
    "ContextParallel",
    "CudaGraph",
    "Fusion",
    "OwnFusion",
    "LayoutRule",
    "Module",
    "Offload",
    "Optimizer",
    "Overlap",
    "RankOrder",
    "Recompute",
    "RecomputeKind",
    "Schedule",
    "Size",
    "Strategy",
]

Size = int | float | np.ndarray
"""A size field: one number, or `[N]` numbers, one per strategy."""


class Schedule(Enum):
    """Pipeline schedules (estimator/schedule has their orders and sources)."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZB_H1 = "zb-h1"
    DUALPIPE = "dualpipe"
    ZB_H2 = "zb-h2"
    ZB_1P = "zb-1p"
    ZB_2P = "zb-2p"
    ZB_V = "zb-v"
    V_HALF = "v-half"
    V_MIN = "v-min"
    DUALPIPE_V = "dualpipe-v"
    BREADTH_FIRST = "breadth-first"


class LayoutRule(Enum):
    """A layout that follows from what its chunks cost instead of being listed."""

    AUTO = "auto"  # balanced (estimator/auto_layout.py)


class ContextParallel(Enum):
    """How attention sees keys and values of other context-parallel ranks."""

    RING = "ring"
    ALL_GATHER = "all-gather"
    ULYSSES = "ulysses"


class RankOrder(Enum):
    """Which parallel dimensions are neighbours on the machine, from the inside out. Experts fold over tp, cp and dp."""

    TP_CP_DP_PP = "tp-cp-dp-pp"
    TP_CP_PP_DP = "tp-cp-pp-dp"


class Optimizer(Enum):
    """Update rules whose states and traffic are modelled."""

    ADAM = "adam"
    ADAM_8BIT = "adam_8bit"
    SGD = "sgd"
    MUON = "muon"


class CudaGraph(Enum):
    """Which launches are captured once and replayed, so that the device does not wait for the host to make them."""

    NONE = "none"
    ATTENTION = "attention"  # attention and the norms of each layer
    LAYER = "layer"  # whole layers
    FULL = "full"  # the whole iteration, optimizer included


class Fusion(Enum):
    """Kernels that replace several ops and the tensors between them."""

    FLASH_ATTENTION = "flash_attention"
    FUSED_LOSS = "fused_loss"
    FUSED_NORM = "fused_norm"
    FUSED_ACTIVATION = "fused_activation"
    FUSED_QKV = "fused_qkv"
    FUSED_GATE_UP = "fused_gate_up"
    FUSED_MLA_PROJECTIONS = "fused_mla_projections"
    FUSED_ROPE = "fused_rope"
    FUSED_RESIDUAL_NORM = "fused_residual_norm"
    FUSED_PERMUTE = "fused_permute"
    FUSED_DROPOUT = "fused_dropout"
    FUSED_SOFTMAX = "fused_softmax"
    FUSED_ROUTER = "fused_router"
    FUSED_QUANTIZE = "fused_quantize"


@dataclass(frozen=True, slots=True)
class OwnFusion:
    """A kernel that a user's rule describes: its name, and the rule as text (passes/fuse/reading.py)."""

    value: str
    content: str


class Module(Enum):
    """Parts of a layer that selective recompute can name (Megatron-Core's names where it has them)."""

    CORE_ATTENTION = "core_attn"
    LAYERNORM = "layernorm"
    MLA_UP_PROJ = "mla_up_proj"
    MLP = "mlp"
    MLP_ACTIVATION = "mlp_act"
    MOE = "moe"
    MOE_ACTIVATION = "moe_act"


class RecomputeKind(Enum):
    """How much of a layer's forward is run again in backward."""

    NONE = "none"
    SELECTIVE = "selective"
    BLOCK = "block"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What backward runs again. `modules` is empty unless the kind is SELECTIVE.

    >>> str(Recompute.parse(["mla_up_proj", "layernorm"]))
    'layernorm+mla_up_proj'
    >>> Recompute.parse("full").kind
    <RecomputeKind.FULL: 'full'>
    """

    kind: RecomputeKind = RecomputeKind.NONE
    modules: frozenset[Module] = frozenset()

    def __post_init__(self) -> None:
        if (self.kind is RecomputeKind.SELECTIVE) != bool(self.modules):
            raise ValueError(f"recompute modules go with selective recompute, and only with it; got {self}")

    @classmethod
    def parse(cls, value: str | list[str]) -> Recompute:
        """From `none`, `full`, `block`, `selective` (core attention), `a+b`, or a list of module names."""
        if isinstance(value, str) and value in {"none", "full", "block"}:
            return cls(kind=RecomputeKind(value))
        names = ["core_attn"] if value == "selective" else value.split("+") if isinstance(value, str) else value
        known = {module.value: module for module in Module}
        for name in names:
            if name not in known:
                accepted = ["none", "full", "block", "selective", *sorted(known)]
                raise ValueError(f"recompute must name one of {accepted}, but got {name!r}")
        if not names:
            return cls()
        return cls(kind=RecomputeKind.SELECTIVE, modules=frozenset(known[name] for name in names))

    def __str__(self) -> str:
        return "+".join(sorted(m.value for m in self.modules)) if self.modules else self.kind.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Which traffic runs beside compute: 1 on, 0 off. Ring attention passes keys and values beside attention."""

    tp: Size = 0
    cp: Size = 1
    ep: Size = 0
    pp: Size = 0
    dp: Size = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Shares, from 0 to 1, of what is kept in the host's memory instead of the chip's."""

    activations: Size = 0
    parameters: Size = 0
    gradients: Size = 0
    states: Size = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """Pieces into which an overlapped tensor-parallel collective and its GEMMs are cut, by place in a layer.

    `in`: column-parallel GEMMs, which read a gathered input; `out`: row-parallel ones, whose output is reduced. Each
    piece pays its own latency and its own tiles. Default: Transformer Engine splits by 4.

    >>> str(Chunks.parse("8")), str(Chunks.parse("1+2+4+4"))
    ('8', '1+2+4+4')
    """

    attention_in: int = 4
    attention_out: int = 4
    mlp_in: int = 4
    mlp_out: int = 4

    @classmethod
    def parse(cls, text: str) -> Chunks:
        """From one number for all, or four joined by +, in the order of the fields."""
        numbers = [int(part) for part in text.split("+")]
        if len(numbers) not in {1, len(fields(cls))}:
            raise ValueError(f"tp_chunks must be one number, or four joined by +, but got {text!r}")
        names = [f.name for f in fields(cls)]
        return cls(**dict(zip(names, numbers * (len(names) // len(numbers)), strict=True)))

    def __str__(self) -> str:
        numbers = [getattr(self, f.name) for f in fields(self)]
        return str(numbers[0]) if len(set(numbers)) == 1 else "+".join(map(str, numbers))


DEFAULT_FUSION = frozenset({Fusion.FLASH_ATTENTION, Fusion.FUSED_NORM, Fusion.FUSED_ACTIVATION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One point of the design space, or `[N]` points that share their structure fields.

    `dp` is what remains of the cluster: `num_chips / (tp * cp * pp)`; rules.py checks the products.
    Ranks are numbered in `rank_order` from the inside out; the expert groups fold over the same world (etp, ep, edp in
    place of tp, cp, dp).
    """

    tp: Size = 1
    cp: Size = 1
    pp: Size = 1
    ep: Size = 1
    etp: Size = 1
    vpp: Size = 1
    micro_batch: Size = 1
    dp_replicate: Size = 1  # HSDP: ZeRO shards over dp / dp_replicate ranks, whose gradients are summed over these
    schedule: Schedule = Schedule.ONE_F_ONE_B
    layout: tuple[int, ...] | LayoutRule | None = None  # transformer layers per chunk in model order; None: even
    sequence_parallel: bool = False
    context_parallel: ContextParallel = ContextParallel.RING
    rank_order: RankOrder = RankOrder.TP_CP_DP_PP
    interleave_group: int = 0  # micro-batches that an interleaved schedule sends through a chunk at a time; 0: pp
    zero_stage: Size = 0
    reshard_after_forward: Size = 1  # ZeRO-3: free gathered weights after forward and gather them again for backward
    prefetch_blocks: Size = 1  # ZeRO-3: blocks gathered ahead of the one at work
    recompute: Recompute = Recompute()
    recompute_layers: Size = 0  # block recompute: the first N layers of each chunk
    recompute_per_chunk: tuple[int, ...] | None = None  # in place of that: of each chunk in model order its own number
    precision: str = "bf16"  # a recipe of estimator/precision.py
    optimizer: Optimizer = Optimizer.ADAM
    offload: Offload = field(default_factory=Offload)
    overlap: Overlap = field(default_factory=Overlap)
    tp_chunks: Chunks = Chunks()  # of overlapped tensor-parallel traffic
    # Gradient bucket of overlapped DP; 0: one bucket, which leaves nothing to overlap. Default: Megatron-Core's 40
    # million fp32 gradients.
    bucket_bytes: Size = 160_000_000
    expert_bucket_bytes: int | None = None  # of the experts' gradients; None: they share the buckets of the others
    fusion: frozenset[Fusion | OwnFusion] = DEFAULT_FUSION
    cuda_graph: CudaGraph = CudaGraph.NONE
    shared_expert_overlap: bool = False  # shared experts compute beside the dispatch and combine of the routed ones
    redundant_experts: int = 0  # copies of hot experts, over all of ep (EPLB)

    def __post_init__(self) -> None:
        kinds = {"schedule": Schedule, "context_parallel": ContextParallel, "rank_order": RankOrder,
                 "optimizer": Optimizer, "recompute": Recompute, "overlap": Overlap, "tp_chunks": Chunks,
                 "offload": Offload, "cuda_graph": CudaGraph}  # fmt: skip
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                make = f"{kind.__name__}.parse" if kind is Recompute else kind.__name__
                raise TypeError(f"{name} must be of {kind.__name__}, but got {value!r}; {make}(...) makes one")
        if not isinstance(self.layout, tuple | LayoutRule | None):
            raise TypeError(f"layout must be a tuple of layers per chunk or a LayoutRule, but got {self.layout!r}")
        if not all(isinstance(item, Fusion | OwnFusion) for item in self.fusion):
            raise TypeError(f"fusion must hold members of Fusion or OwnFusion, but got {self.fusion!r}")
        per_chunk = self.recompute_per_chunk
        if per_chunk is not None and not (isinstance(per_chunk, tuple) and all(isinstance(n, int) for n in per_chunk)):
            raise TypeError(f"recompute_per_chunk must be None or a tuple of whole numbers, but got {per_chunk!r}")
        if not isinstance(self.expert_bucket_bytes, int | None):
            raise TypeError(f"expert_bucket_bytes must be None or a whole number, but got {self.expert_bucket_bytes!r}")

    @property
    def num_rows(self) -> int:
        """Length of the batch: 1 for plain numbers."""
        return int(max(np.size(value) for value in self.sizes().values()))

    def sizes(self) -> dict[str, Size]:
        """The size fields by name, those of `overlap` and `offload` as `overlap_tp`, `offload_states` and so on."""
        plain = {name: getattr(self, name) for name in SIZE_FIELDS}
        parts = {
            f"{part}_{f.name}": getattr(getattr(self, part), f.name)
            for part in NESTED
            for f in fields(getattr(self, part))
        }
        return plain | parts

    def with_sizes(self, sizes: dict[str, Any]) -> Strategy:
        """A copy with some size fields replaced; names as in `sizes()`."""
        changed = {name: value for name, value in sizes.items() if name in SIZE_FIELDS}
        for part in NESTED:
            mine = {
                name.removeprefix(f"{part}_"): value for name, value in sizes.items() if name.startswith(f"{part}_")
            }
            if mine:
                changed[part] = replace(getattr(self, part), **mine)
        return replace(self, **changed)


SIZE_FIELDS = (
    "tp", "cp", "pp", "ep", "etp", "vpp", "micro_batch", "dp_replicate", "zero_stage", "reshard_after_forward",
    "prefetch_blocks", "recompute_layers", "bucket_bytes",
)  # fmt: skip
NESTED = ("overlap", "offload")
"""Fields that hold size fields of their own."""
