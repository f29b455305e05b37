"""`search bench`: the benchmark table of this machine."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hardware.units import format_bytes, format_count, format_seconds
from results.report.text import columns
from search.bench import machine, selected
from search.commands.answer import answer

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Measures the chosen cases one after the other."""
    cases: dict[str, dict[str, Any]] = {}
    for case in selected(args.only):
        print(f"measuring {case.name}", file=sys.stderr, flush=True)
        cases[case.name] = {"value": case.measure(), "unit": case.unit, "better": case.better}
    where = machine()
    answer(args, text=_text(where, cases), data={"machine": where, "cases": cases})
    return 0


def _text(where: dict[str, Any], cases: dict[str, dict[str, Any]]) -> str:
    rows = [[name, _value(case["value"], case["unit"]), f"{case['better']} is better"] for name, case in cases.items()]
    libraries = ", ".join(f"{name} {where[name]}" for name in where if name not in _OWN and where[name])
    header = f"{where['cpu']}, {where['cores']} cores, {format_bytes(where['memory_bytes'])}, {where['system']}"
    return (
        "\n".join([header, f"Python {where['python']}, {libraries}", "", *columns(["case", "value", ""], rows)]) + "\n"
    )


_OWN = ("cpu", "cores", "memory_bytes", "system", "python")


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return format_seconds(value)
    if unit == "B":
        return format_bytes(value)
    return f"{format_count(value)}/s" if unit == "1/s" else f"{value:.3g}"
