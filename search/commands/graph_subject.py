"""What commands about graphs look at: a captured graph, a model, or a configuration, and its ops with their amounts.

Of a graph or a model: the logical ops of one sequence, before any split. Of a configuration: the ops of one rank for
one micro-batch, split, fused and priced as an estimate prices them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import spaces
from estimator.build import build
from estimator.captured import CapturedModel
from estimator.cost.price import BACKENDS
from estimator.cost.table import _Pricer
from estimator.graph import OpGraph
from estimator.groups import between_ranks
from estimator.imbalance import Routing
from estimator.inventory import Entry, inventory
from estimator.model import ModelSpec
from estimator.model_io import load_model, model_names
from estimator.ops_file import OpsFile, is_ops_text, read_ops
from estimator.passes import lower, recompute
from estimator.passes.differentiate import differentiate
from estimator.passes.fuse import for_chip
from estimator.precision import PrecisionRecipe, recipe
from hardware.catalog import chip
from hardware.chip import ChipSpec
from results.graph_export import GraphView
from search.commands.answer import tell
from search.commands.point import Point, read_point, split_named, split_run
from search.op_times import op_times, with_tables
from search.space import shipped_spaces
from search.yaml_lines import read_document

__all__ = ["GraphSubject", "priced_graph", "read_subject"]

HEAD = 200  # characters that say of which format a file is
SEQ = 4096  # of a model that is looked at by itself
ALONE = ("seq", "precision", "chip")  # what a configuration says itself


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSubject:
    """A graph under the name it was asked for. `told`: of what its amounts are."""

    name: str
    told: str
    graph: OpGraph
    recipe: PrecisionRecipe
    entries: tuple[Entry, ...]
    model: ModelSpec | None = None  # none of a file of ops
    is_logical: bool = False  # the forward ops of a model, before any pass

    @property
    def view(self) -> GraphView:
        """What exporters take."""
        return GraphView(
            name=self.name, told=self.told, graph=self.graph, recipe=self.recipe, entries=self.entries,
            sources={} if self.captured is None else _places(self.captured),
        )  # fmt: skip

    @property
    def captured(self) -> CapturedModel | None:
        """The model as it was captured, where it was."""
        return self.model if isinstance(self.model, CapturedModel) else None


def read_subject(args: argparse.Namespace, target: str) -> GraphSubject:
    """What `GRAPH|CONFIG` means, with the command line's options; ValueError names the file."""
    if (ops := _ops_file(target)) is not None:
        return _of_ops(args, target, ops)
    return _of_point(args, target) if is_configuration(target) else _of_model(args, target)


def _places(model: CapturedModel) -> dict[tuple[str, str], str]:
    """Per block and op the first place that it was captured from; a layer's by its number."""
    layers = [kind for kind in model.captured.graph.sequence if kind.is_layer]
    found = {}
    for name, origins in model.captured.origins.items():
        place, _, op = name.rpartition("/")
        number = place.rpartition(".")[2]
        block = layers[int(number)].value if number.isdecimal() and int(number) < len(layers) else place
        found[block, op] = f"{origins[0].module} {origins[0].scope}, {origins[0].line}"
    return found


def _ops_file(target: str) -> OpsFile | None:
    """The file of ops at that path, if it is one."""
    path = Path(target)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(HEAD)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    return read_ops(path) if is_ops_text(head) else None


def _of_ops(args: argparse.Namespace, target: str, ops: OpsFile) -> GraphSubject:
    for name in (*ALONE, "reference"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is for a model or a configuration, but {target} holds ops; leave it out")
    if args.overrides or args.backward or args.table:
        law = "--set, --backward and --table make other ops or prices"
        raise ValueError(f"{law}, but {target} holds ops without prices; leave them out")
    r = recipe(ops.precision)
    return GraphSubject(name=ops.graph.name, told=ops.told, graph=ops.graph, recipe=r, entries=inventory(ops.graph, r))


def is_configuration(target: str) -> bool:
    """Whether a target names a space, one of its points or a row of a run; else it is a model or its graph."""
    if split_named(target) is not None or split_run(target) is not None:
        return True
    path = Path(target)
    if path.suffix in {".yaml", ".yml"} and path.is_file():
        content = read_document(path).value
        return isinstance(content, dict) and "model" in content
    return not path.exists() and target in shipped_spaces() and target not in model_names([spaces.MODELS])


def _of_model(args: argparse.Namespace, target: str) -> GraphSubject:
    for option, is_given in (("--set changes", args.overrides), ("--reference names a point of", args.reference)):
        if is_given:
            raise ValueError(f"{option} a configuration, but {target} is a model; name a space file, or leave it out")
    model = load_model(target, [spaces.MODELS])
    phase = model.captured.phase if isinstance(model, CapturedModel) else "train"
    seq, chosen = args.seq or SEQ, recipe(args.precision or "bf16")
    graph = build(model, seq)
    if args.backward:
        if phase != "train":
            raise ValueError(f"{target}: is a graph of phase {phase}, which has no backward; leave --backward out")
        graph = differentiate(graph)
    on = None if args.chip is None else chip(args.chip)
    if args.table:
        if on is None:
            raise ValueError("--table has operators of a chip, but none is named; give --chip")
        on = replace(on, times=op_times(args.table))
    what = f"one token behind a cache of {seq}" if phase == "decode" else f"one sequence of {seq} tokens"
    told = f"{what}, {'forward and backward' if args.backward else 'forward'}, {chosen.name}"
    return GraphSubject(
        name=model.name, told=f"{told}, on one {on.name}{_tables_of(on)}" if on else told, graph=graph, recipe=chosen,
        entries=inventory(graph, chosen, on), model=model, is_logical=not args.backward,
    )  # fmt: skip


def _tables_of(on: ChipSpec) -> str:
    return "" if on.times is None else f", operators of {on.times.source} looked up"


def _of_point(args: argparse.Namespace, target: str) -> GraphSubject:
    for name in ALONE:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is for a model, but {target} is a configuration, which says it; use --set")
    point = read_point(target, args.reference, args.overrides)
    try:
        if args.table:
            point = replace(point, system=with_tables(point.system, args.table))
        point = point.settled()
        graph, entries = priced_graph(point)
    except ValueError as error:
        raise ValueError(f"{target}: {error}") from error
    tell(*point.notices)
    told = f"{point.name}: one rank of {point.system.name}, one micro-batch, all layers, {point.strategy.precision}"
    told += _tables_of(point.system.chip)
    return GraphSubject(
        name=point.model.name, told=told, graph=graph, recipe=recipe(point.strategy.precision), entries=entries,
        model=point.model,
    )  # fmt: skip


def priced_graph(point: Point) -> tuple[OpGraph, tuple[Entry, ...]]:
    """The graph of one rank and its priced ops, in the order of the model, phase by phase.

    Traffic that overlap hides is listed with its full seconds.
    """
    if point.system.segments:
        law = "operations are listed for chips of one kind, but got a system of segments"
        raise ValueError(f"{law} ({point.system.told_chips}); name one cluster")
    r = recipe(point.strategy.precision)
    strategy = replace(point.strategy, fusion=for_chip(point.strategy.fusion, point.system.chip.name))
    graph = lower(build(point.model, point.workload.seq), strategy, r, Routing.of(point.model, point.workload))
    graph = between_ranks(recompute(graph, point.strategy.recompute), point.strategy)
    pricer = _Pricer(point.strategy, point.system, r, tuple(BACKENDS))
    return graph, inventory(graph, r, point.system.chip, pricer.traffic_seconds)
