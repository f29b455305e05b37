# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""All options under one structure after another: the jitted loops of the exact sweep.

Order of the nest: variants, as a tree (tree.py), at each node of which floors close what cannot add to the front
(floors.py); ways to keep; overlap of PP; ZeRO and DP overlap as far as they change the pipeline, recompute, overlaps of
TP and EP, of which WIDTH run side by side (estimator/lanes.py); ZeRO stage, overlap of DP, bucket. Everything
that an inner loop does not change is computed outside it, by the same functions in the same order as `evaluate`
(estimator/batch.py), so a candidate's step time and memory are the same bits. What a point of the front strictly
beats cannot add to it.
"""

from __future__ import annotations

import numpy as np

from estimator.chunk import chunk_seconds
from estimator.compose import (
    PASSES,
    Constants,
    Net,
    Tables,
    finish,
    pair_hop,
    place_of,
    program_of,
    rank_params,
    rank_windows,
    spans_of,
)
from estimator.gradients import hidden_behind
from estimator.jit import kernel, njit
from estimator.keep import Keep, keep_of
from estimator.lanes import WIDTH, at_most, below, larger, load, num_set, put, splat
from search.bounds import CHEAPEST, corners, device, without_stage
from search.floor_paths import find_heavy_paths, find_paths
from search.floor_tables import new_floors, new_opened, opened_at
from search.floors import hold_floors
from search.gate import derive, passes, set_options
from search.parts import COUNTS, DERIVED, OPTION_VALUES, Filter, Kinds, Options, Part
from search.scratch import (
    Job,
    fill_bytes,
    fill_flight,
    fill_gradients,
    fill_seconds,
    fill_traffic,
    least_memory,
    new_scratch,
)
from search.staircase import Staircase, beater, insert, is_beaten
from search.tree import DEPTH, NUMBERS, SKIP, VARIANT, row_of_node

__all__ = ["COUNTS", "DERIVED", "OPTION_VALUES", "Filter", "Kinds", "Options", "Part", "corners", "sweep"]

HOP_BYTE, HOP_LAT = int(Net.HOP_PER_BYTE), int(Net.HOP_LATENCY)
KINDS_OF_ZERO = 5
"""Pipelines that ZeRO and DP overlap tell apart: stages 0 and 1 alike; 2 and 3, each without and with overlap."""


@kernel
def _beaten(front, options, step, memory):
    return is_beaten(front, step if options.use_step else 0.0, memory if options.use_memory else 0.0)


@njit(cache=True)
def sweep(
    t: Tables, part: Part, kinds: Kinds, options: Options, constraints: Filter, front: Staircase, prune: bool,
    lows: np.ndarray, counts_out: np.ndarray,
) -> None:  # fmt: skip
    """Offer every candidate of these structures to `front`; `lows` [S, 2] are their corners, COUNTS are added up."""
    num_plain = options.plain.shape[0]
    tree, num = kinds.tree, num_plain + options.block_layers.size
    x, hosts, gathers = new_scratch(t, options, tree.height), kinds.hosts.shape[0], kinds.gathers.shape[0]
    floors = new_floors(t, num, hosts, kinds.shares.size, gathers)
    opened = new_opened(tree.height + 1, num, hosts, gathers)
    lanes = np.zeros((3, WIDTH), np.int64)
    for i in range(part.id.size):
        counts_out[0] += 1
        counts_out[1] += part.legal[i]
        if prune and _beaten(front, options, lows[i, 0], lows[i, 1]):
            continue
        if device(lows[i, 1], t.constants) > t.constants.capacity_bytes:
            counts_out[4] += part.legal[i]
            continue
        code, p, v, m, net = part.schedule[i], part.pp[i], part.vpp[i], part.m[i], t.nets[part.net[i]]
        place, made = place_of(t, part.layout[i], p), program_of(t, part.program[i], p)
        flying, late = fill_flight(code, p, v, m, place.slots, made, x)
        n, stop, some, zero = tree.starts[part.kit[i]], tree.starts[part.kit[i] + 1], part.num_blocks[i], x.zero
        start = n
        while n < stop:
            node = tree.nodes[n]
            depth, variant = node[DEPTH], node[VARIANT]
            row_of_node(t, tree, kinds.prices[part.row[i]], node, x.rows, x.bases, x.agains)
            base, again, row = x.bases[depth], x.agains[depth], x.rows[depth]
            c = constants_of(tree.constants[node[NUMBERS]])
            hop = t.hop_bytes[row] * net[HOP_BYTE] + net[HOP_LAT]
            x.flags[:], zero[:] = part.flags[i], part.zero[i]
            if variant >= 0 and kinds.needs[variant, 0]:
                x.flags[0, 0] = -1
            if variant >= 0 and kinds.needs[variant, 1]:
                x.flags[3, 0] = -1
                zero[3] = -1
            if variant >= 0 and kinds.needs[variant, 2]:
                x.flags[1, 1] = -1
            num_here, above, below_it = num_plain + some, opened_at(opened, depth), opened_at(opened, depth + 1)
            if prune and n == start:
                find_paths(
                    base, again, x.flags, hop, code, p, v, m, place, made, options.corner, x.chunks, x.pipe, floors
                )
            is_open = True
            for closer in range(2 if prune and n == start else 1 if prune else 0):
                if closer == 1 and is_open:  # few structures come here: worth a second look
                    find_heavy_paths(
                        x.flags, zero, hop, code, p, v, m, place, made, kinds.hosts, num_here, above.used, x.chunks,
                        x.pipe, floors,
                    )  # fmt: skip
                is_open = is_open and hold_floors(
                    t, c, net, base, again, row, x.flags, zero, variant, code, p, place, flying, late, options, kinds,
                    num_here, num_plain, front, above, below_it, floors,
                )  # fmt: skip
            if not is_open:
                n = node[SKIP]
                continue
            if variant >= 0:
                _leaf(
                    t, c, part, i, kinds, variant, base, again, row, hop, place, made, flying, late, options,
                    constraints, front, prune, lanes, counts_out, below_it, x,
                )  # fmt: skip
            n += 1


@njit(cache=True)
def _leaf(
    t, c, part, i, kinds, variant, base, again, row, hop, place, made, flying, late, options, constraints, front, prune,
    lanes, counts_out, opened, x,
):  # fmt: skip
    """One variant of a structure under every way to keep of which anything is open."""
    net, flags, zero = t.nets[part.net[i]], x.flags.copy(), x.zero.copy()
    rank_params(place.held, base, x.dense, x.expert)
    for z in range(3):
        if zero[z] >= 0:
            fill_gradients(c, base, net, z, Keep(z, 1, 1.0, 0.0, 0.0, 0.0, 0.0), place, options, x)
    gathered = -1
    num_plain = options.plain.shape[0]
    num = num_plain + part.num_blocks[i]
    hosts = kinds.hosts.shape[0]
    x.wanted[:] = True
    for k in range(kinds.keep_ids.size):
        g, h = k // hosts, k % hosts
        if not kinds.pairs[variant, k] or (kinds.keep_needs[k, 0] and (part.shared[i] == 0 or zero[3] < 0)):
            continue
        x.flags[:], x.zero[:] = flags, zero
        if kinds.keep_needs[k, 0]:
            x.zero[:3] = -1
        if kinds.keep_needs[k, 1]:
            x.flags[3, 0] = -1
        if prune and not _wants(opened, g, h, num, x):
            continue
        host = kinds.hosts[h]
        keep = Keep(0, int(kinds.gathers[g, 0]), kinds.gathers[g, 1], host[0], host[1], host[2], host[3])
        job = Job(
            i, variant, base, again, t.buffer_bytes[row], t.hop_bytes[row], net, part.schedule[i], part.pp[i],
            part.vpp[i], part.m[i], hop, part.id[i] + kinds.keep_ids[k] + kinds.ids[variant], num, num_plain, x.flags,
            x.zero, keep, part.replicas[i] * 1.0, lanes[0], lanes[1], lanes[2],
        )  # fmt: skip
        if g != gathered and zero[3] >= 0:  # what is gathered decides what sums over replicas hide behind
            fill_gradients(c, base, net, 3, keep, place, options, x)
            gathered = g
        fill_traffic(c, job, place, x)
        fill_bytes(c, job, place, flying, late, options, x)
        fill_seconds(job, place, options, prune, x)
        if prune:
            _fill_least(job, place, made, x)
        if not _open(c, job, options, front, prune, counts_out, x):
            continue
        for pp in range(2):
            kind = o = pair = 0
            while job.flags[2, pp] >= 0 and kind < KINDS_OF_ZERO:
                n, kind, o, pair = _next_lanes(job, x.is_open, kind, o, pair)
                if n > 0:
                    _block(c, job, place, made, options, constraints, front, prune, counts_out, x, pp, n)


@kernel
def _wants(opened, g, h, num, x):
    """Fill `wanted` with what is open under a way to keep, and leave its ZeRO stages alone; whether anything is."""
    found = False
    for z in range(4):
        kind = 3 + g if z == 3 else z
        mine = False
        for ep in range(2):
            some = x.zero[z] >= 0 and x.flags[1, ep] >= 0 and opened.some[kind, h, ep]
            mine |= some
            for o in range(num):
                x.wanted[ep, z, o] = some and opened.each[kind, h, ep, o]
        if not mine:
            x.zero[z] = -1
        found |= mine
    return found


@kernel
def constants_of(row):
    """The numbers of one variant."""
    return Constants(
        row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10], row[11], row[12],
        row[13], row[14],
    )  # fmt: skip


@kernel
def _fill_least(job, place, made, x):
    """Span of each recompute in `fits` under the cheapest flags.

    The shorter of blocking and overlapped sends, where both are candidates.
    """
    least, fits, flags, lane_o = x.least, x.fits, job.flags, job.o
    job.g[:] = CHEAPEST
    job.kind[:] = 0
    classes = x.classes[: PASSES * place.counts.shape[0]]
    n = 0
    for o in range(job.num):
        if fits[o]:
            lane_o[n] = o
            n += 1
        if n == WIDTH or (o == job.num - 1 and n > 0):
            lane_o[n:] = lane_o[0]
            _fill_classes(job, place, without_stage(job.keep), x.once, x.again, x.floor, True, classes)
            for lane in range(n):
                least[lane_o[lane]] = np.inf
            for pp in range(2):
                if flags[2, pp] >= 0:
                    span = spans_of(
                        place.class_of, classes, x.chunks, x.pipe, job.hop, pp == 0, job.code, job.p, job.v, job.m, made
                    )
                    put(x.out, 0, span)
                    for lane in range(n):
                        least[lane_o[lane]] = min(least[lane_o[lane]], x.out[0, lane])
            n = 0


@kernel
def _open(c, job, options, front, prune, counts_out, x):
    """Which recomputes fit without and with EP overlap under each ZeRO stage, and may add to the front; whether any."""
    memory, is_open, least, wanted = x.memory, x.is_open, x.least, x.wanted
    found = False
    for ep in range(2):
        for z in range(4):
            for o in range(job.num):
                is_open[ep, z, o] = False
                if job.zero[z] < 0 or job.flags[1, ep] < 0 or not wanted[ep, z, o]:
                    continue
                bare = least_memory(memory[ep, z], z, o)
                is_open[ep, z, o] = bare < np.inf
                if bare == np.inf:
                    counts_out[4] += _candidates(job, z, options.buckets.size)
                elif prune:
                    step = finish(least[o], 0.0, x.update[z], 0.0, c)
                    is_open[ep, z, o] = x.fits[o] and not _beaten(front, options, step, bare)
                found |= is_open[ep, z, o]
    return found


@kernel
def _next_lanes(job, is_open, kind, o, pair):
    """Fill lanes with the next of: pipelines of ZeRO and DP overlap, recomputes that fit, pairs of TP and EP flags.

    Returns how many lanes, and where to go on.
    """
    flags, lane_o, lane_g, lane_kind = job.flags, job.o, job.g, job.kind
    n = 0
    while kind < KINDS_OF_ZERO:
        if kind == 0 or flags[3, _dp_of(kind)] >= 0:
            lowest = _lowest_zero(kind)
            while o < job.num:
                while pair < 4:
                    if n == WIDTH:
                        return n, kind, o, pair
                    wanted = is_open[pair & 1, lowest, o] or (kind == 0 and is_open[pair & 1, 1, o])
                    if wanted and flags[0, pair >> 1] >= 0:
                        lane_o[n], lane_g[n], lane_kind[n] = o, pair, kind
                        n += 1
                    pair += 1
                o, pair = o + 1, 0
        kind, o, pair = kind + 1, 0, 0
    if n > 0:
        lane_o[n:], lane_g[n:], lane_kind[n:] = lane_o[0], lane_g[0], lane_kind[0]
    return n, kind, o, pair


@njit(cache=True, inline="always")
def _lowest_zero(kind):
    """The lowest ZeRO stage of a pipeline."""
    return 0 if kind == 0 else (kind + 3) >> 1


@njit(cache=True, inline="always")
def _dp_of(kind):
    """DP overlap of a pipeline, where it matters."""
    return 0 if kind == 0 else (kind + 1) & 1


@kernel
def _fill_classes(job, place, asked, once, again, traffic, blocking, classes):
    """Seconds of every class of chunks in every lane."""
    lane_o, lane_g, lane_kind = job.o, job.g, job.kind
    num = place.counts.shape[0]
    for lane in range(WIDTH):
        o, g, z, dp = lane_o[lane], lane_g[lane], _lowest_zero(lane_kind[lane]), _dp_of(lane_kind[lane])
        keep = keep_of(asked, z, dp)
        ep = 1 if g != CHEAPEST and g & 1 == 1 else 0
        coupled = pair_hop(job.code, ep, job.hop, blocking)
        for j in range(num):
            passes = chunk_seconds(once[g, j], again[g, o, j], job.code, ep, keep, dp, traffic[j])
            for n in range(PASSES):
                classes[n * num + j, lane] = passes[n] + coupled if n == 1 else passes[n]


@kernel
def _block(c, job, place, made, options, constraints, front, prune, counts_out, x, pp, n):
    """The first n lanes: their pipelines, then every ZeRO stage, DP overlap and bucket."""
    leads, covers, classes = place.leads.size, x.covers, x.classes[: PASSES * place.counts.shape[0]]
    _fill_classes(job, place, job.keep, x.once, x.again, x.traffic, pp == 0, classes)
    span = spans_of(place.class_of, classes, x.chunks, x.pipe, job.hop, pp == 0, job.code, job.p, job.v, job.m, made)
    rank_windows(place.leads, place.slots, classes, covers)
    # Plain locals: looking arrays up in a tuple costs reference counts, which the innermost loop would feel.
    held, memory, is_open, terms, witness, out = x.held, x.memory, x.is_open, x.terms, x.witness, x.out
    lane_o, lane_g, lane_kind, flags = job.o, job.g, job.kind, job.flags
    xs, ys, size, use_step, use_memory = front.x, front.y, front.size, options.use_step, options.use_memory
    priced = 0
    for z in range(4):
        update, plain_grads, plain_gather = x.update[z], x.plain[z, 0], x.plain[z, 1]
        columns = 1 + options.buckets.size if z < 3 and flags[3, 1] >= 0 else 1
        for dp in range(2):
            if flags[3, dp] < 0 or job.zero[z] < 0:
                continue
            kind = 0 if z < 2 else 2 * z - 3 + dp
            lanes = 0
            for lane in range(n):
                lanes |= (lane_kind[lane] == kind and is_open[lane_g[lane] & 1, z, lane_o[lane]]) << lane
            if lanes == 0:
                continue
            bucketed = dp == 1 and z < 3
            for lane in range(n):
                if (lanes >> lane) & 1:
                    for k in range(columns if bucketed else 1):
                        held[k, lane] = memory[lane_g[lane] & 1, z, lane_o[lane], dp if z == 3 else k]
            if prune:
                lanes = _alive(lanes, front, options, finish(span, 0.0, update, 0.0, c), x)
            for column in range(1 if bucketed else 0, columns if bucketed else 1):
                exposed, gather = splat(plain_grads), splat(plain_gather)
                if column > 0:
                    exposed, gather = splat(0.0), splat(0.0)
                    for lead in range(leads):
                        if z < 2 or plain_grads > 0.0:
                            total, least = terms[z, column - 1, lead, 0], terms[z, column - 1, lead, 1]
                            exposed = larger(exposed, hidden_behind(total, least, load(covers, leads + lead)))
                        if z > 0:
                            total, least = terms[z, column - 1, lead, 2], terms[z, column - 1, lead, 3]
                            gather = larger(gather, hidden_behind(total, least, load(covers, lead)))
                elif z == 3 and dp == 1 and plain_grads > 0.0:
                    exposed = splat(0.0)
                    for lead in range(leads):
                        total, least = terms[3, 0, lead, 0], terms[3, 0, lead, 1]
                        exposed = larger(exposed, hidden_behind(total, least, load(covers, leads + lead)))
                step = finish(span, exposed, update, gather, c)
                bytes_held = load(held, column)
                fits = lanes & below(bytes_held, splat(np.inf))
                counts_out[4] += num_set(lanes ^ fits)
                priced += num_set(fits)
                at_x, at_y = step if use_step else splat(0.0), bytes_held if use_memory else splat(0.0)
                by_x, by_y = load(witness, 0), load(witness, 1)
                beaten = (at_most(by_x, at_x) & below(by_y, at_y)) | (below(by_x, at_x) & at_most(by_y, at_y))
                left = fits & ~beaten
                if left != 0:
                    put(out, 0, at_x)
                    put(out, 1, at_y)
                    left = _unbeaten(xs, ys, size, out, witness, left)
                    if left != 0:
                        put(out, 0, step)
                        _insert(c, job, options, constraints, front, out, held[column], left, z, dp, pp, column)
    counts_out[2] += priced
    counts_out[3] += priced


@kernel
def _unbeaten(xs, ys, size, at, witness, lanes):
    """Those lanes, at their points of the front's plane, that nothing beats; others get their beater as witness."""
    for lane in range(WIDTH):
        if (lanes >> lane) & 1:
            by = beater(xs, ys, size[0], at[0, lane], at[1, lane])
            if by >= 0:
                witness[0, lane], witness[1, lane] = xs[by], ys[by]
                lanes ^= 1 << lane
    return lanes


@kernel
def _alive(lanes, front, options, step, x):
    """Those lanes whose pipeline alone, with no bucket, is not beaten."""
    put(x.out, 0, step)
    for lane in range(WIDTH):
        if (lanes >> lane) & 1 and _beaten(front, options, x.out[0, lane], x.held[0, lane]):
            lanes ^= 1 << lane
    return lanes


@kernel
def _insert(c, job, options, constraints, front, steps, bytes_held, lanes, z, dp, pp, column):
    """Add the candidates of some lanes to the front, but those that another of them beats or a constraint rejects."""
    for lane in range(WIDTH):
        step, memory = steps[0, lane], bytes_held[lane]
        if not (lanes >> lane) & 1 or _beaten(front, options, step, memory):
            continue
        o, tp, ep, flags = job.o[lane], job.g[lane] >> 1, job.g[lane] & 1, job.flags
        if constraints.ends.size > 0:
            bucket = options.buckets[column - 1] if column > 0 else 0.0
            derive(constraints, c, step, memory)
            layers = options.told_layers[o - job.num_plain] if o >= job.num_plain else 0
            keep = keep_of(job.keep, z, dp)
            set_options(
                constraints, job.i, job.variant, keep, job.replicas, options, o, layers, z, tp, ep, pp, dp, bucket
            )
            if not passes(constraints):
                continue
        key = job.id + job.zero[z] + flags[0, tp] + flags[1, ep] + flags[2, pp] + flags[3, dp]
        key += options.plain[o, 1] if o < job.num_plain else options.block_ids[o - job.num_plain]
        key += options.bucket_ids[column - 1] if column > 0 else 0
        insert(front, step if options.use_step else 0.0, memory if options.use_memory else 0.0, key)


@kernel
def _candidates(job, z, num_buckets):
    """Candidates under one ZeRO stage, one recompute choice, and EP overlap off or on."""
    tp, pp = (job.flags[0, 0] >= 0) + (job.flags[0, 1] >= 0), (job.flags[2, 0] >= 0) + (job.flags[2, 1] >= 0)
    off, on = job.flags[3, 0] >= 0, job.flags[3, 1] >= 0
    return tp * pp * (off + on * (num_buckets if z < 3 else 1))
