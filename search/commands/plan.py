"""`search plan`: what a training run of so many tokens takes, at each point of a front or on each cluster of a space.

A space is swept in this process and nothing is kept of it but the answer; `search launch` keeps a run.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from results.files import write_bytes
from results.goodput import Goodput, Reliability, goodput
from results.plan import Plan, plan_front, within
from results.plan_answers import Answers, Curve, answers, curves
from results.plan_table import plan_rows, write_parquet
from results.report import csv_text
from results.report.plan_page import plan_page
from results.report.plan_text import answer_lines, assumed_pairs, curve_lines, plan_table, point_phrase
from results.report.text import counted, hanging
from results.table import Table
from search.clusters import fastest_of_each
from search.commands.answer import NOTHING_FEASIBLE, answer, check_writable, tell, write
from search.commands.report import finished_run
from search.commands.runs import find_batch, space_of
from search.finalists import system_of_row
from search.space import Space, load_space, shipped_spaces

__all__ = ["run"]

OFF = "off"
SHOWN_CURVES = 6
ENDINGS = (".csv", ".parquet", ".html", ".txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """Points of a space, what they come to, and the places of those that keep the limits, quickest first."""

    name: str
    what: str
    space: Space
    front: Table
    points: Plan
    good: Goodput | None
    reliability: Reliability | None
    kept: NDArray[np.intp]
    best: Answers
    curves: list[Curve]


def run(args: argparse.Namespace) -> int:
    """Days, GPU-hours, cost, energy and CO2 per point; exit 3 where none ends in time and in budget."""
    reliability = _reliability(args.goodput)
    if args.output is not None:
        check_writable(args, args.output)
        _check_ending(args)
    name, what, space, front = _asked(args)
    if not len(front):
        tell(f"{name}: nothing is feasible, so there is nothing to plan; search why {name} tells why")
        return NOTHING_FEASIBLE
    plan = _planned(args, name, what, space, front, reliability)
    _answer(args, plan)
    return 0 if len(plan.kept) else NOTHING_FEASIBLE


def _check_ending(args: argparse.Namespace) -> None:
    """ValueError where the name of -o ends in nothing that a plan is written as."""
    if not args.json and (ending := Path(args.output).suffix) not in ENDINGS:
        raise ValueError(f"{args.output}: a plan's name must end in {', '.join(ENDINGS)}, but ends in "
                         f"{ending or 'nothing'}; with --json any name will do")  # fmt: skip


def _asked(args: argparse.Namespace) -> tuple[str, str, Space, Table]:
    """What is planned over: its name, how its points are called, the space they are of, and the points."""
    target = args.target
    is_file = Path(target).is_file() or Path(target).suffix in {".yaml", ".yml"}
    is_run = Path(target).is_dir() or Path("runs", target).is_dir() or find_batch(target) is not None
    if not is_file and (is_run or target not in shipped_spaces()):
        if args.overrides:
            raise ValueError(f"--set changes a space, but {target} is a run; give the space file")
        folder = finished_run(target)
        return str(folder.path), "points of the front", space_of(folder), folder.read_front()
    space = load_space(target, args.overrides)
    return space.name, "clusters (the fastest layout of each)", space, fastest_of_each(space, tell)


def _reliability(words: list[str]) -> Reliability | None:
    if words == [OFF]:
        return None
    if OFF in words:
        raise ValueError("--goodput off counts no failures; give it alone, or the rates without it")
    return Reliability.parse(words)


def _planned(
    args: argparse.Namespace, name: str, what: str, space: Space, front: Table, reliability: Reliability | None
) -> _Planned:
    systems = [system_of_row(space, row) for row in front.rows()]
    good, spare_gpus = None, np.zeros(len(front))
    if reliability is not None:
        good = goodput(
            reliability, failures_per_s=[system.failures_per_s for system in systems], num_gpus=front["num_gpus"],
            num_nodes=[system.num_nodes for system in systems], step_time_s=front["step_time_s"],
            parameters=float(space.model.num_parameters()),
        )  # fmt: skip
        spare_gpus = good.spare_nodes * np.array([system.chips_per_node for system in systems])
    points = plan_front(front, args.tokens, goodput=1.0 if good is None else good.share, spare_gpus=spare_gpus)
    mask = within(points, days=args.days, budget_usd=args.budget)
    order = np.lexsort((front["id"], points.cost_usd, points.days))
    return _Planned(
        name=name, what=what, space=space, front=front, points=points, good=good, reliability=reliability,
        kept=order[mask[order]], best=answers(front, points, mask), curves=curves(front, points),
    )  # fmt: skip


def _answer(args: argparse.Namespace, plan: _Planned) -> None:
    """Text, or with --json the data; where -o names a .csv, .parquet or .html, that."""
    suffix = "" if args.output is None or args.json else Path(args.output).suffix
    if suffix in {".csv", ".parquet"}:
        table = plan_rows(plan.front, plan.points, plan.good, plan.kept)
        if suffix == ".csv":
            write(args, csv_text(table))
        else:
            write_parquet(Path(args.output), table, {"plan": plan.name, "tokens": repr(args.tokens)})
    elif suffix == ".html":
        told = [("tokens", f"{args.tokens:,.0f}"), *_limits(args), *_answers_told(plan), *_assumed(plan)]
        page = plan_page(f"{plan.name}: plan", plan.front, plan.points, plan.kept, plan.curves, told)
        write_bytes(Path(args.output), page.encode())
    else:
        answer(args, text=_text(args, plan), data=_data(args, plan))


def _limits(args: argparse.Namespace) -> list[tuple[str, str]]:
    days = [("deadline", counted(args.days, "day"))] if args.days else []
    return days + ([("budget", f"{args.budget:,.0f} USD")] if args.budget else [])


def _assumed(plan: _Planned) -> list[tuple[str, str]]:
    return assumed_pairs(plan.reliability, plan.good, plan.kept)


def _answers_told(plan: _Planned) -> list[tuple[str, str]]:
    best = plan.best
    places = {"fewest chips": best.fewest_gpus, "cheapest": best.cheapest, "quickest": best.quickest}
    return [(name, point_phrase(plan.front, plan.points, place)) for name, place in places.items() if place is not None]


def _text(args: argparse.Namespace, plan: _Planned) -> str:
    limits = " and ".join(text for _, text in _limits(args))
    within_limits = f" within {limits}" if limits else ""
    shown = plan.kept[: args.top]
    text = plan_table(plan.front, plan.points, shown) if len(shown) else ""
    text += f"{len(plan.kept)} of {len(plan.front)} {plan.what}{within_limits}"
    if not len(plan.kept):
        days, usd = np.nanmin(plan.points.days), np.nanmin(plan.points.cost_usd)
        quickest = f"the fastest takes {days:,.1f} days" if math.isfinite(days) else "none ever ends at these failures"
        text += f"; {quickest}, the cheapest {usd:,.0f} USD"
    lines = ["", *answer_lines(plan.front, plan.points, plan.best, within_limits.strip())]
    lines += curve_lines(plan.front, plan.points, plan.curves[:SHOWN_CURVES])
    if left := plan.curves[SHOWN_CURVES:]:
        lines += ["", f"and of {', '.join(curve.system for curve in left)}: -o FILE.html draws all"]
    lines += [""] + [line for head, told in _assumed(plan) for line in hanging(f"{head}: ", told)]
    return text + "\n" + "\n".join(lines).rstrip() + "\n"


def _data(args: argparse.Namespace, plan: _Planned) -> dict[str, Any]:
    rows = list(plan_rows(plan.front, plan.points, plan.good, plan.kept).rows())[: args.top]
    ids = plan.front["id"].tolist()
    best = {
        name: None if place is None else {"id": ids[place], "system": str(plan.front["system"][place])}
        for name, place in (
            ("fewest_gpus", plan.best.fewest_gpus), ("cheapest", plan.best.cheapest), ("quickest", plan.best.quickest)
        )
    }  # fmt: skip
    bent = [
        {
            "system": curve.system, "num_gpus": plan.front["num_gpus"][list(curve.places)].tolist(),
            "days": plan.points.days[list(curve.places)].tolist(), "efficiency": list(curve.efficiency),
            "knee_num_gpus": None if curve.knee is None else float(plan.front["num_gpus"][curve.knee]),
        }
        for curve in plan.curves
    ]  # fmt: skip
    return {
        "run": plan.name, "tokens": args.tokens, "rows": rows, "answers": best,
        "cheapest_by_system": [ids[place] for place in plan.best.cheapest_by_system], "curves": bent,
        "goodput": None if plan.reliability is None else asdict(plan.reliability),
    }  # fmt: skip
