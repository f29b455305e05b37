"""`search measure`: times operators and collectives of this machine's device, within seconds that it tells before."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

from capture.bench import HEADERS, Measured, measure, pilot
from capture.device import Device, open_device
from capture.measure_plan import Plan, make_plan
from capture.measured_folder import DEFAULT_FOLDER, check_new, write_folder
from results.report.text import columns
from search.commands.answer import answer, tell

__all__ = ["run"]

DATE = "%Y-%m-%d"
FIRST = {"cpu": "fp32", "cuda": "bf16"}  # formats that training on a kind of device has by default
NEEDED = {"gemm": 8, "attention": 48, "streams": 8, "collectives": 12}  # rows: FEWEST in capture/fit_*.py
TALKING = 2  # ranks of collectives on a CPU that trains with one: what a second would pay


def run(args: argparse.Namespace) -> int:
    """Tells the plan, measures, writes the folder; with --check runs training steps instead."""
    if args.check is not None:
        from search.commands.measure_check import check

        return check(args)
    folder = Path(args.out or DEFAULT_FOLDER)
    check_new(folder)
    device = open_device(args.device, args.ranks)
    dtypes = list(dict.fromkeys(args.dtypes or [FIRST[device.kind]]))
    plan = make_plan(device.kind, args.seconds, dtypes, pilot(device, dtypes), _talking(device))
    tell(f"{device.told()}", f"plan: {plan.told()}", f"tables go to {folder}/")
    found = measure(device, plan)
    if not any(found.rows.values()):
        raise ValueError(
            "no sample could be trusted: other processes kept the machine busy, or repeats differed; measure again "
            "when it is quiet"
        )
    date = datetime.datetime.now(tz=datetime.UTC).strftime(DATE)
    paths = write_folder(folder, device, found, date)
    answer(args, text=_text(device, plan, found, folder), data=_plain(device, plan, found, paths))
    return 0


def _talking(device: Device) -> int:
    """Ranks of the largest collective: those that train together, on a CPU two where its cores allow."""
    return device.ranks if device.kind == "cuda" else max(device.ranks, min(TALKING, device.threads * device.ranks))


def _planned(plan: Plan) -> dict[str, int]:
    return {
        "gemm": len(plan.products), "attention": 2 * len(plan.attentions), "streams": len(plan.streams),
        "collectives": len(plan.traffic),
    }  # fmt: skip


def _text(device: Device, plan: Plan, found: Measured, folder: Path) -> str:
    rows = []
    for table, planned in _planned(plan).items():
        kept, lost = found.rows.get(table, []), found.distrusted.get(table, 0)
        spread = sorted(float(str(row[HEADERS[table].index("spread")])) for row in kept)
        middle = f"{spread[len(spread) // 2]:.1%}" if spread else "-"
        rows.append([table, f"{planned}", f"{len(kept)}", f"{lost}", middle])
    lines = columns(["table", "planned", "trusted", "left out", "spread of repeats"], rows)
    lost = sum(found.distrusted.values())
    told = [f"measured {device.name} in {found.took_s:.0f} of {plan.seconds:.0f} s"]
    if lost:
        told.append(f"{lost} samples are left out: each time the machine was busy, or repeats differed")
    if found.not_reached:
        told.append(f"{found.not_reached} shapes were not reached in time")
    told += [f"not measured: {text}" for text in found.unsupported]
    remedy = "measure again when the machine is quiet" if lost > found.not_reached else "give more --seconds"
    for table, needed in NEEDED.items():
        if _planned(plan)[table] and (have := len(found.rows.get(table, []))) < needed:
            told.append(f"too few for a fit: {have} of {table}, where {needed} are needed; {remedy}")
    target = "" if str(folder) == DEFAULT_FOLDER else f" {folder}"
    told.append(f"next: search calibrate{target} --name my-cluster -o my-cluster.yaml")
    return "\n".join([*lines, "", *told, ""])


def _plain(device: Device, plan: Plan, found: Measured, paths: list[Path]) -> dict[str, Any]:
    return {
        "device": device.plain(), "planned": _planned(plan), "expected_s": plan.expected_s, "limit_s": plan.seconds,
        "took_s": found.took_s, "trusted": {table: len(rows) for table, rows in found.rows.items()},
        "distrusted": found.distrusted, "unsupported": found.unsupported, "not_reached": found.not_reached,
        "tables": [str(path) for path in paths],
    }  # fmt: skip
