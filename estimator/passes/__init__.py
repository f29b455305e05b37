"""Passes turn the logical graph of a model into the graph of one rank, in one fixed order: `PASSES` is that order.

Split, fuse, optimise, analyse. Built and captured graphs go the same way, one strategy and a million: `lower` runs the
table. Passes without a function change no op: they act where blocks are priced and put together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from estimator.graph import OpGraph
from estimator.imbalance import BALANCED, Routing
from estimator.mapping import nearest
from estimator.passes.balance import balance
from estimator.passes.capture import capture
from estimator.passes.collectives import insert_collectives
from estimator.passes.differentiate import differentiate
from estimator.passes.fuse import After, fuse
from estimator.passes.precision import insert_quantization, narrow_gathers, remake_activations
from estimator.passes.recompute import recompute
from estimator.passes.shard import shard
from estimator.passes.shared import run_beside
from estimator.precision import PrecisionRecipe
from estimator.strategy import Strategy

__all__ = ["PASSES", "Lowering", "Pass", "Stage", "lower", "recompute", "run_to"]


class Stage(Enum):
    """Which part of the road a pass is of. Split before fuse: fusion works inside a shard."""

    SPLIT = "split"
    FUSE = "fuse"
    OPTIMISE = "optimise"
    ANALYSE = "analyse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """What passes may look at besides the graph."""

    strategy: Strategy
    recipe: PrecisionRecipe
    routing: Routing = BALANCED


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A named pass. `run` None: it changes no op, and `acts` says where it acts instead.

    `sizes`: size fields of a strategy that it splits by; `reads`: what else of it decides. `each`: it is done once for
    each recompute choice, which share all that stands before.
    """

    name: str
    stage: Stage
    about: str
    run: Callable[[OpGraph, Lowering], OpGraph] | None = None
    acts: str = ""
    sizes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    each: bool = False


TRAIN = "train"
"""The phase that has gradients."""


def _shard(graph: OpGraph, by: Lowering) -> OpGraph:
    return shard(graph, by.strategy)


_SPLIT, _FUSE, _OPTIMISE, _ANALYSE = Stage

PASSES: tuple[Pass, ...] = (
    Pass(name="tp", stage=_SPLIT, about="heads, ffn and vocabulary over tensor-parallel ranks", run=_shard,
         sizes=("tp",), reads=("sequence_parallel",)),
    Pass(name="ep", stage=_SPLIT, about="experts, and their width, over expert-parallel ranks", run=_shard,
         sizes=("ep", "etp")),
    Pass(name="cp", stage=_SPLIT, about="the sequence over context-parallel ranks", run=_shard, sizes=("cp",),
         reads=("context_parallel",)),
    Pass(name="pp", stage=_SPLIT, about="blocks over pipeline stages", acts="estimator/layout.py",
         sizes=("pp", "vpp"), reads=("schedule", "layout")),
    Pass(name="dp", stage=_SPLIT, about="sequences of a micro-batch on one replica", run=_shard,
         sizes=("micro_batch",)),
    Pass(name="balance", stage=_SPLIT, about="the fullest rank of experts instead of the mean",
         run=lambda graph, by: balance(graph, by.strategy, by.routing), reads=("redundant_experts",)),
    Pass(name="collectives", stage=_SPLIT, about="the traffic that the splits make necessary",
         run=lambda graph, by: insert_collectives(graph, by.strategy, by.recipe)),
    Pass(name="zero", stage=_SPLIT, about="weights, gradients and states over data-parallel ranks",
         acts="estimator/memory.py and compose.py divide and add traffic",
         reads=("zero_stage", "dp_replicate", "reshard_after_forward", "prefetch_blocks")),
    Pass(name="offload", stage=_SPLIT, about="shares of what a chip keeps to the host",
         acts="estimator/keep.py and compose.py", reads=("offload",)),
    Pass(name="fuse", stage=_FUSE, about="kernels that do several ops at once (docs/fusion.md)",
         run=lambda graph, by: fuse(graph, by.strategy.fusion), reads=("fusion",)),
    Pass(name="precision", stage=_OPTIMISE, about="casts ahead of products that run in fewer bytes",
         run=lambda graph, by: fuse(insert_quantization(graph, by.recipe), by.strategy.fusion, After.QUANTIZATION),
         reads=("precision", "fusion")),
    Pass(name="mtp", stage=_OPTIMISE, about="multi-token prediction: a head and a layer of its own",
         acts="estimator/build writes its block into the sequence"),
    Pass(name="shared_experts", stage=_OPTIMISE, about="shared experts beside the all-to-alls of the routed ones",
         run=lambda graph, by: run_beside(graph, overlap=by.strategy.shared_expert_overlap),
         reads=("shared_expert_overlap",)),
    Pass(name="gradients", stage=_OPTIMISE, about="backward of every op, and the duals of collectives",
         run=lambda graph, by: differentiate(graph) if graph.phase == TRAIN else graph),
    Pass(name="gathers", stage=_OPTIMISE, about="gathers in the format of the products that read them",
         run=lambda graph, by: narrow_gathers(graph, by.recipe), reads=("precision",)),
    Pass(name="remake", stage=_OPTIMISE, about="activations that a recipe forms again in backward",
         run=lambda graph, by: remake_activations(graph, by.recipe) if graph.phase == TRAIN else graph,
         reads=("precision",)),
    Pass(name="cuda_graphs", stage=_OPTIMISE, about="kernels that are launched together",
         run=lambda graph, by: capture(graph, by.strategy.cuda_graph), reads=("cuda_graph",)),
    Pass(name="recompute", stage=_OPTIMISE, about="forward ops that backward runs again",
         run=lambda graph, by: recompute(graph, by.strategy.recompute) if graph.phase == TRAIN else graph,
         reads=("recompute",), each=True),
    Pass(name="flops", stage=_ANALYSE, about="FLOPs and bytes of every op", acts="estimator/cost/work.py"),
    Pass(name="roofline", stage=_ANALYSE, about="seconds of every kernel, by the chain of cost backends",
         acts="estimator/cost/price.py"),
    Pass(name="communication", stage=_ANALYSE, about="seconds of every collective",
         acts="estimator/cost/collective.py"),
    Pass(name="training", stage=_ANALYSE, about="schedule, memory, overlap, optimizer: the step",
         acts="estimator/compose.py, memory.py and schedule"),
)  # fmt: skip
"""Every pass in its order. Split passes write no op of their own and are done in one walk over the graph."""

_SPLITS = tuple(p for p in PASSES if p.run is _shard)
_LOWERING = tuple(p for p in PASSES if p.run is not None and p.run is not _shard and not p.each)


def lower(graph: OpGraph, strategy: Strategy, recipe: PrecisionRecipe, routing: Routing = BALANCED) -> OpGraph:
    """Forward and backward of one rank, without recompute: shared by every recompute choice."""
    by = Lowering(strategy=strategy, recipe=recipe, routing=routing)
    graph = shard(graph, strategy)
    for one in _LOWERING:
        assert one.run is not None
        graph = one.run(graph, by)
    return graph


def run_to(graph: OpGraph, by: Lowering, last: str) -> OpGraph:
    """The graph behind the pass of that name, recompute included; ValueError names the passes.

    Of splits those up to it are done: sizes that later ones split by are 1.
    """
    names = [p.name for p in PASSES]
    if last not in names:
        raise ValueError(f"a pass must be one of {', '.join(names)}, but got {last!r}{nearest(last, names)}")
    done = PASSES[: names.index(last) + 1]
    split = {size for p in done for size in p.sizes}
    later = {size: 1 for p in _SPLITS for size in p.sizes if size not in split}
    graph = shard(graph, by.strategy.with_sizes(later))
    for one in done:
        if one.run is not None and one.run is not _shard:
            graph = one.run(graph, by)
    return graph
