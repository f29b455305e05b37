"""Options that change nothing where they stand: which they are, and how a strategy is written without them.

Knows no ids and counts nothing; structures.py does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from estimator.build import build
from estimator.graph import BlockKind
from estimator.model import ModelSpec
from estimator.schedule_rules import paired
from estimator.strategy import Chunks, ContextParallel, Module, RankOrder, Recompute, RecomputeKind, Schedule, Strategy
from hardware.system import SystemSpec

__all__ = ["IDLE_VARIANTS", "NEEDS", "effective", "idle_variants", "launchable", "present", "refused_overlaps",
           "refuses_ep", "shares_weights", "without_idle_options"]  # fmt: skip

Columns = dict[str, np.ndarray]


def without_idle_options(model: ModelSpec, s: Strategy, system: SystemSpec) -> Strategy:
    """A scalar strategy with options that change nothing written as off: a candidate as a search keeps it."""
    dp = system.num_chips // (s.tp * s.cp * s.pp)
    shared = dp * s.cp > 1 or s.tp * s.cp * dp // (s.etp * s.ep) > 1 or s.schedule is Schedule.DUALPIPE
    off: dict[str, int] = {}
    off |= {"overlap_tp": 0} if s.tp == 1 else {}
    off |= {"overlap_ep": 0} if s.ep == 1 else {}
    off |= {"overlap_pp": 0} if s.pp == 1 else {}
    off |= {"overlap_dp": 0, "zero_stage": 0} if not shared else {}
    dp_overlap, stage = off.get("overlap_dp", s.overlap.dp), off.get("zero_stage", s.zero_stage)
    off |= {"dp_replicate": 1} if stage == 0 else {}
    off |= {"reshard_after_forward": 1} if stage < 3 else {}
    off |= {"prefetch_blocks": 1} if stage < 3 or not dp_overlap else {}
    off |= {"overlap_cp": 1} if s.cp == 1 or s.context_parallel is not ContextParallel.RING else {}
    off |= {"bucket_bytes": 0} if not dp_overlap or s.zero_stage >= 3 else {}
    if s.schedule is not Schedule.INTERLEAVED or s.interleave_group == s.pp:
        s = replace(s, interleave_group=0)
    quiet = replace(s, tp_chunks=s.tp_chunks if off.get("overlap_tp", s.overlap.tp) else Chunks())
    if model.moe is None or not dp_overlap or s.zero_stage >= 3:
        quiet = replace(quiet, expert_bucket_bytes=None)
    if model.moe is None or s.ep == 1:
        quiet = replace(quiet, redundant_experts=0)
    if s.ep == 1 or not model.has_shared_experts:
        quiet = replace(quiet, shared_expert_overlap=False)
    return quiet.with_sizes(off)


def launchable(model: ModelSpec, s: Strategy, system: SystemSpec) -> Strategy:
    """What a person would launch: also without what only a degree above 1 gives a meaning, or several domains of links.

    In a search such choices stay as the space has them, for constraints may name them.
    """
    s = without_idle_options(model, s, system)
    alone = s.pp == 1 or system.num_chips == s.tp * s.cp * s.pp
    inside = not system.segments and system.num_chips <= system.tiers[0].span
    return replace(
        s,
        sequence_parallel=s.sequence_parallel and bool(s.tp > 1),
        context_parallel=s.context_parallel if s.cp > 1 else ContextParallel.RING,
        rank_order=RankOrder.TP_CP_DP_PP if alone or inside else s.rank_order,
    )


def effective(model: ModelSpec, choice: Recompute) -> Recompute:
    """A recompute choice without the modules that a model lacks, and those that lie inside the others."""
    if choice.kind is not RecomputeKind.SELECTIVE:
        return choice
    left = present(model, choice.modules)
    for module in sorted(left, key=lambda m: m.value):
        if all(names & (left - {module}) for names in _of_ops(model) if module in names):
            left -= {module}
    return Recompute(kind=RecomputeKind.SELECTIVE, modules=left) if left else Recompute()


def present(model: ModelSpec, modules: frozenset[Module]) -> frozenset[Module]:
    """Those of some recompute modules that a model has."""
    return frozenset(module for module in modules if any(module in names for names in _of_ops(model)))


@lru_cache(maxsize=256)
def _of_ops(model: ModelSpec) -> frozenset[frozenset[Module]]:
    """The recompute modules that an op of this model is in, each combination once."""
    blocks = [block for kind, block in build(model, 2).blocks.items() if kind is not BlockKind.HEAD]
    names = {op.modules for block in blocks for op in block.ops}
    return frozenset(frozenset(module for module in Module if module.value in some) for some in names)


def refused_overlaps(strategy: Strategy, s: Columns) -> Columns:
    """Structures that refuse overlap of tp, of ep: rules overlap_tp and overlap_ep."""
    side_by_side = (paired(strategy.schedule) | (s["pp"] == 1)) & (s["num_micro_batches"] >= 2)
    return {
        "tp": (s["tp"] > 1) & np.logical_not(strategy.sequence_parallel),
        "ep": (s["ep"] > 1) & np.logical_not(side_by_side),
    }


def shares_weights(s: Columns) -> np.ndarray:
    """Structures where several ranks hold the same weights: only there has ZeRO and its traffic an effect."""
    return np.asarray((s["dp"] * s["cp"] * s["copies"] > 1) | (s["edp"] > 1))


NEEDS = ("tp_chunks", "expert_bucket_bytes")
"""Axes of variants whose further values mean something beside overlap alone: of TP, of DP below ZeRO-3."""


def refuses_ep(model: ModelSpec, strategy: Strategy) -> bool:
    """Whether a variant refuses overlap of EP wherever that has an effect: rule shared_expert_overlap."""
    return strategy.shared_expert_overlap and model.has_shared_experts


IDLE_VARIANTS = ("tp_chunks", "overlap_cp", "shared_expert_overlap", "expert_bucket_bytes")
"""Axes of variants that have no effect on some sizes."""


def idle_variants(model: ModelSpec, strategy: Strategy, s: Columns) -> Columns:
    """Structures on which an axis of IDLE_VARIANTS has no effect, so that its first value stands for all.

    `strategy`: with what is the same in all of them. `s`: sizes as rules.Case has them, or of price rows alone, where
    buckets have none anyhow.
    """
    alone = ~shares_weights(s) if "edp" in s else np.ones(s["tp"].shape, dtype=bool)
    no_ring = strategy.context_parallel is not ContextParallel.RING
    return {
        "tp_chunks": s["tp"] == 1, "overlap_cp": (s["cp"] == 1) | no_ring,
        "shared_expert_overlap": (s["ep"] == 1) | (not model.has_shared_experts),
        "expert_bucket_bytes": alone if model.moe is not None else np.ones(s["tp"].shape, dtype=bool),
    }  # fmt: skip
