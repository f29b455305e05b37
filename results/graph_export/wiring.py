"""What each op of a block reads and makes, in every phase: the arrows of pictures and of ONNX. Draws nothing.

Values are forward tensors, weights, and gradients: `T.grad`, and `T.grad.2`, ... where several ops have a share in it.
An op of backward reads the gradients of what its forward op made, what that kept, and its weights; what runs again
makes anew what was not kept. Traffic has no tensors of its own: it hands on what was made last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from estimator.graph import Block, BlockKind
from estimator.inventory import Entry, without_gradient
from estimator.op import Op, OpKind, Phase

__all__ = ["Wire", "Wiring", "results_of", "wired"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One op with the values that it reads and makes."""

    entry: Entry
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Ops in an order that runs. `given`: values that none of them makes; `of`: the tensor or weight behind each value.

    `gradients`: values that add up to the gradient of the block's input.
    """

    wires: tuple[Wire, ...]
    given: tuple[str, ...]
    of: dict[str, str]
    gradients: tuple[str, ...] = ()


def wired(block: Block, entries: Sequence[Entry], *, backward: bool) -> Wiring:
    """Of the forward ops of a block, or of all others."""
    return _Wires(block).forward(entries) if not backward else _Wires(block).back(entries)


def results_of(block: Block) -> list[str]:
    """What a block hands on: its last output; a block of multi-token prediction first what its own layer reads."""
    ops = tuple(block.of_phase(Phase.FORWARD))
    read = {name for op in ops for name in op.inputs}
    last = next(op.outputs[0] for op in reversed(ops) if op.outputs)
    unread = [name for op in ops for name in op.outputs if name not in read]
    return list(dict.fromkeys([*unread[:1], last])) if block.kind is BlockKind.MTP else [last]


class _Wires:
    def __init__(self, block: Block) -> None:
        self.block = block
        self.ops = {op.name: op for op in block.of_phase(Phase.FORWARD)}
        self.results = set(results_of(block))
        self.read_or_made = {name for op in self.ops.values() for name in (*op.inputs, *op.outputs)}
        self.wires: list[Wire] = []
        self.made: dict[str, None] = {}
        self.given: dict[str, None] = {}
        self.of: dict[str, str] = {}
        self.shares: dict[str, list[str]] = {}  # of a tensor's gradient
        self.last = block.input

    def forward(self, entries: Sequence[Entry]) -> Wiring:
        learns = any(entry.op.phase is not Phase.FORWARD for entry in entries)
        for entry in entries:
            op = entry.op
            if op.phase is Phase.FORWARD:
                outputs = [*op.outputs, *self.statistics(op)] if learns else op.outputs
                self.run(entry, [*op.inputs, *(weight.name for weight in op.weights)], outputs)
        return self.result()

    def statistics(self, op: Op) -> list[str]:
        """What an op keeps for its backward alone, such as a norm's or a softmax's sums."""
        kept = [save.tensor for save in op.saves if save.tensor in self.block.tensors]
        return [name for name in dict.fromkeys(kept) if name not in self.read_or_made]

    def back(self, entries: Sequence[Entry]) -> Wiring:
        self.last = ""
        for entry in entries:
            op = entry.op
            if op.phase is Phase.RECOMPUTE:
                weights = self.ops[op.name].weights if op.name in self.ops else ()
                outputs = [*op.outputs, *self.statistics(self.ops.get(op.name, op))]
                self.run(entry, [*op.inputs, *(weight.name for weight in weights)], outputs)
            elif op.phase is not Phase.FORWARD:
                self.gradient(entry)
        return self.result()

    def gradient(self, entry: Entry) -> None:
        op, forward = entry.op, self.ops.get(without_gradient(entry.op.name))
        weights = () if forward is None else forward.weights
        reads = [name for tensor in op.inputs for name in self.gradient_of(tensor)]
        kept = [] if forward is None else [save.tensor for save in forward.saves if save.tensor in self.block.tensors]
        whole = op.phase is Phase.WEIGHT_GRAD or (bool(weights) and not self.has_weight_grad(op))
        if op.phase is Phase.WEIGHT_GRAD:
            made = [self.share(weight.name) for weight in weights]
        else:
            made = [self.share(name) for name in op.outputs]
            made += [self.share(weight.name) for weight in weights] if whole else []
            kept += [weight.name for weight in weights]
        self.run(entry, list(dict.fromkeys([*reads, *kept])), made)

    def has_weight_grad(self, op: Op) -> bool:
        name = f"{without_gradient(op.name)}.weight_grad"
        return any(other.name == name for other in self.block.of_phase(Phase.WEIGHT_GRAD))

    def gradient_of(self, tensor: str) -> list[str]:
        """All shares in a gradient so far: from outside of what the block hands on, none of what nothing reads."""
        if tensor not in self.shares and tensor not in self.results:
            return []
        if tensor not in self.shares:
            self.shares[tensor] = [f"{tensor}.grad"]
            self.of[f"{tensor}.grad"] = tensor
        return self.shares[tensor]

    def share(self, tensor: str) -> str:
        known = self.shares.setdefault(tensor, [])
        name = f"{tensor}.grad" if not known else f"{tensor}.grad.{len(known) + 1}"
        known.append(name)
        self.of[name] = tensor
        return name

    def run(self, entry: Entry, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        if entry.op.kind is OpKind.COLLECTIVE:
            inputs = [self.last] if self.last else []
            outputs = [f"{entry.op.name}.{'out' if entry.op.phase is Phase.FORWARD else entry.op.phase.value}"]
        for name in inputs:
            if name not in self.made:
                self.given.setdefault(name)
        for name in (*inputs, *outputs):
            self.of.setdefault(name, name)
        self.made.update(dict.fromkeys(outputs))
        self.wires.append(Wire(entry=entry, inputs=tuple(inputs), outputs=tuple(outputs)))
        self.last = outputs[0] if outputs else self.last

    def result(self) -> Wiring:
        gradients = [name for name in self.shares.get(self.block.input, ()) if name in self.made]
        return Wiring(wires=tuple(self.wires), given=tuple(self.given), of=self.of, gradients=tuple(gradients))
