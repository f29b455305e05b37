"""What kernels of few rows cost: products of a few tokens, attention of one token behind a cache.

Where rows are few, weights or keys are split over the multiprocessors instead (split-K), so that no wave is left part
empty and tiles are as low as the engine allows: the curves of many rows (estimator/cost/price.py) do not hold. Knows
nothing of schedules or groups. Ignores the sums over the parts: a few numbers per row and part.
"""

from __future__ import annotations

import numpy as np

from estimator.cost.curves import TILE
from estimator.cost.price import Confidence, TileModel
from estimator.cost.work import Work
from estimator.op import Array, Op, OpKind, rounded_up
from estimator.precision import PrecisionRecipe
from hardware.chip import ChipSpec

__all__ = ["FEW", "ROWS", "FewRows", "SplitKeys"]

FEW = 16.0  # rows of a product of the matrix engine's narrowest instruction (PTX, mma.m16n8k16); fewer take as long
ROWS = 64.0  # of its widest (PTX, wgmma, m64), which attention's kernels use


class FewRows(TileModel):
    """Products of fewer rows than a tile has: weights stream through all multiprocessors, whatever their shape.

    At the chip's rate of large products, which is an assumption: memory bounds them but near a whole tile. From a tile
    on as the tile model says.
    """

    priority = 110

    def compute_seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Array:
        """Seconds of all products, few rows rounded up to whole ones of the engine."""
        groups, m, k, n = amount.gemm
        flops = 2.0 * groups * (rounded_up(m / FEW) * FEW) * (k + chip.ramp_k(amount.dtype)) * n
        overhead = chip.gemm_overhead(amount.dtype) * (self.GROUPED if op.kind is OpKind.GROUPED_MATMUL else 1.0)
        few = flops * overhead / (chip.peak(amount.dtype) * chip.gemm_efficiency[amount.dtype])
        if isinstance(m, np.ndarray):
            return np.where(m < TILE, few, super().compute_seconds(op, amount, chip, recipe))
        return few if m < TILE else super().compute_seconds(op, amount, chip, recipe)


class SplitKeys:
    """Fused attention of one query per sequence (Dao 2023, "Flash-Decoding for long-context inference").

    Its dims have the queries of one head of keys as QUERY (passes/packed.py). Long prefill's share of the peak stands
    for these products too, which is an assumption: they are bound by the cache's bytes nearly everywhere.
    """

    name = "roofline"
    priority = 60
    confidence = Confidence.LOW
    whole = False

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """Fused attention."""
        return op.kind is OpKind.ATTENTION

    def compute_seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Array:
        """Seconds of all products, rows rounded up to whole ones of the engine."""
        batch, query, key, heads, qk, value = (d.size for d in op.dims)
        rows = rounded_up(query / ROWS) * ROWS
        flops = 2.0 * batch * heads * rows * key * (qk + value)
        share = chip.attention_share(float(0.5 * (qk + value))) / chip.step_attention
        return flops / (chip.peak(recipe.attention) * share)
