"""Commands of the group `graph` about passes and fusion rules: passes, fuse."""

from __future__ import annotations

import argparse

from search.arguments.parser import Commands, add_set, positive

__all__ = ["add"]

GRAPH = "a captured graph, a model (name, file, config.json), a configuration (NAME:POINT, space file, RUN:ID)"


def add(group: Commands) -> None:
    """Adds them, in the order of the help."""
    passes = group.add(
        "passes",
        "graph_passes",
        "the passes in their order: split, fuse, optimise, analyse; of a graph, what each makes of it",
        example="search graph passes deepseek_v3:published",
    )
    passes.add_argument("config", metavar="GRAPH|CONFIG", nargs="?", help=GRAPH)
    passes.add_argument("--after", metavar="PASS", help="stop behind this one")
    _add_subject(passes)
    fuse = group.add(
        "fuse",
        "graph_fuse",
        "which fusion rule fires where, and what it saves; why others do not",
        example="search graph fuse llama3_70b:rule_of_thumb --all --explain",
    )
    fuse.add_argument("config", metavar="GRAPH|CONFIG", help=GRAPH)
    fuse.add_argument("--explain", action="store_true", help="every place, and why other rules do not fire")
    fuse.add_argument("--all", action="store_true", help="every rule that is known, chosen or not")
    fuse.add_argument("--only", metavar="A,B", help="these rules instead of the chosen ones")
    fuse.add_argument("--rules", metavar="FILE", action="append", default=[], help="a rule file of yours, repeatable")
    _add_subject(fuse)


def _add_subject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq", type=positive, metavar="N", help="of a model: tokens (default 4096)")
    parser.add_argument("--precision", metavar="RECIPE", help="of a model: default bf16")
    parser.add_argument("--chip", metavar="NAME", help="of a model: default h100-80g-sxm")
    parser.add_argument("--reference", metavar="NAME", help="of a configuration: the named point of its file")
    add_set(parser)
