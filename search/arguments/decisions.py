"""Commands that help to decide: report, plan, fit."""

from __future__ import annotations

from search.arguments.parser import Commands, add_set, number_such_as, positive

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
    report = commands.add(
        "report", "report", "the run as one page that opens from disk", example="search report latest -o front.html"
    )
    report.add_argument("run", metavar="RUN", help="a run folder, its name under runs/, or latest")
    report.add_argument("--point", metavar="ID", help="the point that is shown first, and in pictures; or a reference")
    report.add_argument("--png", metavar="DIR", help="the same pictures as files, into that folder")
    plan = commands.add(
        "plan",
        "plan",
        "days, GPU-hours, cost, energy and CO2 of a training run; fewest chips, cheapest cluster, best time",
        example="search plan capacity_deepseek_v3 --tokens 14.8e12 --days 60",
    )
    plan.add_argument("target", metavar="RUN|SPACE", help="a run, latest, or a space, which is swept for it")
    plan.add_argument("--tokens", type=number_such_as("15e12"), required=True, metavar="N", help="tokens to train on")
    plan.add_argument("--days", type=number_such_as("30"), metavar="D", help="only what ends within D days")
    plan.add_argument("--budget", type=number_such_as("5e6"), metavar="USD", help="only what costs at most so much")
    plan.add_argument(
        "--goodput",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="restart_s=600, spare_nodes=4, ..., repeatable (docs/planning.md), or off: no failures, no checkpoints",
    )
    plan.add_argument("--top", type=positive, metavar="N", help="at most N rows")
    fit = commands.add(
        "fit",
        "fit",
        "the largest micro-batch, longest sequence, fewest chips and cheapest recompute that fit",
        example="search fit deepseek_v3:published",
    )
    fit.add_argument("config", metavar="CONFIG", help="a space file with one point, FILE:NAME, or RUN:ID")
    fit.add_argument("--reference", metavar="NAME", help="the named point of the file")
    fit.add_argument("--longest", type=positive, metavar="TOKENS", help="sequences tried (default 1048576)")
    for parser in (plan, fit):
        add_set(parser)
