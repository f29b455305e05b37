"""When each tensor of a block comes to life and dies: bytes allocated and freed by each op. Knows no seconds.

What is kept for backward lives from the op that makes it to the last backward op that reads it; what is not lives to
its last reader in the same run; gradients likewise. A block hands its output on: the next block counts it as its input.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from estimator.graph import Block
from estimator.op import Op, OpKind, Phase
from estimator.precision import PrecisionRecipe, Role

__all__ = ["Lives", "kept_bytes", "lifetimes"]

Key = tuple[Phase, str]
Lives = dict[Key, list[float]]
"""Bytes [allocated when the op starts, freed when it ends] by phase and name."""

WEIGHTED = frozenset({OpKind.MATMUL, OpKind.GROUPED_MATMUL, OpKind.BLOCK_MATMUL})


def lifetimes(block: Block, recipe: PrecisionRecipe, *, splits: bool) -> Lives:
    """Of every op of a block. `splits`: weight gradients run in a pass of their own, after the block's backward."""
    return _Lifetimes(block, recipe, splits=splits).lives


def kept_bytes(block: Block, recipe: PrecisionRecipe) -> float:
    """Bytes of all tensors that a block keeps for backward and that may leave the chip meanwhile: not of logits."""
    kept = _kept(block, recipe).items()
    return sum(nbytes for name, nbytes in kept if block.tensors[name].role is not Role.LOGITS)


def _kept(block: Block, recipe: PrecisionRecipe) -> dict[str, float]:
    """Bytes of each tensor kept for backward; one wanted twice in one width is stored once."""
    widths: dict[str, set[float]] = defaultdict(set)
    for name, role in block.saved():
        widths[name].add(recipe.nbytes(role))
    return {name: float(block.tensors[name].elements) * sum(sizes) for name, sizes in widths.items()}


class _Lifetimes:
    """Follows every tensor of one block through forward, recompute and backward."""

    def __init__(self, block: Block, recipe: PrecisionRecipe, *, splits: bool) -> None:
        self.block, self.recipe, self.splits = block, recipe, splits
        self.lives: Lives = defaultdict(lambda: [0.0, 0.0])
        self.forward = list(_computing(block.of_phase(Phase.FORWARD)))
        self.again = list(_computing(block.of_phase(Phase.RECOMPUTE)))
        phases = [(Phase.BACKWARD,), (Phase.WEIGHT_GRAD,)] if splits else [(Phase.BACKWARD, Phase.WEIGHT_GRAD)]
        self.backward = [op for group in phases for op in _computing(block.of_phase(*group))]
        self.kept = _kept(block, recipe)
        for name, nbytes in self.kept.items():
            self._live(nbytes, self._maker(name), self._last_user(name))
        self._pass_on()
        self._remake()
        self._gradients()

    def _live(self, nbytes: float, first: Op, last: Op) -> None:
        self.lives[first.phase, first.name][0] += nbytes
        self.lives[last.phase, last.name][1] += nbytes

    def _maker(self, name: str) -> Op:
        """The forward op that has a kept tensor first: as its output, among what it saves, or as an input."""
        made = [op for op in self.forward if name in op.outputs]
        saving = [op for op in self.forward if any(save.tensor == name for save in op.saves)]
        reading = [op for op in self.forward if name in op.inputs]
        return (made or saving or reading)[0]

    def _users(self, name: str) -> list[Op]:
        """Backward ops that read a tensor of forward: a GEMM's input is read by its weight gradient."""
        names = {
            f"{op.name}.weight_grad" if op.kind in WEIGHTED else f"{op.name}.grad"
            for op in self.forward
            if any(save.tensor == name for save in op.saves)
        }
        return [op for op in self.backward if op.name in names]

    def _last_user(self, name: str) -> Op:
        remakers = [op for op in self.again if name in op.inputs]
        return (self._users(name) or remakers or self.backward or self.forward)[-1]

    def _pass_on(self) -> None:
        """What forward makes and does not keep."""
        for i, op in enumerate(self.forward):
            for name in op.outputs:
                if name not in self.kept:
                    readers = [other for other in self.forward[i + 1 :] if name in other.inputs]
                    self._live(self._bytes(name), op, (readers or [op])[-1])

    def _remake(self) -> None:
        """What recompute brings back."""
        for i, op in enumerate(self.again):
            for name in op.outputs:
                if name not in self.kept:
                    readers = self._users(name) or [other for other in self.again[i + 1 :] if name in other.inputs]
                    self._to_weights(name, op, readers or [op])

    def _gradients(self) -> None:
        """A gradient lives from the first op that adds to it to the last that reads it.

        The outputs of a backward op are gradients of forward's inputs; its inputs those of forward's outputs.
        """
        made: dict[str, Op] = {}
        for op in self.backward:
            for name in () if op.phase is Phase.WEIGHT_GRAD else op.outputs:
                made.setdefault(name, op)
        for op in self.backward:  # what comes from the block behind
            for name in op.inputs:
                made.setdefault(name, op)
        for name, maker in made.items():
            readers = [op for op in self.backward if name in op.inputs]
            self._to_weights(name, maker, readers or [maker])

    def _to_weights(self, name: str, maker: Op, readers: list[Op]) -> None:
        """Lives to its last reader. What only split weight gradients still read waits for them in the GEMM's dtype."""
        soon = [op for op in readers if op.phase is not Phase.WEIGHT_GRAD]
        late = [op for op in readers if op.phase is Phase.WEIGHT_GRAD]
        if not (self.splits and late):
            self._live(self._bytes(name), maker, readers[-1])
            return
        turn = (soon or [maker])[-1]
        self._live(self._bytes(name), maker, turn)
        self._live(float(self.block.tensors[name].elements) * self.recipe.nbytes(Role.LINEAR_INPUT), turn, late[-1])

    def _bytes(self, name: str) -> float:
        tensor = self.block.tensors[name]
        return float(tensor.elements) * self.recipe.nbytes(tensor.role)


def _computing(ops: Iterable[Op]) -> Iterable[Op]:
    return (op for op in ops if op.kind is not OpKind.COLLECTIVE)
