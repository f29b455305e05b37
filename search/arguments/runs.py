"""Commands that read a run: show."""

from __future__ import annotations

from search.arguments.parser import Commands, positive

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
    show.forms.add_argument("--csv", action="store_true", help="every column as CSV")
    show.add_argument(
        "--tables", choices=("front", "reference", "trials", "replays"), default="front", help="which rows"
    )
    show.add_argument("--xlsx", metavar="FILE", help="also write the rows, waterfalls and operations as a workbook")
    show.add_argument("--picture", metavar="FILE", help="also draw the rows as a PNG (needs trainspace[report])")
