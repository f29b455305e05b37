"""`search fit`: the largest micro-batch, longest sequence, fewest chips and cheapest recompute that still fit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from hardware.units import format_bytes
from results.report import arithmetic, settings
from results.report.text import columns, format_cell, hanging
from search.commands.answer import NOTHING_FEASIBLE, answer, tell
from search.commands.estimate import headline
from search.commands.fitting import LONGEST, SEQUENCE_STEP, Fit, fits_of
from search.commands.point import Point, read_point

__all__ = ["run"]

WORDS = {
    "micro_batch": "largest micro-batch", "seq": "longest sequence", "num_gpus": "fewest chips",
    "recompute": "cheapest recompute",
}  # fmt: skip
OF = {
    "micro_batch": "divisors of a replica's sequences",
    "seq": f"multiples of {SEQUENCE_STEP} tokens, the number of sequences as it is",
    "num_gpus": "replicas that divide the batch, tp, cp and pp as they are",
    "recompute": "none, every set of the model's modules, the first layers of each chunk, full; the fastest that fits",
}  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Answers four questions about one configuration; exit 3 where nothing makes it fit."""
    point = read_point(args.config, args.reference, args.overrides)
    try:
        point = point.settled()
        result = point.evaluate()
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from error
    found = fits_of(point, longest=LONGEST if args.longest is None else args.longest)
    row = point.row(result)
    lines = [
        *headline(point), *hanging("layout    ", arithmetic(row)), *hanging("          ", "; ".join(settings(row))), "",
        *_verdict(point, float(result.device_memory_bytes), is_feasible=bool(result.feasible)), "", *_table(found),
        *_explained(found),
    ]  # fmt: skip
    data = {
        "name": point.name, "feasible": bool(result.feasible), "device_memory_bytes": float(result.device_memory_bytes),
        "usable_memory_bytes": point.system.usable_hbm_bytes, "fits": {one.question: asdict(one) for one in found},
    }  # fmt: skip
    tell(*point.notices)
    answer(args, text="\n".join(lines) + "\n", data=data)
    return 0 if any(one.value is not None for one in found) else NOTHING_FEASIBLE


def _verdict(point: Point, device: float, *, is_feasible: bool) -> list[str]:
    needs = f"{format_bytes(device)} of {format_bytes(point.system.usable_hbm_bytes)} usable"
    return [f"as it is: fits, {needs}" if is_feasible else f"as it is: does not fit, {needs}"]


def _table(found: Sequence[Fit]) -> list[str]:
    cells = []
    for one in found:
        fits = one.value is not None
        beyond = (
            f"{one.next_value}: {format_bytes(one.next_over_bytes)} too much" if one.next_value is not None else "-"
        )
        cells.append([
            WORDS[one.question], str(one.now), str(one.value) if fits else "none fits",
            format_cell("step_time_s", one.step_time_s), format_cell("device_memory_bytes", one.device_memory_bytes),
            beyond,
        ])  # fmt: skip
    return columns(["", "now", "fits", "a step", "memory", "the next"], cells, left=3)


def _explained(found: Sequence[Fit]) -> list[str]:
    lines = [""]
    for one in found:
        lines += hanging(f"{WORDS[one.question]}: ", f"{one.legal} legal of {one.tried} {OF[one.question]}")
    return lines
