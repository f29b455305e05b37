# mypy: disallow-untyped-decorators=False
"""Integers by which jitted code names schedules, and what it asks of one."""

from __future__ import annotations

from typing import Final

from estimator.jit import kernel
from estimator.strategy import Schedule

__all__ = ["CODES", "holds_pairs", "splits_backward"]

GPIPE: Final = 0
ONE_F_ONE_B: Final = 1
INTERLEAVED: Final = 2
ZB_H1: Final = 3
DUALPIPE: Final = 4
FIRST_PROGRAM: Final = 5
"""From here on orders are walked (program.py), for want of a closed form."""
DUALPIPE_V: Final = 5
ZB_H2: Final = 6
ZB_1P: Final = 7
ZB_2P: Final = 8
ZB_V: Final = 9
V_HALF: Final = 10
V_MIN: Final = 11
BREADTH_FIRST: Final = 12

CODES: Final[dict[Schedule, int]] = {
    Schedule.GPIPE: GPIPE,
    Schedule.ONE_F_ONE_B: ONE_F_ONE_B,
    Schedule.INTERLEAVED: INTERLEAVED,
    Schedule.ZB_H1: ZB_H1,
    Schedule.DUALPIPE: DUALPIPE,
    Schedule.DUALPIPE_V: DUALPIPE_V,
    Schedule.ZB_H2: ZB_H2,
    Schedule.ZB_1P: ZB_1P,
    Schedule.ZB_2P: ZB_2P,
    Schedule.ZB_V: ZB_V,
    Schedule.V_HALF: V_HALF,
    Schedule.V_MIN: V_MIN,
    Schedule.BREADTH_FIRST: BREADTH_FIRST,
}
"""Integer by which jitted code names a schedule."""


@kernel
def splits_backward(code: int) -> bool:
    """Whether a schedule runs weight gradients apart."""
    return ZB_H1 <= code <= V_MIN


@kernel
def holds_pairs(code: int) -> bool:
    """Whether a schedule runs passes in pairs whatever overlaps, and counts what they hold."""
    return code == DUALPIPE or code == DUALPIPE_V
