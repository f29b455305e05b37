"""A parameter server: workers PUSH parts of gradients to the ranks that serve, and PULL their sums back.

Parts are dealt out over the serving ranks in turn. A serving rank works too: its own parts need no transfer. On each
link one part is under way at once, those before which others yield first: in the order in which they came, or with
`priority` those of later buckets (of earlier layers, which the next forward needs first) before all that waits.

A transfer is a short head, which says what comes, and the part; it is recorded from its posting to its end, with its
transaction. Sums are made in the order in which parts arrive.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capture.profile.recorder import Recorder, current, line
from capture.profile.ring import PartBytes, parts_of_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["ParameterServer"]

PUSH, PULL = 9_000, 9_010
"""Tags of heads; what a head tells of has the next one."""
STOP = -1
STEPS_OF_PART = 2  # PUSH and PULL
FIRST_STEP = 1  # step 0 is what waits for its own rank's gradients; what others push does not

Then = Callable[[BaseException | None], None]
Key = tuple[int, int]  # bucket, part


@dataclass(frozen=True, slots=True)
class _Head:
    """What comes: a part of a bucket, its elements and dtype, in which iteration and round."""

    bucket: int
    part: int = 0
    size: int = 0
    dtype: int = 0
    iteration: int = -1
    round: int = 0

    def numbers(self) -> list[int]:
        return [self.bucket, self.part, self.size, self.dtype, self.iteration, self.round]


@dataclass(slots=True)
class _Pull:
    """A part that a worker waits for: where it goes, and the tensor that it is a part of."""

    view: torch.Tensor
    whole: _Whole


@dataclass(slots=True)
class _Whole:
    """A tensor whose parts are under way."""

    missing: int
    then: Then
    lock: threading.Lock = field(default_factory=threading.Lock)

    def came(self) -> None:
        """One part is back."""
        with self.lock:
            self.missing -= 1
            last = self.missing == 0
        if last:
            self.then(None)


@dataclass(slots=True)
class _Sum:
    """A part on the server: the sum so far, of how many workers, and the reductions that made it."""

    head: _Head
    total: torch.Tensor | None = None
    count: int = 0
    made_by: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class ParameterServer:
    """Sums flat tensors over the ranks of a group by way of the `servers` among them (places in the group)."""

    def __init__(
        self, group: Any = None, *, servers: Sequence[int] = (0,), part_bytes: PartBytes = float("inf"),  # noqa: ANN401
        priority: bool = False,
    ) -> None:  # fmt: skip
        import torch.distributed as dist

        self.group, self.part_bytes, self.priority = group, part_bytes, priority
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.me, self.world = dist.get_rank(), len(self.ranks)
        self.servers = [self.ranks[place] for place in servers if 0 <= place < self.world]
        if len(set(self.servers)) != len(servers) or not servers:
            raise ValueError(f"servers must be different ranks below {self.world}, at least one, but are {[*servers]}")
        self.serves = self.me in self.servers
        self.pulls: dict[Key, _Pull] = {}
        self.sums: dict[Key, _Sum] = {}
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.came: dict[int, tuple[int, int]] = {}  # from each peer: iteration and number of what came last
        self.threads: list[threading.Thread] = []
        self.outgoing: dict[tuple[int, int], _Outgoing] = {}  # by tag and peer
        for peer in self.ranks:
            if peer != self.me and peer in self.servers:
                self._link(PUSH, peer, self._pull)
            if peer != self.me and self.serves:
                self._link(PULL, peer, self._serve)

    def _link(self, tag: int, peer: int, receive: Callable[[int], None]) -> None:
        """What goes to a peer and what comes from it, each in a thread of its own."""
        self.outgoing[tag, peer] = _Outgoing(self, tag, peer)
        for run in (self.outgoing[tag, peer].run, lambda: receive(peer)):
            thread = threading.Thread(target=self._guarded, args=(run,), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _guarded(self, run: Callable[[], None]) -> None:
        """What goes wrong on one link goes wrong for all that is under way."""
        try:
            run()
        except (RuntimeError, ValueError) as error:  # torch.distributed, of a rank that is gone
            with self.lock:
                self.error = error
                waiting = list(self.pulls.values())
                self.pulls.clear()
            for pull in waiting:
                pull.whole.then(error)

    def submit(
        self, flat: torch.Tensor, bucket: int, recorder: Recorder | None, round: int, copy: int, then: Then
    ) -> None:  # fmt: skip
        """Sends a tensor's parts off; `then` is called once all are back, or with what went wrong."""
        if self.error is not None:
            then(self.error)
            return
        parts = parts_of_tensor(flat, self.part_bytes, bucket)
        whole = _Whole(len(parts), then)
        iteration = -1 if recorder is None else recorder.iteration
        for number, part in enumerate(parts):
            head = _Head(bucket, number, part.numel(), _dtypes().index(part.dtype), iteration, round)
            with self.lock:
                self.pulls[bucket, number] = _Pull(part, whole)
            server = self.servers[(bucket + number) % len(self.servers)]
            if server == self.me:
                self._add(head, part, copy, mine=True)
            else:
                self.outgoing[PUSH, server].put(head, part, [copy])

    def close(self) -> None:
        """Ends the threads once all that was sent is back. All ranks do."""
        for (tag, _), link in self.outgoing.items():
            if tag == PUSH:
                link.put(_Head(STOP), None, [])
        for thread in self.threads:
            thread.join()

    # ------------------------------------------------------------------------------------------------ of the worker

    def _pull(self, server: int) -> None:
        """Sums that come from a server."""
        while (head := self._head(PULL, server)).bucket != STOP:
            with self.lock:
                pull = self.pulls.pop((head.bucket, head.part))
            self._receive(PULL, server, head, pull.view)
            pull.whole.came()

    # ------------------------------------------------------------------------------------------------ of the server

    def _serve(self, worker: int) -> None:
        """Parts that come from a worker."""
        import torch

        while (head := self._head(PUSH, worker)).bucket != STOP:
            inbox = torch.empty(head.size, dtype=_dtypes()[head.dtype])
            self._add(head, inbox, self._receive(PUSH, worker, head, inbox))
        self.outgoing[PULL, worker].put(head, None, [])

    def _add(self, head: _Head, part: torch.Tensor, after: int, *, mine: bool = False) -> None:
        """A worker's part is there; the last one's completes the sum, which goes to all. after: what made it."""
        key, recorder = (head.bucket, head.part), current()
        with self.lock:
            entry = self.sums.setdefault(key, _Sum(head))
        with entry.lock:
            begin = 0 if recorder is None else recorder.clock()
            if entry.total is not None:
                entry.total.add_(part)
            else:
                entry.total = part.clone() if mine else part  # what this rank hands over, it goes on to use
            if recorder is not None:
                number = next(recorder.ids)
                text = _reduce(head, number, after)
                recorder.events.append((text, begin, recorder.clock(), head.iteration))
                entry.made_by.append(number)
            entry.count += 1
            complete = entry.count == self.world
        if complete:
            self._complete(key, entry)

    def _complete(self, key: Key, entry: _Sum) -> None:
        with self.lock:
            del self.sums[key]
            mine = self.pulls.pop(key)
        for worker in self.ranks:
            if worker != self.me:
                self.outgoing[PULL, worker].put(entry.head, entry.total, entry.made_by)
        assert entry.total is not None
        mine.view.copy_(entry.total)
        mine.whole.came()

    # ------------------------------------------------------------------------------------------------------ on links

    def _head(self, tag: int, peer: int) -> _Head:
        import torch
        import torch.distributed as dist

        numbers = torch.empty(6, dtype=torch.int64)
        dist.recv(numbers, peer, self.group, tag)
        return _Head(*numbers.tolist())

    def _receive(self, tag: int, peer: int, head: _Head, into: torch.Tensor) -> int:
        """Receives what a head told of, after what came over the link before; gives the number of the event."""
        import torch.distributed as dist

        recorder = current()
        begin = 0 if recorder is None else recorder.clock()
        iteration, before = self.came.get(peer, (-1, -1))
        dist.recv(into, peer, self.group, tag + 1)
        if recorder is None:
            return -1
        number, after = next(recorder.ids), [before] if iteration == head.iteration else []
        text = _transfer("RECV", tag, head, peer, self.me, into, number, after)
        recorder.events.append((text, begin, recorder.clock(), head.iteration))
        self.came[peer] = head.iteration, number
        return number


class _Outgoing:
    """What waits to go to one peer, and the thread that sends it, one part at a time."""

    def __init__(self, of: ParameterServer, tag: int, peer: int) -> None:
        self.of, self.tag, self.peer = of, tag, peer
        self.count = itertools.count()
        self.waits: queue.PriorityQueue[tuple[int, int, _Head, torch.Tensor | None, list[int]]] = queue.PriorityQueue()

    def put(self, head: _Head, part: torch.Tensor | None, after: list[int]) -> None:
        """Queues a part; a stop goes last."""
        urgency = 1 if head.bucket == STOP else -head.bucket if self.of.priority else 0
        self.waits.put((urgency, next(self.count), head, part, after))

    def run(self) -> None:
        """Sends until it is told to stop."""
        import torch
        import torch.distributed as dist

        while True:
            _, _, head, part, after = self.waits.get()
            recorder = current()
            begin = 0 if recorder is None else recorder.clock()
            dist.send(torch.tensor(head.numbers(), dtype=torch.int64), self.peer, self.of.group, self.tag)
            if part is None:
                return
            number = -1 if recorder is None else recorder.started()
            dist.send(part, self.peer, self.of.group, self.tag + 1)
            if recorder is not None:
                me = self.of.me
                text = _transfer("SEND", self.tag, head, me, self.peer, part, number, after)
                recorder.events.append((text, begin, recorder.clock(), head.iteration))
                recorder.under_way.discard(number)


def _transfer(
    cat: str, tag: int, head: _Head, source: int, target: int, part: torch.Tensor, number: int, after: list[int]
) -> str:  # fmt: skip
    """The line of a PUSH or PULL."""
    name = "PUSH" if tag == PUSH else "PULL"
    step = FIRST_STEP + STEPS_OF_PART * head.part + (0 if tag == PUSH else 1)
    peer = target if cat == "SEND" else source
    return line(
        f"{name}.{head.bucket}", cat, stream=f"{name.lower()} {source}>{target}", peer=peer, bucket=head.bucket,
        step=step, bytes=part.numel() * part.element_size(), id=number, deps=after,
        tx=f"{name}|{source}>{target}|b{head.bucket}|p{head.part}|r{head.round}",
    )  # fmt: skip


def _reduce(head: _Head, number: int, after: int) -> str:
    """The line of adding a part."""
    step = FIRST_STEP + STEPS_OF_PART * head.part
    return line(f"RED.{head.bucket}", "RED", bucket=head.bucket, step=step, id=number, deps=[after])


def _dtypes() -> list[torch.dtype]:
    """Those that gradients have; a head says the place."""
    import torch

    return [torch.float32, torch.float16, torch.bfloat16, torch.float64]
