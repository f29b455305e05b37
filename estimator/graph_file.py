"""Captured graphs as JSON: written exactly, read with every key, type, size and edge checked.

Only fields that differ from an op's defaults are written, and each distinct layer once, so that a model of 61 layers
takes some tens of kilobytes. Files of another version are refused.
"""

from __future__ import annotations

import graphlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from estimator.captured import CapturedGraph, CapturedModel, Origin
from estimator.graph import Block, BlockKind, OpGraph
from estimator.layers import LayerSpec
from estimator.mapping import from_mapping, shown
from estimator.model import ModelSpec
from estimator.op import Axis, Component, Dim, Op, OpKind, Save, Tensor, Weight
from estimator.precision import Role

__all__ = ["FORMAT", "digest_of", "graph_text", "is_graph_text", "read_graph"]

FORMAT, VERSION = "trainspace-graph", 2
KEYS = ("format", "version", "phase", "tokens", "model", "sequence", "blocks", "origins", "gradients", "unknown")
E_ = TypeVar("E_", bound=Enum)


def graph_text(model: CapturedModel) -> str:
    """The file's content."""
    return json.dumps(_plain(model, model.captured), separators=(",", ":")) + "\n"


def digest_of(model: ModelSpec, captured: CapturedGraph) -> str:
    """A name for the content."""
    return hashlib.sha256(json.dumps(_plain(model, captured)).encode()).hexdigest()[:16]


def is_graph_text(text: str) -> bool:
    """Whether a file claims to be a graph of this format, of any version."""
    return text[:200].lstrip().startswith("{") and f'"{FORMAT}"' in text[:200]


def _plain(model: ModelSpec, captured: CapturedGraph) -> dict[str, Any]:
    kinds = list(captured.graph.blocks)
    return {
        "format": FORMAT, "version": VERSION, "phase": captured.phase, "tokens": captured.tokens,
        "model": _spec(model),
        "sequence": [[kinds.index(kind), len(list(run))] for kind, run in groupby(captured.graph.sequence)],
        "blocks": [_block(captured.graph.blocks[kind]) for kind in kinds],
        "origins": {name: _places(origins) for name, origins in sorted(captured.origins.items())},
        "gradients": _places(captured.gradients),
        "unknown": list(captured.unknown),
    }  # fmt: skip


def _places(origins: Iterable[Origin]) -> list[Any]:
    return [[dict(o.ops), o.scope, o.module, o.line] for o in origins]


def _spec(model: ModelSpec) -> dict[str, Any]:
    """Fields that are not at their default; layers in runs."""
    out: dict[str, Any] = {}
    for f in fields(ModelSpec):
        value = getattr(model, f.name)
        if f.name == "layers" or value == f.default:
            continue
        parts = {p.name: getattr(value, p.name) for p in fields(value)} if is_dataclass(value) else None
        out[f.name] = _simple(value) if parts is None else {k: _simple(v) for k, v in parts.items()}
    out["layers"] = [_layer(layer) | {"repeat": len(list(run))} for layer, run in groupby(model.layer_specs)]
    return out


def _layer(layer: LayerSpec) -> dict[str, Any]:
    return {f.name: _simple(getattr(layer, f.name)) for f in fields(layer) if getattr(layer, f.name) != f.default}


def _simple(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    return value.value if isinstance(value, Enum) else list(value) if isinstance(value, tuple) else value


def _number(value: Any) -> Any:  # noqa: ANN401 - a float, whole where it can be
    return int(value) if float(value).is_integer() else float(value)


def _dims(dims: Iterable[Dim]) -> list[Any]:
    return [[_number(d.size), d.axis.value, *([d.units] if d.units else [])] for d in dims]


def _block(block: Block) -> dict[str, Any]:
    layer = block.kind.layer
    return {
        "kind": block.kind.value if layer is None else _layer(layer),
        "input": block.input,
        "tensors": {name: [t.role.value, _dims(t.dims)] for name, t in block.tensors.items()},
        "ops": [_op(op) for op in block.ops],
    }


WRITERS: Mapping[str, Callable[[Any], Any]] = {
    "name": str, "kind": _simple, "component": _simple, "dims": _dims, "inputs": list, "outputs": list,
    "saves": lambda saves: [[s.tensor, s.role.value] for s in saves],
    "weights": lambda weights: [[w.name, _dims(w.dims), *(n for n in ("expert", "linear") if getattr(w, n))]
                                for w in weights],
    "modules": sorted, "role": _simple, "passes": _number, "max_domains": int, "fanout": _number, "visible": float,
    "reach": _number, "selects": bool, "detached": bool, "partial": bool,
}  # fmt: skip


def _op(op: Op) -> dict[str, Any]:
    out = {}
    for f in fields(Op):
        value = getattr(op, f.name)
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if f.default is MISSING and f.default_factory is MISSING or value != default:
            assert f.name in WRITERS, f"{op.name}: {f.name} is set by passes, and a logical graph has none behind it"
            out[f.name] = WRITERS[f.name](value)
    return out


def read_graph(path: str | Path, text: str | None = None) -> CapturedModel:
    """The captured model of a file; ValueError names file, place, rule and value."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8") if text is None else text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: must be JSON text ({error})") from error
    try:
        return _model(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _model(content: object) -> CapturedModel:
    whole = _mapping(content, "the file")
    if whole.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT!r}, but got {shown(whole.get('format'))}")
    if whole.get("version") != VERSION:
        raise ValueError(f"version must be {VERSION}, but got {shown(whole.get('version'))}; capture the model again")
    _check_keys(whole, KEYS, "the file")
    spec = ModelSpec.from_mapping(_mapping(whole["model"], "model"))
    blocks = [_read_block(b, f"blocks.{i}") for i, b in enumerate(_list(whole["blocks"], "blocks"))]
    graph = OpGraph(name=spec.name, blocks={b.kind: b for b in blocks}, sequence=_sequence(whole["sequence"], blocks))
    _check_layers(spec, graph)
    found = CapturedGraph(
        graph=graph, tokens=_whole(whole["tokens"], "tokens"), phase=_text(whole["phase"], "phase"), digest="",
        chosen_keys=0 if spec.indexer is None else spec.indexer.top_k,
        origins={name: _origins(o, f"origins.{name}") for name, o in _mapping(whole["origins"], "origins").items()},
        gradients=_origins(whole["gradients"], "gradients"),
        unknown=tuple(_text(u, "unknown") for u in _list(whole["unknown"], "unknown")),
    )  # fmt: skip
    known = {f.name: getattr(spec, f.name) for f in fields(ModelSpec)}
    return CapturedModel(**known, captured=replace(found, digest=digest_of(spec, found)))


def _sequence(value: object, blocks: list[Block]) -> tuple[BlockKind, ...]:
    sequence: list[BlockKind] = []
    for i, run in enumerate(_list(value, "sequence")):
        pair = _list(run, f"sequence.{i}")
        if len(pair) != 2 or not all(type(n) is int for n in pair) or not 0 <= pair[0] < len(blocks):
            raise ValueError(f"sequence.{i} must be [block, times], but got {shown(run)}; have {len(blocks)} blocks")
        if not 1 <= pair[1] <= 10**5:
            raise ValueError(f"sequence.{i} must run its block 1 to 100000 times, but got {pair[1]}")
        sequence += [blocks[pair[0]].kind] * pair[1]
    return tuple(sequence)


def _check_layers(spec: ModelSpec, graph: OpGraph) -> None:
    if tuple(kind.layer for kind in graph.sequence if kind.layer is not None) != spec.layer_specs:
        raise ValueError("sequence must run the layers of model, in their order; it does not")
    ends = [kind for kind in graph.sequence if kind.layer is None]
    positions = [BlockKind.POSITIONS] * bool(spec.max_positions)
    if ends != [BlockKind.EMBEDDING, *positions, BlockKind.HEAD]:
        got = [kind.value for kind in ends]
        raise ValueError(f"sequence must have one embedding and one head, positions if the model has, but got {got}")


def _read_block(value: object, where: str) -> Block:
    block = _mapping(value, where)
    _check_keys(block, ("kind", "input", "tensors", "ops"), where)
    kind = block["kind"]
    ends = [k.value for k in (BlockKind.EMBEDDING, BlockKind.POSITIONS, BlockKind.HEAD)]
    if isinstance(kind, str) and kind not in ends:
        raise ValueError(f"{where}.kind must be one of {ends} or the fields of a layer, but got {shown(kind)}")
    if not isinstance(kind, str):
        kind = from_mapping(LayerSpec, _mapping(kind, f"{where}.kind"), f"{where}.kind.")
    tensors = {}
    for name, given in _mapping(block["tensors"], f"{where}.tensors").items():
        at = f"{where}.tensors.{name}"
        pair = _list(given, at)
        if len(pair) != 2:
            raise ValueError(f"{at} must be [role, dims], but got {shown(given)}")
        tensors[name] = Tensor(_read_dims(pair[1], at), _member(Role, pair[0], at))
    ops = tuple(_read_op(op, f"{where}.ops.{i}") for i, op in enumerate(_list(block["ops"], f"{where}.ops")))
    found = Block(kind=BlockKind.of(kind), ops=ops, tensors=tensors, input=_text(block["input"], f"{where}.input"))
    _check_edges(found, where)
    return found


def _check_edges(block: Block, where: str) -> None:
    """Ops stand in an order in which every value is made before it is read; each value has its shape."""
    made: dict[str, str] = {}
    for op in block.ops:
        for out in op.outputs:
            if out in made or out == block.input:
                raise ValueError(f"{where}: {op.name} makes {out!r}, which {made.get(out, 'the block before')} makes")
            made[out] = op.name
        for name in (*op.inputs, *op.outputs, *(save.tensor for save in op.saves)):
            if name not in block.tensors:
                raise ValueError(f"{where}: {op.name} has {name!r}, which is not among the tensors")
    before = {op.name: {made[name] for name in op.inputs if name in made} for op in block.ops}
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        raise ValueError(f"{where}: the ops form a cycle: {' <- '.join(error.args[1])}; a block has none") from None
    known = {block.input}
    for op in block.ops:
        late = [name for name in op.inputs if name not in known]
        if late:
            why = f"only {made[late[0]]} behind it makes" if late[0] in made else "nothing makes"
            raise ValueError(f"{where}: {op.name} reads {late[0]!r}, which {why}")
        known.update(op.outputs)


def _read_op(value: object, where: str) -> Op:
    given = _mapping(value, where)
    for key in given:
        if key not in WRITERS:
            raise ValueError(f"{where}.{key} is not a key of an op; have {list(WRITERS)}")
    missing = [key for key in ("name", "kind", "component") if key not in given]
    if missing:
        raise ValueError(f"{where}.{missing[0]} is required, but is absent")
    return Op(**{key: READERS[key](item, f"{where}.{key}") for key, item in given.items()})


def _read_weights(value: object, where: str) -> tuple[Weight, ...]:
    weights = []
    for given in _list(value, where):
        row = _list(given, where)
        if len(row) < 2 or not set(row[2:]) <= {"expert", "linear"}:
            raise ValueError(f"{where} must be lists [name, dims, expert, linear], but got {shown(given)}")
        weights.append(Weight(_text(row[0], where), _read_dims(row[1], where), "expert" in row, "linear" in row))
    return tuple(weights)


def _read_saves(value: object, where: str) -> tuple[Save, ...]:
    rows = [_list(given, where) for given in _list(value, where)]
    if any(len(row) != 2 for row in rows):
        raise ValueError(f"{where} must be lists [tensor, role], but got {shown(value)}")
    return tuple(Save(_text(row[0], where), _member(Role, row[1], where)) for row in rows)


def _read_dims(value: object, where: str) -> tuple[Dim, ...]:
    dims = []
    for given in _list(value, where):
        row = _list(given, where)
        if len(row) not in (2, 3) or (len(row) == 3 and (type(row[2]) is not int or row[2] < 0)):
            raise ValueError(f"{where} must have dims [size, axis, units], but got {shown(given)}")
        dims.append(Dim(_size(row[0], where), _member(Axis, row[1], where), *row[2:]))
    return tuple(dims)


def _texts(value: object, where: str) -> tuple[str, ...]:
    return tuple(_text(item, where) for item in _list(value, where))


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} must be true or false, but got {shown(value)}")
    return value


READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "name": lambda v, at: _text(v, at), "kind": lambda v, at: _member(OpKind, v, at),
    "component": lambda v, at: _member(Component, v, at), "dims": _read_dims, "inputs": _texts, "outputs": _texts,
    "saves": _read_saves, "weights": _read_weights, "modules": lambda v, at: frozenset(_texts(v, at)),
    "role": lambda v, at: _member(Role, v, at), "passes": lambda v, at: _size(v, at),
    "max_domains": lambda v, at: int(_size(v, at)), "fanout": lambda v, at: _size(v, at),
    "visible": lambda v, at: _size(v, at), "reach": lambda v, at: _size(v, at), "selects": _flag, "detached": _flag,
    "partial": _flag,
}  # fmt: skip


def _origins(value: object, where: str) -> tuple[Origin, ...]:
    return tuple(_origin(place, f"{where}.{i}") for i, place in enumerate(_list(value, where)))


def _origin(value: object, where: str) -> Origin:
    row = _list(value, where)
    if len(row) != 4:
        raise ValueError(f"{where} must be [ops, scope, module, line], but got {shown(value)}")
    ops = {_text(k, where): _whole(v, where) for k, v in _mapping(row[0], where).items()}
    return Origin(tuple(ops.items()), *(_text(item, where) for item in row[1:]))


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object, but got {shown(value)}")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, but got {shown(value)}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text, but got {shown(value)}")
    return value


def _whole(value: object, where: str) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{where} must be a whole number of at least 1, but got {shown(value)}")
    return value


def _size(value: object, where: str) -> float:
    if type(value) not in (int, float) or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise ValueError(f"{where} must be a finite number of at least 0, but got {shown(value)}")
    return float(value)  # type: ignore[arg-type]


def _member(kind: type[E_], value: object, where: str) -> E_:
    accepted = [member.value for member in kind]
    if value not in accepted:
        raise ValueError(f"{where} must be one of {accepted}, but got {shown(value)}")
    return kind(value)


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{where}: {key} is not a key; have {list(known)}")
    for key in known:
        if key not in given:
            raise ValueError(f"{where}: {key} is required, but is absent")
