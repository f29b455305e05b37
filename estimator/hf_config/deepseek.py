"""DeepSeek and what follows its plan: latent attention, experts of one size, and what chooses the keys to see."""

from __future__ import annotations

from estimator.hf_config.reader import Reader
from estimator.hf_config.shape import Fields, Layer, arrange, head_dim, sizes

__all__ = ["ARCHITECTURES", "routed_experts"]


def _latent(reader: Reader) -> Fields:
    """Sizes and multi-head latent attention."""
    reader.require("attention_bias", None, False)
    reader.require("mlp_bias", None, False)
    mla = {
        "q_lora_rank": reader.nullable("q_lora_rank", 0),
        "kv_lora_rank": reader.integer("kv_lora_rank"),
        "qk_nope_head_dim": reader.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": reader.integer("qk_rope_head_dim"),
        "v_head_dim": reader.integer("v_head_dim"),
    }
    qk_head_dim = mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"]
    reader.require("qk_head_dim", None, qk_head_dim)
    reader.skip("head_dim")  # newer files repeat qk_rope_head_dim here
    return sizes(reader) | {"head_dim": qk_head_dim, "mla": mla}


def routed_experts(reader: Reader) -> Fields:
    """Experts and the shared ones, which are as many times as wide."""
    num_shared, ffn = reader.nullable("n_shared_experts", 0), reader.integer("moe_intermediate_size")
    return {
        "num_experts": reader.integer("n_routed_experts"),
        "top_k": reader.integer("num_experts_per_tok"),
        "ffn": ffn,
        "num_shared_experts": num_shared,
        "shared_ffn": num_shared * ffn,
    }


def _corrected_experts(reader: Reader) -> Fields:
    """Experts whose load a correction of their scores keeps even, within groups where there are some."""
    reader.require("topk_method", None, "noaux_tc")
    num_groups, top_groups = reader.nullable("n_group", 1), reader.nullable("topk_group", 1)
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"topk_group must be from 1 to n_group ({num_groups}), but got {top_groups}")
    return routed_experts(reader) | {
        # A group of experts lives on one node (arXiv:2412.19437, section 2.1.2), so limited groups are limited nodes.
        "max_nodes_per_token": top_groups if top_groups < num_groups else None,
        "router_correction_bias": True,
    }


def _first_dense(reader: Reader, num_layers: int) -> list[bool]:
    """Layers with experts: all but the first `first_k_dense_replace`."""
    reader.require("moe_layer_freq", None, 1)
    num_dense = reader.within("first_k_dense_replace", 0, num_layers)
    sparse = [i >= num_dense for i in range(num_layers)]
    kinds = reader.per_layer("mlp_layer_types", num_layers, ("dense", "sparse"))
    return sparse if kinds is None else [kind == "sparse" for kind in kinds]


def _with_experts(reader: Reader, fields: Fields, mixer: Layer) -> Fields:
    num_layers = fields["num_layers"]
    fields |= {"moe": _corrected_experts(reader), "num_mtp_layers": reader.integer("num_nextn_predict_layers", 0)}
    return arrange(fields, [dict(mixer) for _ in range(num_layers)], _first_dense(reader, num_layers))


def _deepseek_v2(reader: Reader) -> Fields:
    """Routing by the plain score. Its groups are devices (arXiv:2405.04434, section 2.2.2), which limits no node."""
    reader.require("topk_method", None, "greedy", "group_limited_greedy")
    reader.skip("n_group", "topk_group")
    fields = _latent(reader) | {"moe": routed_experts(reader)}
    num_layers = fields["num_layers"]
    return arrange(fields, [{} for _ in range(num_layers)], _first_dense(reader, num_layers))


def _deepseek_v3(reader: Reader) -> Fields:
    return _with_experts(reader, _latent(reader), {})


def _indexer(reader: Reader) -> Fields:
    return {
        "num_heads": reader.integer("index_n_heads"),
        "head_dim": reader.integer("index_head_dim"),
        "top_k": reader.integer("index_topk"),
    }


def _deepseek_v32(reader: Reader) -> Fields:
    """An indexer in every layer (arXiv:2512.02556, section 2.1)."""
    reader.skip("indexer_rope_interleave")
    fields = _latent(reader) | {"indexer": _indexer(reader)}
    reader.per_layer("layer_types", fields["num_layers"], ("indexed_attention",))
    reader.per_layer("indexer_types", fields["num_layers"], ("full",))
    return _with_experts(reader, fields, {"indexed": True})


RATIOS: dict[int, Layer] = {
    0: {},
    4: {"compression": 4, "indexed": True},
    128: {"compression": 128},
}  # as the publisher's code has them


def _deepseek_v4(reader: Reader) -> Fields:
    """A window, beside it compressed keys that an indexer chooses among, or ones so few that it need not."""
    for key in ("attention_bias", "mlp_bias"):
        reader.require(key, None, False)
    reader.require("num_key_value_heads", 1)  # a head of keys that all queries share, and that is the values too
    reader.require("topk_method", None, "noaux_tc")
    reader.skip("expert_dtype", "hc_eps", "swiglu_limit", "compress_rope_theta")
    fields = sizes(reader, ffn="moe_intermediate_size")  # no layer is dense
    num_layers, num_mtp = fields["num_layers"], reader.within("num_nextn_predict_layers", 0, 1, 0)
    ratios = reader.per_layer("compress_ratios", num_layers + num_mtp, RATIOS)
    if ratios is None:
        raise ValueError("compress_ratios is required for model_type 'deepseek_v4', but is absent; add it")
    window = reader.within("sliding_window", 1, 2**31)
    num_hashed = reader.within("num_hash_layers", 0, num_layers, 0)
    mixers = [
        {"window": window} | RATIOS[ratio] | ({"hash_routed": True} if i < num_hashed else {})
        for i, ratio in enumerate(ratios)
    ]
    fields |= {
        "head_dim": reader.integer("head_dim"),
        "attention_sinks": True,
        "compressed": {name: reader.integer(name) for name in COMPRESSED},
        "indexer": _indexer(reader),
        "hyper": {
            "streams": reader.integer("hc_mult"),
            "sinkhorn_iterations": reader.integer("hc_sinkhorn_iters"),
        },
        "moe": routed_experts(reader) | {"router_correction_bias": True},
        "num_mtp_layers": num_mtp,
    }
    if num_mtp:
        fields["mtp_layer"] = mixers[-1] | {"mlp": "moe"}
    return arrange(fields, mixers[:num_layers], [True] * num_layers)


COMPRESSED = ("q_lora_rank", "o_groups", "o_lora_rank", "qk_rope_head_dim")


def _glm4_moe(reader: Reader) -> Fields:
    """DeepSeek's experts behind plain attention, whose output has no bias."""
    fields = sizes(reader) | {
        "head_dim": head_dim(reader),
        "qk_norm": "head" if reader.boolean("use_qk_norm", False) else "none",
        "attention_bias": reader.boolean("attention_bias", False),
    }
    return _with_experts(reader, fields, {})


ARCHITECTURES = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "deepseek_v4": _deepseek_v4,
    "glm4_moe": _glm4_moe,
    "glm_moe_dsa": _deepseek_v32,
    "kimi_k2": _deepseek_v3,
}
