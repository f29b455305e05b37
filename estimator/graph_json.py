"""Blocks of ops as plain JSON values and back: exact, read with every key, type, size and edge checked.

Only fields that differ from an op's defaults are written. Ops before and after passes have one form; what a file must
hold around its blocks, graph_file.py and ops_file.py say.
"""

from __future__ import annotations

import graphlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from estimator.graph import Block, BlockKind, OpGraph
from estimator.layers import LayerSpec
from estimator.mapping import from_mapping, shown
from estimator.op import Axis, Component, Dim, Group, Op, OpKind, Phase, Save, Tensor, Traffic, Weight
from estimator.precision import Role

__all__ = ["blocks_json", "check_keys", "layer_json", "op_json", "read_blocks", "read_json", "read_list",
           "read_mapping", "read_text", "read_whole", "sequence_json", "simple", "tensor_json"]  # fmt: skip

E_ = TypeVar("E_", bound=Enum)
MAX_SIZE = 1e15  # float64 holds every whole number up to nine times that
MAX_RUN = 10**5  # as many layers as a model may have
NUM_DIMS: Mapping[OpKind, int] = {
    OpKind.MATMUL: 3, OpKind.GROUPED_MATMUL: 4, OpKind.BLOCK_MATMUL: 4, OpKind.SCORES: 5, OpKind.CONTEXT: 5,
    OpKind.ATTENTION: 6, OpKind.INDEX: 4, OpKind.SCAN: 3,
}  # fmt: skip
"""Of the kinds whose work follows from their dims (op.py); the others stream their tensors."""


def read_json(path: str | Path, text: str | None = None) -> dict[str, Any]:
    """The object that a file, or its text, holds; ValueError where it is none, or has a key twice."""
    try:
        content = Path(path).read_text(encoding="utf-8") if text is None else text
        return read_mapping(json.loads(content, object_pairs_hook=_once), "the file")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: must be JSON text ({error})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be JSON text in UTF-8, but is damaged at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"every key of an object must stand once, but {shown(twice)} stands twice")
    return found


def blocks_json(graph: OpGraph) -> list[Any]:
    """Every block of the graph."""
    return [_block(block) for block in graph.blocks.values()]


def sequence_json(graph: OpGraph) -> list[Any]:
    """The order in which the model runs them, in runs: [block, times]."""
    kinds = list(graph.blocks)
    return [[kinds.index(kind), len(list(run))] for kind, run in groupby(graph.sequence)]


def layer_json(layer: LayerSpec) -> dict[str, Any]:
    """Fields that are not at their default."""
    return {f.name: simple(getattr(layer, f.name)) for f in fields(layer) if getattr(layer, f.name) != f.default}


def simple(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """A field's value as JSON has it."""
    return value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value


def read_blocks(content: Mapping[str, Any], name: str) -> OpGraph:
    """The graph of a file's `blocks` and `sequence`."""
    blocks = [_read_block(b, f"blocks.{i}") for i, b in enumerate(read_list(content["blocks"], "blocks"))]
    by_kind = {block.kind: block for block in blocks}
    if len(by_kind) < len(blocks):
        raise ValueError(f"blocks must each be of a kind of its own, but got {[b.kind.value for b in blocks]}")
    return OpGraph(name=name, blocks=by_kind, sequence=_sequence(content["sequence"], blocks))


def _sequence(value: object, blocks: list[Block]) -> tuple[BlockKind, ...]:
    sequence: list[BlockKind] = []
    for i, run in enumerate(read_list(value, "sequence")):
        pair = read_list(run, f"sequence.{i}")
        if len(pair) != 2 or not all(type(n) is int for n in pair) or not 0 <= pair[0] < len(blocks):
            raise ValueError(f"sequence.{i} must be [block, times], but got {shown(run)}; have {len(blocks)} blocks")
        if not 1 <= pair[1] <= MAX_RUN:
            raise ValueError(f"sequence.{i} must run its block 1 to {MAX_RUN} times, but got {shown(pair[1])}")
        sequence += [blocks[pair[0]].kind] * pair[1]
    return tuple(sequence)


def _number(value: Any) -> Any:  # noqa: ANN401 - a float, whole where it can be
    return int(value) if float(value).is_integer() else float(value)


def _dims(dims: Iterable[Dim]) -> list[Any]:
    return [[_number(d.size), d.axis.value, *([d.units] if d.units else [])] for d in dims]


def _block(block: Block) -> dict[str, Any]:
    layer = block.kind.layer
    return {
        "kind": block.kind.value if layer is None else layer_json(layer),
        "input": block.input,
        "tensors": {name: tensor_json(tensor) for name, tensor in block.tensors.items()},
        "ops": [op_json(op) for op in block.ops],
    }


WRITERS: Mapping[str, Callable[[Any], Any]] = {
    "name": str, "kind": simple, "component": simple, "dims": _dims, "inputs": list, "outputs": list,
    "saves": lambda saves: [[s.tensor, s.role.value] for s in saves],
    "weights": lambda weights: [[w.name, _dims(w.dims), *(n for n in ("expert", "linear") if getattr(w, n))]
                                for w in weights],
    "modules": sorted, "role": simple, "passes": _number, "max_domains": int, "fanout": _number, "visible": float,
    "reach": _number, "selects": bool, "detached": bool, "partial": bool,
    "phase": simple, "rides": bool, "held": sorted, "captured": bool, "collective": simple, "group": simple,
    "payload": _number, "beside": str, "partners": list, "load": _number, "kept": bool,
    "streams": lambda rows: [[name, _number(times)] for name, times in rows],
    "back": lambda rows: [[name, _number(times)] for name, times in rows],
}  # fmt: skip


def tensor_json(tensor: Tensor) -> list[Any]:
    """Role and sizes."""
    return [tensor.role.value, _dims(tensor.dims)]


def op_json(op: Op) -> dict[str, Any]:
    """Fields that are not at their default."""
    out = {}
    for f in fields(Op):
        value = getattr(op, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if f.default is MISSING and f.default_factory is MISSING or value != default:
            out[f.name] = WRITERS[f.name](value)
    return out


def _read_block(value: object, where: str) -> Block:
    block = read_mapping(value, where)
    check_keys(block, ("kind", "input", "tensors", "ops"), where)
    kind = block["kind"]
    ends = [k.value for k in (BlockKind.EMBEDDING, BlockKind.POSITIONS, BlockKind.HEAD, BlockKind.MTP)]
    if isinstance(kind, str) and kind not in ends:
        raise ValueError(f"{where}.kind must be one of {ends} or the fields of a layer, but got {shown(kind)}")
    if not isinstance(kind, str):
        kind = from_mapping(LayerSpec, read_mapping(kind, f"{where}.kind"), f"{where}.kind.")
    tensors = {}
    for name, given in read_mapping(block["tensors"], f"{where}.tensors").items():
        at = f"{where}.tensors.{name}"
        pair = read_list(given, at)
        if len(pair) != 2:
            raise ValueError(f"{at} must be [role, dims], but got {shown(given)}")
        tensors[name] = Tensor(_read_dims(pair[1], at), _member(Role, pair[0], at))
    ops = tuple(_read_op(op, f"{where}.ops.{i}") for i, op in enumerate(read_list(block["ops"], f"{where}.ops")))
    found = Block(kind=BlockKind.of(kind), ops=ops, tensors=tensors, input=read_text(block["input"], f"{where}.input"))
    _check_edges(found, where)
    return found


def _check_edges(block: Block, where: str) -> None:
    """Ops stand in an order in which every value is made before it is read; each value has its shape.

    Gradients are named like the values that they are of, so only the order of forward is held to them.
    """
    made: dict[str, str] = {}
    names = [(op.phase, op.name) for op in block.ops]
    if len(set(names)) < len(names):
        raise ValueError(
            f"{where}: ops of a phase must have names of their own, but got {shown(_twice(names)[1])} twice"
        )
    for op in block.ops:
        for name in (*op.inputs, *op.outputs, *(save.tensor for save in op.saves)):
            if name not in block.tensors:
                raise ValueError(f"{where}: {op.name} has {name!r}, which is not among the tensors")
    forward = tuple(block.of_phase(Phase.FORWARD))
    for op in forward:
        for out in op.outputs:
            if out in made or out == block.input:
                raise ValueError(f"{where}: {op.name} makes {out!r}, which {made.get(out, 'the block before')} makes")
            made[out] = op.name
    before = {op.name: {made[name] for name in op.inputs if name in made} for op in forward}
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        raise ValueError(f"{where}: the ops form a cycle: {' <- '.join(error.args[1])}; a block has none") from None
    # MTP reads the embedding of the next word and its own layer's output, which stand in other blocks.
    known = {block.input, *(block.tensors.keys() - made.keys() if block.kind is BlockKind.MTP else ())}
    for op in forward:
        late = [name for name in op.inputs if name not in known]
        if late:
            why = f"only {made[late[0]]} behind it makes" if late[0] in made else "nothing makes"
            raise ValueError(f"{where}: {op.name} reads {late[0]!r}, which {why}")
        known.update(op.outputs)


def _read_op(value: object, where: str) -> Op:
    given = read_mapping(value, where)
    for key in given:
        if key not in WRITERS:
            raise ValueError(f"{where}.{key} is not a key of an op; have {list(WRITERS)}")
    missing = [key for key in ("name", "kind", "component") if key not in given]
    if missing:
        raise ValueError(f"{where}.{missing[0]} is required, but is absent")
    op = Op(**{key: READERS[key](item, f"{where}.{key}") for key, item in given.items()})
    needs = NUM_DIMS.get(op.kind)
    if needs is not None and len(op.dims) != needs:
        raise ValueError(f"{where}: {op.name} is a {op.kind.value}, which has {needs} dims, but got {len(op.dims)}")
    if (op.kind is OpKind.COLLECTIVE) != (op.collective is not None and op.group is not None):
        raise ValueError(f"{where}: {op.name} must have collective and group if its kind is collective, else neither")
    return op


def _twice(names: list[Any]) -> Any:  # noqa: ANN401 - what the list has
    return next(name for i, name in enumerate(names) if name in names[:i])


def _read_weights(value: object, where: str) -> tuple[Weight, ...]:
    weights = []
    for given in read_list(value, where):
        row = read_list(given, where)
        if len(row) < 2 or any(word not in ("expert", "linear") for word in row[2:]):
            raise ValueError(f"{where} must be lists [name, dims, expert, linear], but got {shown(given)}")
        weights.append(Weight(read_text(row[0], where), _read_dims(row[1], where), "expert" in row, "linear" in row))
    return tuple(weights)


def _read_times(value: object, where: str) -> tuple[tuple[str, float], ...]:
    rows = [read_list(given, where) for given in read_list(value, where)]
    if any(len(row) != 2 for row in rows):
        raise ValueError(f"{where} must be lists [tensor, times], but got {shown(value)}")
    return tuple((read_text(name, where), _size(times, where)) for name, times in rows)


def _read_saves(value: object, where: str) -> tuple[Save, ...]:
    rows = [read_list(given, where) for given in read_list(value, where)]
    if any(len(row) != 2 for row in rows):
        raise ValueError(f"{where} must be lists [tensor, role], but got {shown(value)}")
    return tuple(Save(read_text(row[0], where), _member(Role, row[1], where)) for row in rows)


def _read_dims(value: object, where: str) -> tuple[Dim, ...]:
    dims = []
    for given in read_list(value, where):
        row = read_list(given, where)
        if len(row) not in (2, 3) or (len(row) == 3 and (type(row[2]) is not int or row[2] < 0)):
            raise ValueError(f"{where} must have dims [size, axis, units], but got {shown(given)}")
        dims.append(Dim(_positive(row[0], where), _member(Axis, row[1], where), *row[2:]))
    return tuple(dims)


def _texts(value: object, where: str) -> tuple[str, ...]:
    return tuple(read_text(item, where) for item in read_list(value, where))


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} must be true or false, but got {shown(value)}")
    return value


READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "name": lambda v, at: read_text(v, at), "kind": lambda v, at: _member(OpKind, v, at),
    "component": lambda v, at: _member(Component, v, at), "dims": _read_dims, "inputs": _texts, "outputs": _texts,
    "saves": _read_saves, "weights": _read_weights, "modules": lambda v, at: frozenset(_texts(v, at)),
    "role": lambda v, at: _member(Role, v, at), "passes": lambda v, at: _size(v, at),
    "max_domains": lambda v, at: read_whole(v, at), "fanout": lambda v, at: _size(v, at),
    "visible": lambda v, at: _size(v, at), "reach": lambda v, at: _size(v, at), "selects": _flag, "detached": _flag,
    "partial": _flag, "phase": lambda v, at: _member(Phase, v, at), "rides": _flag,
    "held": lambda v, at: frozenset(_texts(v, at)), "captured": _flag,
    "collective": lambda v, at: _member(Traffic, v, at), "group": lambda v, at: _member(Group, v, at),
    "payload": lambda v, at: _size(v, at), "beside": lambda v, at: read_text(v, at), "partners": _texts,
    "load": lambda v, at: _size(v, at), "kept": _flag, "streams": lambda v, at: _read_times(v, at),
    "back": lambda v, at: _read_times(v, at),
}  # fmt: skip


def read_mapping(value: object, where: str) -> dict[str, Any]:
    """The value, if it is an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, but got {shown(value)}")
    return value


def read_list(value: object, where: str) -> list[Any]:
    """The value, if it is a list."""
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, but got {shown(value)}")
    return value


def read_text(value: object, where: str) -> str:
    """The value, if it is text."""
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text, but got {shown(value)}")
    return value


def read_whole(value: object, where: str) -> int:
    """The value, if it is a whole number of at least 1."""
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise ValueError(f"{where} must be a whole number of at least 1, but got {shown(value)}")
    return value


def _size(value: object, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_SIZE:  # type: ignore[operator]
        raise ValueError(f"{where} must be a number from 0 to {MAX_SIZE:g}, but got {shown(value)}")
    return float(value)  # type: ignore[arg-type]


def _positive(value: object, where: str) -> float:
    size = _size(value, where)
    if not size:
        raise ValueError(f"{where} must have sizes above 0, but got {shown(value)}")
    return size


def _member(kind: type[E_], value: object, where: str) -> E_:
    accepted = [member.value for member in kind]
    if value not in accepted:
        raise ValueError(f"{where} must be one of {accepted}, but got {shown(value)}")
    return kind(value)


def check_keys(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """ValueError where a key is not known, or a known one is absent."""
    for key in given:
        if key not in known:
            raise ValueError(f"{where}: {key} is not a key; have {list(known)}")
    for key in known:
        if key not in given:
            raise ValueError(f"{where}: {key} is required, but is absent")
