# mypy: disallow-untyped-decorators=False
"""What one micro-batch takes on a chunk of blocks, with what ZeRO and the host move for it. Jitted.

Sums over blocks are given (compose.py); which of this traffic hides behind which pass is decided here, and only here.
"""

from __future__ import annotations

from typing import Final

from estimator.compose import Net
from estimator.cost.overlap import SLOWDOWN
from estimator.cost.table import Base
from estimator.jit import kernel
from estimator.keep import BUFFERS
from estimator.span_codes import BREADTH_FIRST, GPIPE, holds_pairs, splits_backward

__all__ = ["TRAFFIC", "beside", "chunk_seconds", "host_seconds", "zero_traffic"]

TRAFFIC: Final = 10
"""What ZeRO and the host move for it: see `zero_traffic`."""
EVEN_SHARE: Final = 1.0 / 3.0
"""Of a micro-batch's seconds, that of F beside B and W: as many FLOPs each."""

DENSE, EXPERT = int(Base.DENSE_PARAMS), int(Base.EXPERT_PARAMS)
DENSE_W, EXPERT_W = int(Base.DENSE_WEIGHT_BYTES), int(Base.EXPERT_WEIGHT_BYTES)
N_SHARDS, N_BYTE, N_LAT, N_OUTER = (int(Net[f"SHARD{n}"]) for n in ("S", "_PER_BYTE", "_LATENCY", "_OUTER"))
N_ESHARDS, N_E_BYTE, N_E_LAT, N_E_OUTER = (int(Net[f"ESHARD{n}"]) for n in ("S", "_PER_BYTE", "_LATENCY", "_OUTER"))


@kernel
def zero_traffic(counts, j, base, net, c, out):
    """What ZeRO and the host move for chunk j and one micro-batch: fills `out` [TRAFFIC].

    Seconds to gather its weights once and to reduce-scatter its gradients once, block by block; for how much of these
    the outermost tier is busy; the number of blocks. Then the link to the host: seconds of a byte; of the chunk's
    weights, whole and a rank's shard; of its gradients, likewise.
    """
    dense = 0.0
    expert = 0.0
    dense_w = 0.0
    expert_w = 0.0
    blocks = 0.0
    for k in range(counts.shape[1]):
        dense += counts[j, k] * base[k, DENSE]
        expert += counts[j, k] * base[k, EXPERT]
        dense_w += counts[j, k] * base[k, DENSE_W]
        expert_w += counts[j, k] * base[k, EXPERT_W]
        blocks += counts[j, k]
    wire = dense * net[N_BYTE] + expert * net[N_E_BYTE]
    outer = dense * net[N_BYTE] * net[N_OUTER] + expert * net[N_E_BYTE] * net[N_E_OUTER]
    latency = blocks * (net[N_LAT] + net[N_E_LAT])
    out[0], out[1] = wire * c.gather_bytes + latency, wire * c.grad_bytes + latency
    out[2], out[3], out[4] = outer * c.gather_bytes, outer * c.grad_bytes, blocks
    down = c.grad_bytes * c.host_sum_s_per_byte
    out[5] = c.host_s_per_byte
    out[6] = (dense_w + expert_w) * c.host_s_per_byte
    out[7] = (dense_w / net[N_SHARDS] + expert_w / net[N_ESHARDS]) * c.host_s_per_byte
    out[8] = (dense + expert) * down
    out[9] = (dense / net[N_SHARDS] + expert / net[N_ESHARDS]) * down


@kernel
def beside(window, traffic):
    """Seconds of compute and traffic side by side; traffic takes SLOWDOWN of the chip."""
    return max(window + SLOWDOWN * traffic, traffic)


@kernel
def chunk_seconds(once, again, code, ep, keep, overlap_dp, traffic):
    """Seconds of one micro-batch on a chunk: forward, input gradient, weight gradient; then the first two alone.

    `once` [ONCE], `again` [AGAIN], `traffic` [TRAFFIC]: of the functions above; keep: Keep; code: of the schedule. With
    `ep` passes of two micro-batches run side by side; one *alone* has no other to hide its expert traffic, and none
    that gives its own traffic time. Schedules that do not split backward get W inside B.
    """
    tf, tb, tw, tr = once[0], once[1], once[2], again[0]
    splits = splits_backward(code)
    tb += tr
    if not splits:
        tb += tw + once[7]
        tw = 0.0
    af, ab = tf, tb
    if keep.zero >= 2:
        others = once[5] + once[6] + again[2]
        af, ab, aw = _sharded_seconds(tf, tb, tw, others, code, False, keep, overlap_dp, traffic)
        tf, tb, tw = _sharded_seconds(tf, tb, tw, others, code, ep, keep, overlap_dp, traffic) if ep else (af, ab, aw)
        ab += aw - tw
    af, ab = af + once[3], ab + (once[4] + again[1])
    if keep.activations + keep.parameters + keep.gradients > 0.0:
        ahead, back, last = host_seconds(again[3], tb, tw, code, keep, traffic)
        tf, tb, tw, af, ab = max(tf, ahead), max(tb, back), max(tw, last), max(af, ahead), max(ab, back)
    return tf, tb, tw, af, ab


@kernel
def _sharded_seconds(tf, tb, tw, others, code, paired, keep, overlap_dp, traffic):
    """The three passes with what ZeRO-2 and 3 move for every micro-batch; `others`: traffic on the outermost tier.

    Stage 2 reduces gradients, 3 gathers weights as well: for forward, and again for backward unless these were kept
    (FSDP2's reshard_after_forward). Gradients are there once W has run: inside B, or in its own pass. Of two passes
    side by side (`paired`) each hides what the other leaves over. With nothing gathered ahead a block waits for its
    weights, which stand in one queue behind the gradients of the block before it.
    While ZeRO's and other traffic are both on the outermost tier, each gets half of it, which holds the micro-batch up:
    a share of its time equal to the product of theirs. Where ZeRO-3's traffic is all that a micro-batch waits for, it
    also waits while the first block runs backward: the weights of the blocks ahead are there, and there are no
    gradients yet. Each block ahead fills that wait with one more gather. Where W is a pass of its own, that wait is the
    last block of B and the first of W, and the gather for the next pass stands behind gradients while the last
    `prefetch` blocks of W run.
    """
    three, splits = keep.zero >= 3, splits_backward(code)
    apart = splits and not holds_pairs(code)
    gather, scatter = traffic[0] if three else 0.0, traffic[1]
    again = gather if keep.reshard else 0.0
    back, late = again if splits else scatter + again, scatter if splits else 0.0
    if not overlap_dp:
        return tf + gather, tb + back, tw + late
    blocks = max(traffic[4], 1.0)
    ahead = min(keep.prefetch, blocks) * again
    stall = max(tb + tw - (0.0 if apart else ahead), 0.0) / blocks
    if keep.prefetch > 0.0 and paired:
        tf = tf + SLOWDOWN * gather
        tb = max(tb + SLOWDOWN * back, back + gather - tf)
    elif keep.prefetch > 0.0:
        tb = beside(tb, back)
        tf = beside(tf, gather)
    else:
        tb = tb + back if keep.reshard else beside(tb, back)
        tf = tf + gather
    if splits:
        free_f, free_b = max(tf - gather, 0.0), max(tb - again, 0.0)
        tw = _late_seconds(tw, late, free_f, free_b + (free_f if paired else 0.0), blocks, apart, keep)
    exposed = max(gather + (scatter + again) + stall - (tf + tb + tw), 0.0) if three else 0.0
    if apart and three and keep.prefetch > 0.0:
        exposed = max(exposed, (scatter + gather - keep.prefetch * tw) / blocks)
    tb, tw = tb + (0.0 if splits else exposed), tw + (exposed if splits else 0.0)
    dp = traffic[3] + (1.0 + keep.reshard if three else 0.0) * traffic[2]
    window = tf + tb + tw
    if window > 0.0:
        tb += min(others, window) * (min(dp, window) / window)
    return tf, tb, tw


@kernel
def _late_seconds(tw, scatter, free_f, free_b, blocks, apart, keep):
    """A split W with its gradients' reduce-scatter; `free_f`, `free_b`: seconds of F and B without traffic.

    Where W is a pass of its own (`apart`), gradients travel beside it, those of its last blocks, for which there are
    buffers, beside the passes after it. Else it runs right behind its B, block by block, and they have B as well.
    """
    if apart:
        later = min(BUFFERS / blocks, 1.0) * max(scatter - tw, 0.0)
        return max(tw + SLOWDOWN * scatter, scatter - min(later, free_f + free_b))
    if keep.prefetch == 0.0 and keep.reshard:  # gathers stand behind gradients in one queue
        return tw + scatter
    return max(tw + SLOWDOWN * scatter, scatter - free_b)


@kernel
def host_seconds(saved, tb, tw, code, keep, traffic):
    """Least seconds of the three passes for the host's link, which carries both ways side by side.

    Forward sends what it saved down while weights come up; backward takes both back up, but for weights that stayed
    gathered, while gradients go down. Weights of ZeRO-3 and gradients of ZeRO-2 and 3 travel as shards. What a pass's
    last blocks send goes on beside the next pass, as far as there are buffers: of gradients at most an even share of
    the passes, of activations the last block's, beside which the first one of backward is fetched (where a backward
    follows a forward). No term falls where another pass gets longer, which exact bounds rest on.
    """
    down = keep.activations * (saved * traffic[5])
    up = keep.parameters * (traffic[7] if keep.zero >= 3 else traffic[6])
    grads = keep.gradients * (traffic[9] if keep.zero >= 2 else traffic[8])
    blocks = max(traffic[4], 1.0)
    first = min(max(down - tb, 0.0) / blocks, max(down - up, 0.0))
    if code == GPIPE or code == BREADTH_FIRST:
        first = 0.0
    fetch = down + (up if keep.reshard else 0.0) - first
    some = min(BUFFERS / blocks, 1.0)
    if splits_backward(code) and not holds_pairs(code):
        later = min(some, 2.0 * EVEN_SHARE) * grads
        stay = max(grads - some * max(grads - tw, 0.0), EVEN_SHARE * grads)
        return max(down + 0.5 * later, up), max(fetch, 0.5 * later), stay
    later = min(some, EVEN_SHARE) * grads
    stay = max(grads - some * max(grads - (tb + tw), 0.0), (1.0 - EVEN_SHARE) * grads)
    if holds_pairs(code):
        return max(down + later, up), max(fetch, 0.5 * stay), 0.5 * stay
    return max(down + later, up), max(fetch, stay), 0.0
