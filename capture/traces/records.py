"""What one rank recorded, whatever wrote it down: the form that every importer gives. Reads no file, joins no ranks.

Letters: N events, E edges, S streams, M samples of memory. Times are seconds after `epoch_ns` on the rank's own clock:
a float counts microseconds exactly over centuries only near its zero. Nothing here is aligned between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

__all__ = ["KINDS", "EventColumns", "Group", "Kind", "RankTrace", "Topology"]


class Kind(Enum):
    """What an event is. The order is that of the codes in `RankTrace.kind`."""

    COMPUTE = "compute"
    COLLECTIVE = "collective"  # all of it on this rank, from its start on the link to its end
    SEND = "send"
    RECV = "recv"
    COPY = "copy"  # between host and device, or within a device
    HOST = "host"  # of the processor that launches
    ITERATION = "iteration"  # a mark that spans one iteration; takes no stream's time


KINDS = tuple(Kind)


class Topology(Enum):
    """How a collective travels, where the recorder knows."""

    UNKNOWN = "unknown"
    RING = "ring"
    TREE = "tree"
    HIERARCHICAL = "hierarchical"
    PARAMETER_SERVER = "parameter_server"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group. `ranks`: its members in order, empty where the recorder does not say."""

    name: str
    size: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EventColumns:
    """N events in columns, of one rank (RankTrace) or of all (joined.Events), whose tables the indices point into.

    kind, stream, name [N]: index into KINDS, `streams`, `names`. start_s, end_s [N]. posted_s [N]: when the operation
    was enqueued or posted, NaN where unknown (never after `start_s`). iteration [N]: counted from 0, -1 outside of any.
    group [N]: index into `groups`, -1 none. sequence [N]: order among the operations of its group on this rank that
    must pair with other ranks, -1 none. nbytes [N]: what is sent or reduced, NaN unknown; of a compute event the bytes
    of the tensor that it makes, where known. peer [N]: the other rank of a SEND or RECV, -1 none. transaction [N]:
    index into `transactions`, equal texts on two ranks are one transfer, -1 none. tensor [N]: index into `tensors` (a
    tensor, or the bucket that holds several), -1 none.

    before, after [E]: edges that the recorder knows (`after` may not start before `before` has ended). Order on a
    stream is no edge here.
    """

    names: tuple[str, ...]
    transactions: tuple[str, ...]
    tensors: tuple[str, ...]
    kind: np.ndarray
    stream: np.ndarray
    name: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    posted_s: np.ndarray
    iteration: np.ndarray
    group: np.ndarray
    sequence: np.ndarray
    nbytes: np.ndarray
    peer: np.ndarray
    transaction: np.ndarray
    tensor: np.ndarray
    before: np.ndarray
    after: np.ndarray

    def __len__(self) -> int:
        return len(self.start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace(EventColumns):
    """N events of one rank in order of start.

    source: the file, for messages. format: what wrote it, such as "kineto". world: ranks of the job, None unknown.
    machine: what the clock belongs to; None where unknown. job: what tells jobs apart (an id, or ""), epoch_ns: the
    rank's clock at second 0. topology: how collectives travel. memory_s, memory_bytes [M]: allocated on the device at
    these seconds. notices: what the importer assumed or left out, one sentence each.
    """

    source: str
    format: str
    rank: int
    world: int | None
    machine: str | None
    job: str
    epoch_ns: int
    streams: tuple[str, ...]
    groups: tuple[Group, ...]
    topology: Topology
    memory_s: np.ndarray
    memory_bytes: np.ndarray
    notices: tuple[str, ...] = ()
