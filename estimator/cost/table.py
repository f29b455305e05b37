"""Prices of every distinct row, block by block: the interface between graphs and compose.py.

A row is one combination of the sizes that decide op shapes (tp, cp, ep, etp, micro-batch). Everything that varies
faster (pp, schedules, recomputed layers, ZeRO, buckets) is composed from these numbers. A block's seconds are split by
what they are and by what could hide them, so that an overlap flag picks a column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from estimator.cost.collective import Linear, collective, outermost_load
from estimator.cost.host import launch_seconds
from estimator.cost.lookup import MeasuredTable
from estimator.cost.overlap import Side, Traffics, added_seconds, beside, cuts, pieces, side
from estimator.cost.price import BACKENDS, Backend, Confidence, Price, by_priority, piece_seconds, price
from estimator.graph import Block, BlockKind, OpGraph
from estimator.groups import size_and_stride
from estimator.op import Array, Group, Op, OpKind, Phase, Tensor, Traffic, larger
from estimator.optimizers import ITERATIONS, gathered_bytes, is_matrix, iteration, more_state_bytes
from estimator.passes import recompute
from estimator.passes.differentiate import weight_gradient_of
from estimator.passes.shard import CORE_KINDS, is_tensor_parallel
from estimator.passes.shared import IN, OUT
from estimator.precision import PrecisionRecipe, Role
from estimator.strategy import CudaGraph, Optimizer, Recompute, Strategy
from hardware.system import SystemSpec

__all__ = ["CHANGED_BY", "COLUMN_OF", "Again", "Base", "PriceTable", "price_table", "saved_bytes"]


COLUMN_OF = {Confidence.HIGH: "measured", Confidence.MEDIUM: "tile", Confidence.LOW: "roofline"}
"""Which column of seconds a price counts in; a backend of a user by what it says of itself."""
LEAST_S = 1e-12  # keeps a ratio of seconds finite where there are none


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
    F_WIRE = 23  # seconds on the outermost tier of traffic of experts and tp, and of exposed context-parallel traffic
    B_WIRE = 24
    OWED_BYTES = 25  # what a split backward leaves for its weight gradients: inputs and output gradients of GEMMs
    MORE_STATE_BYTES = 26  # of dense parameters: beyond the state that all parameters have
    MATRIX_PARAMS = 27  # dense parameters in matrices that an optimizer takes whole
    DENSE_UPDATE_S = 28  # what an optimizer computes and moves beyond what it does to all parameters
    EXPERT_UPDATE_S = 29
    DENSE_LONGEST_S = 30  # of it, for the one matrix that takes longest
    EXPERT_LONGEST_S = 31
    B_BESIDE_W = 32  # at most 0: what tp traffic of a backward that is not split takes less beside weight gradients


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
    LOGITS_BYTES = 13  # the part of SAVED_BYTES that the vocabulary takes
    R_WIRE = 14


CHANGED_BY: Mapping[str, tuple[tuple[Base, ...], tuple[Again, ...]]] = {
    "optimizer": (
        (Base.MORE_STATE_BYTES, Base.MATRIX_PARAMS, Base.DENSE_UPDATE_S, Base.EXPERT_UPDATE_S, Base.DENSE_LONGEST_S,
         Base.EXPERT_LONGEST_S), (),
    ),
    "cuda_graph": ((Base.F_HOST, Base.B_HOST, Base.W_HOST), (Again.R_HOST, Again.SAVED_BYTES, Again.LIVE_BYTES)),
    "shared_expert_overlap": ((Base.F_EP0, Base.B_EP0), (Again.R_EP0,)),
    "tp_chunks": ((Base.F_TP1, Base.B_TP1), (Again.R_TP1,)),
    "overlap_cp": ((Base.F_CP, Base.B_CP, Base.F_WIRE, Base.B_WIRE), (Again.R_CP, Again.R_WIRE)),
}  # fmt: skip
"""Columns that each of these choices changes under one precision and fusion. No two change the same column, and what
one changes does not depend on the others: a row of any combination is put together from rows that differ in one."""


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
    recomputes: tuple[Recompute, ...], backends: tuple[Backend | MeasuredTable, ...] = (),
) -> PriceTable:  # fmt: skip
    """Price a lowered graph (passes.lower) whose sizes have `strategy.num_rows` rows."""
    rows, kinds = strategy.num_rows, graph.kinds
    base = np.zeros((rows, len(kinds), len(Base)))
    again = np.zeros((rows, len(recomputes), len(kinds), len(Again)))
    pricer = _Pricer(strategy, system, recipe, by_priority(backends or BACKENDS))
    chosen = [recompute(graph, choice) for choice in recomputes]
    for k, kind in enumerate(kinds):
        block = graph.blocks[kind]
        priced: dict[str, _Priced] = {}
        for column, value in pricer.base(block, priced).items():
            base[:, k, column] = value
        kept_all, transient = pricer.saved_bytes(block), pricer.transient_bytes(block)
        for c, other in enumerate(chosen):
            for again_column, value in pricer.again(other.blocks[kind], priced, kept_all, transient).items():
                again[:, c, k, again_column] = value
    hop = np.zeros(rows) + pricer.tensor_bytes(graph.blocks[BlockKind.HEAD].tensors["x"], Role.ACTIVATION)
    buffers = np.zeros(rows) + pricer.buffer_bytes(graph)
    return PriceTable(kinds=kinds, recomputes=recomputes, base=base, again=again, hop_bytes=hop, buffer_bytes=buffers)


class _Priced(NamedTuple):
    """Price of an op, and its seconds in the pieces that overlap cuts it into."""

    price: Price
    cut_s: Array
    is_part: bool  # of the kernel before it


@dataclass(frozen=True, slots=True)
class _Pricer:
    strategy: Strategy
    system: SystemSpec
    recipe: PrecisionRecipe
    backends: tuple[Backend | MeasuredTable, ...]
    costs: dict[tuple[Traffic, Group, float, int], Linear] = field(default_factory=dict)
    outer: dict[tuple[Traffic, Group, float, int], Array] = field(default_factory=dict)

    def base(self, block: Block, priced: dict[str, _Priced]) -> dict[Base, Array]:
        phases = {p: self._phase(block, p, priced) for p in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRAD)}
        out: dict[Base, Array] = {}
        for first, phase in ((Base.F_COMP, Phase.FORWARD), (Base.B_COMP, Phase.BACKWARD)):
            out |= {Base(first + i): value for i, value in enumerate(phases[phase].seconds())}
        out[Base.W_COMP], out[Base.W_HOST] = phases[Phase.WEIGHT_GRAD].seconds()[:2]
        out |= self._paired(phases)
        if self.system.software is not None and self.system.software.async_tensor_parallel:
            back = phases[Phase.BACKWARD]
            gathers, reductions = back.hidden_gathers(), back.hidden_reductions(phases[Phase.WEIGHT_GRAD])
            out[Base.B_TP0] = out[Base.B_TP0] - back.saved(gathers)
            out[Base.B_BESIDE_W] = -back.saved(reductions, gathers)
        for source in ("tile", "measured", "roofline"):
            out[Base[f"{source.upper()}_S"]] = sum(p.by_source.get(source, 0.0) for p in phases.values())
        weights = block.weights
        per = {True: self.recipe.linear_weight_bytes, False: self.recipe.other_weight_bytes}
        for prefix, expert in (("DENSE", False), ("EXPERT", True)):
            mine = [(w.elements, per[w.linear]) for w in weights if w.expert is expert]
            out[Base[f"{prefix}_PARAMS"]] = sum((elements for elements, _ in mine), 0.0)
            out[Base[f"{prefix}_WEIGHT_BYTES"]] = sum((elements * width for elements, width in mine), 0.0)
        out |= self._update(block)
        out[Base.F_WIRE], out[Base.B_WIRE] = phases[Phase.FORWARD].wire(), phases[Phase.BACKWARD].wire()
        out[Base.OWED_BYTES] = self.owed_bytes(block)
        return out

    def _update(self, block: Block) -> dict[Base, Array]:
        """What the optimizer does to some parameters and not to all: matrices, embeddings."""
        optimizer, chip = self.strategy.optimizer, self.system.chip
        if gathered_bytes(optimizer) < 0.0:
            return {}
        more: Array = 0.0
        params: Array = 0.0
        seconds: dict[bool, Array] = {False: 0.0, True: 0.0}
        longest: dict[bool, Array] = {False: 0.0, True: 0.0}
        for weight, component in block.owned().values():
            if optimizer is Optimizer.MUON and is_matrix(weight):
                count, products = iteration(weight)
                each = sum(price(op, block, chip, self.recipe, self.backends).seconds for op in products) * ITERATIONS
                seconds[weight.expert] = seconds[weight.expert] + each
                longest[weight.expert] = larger(longest[weight.expert], each / count)
                params = params + (0.0 if weight.expert else weight.elements)
            else:
                more = more + weight.elements * more_state_bytes(optimizer, self.recipe, weight, component)
        moved = 2.0 * more / (chip.hbm_bytes_per_s * chip.hbm_efficiency)  # read and written
        return {
            Base.MORE_STATE_BYTES: more, Base.MATRIX_PARAMS: params, Base.DENSE_UPDATE_S: seconds[False] + moved,
            Base.EXPERT_UPDATE_S: seconds[True], Base.DENSE_LONGEST_S: longest[False],
            Base.EXPERT_LONGEST_S: longest[True],
        }  # fmt: skip

    def _paired(self, phases: dict[Phase, _PhaseSeconds]) -> dict[Base, Array]:
        """Expert traffic beside the passes of another micro-batch: its forward and backward hide behind one of each."""
        forward, backward = phases[Phase.FORWARD], phases[Phase.BACKWARD]
        ahead, back = forward.expert_traffic(), backward.expert_traffic()
        window = forward.compute + backward.compute + phases[Phase.WEIGHT_GRAD].compute
        added = beside(window, ahead + back) / larger(ahead + back, LEAST_S)
        return {
            Base.F_EP1: ahead * added + forward.traffic.get((Group.ETP, False), 0.0),
            Base.B_EP1: back * added + backward.traffic.get((Group.ETP, False), 0.0),
        }

    def again(self, block: Block, priced: dict[str, _Priced], kept_all: Array, transient: Array) -> dict[Again, Array]:
        """Columns of one recompute choice; an op that runs again costs what its first run did."""
        phase = self._phase(block, Phase.RECOMPUTE, priced)
        out: dict[Again, Array] = {Again(i): value for i, value in enumerate(phase.seconds())}
        saved = self.saved_bytes(block)
        out[Again.SAVED_BYTES] = saved
        out[Again.LOGITS_BYTES] = self.saved_bytes(block, of=Role.LOGITS)
        # While one block's backward runs, what recompute brings back is alive beside the widest op's tensors.
        out[Again.LIVE_BYTES] = larger(kept_all - saved, 0.0) + transient
        out[Again.FLOPS] = phase.flops
        out[Again.R_WIRE] = phase.wire()
        for source in ("tile", "measured", "roofline"):
            out[Again[f"{source.upper()}_S"]] = phase.by_source.get(source, 0.0)
        return out

    def _phase(self, block: Block, phase: Phase, priced: dict[str, _Priced]) -> _PhaseSeconds:
        """The ops of one phase; `priced` [op name] collects forward prices and gives them to recompute."""
        chunks, tp = self.strategy.tp_chunks, self.strategy.tp
        alone = isinstance(tp, float | int) and tp == 1  # a row by itself: nothing to cut
        total = _PhaseSeconds(self.strategy, launch_seconds(block, self.system))
        cut = {} if alone else cuts(block.of_phase(phase), chunks)
        for op in block.of_phase(phase):
            if op.kind is OpKind.COLLECTIVE:
                whole = self.traffic_seconds(op)
                total.add_traffic(op, whole)
                if op.group in {Group.TP, Group.CP, Group.EP} and op.collective is not Traffic.COPY:
                    assert op.group is not None
                    total.outer[op.group] = total.outer.get(op.group, 0.0) + self.outermost_seconds(op)
                if op.partners and not alone:
                    num = pieces(op, chunks)
                    total.add_fused(op, self.traffic_seconds(op, num), num)
                    total.add_whole(op, whole)
                continue
            known = priced.get(op.name) if phase is Phase.RECOMPUTE else None
            if known and known.is_part == op.rides:
                p, cut_s = known.price, known.cut_s
            else:
                p = price(op, block, self.system.chip, self.recipe, self.backends)
                cut_s = self.cut_seconds(op, block, p.seconds, cut[op.name]) if op.name in cut else p.seconds
                if phase is Phase.FORWARD:
                    priced[op.name] = _Priced(p, cut_s, op.rides)
            total.add_compute(op, p, p.work.flops / op.load if p.work.matrix else 0.0, cut_s)
        return total

    def cut_seconds(self, op: Op, block: Block, whole: Array, num: int) -> Array:
        """Seconds of a GEMM in `num` pieces of equally many rows."""
        if num == 1:
            return whole
        return num * piece_seconds(op, whole, 1.0 / num, block, self.system.chip, self.recipe, self.backends)

    def traffic_seconds(self, op: Op, num: int = 1) -> Array:
        """Seconds of one collective op in `num` pieces, one after the other."""
        assert op.collective is not None
        assert op.group is not None
        if op.collective is Traffic.COPY:
            return 0.0
        key = (op.collective, op.group, op.fanout, op.max_domains)
        if key not in self.costs:
            size, stride = size_and_stride(op.group, self.strategy)
            self.costs[key] = collective(
                op.collective, self.system, size, stride, fanout=op.fanout, max_domains=op.max_domains
            )
        return self.costs[key].seconds(op.payload, num)

    def outermost_seconds(self, op: Op) -> Array:
        """Seconds for which a collective op moves bytes over the outermost tier."""
        assert op.collective is not None
        assert op.group is not None
        key = (op.collective, op.group, op.fanout, op.max_domains)
        if key not in self.outer:
            size, stride = size_and_stride(op.group, self.strategy)
            load = outermost_load(
                op.collective, self.system, size, stride, fanout=op.fanout, max_domains=op.max_domains
            )
            self.outer[key] = self.costs[key].per_byte * load
        return self.outer[key] * op.payload

    def owed_bytes(self, block: Block) -> Array:
        """Inputs and output gradients of GEMMs, each once: what weight gradients read that run after the backward."""
        total: Array = 0.0
        seen: set[tuple[str, bool]] = set()
        for op in block.of_phase(Phase.WEIGHT_GRAD):
            width = self.recipe.nbytes(op.role)
            # The outputs of a backward op are forward's inputs, its inputs are gradients of forward's outputs.
            for name, is_gradient in ((op.outputs[0], False), *((name, True) for name in op.inputs)):
                if (name, is_gradient) not in seen:
                    seen.add((name, is_gradient))
                    total = total + block.tensors[name].elements * width
        return total

    def tensor_bytes(self, tensor: Tensor, role: Role) -> Array:
        """Bytes of a tensor stored in a role's dtype."""
        return tensor.elements * self.recipe.nbytes(role)

    def saved_bytes(self, block: Block, of: Role | None = None) -> Array:
        """Bytes kept for backward, or those `of` one role."""
        return saved_bytes(block, self.recipe, of)

    def transient_bytes(self, block: Block) -> Array:
        """Widest op of the block: its inputs (whole where a GEMM needs them so) and outputs, or their gradients."""
        widest: Array = 0.0
        width = self.recipe.activation.nbytes
        for op in block.of_phase(Phase.FORWARD):
            if op.kind is OpKind.MATMUL:
                m, k, n = (d.size for d in op.dims)
                out = [block.tensors[name] for name in op.outputs]
                # Partial sums are whole until they are reduced; a split output may come in chunks (fused loss).
                wide = sum((t.elements for t in out), 0.0) if is_tensor_parallel(out[0].dims) else m * n
                now = (m * k + wide) * width
            else:
                now = 0.0
                for name in (*op.inputs, *op.outputs):
                    tensor = block.tensors[name]
                    now = now + tensor.elements * self.recipe.nbytes(tensor.role)
            widest = larger(widest, now)
        return widest

    def buffer_bytes(self, graph: OpGraph) -> Array:
        """Send and receive buffers of the widest expert all-to-all, where there is one."""
        widest: Array = 0.0
        for block in graph.blocks.values():
            for op in block.of_phase(Phase.FORWARD):
                if op.collective is Traffic.ALL_TO_ALL and op.group is Group.EP:
                    widest = larger(widest, 2.0 * op.payload)
        return widest * (self.strategy.ep > 1)


def saved_bytes(block: Block, recipe: PrecisionRecipe, of: Role | None = None) -> Array:
    """Bytes kept for backward, or those `of` one role; a tensor wanted twice in one width is stored once."""
    total: Array = 0.0
    seen: set[tuple[str, float]] = set()
    for (name, role), tensor in block.saved().items():
        width = recipe.nbytes(role)
        if (name, width) not in seen and of in {None, tensor.role}:
            seen.add((name, width))
            total = total + tensor.elements * width
    return total


class _PhaseSeconds:
    """Sums one phase of one block and splits it by what could hide it."""

    def __init__(self, strategy: Strategy, launch_s: float) -> None:
        self.tp, self.cp, self.rings_hide, self.launch_s = strategy.tp, strategy.cp, strategy.overlap.cp, launch_s
        self.compute: Array = 0.0
        self.gemms: dict[str, tuple[Array, Array]] = {}  # their seconds, whole and cut
        self.fused: dict[tuple[str, ...], Traffics] = {}  # of their collectives
        self.uncut: dict[tuple[Side, tuple[str, ...]], Array] = {}  # the same in one piece
        self.attention: Array = 0.0
        self.flops: Array = 0.0
        self.num_launches = 0
        self.in_graph = strategy.cuda_graph is CudaGraph.FULL  # the last kernel was launched by a CUDA graph
        self.traffic: dict[tuple[Group, bool], Array] = {}
        self.outer: dict[Group, Array] = {}  # seconds on the outermost tier
        self.shared: dict[str, tuple[Array, Array]] = {}  # shared experts and the all-to-all that they hide
        self.by_source: dict[str, Array] = {}

    def add_compute(self, op: Op, price: Price, flops: Array, cut_s: Array) -> None:
        seconds = price.seconds
        self.compute = self.compute + seconds
        self.flops = self.flops + flops
        if not op.rides:
            self.num_launches += not (op.captured and self.in_graph)
            self.in_graph = op.captured
        self._add_source(COLUMN_OF[price.confidence], seconds * (1.0 - price.looked))
        self._add_source("measured", seconds * price.looked)
        if op.kind is OpKind.MATMUL and is_tensor_parallel(op.dims):
            self.gemms[op.name] = (seconds, cut_s)
        if op.kind in CORE_KINDS:
            self.attention = self.attention + seconds
        if op.beside:
            window, traffic = self.shared.get(op.beside, (0.0, 0.0))
            self.shared[op.beside] = window + seconds, traffic

    def _add_source(self, source: str, seconds: Array) -> None:
        self.by_source[source] = self.by_source.get(source, 0.0) + seconds

    def add_traffic(self, op: Op, seconds: Array) -> None:
        assert op.group is not None
        key = (op.group, bool(op.beside))
        self.traffic[key] = self.traffic.get(key, 0.0) + seconds
        if op.beside in {IN, OUT}:
            window, traffic = self.shared.get(op.beside, (0.0, 0.0))
            self.shared[op.beside] = window, traffic + seconds

    def add_fused(self, op: Op, seconds: Array, num: int) -> None:
        """Traffic in `num` pieces beside its partners; collectives of the same partners share them."""
        self.fused[op.partners] = self.fused.get(op.partners, Traffics()).plus(op, seconds, num)

    def add_whole(self, op: Op, seconds: Array) -> None:
        """Traffic in one piece, by its partners and its side of them."""
        key = side(op), op.partners
        self.uncut[key] = self.uncut.get(key, 0.0) + seconds

    def hidden_gathers(self) -> Array:
        """What of gathers for weight gradients hides beside the input gradients of their layer."""
        return self._hidden(Side.WHOLE, self.gemms, lambda name: name)

    def hidden_reductions(self, weights: _PhaseSeconds) -> Array:
        """What of reductions of input gradients hides beside the weight gradients of their layer."""
        return self._hidden(Side.BEHIND, weights.gemms, weight_gradient_of)

    def _hidden(self, where: Side, gemms: Mapping[str, tuple[Array, Array]], named: Callable[[str], str]) -> Array:
        total: Array = 0.0
        for (at, names), traffic in self.uncut.items():
            if at is where:
                window = sum((gemms[named(name)][0] for name in names if named(name) in gemms), 0.0)
                total = total + (traffic - beside(window, traffic))
        return total * (self.tp > 1)

    def saved(self, hidden: Array, before: Array = 0.0) -> Array:
        """By how much `hidden` seconds of traffic, behind those `before`, make the phase shorter: to its launches."""
        waits = self.num_launches * self.launch_s - (self.compute + sum(self.traffic.values()) - before)
        return hidden - (larger(waits + hidden, 0.0) - larger(waits, 0.0))

    def fused_seconds(self) -> Array:
        """What overlapped tensor-parallel collectives add to their GEMMs; partners of another phase hide nothing."""
        total: Array = 0.0
        for names, traffics in self.fused.items():
            here = [self.gemms[name] for name in names if name in self.gemms]
            whole, cut = sum((w for w, _ in here), 0.0), sum((c for _, c in here), 0.0)
            total = total + added_seconds(whole, cut, traffics, self.tp) * (self.tp > 1)
        return total

    def expert_traffic(self) -> Array:
        """All-to-all seconds that a pass of another micro-batch can hide."""
        return self.traffic.get((Group.EP, True), 0.0)

    def exposed_ep(self) -> Array:
        """All-to-all seconds that the micro-batch itself does not hide."""
        if not self.shared:
            return self.expert_traffic()
        return sum((beside(window, traffic) for window, traffic in self.shared.values()), 0.0)

    def exposed_cp(self) -> Array:
        """A ring pass hides under the attention of the blocks at hand, all but the first of cp steps, where it may."""
        window = self.attention * (self.cp - 1) / self.cp * self.rings_hide
        ring = larger(self.traffic.get((Group.CP, True), 0.0) - window, 0.0)
        return ring + self.traffic.get((Group.CP, False), 0.0)

    def wire(self) -> Array:
        """Seconds on the outermost tier of traffic that more traffic there would hold up."""
        total = self.outer.get(Group.EP, 0.0) + self.outer.get(Group.TP, 0.0)
        if Group.CP in self.outer:
            all_of_it = self.traffic.get((Group.CP, True), 0.0) + self.traffic.get((Group.CP, False), 0.0)
            total = total + self.outer[Group.CP] * (self.exposed_cp() / larger(all_of_it, LEAST_S))
        return total

    def seconds(self) -> tuple[Array, ...]:
        """Exposed seconds by cause, in the order of Base.F_COMP to F_EP1.

        TP traffic hides under the GEMMs that it is fused with, EP traffic under all that a pass of another micro-batch
        computes: here of the same phase.
        """
        get = self.traffic.get
        tp, ep = get((Group.TP, True), 0.0), self.expert_traffic()
        tp_fixed, ep_fixed = get((Group.TP, False), 0.0), get((Group.ETP, False), 0.0)
        # The device waits for the host where launches take longer than kernels and traffic, which the host runs ahead
        # of; as if no traffic were hidden.
        busy = self.compute + sum(self.traffic.values())
        host = larger(self.num_launches * self.launch_s - busy, 0.0)
        return (
            self.compute,
            host,
            self.exposed_cp(),
            tp + tp_fixed,
            self.fused_seconds() + tp_fixed,
            self.exposed_ep() + ep_fixed,
            beside(self.compute, ep) + ep_fixed,
        )
