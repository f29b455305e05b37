"""What the operations of an iteration allocate and free: as the recorder sampled it, else by tensors of known bytes.

Samples tell bytes at moments. Their changes belong to the operation of that rank which started last before them: it
allocates the most that it held beyond what it began with, and frees what it does not leave. Without samples a tensor
lives from the start of the operation that makes it to the end of the last compute that is reached from it through
communication. Runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from capture.traces.dfg import GlobalDfg
from capture.traces.operations import OPS, Op

__all__ = ["Lifetimes", "lifetimes", "sampled_peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """alloc, free [M]: bytes at the start and at the end of each operation. base [R]: held when the iteration begins,
    0 where nothing is sampled.
    """  # noqa: D205 - one sentence would be no clearer

    alloc: np.ndarray
    free: np.ndarray
    base: np.ndarray


def lifetimes(dfg: GlobalDfg, ops: np.ndarray, before: np.ndarray, after: np.ndarray) -> Lifetimes:
    """Of these operations [M], with the edges among them."""
    alloc, free = _of_tensors(dfg, ops, before, after)
    base = np.zeros(len(dfg.ranks))
    node = dfg.node[ops]
    works = dfg.is_op(Op.COMPUTE, Op.COPY, Op.HOST)[ops]
    for r in range(len(dfg.ranks)):
        mine = np.flatnonzero(works & (node == r))
        mine = mine[np.argsort(dfg.start_s[ops[mine]], kind="stable")]
        at, held, base[r] = _samples(dfg, ops, r)
        if len(at) and len(mine):
            owner = mine[np.maximum(np.searchsorted(dfg.start_s[ops[mine]], at, side="right") - 1, 0)]
            alloc[node == r] = free[node == r] = 0.0
            _share(owner, np.diff(held, prepend=base[r]), alloc, free)
    return Lifetimes(alloc=alloc, free=free, base=base)


def sampled_peak(dfg: GlobalDfg, iteration: int) -> np.ndarray:
    """[R] the most bytes that each rank was sampled to hold in an iteration, NaN where it was not sampled."""
    ops = np.flatnonzero(dfg.iteration == iteration)
    found = np.full(len(dfg.ranks), np.nan)
    for r in range(len(dfg.ranks)):
        at, held, base = _samples(dfg, ops, r)
        if len(at):
            found[r] = max(base, float(held.max()))
    return found


def _samples(dfg: GlobalDfg, ops: np.ndarray, r: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Seconds and bytes of a rank's samples within the iteration, and what it held before: by its first, if need be."""
    none = np.zeros(0)
    if not dfg.memory or not len(dfg.memory[r][0]):
        return none, none, 0.0
    at, held = dfg.memory[r]
    mine = ops[dfg.node[ops] == r]
    first = int(np.searchsorted(at, dfg.start_s[mine].min()))
    last = int(np.searchsorted(at, dfg.end_s[mine].max(), side="right"))
    if first == last:
        return none, none, 0.0
    return at[first:last], held[first:last], float(held[max(first - 1, 0)])


def _share(owner: np.ndarray, change: np.ndarray, alloc: np.ndarray, free: np.ndarray) -> None:
    """Puts changes, in order of time, into the bytes of their owners."""
    heads = np.flatnonzero(np.diff(owner, prepend=-1))
    for lo, hi in zip(heads.tolist(), [*heads[1:].tolist(), len(owner)], strict=True):
        held = np.cumsum(change[lo:hi])
        most = max(float(held.max()), 0.0)
        alloc[owner[lo]] += most
        free[owner[lo]] += most - float(held[-1])


def _of_tensors(
    dfg: GlobalDfg, ops: np.ndarray, before: np.ndarray, after: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes allocated at the start and freed at the end of each operation [M], by tensors whose bytes are known."""
    alloc, free = np.zeros(len(ops)), np.zeros(len(ops))
    computes = dfg.op[ops] == OPS.index(Op.COMPUTE)
    travels = np.isin(dfg.tensor[ops], dfg.tensor[ops[dfg.is_op(Op.IN)[ops]]]) & (dfg.tensor[ops] >= 0)
    makes = np.flatnonzero(computes & (dfg.nbytes[ops] > 0) & ~travels)  # buckets stay: a copy into one makes nothing
    if not len(makes):
        return alloc, free
    node = dfg.node[ops]
    order = np.argsort(before, kind="stable")
    to, first = after[order].tolist(), np.searchsorted(before[order], np.arange(len(ops) + 1)).tolist()
    end, is_compute, owner = dfg.end_s[ops].tolist(), computes.tolist(), node.tolist()
    last: dict[int, int] = {}  # of what is not compute: the last compute behind it on the same rank
    for i in np.lexsort((dfg.start_s[ops], dfg.end_s[ops]))[::-1].tolist():
        found = -1
        for j in to[first[i] : first[i + 1]]:
            k = j if is_compute[j] else last.get(j, -1)
            if k >= 0 and owner[k] == owner[i] and (found < 0 or end[k] > end[found]):
                found = k
        last[i] = found
    for i in makes.tolist():
        alloc[i] = dfg.nbytes[ops[i]]
        k = last[i]
        free[k if k >= 0 else i] += alloc[i]
    return alloc, free
