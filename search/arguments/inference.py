"""Commands about models that answer: infer."""

from __future__ import annotations

from search.arguments.parser import Commands, add_set

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
    infer = commands.add(
        "infer",
        "infer",
        "a model that answers: time to the first token, time per token, tokens per second, memory of its cache",
        example="search infer llama3_70b_decode:node --set workload.context=32768",
    )
    infer.add_argument("config", metavar="CONFIG", help="a space file with one deployment, FILE:NAME, or RUN:ID")
    infer.add_argument("--reference", metavar="NAME", help="the named deployment of the file")
    add_set(infer)
