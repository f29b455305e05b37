"""The global data-flow graph: what all ranks did and what waited for what (dPRO, arXiv:2205.02473, section 4.1).

Local graphs and communication meet in virtual operations: a tensor's In is where a rank hands it to communication, its
Out where it has it back. A SEND and its RECV are joined by their transaction. A collective that is known as a whole
starts once all its ranks are there: its In of every rank leads to one *meeting*, and that to every rank's part.

Transfers are clipped. A part of a collective begins once the last rank is there and the link is free, a RECV once it is
posted, sent and the link is free (section 4.2): what came before was waiting, and a replay finds it again by itself.
What no predecessor explains, the host's time between two operations, is an operation's *lag*, kept apart.

Letters: K operations, E edges, S queues, R ranks. Prices nothing, moves no clock (capture/align.py does), invents no
communication (synthesise.py does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from capture.traces.implied import implied
from capture.traces.joined import Events, event_name, join, missing_ranks
from capture.traces.operations import OP_OF, OPS, Op, Queue
from capture.traces.records import KINDS, Kind, RankTrace, Topology

__all__ = ["GlobalDfg", "build"]

NS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalDfg:
    """K operations on R ranks, in any order; edges make the order.

    ranks, machines [R]. op [K]: index into OPS. queue, name, iteration, tensor [K]: indices, tensor -1 where none,
    iteration -1 outside of any. nbytes [K]: NaN unknown. start_s, end_s [K]: measured, transfers clipped, on one axis.
    seconds [K]: alone. lag_s [K]: from the end of its last predecessor to its start, where that is the host's own.
    release_s [K]: of a BEGIN, its start after the first rank's; 0 else. before, after [E]: edges within an iteration.
    memory: (seconds, bytes) per rank as sampled. notices: what was assumed. topology: how tensors travel, where the
    recorders know and agree.
    """

    ranks: tuple[int, ...]
    machines: tuple[str | None, ...]
    queues: tuple[Queue, ...]
    names: tuple[str, ...]
    tensors: tuple[str, ...]
    iterations: tuple[int, ...]
    op: np.ndarray
    queue: np.ndarray
    name: np.ndarray
    iteration: np.ndarray
    tensor: np.ndarray
    nbytes: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    seconds: np.ndarray
    lag_s: np.ndarray
    release_s: np.ndarray
    before: np.ndarray
    after: np.ndarray
    memory: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    notices: tuple[str, ...] = ()
    topology: Topology = Topology.UNKNOWN

    def __len__(self) -> int:
        return len(self.op)

    @property
    def node(self) -> np.ndarray:
        """The rank's place of each operation, [K]."""
        return np.array([queue.node for queue in self.queues], dtype=np.int64)[self.queue]

    def is_op(self, *kinds: Op) -> np.ndarray:
        """[K] bool: whether an operation is one of these."""
        return np.isin(self.op, [OPS.index(kind) for kind in kinds])

    def without_lags(self, *, but_pauses: bool = False) -> GlobalDfg:
        """Dependencies alone, as if hosts took no time between operations.

        but_pauses: with the pauses of a thread that launches between two operations of its own, which nothing else
        explains: Python, that few recorders see.
        """
        latest = np.full((2, len(self)), -np.inf)
        own = self.queue[self.before] == self.queue[self.after]
        for side, chosen in enumerate((own, ~own)):
            np.maximum.at(latest[side], self.after[chosen], self.end_s[self.before[chosen]])
        pauses = but_pauses & self.is_op(Op.HOST) & (latest[0] >= latest[1])
        return replace(self, lag_s=np.where(pauses, self.lag_s, 0.0))

    def iteration_s(self) -> np.ndarray:
        """Measured seconds [I] of each iteration: from its first rank's begin to its last rank's end."""
        out = []
        for number in self.iterations:
            mine = self.iteration == number
            begin, end = mine & self.is_op(Op.BEGIN), mine & self.is_op(Op.END)
            out.append(float(self.end_s[end].max() - self.start_s[begin].min()))
        return np.array(out)


def build(traces: Sequence[RankTrace], *, alone: bool = False, hosts: bool = True) -> GlobalDfg:
    """The graph of all ranks. ValueError where a rank is missing, transfers do not pair, or the order goes in a circle.

    alone: the local graphs only, for looking at what was measured: ranks may be missing, nothing is paired, and
    transfers last as recorded. hosts: what processors do that launch is operations too; otherwise it is lag.
    """
    if not alone and (lacking := missing_ranks(traces)):
        told = ", ".join(map(str, lacking[:8])) + (" …" if len(lacking) > 8 else "")
        raise ValueError(
            f"{traces[0].source}: a global graph needs all {len(traces) + len(lacking)} ranks, but {told} "
            f"{'is' if len(lacking) == 1 else 'are'} missing; import their traces too, or see "
            "what is there with search trace replay --measured"
        )
    return _Builder(join(traces), alone=alone, hosts=hosts).built()


class _Builder:
    """Collects operations: kept events first, then the virtual ones, then begin and end of each rank's iterations."""

    def __init__(self, events: Events, *, alone: bool, hosts: bool) -> None:
        self.events, self.notices = events, [n for trace in events.traces for n in trace.notices]
        taken = np.isin(events.kind, [KINDS.index(kind) for kind in OP_OF if hosts or kind is not Kind.HOST])
        self.iteration = events.iteration
        if not (events.iteration[taken] >= 0).any():
            self.iteration = np.where(taken, 0, -1)
            self.notices.append("no iteration is marked: the trace counts as one")
        elif (outside := int(np.count_nonzero(taken & (events.iteration < 0) & ~self._probes()))) > 0:
            self.notices.append(f"{outside} events outside of any iteration are left out")
        inside = self.iteration >= 0
        self.marks = np.flatnonzero(events.of(Kind.ITERATION) & inside)
        self.order = implied(events, np.flatnonzero(taken & inside), self.iteration, alone=alone)
        if not self.order.kept:
            raise ValueError(f"{events.traces[0].source}: a trace must hold operations, but has none of a known kind")

    def _probes(self) -> np.ndarray:
        """[N] bool: transfers, which outside of iterations compare clocks."""
        return self.events.of(Kind.SEND) | self.events.of(Kind.RECV)

    def built(self) -> GlobalDfg:
        events, order, kept = self.events, self.order, np.array(self.order.kept, dtype=np.int64)
        num, ranks = len(kept) + len(order.virtual), len(events.traces)
        spans = self._spans(kept)
        virtual = order.virtual
        seconds = [v.second for v in virtual]
        whose, when = np.array([key for key, _ in spans]), np.array([span for _, span in spans])
        known = len(events.names)
        names = (*events.names, *(op.value for op in OPS))

        def column(of_events: np.ndarray, of_virtual: list[int] | list[float], of_spans: np.ndarray) -> np.ndarray:
            return np.concatenate([of_events, np.array(of_virtual, dtype=of_events.dtype), of_spans])

        codes = [OPS.index(OP_OF[KINDS[k]]) if KINDS[k] in OP_OF else -1 for k in range(len(KINDS))]
        ends = np.tile([OPS.index(Op.BEGIN), OPS.index(Op.END)], len(spans))
        op = column(np.array(codes)[events.kind[kept]], [OPS.index(v.op) for v in virtual], ends)
        iteration = column(self.iteration[kept], [v.iteration for v in virtual], np.repeat(whose[:, 1], 2))
        queue = column(
            order.queue, [len(order.queues) + v.node for v in virtual], len(order.queues) + np.repeat(whose[:, 0], 2)
        )
        queues = (*order.queues, *(Queue(node=r, name="order") for r in range(ranks)))
        start = column(order.start_s, seconds, np.ravel(when))
        end = column(events.end_s[kept], seconds, np.ravel(when))
        end = np.where(op == OPS.index(Op.SEND), start, end)
        node = np.array([q.node for q in queues])[queue]
        before, after = self._edges(node, iteration, num, whose)

        latest = np.full(len(op), -np.inf)
        np.maximum.at(latest, after, end[before])
        latest[: len(kept)] = np.maximum(latest[: len(kept)], order.free_s)
        lag = np.where(np.isfinite(latest) & (op != OPS.index(Op.MEETING)), np.maximum(start - latest, 0.0), 0.0)
        iterations, which = np.unique(whose[:, 1], return_inverse=True)
        zero = np.full(len(iterations), np.inf)
        np.minimum.at(zero, which, when[:, 0])
        release = np.zeros(len(op))
        release[num::2] = when[:, 0] - zero[which]
        nothing = np.full(2 * len(spans), -1)
        return GlobalDfg(
            ranks=tuple(trace.rank for trace in events.traces),
            machines=tuple(trace.machine for trace in events.traces),
            queues=queues, names=names, tensors=events.tensors, iterations=tuple(iterations.tolist()), op=op,
            queue=queue, iteration=iteration, name=column(events.name[kept], [known + OPS.index(v.op) for v in virtual],
            known + ends), tensor=column(events.tensor[kept], [v.tensor for v in virtual], nothing),
            nbytes=column(events.nbytes[kept], [np.nan] * len(virtual), np.full(2 * len(spans), np.nan)),
            start_s=start, end_s=end, seconds=np.maximum(end - start, 0.0), lag_s=lag, release_s=release,
            before=before, after=after, memory=tuple(
                (trace.memory_s + (trace.epoch_ns - events.epoch_ns) * NS, trace.memory_bytes)
                for trace in events.traces
            ), notices=tuple(dict.fromkeys(self.notices)), topology=self._topology(),
        )  # fmt: skip

    def _topology(self) -> Topology:
        told = {trace.topology for trace in self.events.traces}
        return told.pop() if len(told) == 1 else Topology.UNKNOWN

    def _spans(self, kept: np.ndarray) -> list[tuple[tuple[int, int], tuple[float, float]]]:
        """(rank, iteration) and its (begin, end): by the mark, and never less than its operations."""
        events, span = self.events, dict[tuple[int, int], tuple[float, float]]()
        rows = np.concatenate([kept, self.marks])
        keys = zip(events.node[rows].tolist(), self.iteration[rows].tolist(), strict=True)
        times = zip(events.start_s[rows].tolist(), events.end_s[rows].tolist(), strict=True)
        for key, (start, end) in zip(keys, times, strict=True):
            low, high = span.get(key, (start, end))
            span[key] = min(low, start), max(high, end)
        iterations = {number for _, number in span}
        for r, trace in enumerate(events.traces):
            if lacking := sorted(iterations - {number for node, number in span if node == r}):
                raise ValueError(
                    f"{trace.source}: every rank must have the same iterations, but rank {trace.rank} lacks "
                    f"{lacking[0]}; record the same ones on all"
                )
        return sorted(span.items())

    def _edges(
        self, node: np.ndarray, iteration: np.ndarray, num: int, whose: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """All edges within iterations, with those from each begin and to each end; ValueError for a circle."""
        edges = np.array(self.order.edges, dtype=np.int64).reshape(-1, 2)
        edges = edges[iteration[edges[:, 0]] == iteration[edges[:, 1]]]
        numbers = np.unique(edges[:, 0] * num + edges[:, 1])  # each once, many times faster than by rows
        edges = np.stack([numbers // max(num, 1), numbers % max(num, 1)], axis=1)
        begins = {(r, number): num + 2 * k for k, (r, number) in enumerate(whose.tolist())}
        at = np.array([begins[key] for key in zip(node[:num].tolist(), iteration[:num].tolist(), strict=True)])
        local = edges[node[edges[:, 0]] == node[edges[:, 1]]]
        heads, tails = np.setdiff1d(np.arange(num), local[:, 1]), np.setdiff1d(np.arange(num), local[:, 0])
        edges = np.concatenate([edges, np.stack([at[heads], heads], axis=1), np.stack([tails, at[tails] + 1], axis=1)])
        self._check_order(edges, num + 2 * len(whose))
        return edges[:, 0].copy(), edges[:, 1].copy()

    def _check_order(self, edges: np.ndarray, count: int) -> None:
        """ValueError that names events of a circle."""
        left = np.bincount(edges[:, 1], minlength=count)
        order = np.argsort(edges[:, 0], kind="stable")
        targets, first = edges[order, 1].tolist(), np.searchsorted(edges[order, 0], np.arange(count + 1)).tolist()
        ready, waits, done = np.flatnonzero(left == 0).tolist(), left.tolist(), 0
        while ready:
            i = ready.pop()
            done += 1
            for j in targets[first[i] : first[i + 1]]:
                waits[j] -= 1
                if waits[j] == 0:
                    ready.append(j)
        if done < count:
            stuck = [event_name(self.events, i) for k, i in enumerate(self.order.kept) if waits[k] > 0]
            raise ValueError(f"{stuck[0]} waits for itself in a circle, with {len(stuck) - 1} more; mend its edges")
