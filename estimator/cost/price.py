"""What one op costs on one chip: the chain of cost backends. Knows nothing of schedules or groups.

Backends answer in order of priority: a table of measured operators that the chip brings (120), tile model (100),
measured curves (30), roofline (0). Each price carries its source: `table` where a row of the table has it,
`interpolated` between rows, `measured` where the curve behind it was fitted to measured operators of this chip and
format, else who said so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from estimator.cost.curves import FLASH_TILE, attention_flops, tile_seconds
from estimator.cost.lookup import Looked, MeasuredTable
from estimator.cost.work import PRODUCTS, Work, work
from estimator.graph import Block
from estimator.op import Array, Op, OpKind, Phase, larger
from estimator.precision import PrecisionRecipe, Role, Tag, apart
from hardware.chip import ChipSpec

__all__ = ["BACKENDS", "Backend", "Confidence", "Price", "TileModel", "by_priority", "kernel_seconds", "piece_seconds",
           "price", "register"]  # fmt: skip

MEMORY_TRAFFIC = 1.3  # bytes that streaming kernels move over the tensors they touch once: statistics, casts and
# transposes, gradients of small weights; fit of shared factors to 478 published steps (docs/accuracy.md)
SCAN_EFFICIENCY = 0.5  # of a scan's small products against attention's, whose masks and exponentials it shares;
# assumption: its matrices are as wide as one chunk and one head's state


class Confidence(Tag):
    """What an answer rests on."""

    HIGH = "high"  # measured operators of this chip and format
    MEDIUM = "medium"  # a model of the kernel, its rates assumed
    LOW = "low"  # FLOPs and bytes over rates


class Price(NamedTuple):
    """Seconds of one op (`[R]` or plain), what bounds it, who said so and how sure that is.

    `looked`: 1 where a table of measured operators said so, 0 elsewhere; then `source` is that of the others.
    """

    seconds: Array
    compute_s: Array
    memory_s: Array
    work: Work
    source: str
    confidence: Confidence = Confidence.LOW
    looked: Array = 0.0


class Backend(Protocol):
    """Something that can say how long an op computes, or takes as a whole (`whole`): memory and launch included."""

    name: str
    priority: int
    confidence: Confidence
    whole: bool

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """Whether this backend has an answer. May look at all of an op but its sizes."""

    def compute_seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Array:
        """Seconds of arithmetic, without memory traffic."""


class TileModel:
    """GEMMs as waves of output tiles over the streaming multiprocessors (estimator/cost/curves.py).

    Rate, ramp and floor are the chip's, fitted to its measured products where there are any. Non-decreasing in m, n, k.
    """

    name = "tile"
    priority = 100
    confidence = Confidence.MEDIUM
    whole = False
    GROUPED = 1.15  # experts' GEMMs over one GEMM of the same tiles; fit of the design study (docs/modelling.md)

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """Weighted GEMMs, single, grouped or in blocks."""
        return op.kind in PRODUCTS

    def compute_seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Array:
        """Seconds of all waves."""
        groups, m, k, n = amount.gemm
        overhead = chip.gemm_overhead(amount.dtype) * (self.GROUPED if op.kind is OpKind.GROUPED_MATMUL else 1.0)
        rate = chip.peak(amount.dtype) * chip.gemm_efficiency[amount.dtype] / overhead
        return tile_seconds(groups, m, k, n, num_sms=chip.num_sms, flops_per_s=rate, ramp_k=chip.ramp_k(amount.dtype))


class MeasuredAttention:
    """Fused attention on chips whose forward kernels were measured: a share of peak by head dim, ramp and tail.

    Backward: 2.5 times forward's FLOPs (arXiv:2307.08691, section 3) on the same curve, and `attention_backward` times
    that, which only tables of one's own show.
    """

    name = "measured"
    priority = 30
    confidence = Confidence.HIGH
    whole = False

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """Fused attention, where the chip's share was measured."""
        return op.kind is OpKind.ATTENTION and "attention_efficiency" in chip.measured

    def compute_seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Array:
        """Seconds of the scores that are formed, of what each row pays besides, and of the longest tile."""
        batch, query, key, heads, qk, value = (d.size for d in op.dims)
        more = attention_flops(
            batch * heads * query, key * op.visible, qk + value, num_sms=chip.num_sms,
            ramp_keys=chip.attention_ramp_keys, tail=chip.attention_tail,
        )  # fmt: skip
        share = chip.attention_share(float(0.5 * (qk + value))) / chip.step_attention  # a head is whole: no rows
        longer = chip.attention_backward if op.phase is Phase.BACKWARD else 1.0
        return longer * (amount.flops * _formed(op) + op.passes * more) / (chip.peak(recipe.attention) * share)


class Roofline:
    """Any op: FLOPs over the engine's rate (Williams 2009, doi:10.1145/1498765.1498785)."""

    name = "roofline"
    priority = 0
    confidence = Confidence.LOW
    whole = False

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """Everything."""
        return True

    def compute_seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Array:
        """Seconds of arithmetic at the achieved rate of the kernel family."""
        if op.kind is OpKind.SCAN:
            return amount.flops / (chip.peak(recipe.attention) * (chip.attention_efficiency * SCAN_EFFICIENCY))
        if op.kind is OpKind.ATTENTION:
            rate = chip.peak(recipe.attention) * chip.attention_efficiency
            return amount.flops * _formed(op) * chip.step_attention / rate
        if amount.matrix:
            rate = chip.peak(amount.dtype) * chip.gemm_efficiency[amount.dtype]
            return amount.flops * chip.gemm_overhead(amount.dtype) / rate
        return amount.flops / chip.vector_flops_per_s[amount.dtype]


def _formed(op: Op) -> float:
    """Scores that a flash kernel forms over those that are seen: of a band, what is left of its outermost tile too."""
    if not op.reach:
        return 1.0
    return min(1.0 + FLASH_TILE / op.reach, 1.0 / op.visible)  # never more than without a window


BACKENDS: list[Backend | MeasuredTable] = [MeasuredTable(), TileModel(), MeasuredAttention(), Roofline()]


def register(backend: Backend) -> None:
    """Puts a backend of a user into the chain, in the place of one of its name. Before anything is priced."""
    BACKENDS[:] = [known for known in BACKENDS if known.name != backend.name] + [backend]


def by_priority(backends: Sequence[Backend | MeasuredTable]) -> tuple[Backend | MeasuredTable, ...]:
    """The order in which backends are asked."""
    return tuple(sorted(backends, key=lambda b: -b.priority))


def _mixed(narrow: Price, wide: Price, share: float) -> Price:
    """A product of which a share runs in the wider format."""
    seconds, compute_s, memory_s, nbytes, looked = (
        (1.0 - share) * a + share * b
        for a, b in (
            (narrow.seconds, wide.seconds), (narrow.compute_s, wide.compute_s), (narrow.memory_s, wide.memory_s),
            (narrow.work.nbytes, wide.work.nbytes), (narrow.looked, wide.looked),
        )
    )  # fmt: skip
    amount = narrow.work._replace(nbytes=nbytes)
    return narrow._replace(seconds=seconds, compute_s=compute_s, memory_s=memory_s, work=amount, looked=looked)


def _looked_up(priced: Price, looked: Looked) -> Price:
    """A price with the seconds that a table has, where it has any."""
    has = 1.0 - np.isnan(looked.seconds)
    if not np.any(has):
        return priced
    seconds = np.where(has, looked.seconds, priced.seconds) if np.size(has) > 1 else looked.seconds
    if not np.all(has):
        return priced._replace(seconds=seconds, looked=has)
    source = "table" if np.all(looked.exact) else "interpolated"
    return priced._replace(seconds=seconds, looked=has, source=source, confidence=Confidence.HIGH)


def price(
    op: Op, block: Block, chip: ChipSpec, recipe: PrecisionRecipe, backends: Sequence[Backend | MeasuredTable] = ()
) -> Price:  # fmt: skip
    """Price of one op of `block`, from the first of `backends` (none given: by priority) that covers it.

    Where a recipe leaves a share of the linear layers in a wider format, the mean of both.
    """
    amount = work(op, block, recipe)
    if recipe.sensitive and amount.matrix and op.role is Role.LINEAR_INPUT:
        narrow, wide = (price(op, block, chip, r, backends) for r in apart(recipe))
        return _mixed(narrow, wide, recipe.sensitive)
    looked: Looked | None = None
    for backend in backends or by_priority(BACKENDS):  # a plain loop: called for every op of a price row
        if backend.covers(op, chip):
            if not isinstance(backend, MeasuredTable):
                break
            looked = backend.look_up(op, block, amount, chip, recipe)
    assert not isinstance(backend, MeasuredTable)
    priced = _priced(backend, op, amount, chip, recipe)
    return priced if looked is None else _looked_up(priced, looked)


def _priced(backend: Backend, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Price:
    compute = backend.compute_seconds(op, amount, chip, recipe)
    moved = amount.nbytes if amount.matrix else amount.nbytes * MEMORY_TRAFFIC
    rate = chip.hbm_bytes_per_s * chip.hbm_efficiency
    memory, behind = moved / rate, amount.behind / rate
    seconds = larger(compute, memory - behind) + behind + (0.0 if op.rides else kernel_seconds(op, chip))
    if backend.whole:
        return Price(compute, compute, memory, amount, backend.name, backend.confidence)
    fitted = op.kind in PRODUCTS and backend.name == "tile" and f"gemm_efficiency.{amount.dtype.value}" in chip.measured
    if fitted:
        return Price(seconds, compute, memory, amount, "measured", Confidence.HIGH)
    return Price(seconds, compute, memory, amount, backend.name, backend.confidence)


def piece_seconds(
    op: Op, whole_s: Array, share: Array, block: Block, chip: ChipSpec, recipe: PrecisionRecipe,
    backends: Sequence[Backend | MeasuredTable] = (),
) -> Array:  # fmt: skip
    """Of a GEMM that takes `whole_s`, a part that has a `share` of its rows, one of several on streams of their own.

    Tiles of one part fill the last wave of another, so that it takes its share; but every part reads all weights.
    """
    rows, *others = op.dims
    part = op.but(dims=(rows._replace(size=rows.size * share), *others))
    return larger(whole_s * share, price(part, block, chip, recipe, backends).memory_s)


def kernel_seconds(op: Op, chip: ChipSpec) -> float:
    """Ramp-up and drain of an op's kernel on the device."""
    if op.kind in PRODUCTS:
        return chip.gemm_kernel_s
    return chip.attention_kernel_s if op.kind is OpKind.ATTENTION else chip.kernel_s
