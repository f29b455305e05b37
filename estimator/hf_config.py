"""Hugging Face `config.json` of the architectures we know, translated into the keys of our own model files.

Every key must be understood: it is read, or checked to be off, or listed as harmless to the shape. Anything else is an
error that names the key, since a model read wrongly is worse than one refused. Knows nothing of ModelSpec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["read_hf_config"]

# Keys that change neither the shape nor the work of a training step, by what they are about.
HARMLESS = frozenset(
    # names and versions
    "architectures auto_map model_type name_or_path tokenizer_class transformers_version problem_type finetuning_task "
    "prefix id2label label2id num_labels task_specific_params "
    # numbers in the arithmetic: activation function, rotary angles, scales, initial values, regularisation
    "hidden_act initializer_range rms_norm_eps max_position_embeddings rope_theta rope_scaling rope_parameters "
    "rope_interleave attention_dropout norm_topk_prob routed_scaling_factor scoring_func seq_aux aux_loss_alpha "
    "router_aux_loss_coef router_jitter_noise "
    # how it is stored, split or returned; precision is the strategy's business
    "torch_dtype dtype quantization_config pretraining_tp ep_size use_cache use_bfloat16 torchscript return_dict "
    "return_dict_in_generate output_attentions output_hidden_states output_router_logits output_scores "
    "attn_implementation chunk_size_feed_forward "
    # tokens and text generation
    "bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id bad_words_ids "
    "begin_suppress_tokens suppress_tokens forced_bos_token_id forced_eos_token_id do_sample early_stopping "
    "num_beams num_beam_groups diversity_penalty length_penalty repetition_penalty encoder_no_repeat_ngram_size "
    "is_decoder no_repeat_ngram_size exponential_decay_length_penalty min_length max_length num_return_sequences "
    "remove_invalid_values temperature top_k top_p typical_p tf_legacy_loss "
    # Qwen's window starts at this layer, and only if use_sliding_window is on, which is refused
    "max_window_layers".split()
)

# Keys of every architecture that must be off: their value must be one of these.
OFF: tuple[object, ...] = (None, False, 0, {})
MUST_BE_OFF = (
    "add_cross_attention", "is_encoder_decoder", "cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads",
    "use_sliding_window",
)  # fmt: skip


@dataclass(slots=True)
class _Reader:
    """A config that remembers which of its keys were understood."""

    config: Mapping[str, Any]
    seen: set[str] = field(default_factory=set)

    def raw(self, key: str) -> object:
        self.seen.add(key)
        return self.config.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ValueError(f"{key} is required for model_type {self.config['model_type']!r}, but is absent; add it")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{key} must be an integer, but got {value!r}")
        return value

    def nullable(self, key: str, if_null: int) -> int:
        """An integer where null means `if_null`; absence would mean the class default, which is not assumed."""
        return self.integer(key, if_null if key in self.config else None)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, but got {value!r}")
        return value

    def require(self, key: str, *accepted: object) -> None:
        value = self.raw(key)
        if not any(value is a or (type(value) is type(a) and value == a) for a in accepted):
            raise ValueError(f"{key} must be one of {list(accepted)} (no other is modelled), but got {value!r}")

    def require_understood(self) -> None:
        unknown = sorted(k for k in map(str, self.config) if k not in self.seen | HARMLESS and not k.startswith("_"))
        if unknown:
            raise ValueError(
                f"{unknown[0]} is not understood for model_type {self.config['model_type']!r}, and may change the "
                f"shape (not understood in all: {unknown}); remove a key that does not"
            )


def read_hf_config(source: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Keys and values of our model files (`mla` and `moe` nested) from a mapping, a JSON file or a folder with one."""
    if isinstance(source, Mapping):
        return _translate(source)
    path = Path(source)
    path = path / "config.json" if os.path.isdir(path) else path  # not path.is_dir(), which raises on a name too long
    return _translate(_load(path)) | {"name": _name_of(path)}


def _load(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror}); give a config.json or its folder") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it must be JSON text ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"it must hold a JSON object, but got {type(config).__name__}")
    return config


def _name_of(path: Path) -> str:
    """`Qwen3-8B` of `Qwen--Qwen3-8B_config.json`, and of `Qwen3-8B/config.json`."""
    return path.resolve().parent.name if path.stem == "config" else path.stem.removesuffix("_config").split("--")[-1]


def _translate(config: Mapping[str, Any]) -> dict[str, Any]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        inner = config.get("text_config")
        usable = isinstance(inner, Mapping) and inner.get("model_type") in ARCHITECTURES
        remedy = "give its text_config alone to model the language part" if usable else f"have {sorted(ARCHITECTURES)}"
        raise ValueError(f"model_type {model_type!r} is not a known architecture; {remedy}")
    reader = _Reader(config)
    fields = {"name": model_type} | _common(reader) | ARCHITECTURES[model_type](reader)
    reader.require_understood()
    return fields


def _common(reader: _Reader) -> dict[str, Any]:
    for key in MUST_BE_OFF:
        reader.require(key, *OFF)
    num_layers = reader.integer("num_hidden_layers")
    _check_layer_types(reader.raw("layer_types"), num_layers)
    num_heads = reader.integer("num_attention_heads")
    return {
        "num_layers": num_layers,
        "hidden": reader.integer("hidden_size"),
        "ffn": reader.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(reader, num_heads),
        "vocab": reader.integer("vocab_size"),
        "tied_embeddings": reader.boolean("tie_word_embeddings", False),  # the class default of every one known here
    }


def _check_layer_types(layer_types: object, num_layers: int) -> None:
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ValueError(f"layer_types must list num_hidden_layers ({num_layers}) layers, but got {layer_types!r}")
    other = [kind for kind in layer_types if kind != "full_attention"]
    if other:
        raise ValueError(f"layer_types must all be 'full_attention' (others are not modelled), but got {other[0]!r}")


def _num_kv_heads(reader: _Reader, num_heads: int) -> int:
    if reader.config["model_type"] == "llama":  # its first files lack the key, and its class reads that as MHA
        return reader.integer("num_key_value_heads", num_heads)
    return reader.nullable("num_key_value_heads", num_heads)


def _head_dim(reader: _Reader) -> int:
    if reader.raw("head_dim") is not None:
        return reader.integer("head_dim")
    hidden, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if num_heads < 1 or hidden % num_heads:
        raise ValueError(
            f"hidden_size ({hidden}) must be divisible by num_attention_heads ({num_heads}); or give head_dim"
        )
    return hidden // num_heads


def _llama(reader: _Reader) -> dict[str, Any]:
    reader.require("sliding_window", None)
    bias = reader.boolean("attention_bias", False)  # on q, k, v and the output
    return {
        "head_dim": _head_dim(reader),
        "attention_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": reader.boolean("mlp_bias", False),
    }


def _mistral(reader: _Reader) -> dict[str, Any]:
    if "sliding_window" not in reader.config:
        raise ValueError("sliding_window is absent, which means 4096 for mistral (not modelled); set it to null")
    reader.require("sliding_window", None)
    return {"head_dim": _head_dim(reader)}


def _mixtral(reader: _Reader) -> dict[str, Any]:
    reader.require("sliding_window", None)
    moe = {
        "num_experts": reader.integer("num_local_experts"),
        "top_k": reader.integer("num_experts_per_tok"),
        "ffn": reader.integer("intermediate_size"),
    }
    return {"head_dim": _head_dim(reader), "moe": moe}


def _qwen2(reader: _Reader) -> dict[str, Any]:
    reader.seen.add("sliding_window")  # without effect: use_sliding_window is off
    return {"head_dim": _head_dim(reader), "attention_bias": True}


def _qwen3(reader: _Reader) -> dict[str, Any]:
    reader.seen.add("sliding_window")  # without effect: use_sliding_window is off
    bias = reader.boolean("attention_bias", False)  # on q, k, v and the output
    return {
        "head_dim": reader.integer("head_dim"),
        "qk_norm": "head",
        "attention_bias": bias,
        "attention_output_bias": bias,
    }


def _qwen3_moe(reader: _Reader) -> dict[str, Any]:
    reader.require("decoder_sparse_step", None, 1)
    dense = reader.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ValueError(f"mlp_only_layers must be the first layers, 0 to some number, or none; but got {dense!r}")
    num_experts = reader.integer("num_experts" if "num_experts" in reader.config else "num_local_experts")
    reader.require("num_local_experts", None, num_experts)  # the same key under its newer name
    moe = {
        "num_experts": num_experts,
        "top_k": reader.integer("num_experts_per_tok"),
        "ffn": reader.integer("moe_intermediate_size"),
        "num_dense_layers": len(dense),
    }
    return _qwen3(reader) | {"moe": moe}


def _deepseek_v3(reader: _Reader) -> dict[str, Any]:
    reader.require("attention_bias", None, False)
    reader.require("moe_layer_freq", None, 1)
    mla = {
        "q_lora_rank": reader.nullable("q_lora_rank", 0),
        "kv_lora_rank": reader.integer("kv_lora_rank"),
        "qk_nope_head_dim": reader.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": reader.integer("qk_rope_head_dim"),
        "v_head_dim": reader.integer("v_head_dim"),
    }
    qk_head_dim = mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"]
    reader.require("qk_head_dim", None, qk_head_dim)
    reader.seen.add("head_dim")  # newer files repeat qk_rope_head_dim here
    return {
        "head_dim": qk_head_dim,
        "mla": mla,
        "moe": _deepseek_moe(reader),
        "num_mtp_layers": reader.integer("num_nextn_predict_layers", 0),
    }


def _deepseek_moe(reader: _Reader) -> dict[str, Any]:
    reader.require("topk_method", None, "noaux_tc")
    num_groups, top_groups = reader.nullable("n_group", 1), reader.nullable("topk_group", 1)
    if not 1 <= top_groups <= num_groups:
        raise ValueError(f"topk_group must be from 1 to n_group ({num_groups}), but got {top_groups}")
    num_shared, ffn = reader.nullable("n_shared_experts", 0), reader.integer("moe_intermediate_size")
    return {
        "num_experts": reader.integer("n_routed_experts"),
        "top_k": reader.integer("num_experts_per_tok"),
        "ffn": ffn,
        "num_shared_experts": num_shared,
        "shared_ffn": num_shared * ffn,
        "num_dense_layers": reader.integer("first_k_dense_replace"),
        # A group of experts lives on one node (arXiv:2412.19437, section 2.1.2), so limited groups are limited nodes.
        "max_nodes_per_token": top_groups if top_groups < num_groups else None,
        "router_correction_bias": True,
    }


ARCHITECTURES: Mapping[str, Callable[[_Reader], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
}
