"""Older plans: LayerNorm with a bias and an MLP without a gate, after attention or beside it."""

from __future__ import annotations

from estimator.hf_config.reader import MAX_LAYERS, Reader
from estimator.hf_config.shape import Fields, head_dim, num_layers_of

__all__ = ["ARCHITECTURES"]


def _gpt2(reader: Reader) -> Fields:
    hidden, num_heads = reader.integer("n_embd"), reader.within("n_head", 1, 2**31)
    if hidden % num_heads:
        raise ValueError(f"n_embd ({hidden}) must be divisible by n_head ({num_heads}); give another of the two")
    reader.require("scale_attn_by_inverse_layer_idx", None, False)
    reader.require("reorder_and_upcast_attn", None, False)
    reader.skip("activation_function", "n_ctx", "layer_norm_epsilon", "scale_attn_weights", "embd_pdrop", *SUMMARY)
    return {
        "num_layers": reader.within("n_layer", 1, MAX_LAYERS),
        "hidden": hidden,
        "ffn": reader.integer("n_inner", 4 * hidden),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": hidden // num_heads,
        "vocab": reader.integer("vocab_size"),
        "tied_embeddings": reader.boolean("tie_word_embeddings", True),
        "max_positions": reader.integer("n_positions"),
    } | BIASED


BIASED: Fields = {
    "gated_mlp": False, "norm": "layer", "attention_bias": True, "attention_output_bias": True, "mlp_bias": True,
}  # fmt: skip
SUMMARY = ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout")


def _gpt_neox(reader: Reader) -> Fields:
    """Attention first, then the MLP: the layers of both at once have a norm for each, which is not modelled."""
    reader.require("use_parallel_residual", False)
    reader.require("attention_bias", None, True)
    reader.skip("classifier_dropout", "layer_norm_eps", "rotary_pct", "rotary_emb_base")
    num_heads = reader.integer("num_attention_heads")
    return {
        "num_layers": num_layers_of(reader),
        "hidden": reader.integer("hidden_size"),
        "ffn": reader.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim(reader),
        "vocab": reader.integer("vocab_size"),
        "tied_embeddings": reader.boolean("tie_word_embeddings", False),
    } | BIASED


def _falcon(reader: Reader) -> Fields:
    """The plan of Falcon-7B: attention with one head of keys beside the MLP, behind one norm."""
    for key, only in (("new_decoder_architecture", False), ("parallel_attn", True), ("alibi", False), ("bias", False)):
        reader.require(key, only, *([None] if key in ("new_decoder_architecture", "alibi") else []))
    reader.require("num_ln_in_parallel_attn", None, 1)
    one_kv_head = reader.boolean("multi_query", True)
    reader.require("apply_residual_connection_post_layernorm", None, False)
    reader.skip("num_kv_heads", "layer_norm_epsilon", "activation")
    num_heads, hidden = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    return {
        "num_layers": num_layers_of(reader),
        "hidden": hidden,
        "ffn": reader.integer("ffn_hidden_size", 4 * hidden),
        "num_heads": num_heads,
        "num_kv_heads": 1 if one_kv_head else num_heads,
        "head_dim": head_dim(reader),
        "vocab": reader.integer("vocab_size"),
        "tied_embeddings": reader.boolean("tie_word_embeddings", True),
        "gated_mlp": False,
        "norm": "layer",
        "parallel_block": True,
    }


ARCHITECTURES = {"falcon": _falcon, "gpt2": _gpt2, "gpt_neox": _gpt_neox}
