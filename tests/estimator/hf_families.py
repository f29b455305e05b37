"""A small config of every architecture that is read, and the parameters that its reference implementation counts.

Counted by `num_parameters()` of transformers 5.24 on the meta device; it holds the router's corrections as buffers.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FAMILIES"]

Config = dict[str, Any]

LLAMA: Config = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip
FOUR = LLAMA | {"num_hidden_layers": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN2_MOE = FOUR | EXPERTS | {"model_type": "qwen2_moe", "num_experts": 8, "shared_expert_intermediate_size": 24}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 32}
QWEN3_MOE = QWEN3 | EXPERTS | {"model_type": "qwen3_moe", "num_experts": 8}
DEEPSEEK = LLAMA | EXPERTS | {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
}  # fmt: skip
DEEPSEEK_V32 = DEEPSEEK | {
    "model_type": "deepseek_v32", "q_lora_rank": 24, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip
DEEPSEEK_V4: Config = EXPERTS | {
    "model_type": "deepseek_v4", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 100, "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16,
    "qk_rope_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "n_routed_experts": 8, "n_shared_experts": 1, "num_hash_layers": 1, "sliding_window": 8,
    "compress_ratios": [0, 4, 128, 4, 0], "num_nextn_predict_layers": 1,
}  # fmt: skip
DELTA_NET: Config = FOUR | {
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
}  # fmt: skip
DELTA_NET_MOE = DELTA_NET | EXPERTS | {"num_experts": 8, "shared_expert_intermediate_size": 24}
NEMOTRON: Config = FOUR | EXPERTS | {
    "model_type": "nemotron_h", "hybrid_override_pattern": "M-*E", "head_dim": 32, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4, "chunk_size": 16,
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 24,
}  # fmt: skip
LLAMA4: Config = FOUR | {
    "model_type": "llama4_text", "intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 8,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 16,
}  # fmt: skip
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
GPT2: Config = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": None, "n_positions": 32,
    "vocab_size": 100,
}  # fmt: skip
FALCON: Config = {
    "model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "parallel_attn": True, "bias": False,
}  # fmt: skip
NEOX: Config = {
    "model_type": "gpt_neox", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 100, "use_parallel_residual": False,
}  # fmt: skip

FAMILIES: dict[str, tuple[Config, int]] = {
    "llama": (LLAMA, 86_848),
    "llama, biased": (LLAMA | {"attention_bias": True, "mlp_bias": True}, 87_872),
    "mistral": (LLAMA | {"model_type": "mistral", "sliding_window": 8}, 86_848),
    "mixtral": (MIXTRAL, 431_936),
    "phi3": (LLAMA | {"model_type": "phi3", "sliding_window": None, "pad_token_id": 0}, 86_848),
    "gemma": (LLAMA | {"model_type": "gemma", "head_dim": 32}, 105_024),
    "olmo2": (LLAMA | {"model_type": "olmo2"}, 87_040),
    "qwen2": (LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True}, 80_704),
    "qwen2_moe": (QWEN2_MOE | {"decoder_sparse_step": 2}, 171_712),
    "qwen2_moe, a dense layer": (QWEN2_MOE | {"mlp_only_layers": [2]}, 176_896),
    "qwen3": (QWEN3, 111_552),
    "qwen3, biased": (QWEN3 | {"attention_bias": True}, 112_192),
    "qwen3_moe": (QWEN3_MOE, 112_576),
    "qwen3_moe, a dense layer": (QWEN3_MOE | {"mlp_only_layers": [0]}, 112_064),
    "qwen3_next": (DELTA_NET_MOE | {"model_type": "qwen3_next"}, 236_384),
    "qwen3_5_text": (DELTA_NET | {"model_type": "qwen3_5_text"}, 215_648),
    "qwen3_5_moe_text": (DELTA_NET_MOE | {"model_type": "qwen3_5_moe_text"}, 236_384),
    "minimax_m2": (
        MIXTRAL | {"model_type": "minimax_m2", "head_dim": 32, "use_mtp": True, "num_mtp_modules": 3}, 456_896,
    ),
    "gpt_oss": (GPT_OSS, 437_464),
    "llama4_text": (LLAMA4, 542_784),
    "llama4_text, listed": (LLAMA4 | {"moe_layers": [0, 1, 3], "no_rope_layers": [1, 0, 1, 0]}, 746_048),
    "deepseek_v2": (
        DEEPSEEK | {"model_type": "deepseek_v2", "topk_method": "greedy", "n_group": 1, "topk_group": 1}, 96_608,
    ),
    "deepseek_v3": (DEEPSEEK, 96_608),
    "deepseek_v3, low-rank queries": (DEEPSEEK | {"q_lora_rank": 24}, 92_048),
    "deepseek_v32": (DEEPSEEK_V32, 95_952),
    "deepseek_v4": (DEEPSEEK_V4, 255_117),
    "kimi_k2": (DEEPSEEK | {"model_type": "kimi_k2"}, 96_608),
    "glm_moe_dsa": (DEEPSEEK_V32 | {"model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1}, 95_952),
    "glm4_moe": (
        LLAMA | EXPERTS | {
            "model_type": "glm4_moe", "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
            "use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1, "head_dim": 32,
        }, 115_648,
    ),
    "nemotron_h": (NEMOTRON, 89_196),
    "nemotron_h, latent experts": (NEMOTRON | {"moe_latent_size": 24, "use_conv_bias": False}, 81_932),
    "gpt2": (GPT2, 108_544),
    "gpt_neox": (NEOX, 112_896),
    "falcon": (FALCON, 92_800),
    "falcon, as many key heads": (FALCON | {"multi_query": False}, 105_088),
}  # fmt: skip
