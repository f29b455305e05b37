"""Commands about graphs of operations: capture, and the group `graph`."""

from __future__ import annotations

import argparse

from search.arguments import graph_rules
from search.arguments.parser import Commands, add_set, positive, tokens, whole

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Adds them, in the order of the help."""
    capture = commands.add(
        "capture",
        "capture",
        "the graph of a Hugging Face model, captured from its own code without weights",
        example="search capture config.json -o model.graph.json",
    )
    capture.add_argument("config", metavar="CONFIG_JSON", help="a Hugging Face config.json, or its folder")
    capture.add_argument("--phase", choices=("train", "prefill", "decode"), default="train", help="default: train")
    capture.add_argument("--layers", type=positive, metavar="N", help="the first N layers only")
    capture.add_argument("--allow-unknown", action="store_true", help="price unknown operations as memory-bound")
    capture.add_argument("--trust-remote-code", action="store_true", help="run code that lies beside the config")
    group = commands.group("graph", "looks at graphs of operations: captured ones, models, configurations")
    graph_rules.add(group)
    _add_show(group)
    _add_export(group)
    _add_diff(group)


def add_subject(parser: argparse.ArgumentParser) -> None:
    """Adds what says how a graph is looked at: of a model by itself, or of a configuration."""
    parser.add_argument("--seq", type=tokens, metavar="N", help="of a model: tokens (default 4096)")
    parser.add_argument("--backward", action="store_true", help="of a model: gradients too")
    parser.add_argument("--precision", metavar="RECIPE", help="of a model: default bf16")
    parser.add_argument("--chip", metavar="NAME", help="of a model: price its operations on that chip")
    parser.add_argument(
        "--table", metavar="FILE", action="append", default=[], help="measured operators to look up, or their folder"
    )
    parser.add_argument("--reference", metavar="NAME", help="of a configuration: the named point of its file")
    add_set(parser)


GRAPH = "a captured graph, a model (name, file, config.json), a configuration (NAME:POINT, space file, RUN:ID)"


def _add_show(group: Commands) -> None:
    show = group.add(
        "show",
        "graph_show",
        "a graph as a tree of scopes: FLOPs, bytes, parameters, seconds at any depth",
        example="search graph show deepseek_v3 --depth 4 --metric flops",
    )
    show.add_argument("config", metavar="GRAPH|CONFIG", help=GRAPH)
    show.add_argument("--depth", type=whole, metavar="N", help="0 the model, 2 its distinct layers (default 3)")
    show.add_argument("--metric", metavar="NAME", help="one of them with its shares: flops, read_bytes, seconds, ...")
    show.add_argument("--by", choices=("scope", "part"), default="scope", help="part: attention, MLP, norm, ...")
    show.add_argument(
        "--source", action="store_true", help="of a captured graph: where in the model's code ops come from"
    )
    show.add_argument("--ops", action="store_true", help="every operation with its price (of a model: with --chip)")
    show.forms.add_argument("--csv", action="store_true", help="the rows as CSV")
    add_subject(show)


def _add_export(group: Commands) -> None:
    export = group.add(
        "export",
        "graph_export",
        "a graph as a file that other programs read, with FLOPs, bytes and formulas of every operation",
        example="search graph export model.graph.json --to xlsx -o model.xlsx",
    )
    export.add_argument("config", metavar="GRAPH|CONFIG", help=GRAPH)
    formats = ("json", "dot", "onnx", "xlsx", "html", "csv", "parquet", "perfetto")
    export.add_argument("--to", choices=formats, required=True, help="perfetto: a trace, one operation after the other")
    add_subject(export)


def _add_diff(group: Commands) -> None:
    command = group.add(
        "diff",
        "graph_diff",
        "two graphs op by op: added, removed, renamed and changed; `equal` where there is nothing",
        example="search graph diff config.json model.graph.json",
    )
    for letter in ("a", "b"):
        command.add_argument(letter, metavar=letter.upper(), help=GRAPH)
        command.add_argument(
            f"--set-{letter}", dest=f"overrides_{letter}", metavar="KEY=VALUE", action="append", default=[],
            help=f"of the configuration {letter.upper()} alone, repeatable",
        )  # fmt: skip
    command.add_argument("--seq", type=tokens, metavar="N", help="of models: tokens (default 4096)")
    command.add_argument("--backward", action="store_true", help="of models: gradients too")
