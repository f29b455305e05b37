"""One pass of a model that answers, priced: seconds by block and cause, bytes that it reads, room that it works in.

A pass is one micro-batch through all layers of one rank: whole prompts in prefill, one token of each sequence in
decode, there at several lengths of the cache at once ([R]). Knows nothing of pipelines or of memory in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from estimator.build import build
from estimator.captured import CapturedModel
from estimator.cost.decode import FewRows, SplitKeys
from estimator.cost.direct import direct_seconds
from estimator.cost.lookup import MeasuredTable
from estimator.cost.price import BACKENDS, Backend, Price, by_priority, price
from estimator.cost.table import _PhaseSeconds, _Pricer
from estimator.graph import Block, BlockKind, OpGraph
from estimator.groups import size_and_stride
from estimator.imbalance import BALANCED, Routing
from estimator.inference.deployment import Deployment
from estimator.inference.workload import ServingPhase
from estimator.model import ModelSpec
from estimator.op import Array, Group, Op, OpKind, Tensor, Traffic, product, smaller
from estimator.passes.answering import OF_CONTEXT, Shares, lower_answer
from estimator.passes.fuse import for_chip
from estimator.passes.serving import absorb, behind_cache, last_tokens, with_cache, without_training
from estimator.passes.shard import CORE_KINDS
from estimator.precision import PrecisionRecipe, Role
from estimator.strategy import CudaGraph
from hardware.system import SystemSpec

__all__ = ["BlockPrice", "PassPrice", "PricedOp", "priced_pass", "served"]

EAGER = 3.0  # an engine's Python and its checks, over a bare launch, where no graph holds a kernel; assumption
PREFILL_BACKENDS: tuple[Backend | MeasuredTable, ...] = by_priority((FewRows(), *BACKENDS))
DECODE_BACKENDS: tuple[Backend | MeasuredTable, ...] = by_priority((SplitKeys(), FewRows(), *BACKENDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOp:
    """One op of one block on one rank. `price` is None for traffic, whose bytes are `link_bytes`."""

    op: Op
    seconds: Array
    price: Price | None
    link_bytes: Array = 0.0
    read_bytes: Array = 0.0  # of weights and cache


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """One block. Seconds by cause, `[R]` each; `ops` in order."""

    compute_s: Array
    attention_s: Array
    tp_s: Array
    ep_s: Array
    host_s: Array
    weight_bytes: float
    working_bytes: float
    ops: tuple[PricedOp, ...]

    @property
    def context_s(self) -> Array:
        """Of compute, what follows from the tokens before: attention, its choice of keys, recurrences."""
        return sum((op.seconds for op in self.ops if op.op.kind in OF_CONTEXT), np.zeros(1))

    @property
    def seconds(self) -> Array:
        """All of them."""
        return self.compute_s + self.tp_s + self.ep_s + self.host_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPrice:
    """Blocks by kind, and what they hand on: `hop_bytes` from stage to stage, `exchange_bytes` of expert traffic."""

    kinds: tuple[BlockKind, ...]
    blocks: Mapping[BlockKind, BlockPrice]
    sequence: tuple[BlockKind, ...]
    hop_bytes: float
    exchange_bytes: float


def served(model: ModelSpec) -> ModelSpec:
    """The model without multi-token prediction, which drafts alone need."""
    return replace(model, num_mtp_layers=0, mtp_layer=None) if model.num_mtp_layers else model


@lru_cache(maxsize=128)
def _logical(model: ModelSpec, phase: ServingPhase, absorbed: bool, context: float) -> OpGraph:
    """What all ranks together do, from either door."""
    if phase is ServingPhase.PREFILL:
        graph = last_tokens(without_training(build(model, int(context))))
        return replace(with_cache(graph, model, None), phase=phase.value)
    if isinstance(model, CapturedModel) and model.captured.phase == "decode":
        graph = without_training(model.captured.at(int(context)))
    else:
        graph = behind_cache(without_training(build(model, 1)), model, int(context))
    graph = with_cache(absorb(graph, model) if absorbed else graph, model, context)
    return replace(graph, phase=phase.value)


@lru_cache(maxsize=512)
def priced_pass(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, phase: ServingPhase, *, sequences: float,
    contexts: tuple[float, ...], overlap: bool = False, queries: int = 1, beside: float = 0.0,
    routing: Routing = BALANCED,
) -> PassPrice:  # fmt: skip
    """A pass of so many sequences on each replica, of prompts or behind caches of `contexts` tokens.

    `overlap`: a pass of other sequences runs beside it, so that expert traffic of one hides behind the other.
    `queries`: tokens of each sequence; `beside`: tokens of prompts that ride along, what they see before them left out.
    """
    recipe, decodes = deployment.formats.recipe, phase is ServingPhase.DECODE
    graphs = deployment.cuda_graph or (CudaGraph.FULL if decodes else CudaGraph.NONE)
    on_chip = deployment.but(fusion=for_chip(deployment.fusion, system.chip.name))
    rows = sequences * queries + beside
    strategy = on_chip.strategy(sequences=rows, has_experts=model.moe is not None, graphs=graphs)
    group = deployment.ep * deployment.etp / deployment.tp  # replicas whose tokens meet at the same experts
    tokens = rows * (1.0 if decodes else contexts[0])
    shares = Shares(sequences * queries / rows, queries) if queries > 1 or beside else None
    logical = _logical(model, phase, deployment.absorb, contexts[-1])
    lengths = np.array(contexts) if decodes else None
    graph = lower_answer(
        logical, model, strategy, recipe, contexts=lengths, sent=tokens * group, routing=routing, shares=shares
    )
    pricer = _Pricer(strategy, system, recipe, DECODE_BACKENDS if decodes else PREFILL_BACKENDS)
    blocks = {kind: _block(graph.blocks[kind], pricer, overlap=overlap) for kind in graph.kinds}
    entry = graph.blocks[BlockKind.HEAD].tensors["x"]
    hop = float(np.max(entry.elements)) * (1.0 if decodes else contexts[0]) * recipe.activation.nbytes
    return PassPrice(
        kinds=graph.kinds, blocks=blocks, sequence=graph.sequence, hop_bytes=hop,
        exchange_bytes=float(np.max(pricer.buffer_bytes(graph))),
    )  # fmt: skip


def _block(block: Block, pricer: _Pricer, *, overlap: bool) -> BlockPrice:
    chip, recipe = pricer.system.chip, pricer.recipe
    total = _PhaseSeconds(pricer.strategy, EAGER * chip.launch_s)
    ops: list[PricedOp] = []
    attention: Array = 0.0
    for op in block.ops:
        if op.kind is OpKind.COLLECTIVE:
            seconds = _traffic_seconds(op, pricer)
            total.add_traffic(op, seconds)
            ops.append(PricedOp(op=op, seconds=seconds, price=None, link_bytes=op.payload))
            continue
        p = price(op, block, chip, recipe, pricer.backends)
        total.add_compute(op, p, p.work.flops if p.work.matrix else 0.0, p.seconds)
        ops.append(PricedOp(op=op, seconds=p.seconds, price=p, read_bytes=_read_bytes(op, block, recipe)))
        if op.kind in CORE_KINDS:
            attention = attention + p.seconds
    compute, host, _, tp, _, ep, beside = total.seconds()
    return BlockPrice(
        compute_s=compute, attention_s=attention, tp_s=tp, ep_s=beside if overlap else ep, host_s=host,
        weight_bytes=_weight_bytes(block, recipe), working_bytes=_working_bytes(block, pricer), ops=tuple(ops),
    )  # fmt: skip


def _traffic_seconds(op: Op, pricer: _Pricer) -> Array:
    """The faster of the library's ring and the engine's own kernel, which neighbours may use."""
    seconds = pricer.traffic_seconds(op)
    if op.collective in {None, Traffic.COPY} or op.group not in {Group.TP, Group.ETP}:
        return seconds
    assert op.collective is not None
    assert op.group is not None
    size = float(np.max(size_and_stride(op.group, pricer.strategy)[0]))
    return smaller(seconds, direct_seconds(op.collective, pricer.system, size, op.payload))


def _weight_bytes(block: Block, recipe: PrecisionRecipe) -> float:
    per = {True: recipe.linear_weight_bytes, False: recipe.other_weight_bytes}
    return float(sum(np.max(w.elements) * per[w.linear] for w in block.weights))


def _working_bytes(block: Block, pricer: _Pricer) -> float:
    """The widest op, without what it reads of the cache, beside the stream of hidden states that waits."""
    empty = {name: Tensor((), Role.CACHE) for name, t in block.tensors.items() if t.role is Role.CACHE}
    widest = pricer.transient_bytes(block.with_ops(block.ops, empty) if empty else block)
    stream = block.tensors[block.input].elements * pricer.recipe.nbytes(Role.ACTIVATION)
    return float(np.max(widest + stream))


def _read_bytes(op: Op, block: Block, recipe: PrecisionRecipe) -> Array:
    """Weights of a product and what an op reads of the cache: what every pass must load whatever its batch."""
    total: Array = 0.0
    if op.kind is OpKind.MATMUL:
        total = product(op.dims[1:])
    elif op.kind is OpKind.GROUPED_MATMUL:
        total = op.dims[0].size * product(op.dims[2:])
    elif op.kind is OpKind.BLOCK_MATMUL:
        total = product(op.dims[1:])
    width = recipe.stored_weight_bytes if op.role is Role.LINEAR_INPUT else recipe.other_weight_bytes
    total = total * width
    for name in op.inputs:
        if block.tensors[name].role is Role.CACHE:
            total = total + block.tensors[name].elements * recipe.cache_bytes
    return total
