"""ModelSpec -> logical OpGraph: the operations of one micro-batch of one sequence, before any split or fusion.

Ops are written as Hugging Face's modules write them (separate q, k, v, gate and up projections; attention as scores,
softmax, context), so that a captured graph meets this one. Dropout is left out: large-model recipes train without it.
Biases count as parameters; their arithmetic is left out (one add per output against 2k of the GEMM).
"""

from __future__ import annotations

from functools import lru_cache

from estimator.build.ends import embedding, head, mtp, positions
from estimator.build.layer import dense_layer, moe_layer
from estimator.graph import BlockKind, OpGraph
from estimator.model import ModelSpec

__all__ = ["build"]


@lru_cache(maxsize=64)
def build(model: ModelSpec, seq: int) -> OpGraph:
    """The logical graph of `model` at sequence length `seq`."""
    layers = tuple(BlockKind.of(layer) for layer in model.layer_specs)
    entry = (BlockKind.EMBEDDING, BlockKind.POSITIONS) if model.max_positions else (BlockKind.EMBEDDING,)
    sequence = (
        *entry,
        *layers,
        BlockKind.HEAD,
        *(BlockKind.MTP, BlockKind.of(model.mtp_layer_spec)) * model.num_mtp_layers,
    )
    make = {
        BlockKind.EMBEDDING: embedding,
        BlockKind.POSITIONS: positions,
        BlockKind.DENSE: dense_layer,
        BlockKind.MOE: moe_layer,
        BlockKind.HEAD: head,
        BlockKind.MTP: mtp,
    }
    for kind in dict.fromkeys(sequence):
        if kind not in make:
            raise ValueError(f"layers of kind {kind.value!r} can be counted, but their work is not modelled yet")
    if any((model.attention_sinks, model.attention_gate, model.parallel_block, model.hyper, model.compressed)):
        raise ValueError(f"{model.name} can be counted, but the work of its blocks is not modelled yet")
    blocks = {kind: make[kind](model, seq) for kind in dict.fromkeys(sequence)}
    return OpGraph(name=model.name, blocks=blocks, sequence=sequence)
