"""A graph as an ONNX model: each distinct block a function, the model the calls of them, every op with its amounts.

Ops are of a domain of our own (`trainspace.ops`), for they are what a cost model tells apart, not what a runtime runs;
weights are inputs without data. Where a graph has gradients, each block is two functions: the second, `.backward`, has
what runs again and the gradients, each op with its phase, and the model calls them from the last block to the first.
Traffic stands in the graph as reading what was made last. Needs the `report` extra (onnx).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from estimator.graph import Block, BlockKind
from estimator.op import Dim, Phase
from estimator.precision import Role
from hardware.dtype import DType
from results.graph_export.view import GraphView, kind_of, require
from results.graph_export.wiring import Wire, Wiring, results_of, wired

if TYPE_CHECKING:
    from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto

__all__ = ["onnx_bytes"]

OPS, BLOCKS = "trainspace.ops", "trainspace.blocks"
BACKWARD = ".backward"  # behind the name of a block
IR_VERSION, OPSET = 10, 21  # functions with shapes of their values (ONNX 1.16)
AMOUNTS = ("flops", "read_bytes", "written_bytes", "link_bytes", "parameters")
ONNX_TYPES = {DType.FP32: "FLOAT", DType.BF16: "BFLOAT16", DType.FP16: "FLOAT16", DType.FP8: "FLOAT8E4M3FN"}
ROLE_TYPES = {Role.FULL: "FLOAT", Role.INDEX: "INT32", Role.MASK: "BOOL"}


def onnx_bytes(view: GraphView) -> bytes:
    """The file's content, checked."""
    require("onnx", "an ONNX model")
    import onnx

    model = _model(view)
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)


def _model(view: GraphView) -> ModelProto:
    from onnx import helper

    model = _Model(view)
    model.forward()
    model.backward()
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(OPS, 1), helper.make_opsetid(BLOCKS, 1)]
    graph = helper.make_graph(
        model.nodes, "model", list(model.inputs.values()), list(model.outputs.values()), doc_string=view.told
    )
    functions = [f for made in model.blocks.values() for f in (made.forward(), *made.backward())]
    proto = helper.make_model(
        graph, functions=functions, opset_imports=opsets, ir_version=IR_VERSION, producer_name="trainspace"
    )
    phases = dict.fromkeys(entry.op.phase.value for entry in view.entries)
    helper.set_model_props(proto, {"name": view.name, "of": view.told, "phases": ", ".join(phases)})
    return proto


class _Model:
    """The calls of the blocks' functions, in the order in which the model runs them, and back."""

    def __init__(self, view: GraphView) -> None:
        self.sequence = view.graph.sequence
        self.blocks = {kind: _Block(view, view.graph.blocks[kind]) for kind in view.graph.kinds}
        self.nodes: list[NodeProto] = []
        self.inputs: dict[str, ValueInfoProto] = {}
        self.outputs: dict[str, ValueInfoProto] = {}
        self.calls: list[tuple[str, BlockKind, dict[str, str]]] = []  # label, block, the model's names of its values

    def forward(self) -> None:
        stream = ""
        for i, (label, kind) in enumerate(_labels(self.sequence)):
            made = self.blocks[kind]
            first = stream or f"{label}.{made.block.input}"
            names = {name: first if name == made.block.input else made.outer_name(label, name) for name in made.inputs}
            for name, outer in names.items():
                if outer != stream:
                    self.inputs[outer] = made.info(name, outer)
            names |= {name: f"{label}.{name}" for name in made.outputs}
            self.call(made.name, label, kind, names, made.inputs, made.outputs)
            is_last = i == len(self.sequence) - 1 or kind is BlockKind.HEAD
            for name in made.results[0 if is_last else 1 :]:
                self.outputs[names[name]] = made.info(name, names[name])
            stream = stream if kind is BlockKind.HEAD else names[made.results[0]]
            self.calls.append((label, kind, names))

    def backward(self) -> None:
        gradients: dict[str, list[str]] = {}  # of the model's values
        for label, kind, names in reversed(self.calls):
            made = self.blocks[kind]
            if not made.back.wires:
                continue
            given = {}
            for value in made.back.given:
                of = made.back.of[value]
                if value == of:
                    given[value] = names.get(value, f"{label}.{value}")
                else:
                    given[value] = self.gradient(made, label, value, gradients.get(names.get(of, ""), []))
            results = {value: f"{label}.{value}" for value in made.back_outputs}
            self.call(f"{made.name}{BACKWARD}", f"{label}{BACKWARD}", kind, given | results, made.back.given,
                      made.back_outputs)  # fmt: skip
            for value, outer in results.items():
                if made.back.of[value] == made.block.input:
                    gradients.setdefault(names[made.block.input], []).append(outer)
                    if names[made.block.input] not in self.inputs:
                        continue
                self.outputs[outer] = made.info(value, outer)

    def gradient(self, made: _Block, label: str, value: str, shares: list[str]) -> str:
        """The model's name of a gradient that enters a block: the sum of its shares, an input where it has none."""
        from onnx import helper

        outer = f"{label}.{value}"
        if not shares:
            self.inputs[outer] = made.info(value, outer)
        elif len(shares) == 1:
            return shares[0]
        else:
            self.nodes.append(helper.make_node("Sum", shares, [outer], name=outer, domain=OPS))
        return outer

    def call(
        self, function: str, label: str, kind: BlockKind, names: dict[str, str], inputs: Sequence[str],
        outputs: Sequence[str],
    ) -> None:  # fmt: skip
        from onnx import helper

        self.nodes.append(
            helper.make_node(function, [names[n] for n in inputs], [names[n] for n in outputs], name=label,
                             domain=BLOCKS, doc_string=kind.value)
        )  # fmt: skip


def _labels(sequence: tuple[BlockKind, ...]) -> Iterator[tuple[str, BlockKind]]:
    """Layers by their number, ends by their kind."""
    layers = 0
    for i, kind in enumerate(sequence):
        yield (
            (f"layers.{layers}" if kind.is_layer else kind.value if sequence.index(kind) == i else f"{kind.value}.{i}"),
            kind,
        )
        layers += kind.is_layer


class _Block:
    """One block as two functions. `results`: what it hands on; `outputs` also have what its backward reads."""

    def __init__(self, view: GraphView, block: Block) -> None:
        self.view, self.block = view, block
        self.name = block.kind.value
        entries = [e for e in view.entries if e.block.kind is block.kind]
        self.ahead, self.back = (wired(block, entries, backward=back) for back in (False, True))
        self.weights = {weight.name: weight for weight in block.weights}
        self.inputs = [block.input, *(n for n in self.ahead.given if n not in self.weights and n != block.input),
                       *self.weights]  # fmt: skip
        self.results = results_of(block)
        made = {name for wire in self.ahead.wires for name in wire.outputs}
        self.outputs = list(dict.fromkeys([*self.results, *(name for name in self.back.given if name in made)]))
        mine = [name for wire in self.back.wires for name in wire.outputs if self.back.of[name] != name]
        weights = [name for name in mine if self.back.of[name] in self.weights]
        self.back.of[self.summed] = block.input
        self.back_outputs = [*weights, *([self.summed] if self.back.gradients else [])]

    @property
    def summed(self) -> str:
        """The gradient of the block's input."""
        shares = self.back.gradients
        return shares[0] if len(shares) == 1 else f"{self.block.input}.grad.all"

    def outer_name(self, label: str, name: str) -> str:
        """The model's name of an input; ends share weights by name (tied embeddings)."""
        is_shared = name in self.weights and not self.block.kind.is_layer and self.block.kind is not BlockKind.MTP
        return name if is_shared else f"{label}.{name}"

    def info(self, name: str, outer: str) -> ValueInfoProto:
        """Type and sizes of one of its values; a gradient has those of what it is of."""
        from onnx import TensorProto, helper

        of = self.back.of.get(name, name)
        weight = self.weights.get(of)
        dims = self.block.tensors[of].dims if weight is None else weight.dims
        role = self.block.tensors[of].role if weight is None and of == name else Role.ACTIVATION
        usual = ONNX_TYPES.get(self.view.recipe.activation, "FLOAT")
        kind = getattr(TensorProto, ROLE_TYPES.get(role, usual))
        return helper.make_tensor_value_info(outer, kind, [_whole(dim) for dim in dims])

    def forward(self) -> FunctionProto:
        """The function of its forward ops."""
        return self._function(self.name, self.inputs, self.outputs, self.ahead, [])

    def backward(self) -> Iterator[FunctionProto]:
        """That of what runs again and of gradients, where there are any."""
        from onnx import helper

        if not self.back.wires:
            return
        sums = []
        if len(self.back.gradients) > 1:
            sums = [helper.make_node("Sum", self.back.gradients, [self.summed], name=self.summed, domain=OPS)]
        yield self._function(f"{self.name}{BACKWARD}", self.back.given, self.back_outputs, self.back, sums)

    def _function(
        self, name: str, inputs: Sequence[str], outputs: Sequence[str], wiring: Wiring, more: list[NodeProto]
    ) -> FunctionProto:
        from onnx import helper

        made = [value for wire in wiring.wires for value in wire.outputs]
        values = [self.info(v, v) for v in made if {wiring.of[v]} & {*self.block.tensors, *self.weights}]
        opsets = [helper.make_opsetid(OPS, 1)]
        nodes = [*(self._node(wire) for wire in wiring.wires), *more]
        return helper.make_function(BLOCKS, name, inputs, outputs, nodes, opsets, value_info=values)

    def _node(self, wire: Wire) -> NodeProto:
        from onnx import helper

        entry, op = wire.entry, wire.entry.op
        told: dict[str, Any] = {
            "scope": "/".join(entry.scope), "part": entry.part.value, "kind": kind_of(op), "phase": op.phase.value,
            "bound": entry.bound, "price_source": entry.source, "confidence": entry.confidence,
            "source": self.view.source_of(entry), "axes": [dim.axis.value for dim in op.dims],
            "sizes": [_whole(dim) for dim in op.dims],
        }  # fmt: skip
        told = {name: value for name, value in told.items() if value}
        told |= {name: round(getattr(entry, name)) for name in AMOUNTS}
        told |= {} if math.isnan(entry.seconds) else {"seconds": entry.seconds}
        word = op.kind.value.title().replace("_", "")
        name = op.name if op.phase is not Phase.RECOMPUTE else f"{op.name}.{op.phase.value}"
        return helper.make_node(word, wire.inputs, wire.outputs, name=name, domain=OPS, **told)


def _whole(dim: Dim) -> int:
    """A share of rows is rounded up: sizes of ONNX are whole."""
    return math.ceil(float(dim.size))
