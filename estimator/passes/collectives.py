"""Insert the communication that a split makes necessary.

Reads dims only: a GEMM with a split output width needs its input on every rank, one with a split inner width leaves
partial sums, permuted rows travel to their experts. Ignores the rotary part of MLA's keys, which is replicated (64 of
2112 latent columns), and gradients of norms under sequence parallelism, a few vectors a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from estimator.graph import Block, OpGraph
from estimator.op import Array, Group, Op, OpKind, Traffic, product
from estimator.passes.shard import CORE_KINDS, TENSOR_PARALLEL
from estimator.precision import PrecisionRecipe, Role
from estimator.strategy import ContextParallel, Strategy

__all__ = ["insert_collectives"]


def insert_collectives(graph: OpGraph, strategy: Strategy, recipe: PrecisionRecipe) -> OpGraph:
    """The graph with TP, CP, EP and ETP traffic as ops; payloads are zero-cost where a group has one rank."""
    return graph.map(lambda block: block.with_ops(tuple(_with_traffic(block, strategy, recipe))))


def _with_traffic(block: Block, s: Strategy, recipe: PrecisionRecipe) -> Iterator[Op]:
    gathered: set[str] = set()
    core_done = False
    returns = _first_consumer(block, Role.COMBINE)
    for op in block.ops:
        if op.kind is OpKind.MATMUL and _splits_output(op) and op.inputs[0] not in gathered:
            gathered.add(op.inputs[0])
            yield _gather_input(block, op, s, recipe)
        if op.kind in CORE_KINDS and not core_done:
            core_done = True
            yield from _context_traffic(block, op, s, recipe)
        if op.name == returns:
            yield from _expert_traffic(block, op, s, recipe, back=True)
        yield op
        if op.kind is OpKind.MATMUL and _splits_inner(op):
            yield _reduce_output(op, s, recipe)
        if op.kind is OpKind.EMBEDDING:
            yield _reduce_embedding(block, op, s, recipe)
        if op.kind is OpKind.LOSS:
            yield _reduce_loss(block, op, recipe)
        if op.outputs and block.tensors[op.outputs[0]].role is Role.DISPATCH:
            yield from _expert_traffic(block, op, s, recipe, back=False)


def _splits_output(op: Op) -> bool:
    return op.dims[2].axis in TENSOR_PARALLEL


def _splits_inner(op: Op) -> bool:
    return op.dims[1].axis in TENSOR_PARALLEL


def _comm(
    op: Op, name: str, collective: Traffic, group: Group, payload: Array, beside: str, partners: tuple[str, ...] = ()
) -> Op:
    return Op(
        name=f"{op.name}.{name}", kind=OpKind.COLLECTIVE, component=op.component, modules=op.modules,
        collective=collective, group=group, payload=payload, beside=beside, partners=partners, fanout=op.fanout,
        max_domains=op.max_domains,
    )  # fmt: skip


def _gather_input(block: Block, op: Op, s: Strategy, recipe: PrecisionRecipe) -> Op:
    """The whole input of all GEMMs that read it: q, k and v share one, and so do gate and up."""
    m, k, _ = op.dims
    collective = Traffic.ALL_GATHER if s.sequence_parallel else Traffic.COPY
    readers = (o for o in block.ops if o.kind is OpKind.MATMUL and o.inputs[0] == op.inputs[0] and _splits_output(o))
    payload = m.size * k.size * recipe.nbytes(Role.ACTIVATION)
    return _comm(op, "gather", collective, Group.TP, payload, "gemm", tuple(o.name for o in readers))


def _reduce_output(op: Op, s: Strategy, recipe: PrecisionRecipe) -> Op:
    m, _, n = op.dims
    collective = Traffic.REDUCE_SCATTER if s.sequence_parallel else Traffic.ALL_REDUCE
    payload = m.size * n.size * recipe.nbytes(Role.ACTIVATION)
    return _comm(op, "reduce", collective, Group.TP, payload, "gemm", (op.name,))


def _reduce_embedding(block: Block, op: Op, s: Strategy, recipe: PrecisionRecipe) -> Op:
    """Each rank looks up its share of the vocabulary; the rest are zeros to be summed."""
    payload = block.tensors[op.outputs[0]].elements * recipe.nbytes(Role.ACTIVATION)
    if s.sequence_parallel:
        return _comm(op, "reduce", Traffic.REDUCE_SCATTER, Group.TP, payload * s.tp, "")
    return _comm(op, "reduce", Traffic.ALL_REDUCE, Group.TP, payload, "")


def _reduce_loss(block: Block, op: Op, recipe: PrecisionRecipe) -> Op:
    """Vocabulary-parallel cross entropy: per token the maximum, the sum of exponentials and the target's logit."""
    tokens = block.tensors[op.inputs[0]].dims[0].size
    return _comm(op, "reduce", Traffic.ALL_REDUCE, Group.TP, tokens * (3 * recipe.nbytes(Role.FULL)), "")


def _context_traffic(block: Block, op: Op, s: Strategy, recipe: PrecisionRecipe) -> Iterator[Op]:
    """Keys and values of the other context-parallel ranks."""
    core = [o for o in block.ops if o.kind in CORE_KINDS]
    q, k = core[0].inputs[:2]
    v = core[-1].inputs[-1]
    out = core[-1].outputs[0]
    width = recipe.nbytes(Role.ACTIVATION)
    share = {name: block.tensors[name].elements * width for name in (q, k, v, out)}
    if s.context_parallel is ContextParallel.ULYSSES:
        payload = share[q] + share[k] + share[v] + share[out]
        yield _comm(op, "ulysses", Traffic.ALL_TO_ALL, Group.CP, payload, "")
        return
    ring = s.context_parallel is ContextParallel.RING
    collective, beside = (Traffic.RING, "attention") if ring else (Traffic.ALL_GATHER, "")
    yield _comm(op, s.context_parallel.value, collective, Group.CP, (share[k] + share[v]) * s.cp, beside)


def _first_consumer(block: Block, role: Role) -> str:
    for op in block.ops:
        if op.kind is OpKind.PERMUTE and any(block.tensors[name].role is role for name in op.inputs):
            return op.name
    return ""


def _expert_traffic(block: Block, op: Op, s: Strategy, recipe: PrecisionRecipe, *, back: bool) -> Iterator[Op]:
    """Rows to their experts (and back): all-to-all over ep, then a gather of the rows that an etp group shares."""
    rows = block.tensors[op.inputs[0] if back else op.outputs[0]]
    payload = product(rows.dims) * recipe.nbytes(rows.role)
    travel = _comm(op, "all_to_all", Traffic.ALL_TO_ALL, Group.EP, payload / s.etp, "block")
    share = Traffic.REDUCE_SCATTER if back else Traffic.ALL_GATHER
    spread = _comm(op, "etp", share, Group.ETP, payload, "")
    yield from ((spread, travel) if back else (travel, spread))
