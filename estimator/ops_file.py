"""Graphs after any pass as JSON: written exactly and read back, with what their amounts are of.

No model can be made of one: the ops of a rank do not tell those of another layout. Captured graphs have a file of their
own (graph_file.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator.graph import OpGraph
from estimator.graph_json import blocks_json, check_keys, read_blocks, read_json, read_text, sequence_json
from estimator.mapping import given
from estimator.precision import recipe

__all__ = ["OpsFile", "is_ops_text", "ops_text", "read_ops"]

FORMAT, VERSION = "trainspace-ops", 1
KEYS = ("format", "version", "name", "of", "precision", "sequence", "blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsFile:
    """A graph, the recipe that its ops are written in, and in words what it is of."""

    graph: OpGraph
    told: str
    precision: str


def ops_text(ops: OpsFile) -> str:
    """The file's content."""
    content = {
        "format": FORMAT, "version": VERSION, "name": ops.graph.name, "of": ops.told, "precision": ops.precision,
        "sequence": sequence_json(ops.graph), "blocks": blocks_json(ops.graph),
    }  # fmt: skip
    return json.dumps(content, separators=(",", ":")) + "\n"


def is_ops_text(text: str) -> bool:
    """Whether a file claims to be of this format, of any version."""
    return text[:200].lstrip().startswith("{") and f'"{FORMAT}"' in text[:200]


def read_ops(path: str | Path, text: str | None = None) -> OpsFile:
    """The graph of a file; ValueError names file, place, rule and value."""
    content = read_json(path, text)
    try:
        return _ops(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _ops(whole: Mapping[str, Any]) -> OpsFile:
    if whole.get("format") != FORMAT:
        raise ValueError(f"format must be {FORMAT!r}, but {given(whole, 'format')}")
    if whole.get("version") != VERSION:
        raise ValueError(f"version must be {VERSION}, but {given(whole, 'version')}; export the graph again")
    check_keys(whole, KEYS, "the file")
    precision = recipe(read_text(whole["precision"], "precision")).name
    graph = read_blocks(whole, read_text(whole["name"], "name"))
    return OpsFile(graph=graph, told=read_text(whole["of"], "of"), precision=precision)
