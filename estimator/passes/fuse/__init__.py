"""Fusion: kernels that do several ops at once and keep less. Runs inside a shard and knows no parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from estimator.graph import Block, OpGraph
from estimator.passes.fuse.attention import flash_attention
from estimator.passes.fuse.loss import LOSS_CHUNKS, fused_loss
from estimator.passes.fuse.merge import fused_gate_up, fused_mla_projections, fused_qkv, fused_rope
from estimator.passes.fuse.ride import fused_dropout, fused_permute, fused_residual_norm
from estimator.passes.fuse.streams import fused_activation, fused_norm, fused_router, fused_softmax
from estimator.strategy import Fusion

__all__ = ["LOSS_CHUNKS", "RULES", "fuse"]

RULES: Mapping[Fusion, Callable[[Block], Block]] = MappingProxyType(
    {
        Fusion.FLASH_ATTENTION: flash_attention,
        Fusion.FUSED_NORM: fused_norm,
        Fusion.FUSED_ACTIVATION: fused_activation,
        Fusion.FUSED_LOSS: fused_loss,
        Fusion.FUSED_QKV: fused_qkv,
        Fusion.FUSED_GATE_UP: fused_gate_up,
        Fusion.FUSED_MLA_PROJECTIONS: fused_mla_projections,
        Fusion.FUSED_ROPE: fused_rope,
        Fusion.FUSED_RESIDUAL_NORM: fused_residual_norm,
        Fusion.FUSED_PERMUTE: fused_permute,
        Fusion.FUSED_DROPOUT: fused_dropout,
        Fusion.FUSED_SOFTMAX: fused_softmax,
        Fusion.FUSED_ROUTER: fused_router,
    }
)
"""Each finds its ops by their kinds and by what they read and write, and leaves other blocks alone.

Casts inside the kernel before them (FUSED_QUANTIZE) are not among them: passes/precision.py puts casts in afterwards.
"""


def fuse(graph: OpGraph, fusion: frozenset[Fusion]) -> OpGraph:
    """The graph with the chosen kernels in place; the order of rules does not matter."""
    for name in sorted(fusion, key=lambda f: f.value):
        if name in RULES:
            graph = graph.map(RULES[name])
    return graph
