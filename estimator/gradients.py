# mypy: disallow-untyped-decorators=False
"""What data parallelism does at the ends of a step, jitted: gradients to their owners in buckets, update, weights back.

Knows the parameters of a rank and its groups (compose.Net); what traffic hides behind is given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from estimator.compose import Net
from estimator.cost.overlap import SLOWDOWN
from estimator.cost.table import Base
from estimator.jit import kernel
from estimator.keep import uses_host
from estimator.lanes import larger

__all__ = [
    "apart_seconds", "behind_shards", "bucket_terms", "bucketed_terms", "gather_wire", "gradient_wire",
    "hidden_behind", "pieces_of", "replica_terms", "shard_of", "update_parts", "update_seconds",
]  # fmt: skip

N_DP, N_DP_BYTE, N_DP_LAT = int(Net.DP), int(Net.DP_PER_BYTE), int(Net.DP_LATENCY)
N_EDP, N_EDP_BYTE, N_EDP_LAT = int(Net.EDP), int(Net.EDP_PER_BYTE), int(Net.EDP_LATENCY)
N_SHARDS, N_BYTE, N_LAT = int(Net.SHARDS), int(Net.SHARD_PER_BYTE), int(Net.SHARD_LATENCY)
N_ESHARDS, N_E_BYTE, N_E_LAT = int(Net.ESHARDS), int(Net.ESHARD_PER_BYTE), int(Net.ESHARD_LATENCY)
N_R_BYTE, N_R_LAT = int(Net.REPLICA_PER_BYTE), int(Net.REPLICA_LATENCY)
N_ER_BYTE, N_ER_LAT = int(Net.EREPLICA_PER_BYTE), int(Net.EREPLICA_LATENCY)
N_SHARED, N_E_SHARED = int(Net.SHARD_SHARED), int(Net.ESHARD_SHARED)
B_UPDATE, B_E_UPDATE = int(Base.DENSE_UPDATE_S), int(Base.EXPERT_UPDATE_S)
B_LONGEST, B_E_LONGEST = int(Base.DENSE_LONGEST_S), int(Base.EXPERT_LONGEST_S)
B_MATRICES, B_EXPERTS = int(Base.MATRIX_PARAMS), int(Base.EXPERT_PARAMS)


@kernel
def scatters_of(zero):
    """Reduce-scatters' worth of gradient traffic after the last backward.

    Stage 0 all-reduces (twice a reduce-scatter); stages 2 and 3 have reduced every micro-batch already.
    """
    return 0.0 if zero >= 2 else 2.0 if zero == 0 else 1.0


@kernel
def gathers_of(zero):
    """All-gathers of the weights after the update (stages 1 and 2)."""
    return 0.0 if zero == 0 or zero >= 3 else 1.0


@kernel
def _ways(zero, net):
    """What a gradient takes after the last backward, dense and expert: seconds per byte and latency, each two.

    Stage 0 all-reduces over all ranks that share it, the others over the replicas what their shards have summed
    (HSDP; MiCS, Zhang 2022, arXiv:2205.00119, section 3.4): once a step, after the last micro-batch.
    """
    n = scatters_of(zero)
    if zero == 0:
        return n * net[N_DP_BYTE], n * net[N_EDP_BYTE], n * net[N_DP_LAT], n * net[N_EDP_LAT]
    return (
        n * net[N_BYTE] + net[N_R_BYTE], n * net[N_E_BYTE] + net[N_ER_BYTE],
        n * net[N_LAT] + net[N_R_LAT], n * net[N_E_LAT] + net[N_ER_LAT],
    )  # fmt: skip


@kernel
def gradient_wire(dense, expert, zero, net, c):
    """Seconds on the wire and latency of the gradients after the last backward."""
    d, e, d_latency, e_latency = _ways(zero, net)
    return c.grad_bytes * (dense * d + expert * e), d_latency + e_latency


@kernel
def gather_wire(dense, expert, zero, net, c):
    """The same of the weight all-gather, which overlap hides under the next step's first forward."""
    once = gathers_of(zero)
    wire = once * c.gather_bytes * (dense * net[N_BYTE] + expert * net[N_E_BYTE])
    return wire, once * (net[N_LAT] + net[N_E_LAT])


@kernel
def pieces_of(grads_bytes, bucket):
    """Buckets that a rank's gradients fill. bucket 0: one."""
    if bucket <= 0:
        return 1.0
    return max(np.ceil(grads_bytes / bucket), 1.0)


@kernel
def bucket_terms(wire, latency, pieces):
    """Traffic in buckets that starts as soon as one is full: its total seconds, and what stays exposed in any window.

    The last bucket has nothing left to hide behind, the others take SLOWDOWN of the chip.
    """
    total = wire + pieces * latency
    tail = total / pieces
    return total, tail + SLOWDOWN * (total - tail)


@kernel
def _two_terms(dense_wire, dense_latency, dense_pieces, expert_wire, expert_latency, expert_pieces):
    """`bucket_terms` of two groups of buckets on the same links: the last of both is exposed."""
    dense, expert = dense_wire + dense_pieces * dense_latency, expert_wire + expert_pieces * expert_latency
    tail = dense / max(dense_pieces, 1.0) + expert / max(expert_pieces, 1.0)
    return dense + expert, tail + SLOWDOWN * (dense + expert - tail)


@kernel
def bucketed_terms(dense, expert, zero, bucket, net, c):
    """`bucket_terms` of a rank's gradients, and of its weight gathers: total, least, total, least.

    One stream of buckets for all parameters, or one for the dense and one for the experts where these have their own.
    """
    if c.expert_bucket < 0.0:
        grad_s, grad_latency = gradient_wire(dense, expert, zero, net, c)
        gather_s, gather_latency = gather_wire(dense, expert, zero, net, c)
        pieces = pieces_of(c.grad_bytes * (dense + expert), bucket)
        grads, least_grads = bucket_terms(grad_s, grad_latency, pieces)
        gathers, least_gathers = bucket_terms(gather_s, gather_latency, pieces)
        return grads, least_grads, gathers, least_gathers
    d = pieces_of(c.grad_bytes * dense, bucket) if dense > 0.0 else 0.0
    e = pieces_of(c.grad_bytes * expert, c.expert_bucket) if expert > 0.0 else 0.0
    d_way, e_way, d_latency, e_latency = _ways(zero, net)
    wire = c.grad_bytes
    grads, least_grads = _two_terms(wire * (dense * d_way), d_latency, d, wire * (expert * e_way), e_latency, e)
    n, dense_s, expert_s = gathers_of(zero), dense * net[N_BYTE], expert * net[N_E_BYTE]
    wire = n * c.gather_bytes
    gathers, least_gathers = _two_terms(wire * dense_s, n * net[N_LAT], d, wire * expert_s, n * net[N_E_LAT], e)
    return grads, least_grads, gathers, least_gathers


@kernel
def replica_terms(dense, expert, blocks, net, c):
    """`bucket_terms` of what ZeRO-3 still sums over the replicas of HSDP: block by block, as backward reaches them."""
    wire, latency = gradient_wire(dense, expert, 3, net, c)
    return bucket_terms(wire, latency, max(blocks, 1.0))


@kernel
def behind_shards(total, least, dense, expert, blocks, keep, net, c):
    """`bucket_terms` of sums over HSDP's replicas in stages 2 and 3, with what their shards move in the last backward.

    Sums have a stream of their own (FSDP2's) and share links at most: the window has that much less to give. Each waits
    for its reduce-scatter, the last of which nothing hides.
    """
    if keep.zero < 2 or total <= 0.0:
        return total, least
    d, e = dense * net[N_BYTE], expert * net[N_E_BYTE]
    width = c.grad_bytes + (c.gather_bytes if keep.zero >= 3 and keep.reshard else 0.0)
    last = c.grad_bytes * (d + e) / max(blocks, 1.0) + (net[N_LAT] + net[N_E_LAT])
    return total + width * (d * net[N_SHARED] + e * net[N_E_SHARED]), least + last


@kernel
def hidden_behind(total, least, window):
    """Exposed seconds of bucketed traffic beside a window that computes. A float or lanes.

    Traffic that ends first leaves SLOWDOWN and its last bucket behind (`least`); what is longer outlasts the window.
    """
    return larger(total - window, least)


@kernel
def shard_of(dense, expert, zero, net):
    """Parameters whose optimizer states a rank owns."""
    return dense / net[N_SHARDS] + expert / net[N_ESHARDS] if zero >= 1 else dense + expert


class Update(NamedTuple):
    """Seconds of an update: sums that come up first; then, side by side, chip, host, and the link both ways."""

    returned: float
    chip: float
    host: float
    down: float
    up: float


@kernel
def apart_seconds(rank, held, base, zero, net, c):
    """What an optimizer takes for some parameters beyond `update_seconds`: matrices that it orthogonalises, tables.

    Ranks that share states split the matrices, but each one that two ranks' shards divide is taken whole by both, after
    a gather of its gradients that nothing hides (Distributed Muon, Liu 2025, arXiv:2502.16982, section 2.3; a gather of
    all of them, the most that is needed).
    """
    if c.matrix_bytes < 0.0:
        return 0.0
    dense, expert, longest, expert_longest, matrices, experts = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(held.shape[1]):
        n = held[rank, k]
        if n > 0:
            dense += n * base[k, B_UPDATE]
            expert += n * base[k, B_E_UPDATE]
            longest = max(longest, base[k, B_LONGEST])
            expert_longest = max(expert_longest, base[k, B_E_LONGEST])
            matrices += n * base[k, B_MATRICES]
            experts += n * base[k, B_EXPERTS]
    if zero == 0:
        return dense + expert
    d, e = net[N_SHARDS], net[N_ESHARDS]
    mine = dense / d + (d - 1.0) / d * longest + (expert / e + (e - 1.0) / e * expert_longest)
    if c.matrix_bytes == 0.0:
        return mine
    return mine + c.matrix_bytes * (matrices * net[N_BYTE] + experts * net[N_E_BYTE]) + (net[N_LAT] + net[N_E_LAT])


@kernel
def update_parts(dense, expert, keep, net, c):
    """Optimizer update of the shard that a rank owns: bound by memory, the chip's and the host's side by side.

    The share of the states that lies on the host is updated there (ZeRO-Offload, Ren 2021, arXiv:2101.06840, section
    4): gradients go down unless they are there, weights come up unless that is where they live, while the updates run.
    """
    zero = keep.zero
    shard = shard_of(dense, expert, zero, net)
    if not uses_host(keep):
        return Update(0.0, shard * c.update_s_per_param, 0.0, 0.0, 0.0)
    grad, weight = c.grad_bytes * c.host_s_per_byte, c.gather_bytes * c.host_s_per_byte
    shared = (dense > 0.0 and net[N_DP] > 1.0) or (expert > 0.0 and net[N_EDP] > 1.0)
    apart = net[N_SHARDS] < net[N_DP] or net[N_ESHARDS] < net[N_EDP]  # HSDP's replicas
    down, up, returned = 0.0, 0.0, 0.0
    there = keep.gradients
    if shared and (zero < 2 or apart):
        # Sums that others wait for come up again before they are reduced.
        returned = keep.gradients * (shard if zero >= 2 else dense + expert) * grad
        there = 0.0
    down += max(keep.states - there, 0.0) * shard * grad
    up += max(there - keep.states, 0.0) * shard * grad
    if shared and 1 <= zero < 3:  # weights are gathered on the chips, then go home
        up += keep.states * shard * weight
        down += keep.parameters * (dense + expert) * weight
    else:
        up += max(keep.states - keep.parameters, 0.0) * shard * weight
        down += max(keep.parameters - keep.states, 0.0) * shard * weight
    chip, host = (1.0 - keep.states) * shard * c.update_s_per_param, keep.states * shard * c.host_update_s_per_param
    return Update(returned, chip, host, down, up)


@kernel
def update_seconds(dense, expert, keep, net, c):
    """How long that takes."""
    x = update_parts(dense, expert, keep, net, c)
    return x.returned + max(max(x.chip, x.host), max(x.down, x.up))
