"""What one optimizer step must process."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Workload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sequences of `seq` tokens, `global_batch` of them a step."""

    seq: int
    global_batch: int

    def __post_init__(self) -> None:
        for name in ("seq", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but got {getattr(self, name)}")

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.seq * self.global_batch
