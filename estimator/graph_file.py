"""Captured graphs as JSON: written exactly, read with every key, type, size and edge checked.

Only fields that differ from an op's defaults are written, and each distinct layer once, so that a model of 61 layers
takes some tens of kilobytes. Files of another version are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from estimator.captured import CapturedGraph, CapturedModel, Origin
from estimator.graph import BlockKind, OpGraph
from estimator.graph_json import (
    blocks_json,
    check_keys,
    layer_json,
    read_blocks,
    read_json,
    read_list,
    read_mapping,
    read_text,
    read_whole,
    sequence_json,
    simple,
)
from estimator.mapping import given, shown
from estimator.model import ModelSpec
from estimator.op import Op

__all__ = ["FORMAT", "digest_of", "graph_text", "is_graph_text", "read_graph"]

FORMAT, VERSION = "trainspace-graph", 2
KEYS = ("format", "version", "phase", "tokens", "model", "sequence", "blocks", "origins", "gradients", "modules",
        "bases", "unknown")  # fmt: skip
OF_PASSES = ("phase", "rides", "held", "captured", "collective", "group", "payload", "beside", "partners", "load",
             "kept", "streams", "back")  # fmt: skip
"""Fields of an op that a logical graph leaves at their defaults."""


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
    return {
        "format": FORMAT, "version": VERSION, "phase": captured.phase, "tokens": captured.tokens,
        "model": _spec(model),
        "sequence": sequence_json(captured.graph), "blocks": blocks_json(captured.graph),
        "origins": {name: _places(origins) for name, origins in sorted(captured.origins.items())},
        "gradients": _places(captured.gradients), "modules": dict(sorted(captured.modules.items())),
        "bases": {name: list(bases) for name, bases in sorted(captured.bases.items())},
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
        out[f.name] = simple(value) if parts is None else {k: simple(v) for k, v in parts.items()}
    out["layers"] = [layer_json(layer) | {"repeat": len(list(run))} for layer, run in groupby(model.layer_specs)]
    return out


def read_graph(path: str | Path, text: str | None = None) -> CapturedModel:
    """The captured model of a file; ValueError names file, place, rule and value."""
    content = read_json(path, text)
    try:
        return _model(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _model(whole: Mapping[str, Any]) -> CapturedModel:
    if whole.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT!r}, but {given(whole, 'format')}")
    if whole.get("version") != VERSION:
        raise ValueError(f"version must be {VERSION}, but {given(whole, 'version')}; capture the model again")
    check_keys(whole, KEYS, "the file")
    spec = ModelSpec.from_mapping(read_mapping(whole["model"], "model"))
    graph = read_blocks(whole, spec.name)
    _check_layers(spec, graph)
    _check_logical(graph)
    found = CapturedGraph(
        graph=graph, tokens=read_whole(whole["tokens"], "tokens"), phase=read_text(whole["phase"], "phase"), digest="",
        chosen_keys=0 if spec.indexer is None else spec.indexer.top_k,
        origins={name: _origins(o, f"origins.{name}") for name, o in read_mapping(whole["origins"], "origins").items()},
        gradients=_origins(whole["gradients"], "gradients"),
        modules={path: read_text(kind, f"modules.{path}")
                 for path, kind in read_mapping(whole["modules"], "modules").items()},
        bases={kind: tuple(read_text(base, f"bases.{kind}") for base in read_list(given, f"bases.{kind}"))
               for kind, given in read_mapping(whole["bases"], "bases").items()},
        unknown=tuple(read_text(u, "unknown") for u in read_list(whole["unknown"], "unknown")),
    )  # fmt: skip
    known = {f.name: getattr(spec, f.name) for f in fields(ModelSpec)}
    return CapturedModel(**known, captured=replace(found, digest=digest_of(spec, found)))


def _check_layers(spec: ModelSpec, graph: OpGraph) -> None:
    if tuple(kind.layer for kind in graph.sequence if kind.layer is not None) != spec.layer_specs:
        raise ValueError("sequence must run the layers of model, in their order; it does not")
    ends = [kind for kind in graph.sequence if kind.layer is None]
    positions = [BlockKind.POSITIONS] * bool(spec.max_positions)
    if ends != [BlockKind.EMBEDDING, *positions, BlockKind.HEAD]:
        got = [kind.value for kind in ends]
        raise ValueError(f"sequence must have one embedding and one head, positions if the model has, but got {got}")


def _check_logical(graph: OpGraph) -> None:
    defaults = {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(Op)}
    for i, block in enumerate(graph.blocks.values()):
        for op in block.ops:
            for name in OF_PASSES:
                if getattr(op, name) != defaults[name]:
                    law = "is set by passes, and a captured graph has none behind it"
                    raise ValueError(f"blocks.{i}: {op.name}: {name} {law}; leave it out")


def _origins(value: object, where: str) -> tuple[Origin, ...]:
    return tuple(_origin(place, f"{where}.{i}") for i, place in enumerate(read_list(value, where)))


def _origin(value: object, where: str) -> Origin:
    row = read_list(value, where)
    if len(row) != 4:
        raise ValueError(f"{where} must be [ops, scope, module, line], but got {shown(value)}")
    ops = {read_text(k, where): read_whole(v, where) for k, v in read_mapping(row[0], where).items()}
    return Origin(tuple(ops.items()), *(read_text(item, where) for item in row[1:]))
