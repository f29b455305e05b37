"""Insert the communication that a split makes necessary.

Reads dims only: a GEMM with a split output width needs its input on every rank, one with a split inner width leaves
partial sums, permuted rows travel to their experts. Ignores the rotary part of MLA's keys, which is replicated (64 of
2112 latent columns), and gradients of norms under sequence parallelism, a few vectors a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from estimator.graph import Block, OpGraph
from estimator.op import Array, Axis, Component, Group, Op, OpKind, Traffic, larger, product, smaller
from estimator.passes.shard import CORE_KINDS, TENSOR_PARALLEL, is_tensor_parallel
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
        if op.kind is OpKind.ELEMENTWISE and _gathers(block, op):
            yield _gather_shared(block, op, s, recipe)
        if op.kind is OpKind.INDEX and op.detached and not is_tensor_parallel(op.dims):
            yield from _index_keys(block, op, s, recipe)
        if op.kind is OpKind.SCAN:
            yield _spread_heads(block, op, recipe)
        if op.kind in CORE_KINDS and not core_done:
            core_done = True
            yield from _context_traffic(block, op, s, recipe)
        if op.name == returns:
            yield from _expert_traffic(block, op, s, recipe, back=True)
        yield op
        if op.kind is OpKind.MATMUL and _splits_inner(op) and not op.partial:
            yield _reduce_output(op, s, recipe)
        if op.kind is OpKind.NORM and op.component is Component.ATTENTION and _has_split_weight(op):
            yield _reduce_norm(block, op, recipe)
        if op.kind is OpKind.INDEX and is_tensor_parallel(op.dims):
            yield _reduce_index(block, op, s, recipe)
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


def _gathers(block: Block, op: Op) -> bool:
    """Whether an op's tokens must come from all tensor-parallel ranks, for it makes what they share."""
    out = block.tensors[op.outputs[0]].dims
    return out[-1].axis is Axis.SHARED and not is_tensor_parallel(block.tensors[op.inputs[0]].dims)


def _has_split_weight(op: Op) -> bool:
    return any(dim.axis in {Axis.HEADS, Axis.KV_HEADS} for weight in op.weights for dim in weight.dims)


def _comm(
    op: Op, name: str, collective: Traffic, group: Group, payload: Array, beside: str, partners: tuple[str, ...] = ()
) -> Op:
    return Op(
        name=f"{op.name}.{name}", kind=OpKind.COLLECTIVE, component=op.component, modules=op.modules,
        collective=collective, group=group, payload=payload, beside=beside, partners=partners, fanout=op.fanout,
        max_domains=op.max_domains, detached=op.detached,
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


def _gather_shared(block: Block, op: Op, s: Strategy, recipe: PrecisionRecipe) -> Op:
    """Keys of one head, or chosen keys, on every tensor-parallel rank: each has heads that read them all."""
    out = block.tensors[op.outputs[0]]
    collective = Traffic.ALL_GATHER if s.sequence_parallel else Traffic.COPY
    return _comm(op, "gather", collective, Group.TP, out.elements * recipe.nbytes(out.role), "").but(kept=True)


def _reduce_norm(block: Block, op: Op, recipe: PrecisionRecipe) -> Op:
    """A norm over all heads needs the sum of squares of every rank: one number per token."""
    tokens = block.tensors[op.inputs[0]].dims[0].size
    return _comm(op, "reduce", Traffic.ALL_REDUCE, Group.TP, tokens * recipe.nbytes(Role.FULL), "")


def _reduce_index(block: Block, op: Op, s: Strategy, recipe: PrecisionRecipe) -> Op:
    """What the heads of a rank say of the chosen keys, added up over the ranks."""
    chosen = block.tensors[op.outputs[0]].dims[-1].size
    collective = Traffic.REDUCE_SCATTER if s.sequence_parallel else Traffic.ALL_REDUCE
    return _comm(op, "reduce", collective, Group.TP, op.dims[0].size * chosen * recipe.nbytes(Role.FULL), "")


def _index_keys(block: Block, op: Op, s: Strategy, recipe: PrecisionRecipe) -> Iterator[Op]:
    """The indexer's keys of all tokens, on every rank that scores some. Ignores the sums of their gradients."""
    share = block.tensors[op.inputs[1]].elements * recipe.nbytes(Role.ACTIVATION)
    if s.sequence_parallel:
        share = share * s.tp
        yield _comm(op, "gather", Traffic.ALL_GATHER, Group.TP, share, "")
    yield _comm(op, "all-gather", Traffic.ALL_GATHER, Group.CP, share * s.cp, "")


def _spread_heads(block: Block, op: Op, recipe: PrecisionRecipe) -> Op:
    """Around a recurrence a context-parallel rank holds the whole sequence of 1/cp of its heads, as Ulysses does.

    So do Megatron-Core's Mamba layers whatever attention does. What gates the output stays where it is.
    """
    names = (*op.inputs, op.outputs[0])
    payload: Array = 0.0
    for name in names:
        payload = payload + block.tensors[name].elements * recipe.nbytes(Role.ACTIVATION)
    return _comm(op, "heads", Traffic.ALL_TO_ALL, Group.CP, payload, "")


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
    keys = share[k] + share[v] if k != v else share[k]
    payload = keys * s.cp
    if ring and op.reach:
        # A rank has a slice from each end of the sequence (rules.py, `sequence`): each needs what lies before it as
        # far as a token sees. A ring moves (cp - 1)/cp of its payload.
        tokens = block.tensors[k].dims[0].size
        needed = 2.0 * op.reach * s.micro_batch * (keys / tokens)
        payload = smaller(payload, needed * (s.cp / larger(s.cp - 1.0, 1.0)))
    yield _comm(op, s.context_parallel.value, collective, Group.CP, payload, beside)


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
