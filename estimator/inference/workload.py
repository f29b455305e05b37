"""What a model is asked: how many sequences at once, how long, and which phase of an answer. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    phase: ServingPhase
    batch: int
    context: int
    output: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "context", "output"):
            if not 1 <= getattr(self, name) <= MOST_TOKENS:
                raise ValueError(f"{name} must be from 1 to {MOST_TOKENS}, but got {getattr(self, name)}")

    @property
    def longest(self) -> int:
        """Tokens of a sequence when its last one is decoded."""
        return self.context + self.output
