"""What one optimizer step must process."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sequences of `seq` tokens, `global_batch` of them a step.

    `routing_skew`: how unevenly the tokens load the experts of a layer, as the standard deviation of the experts'
    token counts over their mean; 0: balanced (estimator/imbalance.py).
    """

    seq: int
    global_batch: int
    routing_skew: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seq", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but got {getattr(self, name)}")
        if not 0.0 <= self.routing_skew < math.inf:
            raise ValueError(
                f"routing_skew must be a number of at least 0, but got {self.routing_skew}; 0 is balanced routing"
            )

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.seq * self.global_batch
