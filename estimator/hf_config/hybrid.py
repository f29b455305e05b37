"""Hybrids: most layers mix tokens by a recurrence (gated delta net, Mamba-2), some by attention."""

from __future__ import annotations

from estimator.hf_config.reader import MAX_LAYERS, Reader
from estimator.hf_config.shape import Fields, Layer, arrange, num_layers_of, sizes, sparse_layers

__all__ = ["ARCHITECTURES"]


def _delta_net(reader: Reader) -> tuple[Fields, list[Layer]]:
    """Fields and mixers of Qwen's hybrids: each `full_attention_interval`-th layer is gated attention."""
    bias = reader.boolean("attention_bias", False)
    fields: Fields = {
        "head_dim": reader.integer("head_dim"),
        "qk_norm": "head",
        "attention_bias": bias,
        "attention_output_bias": bias,
        "attention_gate": reader.boolean("attn_output_gate", True),
        "linear": {
            "num_key_heads": reader.integer("linear_num_key_heads"),
            "num_value_heads": reader.integer("linear_num_value_heads"),
            "key_head_dim": reader.integer("linear_key_head_dim"),
            "value_head_dim": reader.integer("linear_value_head_dim"),
            "conv": reader.integer("linear_conv_kernel_dim"),
        },
        "num_mtp_layers": reader.integer("mtp_num_hidden_layers", 0),
    }
    reader.require("mtp_use_dedicated_embeddings", None, False)
    reader.skip("mamba_ssm_dtype")
    num_layers = num_layers_of(reader)
    interval = reader.within("full_attention_interval", 1, MAX_LAYERS, 4)
    kinds = reader.per_layer("layer_types", num_layers, ("full_attention", "linear_attention"))
    kinds = kinds or ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    return fields, [{"mixer": "linear"} if kind == "linear_attention" else {} for kind in kinds]


def _qwen3_5(reader: Reader) -> Fields:
    fields, mixers = _delta_net(reader)
    reader.require("mlp_only_layers", None, [])
    return arrange(sizes(reader) | fields, mixers)


def _delta_net_moe(reader: Reader) -> Fields:
    fields, mixers = _delta_net(reader)
    dense_ffn = "intermediate_size" if "intermediate_size" in reader.config else "moe_intermediate_size"
    fields = sizes(reader, ffn=dense_ffn) | fields  # not every file has a size for dense layers, which are none
    fields["moe"] = {
        "num_experts": reader.integer("num_experts"),
        "top_k": reader.integer("num_experts_per_tok"),
        "ffn": reader.integer("moe_intermediate_size"),
        "num_shared_experts": 1,
        "shared_ffn": reader.integer("shared_expert_intermediate_size"),
        "shared_expert_gate": True,
    }
    sparse = sparse_layers(reader, fields["num_layers"])
    if "intermediate_size" not in reader.config and not all(sparse):
        raise ValueError("intermediate_size is required where a layer is dense, but is absent; add it")
    return arrange(fields, mixers, sparse)


HALVES: dict[str, Layer] = {
    "M": {"mixer": "mamba", "mlp": "none"},
    "*": {"rope": False, "mlp": "none"},  # arXiv:2504.03624, section 2.1: no position embeddings
    "-": {"mixer": "none"},
    "E": {"mixer": "none", "mlp": "moe"},
}


def _nemotron_h(reader: Reader) -> Fields:
    """Each layer is half of a common one: Mamba-2, attention, MLP or experts, behind one norm."""
    num_layers = num_layers_of(reader)
    pattern = reader.raw("hybrid_override_pattern")
    if not isinstance(pattern, str) or len(pattern) != num_layers or set(pattern) - HALVES.keys():
        raise ValueError(
            f"hybrid_override_pattern must have a letter of {list(HALVES)} for each of num_hidden_layers "
            f"({num_layers}) layers"
        )
    for key in ("use_bias", "mamba_proj_bias", "attention_bias", "mlp_bias"):
        reader.require(key, None, False)
    reader.require("sliding_window", None)
    reader.require("num_nextn_predict_layers", None, 0)
    reader.skip(*NEMOTRON_HARMLESS)
    heads = "attention_head_dim" if "attention_head_dim" in reader.config else "head_dim"
    fields = sizes(reader) | {
        "head_dim": reader.integer(heads),
        "gated_mlp": False,
        "layers": [HALVES[letter] for letter in pattern],
        "mamba": {
            "num_heads": reader.integer("mamba_num_heads"),
            "head_dim": reader.integer("mamba_head_dim"),
            "state": reader.integer("ssm_state_size"),
            "groups": reader.integer("n_groups"),
            "conv": reader.integer("conv_kernel"),
            "chunk": reader.integer("chunk_size"),
            "conv_bias": reader.boolean("use_conv_bias", True),
        },
    }
    return fields | ({"moe": _nemotron_experts(reader)} if "E" in pattern else {})


NEMOTRON_HARMLESS = (
    "expand", "head_dim", "attention_head_dim", "mamba_hidden_act", "mlp_hidden_act", "mamba_ssm_cache_dtype",
    "layer_norm_epsilon", "norm_eps", "num_logits_to_keep", "rescale_prenorm_residual",
    "residual_in_fp32", "time_step_floor", "time_step_limit", "time_step_max", "time_step_min", "time_step_rank",
    "use_mamba_kernels", "moe_shared_expert_overlap",
)  # fmt: skip


def _nemotron_experts(reader: Reader) -> Fields:
    reader.require("n_group", None, 1)
    reader.require("topk_group", None, 1)
    return {
        "num_experts": reader.integer("n_routed_experts"),
        "top_k": reader.integer("num_experts_per_tok"),
        "ffn": reader.integer("moe_intermediate_size"),
        "num_shared_experts": reader.integer("n_shared_experts"),
        "shared_ffn": reader.integer("moe_shared_expert_intermediate_size"),
        "latent": reader.integer("moe_latent_size", 0),
        "router_correction_bias": True,
    }


ARCHITECTURES = {
    "nemotron_h": _nemotron_h,
    "qwen3_5_moe_text": _delta_net_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _delta_net_moe,
}
