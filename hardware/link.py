"""States what one link gives one chip, one way. Of collectives it knows only what share of the wire they reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hardware._errors import reject

__all__ = ["Collective", "LinkSpec"]

MOST_PAIR_LOSS = 4.0  # with which a pair would reach nothing


class Collective(Enum):
    """Traffic patterns whose achieved share of the wire differs."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    P2P = "p2p"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A chip's access to one tier of the network.

    Attributes:
        bytes_per_s: wire rate one way per chip; half of a figure that counts both directions.
        latency_s: of each further member of a ring (a hop).
        setup_s: of a collective as a whole, whatever its size and members.
        efficiency: achieved / wire of large messages, where `by_collective` has nothing closer.
        by_collective: bus bandwidth / wire of large messages. All-reduce can exceed the others: switches reduce in
            flight, which the ring's 2(n-1)/n does not know.
        pair_loss: groups of n members reach 1 - pair_loss / n^2 of these shares: few partners fill few links, channels
            and copy engines.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    efficiency: float
    source: str
    setup_s: float = 0.0
    by_collective: Mapping[Collective, float] = field(default_factory=dict, hash=False)
    pair_loss: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bytes_per_s) and self.bytes_per_s > 0):
            law = f"link {self.name}: bytes_per_s must be above 0"
            reject(law, self.bytes_per_s, "give the wire rate one way per chip in bytes per second")
        for name in ("latency_s", "setup_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                reject(f"link {self.name}: {name} must be at least 0", value, "give seconds")
        if not 0 <= self.pair_loss < MOST_PAIR_LOSS:
            law = f"link {self.name}: pair_loss must be at least 0 and below {MOST_PAIR_LOSS:g}"
            reject(law, self.pair_loss, "a pair reaches 1 - pair_loss / 4 of what large groups do")
        for key, value in (("efficiency", self.efficiency), *((c.value, e) for c, e in self.by_collective.items())):
            if not 0 < value <= 1:
                reject(f"link {self.name}: {key} must be in (0, 1]", value, "give achieved / wire")

    def achieved_bytes_per_s(self, collective: Collective | None = None, members: Any = math.inf) -> Any:  # noqa: ANN401
        """Bus bandwidth that large messages of this kind reach, one way per chip, in a group of so many members.

        Plain for a plain number of members, an array for an array.

        >>> wire = LinkSpec(name="w", bytes_per_s=100e9, latency_s=1e-6, efficiency=0.8, source="example", pair_loss=1)
        >>> wire.achieved_bytes_per_s(Collective.ALL_REDUCE), wire.achieved_bytes_per_s(Collective.ALL_REDUCE, 2)
        (80000000000.0, 60000000000.0)
        """
        share = self.efficiency if collective is None else self.by_collective.get(collective, self.efficiency)
        return self.bytes_per_s * share * (1.0 - self.pair_loss / (members * members))
