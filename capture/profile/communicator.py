"""The thread that communicates while the loop computes: takes flat tensors in order, tells when each is reduced.

What fails in it fails in the loop, where it waits. One tensor is under way at once, as on a link.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from capture.profile.recorder import Recorder

if TYPE_CHECKING:
    import torch

__all__ = ["Communicator", "Reduces"]


class Reduces(Protocol):
    """A topology: sums a flat tensor over all ranks, in place."""

    def all_reduce(self, flat: torch.Tensor, bucket: int, recorder: Recorder | None = None, round: int = 0) -> None:
        """Blocks until the sum is there."""


@dataclass(slots=True)
class _Work:
    """A tensor to reduce, and what to call once it is."""

    flat: torch.Tensor
    bucket: int
    recorder: Recorder | None
    round: int
    then: Callable[[BaseException | None], None] = field(default=lambda error: None)


class Communicator:
    """Runs a topology in a thread of its own."""

    def __init__(self, topology: Reduces) -> None:
        self.topology = topology
        self.works: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="communicator", daemon=True)
        self.thread.start()

    def submit(
        self, flat: torch.Tensor, bucket: int, recorder: Recorder | None, round: int,
        then: Callable[[BaseException | None], None],
    ) -> None:  # fmt: skip
        """Queues a tensor. `then` is called in the thread, with what went wrong, if anything."""
        self.works.put(_Work(flat, bucket, recorder, round, then))

    def close(self) -> None:
        """Ends the thread once all tensors are reduced."""
        self.works.put(None)
        self.thread.join()

    def _run(self) -> None:
        while (work := self.works.get()) is not None:
            try:
                self.topology.all_reduce(work.flat, work.bucket, work.recorder, work.round)
            except (RuntimeError, ValueError) as error:  # torch.distributed, of a rank that is gone
                work.then(error)
            else:
                work.then(None)
