"""Commands about measured traces: trace import, trace show."""

from __future__ import annotations

from search.arguments.parser import Commands

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
    trace = commands.group("trace", "what ranks of a real job recorded: read, checked and compared")
    read = trace.add(
        "import",
        "trace",
        "reads and checks traces of a job's ranks (JSON lines of this package; plain, gz, tar, zip); -o writes them "
        "into one file, without it they are only checked",
        function="read",
        example="search trace import rank0.jsonl.gz rank1.jsonl.gz -o job.dfg",
    )
    read.add_argument("files", metavar="FILE", nargs="+", help="traces, any number of ranks in any order")
    show = trace.add("show", "trace", "what a file of `search trace import` holds", function="show")
    show.add_argument("file", metavar="DFG", help="a file of `search trace import -o`")
