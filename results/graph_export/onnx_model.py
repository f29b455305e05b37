"""A graph as an ONNX model: each distinct block a function, the model the calls of them, every op with its amounts.

Ops are of a domain of our own (`trainspace.ops`), for they are what a cost model tells apart, not what a runtime runs;
weights are inputs without data. Holds the forward ops; gradients are counted in the metadata. Traffic stands in the
graph as reading what was made last. Needs the `report` extra (onnx).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from estimator.graph import Block, BlockKind
from estimator.inventory import Entry
from estimator.op import Dim, OpKind, Phase
from estimator.precision import Role
from hardware.dtype import DType
from results.graph_export.view import GraphView, kind_of, require

if TYPE_CHECKING:
    from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto

__all__ = ["onnx_bytes"]

OPS, BLOCKS = "trainspace.ops", "trainspace.blocks"
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

    graph = view.graph
    nodes: list[NodeProto] = []
    inputs: dict[str, ValueInfoProto] = {}
    outputs: dict[str, ValueInfoProto] = {}
    blocks = {kind: _Function(view, graph.blocks[kind]) for kind in graph.kinds}
    stream = ""
    for i, (label, kind) in enumerate(_labels(graph.sequence)):
        made = blocks[kind]
        first = stream or f"{label}.{made.block.input}"
        given = [first if name == made.block.input else made.outer_name(label, name) for name in made.inputs]
        inputs |= {
            name: made.info(inner, name) for inner, name in zip(made.inputs, given, strict=True) if name != stream
        }
        results = [f"{label}.{name}" for name in made.outputs]
        nodes.append(helper.make_node(made.name, given, results, name=label, domain=BLOCKS, doc_string=kind.value))
        is_last = i == len(graph.sequence) - 1 or kind is BlockKind.HEAD
        told = dict(list(zip(made.outputs, results, strict=True))[0 if is_last else 1 :])
        outputs |= {name: made.info(inner, name) for inner, name in told.items()}
        stream = stream if kind is BlockKind.HEAD else results[0]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(OPS, 1), helper.make_opsetid(BLOCKS, 1)]
    model = helper.make_model(
        helper.make_graph(nodes, "model", list(inputs.values()), list(outputs.values()), doc_string=view.told),
        functions=[made.function() for made in blocks.values()], opset_imports=opsets, ir_version=IR_VERSION,
        producer_name="trainspace",
    )  # fmt: skip
    left = sum(entry.times for entry in view.entries if entry.op.phase is not Phase.FORWARD)
    helper.set_model_props(model, {"name": view.name, "of": view.told, "ops_of_gradients_left_out": str(left)})
    return model


def _labels(sequence: tuple[BlockKind, ...]) -> Iterator[tuple[str, BlockKind]]:
    """Layers by their number, ends by their kind."""
    layers = 0
    for i, kind in enumerate(sequence):
        yield (
            (f"layers.{layers}" if kind.is_layer else kind.value if sequence.index(kind) == i else f"{kind.value}.{i}"),
            kind,
        )
        layers += kind.is_layer


class _Function:
    """One block: inputs are what enters and its weights, outputs what it hands on."""

    def __init__(self, view: GraphView, block: Block) -> None:
        self.view, self.block = view, block
        self.name = block.kind.value
        self.entries = [e for e in view.entries if e.block.kind is block.kind and e.op.phase is Phase.FORWARD]
        made = {name for entry in self.entries for name in entry.op.outputs}
        read = dict.fromkeys(name for entry in self.entries for name in entry.op.inputs)
        self.weights = {weight.name: weight for weight in block.weights}
        self.inputs = [block.input, *(n for n in read if n not in made and n != block.input), *self.weights]
        unread = [name for entry in self.entries for name in entry.op.outputs if name not in read]
        last = next(e.op.outputs[0] for e in reversed(self.entries) if e.op.outputs)
        self.outputs = list(dict.fromkeys([*unread[:1], last])) if block.kind is BlockKind.MTP else [last]

    def outer_name(self, label: str, name: str) -> str:
        """The model's name of an input; ends share weights by name (tied embeddings)."""
        is_shared = name in self.weights and not self.block.kind.is_layer and self.block.kind is not BlockKind.MTP
        return name if is_shared else f"{label}.{name}"

    def info(self, name: str, outer: str) -> ValueInfoProto:
        """Type and sizes of one of its values."""
        from onnx import TensorProto, helper

        if name in self.weights:
            dims, role = self.weights[name].dims, Role.ACTIVATION
        else:
            dims, role = self.block.tensors[name].dims, self.block.tensors[name].role
        usual = ONNX_TYPES.get(self.view.recipe.activation, "FLOAT")
        kind = getattr(TensorProto, ROLE_TYPES.get(role, usual))
        return helper.make_tensor_value_info(outer, kind, [_whole(dim) for dim in dims])

    def function(self) -> FunctionProto:
        """The function of the block."""
        from onnx import helper

        nodes, last = [], self.block.input
        for entry in self.entries:
            nodes.append(self._node(entry, last))
            last = entry.op.outputs[0] if entry.op.outputs else last
        values = [self.info(n, n) for entry in self.entries for n in entry.op.outputs if n in self.block.tensors]
        return helper.make_function(
            BLOCKS, self.name, self.inputs, self.outputs, nodes, [helper.make_opsetid(OPS, 1)], value_info=values
        )

    def _node(self, entry: Entry, last: str) -> NodeProto:
        from onnx import helper

        op = entry.op
        told: dict[str, Any] = {
            "scope": "/".join(entry.scope), "part": entry.part.value, "kind": kind_of(op), "bound": entry.bound,
            "price_source": entry.source, "source": self.view.source_of(entry),
            "axes": [dim.axis.value for dim in op.dims], "sizes": [_whole(dim) for dim in op.dims],
        }  # fmt: skip
        told = {name: value for name, value in told.items() if value}
        told |= {name: round(getattr(entry, name)) for name in AMOUNTS}
        told |= {} if math.isnan(entry.seconds) else {"seconds": entry.seconds}
        traffic = op.kind is OpKind.COLLECTIVE
        inputs = [last] if traffic else [*op.inputs, *(weight.name for weight in op.weights)]
        outputs = [f"{op.name}.out"] if traffic else list(op.outputs)
        word = op.kind.value.title().replace("_", "")
        return helper.make_node(word, inputs, outputs, name=op.name, domain=OPS, **told)


def _whole(dim: Dim) -> int:
    """A share of rows is rounded up: sizes of ONNX are whole."""
    return math.ceil(float(dim.size))
