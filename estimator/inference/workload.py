"""What a model is asked: how many sequences at once, how long, and which phase of an answer. Knows no model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum

__all__ = ["MOST_TOKENS", "Requests", "ServingPhase"]

MOST_TOKENS = 10**8  # of a sequence; of sequences at once as many


class ServingPhase(Enum):
    """Prefill reads a prompt and gives its first token; decode gives the others, one by one."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """`batch` sequences at once over all replicas.

    In prefill each is a prompt of `context` tokens. In decode each has `context` tokens in the cache when the first of
    `output` tokens is decoded, and one more for each. The cache is sized for both together.

    `routing_skew`: how unevenly tokens load experts, as in training (estimator/workload.py); the fullest rank counts.
    `acceptance`: the chance that a drafted token is what the model would have said, given that those before it were.
    """

    phase: ServingPhase
    batch: int
    context: int
    output: int = 1
    routing_skew: float = 0.0
    acceptance: float = 0.8  # assumption, near what DeepSeek-V3 reports of its second token (arXiv:2412.19437, 5.4.3)

    def __post_init__(self) -> None:
        for name in ("batch", "context", "output"):
            if not 1 <= getattr(self, name) <= MOST_TOKENS:
                raise ValueError(f"{name} must be from 1 to {MOST_TOKENS}, but got {getattr(self, name)}")
        if not 0.0 <= self.routing_skew < math.inf:
            law = "routing_skew must be a number of at least 0"
            raise ValueError(f"{law}, but got {self.routing_skew}; 0 is balanced routing")
        if not 0.0 <= self.acceptance <= 1.0:
            raise ValueError(f"acceptance must be from 0 to 1, but got {self.acceptance}; 0.8 for one")

    def but(self, name: str, value: float) -> Requests:
        """A copy with one of the two numbers changed that are no counts."""
        assert name in {"routing_skew", "acceptance"}
        return replace(self, **{name: value})  # type: ignore[arg-type]  # a number, as both are

    @property
    def longest(self) -> int:
        """Tokens of a sequence when its last one is decoded."""
        return self.context + self.output

    def tokens_a_pass(self, drafts: int) -> float:
        """Tokens that a pass over so many drafts gives, as expected: those up to the first that is refused, and one.

        (1 - a^(d+1)) / (1 - a): Leviathan 2023, arXiv:2211.17192, Eq. 1.

        >>> Requests(phase=ServingPhase.DECODE, batch=1, context=1, acceptance=0.5).tokens_a_pass(2)
        1.75
        """
        return sum(self.acceptance**i for i in range(drafts + 1))
