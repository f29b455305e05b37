"""What messages say about clocks: bounds on differences of offsets, and how fast the fastest messages were.

theta_i, the offset of node i, is what its clock lacks: true time = measured + theta_i, with theta_0 = 0. A message from
i that cannot have left before s and was there by e says theta_i - theta_j <= e - s. Such bounds are a system of
difference constraints: shortest paths tighten all of them, and a circle of negative length shows that no constant
offsets fit (Cormen et al., Introduction to Algorithms, section 24.4). capture/align.py solves what goes beyond that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from capture.traces.joined import Events, collectives, transfers
from capture.traces.records import Kind

__all__ = ["Ends", "Fastest", "Messages", "Reach", "ends_of", "fastest", "messages_of", "reach"]

ONE_SIDED = ("broadcast", "scatter", "gather", "reduce")
ALL_SIDED = ("allreduce", "allgather", "reducescatter", "alltoall", "sendrecv")
TIES = 4  # fastest messages of a family that tell how far its minimum may be from the true one
FLOOR_S = 1e-6  # no minimum is known better: recorders count microseconds
LONE = 10.0  # a message alone of its pair and size says as little as one this many times as uncertain (an assumption)
TOLERANCE_S = 2e-6  # by which bounds may contradict: both ends are rounded to microseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """P messages: from node `source` to node `target`, [P] each, as recorded on their own clocks.

    family [P]: messages of one family are alike (same ends, tensor and bytes): they should take equally long. nbytes
    [P]: NaN unknown.
    """

    source: np.ndarray
    target: np.ndarray
    family: np.ndarray
    nbytes: np.ndarray
    sent_s: np.ndarray
    posted_s: np.ndarray
    end_s: np.ndarray

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """C collectives that end on all their ranks at once: start_s, end_s [C, R], NaN where a node takes no part."""

    start_s: np.ndarray
    end_s: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """upper_s [R, R]: theta_i - theta_j is at most this, after shortest paths. hops [R, R]: messages on that path."""

    upper_s: np.ndarray
    hops: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest of `count` messages of a pair of nodes and a size: seconds from SEND to the end of RECV, [F] each.

    spread_s: how well it is known, the mean distance to the next few. Near its lower end a delay is distributed like an
    exponential, whose minimum is as far off as its order statistics are apart.
    """

    source: np.ndarray
    target: np.ndarray
    size: np.ndarray
    seconds: np.ndarray
    count: np.ndarray
    spread_s: np.ndarray


def messages_of(events: Events) -> Messages:
    """All SENDs with their RECVs; ValueError where they do not pair."""
    send, recv = transfers(events, np.ones(len(events), np.bool_))
    nbytes = np.where(np.isnan(events.nbytes[send]), events.nbytes[recv], events.nbytes[send])
    size = np.nan_to_num(nbytes, nan=-1.0)
    keys = np.stack([events.node[send], events.node[recv], events.tensor[recv], size], axis=1)
    family = np.unique(keys, axis=0, return_inverse=True)[1] if len(send) else np.zeros(0, np.int64)
    return Messages(
        source=events.node[send], target=events.node[recv], family=np.ravel(family), nbytes=nbytes,
        sent_s=events.start_s[send], posted_s=events.start_s[recv], end_s=events.end_s[recv],
    )  # fmt: skip


def ends_of(events: Events) -> Ends:
    """Collectives in which every rank needs what every rank has: they end together. Others say nothing here."""
    usable = np.array([_all_sided(name) for name in events.names], dtype=np.bool_)
    chosen = events.of(Kind.COLLECTIVE) & usable[events.name]
    which = collectives(events, chosen)
    mine = np.flatnonzero(which >= 0)
    num = int(which.max(initial=-1)) + 1
    start, end = (np.full((num, len(events.traces)), np.nan) for _ in range(2))
    start[which[mine], events.node[mine]] = events.start_s[mine]
    end[which[mine], events.node[mine]] = events.end_s[mine]
    shared = np.count_nonzero(~np.isnan(end), axis=1) > 1
    return Ends(start_s=start[shared], end_s=end[shared])


def _all_sided(name: str) -> bool:
    plain = name.lower().replace("_", "").replace("-", "")
    return any(word in plain for word in ALL_SIDED) or not any(word in plain for word in ONE_SIDED)


def reach(num: int, messages: Messages, ends: Ends) -> Reach:
    """The tightest bounds. ValueError where they contradict each other, so that no constant offsets fit.

    A message is there no sooner than it was sent; no rank of a collective has ended before every other has started.
    """
    upper = np.full((num, num), np.inf)
    np.minimum.at(upper, (messages.source, messages.target), messages.end_s - messages.sent_s)
    for start, end in zip(ends.start_s, ends.end_s, strict=True):
        gap = end[None, :] - start[:, None]
        upper = np.fmin(upper, gap)
    np.fill_diagonal(upper, 0.0)
    hops = np.isfinite(upper) & ~np.eye(num, dtype=np.bool_)
    count = hops.astype(np.int64)
    for k in range(num):  # Floyd and Warshall
        through = upper[:, k, None] + upper[None, k, :]
        nearer = through < upper
        upper = np.where(nearer, through, upper)
        count = np.where(nearer, count[:, k, None] + count[None, k, :], count)
        _check_circle(float(np.diagonal(upper).min()), int(np.argmin(np.diagonal(upper))))
    np.fill_diagonal(upper, 0.0)
    return Reach(upper_s=upper, hops=count)


def _check_circle(worst_s: float, node: int) -> None:
    if worst_s < -TOLERANCE_S:
        raise ValueError(
            f"messages must fit constant clock offsets, but on a circle through node {node} they arrive "
            f"{-worst_s * 1e6:.1f} us before they are sent; clocks drift or transfers are paired wrongly: use fewer "
            "iterations, or record with a probe of the clocks"
        )


def fastest(messages: Messages) -> Fastest:
    """Of each pair of nodes and size."""
    sizes, size = np.unique(np.nan_to_num(messages.nbytes, nan=-1.0), return_inverse=True)
    num = int(max(messages.source.max(), messages.target.max())) + 1
    key = (messages.source * num + messages.target) * len(sizes) + size
    delay = messages.end_s - messages.sent_s
    order = np.lexsort((delay, key))
    key, delay = key[order], delay[order]
    first = np.flatnonzero(np.append(True, key[1:] != key[:-1]))
    count = np.diff(first, append=len(key))
    near = first + np.minimum(TIES, count - 1)
    apart = np.where(near > first, (delay[near] - delay[first]) / np.maximum(near - first, 1), np.nan)
    usual = float(np.nanmedian(apart)) if not np.isnan(apart).all() else FLOOR_S
    apart = np.where(np.isnan(apart), LONE * usual, apart)
    return Fastest(
        source=key[first] // len(sizes) // num, target=key[first] // len(sizes) % num, size=key[first] % len(sizes),
        seconds=delay[first], count=count, spread_s=np.maximum(apart, FLOOR_S),
    )  # fmt: skip
