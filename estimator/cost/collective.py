"""Seconds of a collective on a group of ranks: latency plus bytes over the narrowest tier. Knows nothing of ops.

Letters: n ranks of the group, k_t of them inside one domain of tier t (k_last = n), V bytes of the whole buffer.
Costs are linear in V, so they are given as seconds per byte and seconds; both are zero at n = 1 without a branch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from estimator.op import Array, Traffic
from hardware.link import Collective
from hardware.system import SystemSpec

__all__ = ["Linear", "collective", "nested", "nested_members", "outermost_load", "point_to_point",
           "point_to_point_loads", "scalar_all_reduce_latency", "tier_loads"]  # fmt: skip


WIRE = {
    Traffic.ALL_REDUCE: Collective.ALL_REDUCE,
    Traffic.ALL_GATHER: Collective.ALL_GATHER,
    Traffic.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    Traffic.ALL_TO_ALL: Collective.ALL_TO_ALL,
    Traffic.RING: Collective.P2P,
}
"""Whose achieved bandwidth each kind of traffic sees."""


@dataclass(frozen=True, slots=True)
class Linear:
    """seconds = per_byte * V + latency_s, which every piece pays."""

    per_byte: Array
    latency_s: Array

    def seconds(self, nbytes: Array, pieces: int = 1) -> Array:
        """Seconds for a buffer of that many bytes, sent in equal pieces one after the other."""
        return self.per_byte * nbytes + pieces * self.latency_s


def collective(
    kind: Traffic, system: SystemSpec, size: Array, stride: Array, *, fanout: float = 1.0, max_domains: int = 0
) -> Linear:
    """Cost of one collective over groups of `size` ranks that are `stride` apart.

    Rings: every byte crosses each tier's domain boundary once, over the links of all k members inside it
    (Thakur 2005, doi:10.1177/1094342005051521, and NCCL's rings over all NICs of a node):
    all-gather and reduce-scatter (n-1)/n V, all-reduce twice that.
    """
    if isinstance(size, np.ndarray) or isinstance(stride, np.ndarray):
        return _collective(kind, system, size, stride, fanout, max_domains)
    return _one_collective(kind, system, size, stride, fanout, max_domains)


@lru_cache(maxsize=4096)
def _one_collective(
    kind: Traffic, system: SystemSpec, size: float, stride: float, fanout: float, max_domains: int
) -> Linear:
    """The same with one row, whose numbers are taken out."""
    cost = _collective(kind, system, np.array([size]), np.array([stride]), fanout, max_domains)
    return Linear(np.asarray(cost.per_byte).item(), np.asarray(cost.latency_s).item())


def nested(kind: Traffic, system: SystemSpec, factors: Sequence[tuple[Array, Array]]) -> Linear:
    """Cost over groups that are a product of (size, stride) factors, each outside the one before.

    Such are ranks that are not evenly spaced: cp and dp with the pipeline between them.
    """
    return _over(kind, system, nested_members(system, factors), 1.0, 0)


def nested_members(system: SystemSpec, factors: Sequence[tuple[Array, Array]]) -> np.ndarray:
    """How many members of such a group share one domain of each tier: [..., T], as `SystemSpec.members`."""
    members = np.asarray(1.0)
    for size, stride in factors:
        members = members * system.members(size, stride)
    return members


def tier_loads(
    kind: Traffic, system: SystemSpec, members: np.ndarray, *, fanout: float = 1.0, max_domains: int = 0
) -> np.ndarray:
    """Share of a rank's own link of each tier that a collective uses while it moves bytes: [..., T].

    1 on the tier that bounds it (the share of its links in use, on a mesh or torus); less on tiers that would be done
    earlier; 0 where no byte passes.
    """
    if kind is Traffic.ALL_TO_ALL:
        seconds = _all_to_all_tiers(system, members, fanout, max_domains)
    else:
        seconds = _ring_tiers(system, members, WIRE[kind])
    most = np.max(seconds, axis=-1, keepdims=True)
    loads = np.divide(seconds, most, out=np.zeros_like(seconds), where=most > 0)
    inside = np.ones_like(members[..., 0])
    for t in range(system.num_tiers):  # of a mesh or a torus, a group uses some of the links
        loads[..., t] *= system.reach(t, members[..., t] / inside, WIRE[kind])
        inside = members[..., t]
    return loads


def _collective(
    kind: Traffic, system: SystemSpec, size: Array, stride: Array, fanout: float, max_domains: int
) -> Linear:
    return _over(kind, system, system.members(size, stride), fanout, max_domains)


def _over(kind: Traffic, system: SystemSpec, members: np.ndarray, fanout: float, max_domains: int) -> Linear:
    n = members[..., -1]
    if kind is Traffic.COPY:
        return Linear(0.0 * n, 0.0 * n)
    if kind is Traffic.ALL_TO_ALL:
        return _all_to_all(system, members, fanout, max_domains)
    twice = 2.0 if kind is Traffic.ALL_REDUCE else 1.0
    per_byte, latency = _ring(system, members, WIRE[kind])
    return Linear(twice * (n - 1) / n * per_byte, twice * latency)


def _ring(system: SystemSpec, members: np.ndarray, wire: Collective) -> tuple[np.ndarray, np.ndarray]:
    """Seconds per byte that passes the narrowest tier spanned, and the latency of a trip round the ring.

    Of the n - 1 hops, n/k_(t-1) - n/k_t cross tier t and no higher one; the outermost tier spanned sets it up.
    """
    n = members[..., -1]
    inside = np.ones_like(n)
    latency, setup = np.zeros_like(n), np.zeros_like(n)
    for t, tier in enumerate(system.tiers):
        k = members[..., t]
        latency = latency + (n / inside - n / k) * tier.link.latency_s
        setup = np.where(k > inside, tier.link.setup_s, setup)
        inside = k
    return np.max(_ring_tiers(system, members, wire), axis=-1), latency + setup


def _ring_tiers(system: SystemSpec, members: np.ndarray, wire: Collective) -> np.ndarray:
    """Seconds per byte on each tier [..., T]: the k members inside a domain share what crosses its boundary."""
    inside = np.ones_like(members[..., 0])
    out = np.zeros(members.shape)
    for t, tier in enumerate(system.tiers):
        k = members[..., t]
        joined = np.maximum(k / inside, 2.0)  # a tier that joins nobody is left out below
        rate = tier.link.achieved_bytes_per_s(wire, joined) * system.reach(t, k / inside, wire)
        out[..., t] = np.where(k > inside, 1.0 / (rate * inside), 0.0)
        inside = k
    return out


def _all_to_all(system: SystemSpec, members: np.ndarray, fanout: float, max_domains: int) -> Linear:
    """Each rank sends (k_t - k_(t-1))/n of its buffer across tier t on its own link; tiers work side by side.

    Node-limited routing (DeepSeek-V3, arXiv:2412.19437, section 3.2.2): a token crosses to each of its `max_domains`
    domains once, and is passed on inside: of its `fanout` rows at most that many cross.
    """
    inside = np.ones_like(members[..., 0])
    latency, setup = np.zeros_like(inside), np.zeros_like(inside)
    for t, tier in enumerate(system.tiers):
        k = members[..., t]
        # Sends to all members are posted at once: latency grows with the doublings, not with the members.
        hops = np.log2(np.maximum(k / inside, 1.0) + 1.0)
        latency = latency + np.where(k > inside, tier.link.latency_s * hops, 0.0)
        setup = np.where(k > inside, tier.link.setup_s, setup)
        inside = k
    return Linear(np.max(_all_to_all_tiers(system, members, fanout, max_domains), axis=-1), latency + setup)


def _all_to_all_tiers(system: SystemSpec, members: np.ndarray, fanout: float, max_domains: int) -> np.ndarray:
    """Seconds per byte of a rank's buffer on each tier [..., T]."""
    n = members[..., -1]
    inside = np.ones_like(n)
    out = np.zeros(members.shape)
    for t, tier in enumerate(system.tiers):
        k = members[..., t]
        share = (k - inside) / n
        if max_domains and t:
            domains = n / inside
            share = np.minimum(share, max_domains / fanout * (domains - 1) / domains)
        if max_domains and t == 0:
            share = np.maximum(share, (k - 1) / k)  # what arrived from other domains is forwarded inside
        wire, joined = Collective.ALL_TO_ALL, np.maximum(k / inside, 2.0)
        out[..., t] = share / (tier.link.achieved_bytes_per_s(wire, joined) * system.reach(t, k / inside, wire))
        inside = k
    return out


def point_to_point(system: SystemSpec, stride: Array) -> Linear:
    """One rank to the one `stride` further on, over the innermost tier that holds both."""
    members = system.members(2, stride)
    per_byte, latency = np.zeros(members.shape[:-1]), np.zeros(members.shape[:-1])
    found = np.zeros(members.shape[:-1], dtype=bool)
    for t, tier in enumerate(system.tiers):
        here = (members[..., t] > 1) & ~found
        rate = tier.link.achieved_bytes_per_s(Collective.P2P) * system.reach(t, 2.0, Collective.P2P)
        per_byte = np.where(here, 1.0 / rate, per_byte)
        latency = np.where(here, tier.link.latency_s, latency)
        found |= here
    return Linear(per_byte, latency)


def outermost_load(
    kind: Traffic, system: SystemSpec, size: Array, stride: Array, *, fanout: float = 1.0, max_domains: int = 0
) -> Array:
    """The share of `tier_loads` on the outermost tier, for groups as in `collective`."""
    if isinstance(size, np.ndarray) or isinstance(stride, np.ndarray):
        members = system.members(size, stride)
        return np.asarray(tier_loads(kind, system, members, fanout=fanout, max_domains=max_domains)[..., -1])
    return _one_outermost_load(kind, system, size, stride, fanout, max_domains)


@lru_cache(maxsize=4096)
def _one_outermost_load(
    kind: Traffic, system: SystemSpec, size: float, stride: float, fanout: float, max_domains: int
) -> float:
    members = system.members(size, stride)
    return float(tier_loads(kind, system, members, fanout=fanout, max_domains=max_domains)[-1])


def point_to_point_loads(system: SystemSpec, stride: float) -> np.ndarray:
    """Which tier a hop uses: 1 there (its share of the links of a mesh or torus), 0 elsewhere [T]."""
    out = np.zeros(system.num_tiers)
    tier = int(system.tier_of(2, stride))
    out[tier] = float(system.reach(tier, 2.0, Collective.P2P))
    return out


def scalar_all_reduce_latency(system: SystemSpec) -> float:
    """A few bytes over the whole job (gradient norm), as a tree: 2 log2(n) hops of the outermost tier."""
    slowest = max(s.tiers[-1].link.latency_s for s in (system, *system.segments))
    return 2.0 * math.log2(max(system.num_chips, 1)) * slowest
