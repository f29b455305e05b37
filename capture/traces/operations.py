"""What a global graph is made of: operations, some of them virtual, and the queues they run on. Builds no graph."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from capture.traces.records import Kind

__all__ = ["OPS", "OP_OF", "Op", "Queue"]


class Op(Enum):
    """What an operation is. The order is that of the codes in `GlobalDfg.op`."""

    COMPUTE = "compute"
    COPY = "copy"
    HOST = "host"
    COLLECTIVE = "collective"
    SEND = "send"  # takes no time: the transfer is the RECV's
    RECV = "recv"
    IN = "in"  # a rank hands a tensor to communication
    OUT = "out"  # and has it back
    MEETING = "meeting"  # all ranks of a collective are there
    BEGIN = "iteration begins"
    END = "iteration ends"


OPS = tuple(Op)
OP_OF = {
    Kind.COMPUTE: Op.COMPUTE, Kind.COPY: Op.COPY, Kind.COLLECTIVE: Op.COLLECTIVE, Kind.SEND: Op.SEND,
    Kind.RECV: Op.RECV, Kind.HOST: Op.HOST,
}  # fmt: skip
"""Kinds of events that become operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What runs one operation at a time: a stream of a rank, or a link into it. `computes`: it holds compute."""

    node: int
    name: str
    computes: bool = False
