"""What a measured job would take with other links, chips or latency and nothing else: its graph kept, seconds changed.

For jobs whose traffic cannot be made anew (what_if.py), as where ranks compute differently. Every operation stays with
its dependencies on its rank. A transfer takes as long beyond its latency as `bandwidth` leaves it; kernels, or without
a device what the host computes, run `compute` times as fast. Hosts that launch, their pauses and their begins stay.

Refuses what another graph is needed for: buckets, workers, topologies. Neglected: what else a kernel of a collective
does than to move bytes, and transfers that compute slows down.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from capture.traces.dfg import GlobalDfg
from capture.traces.lower import lower
from capture.traces.operations import Op
from capture.traces.synthesise import Link, Synthetic
from capture.traces.what_if import Change, Prediction, link_of

__all__ = ["computes_differ", "is_kept", "predict_kept"]


def is_kept(change: Change) -> bool:
    """Whether the graph of the job stays under the change."""
    others = replace(change, bandwidth=1.0, compute=1.0, latency_s=None)
    return others == Change()


def computes_differ(dfg: GlobalDfg) -> bool:
    """Whether the ranks have unlike numbers of computes in an iteration, so that no worker stands for another."""
    numbers = dfg.node * (max(dfg.iterations) + 1) + dfg.iteration
    counts = np.bincount(numbers[dfg.is_op(Op.COMPUTE) & (dfg.iteration >= 0)])
    return len({int(count) for count in counts if count}) > 1


def predict_kept(dfg: GlobalDfg, change: Change) -> Prediction:
    """Every iteration under the change, of a graph with hosts. ValueError where sizes of transfers are not known."""
    if not is_kept(change):
        raise ValueError(
            "a what-if of buckets, workers or topology needs ranks that compute the same, but these do not; ask for "
            "bandwidth, compute or latency_s, which keep the graph"
        )
    link, _, notices = link_of(dfg)
    notices = [note for note in notices if "count as rings" not in note]
    notices.insert(0, "ranks compute differently: the graph is kept, with other seconds")
    other = _changed(dfg, change, link)
    plain = replace(other, seconds=np.where(_moves(dfg), _plain_s(dfg, change, link), other.seconds))
    found, baseline = (np.array([_run(graph, n).run().span_s for n in dfg.iterations]) for graph in (other, plain))
    return Prediction(
        seconds=found, size_over_bandwidth_s=baseline, shown=_run(other, dfg.iterations[-1]), notices=tuple(notices)
    )


def _moves(dfg: GlobalDfg) -> np.ndarray:
    """[K] bool: what a link carries."""
    return dfg.is_op(Op.RECV, Op.COLLECTIVE)


def _steps(dfg: GlobalDfg) -> np.ndarray:
    """[K] messages one after the other in a transfer: one, or those of a ring."""
    return np.where(dfg.is_op(Op.COLLECTIVE), 2 * (len(dfg.ranks) - 1), 1)


def _changed(dfg: GlobalDfg, change: Change, link: Link) -> GlobalDfg:
    latency_s = np.minimum(_steps(dfg) * link.latency_s, dfg.seconds)
    waits_s = latency_s if change.latency_s is None else _steps(dfg) * change.latency_s
    computes, hosts = dfg.is_op(Op.COMPUTE), bool(dfg.is_op(Op.HOST).any())
    seconds = np.where(_moves(dfg), waits_s + (dfg.seconds - latency_s) / change.bandwidth, dfg.seconds)
    return replace(
        dfg, seconds=np.where(computes, seconds / change.compute, seconds),
        lag_s=dfg.lag_s if hosts else np.where(computes, dfg.lag_s / change.compute, dfg.lag_s),
    )  # fmt: skip


def _plain_s(dfg: GlobalDfg, change: Change, link: Link) -> np.ndarray:
    """[K] size / bandwidth, 2 (n - 1) / n times for a collective: the baseline."""
    n = len(dfg.ranks)
    share = np.where(dfg.is_op(Op.COLLECTIVE), 2.0 * (n - 1) / n, 1.0)
    return np.nan_to_num(share * dfg.nbytes) / (link.bytes_per_s * change.bandwidth)


def _run(dfg: GlobalDfg, number: int) -> Synthetic:
    lowered = lower(dfg, number)
    return Synthetic(tasks=lowered.tasks, ready=lowered.ready, bucket=np.full(len(lowered.tasks), -1))
