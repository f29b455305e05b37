"""`search why`: what rejected candidates, which came closest, and what would make them fit."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hardware.units import format_bytes, format_count
from results.report import rejection_table
from results.report.text import clip, hanging
from results.schema import REJECTION_FIELDS, conform, strategy_at
from results.store import RunFolder
from results.table import Table
from search.commands.answer import answer, tell
from search.commands.estimate import remedy_lines
from search.commands.point import Point, read_point, split_named, split_run
from search.commands.remedies import Remedy, remedies
from search.commands.rows import json_rows, summary
from search.commands.runs import find_run, space_of
from search.commands.served_show import why_served
from search.finalists import system_of_row
from search.fold import folded
from search.space import Space, load_space
from search.structures import enumerate_space
from search.trials import closest_of

__all__ = ["closest_lines", "closest_remedies", "counts_line", "degrees_line", "rejections_of", "run"]

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
    if args.reference is not None or split_named(target) is not None or split_run(target) is not None:
        return _why_point(args, read_point(target, args.reference, args.overrides))
    if not is_file and (Path(target).is_dir() or target == "latest" or Path("runs", target).is_dir()):
        folder = find_run(target, answers=True)
        return why_served(args, folder) if folder.answers else _why_run(args, folder)
    space = load_space(target, args.overrides)
    if space.is_point:
        return _why_point(args, read_point(target, None, args.overrides))
    return _why_space(args, space)


def rejections_of(by_rule: Mapping[str, int], examples: Mapping[str, str]) -> Table:
    """Rules with counts and examples as a table."""
    rows = [(rule, count, examples.get(rule, "")) for rule, count in by_rule.items() if count]
    return conform({name: [row[i] for row in rows] for i, name in enumerate(NAMES)}, REJECTION_FIELDS)


def counts_line(counts: Mapping[str, Any], open_axes: Iterable[str] = ()) -> str:
    """How many candidates there were, and how many passed each gate; points are not counted along open axes."""
    told = [(name, text) for name, text in COUNTS if counts.get(name) is not None]
    if counts.get("pruned"):  # what bounds ruled out was never held against memory
        told = [(name, text) for name, text in told if name != "fits"]
        by_bounds = "priced, the others ruled out by rules, memory or bounds"
        told = [(name, by_bounds if name == "priced" else text) for name, text in told]
    if counts.get("examined") is not None:  # by a study, which enumerates nothing
        told = [(name, "legal among those examined" if name == "legal" else text) for name, text in told]
    beside = {"raw": f" beside what is free ({', '.join(open_axes)})"} if tuple(open_axes) else {}
    return ", ".join(f"{format_count(counts[name])} {text}{beside.get(name, '')}" for name, text in told)


def closest_remedies(space: Space, closest: Sequence[Mapping[str, Any]]) -> list[Remedy]:
    """What would make the first of the closest fit, where memory is what it lacks; no axis limits it."""
    if not closest or not closest[0]["short_by_bytes"]:
        return []
    return remedies(_point(space, closest[0], "closest"))


def closest_lines(closest: Sequence[Mapping[str, Any]], found: Sequence[Remedy]) -> list[str]:
    """The candidates that come closest, each with what stands in its way, and remedies for the first."""
    told = dict.fromkeys((f"{degrees_line(row)}; {_needs(row)}", row["remedy"]) for row in closest)
    lines = ["", "closest:"] if closest else []
    for text, remedy in told:
        lines += [*hanging("  ", text), *hanging("    ", remedy)]
    if found:
        header, *rest = remedy_lines(found, closest[0]["capacity_bytes"])
        lines += [f"for the first of them, {header}", *rest]
    return lines


def _needs(row: Mapping[str, Any]) -> str:
    return f"{format_bytes(row['device_memory_bytes'])} of {format_bytes(row['capacity_bytes'])}"


def degrees_line(row: Mapping[str, Any]) -> str:
    """A configuration without what depends on more than its strategy."""
    degrees = [f"{name} {row[name]}" for name in ("tp", "cp", "pp", "dp", "ep", "etp", "vpp") if row[name] != 1]
    rest = [f"{name} {row[name]}" for name in ("micro_batch", "zero_stage", "recompute")]
    return ", ".join([*degrees, row["schedule"], *rest, f"on {row['system']}"])


def _why_run(args: argparse.Namespace, folder: RunFolder) -> int:
    counts, space = folder.manifest["counts"], space_of(folder)
    rejections, infeasible = folder.read_rejections(), folder.read_reference()
    infeasible = infeasible.where(~infeasible["feasible"])
    closest = [] if len(folder.read_front()) else closest_of(folder, space)
    found = closest_remedies(space, closest)
    told = hanging("", counts_line(counts, space.open_axes))
    lines = [f"run {folder.path}, {folder.state}", *told, "", rejection_table(rejections).rstrip()]
    lines += closest_lines(closest, found)
    for row in infeasible.rows():
        lines += ["", *hanging(f"reference {clip(row['name'])} is not feasible: ", row["reason"])]
        if row["reason"] == "memory":
            point = _point(space, row, row["name"])
            lines += remedy_lines(remedies(point), point.system.usable_hbm_bytes)
    data = {
        "run": str(folder.path),
        "counts": counts,
        "rejections": list(rejections.rows()),
        "closest": closest,
        "remedies": [remedy.as_dict() for remedy in found],
        "reference": json_rows(infeasible, space.model),
    }
    answer(args, text="\n".join(lines) + "\n", data=data)
    return 0


def _point(space: Space, row: Mapping[str, Any], name: str) -> Point:
    """A row of a run as a point of its space."""
    system, strategy = system_of_row(space, row), strategy_at(row, space.fusion_rules)
    return Point(name=name, model=space.model, system=system, workload=space.workload, strategy=strategy)


def _why_space(args: argparse.Namespace, space: Space) -> int:
    space, notices = folded(space)
    found = enumerate_space(space)
    counts = {"raw": space.raw_size, "legal": found.legal}
    rejections = rejections_of(found.by_rule, found.examples)
    told = hanging(f"{space.name}: ", counts_line(counts, space.open_axes))
    text = "\n".join([*notices, *told, rejection_table(rejections)])
    text += f"what memory rejects, a run tells: search launch {args.target}\n"
    data = {
        "space": space.name, "counts": counts, "rejections": list(rejections.rows()), "closest": [], "remedies": [],
        "notices": list(notices),
    }  # fmt: skip
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
    tell(*point.notices)
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
