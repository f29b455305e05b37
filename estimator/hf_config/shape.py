"""What most architectures say alike: sizes, heads, windows, and which layers have experts.

Layers are written as our model files write them: mappings of what is not plain, one per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from estimator.hf_config.reader import MAX_LAYERS, Reader
from estimator.parts import MAX_SIZE

__all__ = ["Fields", "Layer", "arrange", "head_dim", "layer_windows", "num_layers_of", "sizes", "sparse_layers",
           "windowed"]  # fmt: skip

Fields = dict[str, Any]
Layer = dict[str, Any]


def num_layers_of(reader: Reader) -> int:
    """Transformer layers, as many as a model may have."""
    return reader.within("num_hidden_layers", 1, MAX_LAYERS)


def sizes(reader: Reader, *, ffn: str = "intermediate_size", tied: bool = False, absent_is_mha: bool = False) -> Fields:
    """Sizes under their common keys; `tied` and `absent_is_mha` are what the class takes where the file is silent."""
    num_heads = reader.within("num_attention_heads", 1, MAX_SIZE)
    kv_heads = reader.integer if absent_is_mha else reader.nullable
    return {
        "num_layers": num_layers_of(reader),
        "hidden": reader.within("hidden_size", 1, MAX_SIZE),
        "ffn": reader.within(ffn, 1, MAX_SIZE),
        "num_heads": num_heads,
        "num_kv_heads": kv_heads("num_key_value_heads", num_heads),
        "vocab": reader.within("vocab_size", 1, MAX_SIZE),
        "tied_embeddings": reader.boolean("tie_word_embeddings", tied),
    }


def head_dim(reader: Reader) -> int:
    """As given, or the hidden size over the heads."""
    if reader.raw("head_dim") is not None:
        return reader.integer("head_dim")
    hidden, num_heads = reader.within("hidden_size", 1, MAX_SIZE), reader.integer("num_attention_heads")
    if num_heads < 1 or hidden % num_heads:
        raise ValueError(
            f"hidden_size ({hidden}) must be divisible by num_attention_heads ({num_heads}); or give head_dim"
        )
    return hidden // num_heads


def windowed(reader: Reader, num_layers: int) -> list[Layer]:
    """`sliding_window` of every layer, null for none."""
    window = reader.within("sliding_window", 1, 2**31, 0) if reader.raw("sliding_window") is not None else 0
    return [{"window": window} if window else {} for _ in range(num_layers)]


def layer_windows(reader: Reader, num_layers: int, first_windowed: int | None = None) -> list[Layer]:
    """Layers of `layer_types`; absent, the window holds from layer `first_windowed` on (None: nowhere)."""
    kinds = reader.per_layer("layer_types", num_layers, ("full_attention", "sliding_attention"))
    if kinds is None:
        first = num_layers if first_windowed is None else first_windowed
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    reader.skip("sliding_window")  # without effect where no layer slides
    if "sliding_attention" not in kinds:
        return [{} for _ in kinds]
    window = reader.within("sliding_window", 1, 2**31)
    return [{"window": window} if kind == "sliding_attention" else {} for kind in kinds]


def sparse_layers(reader: Reader, num_layers: int) -> list[bool]:
    """Qwen's layers with experts: each `decoder_sparse_step`-th, but for `mlp_only_layers`."""
    step = reader.within("decoder_sparse_step", 1, MAX_LAYERS, 1)
    dense = set(reader.places("mlp_only_layers", num_layers))
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def arrange(fields: Fields, mixers: Sequence[Layer], sparse: Sequence[bool] | None = None) -> Fields:
    """`fields` with the layers' places: a list of them where they differ by more than dense layers that come first."""
    sparse = sparse or [False] * len(mixers)
    num_dense = sparse.index(True) if any(sparse) else len(sparse)
    if not any(mixers) and all(sparse[num_dense:]):
        if "moe" in fields:
            return fields | {"moe": fields["moe"] | {"num_dense_layers": num_dense}}
        return fields
    layers = [mixer | ({"mlp": "moe"} if moe else {}) for mixer, moe in zip(mixers, sparse, strict=True)]
    return fields | {"layers": layers}
