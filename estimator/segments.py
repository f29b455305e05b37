"""A pipeline over chips of several kinds: whose rank is whose, and tables that price each block on each kind.

Block kinds become pairs of segment and kind: K columns a segment, so that everything that sums over a chunk's blocks
(compose.py, memory.py) prices a chunk on the chips it sits on. Of one segment, all of it is what it was.
Exact: seconds of blocks, bytes and capacity of every rank. Simplified, and told with every result: hardware/mixed.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from estimator.balance_costs import FIRST, INNER, LAST, ChunkCosts
from estimator.compose import Net
from estimator.cost.collective import point_to_point
from estimator.cost.table import Again, PriceTable
from estimator.layout import Layout, alike
from estimator.memory import RESERVED_FACTOR
from hardware.system import SystemSpec

__all__ = ["joined_costs", "joined_nets", "joined_prices", "missing_bytes", "segment_of_chunks", "segment_of_ranks",
           "spread"]  # fmt: skip


@lru_cache(maxsize=1024)
def segment_of_ranks(system: SystemSpec, pp: int) -> tuple[int, ...]:
    """The segment of each of pp pipeline ranks, in proportion to chips; pp must divide so (rules.py)."""
    shares = [part.num_chips * pp // system.num_chips for part in system.parts]
    return tuple(int(s) for s in np.repeat(np.arange(len(shares)), shares))


def segment_of_chunks(system: SystemSpec, chunks_of: np.ndarray) -> np.ndarray:
    """The segment of each chunk [C] of a placement [p, local] that runs every chunk on one rank."""
    of_rank = segment_of_ranks(system, len(chunks_of))
    out = np.zeros(int(chunks_of.max()) + 1, dtype=np.int64)
    for rank, chunks in enumerate(chunks_of):
        out[chunks] = of_rank[rank]
    return out


def missing_bytes(system: SystemSpec) -> list[float]:
    """What the chips of each segment leave less to the allocator than those that memory is counted against."""
    room = [(p.usable_hbm_bytes - p.chip.context_bytes) / RESERVED_FACTOR for p in (system, *system.parts)]
    return [room[0] - mine for mine in room[1:]]


def joined_prices(system: SystemSpec, tables: Sequence[PriceTable]) -> PriceTable:
    """Prices of each segment beside each other along the axis of kinds.

    What a chip lacks in memory is part of the working set of each of its blocks: a rank has one, the widest.
    """
    if len(tables) == 1:
        return tables[0]
    again = [table.again.copy() for table in tables]
    for mine, lacking in zip(again, missing_bytes(system), strict=True):
        mine[..., Again.LIVE_BYTES] += lacking
    return replace(
        tables[0], kinds=tables[0].kinds * len(tables), base=np.concatenate([t.base for t in tables], axis=1),
        again=np.concatenate(again, axis=2),
    )  # fmt: skip


def joined_nets(system: SystemSpec, nets: Sequence[np.ndarray], n: dict[str, np.ndarray]) -> np.ndarray:
    """Costs of groups and hops [G, Net]: on every column the largest of all segments.

    Hops: of segments that have two neighbouring ranks, and of the link between segments.
    """
    if len(nets) == 1:
        return nets[0]
    hops = np.array([Net.HOP_PER_BYTE, Net.HOP_LATENCY], dtype=np.int64)
    between = point_to_point(system, np.ones_like(n["pp"]))
    joined = np.stack(nets)
    for segment, part in enumerate(system.parts):
        alone = n["pp"] * part.num_chips // system.num_chips < 2
        joined[segment][np.ix_(np.flatnonzero(alone), hops)] = 0.0
    out: np.ndarray = joined.max(axis=0)
    out[:, hops[0]] = np.maximum(out[:, hops[0]], between.per_byte)
    out[:, hops[1]] = np.maximum(out[:, hops[1]], between.latency_s)
    return np.ascontiguousarray(out)


def spread(layout: Layout, system: SystemSpec) -> Layout:
    """The layout with K columns a segment; a chunk's and a rank's blocks are in those of their segment."""
    num, kinds = len(system.parts), layout.counts.shape[1]
    if num == 1:
        return layout
    of_rank = segment_of_ranks(system, len(layout.held))
    of_chunk = segment_of_chunks(system, layout.chunks_of)
    counts, held = _placed(layout.counts, of_chunk, num), _placed(layout.held, np.array(of_rank), num)
    depth = layout.first.shape[1]
    first = _placed(layout.first.reshape(-1, kinds), np.repeat(of_chunk, depth), num).reshape(len(counts), depth, -1)
    class_of, classes = alike([np.append(first[c].ravel(), counts[c]) for c in range(len(counts))])
    _, leads = alike([np.append(class_of[layout.chunks_of[r]], held[r]) for r in range(len(held))])
    return replace(
        layout, counts=counts, first=first, held=held, class_of=class_of, classes=classes, leads=leads
    )  # fmt: skip


def _placed(rows: np.ndarray, segment: np.ndarray, num: int) -> np.ndarray:
    """Rows [N, K] in the columns of their segments [N, num K]."""
    out = np.zeros((len(rows), num, rows.shape[1]))
    out[np.arange(len(rows)), segment] = rows
    return out.reshape(len(rows), -1)


def joined_costs(costs: Sequence[ChunkCosts], segment: np.ndarray) -> ChunkCosts:
    """Costs of chunks of which each sits on its `segment` [C], from those of all chunks on each."""
    if len(costs) == 1:
        return costs[0]
    slot = INNER + segment
    slot[0], slot[-1] = FIRST, LAST

    def picked(name: str) -> np.ndarray:
        tables = [getattr(c, name) for c in costs]
        ends = (tables[segment[0]][FIRST], tables[segment[-1]][LAST])
        return np.stack([*ends, *(table[INNER] for table in tables)])

    has_bytes = costs[0].nbytes.shape[0] > 1
    return ChunkCosts(
        slot=slot, seconds=picked("seconds"), nbytes=picked("nbytes") if has_bytes else costs[0].nbytes,
        floor=np.min([c.floor for c in costs], axis=0),
    )  # fmt: skip
