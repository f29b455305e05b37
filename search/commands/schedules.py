"""`search schedules`: one configuration under every schedule that runs it, at equal memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from estimator.result import StepResult
from estimator.schedule import Kind, Order, Simulation
from estimator.schedule.rules import VEES
from estimator.schedule_rules import paired
from estimator.strategy import Recompute, Schedule, Strategy
from hardware.units import GB, format_bytes, format_seconds
from results.report.gantt import Lane, save_gantt, text_gantt
from results.report.text import columns, format_cell, hanging
from search.commands.answer import NOTHING_FEASIBLE, answer, check_free, tell
from search.commands.estimate import headline
from search.commands.point import Point, read_point
from search.lane import num_passes, passes_of

__all__ = ["Row", "compared", "run"]

RECOMPUTES = (Recompute(), Recompute.parse("core_attn"), Recompute.parse("full"))
"""What is tried beside the configuration's own recompute, for a schedule that holds more to fit as well."""
MAX_PASSES = 20_000  # micro-batches times chunks: about a minute for all schedules
MAX_GB = 1e6
SMALL_RANKS, SMALL_MICRO_BATCHES = 8, 16  # up to here the terminal shows who runs what


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule with the fastest recompute that fits; where none fits, with the one that takes least memory."""

    strategy: Strategy
    result: StepResult
    passes: Order
    simulated: Simulation
    fits: bool
    held: float  # activations of the worst rank, in micro-batches of a rank's chunks

    @property
    def name(self) -> str:
        """The schedule, with its chunks a rank where they are several."""
        v = int(self.strategy.vpp)
        return self.strategy.schedule.value + (f" x{v}" if v > 1 else "")

    @property
    def activations(self) -> tuple[int, float]:
        """The rank whose activations take most, and their bytes."""
        nbytes = [stage.memory["activations"] + stage.memory["logits"] for stage in self.result.stages]
        worst = int(np.argmax(nbytes))
        return worst, nbytes[worst]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, SI units in the key names."""
        r, (worst, nbytes) = self.result, self.activations
        return {
            "schedule": self.strategy.schedule.value, "vpp": int(self.strategy.vpp),
            "recompute": str(self.strategy.recompute), "fits": self.fits, "step_time_s": float(r.step_time_s),
            "pipeline_s": float(r.pipeline_s), "bubble_s": float(r.bubble_s),
            "bubble_share": round(float(r.bubble_s) / float(r.pipeline_s), 12) + 0.0,  # a remainder: no -1e-16
            "device_memory_bytes": float(r.device_memory_bytes), "activations_bytes": nbytes, "worst_rank": worst,
            "micro_batches_held": self.held, "overlap_ep": int(self.strategy.overlap.ep),
        }  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Prints the table; exit 3 where no schedule fits."""
    point = read_point(args.config, args.reference, args.overrides)
    if args.memory is not None and args.memory > MAX_GB:
        raise ValueError(f"--memory must be at most {MAX_GB:g} GB a chip, but got {args.memory:g}; give gigabytes")
    limit = point.system.usable_hbm_bytes if args.memory is None else args.memory * GB
    picture = args.output is not None and Path(args.output).suffix == ".png"
    if picture:
        check_free(args, args.output)
    try:
        rows, refused = compared(point, limit)
    except ValueError as error:
        raise ValueError(f"{args.config}: {error}") from error
    if picture:
        save_gantt(Path(args.output), [_lane(row) for row in rows], title=f"{point.name}: schedules at equal memory")
        args.output = None
    data = {
        "name": point.name, "limit_bytes": limit, "schedules": [row.as_dict() for row in rows], "refused": refused,
    }  # fmt: skip
    tell(*point.notices)
    answer(args, text=_text(point, rows, refused, limit), data=data)
    return 0 if any(row.fits for row in rows) else NOTHING_FEASIBLE


def compared(point: Point, limit_bytes: float) -> tuple[list[Row], dict[str, str]]:
    """Every schedule, those that fit first and the fastest of them first; and why others are refused."""
    if int(point.strategy.pp) < 2:
        raise ValueError(f"pp ({point.strategy.pp}) must be at least 2 to compare schedules; set strategy.pp")
    _check_work(point)
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for schedule in Schedule:
        tried = []
        for strategy in _variants(point.strategy, schedule):
            try:
                tried.append((strategy, point.evaluate(strategy)))
            except ValueError as error:
                refused[schedule.value] = str(error)
        if tried:
            refused.pop(schedule.value, None)
            fits = [one for one in tried if float(one[1].device_memory_bytes) <= limit_bytes]
            best = min(fits, key=_seconds) if fits else min(tried, key=_bytes)
            rows.append(_row(point, *best, fits=bool(fits)))
    if not rows:
        raise ValueError(refused[point.strategy.schedule.value])
    return sorted(rows, key=lambda row: (not row.fits, float(row.result.step_time_s))), refused


def _check_work(point: Point) -> None:
    """ValueError where simulating every pass of every schedule would take minutes."""
    if (num := num_passes(point.model, point.strategy, point.system, point.workload)) > MAX_PASSES:
        m = num // (int(point.strategy.pp) * int(point.strategy.vpp))
        raise ValueError(
            f"micro-batches ({m}) times pp * vpp must be at most {MAX_PASSES} to simulate every schedule, but are "
            f"{num}; lower workload.global_batch, or raise strategy.micro_batch"
        )


def _seconds(one: tuple[Strategy, StepResult]) -> float:
    return float(one[1].step_time_s)


def _bytes(one: tuple[Strategy, StepResult]) -> float:
    return float(one[1].device_memory_bytes)


def _variants(s: Strategy, schedule: Schedule) -> list[Strategy]:
    """The configuration under a schedule: its chunks a rank as that asks, every recompute."""
    own = int(s.vpp)
    vpp = 2 if schedule in VEES else max(own, 2) if schedule in {Schedule.INTERLEAVED, Schedule.BREADTH_FIRST} else 1
    changed = replace(s, schedule=schedule, vpp=vpp)
    if vpp != own:  # layers by chunk mean nothing there
        layout = None if isinstance(s.layout, tuple) else s.layout
        changed = replace(changed, layout=layout, recompute_per_chunk=None)
    if not paired(schedule):
        changed = replace(changed, overlap=replace(s.overlap, ep=0))
    others = [
        replace(changed, recompute=choice, recompute_layers=0, recompute_per_chunk=None)
        for choice in RECOMPUTES if choice != s.recompute
    ]  # fmt: skip
    return [changed, *others]


def _row(point: Point, strategy: Strategy, result: StepResult, *, fits: bool) -> Row:
    passes = passes_of(point.model, strategy, point.system, point.workload, result)
    return Row(
        strategy=strategy, result=result, passes=passes.order, simulated=passes.simulated, fits=fits, held=passes.held
    )


def _lane(row: Row) -> Lane:
    worst, nbytes = row.activations
    told = "" if row.fits else ", does not fit"
    return Lane(
        title=f"{row.name}, recompute {row.strategy.recompute}: {format_seconds(float(row.result.step_time_s))} a "
        f"step, {format_bytes(float(row.result.device_memory_bytes))}{told}",
        passes=row.passes, start=row.simulated.start, end=row.simulated.end, worst=worst, peak_bytes=nbytes,
    )  # fmt: skip


def _text(point: Point, rows: Sequence[Row], refused: dict[str, str], limit: float) -> str:
    header = ["schedule", "recompute", "a step", "bubble", "memory", "activations", "held", "fits"]
    cells = []
    for row in rows:
        told, (worst, nbytes) = row.as_dict(), row.activations
        cells.append([
            row.name, told["recompute"], format_cell("step_time_s", told["step_time_s"]), f"{told['bubble_share']:.1%}",
            format_bytes(told["device_memory_bytes"]), f"{format_bytes(nbytes)} on rank {worst}",
            f"{row.held:.4g}", "yes" if row.fits else "no",
        ])  # fmt: skip
    lines = [
        *headline(point), "",
        *hanging("", f"schedules within {format_bytes(limit)} a chip, each with the fastest of the configuration's own "
                 "recompute, none, core_attn and full that fits; held: micro-batches alive on the worst rank"), "",
        *columns(header, cells, left=2),
    ]  # fmt: skip
    asked = point.strategy.overlap.ep and int(point.strategy.ep) > 1
    if bare := [row.name for row in rows if asked and not row.strategy.overlap.ep]:
        lines += ["", *hanging("without overlap of ep, which needs two micro-batches side by side: ", ", ".join(bare))]
    if refused:
        lines += ["", *(line for name, why in refused.items() for line in hanging(f"refused: {name}: ", why))]
    p = int(point.strategy.pp)
    for row in rows:
        m = sum(item.kind in {Kind.F, Kind.PAIR} for item in row.passes[0]) // int(row.strategy.vpp)
        if p <= SMALL_RANKS and m <= SMALL_MICRO_BATCHES:
            lines += ["", row.name, *text_gantt(_lane(row))]
    return "\n".join(lines) + "\n"
