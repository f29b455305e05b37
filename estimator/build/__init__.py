"""ModelSpec -> logical OpGraph: the operations of one micro-batch of one sequence, before any split or fusion.

Ops are written as Hugging Face's modules write them (separate q, k, v, gate and up projections; attention as scores,
softmax, context), so that a captured graph meets this one.
Biases count as parameters; their arithmetic is left out (one add per output against 2k of the GEMM).
"""

from __future__ import annotations

from functools import lru_cache

from estimator.build.ends import embedding, head, mtp, positions
from estimator.build.layer import layer_block
from estimator.graph import BlockKind, OpGraph
from estimator.model import ModelSpec

__all__ = ["build"]


@lru_cache(maxsize=64)
def build(model: ModelSpec, seq: int) -> OpGraph:
    """The logical graph of `model` at sequence length `seq`: that which was captured, where one was."""
    if (captured := model.captured_at(seq)) is not None:
        return captured
    layers = tuple(BlockKind.of(layer) for layer in model.layer_specs)
    entry = (BlockKind.EMBEDDING, BlockKind.POSITIONS) if model.max_positions else (BlockKind.EMBEDDING,)
    sequence = (
        *entry,
        *layers,
        BlockKind.HEAD,
        *(BlockKind.MTP, BlockKind.of(model.mtp_layer_spec)) * model.num_mtp_layers,
    )
    ends = {
        BlockKind.EMBEDDING: embedding,
        BlockKind.POSITIONS: positions,
        BlockKind.HEAD: head,
        BlockKind.MTP: mtp,
    }
    blocks = {
        kind: ends[kind](model, seq) if kind.layer is None else layer_block(model, seq, kind.layer)
        for kind in dict.fromkeys(sequence)
    }
    return OpGraph(name=model.name, blocks=blocks, sequence=sequence)
