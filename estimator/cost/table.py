"""Prices of every distinct row, block by block: the interface between graphs and compose.py.

A row is one combination of the sizes that decide op shapes (tp, cp, ep, etp, micro-batch). Everything that varies
faster (pp, schedules, recomputed layers, ZeRO, buckets) is composed from these numbers. A block's seconds are split by
what they are and by what could hide them, so that an overlap flag picks a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from estimator.cost.collective import collective
from estimator.cost.price import BACKENDS, Backend, price
from estimator.graph import Block, BlockKind, OpGraph
from estimator.op import Array, Traffic, Group, Op, OpKind, Phase, Tensor
from estimator.passes import recompute
from estimator.passes.shard import is_tensor_parallel
from estimator.precision import PrecisionRecipe, Role
from estimator.strategy import Recompute, Strategy
from hardware.system import SystemSpec

__all__ = ["Again", "Base", "PriceTable", "price_table"]

SLOWDOWN = 0.15  # share of a chip that hidden traffic takes: 20 of 132 SMs (DeepSeek-V3, arXiv:2412.19437, sec. 3.2.2)
TP_CHUNKS = 4  # pieces of a GEMM overlapped with its collective; the first piece is exposed (Transformer Engine splits by 4)


class Base(IntEnum):
    """Columns that recompute does not change; seconds per micro-batch. TP0/EP0: overlap off, TP1/EP1: on."""

    F_COMP = 0
    F_HOST = 1
    F_CP = 2
    F_TP0 = 3
    F_TP1 = 4
    F_EP0 = 5
    F_EP1 = 6
    B_COMP = 7
    B_HOST = 8
    B_CP = 9
    B_TP0 = 10
    B_TP1 = 11
    B_EP0 = 12
    B_EP1 = 13
    W_COMP = 14
    W_HOST = 15
    DENSE_PARAMS = 16
    EXPERT_PARAMS = 17
    DENSE_WEIGHT_BYTES = 18
    EXPERT_WEIGHT_BYTES = 19
    TILE_S = 20
    MEASURED_S = 21
    ROOFLINE_S = 22


class Again(IntEnum):
    """Columns that depend on the recompute choice; the first seven as in Base."""

    R_COMP = 0
    R_HOST = 1
    R_CP = 2
    R_TP0 = 3
    R_TP1 = 4
    R_EP0 = 5
    R_EP1 = 6
    SAVED_BYTES = 7
    LIVE_BYTES = 8
    FLOPS = 9
    TILE_S = 10
    MEASURED_S = 11
    ROOFLINE_S = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """`base` [R, K, Base], `again` [R, choices, K, Again], `hop_bytes` and `buffer_bytes` [R]."""

    kinds: tuple[BlockKind, ...]
    recomputes: tuple[Recompute, ...]
    base: np.ndarray
    again: np.ndarray
    hop_bytes: np.ndarray
    buffer_bytes: np.ndarray


def price_table(
    graph: OpGraph, strategy: Strategy, system: SystemSpec, recipe: PrecisionRecipe,
    recomputes: tuple[Recompute, ...], backends: tuple[Backend, ...] = (),
) -> PriceTable:  # fmt: skip
    """Price a lowered graph (passes.lower) whose sizes have `strategy.num_rows` rows."""
    rows, kinds = strategy.num_rows, graph.kinds
    base = np.zeros((rows, len(kinds), len(Base)))
    again = np.zeros((rows, len(recomputes), len(kinds), len(Again)))
    pricer = _Pricer(strategy, system, recipe, backends or tuple(BACKENDS))
    for k, kind in enumerate(kinds):
        block = graph.blocks[kind]
        for column, value in pricer.base(block).items():
            base[:, k, column] = value
        kept_all = pricer.saved_bytes(block)
        for c, choice in enumerate(recomputes):
            for column, value in pricer.again(recompute(graph, choice).blocks[kind], kept_all).items():
                again[:, c, k, column] = value
    hop = np.zeros(rows) + pricer.tensor_bytes(graph.blocks[BlockKind.HEAD].tensors["x"], Role.ACTIVATION)
    buffers = np.zeros(rows) + pricer.buffer_bytes(graph)
    return PriceTable(kinds=kinds, recomputes=recomputes, base=base, again=again, hop_bytes=hop, buffer_bytes=buffers)


@dataclass(frozen=True, slots=True)
class _Pricer:
    strategy: Strategy
    system: SystemSpec
    recipe: PrecisionRecipe
    backends: tuple[Backend, ...]

    def base(self, block: Block) -> dict[Base, Array]:
        phases = {p: self._phase(block, p) for p in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD)}
        out: dict[Base, Array] = {}
        for letter, phase in (("F", Phase.FORWARD), ("B", Phase.BACKWARD)):
            out |= {Base[f"{letter}_{name}"]: value for name, value in phases[phase].seconds().items()}
        wgrad = phases[Phase.WEIGHT_GRAD].seconds()
        out |= {Base.W_COMP: wgrad["COMP"], Base.W_HOST: wgrad["HOST"]}
        for source in ("tile", "measured", "roofline"):
            out[Base[f"{source.upper()}_S"]] = sum(p.by_source.get(source, 0.0) for p in phases.values())
        weights = block.weights
        per = {True: self.recipe.linear_weight_bytes, False: self.recipe.other_weight_bytes}
        for prefix, expert in (("DENSE", False), ("EXPERT", True)):
            mine = [w for w in weights if w.expert is expert]
            out[Base[f"{prefix}_PARAMS"]] = sum((w.elements for w in mine), 0.0)
            out[Base[f"{prefix}_WEIGHT_BYTES"]] = sum((w.elements * per[w.linear] for w in mine), 0.0)
        return out

    def again(self, block: Block, kept_all: Array) -> dict[Again, Array]:
        phase = self._phase(block, Phase.RECOMPUTE)
        out: dict[Again, Array] = {Again[f"R_{name}"]: value for name, value in phase.seconds().items()}
        saved = self.saved_bytes(block)
        out[Again.SAVED_BYTES] = saved
        # While one block's backward runs, what recompute brings back is alive beside the widest op's tensors.
        out[Again.LIVE_BYTES] = np.maximum(kept_all - saved, 0.0) + self.transient_bytes(block)
        out[Again.FLOPS] = phase.flops
        for source in ("tile", "measured", "roofline"):
            out[Again[f"{source.upper()}_S"]] = phase.by_source.get(source, 0.0)
        return out

    def _phase(self, block: Block, phase: Phase) -> _PhaseSeconds:
        total = _PhaseSeconds(self.strategy.tp, self.strategy.cp, self.system.chip.launch_s)
        for op in block.of_phase(phase):
            if op.kind is OpKind.COLLECTIVE:
                total.add_traffic(op, self.traffic_seconds(op))
                continue
            p = price(op, block, self.system.chip, self.recipe, self.backends)
            total.add_compute(op, p.seconds, p.source, p.work.flops if p.work.matrix else 0.0)
        return total

    def traffic_seconds(self, op: Op) -> Array:
        """Seconds of one collective op."""
        assert op.collective is not None
        assert op.group is not None
        size, stride = self.group(op.group)
        cost = collective(op.collective, self.system, size, stride, fanout=op.fanout, max_domains=op.max_domains)
        return cost.seconds(op.payload if op.collective is not Traffic.COPY else 0.0)

    def group(self, group: Group) -> tuple[Array, Array]:
        """Size and rank stride: tp, cp, dp, pp from the inside out; etp, ep, edp fold over the same ranks."""
        s = self.strategy
        one = np.ones(s.num_rows)
        return {
            Group.TP: (s.tp * one, one),
            Group.CP: (s.cp * one, s.tp * one),
            Group.ETP: (s.etp * one, one),
            Group.EP: (s.ep * one, s.etp * one),
        }[group]

    def tensor_bytes(self, tensor: Tensor, role: Role) -> Array:
        """Bytes of a tensor stored in a role's dtype."""
        return tensor.elements * self.recipe.nbytes(role)

    def saved_bytes(self, block: Block) -> Array:
        """Bytes kept for backward; a tensor wanted twice in formats of the same width is stored once."""
        total: Array = 0.0
        seen: set[tuple[str, float]] = set()
        for (name, role), tensor in block.saved().items():
            width = self.recipe.nbytes(role)
            if (name, width) not in seen:
                seen.add((name, width))
                total = total + tensor.elements * width
        return total

    def transient_bytes(self, block: Block) -> Array:
        """Widest op of the block: its inputs (gathered where a GEMM needs them whole) and outputs, or their gradients."""
        widest: Array = 0.0
        width = self.recipe.activation.nbytes
        for op in block.of_phase(Phase.FORWARD):
            if op.kind is OpKind.MATMUL:
                m, k, n = (d.size for d in op.dims)
                now = m * (k + n) * width
            else:
                tensors = [block.tensors[name] for name in (*op.inputs, *op.outputs)]
                now = sum((t.elements * self.recipe.nbytes(t.role) for t in tensors), 0.0)
            widest = np.maximum(widest, now)
        return widest

    def buffer_bytes(self, graph: OpGraph) -> Array:
        """Send and receive buffers of the widest all-to-all and of the stage boundary."""
        widest: Array = 0.0
        for block in graph.blocks.values():
            for op in block.of_phase(Phase.FORWARD):
                if op.collective is Traffic.ALL_TO_ALL and op.group is Group.EP:
                    widest = np.maximum(widest, np.where(np.asarray(self.strategy.ep) > 1, 2.0 * op.payload, 0.0))
        return widest


class _PhaseSeconds:
    """Sums one phase of one block and splits it by what could hide it."""

    def __init__(self, tp: Array, cp: Array, launch_s: float) -> None:
        self.tp, self.cp, self.launch_s = np.asarray(tp), np.asarray(cp), launch_s
        self.compute: Array = 0.0
        self.gemm: Array = 0.0  # GEMMs beside tensor-parallel collectives
        self.attention: Array = 0.0
        self.flops: Array = 0.0
        self.num_kernels = 0
        self.traffic: dict[tuple[Group, bool], Array] = {}
        self.by_source: dict[str, Array] = {}

    def add_compute(self, op: Op, seconds: Array, source: str, flops: Array) -> None:
        self.compute = self.compute + seconds
        self.flops = self.flops + flops
        self.num_kernels += 1
        self.by_source[source] = self.by_source.get(source, 0.0) + seconds
        if op.kind is OpKind.MATMUL and is_tensor_parallel(op.dims):
            self.gemm = self.gemm + seconds
        if op.kind in {OpKind.ATTENTION, OpKind.SCORES, OpKind.CONTEXT}:
            self.attention = self.attention + seconds

    def add_traffic(self, op: Op, seconds: Array) -> None:
        assert op.group is not None
        key = (op.group, bool(op.beside))
        self.traffic[key] = self.traffic.get(key, 0.0) + seconds

    def seconds(self) -> dict[str, Array]:
        """Exposed seconds by cause. Hidden traffic takes SLOWDOWN of the chip while it runs, so an overlapped pair
        takes max(compute + SLOWDOWN * traffic, traffic). The windows of TP and EP traffic are disjoint."""
        get = self.traffic.get
        tp, ep = get((Group.TP, True), 0.0), get((Group.EP, True), 0.0)
        tp_fixed, ep_fixed = get((Group.TP, False), 0.0), get((Group.ETP, False), 0.0)
        window = np.where(self.tp > 1, self.gemm, 0.0)
        rest = self.compute - window
        # A ring pass hides under the attention of the blocks at hand: all but the first of cp steps.
        ring = np.maximum(get((Group.CP, True), 0.0) - self.attention * (self.cp - 1) / self.cp, 0.0)
        return {
            "COMP": self.compute,
            # The device waits for the host where launches take longer than the kernels they start.
            "HOST": np.maximum(self.num_kernels * self.launch_s - self.compute, 0.0),
            "CP": ring + get((Group.CP, False), 0.0),
            "TP0": tp + tp_fixed,
            "TP1": _beside(window, tp) + tp / TP_CHUNKS + tp_fixed,
            "EP0": ep + ep_fixed,
            "EP1": _beside(rest, ep) + ep_fixed,
        }


def _beside(window: Array, traffic: Array) -> Array:
    """What overlapped traffic adds to the seconds of its window."""
    return np.maximum(window + SLOWDOWN * traffic, traffic) - window
