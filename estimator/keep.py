# mypy: disallow-untyped-decorators=False
"""What a rank keeps where: sharded by ZeRO, gathered ahead or for longer (FSDP2), or in the host's memory. Jitted.

Choices alone; memory.py, compose.py and gradients.py say what they cost.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from estimator.jit import kernel

__all__ = ["BUFFERS", "Keep", "at_home", "keep_of", "uses_host"]

BUFFERS: Final = 2
"""Blocks under way at once: of gradients that are reduced, of what travels to the host or from it."""


class Keep(NamedTuple):
    """ZeRO stage; of stage 3: whether weights are freed after forward, blocks gathered ahead; shares on the host."""

    zero: int
    reshard: int
    prefetch: float
    activations: float
    parameters: float
    gradients: float
    states: float


@kernel
def keep_of(asked: Keep, zero: int, overlap_dp: int) -> Keep:
    """What `asked` (of any stage) means under a ZeRO stage with data-parallel overlap on or off.

    Stages below 3 keep weights whole; without overlap nothing is gathered ahead, and the buffers are those of 1.
    """
    return Keep(
        zero, asked.reshard if zero >= 3 else 1, asked.prefetch if zero >= 3 and overlap_dp else 1.0,
        asked.activations, asked.parameters, asked.gradients, asked.states,
    )  # fmt: skip


@kernel
def uses_host(keep: Keep) -> bool:
    """Whether anything is kept in the host's memory."""
    return keep.activations + keep.parameters + keep.gradients + keep.states > 0.0


@kernel
def at_home(keep: Keep) -> Keep:
    """The same with everything on the chip."""
    return Keep(keep.zero, keep.reshard, keep.prefetch, 0.0, 0.0, 0.0, 0.0)
