"""What an order is made of: passes of micro-batches over model chunks. Knows no schedule."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Kind", "Order", "Pass"]


class Kind(Enum):
    """What a pass computes."""

    F = "forward"
    B = "input gradient"
    W = "weight gradient"
    BW = "full backward"
    PAIR = "forward overlapped with a full backward of another micro-batch"


class Pass(NamedTuple):
    """One pass of one micro-batch over one model chunk; a PAIR also names whose backward it runs."""

    kind: Kind
    chunk: int
    micro_batch: int
    back_chunk: int = -1
    back_micro_batch: int = -1


Order = list[list[Pass]]
"""The passes of each rank, in the order in which it runs them."""
