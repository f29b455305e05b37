"""Measured seconds of fused operations: opfs_time of dPRO, profiled on the device at hand. Measures nothing itself.

The file is JSON, `{"fused": [{"ops": ["BW.b", "BW.a"], "seconds": 1.2e-3}]}`: operations that follow each other, and
what they take as one. A longer group says what its operations save together, each of its joins an equal share; a pair
is taken as it is.
"""

from __future__ import annotations

from pathlib import Path

from estimator.graph_json import check_keys, read_json, read_list, read_mapping, read_text
from estimator.mapping import shown

__all__ = ["read_fused"]


def read_fused(path: str | Path) -> dict[tuple[str, ...], float]:
    """Seconds by the names of what runs as one; ValueError names file, place, rule and value."""
    content = read_json(path)
    try:
        check_keys(content, ("fused",), "the file")
        rows = read_list(content["fused"], "fused")
        return dict(_row(row, f"fused.{i}") for i, row in enumerate(rows))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _row(value: object, where: str) -> tuple[tuple[str, ...], float]:
    given = read_mapping(value, where)
    check_keys(given, ("ops", "seconds"), where)
    ops = tuple(read_text(name, f"{where}.ops.{i}") for i, name in enumerate(read_list(given["ops"], f"{where}.ops")))
    seconds = given["seconds"]
    if len(ops) < 2:
        raise ValueError(f"{where}.ops must name at least two operations, but names {len(ops)}")
    if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
        raise ValueError(f"{where}.seconds must be a positive number, but got {shown(seconds)}")
    return ops, float(seconds)
