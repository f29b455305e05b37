"""Claims about reading Hugging Face configs: the published parameter counts come out, or the key at fault is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from estimator.model import LayerSpec, Mlp, ModelSpec

# As `model.num_parameters()` of transformers 5.24 counts each, on the meta device, which agrees with the publishers.
PUBLISHED = {
    "meta-llama--Meta-Llama-3.1-8B": 8_030_261_248,
    "meta-llama--Meta-Llama-3.1-70B": 70_553_706_496,
    "meta-llama--Meta-Llama-3.1-405B": 405_853_388_800,
    "mistralai--Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen--Qwen3-0.6B": 596_049_920,
    "Qwen--Qwen3-1.7B": 1_720_574_976,
    "Qwen--Qwen3-8B": 8_190_735_360,
    "Qwen--Qwen3-30B-A3B": 30_532_122_624,
    "Qwen--Qwen3-235B-A22B": 235_093_634_560,
    # transformers holds the router correction bias as a buffer, the publishers' checkpoints as a parameter.
    "deepseek-ai--DeepSeek-V3": 671_026_404_352 + 58 * 256,
    "deepseek-ai--DeepSeek-R1": 671_026_404_352 + 58 * 256,
    "moonshotai--Kimi-K2-Instruct": 1_026_408_209_408 + 60 * 384,
}

REFUSED = {
    "MiniMaxAI--MiniMax-M2.5": "minimax_m2",
    "MiniMaxAI--MiniMax-M2.7": "minimax_m2",
    "Qwen--Qwen3.5-122B-A10B": "qwen3_5_moe",
    "Qwen--Qwen3.5-27B": "qwen3_5",
    "Qwen--Qwen3.5-35B-A3B": "qwen3_5_moe",
    "deepseek-ai--DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai--DeepSeek-V4-Flash": "deepseek_v4",
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": "llama4",
    "moonshotai--Kimi-K2.5": "kimi_k25",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron_h",
    "nvidia--Nemotron-H-56B-Base-8K": "nemotron_h",
    "openai--gpt-oss-120b": "gpt_oss",
    "openai--gpt-oss-20b": "gpt_oss",
    "zai-org--GLM-5": "glm_moe_dsa",
    "zai-org--GLM-5.1": "glm_moe_dsa",
}

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 32}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 16,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "n_group": 4, "topk_group": 2,
}  # fmt: skip


def file_of(shared: Path, name: str) -> Path:
    return shared / "hf_configs" / f"{name}_config.json"


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_it_counts_the_published_parameters(shared: Path, name: str, count: int) -> None:
    model = ModelSpec.from_hf_config(file_of(shared, name))
    assert model.num_parameters() == count
    assert model.name == name.split("--")[1]


@pytest.mark.parametrize(("name", "model_type"), REFUSED.items())
def test_it_refuses_an_unknown_architecture_by_its_model_type(shared: Path, name: str, model_type: str) -> None:
    path = file_of(shared, name)
    with pytest.raises(ValueError, match=f"^{path}: model_type '{model_type}' is not a known architecture"):
        ModelSpec.from_hf_config(path)


def test_every_file_of_the_folder_is_either_counted_or_refused(shared: Path) -> None:
    names = {path.name.removesuffix("_config.json") for path in (shared / "hf_configs").glob("*.json")}
    assert names == PUBLISHED.keys() | REFUSED.keys()


KNOWN = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"]
# Kimi-K2.5's text part is of DeepSeek-V3's architecture: the test after this one.
FOREIGN = [
    (name, known) for name in REFUSED for known in KNOWN if (name, known) != ("moonshotai--Kimi-K2.5", "deepseek_v3")
]


@pytest.mark.parametrize(("name", "known"), FOREIGN)
def test_it_refuses_a_foreign_config_that_wears_a_known_model_type(shared: Path, name: str, known: str) -> None:
    config = json.loads(file_of(shared, name).read_text())
    with pytest.raises(ValueError, match="not understood|not modelled|required|integer|must be"):
        ModelSpec.from_hf_config(config.get("text_config", config) | {"model_type": known})


def test_a_multimodal_file_is_refused_with_the_remedy_to_give_its_text_config(shared: Path) -> None:
    path = file_of(shared, "moonshotai--Kimi-K2.5")
    with pytest.raises(ValueError, match="give its text_config alone"):
        ModelSpec.from_hf_config(path)
    text = ModelSpec.from_hf_config(json.loads(path.read_text())["text_config"], name="kimi")
    assert text == ModelSpec.from_hf_config(file_of(shared, "moonshotai--Kimi-K2-Instruct"), name="kimi")


def test_deepseek_v3_keeps_its_mtp_module_and_node_limit(shared: Path) -> None:
    model = ModelSpec.from_hf_config(file_of(shared, "deepseek-ai--DeepSeek-V3"))
    assert model.num_mtp_layers == 1
    assert model.moe is not None
    assert model.moe.max_nodes_per_token == 4
    assert round(model.mtp_parameters / 1e9, 2) == 11.61  # published


def test_a_single_group_of_experts_is_no_node_limit(shared: Path) -> None:
    model = ModelSpec.from_hf_config(file_of(shared, "moonshotai--Kimi-K2-Instruct"))
    assert model.moe is not None
    assert model.moe.max_nodes_per_token is None


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, {"num_local_experts": 8}, "num_local_experts is not understood for model_type 'llama'"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window must be one of"),
        (LLAMA, {"layer_types": ["full_attention", "linear_attention"]}, "layer_types must all be 'full_attention'"),
        (LLAMA, {"layer_types": ["full_attention"]}, "layer_types must list num_hidden_layers \\(2\\) layers"),
        (LLAMA, {"add_cross_attention": True}, "add_cross_attention must be one of"),
        (LLAMA, {"pruned_heads": {"0": [1]}}, "pruned_heads must be one of"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size must be an integer, but got '64'"),
        (LLAMA, {"vocab_size": True}, "vocab_size must be an integer, but got True"),
        (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers is required"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        (LLAMA, {"num_attention_heads": 6}, "hidden_size \\(64\\) must be divisible by num_attention_heads \\(6\\)"),
        (LLAMA, {"num_attention_heads": 0}, "must be divisible by num_attention_heads \\(0\\)"),
        (LLAMA, {"num_key_value_heads": 3}, "num_heads \\(4\\) must be divisible by num_kv_heads \\(3\\)"),
        (LLAMA, {"model_type": "mistral"}, "sliding_window is absent, which means 4096"),
        (LLAMA, {"model_type": ["llama"]}, "model_type \\['llama'\\] is not a known architecture"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window must be one of"),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts is required"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window must be one of"),
        (QWEN3, {"head_dim": None}, "head_dim is required"),
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step must be one of"),
        (QWEN3_MOE, {"mlp_only_layers": [1]}, "mlp_only_layers must be the first layers"),
        (QWEN3_MOE, {"num_local_experts": 4}, "num_local_experts must be one of"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias must be one of"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq must be one of"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method must be one of"),
        (DEEPSEEK, {"topk_group": 5}, "topk_group must be from 1 to n_group \\(4\\)"),
        (DEEPSEEK, {"qk_head_dim": 32}, "qk_head_dim must be one of"),
        (DEEPSEEK, {"index_n_heads": 64}, "index_n_heads is not understood"),
    ],
)
def test_a_key_that_changes_the_shape_is_an_error_that_names_it(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    ModelSpec.from_hf_config(config)
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_hf_config(config | change)


def test_an_absent_key_is_not_taken_for_null() -> None:
    without = {key: value for key, value in DEEPSEEK.items() if key != "q_lora_rank"}
    with pytest.raises(ValueError, match="q_lora_rank is required"):
        ModelSpec.from_hf_config(without)


@pytest.mark.parametrize(
    "harmless",
    [
        {"rope_scaling": {"factor": 8.0}}, {"torch_dtype": "bfloat16"}, {"_attn_implementation": "eager"},
        {"quantization_config": {"quant_method": "fp8"}}, {"layer_types": ["full_attention"] * 2}, {"head_dim": 16},
    ],
)  # fmt: skip
def test_keys_that_do_not_change_the_shape_are_ignored(harmless: dict[str, Any]) -> None:
    assert ModelSpec.from_hf_config(LLAMA | harmless) == ModelSpec.from_hf_config(LLAMA)


def test_heads_of_the_first_llama_files_are_multi_head() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert ModelSpec.from_hf_config(config).num_kv_heads == 4


# Counted by transformers 5.24 on the meta device for the configs above with these changes.
@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, 87_872),
        (LLAMA | {"model_type": "mistral", "sliding_window": None}, 86_848),
        (LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True}, 80_704),
        (QWEN3 | {"attention_bias": True}, 112_192),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, 112_064),
        (MIXTRAL, 431_936),
        (DEEPSEEK, 96_608),
        (DEEPSEEK | {"q_lora_rank": 24}, 92_048),
    ],
)
def test_it_counts_variants_as_their_reference_implementation_does(config: dict[str, Any], count: int) -> None:
    model = ModelSpec.from_hf_config(config)
    assert model.num_parameters() - model.num_router_biases() == count


def test_first_dense_layers_come_from_mlp_only_layers() -> None:
    model = ModelSpec.from_hf_config(QWEN3_MOE | {"mlp_only_layers": [0]})
    assert model.layer_specs == (LayerSpec(), LayerSpec(mlp=Mlp.MOE))


def test_a_folder_is_read_through_its_config_json_and_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert ModelSpec.from_hf_config(folder) == ModelSpec.from_hf_config(LLAMA, name="my-llama")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "must be JSON text"), ("[1]", "must hold a JSON object"), ("\xff", "must be JSON text")]
)
def test_a_broken_file_is_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^{path}: it {message}[^\n]*$"):
        ModelSpec.from_hf_config(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none.json: it cannot be read"):
        ModelSpec.from_hf_config(tmp_path / "none.json")
