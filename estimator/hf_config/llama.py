"""Llama and what follows its plan: attention, then an MLP or experts, each behind a norm."""

from __future__ import annotations

from estimator.hf_config.reader import MAX_LAYERS, Reader
from estimator.hf_config.shape import Fields, arrange, head_dim, layer_windows, sizes, sparse_layers, windowed

__all__ = ["ARCHITECTURES"]


def _llama(reader: Reader) -> Fields:
    fields = sizes(reader, absent_is_mha=True)  # the first files lack the number of key heads
    reader.require("sliding_window", None)
    bias = reader.boolean("attention_bias", False)  # on q, k, v and the output
    fields |= {
        "head_dim": head_dim(reader),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": reader.boolean("mlp_bias", False),
    }
    return arrange(fields, layer_windows(reader, fields["num_layers"]))


def _mistral(reader: Reader) -> Fields:
    if "sliding_window" not in reader.config:
        raise ValueError("sliding_window is absent, which means 4096 for mistral; set it to that, or to null for none")
    fields = sizes(reader) | {"head_dim": head_dim(reader)}
    return arrange(fields, windowed(reader, fields["num_layers"]))


def _mixtral(reader: Reader) -> Fields:
    fields = sizes(reader)
    fields |= {"head_dim": head_dim(reader), "moe": _experts(reader, "num_local_experts", fields["ffn"])}
    return arrange(fields, windowed(reader, fields["num_layers"]), [True] * fields["num_layers"])


def _experts(reader: Reader, number: str, ffn: int) -> Fields:
    return {"num_experts": reader.integer(number), "top_k": reader.integer("num_experts_per_tok"), "ffn": ffn}


def _phi3(reader: Reader) -> Fields:
    reader.require("attention_bias", None, False)
    reader.skip("original_max_position_embeddings", "embd_pdrop")
    fields = sizes(reader) | {"head_dim": head_dim(reader)}
    return arrange(fields, windowed(reader, fields["num_layers"]))


def _gemma(reader: Reader) -> Fields:
    reader.require("attention_bias", None, False)
    reader.skip("hidden_activation")
    return sizes(reader, tied=True) | {"head_dim": reader.integer("head_dim")}


def _olmo2(reader: Reader) -> Fields:
    """Norms stand behind attention and MLP instead of before: as many, and the same work."""
    fields = sizes(reader)
    bias = reader.boolean("attention_bias", False)
    return fields | {
        "head_dim": head_dim(reader),
        "qk_norm": "full",
        "attention_bias": bias,
        "attention_output_bias": bias,
    }


def _first_windowed(reader: Reader) -> int | None:
    """Where Qwen's window begins to hold, if it is on."""
    on = reader.boolean("use_sliding_window", False)
    reader.skip("max_window_layers")
    return reader.within("max_window_layers", 0, MAX_LAYERS) if on else None


def _qwen2(reader: Reader) -> Fields:
    fields = sizes(reader) | {"head_dim": head_dim(reader), "attention_bias": True}
    return arrange(fields, layer_windows(reader, fields["num_layers"], _first_windowed(reader)))


def _qwen2_moe(reader: Reader) -> Fields:
    reader.require("use_sliding_window", None, False)
    reader.skip("max_window_layers")
    fields = sizes(reader) | {"head_dim": head_dim(reader), "attention_bias": reader.boolean("qkv_bias", True)}
    moe = _experts(reader, "num_experts", reader.integer("moe_intermediate_size"))
    moe |= {"num_shared_experts": 1, "shared_ffn": reader.integer("shared_expert_intermediate_size")}
    fields["moe"] = moe | {"shared_expert_gate": True}
    return arrange(fields, layer_windows(reader, fields["num_layers"]), sparse_layers(reader, fields["num_layers"]))


def _qwen3_fields(reader: Reader) -> Fields:
    bias = reader.boolean("attention_bias", False)  # on q, k, v and the output
    return sizes(reader) | {
        "head_dim": reader.integer("head_dim"),
        "qk_norm": "head",
        "attention_bias": bias,
        "attention_output_bias": bias,
    }


def _qwen3(reader: Reader) -> Fields:
    fields = _qwen3_fields(reader)
    return arrange(fields, layer_windows(reader, fields["num_layers"], _first_windowed(reader)))


def _qwen3_moe(reader: Reader) -> Fields:
    fields = _qwen3_fields(reader)
    num_experts = "num_experts" if "num_experts" in reader.config else "num_local_experts"
    fields["moe"] = _experts(reader, num_experts, reader.integer("moe_intermediate_size"))
    reader.require("num_local_experts", None, fields["moe"]["num_experts"])  # the same key under its newer name
    mixers = layer_windows(reader, fields["num_layers"], _first_windowed(reader))
    return arrange(fields, mixers, sparse_layers(reader, fields["num_layers"]))


def _minimax_m2(reader: Reader) -> Fields:
    fields = sizes(reader)
    num_layers = fields["num_layers"]
    reader.per_layer("attn_type_list", num_layers, (1,))  # 1: softmax attention; its forerunner had linear layers
    reader.require("shared_intermediate_size", None, 0)
    reader.skip("rotary_dim")
    mtp = reader.boolean("use_mtp", False)
    reader.require("mtp_transformer_layers", None, 1)
    num_mtp = reader.integer("num_mtp_modules", 0)
    reader.require("qk_norm_type", None, "per_layer")
    moe = _experts(reader, "num_local_experts", fields["ffn"])
    return fields | {
        "head_dim": head_dim(reader),
        "qk_norm": "full" if reader.boolean("use_qk_norm", True) else "none",
        "moe": moe | {"router_correction_bias": reader.boolean("use_routing_bias", True)},
        "num_mtp_layers": num_mtp if mtp else 0,
    }


def _gpt_oss(reader: Reader) -> Fields:
    fields = sizes(reader)
    num_layers = fields["num_layers"]
    bias = reader.boolean("attention_bias", True)
    moe = _experts(reader, "num_local_experts", fields["ffn"])
    reader.require("experts_per_token", None, moe["top_k"])  # the same key under its older name
    reader.skip("initial_context_length", "swiglu_limit", "swiglu_alpha")
    if reader.config.get("layer_types") is None:
        raise ValueError("layer_types is required for model_type 'gpt_oss', but is absent; list full_attention and "
                         "sliding_attention")  # fmt: skip
    fields |= {
        "head_dim": head_dim(reader),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "attention_sinks": True,
        "mlp_bias": True,
        "moe": moe | {"router_bias": True},
    }
    return arrange(fields, layer_windows(reader, num_layers), [True] * num_layers)


def _llama4(reader: Reader) -> Fields:
    fields = sizes(reader, ffn="intermediate_size_mlp")
    num_layers = fields["num_layers"]
    step = reader.within("interleave_moe_layer_step", 1, MAX_LAYERS, 1)
    listed = reader.raw("moe_layers") is not None
    experts = set(reader.places("moe_layers", num_layers) if listed else range(step - 1, num_layers, step))
    ffn = reader.integer("intermediate_size")
    moe = _experts(reader, "num_local_experts", ffn) | {"num_shared_experts": 1, "shared_ffn": ffn}
    bias = reader.boolean("attention_bias", False)
    reader.skip("attn_temperature_tuning", "floor_scale", "attn_scale")
    fields |= {
        "head_dim": head_dim(reader),
        "qk_norm": "unweighted" if reader.boolean("use_qk_norm", True) else "none",
        "attention_bias": bias,
        "attention_output_bias": bias,
        "moe": moe,
    }
    return arrange(fields, _llama4_mixers(reader, num_layers), [i in experts for i in range(num_layers)])


def _llama4_mixers(reader: Reader, num_layers: int) -> list[Fields]:
    """Rotated layers see their chunk; each `no_rope_layer_interval`-th sees all and rotates nothing."""
    interval = reader.within("no_rope_layer_interval", 1, MAX_LAYERS, 4)
    rotates = reader.per_layer("no_rope_layers", num_layers, (0, 1)) if reader.raw("no_rope_layers") else None
    rotates = rotates or [int((i + 1) % interval != 0) for i in range(num_layers)]
    chunk = reader.within("attention_chunk_size", 1, 2**31)
    kinds = reader.per_layer("layer_types", num_layers, ("full_attention", "chunked_attention"))
    kinds = kinds or ["chunked_attention" if rotated else "full_attention" for rotated in rotates]
    return [
        ({"chunk": chunk} if kind == "chunked_attention" else {}) | ({} if rotated else {"rope": False})
        for kind, rotated in zip(kinds, rotates, strict=True)
    ]


ARCHITECTURES = {
    "gemma": _gemma,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "llama4_text": _llama4,
    "minimax_m2": _minimax_m2,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
