"""Writes the runs of one block into a script: its ops in order, its traffic cut up where it runs beside compute.

Three patterns run side by side; all else is one op after the other. A tensor-parallel gather or reduction and the GEMMs
that it is fused with go piece by piece; a ring of keys and values goes step by step beside attention; expert traffic
leaves the chip to another micro-batch's pass (unroll.py starts both at once).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from estimator.cost.host import launch_seconds
from estimator.cost.overlap import Side, pieces, side
from estimator.cost.price import piece_seconds, price
from estimator.detail.lifetimes import Lives, lifetimes
from estimator.detail.script import Lane, Script
from estimator.detail.traffic import transfer_of
from estimator.graph import Block
from estimator.op import Group, Op, OpKind, Phase, Traffic
from estimator.passes.shard import CORE_KINDS
from estimator.passes.shared import IN, OUT
from estimator.precision import PrecisionRecipe
from estimator.strategy import CudaGraph, Strategy
from estimator.tasks import Category, Shield
from hardware.system import SystemSpec

__all__ = ["BlockWriter"]

LANE_OF = {Group.TP: Lane.TP, Group.CP: Lane.CP, Group.EP: Lane.EP, Group.ETP: Lane.EP}
CATEGORY_OF = {Group.TP: Category.TP, Group.CP: Category.CP, Group.EP: Category.EP, Group.ETP: Category.EP}
CORE = CORE_KINDS | {OpKind.SOFTMAX}
GRADIENTS = frozenset({Phase.BACKWARD, Phase.WEIGHT_GRAD})
CAST = frozenset({OpKind.MATMUL, OpKind.QUANTIZE})


class _Part(NamedTuple):
    """A share of an op's rows."""

    share: float
    first: bool = True
    last: bool = True


WHOLE = _Part(1.0)


@dataclass(slots=True)
class BlockWriter:
    """Writes one block as one rank runs it. `splits`: weight gradients run in a pass of their own."""

    block: Block
    strategy: Strategy
    system: SystemSpec
    recipe: PrecisionRecipe
    splits: bool
    lives: Lives = field(init=False)
    launched: set[tuple[Phase, str]] = field(init=False)  # kernels that the host launches, graphs at their first
    each_s: float = field(init=False)  # of the host, for each of these

    def __post_init__(self) -> None:
        self.lives = lifetimes(self.block, self.recipe, splits=self.splits)
        self.launched = set(self._launched())
        self.each_s = launch_seconds(self.block, self.system)

    def _launched(self) -> Iterator[tuple[Phase, str]]:
        for phase in Phase:
            in_graph = self.strategy.cuda_graph is CudaGraph.FULL
            for op in self.block.of_phase(phase):
                if op.kind is OpKind.COLLECTIVE or op.rides:
                    continue
                if not (op.captured and in_graph):
                    yield phase, op.name
                in_graph = op.captured

    def forward(self, script: Script) -> None:
        """The block's forward."""
        self._write(script, list(self.block.of_phase(Phase.FORWARD)), Category.FORWARD)

    def backward(self, script: Script) -> None:
        """What runs again, then the gradients of inputs (and of weights, where they are not split off)."""
        self._write(script, list(self.block.of_phase(Phase.RECOMPUTE)), Category.RECOMPUTE)
        phases = (Phase.BACKWARD,) if self.splits else (Phase.BACKWARD, Phase.WEIGHT_GRAD)
        self._write(script, list(self.block.of_phase(*phases)), Category.BACKWARD)

    def weight_gradients(self, script: Script) -> None:
        """The gradients of weights alone."""
        self._write(script, list(self.block.of_phase(Phase.WEIGHT_GRAD)), Category.BACKWARD)

    # ------------------------------------------------------------------------------------------------------ patterns

    def _write(self, script: Script, ops: list[Op], category: Category) -> None:
        ways = {op.beside for op in ops if op.kind is OpKind.COLLECTIVE} & {IN, OUT}
        hiding = [op for op in ops if op.kind is not OpKind.COLLECTIVE and op.beside in ways]
        hiding = [op for op in hiding if op.phase is not Phase.WEIGHT_GRAD]
        ops = [op for op in ops if op not in hiding] if hiding else ops
        at = 0
        while at < len(ops):
            if ops[at].kind is OpKind.COLLECTIVE and ops[at].beside in ways:
                self._beside_shared(script, ops[at], [op for op in hiding if op.beside == ops[at].beside], category)
                at += 1
            else:
                at = self._pattern(script, ops, at, category)

    def _beside_shared(self, script: Script, travel: Op, shared: list[Op], category: Category) -> None:
        """An all-to-all of routed rows while shared experts compute."""
        before = done = list(script.tail)
        sent = self._transfer(script, travel, Shield.SHARED, after=before)
        for op in shared:
            done = [self._compute(script, op, category, after=done)]
        script.tail = [sent, *done]

    def _pattern(self, script: Script, ops: list[Op], at: int, category: Category) -> int:
        """Writes what begins at `at`; where the next begins."""
        op = ops[at]
        if self._rings(ops, at):
            return self._ring(script, ops, at, category)
        if self.strategy.tp > 1 and op.kind in {OpKind.MATMUL, OpKind.COLLECTIVE}:
            if _goes_in_pieces(op):
                end = _run(ops, at + 1, lambda o: o.kind in CAST and o.inputs == ops[at + 1].inputs)
                if self.strategy.overlap.tp and side(op) is Side.AHEAD and end > at + 1:
                    return self._ahead(script, ops, at, end, category)
            elif self.strategy.overlap.tp or (self._is_async and op.phase in GRADIENTS):
                end = _run(ops, at, lambda o: o.kind in CAST and o.outputs == op.outputs)
                if end < len(ops) and _goes_in_pieces(ops[end]) and side(ops[end]) is Side.BEHIND:
                    return self._behind(script, ops, at, end, category)
        if op.kind is OpKind.COLLECTIVE:
            self._transfer(script, op, _shield(op, self.strategy))
        else:
            self._compute(script, op, category)
        return at + 1

    def _ahead(self, script: Script, ops: list[Op], at: int, end: int, category: Category) -> int:
        """A gather and the GEMMs behind it: of the rank's own rows at once, then piece by piece as they arrive."""
        work = [op for op in ops[at + 1 : end] if op.phase is not Phase.WEIGHT_GRAD]
        weights = [op for op in ops[at + 1 : end] if op.phase is Phase.WEIGHT_GRAD]
        arrived = done = list(script.tail)
        num, own = pieces(ops[at], self.strategy.tp_chunks), 1.0 / float(self.strategy.tp)
        for piece in range(num + 1):
            if piece:
                arrived = [self._transfer(script, ops[at], Shield.GEMM, after=arrived, pieces=num)]
                done = [*done, *arrived]
            part = _Part((1.0 - own) / num if piece else own, first=piece == 0, last=piece == num)
            for op in work:
                done = [self._compute(script, op, category, after=done, part=part)]
        for op in weights:
            done = [self._compute(script, op, category, after=done)]
        script.tail = done
        return end

    def _behind(self, script: Script, ops: list[Op], at: int, end: int, category: Category) -> int:
        """GEMMs and the reduction of what they make, piece by piece; another gather of their input beside them.

        Weight gradients wait for that gather, and run while the last pieces are reduced.
        """
        reduce, stop = ops[end], end + 1
        is_twin = stop < len(ops) and ops[stop].partners == reduce.partners and side(ops[stop]) is Side.WHOLE
        work = [op for op in ops[at:end] if op.phase is not Phase.WEIGHT_GRAD]
        weights = [op for op in ops[at:end] if op.phase is Phase.WEIGHT_GRAD]
        done = list(script.tail)
        gathered = [self._transfer(script, ops[stop], Shield.GEMM, after=done)] if is_twin else []
        reduced: list[int] = []
        num = pieces(reduce, self.strategy.tp_chunks) if self.strategy.overlap.tp else 1
        for piece in range(num):
            for op in work:
                part = _Part(1.0 / num, first=piece == 0, last=piece == num - 1)
                done = [self._compute(script, op, category, after=done, part=part)]
            reduced = [self._transfer(script, reduce, Shield.GEMM, after=[*done, *reduced], pieces=num)]
        for op in weights:
            done = [self._compute(script, op, category, after=[*done, *gathered])]
            gathered = []
        script.tail = [*done, *reduced, *gathered]
        return stop + is_twin

    @property
    def _is_async(self) -> bool:
        """Whether software starts reductions of input gradients before the products of weight gradients."""
        return self.system.software is not None and self.system.software.async_tensor_parallel

    def _rings(self, ops: list[Op], at: int) -> bool:
        """Whether attention beside a ring of keys and values begins here."""
        if ops[at].kind is OpKind.COLLECTIVE:
            return _is_ring(ops[at]) and self._rings_hide
        end = _run(ops, at, lambda o: o.kind in CORE)
        return end > at and end < len(ops) and _is_ring(ops[end]) and self._rings_hide

    @property
    def _rings_hide(self) -> bool:
        return int(self.strategy.cp) > 1 and bool(self.strategy.overlap.cp)

    def _ring(self, script: Script, ops: list[Op], at: int, category: Category) -> int:
        """Attention in cp parts, each with the keys and values of one rank; the next ones arrive meanwhile."""
        cp = int(self.strategy.cp)
        end = _run(ops, at, lambda o: o.kind in CORE or _is_ring(o))
        rings = [op for op in ops[at:end] if _is_ring(op)]
        core = [op for op in ops[at:end] if op.kind in CORE]
        before = list(script.tail)
        arrived, done = before, before
        for part in range(cp):
            if part:
                for op in rings:
                    arrived = [self._transfer(script, op, Shield.ATTENTION, after=arrived, pieces=cp - 1)]
            for op in core:
                after = [*done, *arrived] if part else done
                share = _Part(1.0 / cp, first=part == 0, last=part == cp - 1)
                done = [self._compute(script, op, category, after=after, part=share)]
        script.tail = done
        return end

    # ---------------------------------------------------------------------------------------------------- single tasks

    def _compute(
        self, script: Script, op: Op, category: Category, *, after: list[int] | None = None, part: _Part = WHOLE
    ) -> int:
        """One op, or a part of it: its share of the time, and of a GEMM no less than its traffic takes."""
        whole = self._seconds(op)
        seconds = whole * part.share
        if part.share < 1.0 and op.kind is OpKind.MATMUL:
            seconds = float(piece_seconds(op, whole, part.share, self.block, self.system.chip, self.recipe))
        alloc, free = self.lives.get((op.phase, op.name), (0.0, 0.0))
        return script.compute(
            op.name, seconds, category, launch_s=self._launch_s(op), after=after,
            alloc=alloc if part.first else 0.0, free=free if part.last else 0.0,
        )  # fmt: skip

    def _launch_s(self, op: Op) -> float:
        return self.each_s if (op.phase, op.name) in self.launched else 0.0

    def _seconds(self, op: Op) -> float:
        """Of an op by itself; one that runs again costs what its first run did."""
        priced = op.but(phase=Phase.FORWARD) if op.phase is Phase.RECOMPUTE else op
        return float(price(priced, self.block, self.system.chip, self.recipe).seconds)

    def _transfer(
        self, script: Script, op: Op, shield: Shield, *, after: list[int] | None = None, pieces: int = 1
    ) -> int:
        assert op.group is not None
        what = transfer_of(op, self.strategy, self.system, pieces)
        if what.seconds <= 0 and after is None:
            return -1
        nbytes = float(op.payload) / pieces if what.seconds > 0 and not _is_ring(op) else 0.0
        return script.transfer(
            op.name, LANE_OF[op.group], what, CATEGORY_OF[op.group], shield, after=after, alloc=nbytes, free=nbytes
        )


def _run(ops: Sequence[Op], at: int, belongs: Callable[[Op], bool]) -> int:
    """End of the run of ops from `at` on that belong."""
    while at < len(ops) and belongs(ops[at]):
        at += 1
    return at


def _goes_in_pieces(op: Op) -> bool:
    """Whether a collective is cut up with GEMMs where tensor-parallel traffic overlaps."""
    return bool(op.partners)


def _is_ring(op: Op) -> bool:
    return op.collective is Traffic.RING and op.beside == "attention"


def _shield(op: Op, s: Strategy) -> Shield:
    return Shield.PARTNER if op.beside == "block" and s.overlap.ep and s.ep > 1 else Shield.NOTHING
