"""`search compare`: two configurations, what differs between them, and where the time and the memory go apart."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from estimator.result import StageResult, StepResult
from hardware.units import format_bytes, format_seconds
from results.report import arithmetic, settings
from results.report.breakdown import TIME_TERMS
from results.report.comparison import item_table, rank_table, step_table
from results.report.text import hanging
from results.schema import STRATEGY_NAMES, strategy_json
from search.commands.answer import answer, tell
from search.commands.estimate import layout_phrase
from search.commands.point import Point, model_line, read_point
from search.commands.rows import megatron_layout

__all__ = ["Side", "comparison_data", "comparison_text", "run", "side_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two: the configuration, its price, and both as a row."""

    letter: str
    point: Point
    result: StepResult
    row: dict[str, Any]

    @property
    def worst(self) -> StageResult:
        """The rank that holds most."""
        return max(self.result.stages, key=_allocated)

    @property
    def facts(self) -> dict[str, Any]:
        """What may differ, by name."""
        p = self.point
        work = {"workload.seq": p.workload.seq, "workload.global_batch": p.workload.global_batch}
        strategy = {name: self.row[name] for name in STRATEGY_NAMES}
        return {"model": p.model.name, "system": f"{p.system.name}, {p.system.num_chips} chips", **work, **strategy}


def run(args: argparse.Namespace) -> int:
    """Compares two configurations; ValueError where one is illegal."""
    a = _side("A", args.a, [*args.overrides, *args.overrides_a])
    b = _side("B", args.b, [*args.overrides, *args.overrides_b])
    tell(*dict.fromkeys([*a.point.notices, *b.point.notices]))
    answer(args, text=comparison_text(a, b), data=comparison_data(a, b))
    return 0


def _side(letter: str, target: str, overrides: list[str]) -> Side:
    return side_of(letter, read_point(target, None, overrides), target)


def side_of(letter: str, point: Point, target: str) -> Side:
    """One of the two, priced; ValueError names it where it is illegal."""
    try:
        point = point.settled()
        result = point.evaluate()
    except ValueError as error:
        raise ValueError(f"{target}: {error}") from error
    return Side(letter=letter, point=point, result=result, row=point.row(result))


def _differences(a: Side, b: Side) -> dict[str, tuple[Any, Any]]:
    """What is not the same, by name; models and systems of one name are held against each other as well."""
    told = {name: (x, b.facts[name]) for name, x in a.facts.items() if x != b.facts[name]}
    for name, mine, other in (("model", a.point.model, b.point.model), ("system", a.point.system, b.point.system)):
        if mine != other:
            told.setdefault(name, (a.facts[name], f"{b.facts[name]}, another description"))
    return told


def _headline(a: Side, b: Side, differ: Mapping[str, tuple[Any, Any]]) -> str:
    """Which is faster, by how much, and for how much memory."""
    if not differ:
        return "A and B are the same configuration"
    x, y = float(a.result.step_time_s), float(b.result.step_time_s)
    more = float(b.result.device_memory_bytes) - float(a.result.device_memory_bytes)
    grown = (
        f"{format_bytes(abs(more))} {'more' if more > 0.0 else 'less'} on the worst rank" if more else "equal memory"
    )
    if x == y:
        rate = f"takes as long, {format_seconds(x)} a step"
    else:
        share = f"{abs(y - x) / x:.1%}"  # of A, which the sentence holds B against
        rate = f"is {share} {'faster' if y < x else 'slower'}, {format_seconds(y)} a step against {format_seconds(x)}"
    names = ", ".join(differ)
    if set(differ) == {"layout"}:
        return f"the layout alone differs: B {rate}, with {grown}"
    return f"B {rate}, with {grown}; {len(differ)} difference{'s'[: len(differ) - 1]}: {names}"


def comparison_text(a: Side, b: Side) -> str:
    """Both, what differs, the waterfall of their steps and the items of their fullest ranks."""
    differ = _differences(a, b)
    lines = hanging("", _headline(a, b, differ))
    for side in (a, b):
        row, p = side.row, side.point
        told = [p.name, *([] if "model" not in differ else [model_line(p.model)]), arithmetic(row), *settings(row)]
        lines += ["", *hanging(f"{side.letter}  ", "; ".join(told))]
        if phrase := layout_phrase(p, row):
            lines += hanging("   ", phrase)
        if not side.result.feasible:
            over = float(side.result.device_memory_bytes) - p.system.usable_hbm_bytes
            lines += hanging("   ", f"does not fit: {format_bytes(over)} too much")
    if differ:
        lines += ["", "what differs"]
        for name, (x, y) in differ.items():
            lines += hanging(f"  {name:<20}", f"{x} -> {y}")
    ranks = f"A's rank {a.result.finishing_rank} and B's rank {b.result.finishing_rank}, which work most"
    lines += ["", f"time of {ranks}", step_table(a.row, b.row).rstrip()]
    lines += ["", f"memory of A's rank {a.worst.rank} and B's rank {b.worst.rank}, the fullest"]
    lines += [item_table(a.worst.memory, b.worst.memory).rstrip()]
    if {"layout", "pp", "vpp", "schedule", "model"} & differ.keys():
        lines += ["", "ranks: layers of their chunks, seconds of one micro-batch, allocated bytes"]
        lines += [rank_table(_ranks(a), _ranks(b)).rstrip()]
    return "\n".join(lines) + "\n"


def _ranks(side: Side) -> list[tuple[str, float, float]]:
    return [
        ("+".join(map(str, stage.layers)), stage.forward_s + stage.backward_s, _allocated(stage))
        for stage in side.result.stages
    ]


def _allocated(stage: StageResult) -> float:
    return sum(stage.memory.values())


def comparison_data(a: Side, b: Side) -> dict[str, Any]:
    """The same for programs."""
    differ = _differences(a, b)
    terms = [*TIME_TERMS, "step_time_s"]
    items = dict.fromkeys([*a.worst.memory, *b.worst.memory])
    return {
        "headline": _headline(a, b, differ),
        "a": _side_data(a),
        "b": _side_data(b),
        "differences": [{"name": name, "a": x, "b": y} for name, (x, y) in differ.items()],
        "waterfall": [
            {"term": t, "a_s": a.row[t], "b_s": b.row[t], "difference_s": b.row[t] - a.row[t]} for t in terms
        ],
        "memory": [
            {"item": i, "a_bytes": x, "b_bytes": y, "difference_bytes": y - x}
            for i, x, y in ((i, a.worst.memory.get(i, 0.0), b.worst.memory.get(i, 0.0)) for i in items)
        ],
    }


def _side_data(side: Side) -> dict[str, Any]:
    p, result = side.point, side.result
    return {
        "name": p.name,
        "model": p.model.name,
        "system": p.system.name,
        "workload": {"seq": p.workload.seq, "global_batch": p.workload.global_batch},
        "strategy": strategy_json(side.row),
        "megatron_layout": megatron_layout(side.row, p.model),
        "feasible": bool(result.feasible),
        "step_time_s": result.step_time_s,
        "device_memory_bytes": result.device_memory_bytes,
        "finishing_rank": result.finishing_rank,
        "fullest_rank": side.worst.rank,
        "ranks": [
            {"rank": s.rank, "layers": list(s.layers), "seconds": s.forward_s + s.backward_s, "bytes": _allocated(s)}
            for s in result.stages
        ],
    }
