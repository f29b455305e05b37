# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""What floors are kept in (floors.py): seconds and bytes of one structure, and what is still open. Jitted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from estimator.chunk import TRAFFIC
from estimator.compose import AGAIN, ONCE, PASSES
from estimator.jit import njit
from estimator.lanes import WIDTH
from estimator.memory import ITEMS

__all__ = ["GROUP", "Floors", "Opened", "new_floors", "new_opened", "opened_at"]

GROUP = 8  # recomputes that are held against the front together before one by one
NUM_ITEMS = len(ITEMS)


class Opened(NamedTuple):
    """What may still add to the front: `each` [kinds, H, E, recomputes], where any is `some` [kinds, H, E] and `used`.

    Kinds: ZeRO stages 0, 1, 2, stage 3 under every way to gather, and under any. H: shares on the host. E: EP overlap
    off, on.
    """

    each: np.ndarray
    some: np.ndarray
    used: np.ndarray
    is_root: bool


@njit(cache=True)
def new_opened(levels, num, num_hosts, num_gathers):
    """Everything open, on each of some levels [levels, ...]."""
    kinds = 4 + num_gathers
    return Opened(
        np.ones((levels, kinds, num_hosts, 2, num), np.bool_), np.ones((levels, kinds, num_hosts, 2), np.bool_),
        np.ones((levels, num), np.bool_), True,
    )  # fmt: skip


@njit(cache=True)
def opened_at(opened, level):
    """What is open on one level."""
    return Opened(opened.each[level], opened.some[level], opened.used[level], level == 0)


class Floors(NamedTuple):
    """Scratch for the largest structure. Letters: E 2, EP overlap off and on; B 2, sends that block and that do not.

    Paths: `counts` [3, E, B, PASSES, Q], passes of the path at the corner on each class of chunks, then of paths where
    ZeRO-2 and ZeRO-3 are heavy (`is_refined`: these are there); `start` [E, B], the span beyond those of the first;
    `anchor` [PASSES, Q], `classes` and `spans` in lanes.

    Seconds: `cols`, `r` of one pair of flags; `least` [E, ONCE, K], `least_again` [E, choices, K, AGAIN] under the
    cheapest TP overlap; of chunks `once` [E, Q, ONCE], `repeated` [E, recomputes + 1, Q, AGAIN], the last recompute a
    corner of all; `traffic` [Q, TRAFFIC], `nothing` likewise. Along the path at the corner `dots` [E, recomputes + 1,
    B, 3], the passes with all at home and no ZeRO traffic; `held` [E, recomputes + 1, B, 2], activations on the host's
    link; `unit` [B, 5], weights and gradients there. `zero_dots` [2, E, recomputes + 1, B, Q], classes under ZeRO-2 or
    3 along both paths, where `done` [E, recomputes]; `more` [B], the sum of the corner's; `zeros` [Q]. `update` [4,
    rests], `exposed` [4, 2].

    Bytes of leading ranks: `moving` [E, shares, recomputes, leads] and the least of all recomputes `lowest`; `still`
    [4, leads, 5], weights, gradients, states whole, weights and gradients on the way to the host; `ahead` [gatherings
    + 1, leads], gathered weights, last the least; `sums` [leads], scratch; `bytes` [5, Q] and `line`, scratch.

    `bunch_*`: the least of every GROUP recomputes; `ceilings`: what the front asks of their memory.
    """

    counts: np.ndarray
    start: np.ndarray
    classes: np.ndarray
    anchor: np.ndarray
    cols: np.ndarray
    r: np.ndarray
    least: np.ndarray
    least_again: np.ndarray
    once: np.ndarray
    repeated: np.ndarray
    traffic: np.ndarray
    dots: np.ndarray
    zero_dots: np.ndarray
    done: np.ndarray
    held: np.ndarray
    moving: np.ndarray
    lowest: np.ndarray
    still: np.ndarray
    ahead: np.ndarray
    update: np.ndarray
    unit: np.ndarray
    sums: np.ndarray
    dense: np.ndarray
    expert: np.ndarray
    bytes: np.ndarray
    line: np.ndarray
    exposed: np.ndarray
    bunch_dots: np.ndarray
    bunch_held: np.ndarray
    bunch_moving: np.ndarray
    ceilings: np.ndarray
    more: np.ndarray
    zeros: np.ndarray
    nothing: np.ndarray
    spans: np.ndarray
    is_refined: np.ndarray


@njit(cache=True)
def new_floors(t, num, num_hosts, num_shares, num_gathers):
    """Scratch for the largest structure of these tables, `num` recomputes, and so many ways to keep."""
    kinds, most = t.base.shape[1], np.max(t.layouts[:, 1])
    ranks, leads, choices = np.max(t.layouts[:, 5]), np.max(t.layouts[:, 9]), t.again.shape[1]
    return Floors(
        np.zeros((3, 2, 2, PASSES, most)), np.zeros((2, 2)), np.empty((PASSES * most, WIDTH)),
        np.empty((PASSES, most)),
        np.empty((ONCE, kinds)), np.empty((choices, kinds, AGAIN)),
        np.empty((2, ONCE, kinds)), np.empty((2, choices, kinds, AGAIN)),
        np.empty((2, most, ONCE)), np.empty((2, num + 1, most, AGAIN)), np.empty((most, TRAFFIC)),
        np.zeros((2, num + 1, 2, 3)), np.zeros((2, 2, num + 1, 2, most)), np.empty((2, num), np.bool_),
        np.zeros((2, num + 1, 2, 2)), np.empty((2, num_shares, num, leads)),
        np.empty((2, num_shares, leads)), np.empty((4, leads, 5)), np.empty((num_gathers + 1, leads)),
        np.empty((4, num_hosts)), np.zeros((2, 5)), np.empty(leads), np.empty(ranks), np.empty(ranks),
        np.empty((5, most)), np.empty(NUM_ITEMS), np.empty((4, 2)),
        np.empty((2, num, 2, 3)), np.empty((2, num, 2, 2)), np.empty((2, num_shares, num, leads)), np.empty(num),
        np.zeros(2), np.zeros(most), np.zeros((most, TRAFFIC)), np.empty((1, WIDTH)),
        np.zeros(1, np.bool_),
    )  # fmt: skip
