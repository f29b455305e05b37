"""What one op costs on one chip: the chain of cost backends. Knows nothing of schedules or groups.

Backends answer in order of priority: tile model (100), measured tables (30, registered by calibration), roofline (0).
Each price carries its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from estimator.cost.work import Work, work
from estimator.graph import Block
from estimator.op import Array, Op, OpKind, larger, rounded_up, smaller
from estimator.precision import PrecisionRecipe, Role, apart
from hardware.chip import ChipSpec

__all__ = ["BACKENDS", "KERNEL_S", "Backend", "Price", "by_priority", "price"]

MEMORY_TRAFFIC = 1.8  # bytes that streaming kernels move over the tensors they touch once: statistics, casts and
# transposes, gradients of small weights; fit of the design study over published steps (docs/modelling.md)
KERNEL_S = (
    2e-6  # ramp-up and drain of one kernel on the device; assumption: a null kernel takes about 2 us on A100/H100
)


# Rows and columns of scores that a flash kernel forms at a time (arXiv:2307.08691, section 3.3): of a band of w keys it
# forms w and what is left of its outermost tile.
FLASH_TILE = 128.0
SCAN_EFFICIENCY = 0.5  # of a scan's small products against attention's, whose masks and exponentials it shares;
# assumption: its matrices are as wide as one chunk and one head's state


class Price(NamedTuple):
    """Seconds of one op (`[R]` or plain), what bounds it, and who said so."""

    seconds: Array
    compute_s: Array
    memory_s: Array
    work: Work
    source: str


class Backend(Protocol):
    """Something that can say how long an op computes."""

    name: str
    priority: int

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """Whether this backend has an answer."""

    def compute_seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Array:
        """Seconds of arithmetic, without memory traffic."""


class TileModel:
    """GEMMs as waves of output tiles over the streaming multiprocessors.

    seconds = waves * SMs * 2 tile_m tile_n (k + ramp) / (peak * efficiency), waves = ceil(tiles / SMs); a GEMM with
    fewer tiles than SMs splits k up to four ways. Non-decreasing in m, n and k.
    """

    name = "tile"
    priority = 100
    TILE = 128.0  # rows and columns of an output tile; the common choice of vendor libraries on these chips
    RAMP = 128.0  # k-steps worth of prologue and epilogue; assumption
    SPLIT = 4.0  # most ways that k is split when tiles are few; assumption
    GROUPED = 1.15  # experts' GEMMs over one GEMM of the same tiles; fit of the design study (docs/modelling.md)

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """Weighted GEMMs, single, grouped or in blocks."""
        return op.kind is OpKind.MATMUL or op.kind is OpKind.GROUPED_MATMUL or op.kind is OpKind.BLOCK_MATMUL

    def compute_seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Array:
        """Seconds of all waves."""
        groups, m, k, n = amount.gemm
        tiles = groups * rounded_up(m / self.TILE) * rounded_up(n / self.TILE)
        load = tiles / chip.num_sms
        # ceil(load) from one full wave on; below that, k is split until every multiprocessor has work.
        waves = larger(smaller(load, 1.0), 1.0 / self.SPLIT) + larger(rounded_up(load) - 1.0, 0.0)
        rate = chip.peak(amount.dtype) * chip.gemm_efficiency[amount.dtype] / chip.num_sms
        overhead = chip.gemm_slowdown * (self.GROUPED if op.kind is OpKind.GROUPED_MATMUL else 1.0)
        return waves * (2 * self.TILE * self.TILE * overhead) * (k + self.RAMP) / rate


class Roofline:
    """Any op: FLOPs over the engine's rate (Williams 2009, doi:10.1145/1498765.1498785)."""

    name = "roofline"
    priority = 0

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """Everything."""
        return True

    def compute_seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Array:
        """Seconds of arithmetic at the achieved rate of the kernel family."""
        if op.kind is OpKind.SCAN:
            return amount.flops / (chip.peak(recipe.attention) * (chip.attention_efficiency * SCAN_EFFICIENCY))
        if op.kind is OpKind.ATTENTION:
            if op.reach:
                formed = min(1.0 + FLASH_TILE / op.reach, 1.0 / op.visible)  # never more than without a window
                return amount.flops * formed / (chip.peak(recipe.attention) * chip.attention_efficiency)
            return amount.flops / (chip.peak(recipe.attention) * chip.attention_efficiency)
        if amount.matrix:
            return amount.flops * chip.gemm_slowdown / (chip.peak(amount.dtype) * chip.gemm_efficiency[amount.dtype])
        return amount.flops / chip.vector_flops_per_s[amount.dtype]


BACKENDS: list[Backend] = [TileModel(), Roofline()]


def by_priority(backends: Sequence[Backend]) -> tuple[Backend, ...]:
    """The order in which backends are asked."""
    return tuple(sorted(backends, key=lambda b: -b.priority))


def _mixed(narrow: Price, wide: Price, share: float) -> Price:
    """A product of which a share runs in the wider format."""
    seconds, compute_s, memory_s, nbytes = (
        (1.0 - share) * a + share * b
        for a, b in (
            (narrow.seconds, wide.seconds), (narrow.compute_s, wide.compute_s), (narrow.memory_s, wide.memory_s),
            (narrow.work.nbytes, wide.work.nbytes),
        )
    )  # fmt: skip
    return Price(seconds, compute_s, memory_s, narrow.work._replace(nbytes=nbytes), narrow.source)


def price(op: Op, block: Block, chip: ChipSpec, recipe: PrecisionRecipe, backends: Sequence[Backend] = ()) -> Price:
    """Price of one op of `block`, from the first of `backends` (none given: by priority) that covers it.

    Where a recipe leaves a share of the linear layers in a wider format, the mean of both.
    """
    amount = work(op, block, recipe)
    if recipe.sensitive and amount.matrix and op.role is Role.LINEAR_INPUT:
        narrow, wide = (price(op, block, chip, r, backends) for r in apart(recipe))
        return _mixed(narrow, wide, recipe.sensitive)
    for backend in backends or by_priority(BACKENDS):  # a plain loop: called for every op of a price row
        if backend.covers(op, chip):
            break
    compute = backend.compute_seconds(op, amount, chip, recipe)
    moved = amount.nbytes if amount.matrix else amount.nbytes * MEMORY_TRAFFIC
    memory = moved / (chip.hbm_bytes_per_s * chip.hbm_efficiency)
    seconds = larger(compute, memory) + (0.0 if op.rides else KERNEL_S)
    return Price(seconds, compute, memory, amount, backend.name)
