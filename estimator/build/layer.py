"""A layer: norm, attention, residual; norm, MLP, residual."""

from __future__ import annotations

from collections.abc import Callable

from estimator.build.attention import attention
from estimator.build.mlp import experts, mlp
from estimator.build.writer import Writer
from estimator.graph import Block, BlockKind
from estimator.model import ModelSpec

__all__ = ["dense_layer", "moe_layer"]


def dense_layer(model: ModelSpec, seq: int) -> Block:
    """Attention and a dense MLP."""
    return _layer(Writer(model, seq), BlockKind.DENSE, mlp)


def moe_layer(model: ModelSpec, seq: int) -> Block:
    """Attention and experts."""
    return _layer(Writer(model, seq), BlockKind.MOE, experts)


def _layer(w: Writer, kind: BlockKind, half: Callable[[Writer, str], str]) -> Block:
    x = attention(w, w.tensor("x", w.hidden))
    w.residual("mlp.residual", x, half(w, w.norm("post_attention_norm", x, w.hidden, centred=w.centred)))
    return w.block(kind, "x")
