"""Gathers what a composition looks up: distinct price rows, groups and layouts, each priced once.

The sweep calls this for a whole space, `evaluate` for one strategy or a batch; the tables are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from estimator.build import build
from estimator.compose import Constants, Net, Tables
from estimator.cost.collective import collective, point_to_point, scalar_all_reduce_latency
from estimator.cost.table import price_table
from estimator.cost.work import work
from estimator.graph import OpGraph
from estimator.layout import layout_of
from estimator.model import ModelSpec
from estimator.op import Traffic, Phase
from estimator.passes import lower
from estimator.precision import PrecisionRecipe, recipe
from estimator.strategy import Recompute, RecomputeKind, Schedule, Strategy
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["FULL", "NONE", "TableBuilder", "choice_index", "model_flops_per_token"]

NONE, FULL = Recompute(), Recompute(kind=RecomputeKind.FULL)
ROW_SIZES = ("tp", "cp", "ep", "etp", "micro_batch")
NET_SIZES = ("tp", "cp", "pp", "ep", "etp")

UPDATE_BYTES_EXTRA = 2.0  # the bf16 weight that the update writes, beside reading the gradient and both ways the states
FIXED_HOST_S = 5e-3  # data loader hand-over, loss logging, optimizer launch; assumption
JITTER_PER_DOUBLING = 5e-4  # share of a step lost per doubling of the chips to the slowest rank; assumption


def model_flops_per_token(model: ModelSpec, seq: int) -> float:
    """FLOPs of forward and backward of one token without recompute: three times the forward's GEMMs and the causal half
    of attention (Narayanan 2021, arXiv:2104.04473, appendix, which counts the whole square). MTP included."""
    graph = lower(build(model, seq), Strategy(), recipe("bf16"))
    r = recipe("bf16")
    total = 0.0
    for kind in graph.sequence:
        block = graph.blocks[kind]
        amounts = (work(op, block, r) for op in block.of_phase(Phase.FORWARD) if op.collective is None)
        total += sum(float(a.flops) for a in amounts if a.matrix)
    return 3.0 * total / seq


def choice_index(choices: tuple[Recompute, ...], choice: Recompute) -> int:
    """Index on the recompute axis of the price table; block recompute shares the column of full."""
    return choices.index(FULL if choice.kind is RecomputeKind.BLOCK else choice)


@dataclass(slots=True)
class TableBuilder:
    """Collects layouts as they are asked for, and prices rows and groups in bulk."""

    model: ModelSpec
    system: SystemSpec
    workload: Workload
    strategy: Strategy  # its structure fields hold for every row
    choices: tuple[Recompute, ...] = (NONE, FULL)
    graph: OpGraph = field(init=False)
    recipe: PrecisionRecipe = field(init=False)
    _layouts: dict[tuple[Schedule, int, int], int] = field(default_factory=dict, init=False)
    _parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.graph = build(self.model, self.workload.seq)
        self.recipe = recipe(self.strategy.precision)
        extra = tuple(c for c in self.choices if c not in {NONE, FULL})
        self.choices = (NONE, FULL, *extra)

    def layout(self, schedule: Schedule, pp: int, vpp: int) -> int:
        """Index of a layout, made on first use."""
        key = (schedule, pp, vpp)
        if key not in self._layouts:
            made = layout_of(self.model, self.graph.kinds, schedule, pp, vpp, self.strategy.layout)
            kinds = made.counts.shape[1]
            self._layouts[key] = len(self._parts)
            self._parts.append((made.counts, made.first.reshape(-1, kinds), made.held, made.chunks_of))
        return self._layouts[key]

    def tables(self, rows: dict[str, np.ndarray], nets: dict[str, np.ndarray]) -> Tables:
        """Price `rows` (ROW_SIZES, each [R]) and `nets` (NET_SIZES and dp, each [G]); pack the layouts seen so far."""
        strategy = self.strategy.with_sizes(rows)
        lowered = lower(self.graph, strategy, self.recipe)
        prices = price_table(lowered, strategy, self.system, self.recipe, self.choices)
        slots = max(part[3].shape[1] for part in self._parts)
        counts, first, held, chunks, where = [], [], [], [], []
        offset = [0, 0, 0]
        for c, f, h, s in self._parts:
            where.append((offset[0], len(c), offset[1], len(f), offset[2], s.shape[1]))
            offset = [offset[0] + len(c), offset[1] + len(f), offset[2] + len(h)]
            counts.append(c)
            first.append(f)
            held.append(h)
            chunks.append(np.pad(s, ((0, 0), (0, slots - s.shape[1])), constant_values=-1))
        return Tables(
            base=prices.base, again=prices.again, hop_bytes=prices.hop_bytes, buffer_bytes=prices.buffer_bytes,
            nets=self._nets(nets), counts=np.concatenate(counts), first=np.concatenate(first),
            held=np.concatenate(held), chunks=np.concatenate(chunks).astype(np.int64),
            layouts=np.array(where, dtype=np.int64), constants=self._constants(),
        )  # fmt: skip

    def _nets(self, n: dict[str, np.ndarray]) -> np.ndarray:
        """Group costs [G, Net]. Rank order tp, cp, dp, pp; etp, ep, edp fold over the same ranks."""
        dense = n["dp"] * n["cp"]
        expert = n["tp"] * n["cp"] * n["dp"] / (n["etp"] * n["ep"])
        ring = collective(Traffic.REDUCE_SCATTER, self.system, dense, n["tp"])
        expert_ring = collective(Traffic.REDUCE_SCATTER, self.system, expert, n["etp"] * n["ep"])
        hop = point_to_point(self.system, n["tp"] * n["cp"] * n["dp"])
        out = np.empty((len(dense), len(Net)))
        out[:, Net.DP], out[:, Net.DP_PER_BYTE], out[:, Net.DP_LATENCY] = dense, ring.per_byte, ring.latency_s
        out[:, Net.EDP] = expert
        out[:, Net.EDP_PER_BYTE], out[:, Net.EDP_LATENCY] = expert_ring.per_byte, expert_ring.latency_s
        out[:, Net.HOP_PER_BYTE], out[:, Net.HOP_LATENCY] = hop.per_byte, hop.latency_s
        if not self.model.moe:
            out[:, Net.EDP_LATENCY] = 0.0
        return out

    def _constants(self) -> Constants:
        chip, r = self.system.chip, self.recipe
        traffic = r.grad_bytes + 2 * r.state_bytes + UPDATE_BYTES_EXTRA
        return Constants(
            grad_bytes=r.grad_bytes, state_bytes=r.state_bytes, gather_bytes=min(r.linear_weight_bytes, 2.0),
            update_s_per_param=traffic / (chip.hbm_bytes_per_s * chip.hbm_efficiency),
            capacity_bytes=self.system.usable_hbm_bytes, context_bytes=chip.context_bytes,
            norm_latency_s=scalar_all_reduce_latency(self.system), fixed_host_s=FIXED_HOST_S,
            jitter=JITTER_PER_DOUBLING * math.log2(self.system.num_chips),
        )  # fmt: skip
