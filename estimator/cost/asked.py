"""A cost backend of a user, asked about one op of plain sizes at a time and never twice about the same content.

Our own backends answer for all rows of a batch at once. One that looks up a table, or runs a simulator, answers for one
op: this asks it for each distinct row of a batch, and keeps the answers under a hash of all that they depend on.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from estimator.cost.price import Confidence
from estimator.cost.work import Work
from estimator.op import Array, Op
from estimator.precision import PrecisionRecipe
from hardware.chip import ChipSpec

__all__ = ["Asked", "OwnBackend", "content_hash"]


class OwnBackend(Protocol):
    """What a user brings. `seconds` is the whole latency of one op alone on the chip, launch and memory included.

    Sizes of the op and of its work are plain floats. Answers must follow from the arguments alone.
    """

    name: str
    priority: int

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """Whether it has an answer. May look at all of an op but its sizes."""

    def seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> float:
        """Seconds of one op."""


@dataclass(slots=True)
class Asked:
    """A user's backend in the chain of ours."""

    inner: OwnBackend
    name: str
    priority: int
    confidence: Confidence = Confidence.MEDIUM
    whole: bool = True
    answers: dict[bytes, float] = field(default_factory=dict)

    def covers(self, op: Op, chip: ChipSpec) -> bool:
        """As it says."""
        return bool(self.inner.covers(op, chip))

    def compute_seconds(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> Array:
        """Seconds, for each row of the sizes."""
        sizes = [d.size for d in op.dims], [amount.flops, amount.nbytes, amount.behind, *amount.gemm]
        rows = max(np.size(x) for part in sizes for x in part)
        if rows == 1:
            return self._one(_row(op, 0), _work_row(amount, 0), chip, recipe)
        return np.array([self._one(_row(op, i), _work_row(amount, i), chip, recipe) for i in range(rows)])

    def _one(self, op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> float:
        key = content_hash(op, amount, chip, recipe)
        if key not in self.answers:
            found = self.inner.seconds(op, amount, chip, recipe)
            if not isinstance(found, int | float) or not 0 <= found < math.inf:
                law = f"cost backend {self.name!r} must answer in seconds of at least 0"
                raise ValueError(f"{law}, but said {found!r} of {op.name} on {chip.name}; mend it or take it out")
            self.answers[key] = float(found)
        return self.answers[key]


def content_hash(op: Op, amount: Work, chip: ChipSpec, recipe: PrecisionRecipe) -> bytes:
    """What an answer may depend on, as 16 bytes. Not the name of an op, nor what its tensors are called."""
    content = (
        op.kind.value, op.component.value, op.phase.value, op.role.value, op.passes, op.rides, op.visible, op.reach,
        op.selects, [(float(d.size), d.axis.value, d.units) for d in op.dims], len(op.inputs), len(op.outputs),
        float(amount.flops), float(amount.nbytes), float(amount.behind), [float(x) for x in amount.gemm],
        amount.dtype.value, amount.matrix, chip, recipe.name,
    )  # fmt: skip
    return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()


def _number(value: Any, i: int) -> float:  # noqa: ANN401 - a size, plain or of every row
    return float(value) if np.size(value) == 1 else float(value[i])


def _row(op: Op, i: int) -> Op:
    return op.but(dims=tuple([d._replace(size=_number(d.size, i)) for d in op.dims]))


def _work_row(amount: Work, i: int) -> Work:
    a, b, c, d = (_number(x, i) for x in amount.gemm)
    return amount._replace(flops=_number(amount.flops, i), nbytes=_number(amount.nbytes, i), gemm=(a, b, c, d),
                           behind=_number(amount.behind, i))  # fmt: skip
