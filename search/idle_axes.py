"""Axes that mean nothing beside what the others are: which they are over a whole space, and why. Prices nothing.

What is idle on some structures of a space alone, idle.py tells; here an axis is idle on all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from estimator.strategy import ContextParallel, RankOrder, Schedule
from search.space import Space

__all__ = ["first_of_all", "idle_axes"]

DEGREES = ("tp", "cp", "pp", "ep", "etp")
LIMITED = {"rank_order": RankOrder.TP_CP_DP_PP, "dp_replicate": 1, "redundant_experts": 0}
"""Axes on which a rule may refuse a value that changes nothing, and the value that is refused least."""


def idle_axes(space: Space) -> Iterator[tuple[str, str]]:
    """Axes that change nothing, each with the words for where that is so."""
    told: set[str] = set()
    for where, holds, names in _CAUSES:
        if not told.issuperset(names) and holds(space):
            for name in names:
                if name not in told:
                    told.add(name)
                    yield name, where


def first_of_all(name: str, values: tuple[object, ...]) -> tuple[object, ...]:
    """The one value of an idle axis that is legal wherever another is; all of them where none is sure to be."""
    if name in LIMITED:
        return (LIMITED[name],) if LIMITED[name] in values else values
    return values[:1]


def _only(name: str, *values: object) -> Callable[[Space], bool]:
    return lambda space: set(space.axes[name]) <= set(values)


def _never(name: str, value: object) -> Callable[[Space], bool]:
    return lambda space: value not in space.axes[name]


def _one_domain(space: Space) -> bool:
    return all(not s.segments and s.num_chips <= s.tiers[0].span for s in space.systems)


def _unshared(space: Space) -> bool:
    """Whether each weight is on one rank alone."""
    return not _doubled(space) and _in_every_mesh(
        space, lambda tp, cp, dp, experts: dp * cp == 1 and tp * cp * dp // experts <= 1
    )


def _dense_unshared(space: Space) -> bool:
    """The same of a dense model, where ZeRO-3 still has a use for what overlap would need buckets for."""
    few = 3 not in space.axes["zero_stage"] or _only("overlap_dp", 0)(space)
    dense = space.model.moe is None and not _doubled(space)
    return few and dense and _in_every_mesh(space, lambda tp, cp, dp, experts: dp * cp == 1)


def _one_replica(space: Space) -> bool:
    return _in_every_mesh(space, lambda tp, cp, dp, experts: dp == 1)


def _doubled(space: Space) -> bool:
    return Schedule.DUALPIPE in space.axes["schedule"]  # two ranks hold each stage


def _in_every_mesh(space: Space, holds: Callable[[int, int, int, int], bool]) -> bool:
    """Whether something holds of tp, cp, dp and ep * etp wherever a system has room for them, and it has somewhere.

    What is asked holds of fewer replicas and of more ranks of experts too: the shortest pipeline and the fewest ranks
    stand for all. Degrees beyond the chips are not visited, for ranges of them may be long.
    """
    tps, cps, pps, eps, etps = (sorted(map(_whole, space.axes[name])) for name in DEGREES)
    pp, experts, found = pps[0], eps[0] * etps[0], False
    for num_chips in {system.num_chips for system in space.systems}:
        room = num_chips // pp
        for tp in tps[: bisect_right(tps, room)]:
            for cp in cps[: bisect_right(cps, room // tp)]:
                found = True
                if not holds(tp, cp, num_chips // (tp * cp * pp), experts):
                    return False
    return found


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value


_CAUSES: tuple[tuple[str, Callable[[Space], bool], tuple[str, ...]], ...] = (
    ("tp is 1", _only("tp", 1), ("sequence_parallel", "overlap_tp", "tp_chunks")),
    ("cp is 1", _only("cp", 1), ("context_parallel", "overlap_cp")),
    ("pp is 1", _only("pp", 1), ("overlap_pp", "rank_order")),
    ("ep is 1", _only("ep", 1), ("overlap_ep", "shared_expert_overlap", "redundant_experts")),
    ("no schedule is interleaved", _never("schedule", Schedule.INTERLEAVED), ("interleave_group",)),
    ("no ring passes keys and values", _never("context_parallel", ContextParallel.RING), ("overlap_cp",)),
    ("all chips are in one domain of links", _one_domain, ("rank_order",)),
    ("dp is 1", _one_replica, ("rank_order",)),
    ("no two ranks hold the same weights", _unshared,
     ("zero_stage", "overlap_dp", "dp_replicate", "reshard_after_forward", "prefetch_blocks", "bucket_bytes",
      "expert_bucket_bytes")),
    ("a dense model has dp and cp 1", _dense_unshared, ("zero_stage",)),
    ("zero_stage is 0", _only("zero_stage", 0), ("dp_replicate",)),
    ("zero_stage is below 3", _never("zero_stage", 3), ("reshard_after_forward", "prefetch_blocks")),
    ("zero_stage is 3", _only("zero_stage", 3), ("bucket_bytes", "expert_bucket_bytes")),
    ("overlap tp is 0", _only("overlap_tp", 0), ("tp_chunks",)),
    ("overlap dp is 0", _only("overlap_dp", 0), ("prefetch_blocks", "bucket_bytes", "expert_bucket_bytes")),
)  # fmt: skip
"""Where an axis has no effect on any number of a result, by what the other axes and the systems are."""
