"""What each op of a lowered block waits for: what it reads, the traffic that brings it, gradients of what it made.

Ops of a block stand in an order that runs; this tells which of it is needed. Traffic has no tensors of its own: a
collective stands before ops that read what it brings, or behind one whose result it reduces, and its duals stand the
other way round in backward. Knows no seconds and no streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from estimator.graph import Block
from estimator.op import Op, OpKind, Phase, Traffic

__all__ = ["BlockFlow", "flow_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFlow:
    """Dependencies inside a block, ops by their place in `block.ops`.

    `order`: an order in which every op comes behind what it waits for. `waits` per op; besides, `entry` wait for the
    block's input, `back_entry` for the gradient of its output. `exit`, `back_exit`: behind which that output, and the
    gradient of the input, are there. `weights`: what gives gradients of weights.
    """

    order: tuple[int, ...]
    waits: Mapping[int, tuple[int, ...]]
    entry: frozenset[int]
    exit: tuple[int, ...]
    back_entry: frozenset[int]
    back_exit: tuple[int, ...]
    weights: tuple[int, ...]


def flow_of(block: Block) -> BlockFlow:
    """The dependencies of a block that all passes are behind, recompute included where there is any."""
    return _Flow(block).result()


@dataclass(slots=True)
class _Placed:
    """A collective of forward: before ops, or behind one."""

    before: bool
    targets: tuple[str, ...]


@dataclass(slots=True)
class _Flow:
    block: Block
    waits: dict[int, list[int]] = field(default_factory=dict)
    placed: dict[str, _Placed] = field(default_factory=dict)
    entry: set[int] = field(default_factory=set)
    back_entry: set[int] = field(default_factory=set)
    late: list[int] = field(default_factory=list)  # recompute, which begins when its gradient is there
    gradients: dict[str, list[int]] = field(default_factory=dict)
    gates: dict[tuple[Phase, str], list[int]] = field(default_factory=dict)
    made: dict[Phase, dict[str, tuple[int, ...]]] = field(default_factory=dict)

    def result(self) -> BlockFlow:
        forward, again = self.of(Phase.FORWARD), self.of(Phase.RECOMPUTE)
        backward = [*self.of(Phase.BACKWARD), *self.of(Phase.WEIGHT_GRAD)]  # which may wait for traffic behind them
        self.run_forward(forward, Phase.FORWARD)
        self.run_forward(again, Phase.RECOMPUTE)
        self.run_backward(backward)
        computes = [i for i in forward if self.op(i).kind is not OpKind.COLLECTIVE]
        outputs = self.made[Phase.FORWARD].get(self.op(computes[-1]).outputs[0], ()) if computes else ()
        back_exit = self.gradients.get(self.block.input) or backward[-1:]
        return BlockFlow(
            order=tuple(chain(forward, again, backward)),
            waits={i: tuple(dict.fromkeys(found)) for i, found in self.waits.items()},
            entry=frozenset(self.entry), exit=tuple(outputs), back_entry=frozenset({*self.back_entry, *self.late}),
            back_exit=tuple(back_exit),
            weights=tuple(i for i in backward if self.op(i).phase is Phase.WEIGHT_GRAD or self.op(i).weights),
        )  # fmt: skip

    def op(self, i: int) -> Op:
        return self.block.ops[i]

    def of(self, *phases: Phase) -> list[int]:
        return [i for i, op in enumerate(self.block.ops) if op.phase in phases]

    # ---------------------------------------------------------------------------------------------------------- forward

    def run_forward(self, places: Sequence[int], phase: Phase) -> None:
        """Forward, or what of it runs again: that finds in memory what it does not make itself."""
        made = self.made.setdefault(phase, {})
        for n, i in enumerate(places):
            op = self.op(i)
            if op.kind is OpKind.COLLECTIVE:
                self.waits[i] = self.traffic(op, n, places, phase)
                continue
            inputs = [task for name in op.inputs for task in made.get(name, ())]
            self.waits[i] = [*inputs, *self.gates.get((phase, op.name), ())]
            if self.block.input in op.inputs and phase is Phase.FORWARD:
                self.entry.add(i)
            if not self.waits[i]:
                (self.entry.add if phase is Phase.FORWARD else self.late.append)(i)
            made |= dict.fromkeys(op.outputs, (i,))

    def traffic(self, op: Op, n: int, places: Sequence[int], phase: Phase) -> list[int]:
        """What a collective waits for; what waits for it is told of it."""
        i, made = places[n], self.made[phase]
        where = self.placed.get(op.name) or self.place(op, n, places)
        self.placed[op.name] = where
        ops = {self.op(j).name: self.op(j) for j in places}
        targets = [ops[name] for name in where.targets if name in ops]
        if where.before:
            for target in targets:
                self.gates.setdefault((phase, target.name), []).append(i)
            found = [task for target in targets for name in target.inputs for task in made.get(name, ())]
            if not found:
                (self.entry.add if phase is Phase.FORWARD else self.late.append)(i)
            return found
        found = [task for target in targets for name in target.outputs for task in made.get(name, ())]
        for target in targets:
            made |= dict.fromkeys(target.outputs, (i,))
        return found

    def place(self, op: Op, n: int, places: Sequence[int]) -> _Placed:
        """Its partners, or the op that it is named after; where fusion took that away, the next op."""
        computes = [(m, self.op(j)) for m, j in enumerate(places) if self.op(j).kind is not OpKind.COLLECTIVE]
        named = [(m, o) for m, o in computes if o.name in op.partners]
        if not named:
            stem = op.name.rpartition(".")[0]
            named = [(m, o) for m, o in computes if stem == o.name or stem in _parts(o.name)]
        if not named:
            named = [(m, o) for m, o in computes if m > n][:1] or computes[-1:]
        return _Placed(named[0][0] > n, tuple(o.name for _, o in named))

    # --------------------------------------------------------------------------------------------------------- backward

    def run_backward(self, places: Sequence[int]) -> None:
        """Gradients: of what an op made they come from all that read it."""
        forward = {op.name: op for op in self.block.of_phase(Phase.FORWARD)}
        for i in places:
            op = self.op(i)
            if op.kind is OpKind.COLLECTIVE:
                self.waits[i] = self.dual(op, i, places, forward)
                continue
            base = _base(op.name)
            needed = forward[base] if base in forward else op
            arrived = [task for name in op.inputs for task in self.gradients.get(name, ())]
            again = self.made.get(Phase.RECOMPUTE, {})
            kept = [task for name in (*needed.inputs, *needed.outputs) for task in again.get(name, ())]
            self.waits[i] = [*arrived, *kept, *self.gates.get((op.phase, op.name), ())]
            if not arrived:
                self.back_entry.add(i)
            if op.phase is Phase.BACKWARD:
                for name in op.outputs:
                    self.gradients.setdefault(name, []).append(i)

    def dual(self, op: Op, i: int, places: Sequence[int], forward: Mapping[str, Op]) -> list[int]:
        """Traffic of gradients: what was brought before an op is reduced behind its gradient, and the other way."""
        stem, _, number = op.name.rpartition(".grad")
        where = self.placed.get(stem)
        if where is None:
            self.back_entry.add(i)
            return []
        targets = [forward[name] for name in where.targets if name in forward]
        of_outputs = [task for target in targets for name in target.outputs for task in self.gradients.get(name, ())]
        brings_again = bool(number) != (op.collective is Traffic.RING)
        if not where.before or brings_again:  # comes before the gradient
            phases = (Phase.WEIGHT_GRAD,) if where.before and op.collective is not Traffic.RING else (
                Phase.BACKWARD, Phase.WEIGHT_GRAD)  # fmt: skip
            for target in targets:
                for phase in phases:
                    suffix = ".grad" if phase is Phase.BACKWARD else ".weight_grad"
                    self.gates.setdefault((phase, target.name + suffix), []).append(i)
            if not of_outputs:
                self.back_entry.add(i)
            elif not where.before:
                for target in targets:
                    self.gradients |= {name: [i] for name in target.outputs if name in self.gradients}
            return of_outputs
        names = {f"{target.name}.grad" for target in targets}
        done = [j for j in places if j < i and self.op(j).name in names and self.op(j).phase is Phase.BACKWARD]
        for name in dict.fromkeys(name for target in targets for name in target.inputs):
            if any(j in done for j in self.gradients.get(name, ())):
                self.gradients[name] = [*(j for j in self.gradients[name] if j not in done), i]
        if not done:
            self.back_entry.add(i)
        return done


def _base(name: str) -> str:
    """The forward op of a gradient."""
    for suffix in (".weight_grad", ".grad"):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _parts(name: str) -> Iterable[str]:
    """Names of the ops that were joined: `a.q_proj`, `a.k_proj` of `a.q_proj+k_proj`."""
    first, *more = name.split("+")
    scope = first.rpartition(".")[0]
    return (first, *(f"{scope}.{part}" if scope else part for part in more))
