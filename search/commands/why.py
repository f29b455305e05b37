"""`search why`: what rejected candidates, which came closest, and what would make them fit."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from estimator.strategy import Strategy
from hardware.system import SystemSpec
from hardware.units import format_bytes, format_count
from results.report import rejection_table
from results.report.text import clip, hanging
from results.schema import REJECTION_FIELDS, conform, strategy_at
from results.store import RunFolder
from results.table import Table
from search.commands.answer import answer
from search.commands.estimate import remedy_lines
from search.commands.point import Point, read_point, split_run
from search.commands.remedies import remedies
from search.commands.rows import json_row, summary
from search.commands.runs import find_run, space_of
from search.space import Space, load_space

__all__ = ["closest_lines", "counts_line", "rejections_of", "run"]

COUNTS = (
    ("raw", "points"),
    ("legal", "legal"),
    ("fits", "fit in memory"),
    ("priced", "priced"),
    ("front", "on the front"),
)
NAMES = tuple(field.name for field in REJECTION_FIELDS)


def run(args: argparse.Namespace) -> int:
    """Explains a run, a space or a configuration."""
    target = args.target
    is_file = Path(target).is_file() or Path(target).suffix in {".yaml", ".yml"}
    if args.reference is not None or split_run(target) is not None:
        return _why_point(args, read_point(target, args.reference, args.overrides))
    if not is_file and (Path(target).is_dir() or target == "latest" or Path("runs", target).is_dir()):
        return _why_run(args, find_run(target))
    space = load_space(target, args.overrides)
    if space.is_point:
        return _why_point(args, read_point(target, None, args.overrides))
    return _why_space(args, space)


def rejections_of(by_rule: Mapping[str, int], examples: Mapping[str, str]) -> Table:
    """Rules with counts and examples as a table."""
    rows = [(rule, count, examples.get(rule, "")) for rule, count in by_rule.items() if count]
    return conform({name: [row[i] for row in rows] for i, name in enumerate(NAMES)}, REJECTION_FIELDS)


def counts_line(counts: Mapping[str, Any]) -> str:
    """How many candidates there were, and how many passed each gate."""
    parts = [f"{format_count(counts[name])} {text}" for name, text in COUNTS if counts.get(name) is not None]
    return ", ".join(parts)


def closest_lines(closest: Sequence[Mapping[str, Any]]) -> list[str]:
    """The candidates that come closest to fitting, each with what would make it fit."""
    lines = ["closest to fitting:"] if closest else []
    for row in closest:
        needs = f"{format_bytes(row['device_memory_bytes'])} of {format_bytes(row['capacity_bytes'])}"
        lines += hanging("  ", f"{_degrees(row)}: {needs}, {format_bytes(row['short_by_bytes'])} too much")
        lines += hanging("    ", clip(str(row["remedy"]), 300)) if row.get("remedy") else []
    return lines


def _degrees(row: Mapping[str, Any]) -> str:
    shown = ("tp", "cp", "pp", "ep", "etp", "vpp", "dp", "micro_batch", "zero_stage", "schedule", "recompute")
    return ", ".join(f"{name} {row[name]}" for name in shown if name in row and row[name] != 1)


def _why_run(args: argparse.Namespace, folder: RunFolder) -> int:
    manifest = folder.manifest
    rejections = folder.read_rejections()
    closest = manifest.get("closest") or []
    lines = [f"run {folder.path}, {folder.state}", *hanging("", counts_line(manifest["counts"])), ""]
    lines += [rejection_table(rejections).rstrip(), *closest_lines(closest)]
    infeasible = [row for row in folder.read_reference().rows() if not row["feasible"]]
    for row in infeasible:
        lines += ["", *hanging(f"reference {clip(row['name'])}: ", row["reason"]), *_remedies_of(folder, row)]
    data = {
        "run": str(folder.path),
        "counts": manifest["counts"],
        "rejections": list(rejections.rows()),
        "closest": closest,
        "reference": [json_row(row) for row in infeasible],
    }
    answer(args, text="\n".join(lines) + "\n", data=data)
    return 0


def _remedies_of(folder: RunFolder, row: Mapping[str, Any]) -> list[str]:
    """What would make a reference point of a run fit, where memory is what it lacks."""
    if row["reason"] != "memory":
        return []
    space = space_of(folder)
    (system,) = [s for s in space.systems if s.name == row["system"] and s.num_chips == row["num_gpus"]][:1]
    point = _point(space, row["name"], strategy_at(row), system)
    return remedy_lines(remedies(point), system.usable_hbm_bytes)


def _point(space: Space, name: str, strategy: Strategy, system: SystemSpec) -> Point:
    return Point(name=name, model=space.model, system=system, workload=space.workload, strategy=strategy)


def _why_space(args: argparse.Namespace, space: Space) -> int:
    from search.structures import enumerate_space

    found = enumerate_space(space)
    counts = {"raw": space.raw_size, "legal": found.legal}
    rejections = rejections_of(found.by_rule, found.examples)
    text = f"{space.name}: {counts_line(counts)}\n{rejection_table(rejections)}"
    text += f"what memory rejects, a run tells: search launch {args.target}\n"
    data = {"space": space.name, "counts": counts, "rejections": list(rejections.rows()), "closest": []}
    answer(args, text=text, data=data)
    return 0


def _why_point(args: argparse.Namespace, point: Point) -> int:
    """Legal and fitting, illegal with the rule, or too large with what would make it fit."""
    data: dict[str, Any] = {"config": point.name, "legal": True, "feasible": False, "reason": "", "remedies": []}
    try:
        result = point.evaluate()
    except ValueError as error:
        reason = " ".join(str(error).split())
        answer(args, text=f"{point.name} is illegal: {reason}\n", data=data | {"legal": False, "reason": reason})
        return 0
    capacity, device = point.system.usable_hbm_bytes, float(result.device_memory_bytes)
    lines = [summary(point.row(result))]
    data |= {"feasible": bool(result.feasible), "device_memory_bytes": device, "usable_memory_bytes": capacity}
    if result.feasible:
        lines.append(f"legal and fits: {format_bytes(device)} of {format_bytes(capacity)} usable")
    else:
        found = remedies(point)
        short = format_bytes(device - capacity)
        lines.append(f"legal, but {format_bytes(device)} of {format_bytes(capacity)} usable: {short} too much")
        lines += remedy_lines(found, capacity)
        data |= {"reason": result.reason, "remedies": [remedy.as_dict() for remedy in found]}
    answer(args, text="\n".join(lines) + "\n", data=data)
    return 0
