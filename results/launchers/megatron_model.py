"""A model's sizes in the words of Megatron Core, both ways. Refuses layers that its GPT model has no arguments for.

Read from sizes in flags; what Megatron derives is derived, and what is the tokenizer's (the vocabulary) is assumed by
architecture and listed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from results.launchers.settings import Settings, Value
from results.launchers.table import Inexpressible, Values

__all__ = ["MODEL_NAMES", "is_described", "read_model", "write_model"]

_TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
_MOST_LAYERS = 10_000
_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
_HYBRID = ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model", "experimental_attention_variant",
           "linear_attention_freq", "heterogeneous_layers_config_path")  # fmt: skip
_PATTERN = re.compile(r"[\d\[\](),+*\s]+")
_FIELDS = frozenset({
    "name", "num_layers", "hidden", "ffn", "num_heads", "num_kv_heads", "head_dim", "vocab", "gated_mlp", "norm",
    "tied_embeddings", "qk_norm", "attention_bias", "attention_output_bias", "mlp_bias", "max_positions",
    "attention_sinks", "attention_gate", "attention_dropout", "hidden_dropout", "layers", "mla", "moe",
    "num_mtp_layers", "vocab_multiple",
})  # fmt: skip
_MOE_FIELDS = frozenset({
    "num_experts", "top_k", "ffn", "num_shared_experts", "shared_ffn", "num_dense_layers", "capacity_factor",
    "max_nodes_per_token", "router_correction_bias", "router_bias", "shared_expert_gate", "latent",
})  # fmt: skip

MODEL_NAMES = (
    *_SIZES, *_HYBRID, "ffn_hidden_size", "kv_channels", "group_query_attention", "num_query_groups", "vocab_size",
    "padded_vocab_size", "tokenizer_type", "swiglu", "quick_geglu", "squared_relu",
    "untie_embeddings_and_output_weights", "normalization", "qk_layernorm", "qk_l2_norm", "add_bias_linear",
    "add_qkv_bias", "position_embedding_type", "use_rotary_position_embeddings", "add_position_embedding",
    "max_position_embeddings", "softmax_type", "attention_output_gate", "attention_dropout", "hidden_dropout",
    "make_vocab_size_divisible_by", "mtp_num_layers", "multi_latent_attention", "q_lora_rank", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "num_experts", "moe_router_topk", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity", "moe_router_enable_expert_bias", "moe_shared_expert_gate", "moe_latent_size",
    "moe_router_group_topk", "moe_router_num_groups", "window_size", "window_attn_skip_freq", "no_rope_freq",
)  # fmt: skip
"""Every name that describes a model: where the command line names one, these are read for nothing."""


def is_described(given: Settings) -> bool:
    """Whether the file has the sizes of a model that its arguments describe in full."""
    return all(name in given for name in _SIZES) and not any(name in given for name in _HYBRID)


def read_model(given: Settings, name: str) -> Values:
    """The fields of a model file."""
    layers, hidden, heads = (given.whole(size) or 0 for size in _SIZES)
    assert min(layers, hidden, heads) > 0, "is_described was asked"
    if layers > _MOST_LAYERS:
        raise given.bad("num_layers", f"must be at most {_MOST_LAYERS}")
    gated = bool(given.flag("swiglu")) | bool(given.flag("quick_geglu"))
    given.flag("squared_relu")  # an activation without a gate, as GELU is
    ffn = given.whole("ffn_hidden_size") or (hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
    norm = (given.text("normalization") or "LayerNorm").lower()
    if norm not in {"layernorm", "rmsnorm"}:
        raise given.bad("normalization", "must be LayerNorm or RMSNorm")
    biased = given.flag("add_bias_linear") is not False
    is_rms = norm == "rmsnorm"
    model: Values = {
        "name": name,
        "num_layers": layers,
        "hidden": hidden,
        "ffn": ffn,
        "num_heads": heads,
        "num_kv_heads": _kv_heads(given, heads),
        "head_dim": _head_dim(given, hidden, heads),
        "vocab": _vocab(given, is_llama=gated and is_rms),
        "gated_mlp": gated,
        "tied_embeddings": not given.flag("untie_embeddings_and_output_weights"),
        "norm": "rms" if is_rms else "layer",
        "qk_norm": "unweighted" if given.flag("qk_l2_norm") else "head" if given.flag("qk_layernorm") else "none",
        "attention_bias": biased | bool(given.flag("add_qkv_bias")),
        "attention_output_bias": biased,
        "mlp_bias": biased,
        "max_positions": _positions(given),
        "attention_sinks": given.text("softmax_type") == "learnable",
        "attention_gate": bool(given.flag("attention_output_gate")),
        "num_mtp_layers": given.whole("mtp_num_layers", least=0) or 0,
        "vocab_multiple": given.whole("make_vocab_size_divisible_by") or 128,
    }
    for kind in ("attention_dropout", "hidden_dropout"):
        rate = given.number(kind)
        model[kind] = 0.1 if rate is None else rate
        if rate is None:
            given.note(f"{kind}=0.1", f"Megatron's default without --{kind.replace('_', '-')}")
    if given.flag("multi_latent_attention"):
        model |= _latent(given, heads)
    if (experts := given.whole("num_experts")) is not None:
        model["moe"] = _experts(given, experts, ffn, biased=biased)
    return model | _layers(given, model, layers)


def _kv_heads(given: Settings, heads: int) -> int:
    groups = given.whole("num_query_groups")
    if given.flag("group_query_attention") is False:
        return heads
    if "group_query_attention" not in given and groups is not None:
        given.note(f"num_kv_heads={heads}", "--num-query-groups counts only beside --group-query-attention")
        return heads
    return groups or (1 if "group_query_attention" in given else heads)


def _head_dim(given: Settings, hidden: int, heads: int) -> int:
    channels = given.whole("kv_channels")
    if channels is None and hidden % heads:
        raise given.bad("num_attention_heads", f"must divide --hidden-size ({hidden}), or --kv-channels be given")
    return channels or hidden // heads


def _vocab(given: Settings, *, is_llama: bool) -> int:
    size = given.whole("vocab_size") or given.whole("padded_vocab_size")
    tokenizer = given.text("tokenizer_type")
    if size is not None:
        return size
    if tokenizer in _TOKENIZERS:
        given.note(f"vocab={_TOKENIZERS[tokenizer]}", f"of {tokenizer}")
        return _TOKENIZERS[tokenizer]
    known = 32000 if is_llama else 50257
    given.note(f"vocab={known}", f"of {'Llama 2' if is_llama else 'GPT-2'}, by architecture: the file has none")
    return known


def _positions(given: Settings) -> int:
    """Rows of learned positions; none where they are rotated or left out."""
    kind = given.text("position_embedding_type") or "learned_absolute"
    rotary, has_any = given.flag("use_rotary_position_embeddings"), given.flag("add_position_embedding")
    most = given.whole("max_position_embeddings")
    if kind != "learned_absolute" or rotary or has_any is False:
        return 0
    if most is None:
        most = given.whole("seq_length") or 0
        given.note(f"max_positions={most}", "learned positions as long as the sequence: the file has no number")
    return most


def _latent(given: Settings, heads: int) -> Values:
    sizes: Values = {
        "q_lora_rank": given.whole("q_lora_rank") or 0,
        "kv_lora_rank": given.whole("kv_lora_rank") or 32,
        "qk_nope_head_dim": given.whole("qk_head_dim") or 128,
        "qk_rope_head_dim": given.whole("qk_pos_emb_head_dim") or 64,
        "v_head_dim": given.whole("v_head_dim") or 128,
    }
    nope, rope = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"]
    assert isinstance(nope, int)
    assert isinstance(rope, int)
    off: Values = {"attention_bias": False, "qk_norm": "none", "num_kv_heads": heads, "head_dim": nope + rope}
    return off | {"mla": sizes}


def _experts(given: Settings, experts: int, ffn: int, *, biased: bool) -> Values:
    each = given.whole("moe_ffn_hidden_size") or ffn
    shared = given.whole("moe_shared_expert_intermediate_size") or 0
    capacity = given.number("moe_expert_capacity_factor")
    given.flag("moe_pad_expert_input_to_capacity")
    given.whole("moe_router_num_groups")
    return {
        "num_experts": experts,
        "top_k": given.whole("moe_router_topk") or 2,
        "ffn": each,
        "num_shared_experts": max(shared // each, 1) if shared else 0,
        "shared_ffn": shared,
        "capacity_factor": capacity,
        "max_nodes_per_token": given.whole("moe_router_group_topk"),
        "router_correction_bias": bool(given.flag("moe_router_enable_expert_bias")),
        "router_bias": biased,
        "shared_expert_gate": bool(given.flag("moe_shared_expert_gate")),
        "latent": given.whole("moe_latent_size") or 0,
    }


def _layers(given: Settings, model: Values, count: int) -> Values:
    """Which layers have experts, windows or no rotation; nothing where all that differs is a dense start."""
    moe = model.get("moe")
    experts = _pattern(given, "moe_layer_freq", count, "moe") if moe else [0] * count
    window = given.words("window_size")
    windows = _pattern(given, "window_attn_skip_freq", count, "window") if window else [0] * count
    bare = _pattern(given, "no_rope_freq", count, "bare") if "no_rope_freq" in given else [0] * count
    if not any(windows) and not any(bare):
        dense = experts.index(1) if 1 in experts else count
        if all(experts[dense:]):
            return {"moe": moe | {"num_dense_layers": dense}} if isinstance(moe, dict) else {}
    width = _window(given, window) if window else 0
    found: list[Value] = []
    for has_experts, is_windowed, is_bare in zip(experts, windows, bare, strict=True):
        layer: Values = {"mlp": "moe" if has_experts else "dense"}
        layer |= {"window": width} if is_windowed else {}
        found.append(layer | ({"rope": False} if is_bare else {}))
    return {"layers": found}


def _window(given: Settings, words: Sequence[str]) -> int:
    """Tokens that one sees, itself among them: Megatron counts those to the left."""
    left = words[0].strip("()")
    if not left.isdecimal():
        raise given.bad("window_size", "must be (LEFT,RIGHT)")
    return int(left) + 1


def _pattern(given: Settings, name: str, count: int, kind: str) -> list[int]:
    """One number per layer, of `N` or of a list such as ([0]*3+[1]*58)."""
    words = given.take(name)
    text = "".join(map(str, words)) if isinstance(words, list) else "1" if words is None else str(words)
    if isinstance(words, list) and all(type(item) is int for item in words):
        found = [int(str(item)) for item in words]
    elif text.isdecimal():
        every = int(text)
        if every < 1:
            raise given.bad(name, "must be a whole number of at least 1")
        if words is None and kind == "window":
            return [1] * count
        last = [i % every == (0 if kind == "moe" else every - 1) for i in range(count)]
        return [int(not x if kind == "window" else x) for x in last]
    else:
        found = _expanded(given, name, text, count)
    if len(found) != count:
        raise given.bad(name, f"must have one number for each of {count} layers (it has {len(found)})")
    return found


def _expanded(given: Settings, name: str, text: str, count: int) -> list[int]:
    """A sum of lists that are repeated: no more than that is evaluated."""
    bare = re.sub(r"\s", "", text)
    if not _PATTERN.fullmatch(bare):
        raise given.bad(name, "must be a number or lists of 0 and 1 such as ([0]*3+[1]*58)")
    for _ in range(16):
        inner = re.sub(r"\(\[([\d,]*)\]\)", r"[\1]", bare)
        inner = re.sub(r"\[([\d,]*)\]\*(\d{1,6})", lambda m: _times(m[1], int(m[2]), count), inner)
        inner = re.sub(r"\[([\d,]*)\]\+\[([\d,]*)\](?!\*)", r"[\1,\2]", inner)
        if inner == bare:
            break
        bare = inner
    if re.fullmatch(r"\[\d+(,\d+)*\]", bare) is None:
        raise given.bad(name, "must be a number or lists of 0 and 1 such as ([0]*3+[1]*58)")
    return [int(item) for item in bare[1:-1].split(",")]


def _times(items: str, number: int, count: int) -> str:
    return "[" + ",".join([items] * min(number, count + 1)) + "]"


def write_model(model: Mapping[str, Value], *, chips_per_node: int, ep: int) -> Values:
    """The settings that describe a model; Inexpressible where Megatron's GPT model has none."""
    odd = [name for name, value in model.items() if name not in _FIELDS and value not in (None, False, [], 0)]
    if odd:
        raise Inexpressible("model", f"Megatron's GPT model has no arguments for {', '.join(odd)}")
    biases = [model[f"{part}_bias"] for part in ("attention_output", "mlp")]
    if biases[0] != biases[1] or (biases[0] and not model["attention_bias"] and model["mla"] is None):
        raise Inexpressible("model", "biases of attention's output and of the MLP go together (--disable-bias-linear)")
    if model["qk_norm"] == "full":
        raise Inexpressible("model", "--qk-layernorm normalises each head, not all of them together")
    gated, biased, positions = model["gated_mlp"], bool(biases[0]), model["max_positions"]
    theirs: Values = {
        "num_layers": model["num_layers"],
        "hidden_size": model["hidden"],
        "ffn_hidden_size": model["ffn"],
        "num_attention_heads": model["num_heads"],
        "kv_channels": model["head_dim"],
        "group_query_attention": model["num_kv_heads"] != model["num_heads"],
        "num_query_groups": model["num_kv_heads"] if model["num_kv_heads"] != model["num_heads"] else None,
        "vocab_size": model["vocab"],
        "make_vocab_size_divisible_by": model["vocab_multiple"],
        "swiglu": gated,
        "untie_embeddings_and_output_weights": not model["tied_embeddings"],
        "normalization": "RMSNorm" if model["norm"] == "rms" else "LayerNorm",
        "qk_layernorm": model["qk_norm"] == "head",
        "qk_l2_norm": model["qk_norm"] == "unweighted",
        "add_bias_linear": biased,
        "add_qkv_bias": bool(model["attention_bias"]) and not biased,
        "position_embedding_type": "learned_absolute" if positions else "rope",
        "max_position_embeddings": positions or None,
        "softmax_type": "learnable" if model["attention_sinks"] else None,
        "attention_output_gate": model["attention_gate"],
        "attention_dropout": model["attention_dropout"],
        "hidden_dropout": model["hidden_dropout"],
        "mtp_num_layers": model["num_mtp_layers"] or None,
    }
    if isinstance(mla := model["mla"], dict):
        theirs |= {
            "multi_latent_attention": True,
            "q_lora_rank": mla["q_lora_rank"] or None,
            "kv_lora_rank": mla["kv_lora_rank"],
            "qk_head_dim": mla["qk_nope_head_dim"],
            "qk_pos_emb_head_dim": mla["qk_rope_head_dim"],
            "v_head_dim": mla["v_head_dim"],
            "kv_channels": None,
            "group_query_attention": False,
            "num_query_groups": None,
        }
    if isinstance(moe := model["moe"], dict):
        theirs |= _write_experts(moe, biased=biased, groups=max(-(-ep // chips_per_node), 1))
    return theirs | _write_layers(model)


def _write_experts(moe: Mapping[str, Value], *, biased: bool, groups: int) -> Values:
    odd = [name for name, value in moe.items() if name not in _MOE_FIELDS and value not in (None, False, 0)]
    if odd:
        raise Inexpressible("model", f"Megatron's experts have no arguments for {', '.join(odd)}")
    if moe["router_bias"] and not biased:
        raise Inexpressible("model", "a router has biases where all linear layers have them (--disable-bias-linear)")
    limit = moe["max_nodes_per_token"]
    return {
        "num_experts": moe["num_experts"],
        "moe_router_topk": moe["top_k"],
        "moe_ffn_hidden_size": moe["ffn"],
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_shared_expert_intermediate_size": moe["shared_ffn"] or None,
        "moe_expert_capacity_factor": moe["capacity_factor"],
        "moe_router_group_topk": limit,
        "moe_router_num_groups": max(groups, limit) if isinstance(limit, int) else None,
        "moe_router_enable_expert_bias": moe["router_correction_bias"],
        "moe_router_score_function": "sigmoid" if moe["router_correction_bias"] else None,
        "moe_shared_expert_gate": moe["shared_expert_gate"],
        "moe_latent_size": moe["latent"] or None,
    }


def _write_layers(model: Mapping[str, Value]) -> Values:
    """Patterns of experts, windows and rotation."""
    count, moe, layers = model["num_layers"], model["moe"], model["layers"]
    assert isinstance(count, int)
    if not isinstance(layers, list):
        dense = moe["num_dense_layers"] if isinstance(moe, dict) else 0
        assert isinstance(dense, int)
        return {"moe_layer_freq": f"([0]*{dense}+[1]*{count - dense})"} if dense else {}
    plain: Values = {"mixer": "attention", "mlp": "dense", "window": 0, "rope": True}
    whole = [plain | layer for layer in layers if isinstance(layer, dict)]
    odd = sorted({k for layer in whole for k, v in layer.items() if k not in plain and v not in (0, False, None)})
    mixers = {str(layer["mixer"]) for layer in whole} | {str(layer["mlp"]) for layer in whole if layer["mlp"] == "none"}
    windows = sorted({w for layer in whole if isinstance(w := layer["window"], int) and w})
    if odd or mixers != {"attention"} or len(windows) > 1:
        what = (
            odd or sorted(mixers - {"attention"}) or [f"windows of {', '.join(map(str, windows))} tokens in one model"]
        )
        raise Inexpressible("model", f"Megatron's GPT model has no arguments for layers with {', '.join(what)}")
    theirs: Values = {}
    if moe:
        theirs["moe_layer_freq"] = _runs([int(layer["mlp"] == "moe") for layer in whole])
    if windows:
        theirs["window_size"] = f"({windows[0] - 1},0)"
        theirs["window_attn_skip_freq"] = _runs([int(bool(layer["window"])) for layer in whole])
    if not all(layer["rope"] for layer in whole):
        theirs["no_rope_freq"] = _runs([int(not layer["rope"]) for layer in whole])
    return theirs


def _runs(bits: Sequence[int]) -> str:
    """([0]*3+[1]*58), or a repeated period where that is shorter."""
    for period in range(1, len(bits) // 2 + 1):
        if len(bits) % period == 0 and list(bits) == list(bits[:period]) * (len(bits) // period):
            return f"[{','.join(map(str, bits[:period]))}]*{len(bits) // period}"
    starts = [i for i in range(len(bits)) if i == 0 or bits[i] != bits[i - 1]]
    ends = [*starts[1:], len(bits)]
    return "(" + "+".join(f"[{bits[a]}]*{b - a}" for a, b in zip(starts, ends, strict=True)) + ")"
