"""Commands that read a run: show, plan."""

from __future__ import annotations

from search.arguments.parser import Commands, number_such_as, positive

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
    show = commands.add(
        "show", "show", "the front as a table", example="search show latest --where 'tp <= 4 and pp == 16' --top 5"
    )
    show.add_argument("run", metavar="RUN", help="a run folder, its name under runs/, or latest")
    show.add_argument("--top", type=positive, metavar="N", help="at most N rows")
    show.add_argument("--exact", metavar="RUN", help="of a sampled run: hypervolume against this run's front")
    show.add_argument("--by", metavar="COLUMN", help="order by one column, best first")
    show.add_argument("--where", metavar="EXPR", help="rows for which an expression over the columns holds")
    show.add_argument("--csv", action="store_true", help="every column as CSV")
    show.add_argument(
        "--tables", choices=("front", "reference", "trials", "replays"), default="front", help="which rows"
    )
    show.add_argument("--picture", metavar="FILE", help="also draw the rows as a PNG (needs trainspace[report])")
    plan = commands.add(
        "plan",
        "plan",
        "days, GPU-hours, cost, energy and CO2 of a training run",
        example="search plan latest --tokens 14.8e12",
    )
    plan.add_argument("run", metavar="RUN", help="a run folder, its name under runs/, or latest")
    plan.add_argument("--tokens", type=number_such_as("15e12"), required=True, metavar="N", help="tokens to train on")
    plan.add_argument("--days", type=number_such_as("30"), metavar="D", help="only what ends within D days")
    plan.add_argument("--budget", type=number_such_as("5e6"), metavar="USD", help="only what costs at most so much")
    plan.add_argument("--top", type=positive, metavar="N", help="at most N rows")
