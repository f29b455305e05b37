"""Gathers what a composition looks up: distinct price rows, groups and layouts, each priced once.

The sweep calls this for a whole space, `evaluate` for one strategy or a batch; the tables are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from estimator.build import build
from estimator.compose import Constants, Net, Tables
from estimator.cost.collective import (
    nested,
    nested_members,
    point_to_point,
    scalar_all_reduce_latency,
    tier_loads,
)
from estimator.cost.table import PriceTable, price_table
from estimator.cost.work import work
from estimator.graph import OpGraph
from estimator.imbalance import MEDIAN, Routing
from estimator.layout import Layout, layout_of
from estimator.model import ModelSpec
from estimator.op import Op, OpKind, Phase, Traffic
from estimator.optimizers import gathered_bytes, state_bytes
from estimator.passes import lower
from estimator.passes.fuse import for_chip
from estimator.precision import PrecisionRecipe, recipe
from estimator.program import NO_PROGRAM, Program, program
from estimator.segments import joined_nets, joined_prices, spread
from estimator.strategy import (
    CudaGraph,
    LayoutRule,
    Optimizer,
    RankOrder,
    Recompute,
    RecomputeKind,
    Schedule,
    Size,
    Strategy,
)
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["FULL", "NONE", "TableBuilder", "choice_index", "fixed_host_s", "gradient_groups", "group_costs",
           "jitter_share", "model_flops_per_token", "read_only", "replica_group", "twin_groups",
           "twinned_share"]  # fmt: skip

NONE, FULL = Recompute(), Recompute(kind=RecomputeKind.FULL)
Factors = list[tuple[np.ndarray, np.ndarray]]
SHAPING = ("sequence_parallel", "context_parallel", "fusion", "tp_chunks", "cuda_graph", "redundant_experts",
           "optimizer", "shared_expert_overlap")  # fmt: skip
"""Structure fields that decide which ops a row has and what they cost; recompute and precision stand beside them."""
LayoutKey = tuple[Schedule, int, int, tuple[int, ...] | None, tuple[int, ...] | None]
ROW_SIZES = ("tp", "cp", "ep", "etp", "micro_batch")
ROW_FLAGS = ("overlap_cp",)
"""Overlaps that prices of a row depend on; where rows do not tell, the strategy does."""
NET_SIZES = ("tp", "cp", "pp", "ep", "etp", "dp", "copies", "dp_replicate")

SUM_TRAFFIC = 3.0  # of the host's memory, per byte of gradients added up there: it arrives, the sum is read and written
FIXED_HOST_S = 5e-3  # data loader hand-over, loss logging, optimizer launch; assumption
CAPTURED_HOST_S = 2e-3  # what is left of it where a CUDA graph holds the optimizer's launches as well; assumption
JITTER_PER_DOUBLING = 5e-4  # share of a step lost per doubling of the chips to the slowest rank; assumption


@lru_cache(maxsize=256)
def model_flops_per_token(model: ModelSpec, seq: int) -> float:
    """FLOPs of forward and backward of one token, without recompute.

    Three times the forward's GEMMs and the causal half of attention (Narayanan 2021, arXiv:2104.04473, appendix, which
    counts the whole square). MTP is included.
    """
    r = recipe("bf16")
    graph = lower(build(model, seq), Strategy(), r)
    flops = {}
    for kind, block in graph.blocks.items():
        amounts = ((op, work(op, block, r)) for op in block.of_phase(Phase.FORWARD) if op.collective is None)
        flops[kind] = sum(float(a.flops) * _trained_share(op) for op, a in amounts if a.matrix)
    return 3.0 * sum(flops[kind] for kind in graph.sequence) / seq


def _trained_share(op: Op) -> float:
    """Of three times an op's forward, what a step takes: an indexer's scores have no gradient, its GEMMs only one."""
    return 1.0 if not op.detached else 2 / 3 if op.kind is OpKind.MATMUL else 1 / 3


@lru_cache(maxsize=4096)
def _one_row(
    model: ModelSpec, seq: int, system: SystemSpec, shaping: tuple[Any, ...], routing: Routing, precision: str,
    choices: tuple[Recompute, ...], sizes: tuple[float, ...],
) -> PriceTable:  # fmt: skip
    """Prices of one row: what a scalar evaluation needs again and again while pp, ZeRO or overlaps change."""
    named = dict(zip((*ROW_SIZES, *ROW_FLAGS), sizes, strict=True))
    r = recipe(precision)
    graph = _one_lowered(model, seq, shaping, routing, precision, sizes)
    return price_table(graph, _row_strategy(shaping, named), system, r, choices)


@lru_cache(maxsize=512)
def _one_lowered(
    model: ModelSpec, seq: int, shaping: tuple[Any, ...], routing: Routing, precision: str, sizes: tuple[float, ...]
) -> OpGraph:
    """The operations of one row, which are the same on every system."""
    s = _row_strategy(shaping, dict(zip((*ROW_SIZES, *ROW_FLAGS), sizes, strict=True)))
    return lower(build(model, seq), s, recipe(precision), routing)


def _row_strategy(shaping: tuple[Any, ...], sizes: Mapping[str, Size]) -> Strategy:
    return Strategy(**dict(zip(SHAPING, shaping, strict=True))).with_sizes(dict(sizes))


def _on_chip(shaping: tuple[Any, ...], system: SystemSpec) -> tuple[Any, ...]:
    """With the fused kernels that there are for the system's chip."""
    place = SHAPING.index("fusion")
    fusion = for_chip(shaping[place], system.chip.name)
    return shaping if fusion is shaping[place] else (*shaping[:place], fusion, *shaping[place + 1 :])


def _rows(
    graph: OpGraph, system: SystemSpec, shaping: tuple[Any, ...], routing: Routing, r: PrecisionRecipe,
    choices: tuple[Recompute, ...], sizes: Mapping[str, Size],
) -> PriceTable:  # fmt: skip
    """Lower and price rows: SHAPING, and ROW_SIZES and ROW_FLAGS as plain floats, or each [R]. Nothing else counts."""
    s = _row_strategy(shaping, sizes)
    return price_table(lower(graph, s, r, routing), s, system, r, choices)


@lru_cache(maxsize=4096)
def _one_net(
    system: SystemSpec, has_experts: bool, order: RankOrder, sizes: tuple[float, ...], twinned: float
) -> np.ndarray:
    n = {name: np.array([size]) for name, size in zip(NET_SIZES, sizes, strict=True)}
    return group_costs(system, has_experts, order, n, twinned)


def gradient_groups(
    order: RankOrder, n: dict[str, np.ndarray], replicas: np.ndarray | float = 1.0
) -> tuple[Factors, Factors, np.ndarray]:
    """The ranks that share dense gradients and those that share an expert's, as (size, stride) factors.

    Of one replica out of `replicas` (HSDP), which take the neighbouring ranks. Also the distance from a rank to its
    neighbour on the next stage. `n`: NET_SIZES, each [G].
    """
    inner, experts = n["tp"] * n["cp"], n["etp"] * n["ep"]
    if order is RankOrder.TP_CP_DP_PP:
        stage = inner * n["dp"]
        dense = [(n["cp"] * n["dp"] / replicas, n["tp"])]
        expert = [(stage / experts / replicas, experts)]
    else:
        stage = inner
        outer = (n["dp"] / replicas, inner * n["pp"])
        dense = [(n["cp"], n["tp"]), outer]
        expert = [(inner / experts, experts), outer]
    twins = (n["copies"], stage * np.maximum(n["pp"] / 2, 1.0))
    return [*dense, twins], [*expert, twins], stage


def replica_group(order: RankOrder, n: dict[str, np.ndarray]) -> Factors:
    """The ranks that hold the same shard under HSDP, of dense and of experts' weights alike."""
    apart = n["tp"] * n["cp"] * n["dp"] / n["dp_replicate"]
    return [(n["dp_replicate"], apart if order is RankOrder.TP_CP_DP_PP else apart * n["pp"])]


def twinned_share(model: ModelSpec, strategy: Strategy) -> float:
    """Share of the experts that ranks hold of which another rank of their ep group holds a copy: two for each copy."""
    if model.moe is None:
        return 0.0
    return min(2.0 * strategy.redundant_experts / (model.moe.num_experts + strategy.redundant_experts), 1.0)


def group_costs(
    system: SystemSpec, has_experts: bool, order: RankOrder, n: dict[str, np.ndarray], twinned: float = 0.0
) -> np.ndarray:
    """Costs of data-parallel groups and stage hops [G, Net] for NET_SIZES, each [G].

    Ranks run tp, cp, dp, pp from the inside out, or tp, cp, pp, dp; experts fold over tp, cp, dp as etp, ep, edp.
    `copies`: ranks of other stages that hold the same weights (DualPipe: rank p-1-i, half a pipeline away on average);
    they share gradients and states like data-parallel ranks. Under HSDP the `dp_replicate` replicas lie outside the
    ranks over which ZeRO shards: shards are neighbours. `twinned`: share of a rank's experts that have a copy on
    another rank of their ep group, half of it away on average, and share gradients and states with that one as well.
    """
    inner, experts = n["tp"] * n["cp"], n["etp"] * n["ep"]
    dense, expert, stage = gradient_groups(order, n)
    ring = nested(Traffic.REDUCE_SCATTER, system, dense)
    expert_ring = nested(Traffic.REDUCE_SCATTER, system, expert)
    hop = point_to_point(system, stage)
    out = np.empty((len(inner), len(Net)))
    out[:, Net.DP] = n["cp"] * n["dp"] * n["copies"]
    out[:, Net.DP_PER_BYTE], out[:, Net.DP_LATENCY] = ring.per_byte, ring.latency_s
    out[:, Net.EDP] = inner * n["dp"] / experts * n["copies"]
    out[:, Net.EDP_PER_BYTE], out[:, Net.EDP_LATENCY] = expert_ring.per_byte, expert_ring.latency_s
    out[:, Net.HOP_PER_BYTE], out[:, Net.HOP_LATENCY] = hop.per_byte, hop.latency_s
    _fill_shards(out, system, order, n, (dense, expert))
    if not has_experts:
        for column in (Net.EDP_LATENCY, Net.ESHARD_LATENCY, Net.EREPLICA_LATENCY):
            out[:, column] = 0.0
    elif twinned:
        _fill_twins(out, system, order, n, twinned * (n["ep"] > 1))
    return out


def _fill_shards(
    out: np.ndarray, system: SystemSpec, order: RankOrder, n: dict[str, np.ndarray], whole: tuple[Factors, Factors]
) -> None:
    """Columns of the ranks over which ZeRO shards, and of the replicas of these."""
    replicas = n["dp_replicate"]
    apart = bool((replicas > 1).any())
    groups = gradient_groups(order, n, replicas)[:2] if apart else whole
    across = nested(Traffic.REDUCE_SCATTER, system, replica_group(order, n)) if apart else None
    bound = _bounding_tier(system, replica_group(order, n))
    for group, all_of_them, first, last, shared in zip(
        groups, (Net.DP, Net.EDP), (Net.SHARDS, Net.ESHARDS), (Net.REPLICA_PER_BYTE, Net.EREPLICA_PER_BYTE),
        (Net.SHARD_SHARED, Net.ESHARD_SHARED), strict=True,
    ):  # fmt: skip
        shards = out[:, all_of_them] / replicas
        out[:, first] = shards
        if apart:
            ring = nested(Traffic.REDUCE_SCATTER, system, group)
            out[:, first + 1], out[:, first + 2] = ring.per_byte, ring.latency_s
        else:
            out[:, first + 1 : first + 3] = out[:, all_of_them + 1 : all_of_them + 3]
        loads = tier_loads(Traffic.REDUCE_SCATTER, system, nested_members(system, group))
        out[:, first + 3] = loads[..., -1]
        out[:, shared] = np.take_along_axis(loads, bound, axis=-1)[..., 0] if across else 0.0
        # An all-reduce is two reduce-scatters' worth; each rank's part of the gradients is what its shard holds.
        out[:, last] = 2.0 * across.per_byte / shards if across else 0.0
        out[:, last + 1] = 2.0 * across.latency_s if across else 0.0


def _bounding_tier(system: SystemSpec, group: Factors) -> np.ndarray:
    """The tier whose link a group's traffic fills most [G, 1]."""
    loads = tier_loads(Traffic.REDUCE_SCATTER, system, nested_members(system, group))
    return np.asarray(np.argmax(loads, axis=-1))[..., None]


def _fill_twins(
    out: np.ndarray, system: SystemSpec, order: RankOrder, n: dict[str, np.ndarray], share: np.ndarray
) -> None:
    """Columns of experts' groups where a `share` of a rank's experts have a copy in their ep group."""
    for replicas, first in ((1.0, Net.EDP), (n["dp_replicate"], Net.ESHARDS)):
        group = twin_groups(order, n, replicas)
        both = nested(Traffic.REDUCE_SCATTER, system, group)
        out[:, first + 1] += share * (both.per_byte - out[:, first + 1])
        out[:, first + 2] += np.where(share > 0, both.latency_s, 0.0)
    loads = tier_loads(Traffic.REDUCE_SCATTER, system, nested_members(system, group))
    shared = np.take_along_axis(loads, _bounding_tier(system, replica_group(order, n)), axis=-1)[..., 0]
    out[:, Net.ESHARD_OUTER] += share * (loads[..., -1] - out[:, Net.ESHARD_OUTER])
    out[:, Net.ESHARD_SHARED] += share * (shared - out[:, Net.ESHARD_SHARED])


def twin_groups(order: RankOrder, n: dict[str, np.ndarray], replicas: np.ndarray | float = 1.0) -> Factors:
    """The ranks that share gradients of an expert that two ranks of each ep group hold."""
    pair = (np.where(n["ep"] > 1, 2.0, 1.0), np.maximum(n["etp"] * n["ep"] / 2, 1.0))
    return [pair, *gradient_groups(order, n, replicas)[1]]


@lru_cache(maxsize=256)
def constants_of(
    system: SystemSpec, r: PrecisionRecipe, expert_bucket: int | None = None, scope: CudaGraph = CudaGraph.NONE,
    optimizer: Optimizer = Optimizer.ADAM,
) -> Constants:  # fmt: skip
    """Numbers of a system, a recipe and an optimizer; all floats, for a composition is compiled per tuple of types."""
    chip, states = system.chip, state_bytes(optimizer, r)
    traffic = r.grad_bytes + 2 * states + r.updated_bytes
    link, memory = (1.0 / rate if rate else 0.0 for rate in (chip.host_bytes_per_s, chip.host_memory_bytes_per_s))
    return Constants(
        grad_bytes=float(r.grad_bytes), state_bytes=float(states), matrix_bytes=gathered_bytes(optimizer),
        gather_bytes=float(min(r.linear_weight_bytes, r.activation.nbytes)),
        update_s_per_param=traffic / min(p.chip.hbm_bytes_per_s * p.chip.hbm_efficiency for p in system.parts),
        capacity_bytes=float(system.usable_hbm_bytes), context_bytes=float(chip.context_bytes),
        norm_latency_s=scalar_all_reduce_latency(system), fixed_host_s=fixed_host_s(scope),
        jitter=jitter_share(system),
        expert_bucket=-1.0 if expert_bucket is None else float(expert_bucket),
        host_s_per_byte=link, host_sum_s_per_byte=max(link, SUM_TRAFFIC * memory),
        host_update_s_per_param=traffic * memory, host_capacity_bytes=float(chip.host_memory_bytes),
    )  # fmt: skip


def fixed_host_s(scope: CudaGraph) -> float:
    """Host work of a step that nothing hides."""
    return CAPTURED_HOST_S if scope is CudaGraph.FULL else FIXED_HOST_S


def jitter_share(system: SystemSpec) -> float:
    """Share of a step that waiting for the slowest of all chips adds."""
    return JITTER_PER_DOUBLING * math.log2(system.num_chips)


def choice_index(choices: tuple[Recompute, ...], choice: Recompute) -> int:
    """Index on the recompute axis of the price table; block recompute shares the column of full."""
    return choices.index(FULL if choice.kind is RecomputeKind.BLOCK else choice)


def read_only(tables: Tables) -> Tables:
    """The tables, never to be written again: they are shared, and jitted code is compiled for read-only arrays once."""
    for array in tables[:-1]:
        array.setflags(write=False)
    return tables


def _packed(programs: list[Program]) -> dict[str, np.ndarray]:
    """Arrays of programs one above the other, and where each begins."""
    parts = ("steps", "sums", "around", "between", "told")
    sizes = np.array([[len(getattr(made, part)) for part in parts] for made in programs], dtype=np.int64)
    starts = np.cumsum(sizes, axis=0) - sizes
    plain = np.array([[m.rows, m.num_costs, m.walked, m.turn] for m in programs], dtype=np.int64)
    slots = max(made.told.shape[2] for made in programs)
    told = [np.pad(m.told, ((0, 0), (0, 0), (0, slots - m.told.shape[2]))) for m in programs]
    joined = {part: _joined([getattr(made, part) for made in programs]) for part in parts[:-1]}
    where = np.stack([starts, sizes], axis=2).reshape(len(programs), -1)
    return {**joined, "told": _joined(told), "programs": _joined([np.concatenate([where, plain], axis=1)])}


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """One above the other, by rows: another memory order would compile the composition once more."""
    return np.ascontiguousarray(np.concatenate(parts))


@dataclass(slots=True)
class TableBuilder:
    """Collects layouts as they are asked for, and prices rows and groups in bulk."""

    model: ModelSpec
    system: SystemSpec
    workload: Workload
    strategy: Strategy  # its structure fields hold for every row
    choices: tuple[Recompute, ...] = (NONE, FULL)
    has_blocks: bool = True  # block recompute mixes none and full, which then come first
    quantile: float = MEDIAN  # of routing skew
    graph: OpGraph = field(init=False)
    recipe: PrecisionRecipe = field(init=False)
    _layouts: dict[LayoutKey, int] = field(default_factory=dict, init=False)
    _made: list[Layout] = field(default_factory=list, init=False)
    _programs: list[Program] = field(default_factory=lambda: [NO_PROGRAM], init=False)
    _places: dict[int, int] = field(default_factory=lambda: {id(NO_PROGRAM): 0}, init=False)  # of programs

    def __post_init__(self) -> None:
        self.graph = build(self.model, self.workload.seq)
        self.recipe = recipe(self.strategy.precision)
        if self.has_blocks:
            self.choices = (NONE, FULL, *(c for c in self.choices if c not in {NONE, FULL}))

    def layout(self, schedule: Schedule, pp: int, vpp: int, layers: tuple[int, ...] | None = None) -> int:
        """Index of a layout, made on first use; `layers` where the strategy's layout is a rule that gave them."""
        chosen = layers if isinstance(self.strategy.layout, LayoutRule) else self.strategy.layout
        again = self.strategy.recompute_per_chunk
        key = (schedule, pp, vpp, chosen, again)
        if key not in self._layouts:
            self._layouts[key] = len(self._made)
            made = layout_of(self.model, self.graph.kinds, schedule, pp, vpp, chosen, again)
            self._made.append(spread(made, self.system))
        return self._layouts[key]

    def program(self, schedule: Schedule, pp: int, vpp: int, m: int) -> int:
        """Index of the program of an order, made on first use; 0 where the schedule has a closed form."""
        made = program(schedule, pp, vpp, m, self.strategy.interleave_group)
        if id(made) not in self._places:
            self._places[id(made)] = len(self._programs)
            self._programs.append(made)
        return self._places[id(made)]

    def depth(self, layout: int) -> int:
        """Layers of the deepest chunk of a layout."""
        return self._made[layout].first.shape[1] - 1

    def tables(self, rows: dict[str, np.ndarray], nets: dict[str, np.ndarray]) -> Tables:
        """Price `rows` (ROW_SIZES, each [R]) and `nets` (NET_SIZES, each [G]); pack the layouts seen so far."""
        return self.pack(self.prices(rows), self.nets(nets), self.constants)

    def beside(self, strategy: Strategy) -> TableBuilder:
        """A builder for another layout rule of the same model, whose layouts stand in the same tables."""
        other = replace(self, strategy=strategy)
        other._layouts, other._made = self._layouts, self._made
        other._programs, other._places = self._programs, self._places
        return other

    def pack(self, prices: PriceTable, nets: np.ndarray, constants: Constants) -> Tables:
        """Tables of some prices and groups, with the layouts seen so far."""
        kinds, slots = prices.base.shape[1], max(lay.chunks_of.shape[1] for lay in self._made)
        sums = np.zeros(5, dtype=np.int64)  # classes, rows of `first`, ranks, chunks, leads so far
        where = []
        for lay in self._made:
            depth, (p, used) = lay.first.shape[1], lay.chunks_of.shape
            sizes = (len(lay.classes), len(lay.classes) * depth, p, len(lay.class_of), len(lay.leads))
            where.append((*(int(n) for pair in zip(sums, sizes, strict=True) for n in pair), used))
            sums += sizes
        ranks = [
            np.pad(lay.chunks_of, ((0, 0), (0, slots - lay.chunks_of.shape[1])), mode="edge") for lay in self._made
        ]
        made = Tables(
            base=prices.base, again=prices.again, hop_bytes=prices.hop_bytes, buffer_bytes=prices.buffer_bytes,
            nets=nets, counts=_joined([lay.counts[lay.classes] for lay in self._made]),
            first=_joined([lay.first[lay.classes].reshape(-1, kinds) for lay in self._made]),
            held=_joined([lay.held for lay in self._made]),
            chunks=_joined(ranks).astype(np.int64),
            slots=_joined([lay.class_of[r] for lay, r in zip(self._made, ranks, strict=True)]),
            class_of=np.concatenate([lay.class_of for lay in self._made]),
            leads=np.concatenate([lay.leads for lay in self._made]),
            layouts=np.array(where, dtype=np.int64), **_packed(self._programs), constants=constants,
        )  # fmt: skip
        return read_only(made)

    @property
    def constants(self) -> Constants:
        """Numbers of the system and the recipe."""
        buckets = self.strategy.expert_bucket_bytes if self.model.moe else None
        return constants_of(self.system, self.recipe, buckets, self.strategy.cuda_graph, self.strategy.optimizer)

    def prices(self, rows: dict[str, np.ndarray]) -> PriceTable:
        """Prices of ROW_SIZES, and of ROW_FLAGS where rows differ in them, each [R]."""
        s = self.strategy
        sizes = {name: rows[name] for name in ROW_SIZES}
        sizes |= {name: rows[name] if name in rows else np.atleast_1d(s.sizes()[name]) for name in ROW_FLAGS}
        shaping = tuple(getattr(s, name) for name in SHAPING)
        routing, parts = Routing.of(self.model, self.workload, self.quantile), self.system.parts
        if len(rows["tp"]) == 1:
            one = tuple(float(values[0]) for values in sizes.values())
            of = self.model, self.workload.seq
            made = [
                _one_row(*of, part, _on_chip(shaping, part), routing, s.precision, self.choices, one) for part in parts
            ]
        else:
            made = [
                _rows(self.graph, part, _on_chip(shaping, part), routing, self.recipe, self.choices, sizes)
                for part in parts
            ]
        return joined_prices(self.system, made)

    def nets(self, nets: dict[str, np.ndarray]) -> np.ndarray:
        """Costs of the groups of NET_SIZES, each [G]: [G, Net]."""
        has_experts = self.model.moe is not None
        order, twinned = self.strategy.rank_order, twinned_share(self.model, self.strategy)
        parts = self.system.parts
        if len(nets["dp"]) == 1:
            sizes = tuple(float(nets[name][0]) for name in NET_SIZES)
            made = [_one_net(part, has_experts, order, sizes, twinned) for part in parts]
        else:
            made = [group_costs(part, has_experts, order, nets, twinned) for part in parts]
        return joined_nets(self.system, made, nets)
