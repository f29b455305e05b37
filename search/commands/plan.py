"""`search plan`: what a training run of so many tokens takes at each point of a front."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import numpy as np

from results.plan import Plan, plan_front, within
from results.report import plan_table
from results.table import Table
from search.commands.answer import NOTHING_FEASIBLE, answer
from search.commands.runs import find_run

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Days, GPU-hours, cost, energy and CO2 per point; exit 3 where none ends in time and in budget."""
    folder = find_run(args.run)
    front = folder.read_front()
    points = plan_front(front, args.tokens)
    kept = np.flatnonzero(within(points, days=args.days, budget_usd=args.budget))
    limits = [*([f"{args.days:g} days"] if args.days else []), *([f"{args.budget:,.0f} USD"] if args.budget else [])]
    chosen = _take(points, kept)
    text = plan_table(front.take(kept), chosen, top=args.top) if len(kept) else ""
    text += f"{len(kept)} of {len(front)} points of the front" + (f" within {' and '.join(limits)}" if limits else "")
    if len(front) and not len(kept):
        text += f"; the fastest takes {points.days.min():,.1f} days, the cheapest {points.cost_usd.min():,.0f} USD"
    text += "\nsteps run back to back: failures, checkpoints and restarts are not counted\n"
    data = {"run": str(folder.path), "tokens": args.tokens, "rows": _rows(front.take(kept), chosen)[: args.top]}
    answer(args, text=text, data=data)
    return 0 if len(kept) else NOTHING_FEASIBLE


def _take(points: Plan, kept: np.ndarray) -> Plan:
    return Plan(**{name: values[kept] for name, values in asdict(points).items()})


def _rows(front: Table, points: Plan) -> list[dict[str, float]]:
    """As the table: fastest first."""
    order = np.lexsort((front["id"], points.cost_usd, points.days))
    own = {name: front[name] for name in ("id", "step_time_s", "num_gpus")}
    return [{name: values[i].item() for name, values in (own | asdict(points)).items()} for i in order]
