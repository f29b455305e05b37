"""What communicates while the loop computes: takes flat tensors, tells when each is summed over all ranks.

A ring has one thread, and one tensor under way at once, in the order in which they came: all ranks must agree on it. A
parameter server has threads of its own (server.py). What fails in them fails in the loop, where it waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from capture.profile.recorder import Recorder
from capture.profile.ring import PartBytes, Ring
from capture.profile.server import ParameterServer
from capture.traces.records import Topology

if TYPE_CHECKING:
    import torch

__all__ = ["Communicator", "communicator"]

Then = Callable[[BaseException | None], None]


class Communicator(Protocol):
    """Sums flat tensors over all ranks, in place."""

    def submit(
        self, flat: torch.Tensor, bucket: int, recorder: Recorder | None, round: int, copy: int, then: Then
    ) -> None:  # fmt: skip
        """Queues a tensor. `then` is called in another thread, with what went wrong, if anything.

        round: how often this bucket went before in the iteration that is recorded. copy: the number of the event that
        filled it.
        """

    def close(self) -> None:
        """Ends all threads once all tensors are summed. All ranks do."""


def communicator(
    topology: Topology, group: Any, *, part_bytes: PartBytes, servers: Sequence[int], priority: bool  # noqa: ANN401
) -> Communicator:  # fmt: skip
    """The one of a topology. ValueError for one that is not ours, or for options that it has not."""
    if topology is Topology.PARAMETER_SERVER:
        return ParameterServer(group, servers=servers, part_bytes=part_bytes, priority=priority)
    if topology is not Topology.RING:
        raise ValueError(f"gradients travel by ring or parameter_server, but not by {topology.value}; choose one")
    if priority:
        raise ValueError("priority is of a parameter server: in a ring all ranks must agree on the order; leave it out")
    return _InOrder(Ring(group, part_bytes=part_bytes))


@dataclass(frozen=True, slots=True)
class _Work:
    flat: torch.Tensor
    bucket: int
    recorder: Recorder | None
    round: int
    then: Then


class _InOrder:
    """Runs a ring in a thread."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="ring", daemon=True)
        self.thread.start()

    def submit(
        self, flat: torch.Tensor, bucket: int, recorder: Recorder | None, round: int, copy: int, then: Then
    ) -> None:  # fmt: skip
        """As of a Communicator."""
        self.works.put(_Work(flat, bucket, recorder, round, then))

    def close(self) -> None:
        """As of a Communicator."""
        self.works.put(None)
        self.thread.join()

    def _run(self) -> None:
        while (work := self.works.get()) is not None:
            try:
                self.ring.all_reduce(work.flat, work.bucket, work.recorder, work.round)
            except (RuntimeError, ValueError) as error:  # torch.distributed, of a rank that is gone
                work.then(error)
            else:
                work.then(None)
