# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""Floors: what no candidate under a node of variants undercuts, for every way to keep and every recompute. Jitted.

Step time. A pipeline's span is the longest of many paths, each a sum of the seconds of passes, so the passes of one
critical path bound the span of every candidate that takes no less anywhere (span.py: a span is a maximum of sums with
counts that depend on p, v, m alone). `find_paths` finds such counts once per structure, at its corner; a candidate then
costs a dot product. Counts are taken from below: by how much the span falls when a pass gets a little shorter, which
no critical path undercuts. What the host moves takes at least its share of the path; exposed traffic at least what
nothing hides.

Memory. Static bytes are linear in the shares on the host, and those of activations a maximum of two such lines, so all
ways to keep follow from a few numbers of each leading rank.

Everything is monotone in prices, so under a node's cheapest row it holds for all leaves. SHADE is left for rounding.
"""

from __future__ import annotations

import numpy as np

from estimator.batch import fixed_bytes
from estimator.chunk import zero_traffic
from estimator.compose import finish, rank_params
from estimator.jit import kernel, njit
from estimator.keep import Keep
from estimator.memory import WORKSPACE_BYTES
from search.bounds import device
from search.floor_fills import (
    along_all,
    fill_bunches,
    fill_bytes,
    fill_exposed,
    fill_home,
    fill_units,
    fill_updates,
    fill_zero,
    gathered_by,
)
from search.floor_paths import fill_columns
from search.floor_tables import GROUP
from search.staircase import is_beaten, last_at_most

__all__ = ["hold_floors"]

SHADE = 1.0 - 1e-7  # of step time: counts from differences are good to 1e-8
MEMORY_SHADE = 1.0 - 1e-12


@njit(cache=True, inline="always")
def _span_floor(start, dots, held, more, unit, ep, at, share_a, q, share_g):
    """Lower bound of the span along the path of recompute `at`, the less of both ways to send.

    `more` [B]: seconds along the path that it takes at least anyhow; `unit` [B, 5]: what all weights on the way up take
    on the host's link ahead of forward and of backward, and all gradients on the way down beside F, B and W.
    """
    span = np.inf
    for pp in range(2):
        down, fetch = share_a * held[ep, at, pp, 0], share_a * held[ep, at, pp, 1]
        tf = max(dots[ep, at, pp, 0], max(down + share_g * unit[pp, 2], q * unit[pp, 0]))
        tb = max(dots[ep, at, pp, 1], max(fetch + q * unit[pp, 1], share_g * unit[pp, 3]))
        tw = max(dots[ep, at, pp, 2], share_g * unit[pp, 4])
        span = min(span, start[ep, pp] + max((tf + tb) + tw, more[pp]))
    return span


@njit(cache=True, inline="always")
def _memory_floor(sums, moving, ep, a, at, fixed):
    """Lower bound of memory: the fullest of the leading ranks."""
    most = 0.0
    for n in range(sums.size):
        most = max(most, sums[n] + moving[ep, a, at, n])
    return (most + fixed) * MEMORY_SHADE


@kernel
def _beaten(front, options, step, memory):
    """Whether a point of the front beats what takes no less than this, but for rounding, and so many bytes."""
    return is_beaten(front, step * SHADE if options.use_step else 0.0, memory if options.use_memory else 0.0)


@kernel
def _ceiling(front, options, step):
    """Bytes beyond which the front beats all that takes at least `step`; infinite where it asks nothing of memory."""
    if not options.use_memory:
        return np.inf
    i = last_at_most(front.x, front.size[0], step * SHADE if options.use_step else 0.0)
    return front.y[i] if i >= 0 else np.inf


@kernel
def hold_floors(
    t, c, net, base, again, row, flags, zero, variant, code, p, place, flying, late, options, kinds, num, num_plain,
    front, above, below, x,
):  # fmt: skip
    """Which of what is open above a node is open below it (Opened); whether any.

    Closed is what does not fit, and what a point of the front beats strictly.
    """
    fill_columns(base, again, flags, x)
    for j in range(place.counts.shape[0]):
        zero_traffic(place.counts, j, base, net, c, x.traffic[j])
    fill_home(flags, code, place, options, num, num_plain, above.used, x)
    fill_bytes(c, net, base, again, flags, zero, place, flying, late, options, kinds, num, num_plain, above.used, x)
    fill_bunches(flags, place.leads.size, num, above.used, x)
    rank_params(place.held, base, x.dense, x.expert)
    fill_exposed(c, net, flags, zero, place, x)
    fill_updates(c, net, base, zero, kinds.rests, place, x)
    below.used[:] = False
    fixed = fixed_bytes(t.buffer_bytes[row], t.hop_bytes[row], p) + WORKSPACE_BYTES
    gathers, hosts, found = kinds.gathers, kinds.hosts.shape[0], False
    classes = place.counts.shape[0]
    any_gather, is_root, third = 3 + gathers.shape[0], above.is_root, False
    below.some[:] = False
    for step in range(-1, any_gather):
        # At the root first stage 3 as a whole, the least of all ways to gather: mostly that closes all of them.
        kind = any_gather if step < 0 else step
        z, g = min(kind, 3), max(kind - 3, 0)
        whole = kind == any_gather
        if zero[z] < 0 or (whole and not is_root):
            continue
        if z == 3 and is_root and not whole and not third:
            continue
        ahead = z == 3 and not whole and kinds.keep_needs[g * hosts, 1] > 0
        if ahead and flags[3, 1] < 0:
            continue
        exposed = x.exposed[z, 1] if ahead else min(x.exposed[z, 0], x.exposed[z, 1])
        x.done[:] = False
        source = any_gather if is_root and z == 3 and not whole else kind
        for ep in range(2):
            if flags[1, ep] < 0:
                continue
            corner, more = x.zero_dots[0, ep, num], x.more
            for pp in range(2):
                for j in range(classes):
                    corner[pp, j] = 0.0 if z < 2 else np.inf
            start = 0 if whole else g
            for one in range(start, start if z < 2 else gathers.shape[0] if whole else g + 1):
                needs = z == 3 and kinds.keep_needs[one * hosts, 1] > 0
                if not needs or flags[3, 1] >= 0:
                    fill_zero(
                        x.counts[0, ep], x.once[ep, :classes], x.repeated[ep, num], x.traffic, flags, code, ep,
                        gathered_by(gathers, z, one), needs, corner,
                    )  # fmt: skip
            for pp in range(2):
                more[pp] = 0.0
                for j in range(classes):
                    more[pp] += corner[pp, j]
            fill_units(z, z < 3 or (not whole and gathers[g, 0] > 0.0), flags, code, place, ep, x)
            opens = _hold_kind(
                c, flags, variant, code, classes, options, kinds, num, front, above, below, kind, source, whole, z,
                g, ahead, ep, exposed, fixed, x.start, x.dots, x.held, x.zero_dots, x.unit, x.moving, x.lowest,
                x.bunch_dots, x.bunch_held, x.bunch_moving, x.sums[: place.leads.size], x.update, x.still, x.ahead,
                x.ceilings, x.done, x.counts, x.once, x.repeated, x.traffic, more, x.zeros, x.is_refined,
            )  # fmt: skip
            third |= opens and whole
            found |= opens and not whole
    return found


@kernel
def _hold_kind(
    c, flags, variant, code, classes, options, kinds, num, front, above, below, kind, source, whole, z, g, ahead, ep,
    exposed, fixed, start, dots, held, zero_dots, unit, moving, least, bunch_dots, bunch_held, bunch_moving, sums,
    update, still, gathered, ceilings, done, counts, once, repeated, traffic, more, nothing, refined,
):  # fmt: skip
    """The same of one kind of ZeRO, or of stage 3 as a `whole`, and one flag of EP; `source`: whose openness counts.

    The arrays are those of Floors, one by one for speed.
    """
    hosts, share_of, rest_of = kinds.hosts, kinds.share_of, kinds.rest_of
    some, is_open, used = below.some, below.each, below.used
    some_above, is_above = (some, is_open) if source != kind else (above.some, above.each)
    found, heavy, is_refined = False, 2 if z == 3 else 1, 1 if refined[0] else 0
    quickest = update[z, 0]
    for i in range(1, kinds.rests.shape[0]):
        quickest = min(quickest, update[z, i])
    # What the front asks of memory with all at home: the host makes no step shorter.
    span = _span_floor(start, dots, held, more, unit, ep, num, 0.0, 0.0, 0.0)
    ceiling = _ceiling(front, options, finish(span, exposed, quickest, 0.0, c))
    for bunch in range((num + GROUP - 1) // GROUP):
        span = _span_floor(start, bunch_dots, bunch_held, more, unit, ep, bunch, 0.0, 0.0, 0.0)
        ceilings[bunch] = _ceiling(front, options, finish(span, exposed, quickest, 0.0, c))
    for h in range(hosts.shape[0]):
        if not some_above[source, h, ep]:
            continue
        if variant >= 0 and not whole and not kinds.pairs[variant, g * hosts.shape[0] + h]:
            continue
        a, share, q, gr, st = share_of[h], hosts[h, 0], hosts[h, 1], hosts[h, 2], hosts[h, 3]
        for n in range(sums.size):
            weights, grads = still[z, n, 0], still[z, n, 1]
            own = weights + q * (still[z, n, 3] - weights) + (grads + gr * (still[z, n, 4] - grads))
            sums[n] = own + (1.0 - st) * still[z, n, 2] + (gathered[g, n] if z == 3 else 0.0)
        most = 0.0
        for n in range(sums.size):
            most = max(most, sums[n] + least[ep, a, n])
        memory = (most + fixed) * MEMORY_SHADE
        if memory > ceiling or device(memory, c) > c.capacity_bytes:
            continue
        seconds = update[z, rest_of[h]]
        any_open = False
        for first in range(0, num, GROUP):
            bunch, last = first // GROUP, min(first + GROUP, num)
            for o in range(first, last):
                is_open[kind, h, ep, o] = False
            memory = _memory_floor(sums, bunch_moving, ep, a, bunch, fixed)
            if memory > ceilings[bunch] or device(memory, c) > c.capacity_bytes:
                continue
            span = _span_floor(start, bunch_dots, bunch_held, more, unit, ep, bunch, share, q, gr)
            if _beaten(front, options, finish(span, exposed, seconds, 0.0, c), memory):
                continue
            for o in range(first, last if whole else first):
                is_open[kind, h, ep, o] = any_open = True
            for o in range(last if whole else first, last):
                if not is_above[source, h, ep, o]:
                    continue
                memory = _memory_floor(sums, moving, ep, a, o, fixed)
                if device(memory, c) > c.capacity_bytes:
                    continue
                span = _span_floor(start, dots, held, more, unit, ep, o, share, q, gr)
                if _beaten(front, options, finish(span, exposed, seconds, 0.0, c), memory):
                    continue
                if z >= 2 and not done[ep, o]:
                    for path in range(1 + is_refined):
                        for pp in range(2):
                            for j in range(classes):
                                zero_dots[path, ep, o, pp, j] = np.inf
                        fill_zero(
                            counts[0 if path == 0 else heavy, ep], once[ep, :classes], repeated[ep, o], traffic, flags,
                            code, ep, gathered_by(kinds.gathers, z, g), ahead, zero_dots[path, ep, o],
                        )  # fmt: skip
                    done[ep, o] = True
                if z >= 2 or is_refined or share + q + gr > 0.0:
                    asked = gathered_by(kinds.gathers, z, g)
                    asked = Keep(asked.zero, asked.reshard, asked.prefetch, share, q, gr, st)
                    span = np.inf
                    for pp in range(2):
                        if flags[2, pp] < 0:
                            continue
                        longest = 0.0
                        for path in range(1 + is_refined):
                            along = along_all(
                                counts[0 if path == 0 else heavy, ep, pp], once[ep, :classes], repeated[ep, o], traffic,
                                code, ep, asked, zero_dots[path, ep, o, pp] if z >= 2 else nothing,
                            )  # fmt: skip
                            longest = max(longest, along + (start[ep, pp] if path == 0 else 0.0))
                        span = min(span, longest)
                    if _beaten(front, options, finish(span, exposed, seconds, 0.0, c), memory):
                        continue
                is_open[kind, h, ep, o] = used[o] = True
                any_open = True
        some[kind, h, ep] = any_open
        found |= any_open
    return found
