"""Small collectives inside one scale-up domain as kernels of inference engines run them: all members at once, no ring.

Every member writes to every other over its own link, in one step (or two, for a large all-reduce). Knows nothing of
ops. Refuses groups that leave the innermost tier: infinitely slow, so that the ring is taken.
"""

from __future__ import annotations

import math

from estimator.op import Array, Traffic, smaller
from hardware.link import Collective
from hardware.system import SystemSpec

__all__ = ["direct_seconds"]

DIRECT = frozenset({Traffic.ALL_REDUCE, Traffic.ALL_GATHER, Traffic.REDUCE_SCATTER})


def direct_seconds(kind: Traffic, system: SystemSpec, size: float, nbytes: Array) -> Array:
    """Seconds for a buffer of `nbytes` in groups of `size` neighbours.

    One kernel, a flag before and one after each step (a hop's latency each; assumption), and (n-1)/n V over the link: V
    times as often in a one-step all-reduce, which every member adds up by itself, twice in two steps.
    """
    if size == 1 or kind not in DIRECT or float(system.members(size, 1.0)[0]) < size:
        return math.inf
    link = system.tiers[0].link
    rate = link.achieved_bytes_per_s(Collective.ALL_TO_ALL, size) * float(system.reach(0, size, Collective.ALL_TO_ALL))
    start, flags = system.chip.kernel_s, 2.0 * link.latency_s
    share = (size - 1.0) / size * nbytes / rate
    if kind is not Traffic.ALL_REDUCE:
        return start + flags + share
    return start + smaller(flags + size * share, 2.0 * (flags + share))
