"""Seconds of one kernel as a function of its sizes and a few parameters: what prices use and calibration fits.

Physical and few: a rate at large sizes, whole waves of tiles, what a tile pays beside its products, the longest tile
that no other can hide. Knows no chips by name and no operations. Non-decreasing in every size.
"""

from __future__ import annotations

from estimator.op import Array, larger, rounded_up, smaller

__all__ = ["FLASH_TILE", "SPLIT", "TILE", "attention_flops", "tile_seconds"]

TILE = 128.0  # rows and columns of an output tile; the common choice of vendor libraries on these chips
SPLIT = 4.0  # most ways that k is split when tiles are few; assumption
FLASH_TILE = 128.0  # rows and columns of scores that a flash kernel forms at a time (arXiv:2307.08691, section 3.3)


def tile_seconds(
    groups: Array, m: Array, k: Array, n: Array, *, num_sms: float, flops_per_s: float, ramp_k: float
) -> Array:
    """Seconds of `groups` matrix products as waves of output tiles over the multiprocessors.

    waves * SMs * 2 TILE^2 (k + ramp_k) / rate, waves = ceil(tiles / SMs); fewer tiles than SMs split k up to four ways.
    """
    load = groups * rounded_up(m / TILE) * rounded_up(n / TILE) / num_sms
    # ceil(load) from one full wave on; below that, k is split until every multiprocessor has work.
    waves = larger(smaller(load, 1.0), 1.0 / SPLIT) + larger(rounded_up(load) - 1.0, 0.0)
    return waves * (2 * TILE * TILE) * (k + ramp_k) / (flops_per_s / num_sms)


def attention_flops(rows: Array, keys: Array, width: Array, *, num_sms: float, ramp_keys: float, tail: float) -> Array:
    """FLOPs beyond the causal half that a flash kernel's time corresponds to; `rows` are queries of all heads.

    Every row pays for `ramp_keys` more keys (the masked part of its diagonal tile, prologue, rescaling), and the last
    rows form a tile of all `keys` while others wait: of its seconds a share `tail` shows (Graham 1966: no list schedule
    takes longer than work over processors and the longest piece). `width`: the query-key and the value head dim.
    """
    return 2.0 * width * (rows * ramp_keys + tail * num_sms * FLASH_TILE * keys)
