"""Layout `auto`: layers per chunk of one configuration, balanced on its own seconds under its own memory limit.

`configured_layouts` asks for everything that evaluate counts: recompute, overlaps, ZeRO traffic, blocking sends, the
bytes of every rank. `Pipeline` knows the seconds of each block kind alone: what a sweep takes, which holds the result
against memory itself. Which one is used decides `Strategy.layout` no further: both give layers per chunk.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache

import numpy as np

from estimator.balance import MARGIN, Shape, balance, fastest, prefix_of, shape_of
from estimator.balance_costs import FIRST, INNER, LAST, chunk_costs, linear_costs
from estimator.balance_walk import Room
from estimator.batch import fixed_bytes
from estimator.compose import Constants, Net
from estimator.cost.table import Base
from estimator.graph import BlockKind
from estimator.keep import Keep, keep_of
from estimator.layout import even_layers, layout_of
from estimator.memory import RESERVED_FACTOR, WORKSPACE_BYTES, second_set
from estimator.model import ModelSpec
from estimator.program import Program, program
from estimator.rules import Case
from estimator.schedule import placement
from estimator.segments import joined_costs, segment_of_chunks
from estimator.span import in_flight_peak, owed_peak
from estimator.span_codes import CODES, holds_pairs
from estimator.strategy import Offload, RecomputeKind, Schedule, Strategy
from estimator.tables import NET_SIZES, ROW_SIZES, TableBuilder, choice_index
from estimator.workload import Workload
from hardware.system import SystemSpec

__all__ = ["Pipeline", "configured_layouts", "pipeline_of"]

MAX_KNOWN = 1 << 18  # layouts that a pipeline remembers


class Pipeline:
    """The chunks of one model under one schedule: gives layers per chunk where the busiest rank has least seconds."""

    def __init__(
        self, model: ModelSpec, kinds: tuple[BlockKind, ...], schedule: Schedule, pp: int, vpp: int,
        segments: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        self.num_chunks = pp * vpp
        self.segment = np.array(segments, dtype=np.int64) if segments else np.zeros(self.num_chunks, dtype=np.int64)
        self.kinds, self.ends = _kinds_of_layers(model, kinds), _ends(model, kinds)[0]
        self.chunks, self.prefix = placement(schedule, pp, vpp), prefix_of(self.kinds.tolist())
        self.bounds = np.cumsum((0, *even_layers(model.num_layers, self.num_chunks)))
        self._known: dict[tuple[float, ...], tuple[int, ...]] = {}

    def layers(self, seconds: tuple[float, ...]) -> tuple[int, ...]:
        """The layout [C] for these seconds of one micro-batch on each block kind (of each segment, one by one)."""
        if seconds not in self._known:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            self._known[seconds] = self._balanced(np.array(seconds))
        return self._known[seconds]

    def _balanced(self, of_kind: np.ndarray) -> tuple[int, ...]:
        of_kinds = of_kind.reshape(int(self.segment[-1]) + 1, -1)
        first = float(self.ends[0] @ of_kinds[self.segment[0]])
        last = float(self.ends[1] @ of_kinds[self.segment[-1]])
        of_layers = [seconds[self.kinds] for seconds in of_kinds]
        each = np.array([np.diff(np.append(0.0, np.cumsum(of_layer))[self.bounds]) for of_layer in of_layers])
        even = each[self.segment, np.arange(self.num_chunks)]
        even[0], even[-1] = even[0] + first, even[-1] + last
        cut = float(even[self.chunks].sum(axis=1).max()) * (1.0 + MARGIN)
        costs = joined_costs(
            [linear_costs(of_layer, first, last, self.num_chunks, cut) for of_layer in of_layers], self.segment
        )
        return fastest(costs, self.chunks, self.prefix, cut)


@lru_cache(maxsize=1024)
def pipeline_of(
    model: ModelSpec, kinds: tuple[BlockKind, ...], schedule: Schedule, pp: int, vpp: int,
    segments: tuple[int, ...] = (),
) -> Pipeline:  # fmt: skip
    """The pipeline, made once: schedules that place chunks alike may share one. `segments`: of ranks, if several."""
    return Pipeline(model, kinds, schedule, pp, vpp, segments)


def configured_layouts(
    model: ModelSpec, strategy: Strategy, system: SystemSpec, workload: Workload
) -> tuple[tuple[int, ...], ...]:
    """Layers per chunk of one legal strategy with scalar sizes, in place of what its layout says.

    First the one whose busiest rank has least to do of all that fit (where none does, of those that come closest), with
    chunks most alike. Then others for an estimate to choose from, as busy or nearly so: the one that takes least memory
    and, where one rank holds both ends, every split of its layers between them.
    """
    sizes = {name: float(values[0]) for name, values in Case.of(model, strategy, system, workload).sizes.items()}
    pp, vpp, m = (int(sizes[name]) for name in ("pp", "vpp", "num_micro_batches"))
    has_blocks = strategy.recompute.kind is RecomputeKind.BLOCK
    builder = TableBuilder(model, system, workload, strategy, (strategy.recompute,), has_blocks)
    prices = builder.prices({name: np.array([sizes[name]]) for name in ROW_SIZES})
    net = builder.nets({name: np.array([sizes[name]]) for name in NET_SIZES})[0]
    constants, code, kinds = builder.constants, CODES[strategy.schedule], builder.graph.kinds
    on_chips = [
        (_read_only(base), _read_only(again))
        for base, again in zip(
            np.split(prices.base[0], len(system.parts)),
            np.split(prices.again[0], len(system.parts), axis=1),
            strict=True,
        )
    ]
    base = on_chips[0][0]
    alone = net[Net.DP] == 1.0 and net[Net.EDP] == 1.0  # nothing to share, as in compose_rows
    zero, overlap_dp = (0, 0) if alone else (int(sizes["zero_stage"]), int(sizes["overlap_dp"]))
    overlap_ep = int(sizes["overlap_ep"]) * int(sizes["ep"] > 1)
    shares = (float(sizes[f"offload_{f.name}"]) for f in fields(Offload))
    asked = Keep(zero, int(sizes["reshard_after_forward"]), sizes["prefetch_blocks"], *shares)
    keep: Keep = keep_of(asked, zero, overlap_dp)
    flags = np.array([int(sizes["overlap_tp"]), overlap_ep, int(sizes["overlap_pp"]), overlap_dp])
    layers, (ends, held_ends) = _kinds_of_layers(model, kinds), _ends(model, kinds)
    slot = np.full(pp * vpp, INNER)
    slot[0], slot[-1] = FIRST, LAST
    depths = np.full(3, int(sizes["recompute_layers"]) if has_blocks else 0)
    chunks = placement(strategy.schedule, pp, vpp)
    costs = joined_costs([chunk_costs(
        layers, slot, depths, ends, held_ends, mine, again, flags, choice_index(builder.choices, strategy.recompute),
        code, keep, float(prices.hop_bytes[0]) * net[Net.HOP_PER_BYTE] + net[Net.HOP_LATENCY],
        _read_only(net), constants,
    ) for mine, again in on_chips], segment_of_chunks(system, chunks))  # fmt: skip
    made = program(strategy.schedule, pp, vpp, m, strategy.interleave_group)
    flying = _flying(code, chunks, made, vpp, m, overlap_ep)
    bucketed = overlap_dp == 1 and zero < 3  # as in staging_bytes
    room = Room(
        limit=(constants.capacity_bytes - constants.context_bytes) / RESERVED_FACTOR * (1.0 - MARGIN),
        fixed=fixed_bytes(float(prices.buffer_bytes[0]), float(prices.hop_bytes[0]), pp) + WORKSPACE_BYTES,
        bucket=float(sizes["bucket_bytes"]),
        staged=int(bucketed),
        constants=constants,
        shared=_shared(model, kinds, base, keep, float(net[Net.SHARDS]), constants),
        flying=flying[0].copy(),
        late=flying[1:].copy(),
    )
    found = [balance(costs, chunks, room, prefix_of(layers), thrifty=thrifty).layers for thrifty in (False, True)]
    if shape_of(chunks, 0) is Shape.PAIRS:
        first, *middle, last = found[0]
        found += [(num, *middle, first + last - num) for num in range(first + last + 1)]
    return tuple(dict.fromkeys(found))


def _kinds_of_layers(model: ModelSpec, kinds: tuple[BlockKind, ...]) -> np.ndarray:
    """Index of the block kind of each transformer layer [L]."""
    return np.array([kinds.index(BlockKind.of(layer)) for layer in model.layer_specs], dtype=np.int64)


@lru_cache(maxsize=256)
def _ends(model: ModelSpec, kinds: tuple[BlockKind, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Blocks that the first and the last of several chunks run, and hold, beside their layers: [2, K] each."""
    lay = layout_of(model, kinds, Schedule.ONE_F_ONE_B, 2, 1, (model.num_layers, 0))
    ends, held = lay.counts.copy(), lay.held.copy()
    for both in (ends, held):
        both[0] -= lay.first[0, -1]
    return ends, held


def _shared(
    model: ModelSpec, kinds: tuple[BlockKind, ...], base: np.ndarray, keep: Keep, shards: float, c: Constants
) -> np.ndarray:
    """The table that a rank with both ends holds once where each end alone would hold it: bytes kept, parameters."""
    if not (model.tied_embeddings or model.num_mtp_layers):
        return np.zeros(2)
    x = base[kinds.index(BlockKind.EMBEDDING)]
    stages = zip((1, 2, 3), (keep.states, keep.gradients, keep.parameters), strict=True)
    states, grads, weights = ((1.0 - share) / (shards if keep.zero >= stage else 1.0) for stage, share in stages)
    params = float(x[Base.DENSE_PARAMS])
    kept = float(x[Base.DENSE_WEIGHT_BYTES]) * weights + params * (c.grad_bytes * grads + c.state_bytes * states)
    return np.array([kept + float(x[Base.MORE_STATE_BYTES]) * states, params])


def _flying(code: int, chunks: np.ndarray, made: Program, vpp: int, m: int, overlap_ep: int) -> np.ndarray:
    """Micro-batches on each chunk [3, C]: in flight when its rank holds most; then `late` of memory.moving_bytes.

    Of DualPipe's two ranks both say the same.
    """
    pp, told = len(chunks), np.zeros((3, *chunks.shape))
    in_flight_peak(code, pp, vpp, m, made, told[0])
    owed_peak(code, pp, m, made, told[1:])
    second_set(holds_pairs(code), overlap_ep, told[0])
    out = np.zeros((3, pp * vpp))
    for row, mine in zip(out, told, strict=True):
        np.maximum.at(row, chunks, mine)
    return out


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that jitted code is compiled for once: shared prices are read-only in a sweep."""
    view = np.ascontiguousarray(array)
    view.setflags(write=False)
    return view
