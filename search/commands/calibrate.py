"""`search calibrate`: curves from measured operators, their held-out errors, and a system file for spaces to use."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import yaml

from capture.calibrate import Calibration, calibrate, chip_fields, link_fields
from capture.description import description
from capture.fits import Fit
from capture.measured_folder import DEFAULT_FOLDER, Provenance, is_measured, read_folder
from capture.op_tables import read_table
from hardware.catalog import system_from_mapping
from hardware.units import US
from results.report.text import columns
from search.commands.answer import json_text, tell, write

__all__ = ["run"]

DATE = "%Y-%m-%d"


def run(args: argparse.Namespace) -> int:
    """Prints the fits; with -o writes the system they describe."""
    if args.output is not None and Path(args.output).exists():
        raise ValueError(f"{args.output}: -o writes a new file, but it exists; give another name, or remove it")
    about, paths = _tables(args.tables)
    tables = [read_table(path) for path in paths]
    device = args.chip or (about.device.name if about else None)
    found = calibrate(tables, device=device, unknown=args.name is not None, about=about.device if about else None)
    tell(*(fault for table in tables for fault in table.faults))
    if args.output is not None:
        _write_system(args, found)
    args.output = None
    write(args, json_text(_plain(found)) if args.json else "\n".join(_table(c) for c in found))
    return 0


def _tables(names: list[str]) -> tuple[Provenance | None, list[Path]]:
    """Files of tables, or the one folder that `search measure` wrote: by default the one where it writes."""
    paths = [Path(name) for name in names or [DEFAULT_FOLDER]]
    if not names and not is_measured(paths[0]):
        raise ValueError(
            f"search calibrate needs tables; name some, or run search measure, which makes {DEFAULT_FOLDER}/"
        )
    folders = [path for path in paths if path.is_dir()]
    if not folders:
        return None, paths
    if len(paths) > 1:
        raise ValueError(f"{folders[0]}: a measured folder is calibrated alone; give it without other tables")
    return read_folder(folders[0])


def _write_system(args: argparse.Namespace, found: list[Calibration]) -> None:
    if len(found) != 1:
        names = ", ".join(c.name for c in found)
        raise ValueError(f"-o writes one device, but the tables are of {names}; give those of one")
    date = datetime.datetime.now(tz=datetime.UTC).strftime(DATE)
    name = args.name or f"{found[0].name}-calibrated"
    system = description(found[0], name=name, date=date)
    system_from_mapping(system)  # what is written can be read
    head = f"# Written by `search calibrate` on {date}. A space takes it as `system: {Path(args.output).name}`.\n"
    write(args, head + yaml.safe_dump(system, sort_keys=False, width=120, allow_unicode=True))


def _table(found: Calibration) -> str:
    rows = [row for fit in found.fits for row in _rows(fit)]
    lines = columns(["fit", "of", "held out", "mean", "median", "p90", "bias"], rows)
    told = [f"  {fit.subject}: {_values(fit)}" for fit in found.fits]
    return "\n".join([f"{found.name}", *lines, "", *told, ""])


def _rows(fit: Fit) -> list[list[str]]:
    rows = []
    for i, (part, error) in enumerate(fit.errors.items()):
        name = fit.subject if i == 0 else f"  {part}"
        numbers = [f"{x:.1%}" if x == x else "-" for x in (error.mean, error.median, error.p90, error.bias)]
        rows.append([name, f"{fit.num_rows:,}" if i == 0 else "", f"{error.num_held_out:,}", *numbers])
    return rows


def _values(fit: Fit) -> str:
    cells = []
    for key, value in fit.values.items():
        if key.endswith("_s") and not key.endswith("per_s"):
            cells.append(f"{key.removesuffix('_s')} {value / US:.2f} us")
        else:
            cells.append(f"{key} {value:.3g}")
    return ", ".join(cells) + (f" ({fit.remark})" if fit.remark else "")


def _plain(found: list[Calibration]) -> dict[str, Any]:
    return {
        "devices": [
            {
                "name": c.name,
                "known": c.spec is not None,
                "chip": {key: value for key, (value, _) in chip_fields(c).items()},
                "link": link_fields(c),
                "fits": [
                    {
                        "subject": fit.subject, "rows": fit.num_rows, "measured_by": list(fit.measured_by),
                        "values": dict(fit.values),
                        "held_out": {part: {"points": e.num_held_out, "mean": e.mean, "median": e.median,
                                            "p90": e.p90, "bias": e.bias} for part, e in fit.errors.items()},
                    }
                    for fit in c.fits
                ],
                "left_out": list(c.faults),
            }
            for c in found
        ]
    }  # fmt: skip
