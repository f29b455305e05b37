"""Bytes that a sequence leaves in the cache of one rank, by layer: keys and values, latents, windows, states.

Counts only; what they are stored in is the recipe's. Ignores the tokens that a compressed entry is not yet made of, at
most a few hundred rows.
"""

from __future__ import annotations

from estimator.inference.deployment import Deployment
from estimator.layers import LayerSpec, Mixer
from estimator.model import ModelSpec

__all__ = ["bytes_per_token", "layer_bytes", "sequence_bytes"]

STATE_BYTES = 4.0  # recurrent states stay in full precision; assumption, as the code of both recurrences has them


def layer_bytes(layer: LayerSpec, model: ModelSpec, deployment: Deployment, tokens: float) -> float:
    """Of a sequence of so many tokens on one tensor-parallel rank.

    Heads of keys are split over tp, and held by several ranks where there are fewer; latents and an indexer's keys are
    on every rank; states are split by head.
    """
    if layer.mixer is Mixer.NONE:
        return 0.0
    recipe, tp = deployment.formats.recipe, deployment.tp
    if layer.mixer is Mixer.MAMBA:
        assert model.mamba is not None
        state = model.mamba.num_heads * model.mamba.head_dim * model.mamba.state
        taps = model.mamba.conv_width * (model.mamba.conv - 1)
        return (state * STATE_BYTES + taps * recipe.activation.nbytes) / tp
    if layer.mixer is Mixer.LINEAR:
        spec = model.linear
        assert spec is not None
        state = spec.num_value_heads * spec.key_head_dim * spec.value_head_dim
        taps = (2 * spec.key_width + spec.value_width) * (spec.conv - 1)
        return (state * STATE_BYTES + taps * recipe.activation.nbytes) / tp
    reach = layer.window or layer.chunk
    kept = min(reach, tokens) if reach else tokens
    index = model.indexer.head_dim * tokens if layer.indexed and model.indexer is not None else 0.0
    if model.compressed is not None:  # one head, whose keys are the values too
        entries = 1.0 / layer.compression if layer.compression else 0.0
        kept = (min(layer.window, tokens) if layer.window else 0.0) + entries * tokens
        return (model.head_dim * kept + index * entries) * recipe.cache_bytes
    if model.mla is not None:
        width = float(model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
    else:
        width = 2.0 * max(model.num_kv_heads / tp, 1.0) * model.head_dim
    return (width * kept + index) * recipe.cache_bytes


def sequence_bytes(model: ModelSpec, deployment: Deployment, tokens: float) -> float:
    """All layers of a sequence on one tensor-parallel rank, wherever a pipeline puts them."""
    return sum(layer_bytes(layer, model, deployment, tokens) for layer in model.layer_specs)


def bytes_per_token(model: ModelSpec, deployment: Deployment, tokens: float) -> float:
    """What one more token adds to that, behind so many."""
    return sequence_bytes(model, deployment, tokens + 1.0) - sequence_bytes(model, deployment, tokens)
