"""How one bucket of gradients travels between workers: transfers, their links and their order, per topology.

A *flow* is T transfers of one bucket, numbered from 0, in arrays: seconds come from bytes and the link, so a flow knows
no rate. Ring: Patarasuk & Yuan 2009, 2 (n - 1) steps of n chunks. Tree: reduced up a binary tree and sent down again,
in parts that follow each other. Hierarchical: chains within machines, a ring of their first workers. Parameter server:
every worker pushes each part to the server that holds it and pulls it once all have pushed (dPRO, arXiv:2205.02473,
section 4.1). Knows neither compute nor seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from capture.traces.records import Topology

__all__ = ["Flow", "flow", "num_steps"]

NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """T transfers of a bucket of 1 byte, [T] each.

    source, target: nodes, workers from 0, servers behind them. share: of the bucket's bytes. inner: within a machine.
    begins: the worker whose own bucket goes into it, -1 where only other transfers do. posts: the worker that must have
    come to this bucket to receive it, -1 where others say so or it always listens. before, after [E]: order.
    ends [?, 2]: (worker, transfer) pairs: a worker has the bucket back when all of its transfers are done.
    """

    source: np.ndarray
    target: np.ndarray
    share: np.ndarray
    inner: np.ndarray
    begins: np.ndarray
    posts: np.ndarray
    before: np.ndarray
    after: np.ndarray
    ends: np.ndarray
    num_servers: int = 0


def num_steps(topology: Topology, workers: int, *, parts: int = 1, per_machine: int = 1) -> int:
    """Transfers of a flow or edges between them, whichever are more: what it takes to make one."""
    if topology is Topology.TREE:
        return 3 * (workers - 1) * parts
    if topology is Topology.PARAMETER_SERVER:
        return workers * (workers + 1) * parts
    members = workers // per_machine if topology is Topology.HIERARCHICAL else workers
    return 6 * members * (members - 1) + 2 * (workers - members)


@lru_cache(maxsize=256)
def flow(
    topology: Topology, workers: int, *, parts: int = 1, servers: int = 1, per_machine: int = 1,
    colocated: bool = False, first: int = 0,
) -> Flow:  # fmt: skip
    """The transfers of one bucket. ValueError for a topology that is not known or counts that do not fit.

    parts: into which a tree or servers cut a bucket (a ring has a chunk per worker). colocated: the first workers
    serve, part 0 on worker `first` among them.
    """
    if workers < 1 or parts < 1 or servers < 1 or per_machine < 1:
        raise ValueError(f"workers, parts, servers and workers per machine must be at least 1, but are {workers}, "
                         f"{parts}, {servers}, {per_machine}")  # fmt: skip
    if workers == 1 and topology is not Topology.PARAMETER_SERVER:
        return _made([], [], [])
    if topology is Topology.RING:
        return _ring(np.arange(workers), workers)
    if topology is Topology.TREE:
        return _tree(workers, parts)
    if topology is Topology.HIERARCHICAL:
        return _hierarchical(workers, per_machine)
    if topology is Topology.PARAMETER_SERVER:
        return _among_workers(workers, parts, servers, first) if colocated else _servers(workers, parts, servers)
    have = ", ".join(t.value for t in Topology if t is not Topology.UNKNOWN)
    raise ValueError(f"a topology must be one of {have} to be synthesised, but is {topology.value}")


def _made(
    rows: list[tuple[int, int, float, bool, int]], edges: list[tuple[int, int]], ends: list[tuple[int, int]],
    num_servers: int = 0,
) -> Flow:  # fmt: skip
    """From (source, target, share, inner, begins) rows."""
    table = list(zip(*rows, strict=True)) or [()] * 5
    order, last = (np.array(pairs, dtype=np.int64).reshape(-1, 2) for pairs in (edges, ends))
    return Flow(
        source=np.array(table[0], np.int64), target=np.array(table[1], np.int64), share=np.array(table[2], np.float64),
        inner=np.array(table[3], np.bool_), begins=np.array(table[4], np.int64),
        posts=np.full(len(rows), NONE), before=order[:, 0], after=order[:, 1], ends=last, num_servers=num_servers,
    )  # fmt: skip


def _ring(members: np.ndarray, workers: int) -> Flow:
    """Step s on worker r sends to r + 1 what it got in step s - 1, with its own added until step n - 1.

    A message moves once both ends are at its step: each has sent and received all of the step before.
    """
    n = len(members)
    steps = 2 * (n - 1)
    step, rank = (np.ravel(x) for x in np.meshgrid(np.arange(steps), np.arange(n), indexing="ij"))
    number = np.arange(steps * n)
    later = number[step > 0]
    sources = [(rank[later] + k) % n for k in ((-1, 0, 1) if n > 2 else (0, 1))]
    before = np.concatenate([(step[later] - 1) * n + source for source in sources])
    last = number[step == steps - 1]
    return Flow(
        source=members[rank], target=members[(rank + 1) % n], share=np.full(len(number), 1.0 / n),
        inner=np.zeros(len(number), np.bool_), begins=np.where(step < n, members[rank], NONE),
        posts=np.where(step == 0, members[(rank + 1) % n], NONE), before=before, after=np.tile(later, len(sources)),
        ends=np.stack([members[(rank[last] + 1) % n], last], axis=1),
    )  # fmt: skip


def _tree(workers: int, parts: int) -> Flow:
    """Worker w hangs below (w - 1) // 2; each part goes up once it is there from below, and down from the root."""
    rows: list[tuple[int, int, float, bool, int]] = []
    edges, ends = list[tuple[int, int]](), list[tuple[int, int]]()
    up, down = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for part in range(parts):
        for w in range(workers - 1, 0, -1):
            up[part, w] = len(rows)
            rows.append((w, (w - 1) // 2, 1.0 / parts, False, w))
            edges += [(up[part, c], up[part, w]) for c in (2 * w + 1, 2 * w + 2) if c < workers]
        for w in range(1, workers):
            parent = (w - 1) // 2
            down[part, w] = len(rows)
            rows.append((parent, w, 1.0 / parts, False, 0 if parent == 0 else NONE))
            first = [down[part, parent]] if parent else [up[part, c] for c in (1, 2) if c < workers]
            edges += [(k, down[part, w]) for k in first]
            ends.append((w, down[part, w]))
        ends += [(0, up[part, c]) for c in (1, 2) if c < workers]
    return _made(rows, edges, ends)


def _hierarchical(workers: int, per_machine: int) -> Flow:
    """Up a chain of each machine to its first worker, around a ring of those, and down the chains."""
    if workers % per_machine:
        raise ValueError(
            f"workers ({workers}) must be divisible by workers per machine ({per_machine}); give machines of equal size"
        )
    leaders = np.arange(0, workers, per_machine)
    rows: list[tuple[int, int, float, bool, int]] = []
    edges, ends, top = [], [], {}
    for leader in leaders.tolist():
        for w in range(leader + per_machine - 1, leader, -1):
            if w < leader + per_machine - 1:
                edges.append((len(rows) - 1, len(rows)))
            rows.append((w, w - 1, 1.0, True, w))
        top[leader] = len(rows) - 1
    at = len(rows)
    final = top
    if len(leaders) > 1:
        ring = _ring(leaders, workers)
        columns = zip(
            ring.source.tolist(), ring.target.tolist(), ring.share.tolist(), ring.begins.tolist(), strict=True
        )
        for k, (source, target, share, begins) in enumerate(columns):
            rows.append((source, target, share, False, begins))
            if begins >= 0 and per_machine > 1:
                edges.append((top[source], at + k))
        edges += [(b + at, a + at) for b, a in zip(ring.before.tolist(), ring.after.tolist(), strict=True)]
        final = {int(leader): int(k) + at for leader, k in ring.ends}
    for leader in leaders.tolist():
        ends.append((leader, final[leader]))
        before = final[leader]
        for w in range(leader + 1, leader + per_machine):
            edges.append((before, len(rows)))
            before = len(rows)
            rows.append((w - 1, w, 1.0, True, leader if len(leaders) == 1 and w == leader + 1 else NONE))
            ends.append((w, before))
    return _made(rows, edges, ends)


def _servers(workers: int, parts: int, servers: int) -> Flow:
    """Parts go round the servers; each is pulled once all workers have pushed it."""
    part, worker = (np.ravel(x) for x in np.meshgrid(np.arange(parts), np.arange(workers), indexing="ij"))
    num, server = parts * workers, workers + part % servers
    push = np.arange(num)
    pull = num + push
    block = push.reshape(parts, workers)
    before = np.repeat(block, workers, axis=1).ravel()
    after = num + np.tile(block, (1, workers)).ravel()
    return Flow(
        source=np.concatenate([worker, server]), target=np.concatenate([server, worker]),
        share=np.full(2 * num, 1.0 / parts), inner=np.zeros(2 * num, np.bool_),
        begins=np.concatenate([worker, np.full(num, NONE)]), posts=np.full(2 * num, NONE), before=before, after=after,
        ends=np.stack([worker, pull], axis=1), num_servers=min(servers, parts),
    )  # fmt: skip


def _among_workers(workers: int, parts: int, servers: int, first: int) -> Flow:
    """Workers serve: each part goes to the one that holds it, and back once all, that one too, have handed it over."""
    if servers > workers:
        raise ValueError(
            f"servers among workers must be at most as many as these ({workers}), but are {servers}; give fewer"
        )
    rows: list[tuple[int, int, float, bool, int]] = []
    edges, ends, posts = list[tuple[int, int]](), list[tuple[int, int]](), list[int]()
    for part in range(parts):
        server = (first + part) % servers
        others = [w for w in range(workers) if w != server]
        pushes = range(len(rows), len(rows) + len(others))
        pulls = range(pushes.stop, pushes.stop + len(others))
        rows += [(w, server, 1.0 / parts, False, w) for w in others]
        rows += [(server, w, 1.0 / parts, False, NONE) for w in others]
        posts += [NONE] * len(others) + [server] * len(others)
        edges += [(push, pull) for push in pushes for pull in pulls]
        ends += [(server, push) for push in pushes] + list(zip(others, pulls, strict=True))
    return replace(_made(rows, edges, ends), posts=np.array(posts, np.int64))
