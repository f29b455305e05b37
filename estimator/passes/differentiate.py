"""Differentiate: derive the backward ops of every forward op. A collective's backward is its dual."""

from __future__ import annotations

from collections.abc import Iterator

from estimator.graph import Block, OpGraph
from estimator.op import Group, Op, OpKind, Phase, Traffic

__all__ = ["differentiate"]

# Backward traffic over forward traffic of ops that stream their tensors, counting one read or write per tensor.
# norm, activation: reads x and dy, writes dx (3 against 2); a gated one reads dy, gate, up, writes two (5 against 3).
# softmax: reads p and dp, writes ds. loss: its fp32 softmax is read, the gradient written (inside its forward passes).
BACKWARD_TRAFFIC = {
    OpKind.NORM: 1.5,
    OpKind.ACTIVATION: 1.5,
    OpKind.SOFTMAX: 1.5,
    OpKind.ROPE: 1.0,
    OpKind.DROPOUT: 1.0,  # the mask is read in place of being written
    OpKind.ELEMENTWISE: 1.0,
    OpKind.PERMUTE: 1.0,
    OpKind.QUANTIZE: 1.0,
    OpKind.TOPK: 0.5,
    OpKind.LOSS: 0.5,
    OpKind.EMBEDDING: 2.0,  # scatter-add reads and writes the gradient rows
    OpKind.MIX: 1.5,  # reads what it mixed and the gradient, writes the gradient of each
    OpKind.CONV: 2.5,  # forms its output again for the op behind it (2), reads x and dy and writes dx (3), against 2
}
GATED_TRAFFIC = 5 / 3
# Each product has two gradients, and the states of chunks are formed again in place of being kept (the kernels of
# arXiv:2405.21060 and 2412.06464): between 2.4 and 2.6 times the forward for the sizes in use.
SCAN_BACKWARD = 2.5

DUALS = {
    # What was gathered is not kept (tp: sequence parallelism; cp: keys and values), so backward gathers it again.
    Traffic.ALL_GATHER: (Traffic.REDUCE_SCATTER, Traffic.ALL_GATHER),
    Traffic.REDUCE_SCATTER: (Traffic.ALL_GATHER,),
    Traffic.COPY: (Traffic.ALL_REDUCE,),
    Traffic.ALL_REDUCE: (),
    Traffic.ALL_TO_ALL: (Traffic.ALL_TO_ALL,),
    # k and v pass again, and with them the sums of their gradients
    Traffic.RING: (Traffic.RING, Traffic.RING),
}


def differentiate(graph: OpGraph) -> OpGraph:
    """The graph with backward ops appended to each block, last forward op first."""
    return graph.map(_with_gradients)


def _with_gradients(block: Block) -> Block:
    inside = {name for op in block.ops if op.rides and op.kind is OpKind.NORM for name in op.held}
    dropped = {name for op in block.ops if op.kind is OpKind.DROPOUT for name in op.held}
    return block.with_ops((*block.ops, *(g for op in reversed(block.ops) for g in _gradients(op, inside, dropped))))


def _gradients(op: Op, inside: set[str], dropped: set[str]) -> Iterator[Op]:
    """`inside`: sums whose norm is part of the kernel that adds them up; `dropped`: what dropout hands on to a sum."""
    if op.kind is OpKind.COLLECTIVE:
        yield from _dual(op)
        return
    back = op.but(name=f"{op.name}.grad", phase=Phase.BACKWARD, inputs=op.outputs, outputs=op.inputs, saves=())
    if op.rides or op.held:
        back = back.but(rides=False, held=frozenset())
    if op.kind is OpKind.ELEMENTWISE and inside.intersection(op.outputs):
        # The norm's kernel adds the gradient of the stream, which it reads, to what it writes.
        back = back.but(rides=True, held=frozenset((op.inputs[0], *op.outputs)))
    elif op.kind is OpKind.ELEMENTWISE and op.rides and not dropped.intersection(op.held):
        # Rows on their way back and what they are added to have the gradient of the sum.
        back = back.but(rides=True, held=frozenset((*op.inputs, *op.outputs)))
    if op.detached and op.kind is not OpKind.MATMUL:
        return
    if op.kind is OpKind.MATMUL:
        m, k, n = op.dims
        if not op.detached:
            yield back.but(dims=(m, n, k))
        yield back.but(name=f"{op.name}.weight_grad", phase=Phase.WEIGHT_GRAD, dims=(k, m, n))
    elif op.kind is OpKind.GROUPED_MATMUL:
        groups, rows, k, n = op.dims
        yield back.but(dims=(groups, rows, n, k))
        yield back.but(name=f"{op.name}.weight_grad", phase=Phase.WEIGHT_GRAD)
    elif op.kind is OpKind.BLOCK_MATMUL:
        m, blocks, k, n = op.dims
        yield back.but(dims=(m, blocks, n, k))
        yield back.but(name=f"{op.name}.weight_grad", phase=Phase.WEIGHT_GRAD)
    elif op.kind is OpKind.SCAN:
        yield back.but(passes=SCAN_BACKWARD)
    elif op.kind in {OpKind.SCORES, OpKind.CONTEXT, OpKind.INDEX}:
        yield back.but(passes=2.0)  # one GEMM for each of the two inputs
    elif op.kind is OpKind.ATTENTION:
        yield back.but(passes=2.5)  # five GEMMs against two: scores are formed again (arXiv:2307.08691, sec. 3)
    elif op.back:
        yield back.but(streams=op.back, back=(), passes=1.0)
    else:
        gated = op.kind is OpKind.ACTIVATION and len(op.inputs) == 2
        yield back.but(passes=op.passes * (GATED_TRAFFIC if gated else BACKWARD_TRAFFIC[op.kind]))


def _dual(op: Op) -> Iterator[Op]:
    """Gather <-> reduce-scatter, copy <-> all-reduce, all-to-all <-> itself; a ring also brings gradients home."""
    assert op.collective is not None
    again = DUALS[op.collective]
    if op.detached:
        return
    if op.kept or op.group is Group.ETP:  # the rows that an etp group shares are kept whole
        again = again[:1]
    partners = tuple([f"{name}.grad" for name in op.partners])  # the GEMMs of the input gradient
    for i, collective in enumerate(again):
        dual = op.but(name=f"{op.name}.grad{i or ''}", phase=Phase.BACKWARD, collective=collective, partners=partners)
        yield dual.but(beside="whole") if i and partners else dual  # no input gradient waits for a second gather


def weight_gradient_of(name: str) -> str:
    """Name of the op that computes a weight's gradient, from that of its input's.

    >>> weight_gradient_of("mlp.up_proj.grad")
    'mlp.up_proj.weight_grad'
    """
    return f"{name.removesuffix('.grad')}.weight_grad"
