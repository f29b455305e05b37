"""Servers that let the next forward pass begin layer by layer, with and without priorities (BytePS, ByteScheduler).

Where nothing waits for all gradients at once, a forward compute waits for its own layer's alone, and what the first
layers need may pass what later ones need (Peng et al., SOSP 2019; Jiang et al., OSDI 2020). An iteration then begins
with the backward pass and ends with the next forward pass, for by its end every gradient is back; the update of a layer
runs before its forward compute. The order on each link is found here, and run by the one replayer as edges.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from capture.traces.synthesise import Job
from estimator.replay import replay
from estimator.tasks import Category, Device, Stream, Tasks
from search.tuner.decisions import Decisions, bucket_starts
from search.tuner.judge import Judge

__all__ = ["layered_s", "needs"]


def needs(job: Job) -> np.ndarray | None:
    """[G]: the forward compute that waits for each gradient; None where one cannot be told by names."""
    forward = {
        name.partition(".")[2]: k
        for k, (name, category) in enumerate(zip(job.names, job.category, strict=True))
        if category is Category.FORWARD
    }
    found = []
    for gradient in job.gradients:
        module = job.names[gradient.op].partition(".")[2]
        while module and module not in forward:
            module = module.rpartition(".")[0]
        if not module:
            return None
        found.append(forward[module])
    return np.array(found, dtype=np.int64)


def layered_s(judge: Judge, decisions: Decisions, *, priority: bool) -> float | None:
    """Seconds of an iteration whose forward computes wait for their own gradients; None where that cannot be told."""
    job, waits_for = judge.shown, needs(judge.shown)
    if waits_for is None or not judge.piped or decisions.accumulate > 1 or not job.gradients:
        return None
    look, laid = judge.look(decisions), judge.laid(decisions, job)
    kind = [laid.job.category[k] for k in look.first.tolist()]
    forward = np.flatnonzero([c is Category.FORWARD for c in kind])
    update = np.flatnonzero([c is Category.OPTIMIZER for c in kind])
    backward = np.setdiff1d(np.arange(len(kind)), np.concatenate([forward, update]))
    place = np.full(len(job.names), -1)
    normal = laid.origin >= 0
    place[laid.origin[normal]] = look.group[normal]
    starts = bucket_starts(decisions, len(job.gradients))
    wanted = place[waits_for]
    first_use = np.minimum.reduceat(wanted, starts)

    bucket, line, each = judge.parts_of(look.nbytes, look.parts)
    through = np.cumsum(look.group_s[backward])
    made = np.searchsorted(backward, look.of_bucket)
    rank = first_use[bucket] if priority else np.zeros(len(bucket), np.int64)
    pushed, push_order = _served(through[made][bucket], each, line, rank)
    _, pull_order = _served(pushed, each, line, rank)

    num, b, f = len(bucket), len(backward), len(forward)
    share = np.bincount(np.searchsorted(forward, wanted), weights=[g.nbytes for g in job.gradients], minlength=f)
    again = look.group_s[forward] + look.group_s[update].sum() * share / share.sum()
    push, pull = b + f + np.arange(num), b + f + num + np.arange(num)
    chain = np.arange(b + f)
    home = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(wanted))))  # the bucket of each gradient
    pairs = np.unique(np.stack([home, np.searchsorted(forward, wanted)], axis=1), axis=0)
    arrives = [np.stack([pull[bucket == h], np.full(np.count_nonzero(bucket == h), b + k)], axis=1) for h, k in pairs]
    edges = [
        np.stack([chain[:-1], chain[1:]], axis=1), np.stack([made[bucket], push], axis=1),
        np.stack([push, pull], axis=1), *arrives, *_along(push_order, push), *_along(pull_order, pull),
    ]  # fmt: skip
    lines = int(line.max()) + 1
    tasks = Tasks.of(
        devices=[Device(name="each worker", num_ranks=job.workers)],
        streams=[Stream(device=0, name="compute", computes=True)]
        + [Stream(device=0, name=f"link {s} {way}") for way in ("in", "out") for s in range(lines)],
        stream=np.concatenate([np.zeros(b + f, np.int64), 1 + line, 1 + lines + line]),
        seconds=np.concatenate([look.group_s[backward], again, each, each]), edges=np.concatenate(edges),
    )  # fmt: skip
    return replay(tasks).span_s


def _served(
    ready: np.ndarray, seconds: np.ndarray, line: np.ndarray, rank: np.ndarray
) -> tuple[np.ndarray, list[list[int]]]:
    """Ends, and the order on each line: of what is there, the lowest rank first, then first come first served."""
    ends, orders = np.zeros(len(ready)), list[list[int]]()
    for one in np.unique(line).tolist():
        mine = np.flatnonzero(line == one)
        comes = mine[np.lexsort((mine, ready[mine]))].tolist()
        now, heap, order = 0.0, list[tuple[int, float, int]](), list[int]()
        while comes or heap:
            if not heap:
                now = max(now, float(ready[comes[0]]))
            while comes and ready[comes[0]] <= now:
                i = comes.pop(0)
                heappush(heap, (int(rank[i]), float(ready[i]), i))
            i = heappop(heap)[2]
            now += float(seconds[i])
            ends[i] = now
            order.append(i)
        orders.append(order)
    return ends, orders


def _along(orders: list[list[int]], tasks: np.ndarray) -> list[np.ndarray]:
    return [np.stack([tasks[order[:-1]], tasks[order[1:]]], axis=1) for order in orders]
