# mypy: disallow-untyped-decorators=False
"""Bytes of one rank: the only place that sums them. Jitted; called by scalar, batch and sweep alike.

Everything that is alive at the worst moment is added up: weights, gradients and states stay while activations peak.
Not counted: dataset and logging buffers, checkpoint staging, fragmentation beyond RESERVED_FACTOR.
"""

from __future__ import annotations

from enum import IntEnum

from estimator.compose import Net
from estimator.cost.table import Again, Base
from estimator.jit import kernel
from estimator.keep import BUFFERS, at_home

__all__ = [
    "ITEMS",
    "RESERVED_FACTOR",
    "WORKSPACE_BYTES",
    "Item",
    "chunk_bytes",
    "hosted_bytes",
    "kept_bytes",
    "left_bytes",
    "logits_bytes",
    "moving_bytes",
    "owed_bytes",
    "second_set",
    "served_items",
    "static_bytes",
]

RESERVED_FACTOR = 1.03  # allocator's blocks over tensors; assumption: expandable segments, steady sizes
WORKSPACE_BYTES = 128 * 1024**2  # GEMM workspaces (32 MiB a stream on Hopper in cuBLAS's documentation) and small state


class Item(IntEnum):
    """Line items of allocated memory."""

    WEIGHTS = 0
    GRADIENTS = 1
    OPTIMIZER_STATES = 2
    GATHERED_WEIGHTS = 3
    ACTIVATIONS = 4
    WORKING_SET = 5
    BUCKETS = 6
    EXCHANGE_BUFFERS = 7
    WORKSPACE = 8
    LOGITS = 9  # taken out of ACTIVATIONS where items are told (`logits_bytes`)


ITEMS = tuple(item.name.lower() for item in Item)

N_SHARDS, N_ESHARDS = int(Net.SHARDS), int(Net.ESHARDS)
B_DENSE, B_EXPERT = int(Base.DENSE_PARAMS), int(Base.EXPERT_PARAMS)
B_DENSE_W, B_EXPERT_W = int(Base.DENSE_WEIGHT_BYTES), int(Base.EXPERT_WEIGHT_BYTES)
B_OWED, B_MORE = int(Base.OWED_BYTES), int(Base.MORE_STATE_BYTES)
A_SAVED, A_LIVE, A_LOGITS = int(Again.SAVED_BYTES), int(Again.LIVE_BYTES), int(Again.LOGITS_BYTES)


@kernel
def static_bytes(rank, held, base, keep, net, c, items):
    """Fill weights, gradients, states and gathered weights of a rank into `items`; their sum.

    ZeRO (Rajbhandari 2020, arXiv:1910.02054): stage 1 shards states, 2 gradients, 3 weights. Experts shard over their
    own, smaller group. Stage 3 keeps the block at work whole and those gathered ahead (`prefetch`), or, without
    resharding, every block. What goes to the host leaves its share free, but for two blocks that are on their way.
    """
    dense = 0.0
    expert = 0.0
    dense_w = 0.0
    expert_w = 0.0
    more = 0.0
    widest = 0.0
    for k in range(held.shape[1]):
        n = held[rank, k]
        dense += n * base[k, B_DENSE]
        expert += n * base[k, B_EXPERT]
        dense_w += n * base[k, B_DENSE_W]
        expert_w += n * base[k, B_EXPERT_W]
        more += n * base[k, B_MORE]
        if n > 0:
            whole = base[k, B_DENSE_W] if net[N_SHARDS] > 1 else 0.0
            widest = max(widest, whole + (base[k, B_EXPERT_W] if net[N_ESHARDS] > 1 else 0.0))
    d1, e1 = (net[N_SHARDS], net[N_ESHARDS]) if keep.zero >= 1 else (1.0, 1.0)
    d2, e2 = (net[N_SHARDS], net[N_ESHARDS]) if keep.zero >= 2 else (1.0, 1.0)
    d3, e3 = (net[N_SHARDS], net[N_ESHARDS]) if keep.zero >= 3 else (1.0, 1.0)
    items[0] = dense_w / d3 + expert_w / e3
    items[1] = (dense / d2 + expert / e2) * c.grad_bytes
    items[2] = (dense / d1 + expert / e1) * c.state_bytes + more / d1
    items[3] = 0.0
    if keep.zero >= 3:
        items[3] = (1.0 + keep.prefetch) * widest
        if keep.prefetch > 1.0 or not keep.reshard:
            everything = (dense_w if net[N_SHARDS] > 1 else 0.0) + (expert_w if net[N_ESHARDS] > 1 else 0.0)
            ahead = min(items[3], max(2.0 * widest, everything))
            items[3] = ahead if keep.reshard else max(ahead, everything)
    if keep.parameters + keep.gradients + keep.states > 0.0:
        weights, grads = 0.0, 0.0
        for k in range(held.shape[1]):
            if held[rank, k] > 0:
                weights = max(weights, base[k, B_DENSE_W] / d3 + base[k, B_EXPERT_W] / e3)
                grads = max(grads, (base[k, B_DENSE] / d2 + base[k, B_EXPERT] / e2) * c.grad_bytes)
        items[0] = left_bytes(items[0], keep.parameters, weights)
        items[1] = left_bytes(items[1], keep.gradients, grads)
        items[2] = (1.0 - keep.states) * items[2]
    return items[0] + items[1] + items[2] + items[3]


@kernel
def left_bytes(whole, share, block):
    """What stays on the chip of `whole` bytes, of which a share is on the host: with room for the blocks under way."""
    return min(whole, (1.0 - share) * whole + share * (BUFFERS * block))


@kernel
def hosted_bytes(rank, held, base, keep, net, c, shard, kept, line):
    """What a rank keeps in the host's memory, of a shard of parameters and of activations `kept`; `line`: scratch.

    States are updated there, from gradients that lie there as well.
    """
    static_bytes(rank, held, base, at_home(keep), net, c, line)
    grads = max(keep.gradients * line[1], keep.states * (shard * c.grad_bytes))
    return keep.parameters * line[0] + grads + keep.states * line[2] + keep.activations * kept


@kernel
def kept_bytes(rank, chunks, in_flight, saved, logits):
    """Activations of the micro-batches in flight on a rank that may go to the host, wherever they are."""
    kept = 0.0
    for slot in range(in_flight.shape[1]):
        kept += in_flight[rank, slot] * (saved[chunks[rank, slot]] - logits[chunks[rank, slot]])
    return kept


@kernel
def chunk_bytes(counts, first, layers, again_all, choice, saved, most, logits, live):
    """Per chunk: bytes that one micro-batch keeps, of its widest block without logits, of logits, and to work with.

    `live` is the widest working set of a block. Logits stay on the chip whatever goes to the host.

    again_all [choices, K, Again]: 0 none, 1 full, then selective sets. `layers` > 0 with choice 1 is block recompute:
    the first `layers` of the chunk in full, the others not at all. first [C * (L + 1), K].
    """
    num_chunks, kinds = counts.shape
    depth = first.shape[0] // num_chunks
    for j in range(num_chunks):
        total = 0.0
        block = 0.0
        words = 0.0
        widest = 0.0
        for k in range(kinds):
            n = counts[j, k]
            if n > 0:
                words += n * again_all[0, k, A_LOGITS]
                if layers > 0:
                    full = first[j * depth + min(layers, depth - 1), k]
                    total += full * again_all[1, k, A_SAVED] + (n - full) * again_all[0, k, A_SAVED]
                    if full > 0:
                        widest = max(widest, again_all[1, k, A_LIVE])
                        block = max(block, again_all[1, k, A_SAVED] - again_all[1, k, A_LOGITS])
                    if n > full:
                        widest = max(widest, again_all[0, k, A_LIVE])
                        block = max(block, again_all[0, k, A_SAVED] - again_all[0, k, A_LOGITS])
                else:
                    total += n * again_all[choice, k, A_SAVED]
                    widest = max(widest, again_all[choice, k, A_LIVE])
                    block = max(block, again_all[choice, k, A_SAVED] - again_all[choice, k, A_LOGITS])
        saved[j] = total
        most[j] = block
        logits[j] = words
        live[j] = widest


@kernel
def second_set(code_holds_pair, overlap_ep, in_flight):
    """One more chunk in flight on every rank where a forward runs beside another micro-batch's backward.

    DualPipe's schedule counts it already (p + 1).
    """
    if overlap_ep and not code_holds_pair:
        for rank in range(in_flight.shape[0]):
            in_flight[rank, 0] += 1


@kernel
def owed_bytes(counts, base, owed):
    """Per chunk: bytes that a micro-batch keeps between its input gradients and its weight gradients."""
    for j in range(counts.shape[0]):
        owed[j] = 0.0
        for k in range(counts.shape[1]):
            owed[j] += counts[j, k] * base[k, B_OWED]


@kernel
def moving_bytes(rank, chunks, in_flight, late, saved, most, logits, owed, live, share, items):
    """Activations of the micro-batches in flight on a rank, and its widest working set: fills `items`; their sum.

    `late` [2, p, slots]: micro-batches in flight, and those that only wait for their weight gradients, at the moment at
    which most do; recompute saves nothing of what these keep. `share` of what is saved is on the host; logits stay, and
    what is owed.
    """
    kept = 0.0
    waiting = 0.0
    widest = 0.0
    for slot in range(in_flight.shape[1]):
        chunk = chunks[rank, slot]
        kept += in_flight[rank, slot] * saved[chunk]
        waiting += late[0, rank, slot] * saved[chunk] + late[1, rank, slot] * owed[chunk]
        widest = max(widest, live[chunk])
    if share > 0.0:
        block, early, after, words, words_early = 0.0, 0.0, 0.0, 0.0, 0.0
        for slot in range(in_flight.shape[1]):
            chunk = chunks[rank, slot]
            block = max(block, most[chunk])
            early += late[0, rank, slot] * saved[chunk]
            after += late[1, rank, slot] * owed[chunk]
            words += in_flight[rank, slot] * logits[chunk]
            words_early += late[0, rank, slot] * logits[chunk]
        kept = left_bytes(kept - words, share, block) + words
        waiting = left_bytes(early - words_early, share, block) + words_early + after
    items[4] = max(kept, waiting)
    items[5] = widest
    return items[4] + widest


@kernel
def logits_bytes(rank, classes, in_flight, counts, again):
    """The part of a rank's activations that logits take: kept whatever is recomputed, for heads are not."""
    total = 0.0
    for slot in range(in_flight.shape[1]):
        for k in range(counts.shape[1]):
            total += in_flight[rank, slot] * counts[classes[rank, slot], k] * again[0, k, A_LOGITS]
    return total


def served_items(*, weights: float, cache: float, activations: float, exchange: float) -> dict[str, float]:
    """Line items of a rank that answers: nothing is kept for a backward pass, the cache grows instead.

    `activations`: of the widest moment of a pass, with what it hands on; `exchange`: buffers of expert traffic.
    """
    return {
        "weights": weights, "kv_cache": cache, "activations": activations, "exchange_buffers": exchange,
        "workspace": float(WORKSPACE_BYTES),
    }  # fmt: skip
