"""Commands of the group `graph` about passes, fusion rules and what runs beside what: passes, fuse, schedule."""

from __future__ import annotations

import argparse

from search.arguments.parser import Commands, add_set, positive, tokens, whole

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
    discover = group.add(
        "discover",
        "graph_discover",
        "drafts of fusion rules, from a model's source and from its graph, ranked by what they would save",
        example="search graph discover config.json > my_kernels.yaml",
    )
    discover.add_argument("config", metavar="CONFIG_JSON|GRAPH", help=f"a Hugging Face config.json; or {GRAPH}")
    discover.add_argument("--with", dest="chosen", metavar="A,B", help="rules that are there already, or none")
    discover.add_argument("--trust-remote-code", action="store_true", help="run code that lies beside the config")
    _add_subject(discover)
    schedule = group.add(
        "schedule",
        "graph_schedule",
        "one pipeline stage op by op as early as its data allow: what traffic can hide, and behind what",
        example="search graph schedule llama3_70b:rule_of_thumb --micro-batches 2 --trace stage.json.gz",
    )
    schedule.add_argument("config", metavar="GRAPH|CONFIG", help=GRAPH)
    schedule.add_argument("--stage", type=whole, metavar="K", help="of a configuration: the pipeline rank (default 0)")
    schedule.add_argument("--micro-batches", type=positive, metavar="N", help="that may run side by side (default 1)")
    schedule.add_argument("--trace", metavar="FILE", help="a trace for ui.perfetto.dev, .json or .json.gz")
    _add_subject(schedule)


def _add_subject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seq", type=tokens, metavar="N", help="of a model: tokens (default 4096)")
    parser.add_argument("--precision", metavar="RECIPE", help="of a model: default bf16")
    parser.add_argument("--chip", metavar="NAME", help="of a model: default h100-80g-sxm")
    parser.add_argument("--reference", metavar="NAME", help="of a configuration: the named point of its file")
    add_set(parser)
