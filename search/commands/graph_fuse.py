"""`search graph fuse`: which fusion rule fires where in a graph, what it saves, and why others do not."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import spaces
from estimator.build import build
from estimator.fusion_gain import Cost, Report, explain
from estimator.graph import OpGraph
from estimator.imbalance import Routing
from estimator.model_io import load_model
from estimator.passes import Lowering
from estimator.precision import recipe
from estimator.strategy import Fusion, OwnFusion, Strategy
from hardware.catalog import chip
from hardware.chip import ChipSpec
from hardware.units import format_bytes, format_seconds
from results.report.text import clip, columns, hanging
from search.commands.answer import answer, tell
from search.commands.graph_subject import SEQ, is_configuration
from search.commands.point import read_point
from search.fusion_rules import own_rules

__all__ = ["Subject", "passes_of", "read_lowering", "run"]

CHIP = "h100-80g-sxm"  # of a model that is looked at by itself
OF_MODEL = ("seq", "precision", "chip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A logical graph, and what its passes and prices need."""

    name: str
    told: str
    graph: OpGraph
    by: Lowering
    chip: ChipSpec


def run(args: argparse.Namespace) -> int:
    """Puts the chosen rules in, tells what each saves; with --explain also where, and why others do not fire."""
    own = [rule for path in args.rules for rule in own_rules(path)]
    subject = read_lowering(args, args.config)
    strategy, known = _chosen(args, subject.by.strategy, own)
    report = explain(subject.graph, replace(subject.by, strategy=strategy), subject.chip, known)
    answer(args, text=_text(subject, report, explained=args.explain), data=_data(subject, report))
    return 0


def read_lowering(args: argparse.Namespace, target: str) -> Subject:
    """What `GRAPH|CONFIG` means to the passes: one rank of a configuration, or a whole model on one chip."""
    if is_configuration(target):
        for name in OF_MODEL:
            if getattr(args, name) is not None:
                raise ValueError(f"--{name} is for a model, but {target} is a configuration, which says it; use --set")
        point = read_point(target, args.reference, args.overrides)
        tell(*point.notices)
        if point.system.segments:
            raise ValueError(f"{target}: rules are shown for chips of one kind, but got {point.system.told_chips}")
        r, routing = recipe(point.strategy.precision), Routing.of(point.model, point.workload)
        return Subject(
            name=point.name, told=f"one rank of {point.system.name}, one micro-batch, {r.name}",
            graph=build(point.model, point.workload.seq), chip=point.system.chip,
            by=Lowering(strategy=point.strategy, recipe=r, routing=routing),
        )  # fmt: skip
    if args.overrides or args.reference is not None:
        raise ValueError(f"--set and --reference are for configurations, but {target} is a model; leave them out")
    model, seq = load_model(target, [spaces.MODELS]), args.seq or SEQ
    r, on = recipe(args.precision or "bf16"), chip(args.chip or CHIP)
    strategy = Strategy(precision=r.name)
    return Subject(name=model.name, told=f"one sequence of {seq} tokens on one {on.name}, {r.name}",
                   graph=build(model, seq), by=Lowering(strategy=strategy, recipe=r), chip=on)  # fmt: skip


def _chosen(
    args: argparse.Namespace, strategy: Strategy, own: Sequence[OwnFusion]
) -> tuple[Strategy, tuple[Fusion | OwnFusion, ...]]:
    """The strategy with the rules that the command line asks for, and all that have a name here."""
    brought = [f for f in strategy.fusion if isinstance(f, OwnFusion) and f.value not in {o.value for o in own}]
    known: tuple[Fusion | OwnFusion, ...] = (*Fusion, *brought, *own)
    fusion = strategy.fusion | frozenset(own)
    if args.all:
        fusion = frozenset(known)
    if args.only is not None:
        by_name = {f.value: f for f in known}
        strange = [name for name in args.only.split(",") if name not in by_name]
        if strange:
            raise ValueError(f"--only must name rules of {', '.join(by_name)}, but got {strange[0]!r}")
        fusion = frozenset(by_name[name] for name in args.only.split(","))
    return replace(strategy, fusion=fusion), known


def _text(subject: Subject, report: Report, *, explained: bool) -> str:
    saved = report.before.minus(report.after)
    lines = [
        f"{subject.name}: {subject.told}",
        f"{passes_of(subject.graph)} of all layers, without recompute and traffic between ranks",
        "",
        *columns(["", "seconds", "through HBM", "kept", "kernels"], [
            ["without rules", *_cells(report.before)], ["with these", *_cells(report.after)], ["saved", *_cells(saved)],
        ]),
        "",
        *columns(["rule", "fires", "seconds", "through HBM", "kept", "kernels"], [
            [name, f"{n:.0f}", *_cells(total)] for name, n, total in _by_rule(report)
        ]),
    ]  # fmt: skip
    if not report.firings:
        lines = [*lines[:6], "", "no rule fires"]
    if explained:
        lines += _explained(report)
    elif report.missed:
        lines += ["", f"{len({m.rule for m in report.missed})} rules do nothing here; --explain tells why"]
    return "\n".join(lines) + "\n"


def passes_of(graph: OpGraph) -> str:
    """What is counted of a graph of its phase."""
    return "forward and backward" if graph.phase == "train" else f"forward in {graph.phase}"


def _explained(report: Report) -> list[str]:
    """Every place, and every reason."""
    lines = []
    for (block, times), members in groupby(
        sorted(report.firings, key=lambda f: (f.block, f.times)), key=lambda f: (f.block, f.times)
    ):
        rows = [
            [f.rule, clip(", ".join(f.ops), 44), *_cells(f.saved)[:3]] for f in members
        ]  # fmt: skip
        lines += ["", f"{block} ({times} in the model), saved by one run"]
        lines += columns(["rule", "of", "seconds", "through HBM", "kept"], rows, left=2)
    if report.missed:
        lines += ["", "did not fire"]
    for missed in report.missed:
        where = f" in {missed.block}" if missed.block else ""
        lines += hanging("  ", f"{missed.rule}{where}: {missed.why}")
    return lines


def _by_rule(report: Report) -> list[tuple[str, float, Cost]]:
    """Rules with how often they fire in the model and what they save in all, most seconds first."""
    totals: dict[str, tuple[float, Cost]] = {}
    for f in report.firings:
        n, total = totals.get(f.rule, (0.0, Cost()))
        totals[f.rule] = (n + f.times, total.plus(f.saved.times(f.times)))
    return sorted(((name, n, total) for name, (n, total) in totals.items()), key=lambda row: (-row[2].seconds, row[0]))


def _cells(cost: Cost) -> list[str]:
    return [_signed(cost.seconds, format_seconds), _signed(cost.moved_bytes, format_bytes),
            _signed(cost.kept_bytes, format_bytes), f"{cost.kernels:,.0f}"]  # fmt: skip


def _signed(value: float, form: Any) -> str:  # noqa: ANN401 - a formatter of hardware.units
    if not value or not math.isfinite(value):
        return "-"
    return f"-{form(-value)}" if value < 0 else str(form(value))


def _data(subject: Subject, report: Report) -> dict[str, Any]:
    return {
        "name": subject.name, "of": subject.told, "chip": subject.chip.name,
        "fusion": sorted(f.value for f in subject.by.strategy.fusion),
        "before": asdict(report.before), "after": asdict(report.after),
        "saved": asdict(report.before.minus(report.after)),
        "rules": [{"rule": name, "fires": n, "saved": asdict(total)} for name, n, total in _by_rule(report)],
        "firings": [asdict(f) for f in report.firings], "missed": [asdict(m) for m in report.missed],
    }  # fmt: skip
