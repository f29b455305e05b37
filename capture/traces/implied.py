"""The order of a job that its recorder need not say: along streams and links, into communication and out of it.

- A stream runs its operations one after the other.
- A rank hands a tensor over when the last compute that ended before the transfer was posted has ended (of a bucket of
  gradients: the backward operation that makes its last tensor).
- A SEND or RECV of a tensor waits for what its rank last received of that tensor from each peer and reduced of it; the
  first of a tensor (its reduction, on a server that works too) waits for the tensor, and for what its communication
  thread did before.
- Compute waits for a tensor where its stream stood idle until the tensor was there; and the first compute after the
  last tensor of an iteration (the update) waits for all of them.

Edges that the recorder gives count as well, and those into or out of communication replace the guesses above.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from capture.traces.joined import Events, collectives, transfers
from capture.traces.operations import Op, Queue
from capture.traces.records import KINDS, Kind

__all__ = ["Implied", "implied"]

TOUCH_S = 1e-6
"""Recorders that count microseconds round an end above the start that follows it by this much."""
WAITED = 5.0
"""A stream waits where it stands idle for this many times its median pause (an assumption) …"""
PROMPT = 0.5
"""… and goes on within this share of the pause once the tensor is there (an assumption)."""

Slot = tuple[int, int, int]  # node, iteration, tensor; transfers without a tensor are one each, below -1


@dataclass(frozen=True, slots=True)
class Virtual:
    """An operation that nobody recorded, of no length, at a second."""

    op: Op
    node: int
    tensor: int
    iteration: int
    second: float


@dataclass(slots=True)
class Implied:
    """Operations: `kept` events [K], then virtual ones. Edges number them in that order.

    kept: index of each event. start_s: clipped. free_s: when its link was free, -inf where nothing was before.
    queue, queues: where each kept event runs. edges: (before, after).
    """

    kept: list[int]
    start_s: np.ndarray
    free_s: np.ndarray
    queue: np.ndarray
    queues: list[Queue]
    virtual: list[Virtual] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)


def implied(events: Events, kept: np.ndarray, iteration: np.ndarray, *, alone: bool) -> Implied:
    """Queues, clipped starts, virtual operations and edges. alone: local order only, nothing is paired or clipped."""
    return _Implied(events, kept, iteration).found(alone=alone)


class _Implied:
    def __init__(self, events: Events, kept: np.ndarray, iteration: np.ndarray) -> None:
        self.events, self.iteration = events, iteration.tolist()
        self.node, self.kind = events.node.tolist(), events.kind.tolist()
        self.start, self.end, self.tensor = events.start_s.tolist(), events.end_s.tolist(), events.tensor.tolist()
        code = {kind: KINDS.index(kind) for kind in Kind}
        self.codes = code
        self.transfer = {code[Kind.SEND], code[Kind.RECV]}
        self.works = {code[Kind.COMPUTE], code[Kind.COPY]}
        order = kept[np.argsort(events.start_s[kept], kind="stable")].tolist()
        self.moved = {self._slot(i) for i in order if self.kind[i] in self.transfer and self.tensor[i] >= 0}
        whole = code[Kind.COLLECTIVE]
        self.envelope = {self._slot(i): i for i in order if self.kind[i] == whole and self._slot(i) in self.moved}
        hulls = set(self.envelope.values())
        self.order = [i for i in order if i not in hulls]
        self.place = {i: k for k, i in enumerate(self.order)}
        self.at = {i: self.start[i] for i in self.order}
        self.free = dict.fromkeys(self.order, -np.inf)
        self.queues: dict[tuple[int, str], int] = {}
        self.queue: dict[int, int] = {}
        self.computes: set[int] = set()
        self.out = Implied(kept=self.order, start_s=np.zeros(0), free_s=np.zeros(0), queue=np.zeros(0), queues=[])
        self.heads: dict[Slot, int] = {}  # the In of a slot, the Out
        self.tails: dict[Slot, int] = {}
        self.fed = self._fed()

    def found(self, *, alone: bool) -> Implied:
        self._streams()
        if alone:
            self._lay_as_recorded()
        else:
            self.main = self._main_streams()
            self.computing = {i for row, _, _ in self.main.values() for i in row}
            self._meet()
            self._exchange()
            self._recorded()
            self._wait()
        out = self.out
        out.start_s = np.array([self.at[i] for i in self.order])
        out.free_s = np.array([self.free[i] for i in self.order])
        out.queue = np.array([self.queue[i] for i in self.order], dtype=np.int64)
        out.queues = [Queue(node=n, name=name, computes=q in self.computes) for (n, name), q in self.queues.items()]
        return out

    def _fed(self) -> set[Slot]:
        """Slots of which the recorder says what makes them."""
        pairs = zip(self.events.before.tolist(), self.events.after.tolist(), strict=True)
        moves = {*self.transfer, self.codes[Kind.COLLECTIVE]}
        return {
            self._slot(a) for b, a in pairs if self.kind[a] in moves and self.kind[b] in self.works and b in self.place
        }

    def _slot(self, i: int) -> Slot:
        tensor = self.tensor[i] if self.tensor[i] >= 0 else -2 - i
        return self.node[i], self.iteration[i], tensor

    def _enqueue(self, i: int, node: int, name: str) -> int:
        self.queue[i] = self.queues.setdefault((node, name), len(self.queues))
        return self.queue[i]

    def _virtual(self, op: Op, node: int, tensor: int, iteration: int, second: float) -> int:
        self.out.virtual.append(Virtual(op, node, max(tensor, -1), iteration, second))
        return len(self.order) + len(self.out.virtual) - 1

    def _edge(self, before: int, after: int) -> None:
        self.out.edges.append((before, after))

    # ------------------------------------------------------------------------------------------------ along streams

    def _streams(self) -> None:
        """Compute and copies run along their stream; what overlaps there runs beside it."""
        host = self.codes[Kind.HOST]
        for (node, name), mine in self._by_stream(self.works | {host}).items():
            for lane, row in enumerate(self._lanes(mine)):
                for i in row:
                    of = f"{name}: host" if self.kind[i] == host else name
                    queue = self._enqueue(i, node, of if lane == 0 else f"{of} ({lane + 1})")
                    if self.kind[i] == self.codes[Kind.COMPUTE]:
                        self.computes.add(queue)
                for a, b in zip(row[:-1], row[1:], strict=True):
                    self._edge(self.place[a], self.place[b])

    def _by_stream(self, kinds: set[int]) -> dict[tuple[int, str], list[int]]:
        table: dict[tuple[int, str], list[int]] = defaultdict(list)
        stream = self.events.stream.tolist()
        for i in self.order:
            if self.kind[i] in kinds:
                table[self.events.streams[stream[i]]].append(i)
        return table

    def _lanes(self, mine: list[int]) -> list[list[int]]:
        """Events in order of start, each in the first row whose last has ended."""
        rows: list[list[int]] = []
        for i in mine:
            row = next((row for row in rows if self.end[row[-1]] <= self.start[i] + TOUCH_S), None)
            if row is None:
                rows.append(row := [])
            row.append(i)
        return rows

    def _lay_as_recorded(self) -> None:
        for (node, name), mine in self._by_stream(
            set(range(len(KINDS))) - self.works - {self.codes[Kind.HOST]}
        ).items():
            for lane, row in enumerate(self._lanes(mine)):
                for i in row:
                    self._enqueue(i, node, f"{name}: transfers" + (f" ({lane + 1})" if lane else ""))

    def _main_streams(self) -> dict[tuple[int, int], tuple[list[int], list[float], list[float]]]:
        """Of each rank and iteration the compute of the stream that computes most: events, starts, ends.

        What is done to tensors that travel, such as to reduce them, counts only where nothing else is computed.
        """
        lasts: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        computes = [i for i in self.order if self.kind[i] == self.codes[Kind.COMPUTE]]
        own = {self.node[i] for i in computes if self._slot(i) not in self.moved}
        for i in computes:
            if self._slot(i) not in self.moved or self.node[i] not in own:
                lasts[self.node[i]][self.queue[i]] += self.end[i] - self.start[i]
        most = {max(table, key=table.__getitem__) for table in lasts.values()}
        rows: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i in self.order:
            if self.queue.get(i) in most:
                rows[self.node[i], self.iteration[i]].append(i)
        return {key: (row, [self.start[i] for i in row], [self.end[i] for i in row]) for key, row in rows.items()}

    # -------------------------------------------------------------------------------------------- into communication

    def _in(self, slot: Slot, posted: float) -> int:
        """The In of a tensor, after the last compute that had ended when it was posted."""
        node, iteration, tensor = slot
        self.heads[slot] = head = self._virtual(Op.IN, node, tensor, iteration, posted)
        row, _, ends = self.main.get((node, iteration), ([], [], []))
        if slot not in self.fed and (k := bisect_right(ends, posted + TOUCH_S)) > 0:
            self._edge(self.place[row[k - 1]], head)
        return head

    def _posted(self, i: int) -> float:
        posted = float(self.events.posted_s[i])
        return posted if posted == posted else self.start[i]

    def _meet(self) -> None:
        """Collectives: In of each rank, meeting, parts on links, Out of each rank."""
        chosen = np.zeros(len(self.events), dtype=np.bool_)
        chosen[self.order] = True
        which = collectives(self.events, chosen)
        parts: dict[int, list[int]] = defaultdict(list)
        for i in self.order:
            if which[i] >= 0:
                parts[int(which[i])].append(i)
        meets: dict[int, float] = {}
        for members in parts.values():
            posts = {i: self._posted(i) for i in members}
            second = max(posts.values())
            meeting = self._virtual(Op.MEETING, self.node[members[0]], self.tensor[members[0]],
                                    self.iteration[members[0]], second)  # fmt: skip
            for i in members:
                slot = self._slot_of_part(i)
                self._edge(self._in(slot, posts[i]), meeting)
                self._edge(meeting, self.place[i])
                self._enqueue(i, self.node[i], f"link of {self.events.groups[int(self.events.group[i])][0]}")
                self.tails[slot] = tail = self._virtual(Op.OUT, *self._out_of(slot), self.end[i])
                self._edge(self.place[i], tail)
                meets[i] = second
        self._clip(meets)

    def _slot_of_part(self, i: int) -> Slot:
        """A rank may reduce a tensor twice in an iteration: the second is a slot of its own."""
        slot = self._slot(i)
        return (slot[0], slot[1], -2 - i) if slot in self.heads else slot

    def _out_of(self, slot: Slot) -> tuple[int, int, int]:
        return slot[0], slot[2], slot[1]

    def _clip(self, earliest: dict[int, float]) -> None:
        """A transfer starts once it may and what ended before it on its link has ended.

        Two that shared a link's bandwidth are one after the other here; together they take as long. One that overtook
        another goes first, which a queue would not do by itself: an edge says so.
        """
        last: dict[int, int] = {}
        for i in sorted(earliest, key=lambda i: (self.end[i], earliest[i], i)):
            before = last.get(self.queue[i])
            if before is not None:
                self.free[i] = self.end[before]
                if earliest[before] > earliest[i]:
                    self._edge(self.place[before], self.place[i])
            self.at[i] = min(max(earliest[i], self.free[i]), self.end[i])
            last[self.queue[i]] = i

    def _exchange(self) -> None:
        """SEND and RECV: In of each tensor, transfers on links, Out."""
        chosen = np.zeros(len(self.events), dtype=np.bool_)
        chosen[self.order] = True
        send, recv = transfers(self.events, chosen)
        if not len(send):
            return
        sender = dict(zip(recv.tolist(), send.tolist(), strict=True))
        ranks = [trace.rank for trace in self.events.traces]
        for i, s in sender.items():
            self._edge(self.place[s], self.place[i])
            self._enqueue(s, self.node[s], "sends")
            self._enqueue(i, self.node[i], f"link {ranks[self.node[s]]}>{ranks[self.node[i]]}")
        self._clip({i: max(self.start[s], self.start[i]) for i, s in sender.items()})
        self._order_of_transfers(sender)

    def _order_of_transfers(self, sender: dict[int, int]) -> None:
        """What each SEND, RECV and reduction waits for on its own rank."""
        sent = {self._slot(i) for pair in sender.items() for i in pair}
        reduces = {
            i for i in self.order if self.kind[i] in self.works and i not in self.computing and self._slot(i) in sent
        }
        mine = [i for i in self.order if self.kind[i] in self.transfer or i in reduces]
        slots: dict[Slot, dict[int, tuple[list[float], list[int]]]] = defaultdict(dict)
        done: dict[tuple[int, int], tuple[list[float], list[int]]] = defaultdict(lambda: ([], []))
        for i in sorted(mine, key=lambda i: (self.end[i], i)):
            if self.kind[i] == self.codes[Kind.SEND]:
                continue
            source = self.node[sender[i]] if i in sender else -1
            of_peer = slots[self._slot(i)].setdefault(source, ([], []))
            for ends, who in (of_peer, done[self.node[i], self.iteration[i]]):
                ends.append(self.end[i])
                who.append(i)
        for i in mine:
            slot = self._slot(i)
            before = [b for b in (self._latest(table, i) for table in slots[slot].values()) if b is not None]
            for b in before:
                self._edge(self.place[b], self.place[i])
            if not before and (self.kind[i] in self.transfer or self.kind[i] == self.codes[Kind.COMPUTE]):
                self._first_of(slot, i, done)
        for slot, tables in ((slot, tables) for slot, tables in slots.items() if tables):
            last = [who[-1] for _, who in tables.values()]
            self.tails[slot] = tail = self._virtual(Op.OUT, *self._out_of(slot), max(self.end[i] for i in last))
            for i in last:
                self._edge(self.place[i], tail)

    def _first_of(self, slot: Slot, i: int, done: dict[tuple[int, int], tuple[list[float], list[int]]]) -> None:
        """The first transfer of a tensor: after its In, and after what was under way when the tensor was posted."""
        if slot not in self.heads:
            self._in(slot, self._posted(self.envelope.get(slot, i)))
        head = self.heads[slot]
        self._edge(head, self.place[i])
        thread = self._latest(done[self.node[i], self.iteration[i]], i)
        if thread is not None and self.end[thread] > self.out.virtual[head - len(self.order)].second:
            self._edge(self.place[thread], self.place[i])

    def _latest(self, table: tuple[list[float], list[int]], i: int) -> int | None:
        ends, who = table
        k = bisect_right(ends, self.start[i] + TOUCH_S)
        while k > 0 and who[k - 1] == i:
            k -= 1
        return who[k - 1] if k > 0 else None

    # --------------------------------------------------------------------------------------- recorded, and out of it

    def _recorded(self) -> None:
        """Edges of the recorder; those into or out of communication go through its In and Out."""
        hull = {i: slot for slot, i in self.envelope.items()}
        self.told: set[int] = set()  # Outs whose waiters the recorder names
        for b, a in zip(self.events.before.tolist(), self.events.after.tolist(), strict=True):
            if self.iteration[b] != self.iteration[a] or self.iteration[b] < 0:
                continue
            before = self.tails.get(hull[b]) if b in hull else self.place.get(b)
            after = self.heads.get(hull[a]) if a in hull else self.place.get(a)
            if before is None or after is None:
                continue
            if a not in hull and (self.kind[a] == self.codes[Kind.COLLECTIVE] or self._hands_over(b, a)):
                after = self.heads.get(self._slot(a), after)
            if b not in hull and self.kind[b] == self.codes[Kind.COLLECTIVE]:
                before = self.tails.get(self._slot(b), before)
            if before >= len(self.order):
                self.told.add(before)
            self._edge(before, after)

    def _hands_over(self, b: int, a: int) -> bool:
        """Whether b makes what transfer a sends: compute, and no reduction between transfers.

        A server that works too may have received of the tensor before it made its own.
        """
        head = self.heads.get(self._slot(a))
        if head is None or self.kind[a] not in self.transfer or b not in self.computing:
            return False
        return self.end[b] <= self.out.virtual[head - len(self.order)].second + TOUCH_S

    def _wait(self) -> None:
        """Compute that waits for tensors."""
        outs: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
        for (node, iteration, _), tail in self.tails.items():
            outs[node, iteration].append((self.out.virtual[tail - len(self.order)].second, tail))
        for key, found in outs.items():
            row, starts, ends = self.main.get(key, ([], [], []))
            if not row:
                continue
            pauses = [b - a for a, b in zip(ends[:-1], starts[1:], strict=True)]
            usual = float(np.median(pauses)) if pauses else 0.0
            last = bisect_left(starts, max(found)[0] - TOUCH_S)
            for second, tail in found:
                if last < len(row):
                    self._edge(tail, self.place[row[last]])
                k = bisect_left(starts, second - TOUCH_S)
                if tail in self.told or not 0 < k < min(last, len(row)):
                    continue
                pause = pauses[k - 1]
                if ends[k - 1] <= second and pause > WAITED * usual and starts[k] - second <= PROMPT * pause:
                    self._edge(tail, self.place[row[k]])
