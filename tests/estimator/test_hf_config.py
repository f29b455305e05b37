"""Claims about reading Hugging Face configs: the published parameter counts come out, or the key at fault is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from estimator.hf_config import ARCHITECTURES, UNMODELLED
from estimator.model import LayerSpec, Mixer, Mlp, ModelSpec
from tests.estimator.hf_families import (
    DEEPSEEK,
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DELTA_NET_MOE,
    FALCON,
    FAMILIES,
    GPT2,
    GPT_OSS,
    LLAMA,
    LLAMA4,
    MIXTRAL,
    NEMOTRON,
    NEOX,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
)

# What `model.num_parameters()` of transformers 5.24 counts on the meta device, of a multimodal file its text part; and
# the router's corrections, which it holds as buffers and the publishers' checkpoints as parameters.
COUNTED = {
    "MiniMaxAI--MiniMax-M2.5": (228_689_748_992, 62 * 256),
    "MiniMaxAI--MiniMax-M2.7": (228_689_748_992, 62 * 256),
    "Qwen--Qwen3-0.6B": (596_049_920, 0),
    "Qwen--Qwen3-1.7B": (1_720_574_976, 0),
    "Qwen--Qwen3-8B": (8_190_735_360, 0),
    "Qwen--Qwen3-30B-A3B": (30_532_122_624, 0),
    "Qwen--Qwen3-235B-A22B": (235_093_634_560, 0),
    "Qwen--Qwen3.5-27B": (26_895_998_464, 0),
    "Qwen--Qwen3.5-35B-A3B": (34_660_610_688, 0),
    "Qwen--Qwen3.5-122B-A10B": (122_111_526_912, 0),
    "deepseek-ai--DeepSeek-V3": (671_026_404_352, 58 * 256),
    "deepseek-ai--DeepSeek-R1": (671_026_404_352, 58 * 256),
    "deepseek-ai--DeepSeek-V3.2": (671_877_929_216, 58 * 256),
    "deepseek-ai--DeepSeek-V4-Flash": (284_332_230_231, 40 * 256),  # its hashed layers choose by the word
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": (400_711_848_960, 0),
    "meta-llama--Meta-Llama-3.1-8B": (8_030_261_248, 0),
    "meta-llama--Meta-Llama-3.1-70B": (70_553_706_496, 0),
    "meta-llama--Meta-Llama-3.1-405B": (405_853_388_800, 0),
    "mistralai--Mixtral-8x7B-v0.1": (46_702_792_704, 0),
    "moonshotai--Kimi-K2-Instruct": (1_026_408_209_408, 60 * 384),  # as deepseek_v3, whose code its files name
    "moonshotai--Kimi-K2.5": (1_026_408_209_408, 60 * 384),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31_577_937_344, 23 * 128),
    "nvidia--Nemotron-H-56B-Base-8K": (56_324_350_464, 0),
    "openai--gpt-oss-20b": (20_914_757_184, 0),
    "openai--gpt-oss-120b": (116_829_156_672, 0),
    "zai-org--GLM-5": (743_911_199_232, 75 * 256),
    "zai-org--GLM-5.1": (743_911_199_232, 75 * 256),
}

# Billions in all and for one token, as published, and where. Digits are cut or rounded.
PUBLISHED = [
    ("MiniMaxAI--MiniMax-M2.5", "229", "10", "size of its files; active: card of M2, alike"),
    ("Qwen--Qwen3-0.6B", "0.6", "", "model card"),
    ("Qwen--Qwen3-1.7B", "1.7", "", "model card"),
    ("Qwen--Qwen3-8B", "8.2", "", "model card"),
    ("Qwen--Qwen3-30B-A3B", "30.5", "3.3", "model card"),
    ("Qwen--Qwen3-235B-A22B", "235", "22", "arXiv:2505.09388"),
    ("Qwen--Qwen3.5-27B", "27", "", "model card"),
    ("Qwen--Qwen3.5-35B-A3B", "35", "3", "model card"),
    ("Qwen--Qwen3.5-122B-A10B", "122", "10", "model card"),
    ("deepseek-ai--DeepSeek-V3", "671", "37", "arXiv:2412.19437"),
    ("deepseek-ai--DeepSeek-R1", "671", "37", "model card"),
    ("deepseek-ai--DeepSeek-V4-Flash", "284", "13", "arXiv:2606.19348"),
    ("meta-llama--Llama-4-Maverick-17B-128E-Instruct", "400", "17", "model card"),
    ("meta-llama--Meta-Llama-3.1-405B", "405", "", "arXiv:2407.21783"),
    ("mistralai--Mixtral-8x7B-v0.1", "46.7", "12.9", "announcement of December 2023"),
    ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "31.6", "3.2", "arXiv:2512.20848"),
    ("nvidia--Nemotron-H-56B-Base-8K", "56", "", "arXiv:2504.03624"),
    ("openai--gpt-oss-20b", "20.91", "3.61", "arXiv:2508.10925, Table 1"),
    ("openai--gpt-oss-120b", "116.83", "5.13", "arXiv:2508.10925, Table 1"),
    ("zai-org--GLM-5", "744", "40", "arXiv:2602.15763"),
]


def file_of(shared: Path, name: str) -> Path:
    return shared / "hf_configs" / f"{name}_config.json"


@pytest.mark.parametrize(("name", "counts"), COUNTED.items())
def test_it_counts_a_file_as_its_reference_implementation_does(
    shared: Path, name: str, counts: tuple[int, int]
) -> None:
    model = ModelSpec.from_hf_config(file_of(shared, name))
    assert (model.num_parameters() - model.num_router_biases(), model.num_router_biases()) == counts
    assert model.name == name.split("--")[1]


def test_every_file_of_the_folder_is_read(shared: Path) -> None:
    assert {path.name.removesuffix("_config.json") for path in (shared / "hf_configs").glob("*.json")} == COUNTED.keys()


def meets(published: str, *billions: float) -> bool:
    """Whether one of the figures is less than a unit of the last published digit away."""
    unit = 10.0 ** -len(published.partition(".")[2])
    return any(abs(figure - float(published)) < unit for figure in billions)


@pytest.mark.parametrize(("name", "total", "active"), [row[:3] for row in PUBLISHED])
def test_a_file_has_the_published_parameters(shared: Path, name: str, total: str, active: str) -> None:
    model = ModelSpec.from_hf_config(file_of(shared, name))
    assert meets(total, model.num_parameters() / 1e9)
    # Publishers count a token's parameters with the input embedding or without it.
    assert not active or meets(active, *(model.num_active_parameters(flag) / 1e9 for flag in (True, False)))


def test_kimi_k2_has_a_trillion_parameters_of_which_a_token_meets_32_billion(shared: Path) -> None:
    """So its model card; the 1.04 T and 32.6 B of arXiv:2507.20534 are not what its own files hold."""
    model = ModelSpec.from_hf_config(file_of(shared, "moonshotai--Kimi-K2-Instruct"))
    assert round(model.num_parameters() / 1e12) == 1
    assert meets("32", *(model.num_active_parameters(flag) / 1e9 for flag in (True, False)))


@pytest.mark.parametrize("name", ["deepseek-ai--DeepSeek-V3", "deepseek-ai--DeepSeek-V3.2"])
def test_deepseeks_files_hold_685_billion_with_mtp_and_its_copies_of_embedding_and_head(
    shared: Path, name: str
) -> None:
    model = ModelSpec.from_hf_config(file_of(shared, name))
    assert meets("685", (model.num_parameters(include_mtp=True) + 2 * model.vocab * model.hidden) / 1e9)


@pytest.mark.parametrize(("config", "count"), FAMILIES.values(), ids=FAMILIES)
def test_it_counts_every_architecture_as_its_reference_implementation_does(config: dict[str, Any], count: int) -> None:
    model = ModelSpec.from_hf_config(config)
    assert model.num_parameters() - model.num_router_biases() == count


def test_every_architecture_has_a_small_config() -> None:
    assert {config["model_type"] for config, _ in FAMILIES.values()} == ARCHITECTURES.keys()


def layers_of(config: dict[str, Any]) -> list[str]:
    return [layer.name for layer in ModelSpec.from_hf_config(config).layer_specs]


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LLAMA | {"model_type": "mistral", "sliding_window": 8}, ["window8+dense"] * 2),
        (LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
         ["dense", "window8+dense"]),
        (QWEN3 | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
         ["window8+dense", "dense"]),
        (QWEN2_MOE | {"mlp_only_layers": [2]}, ["moe", "moe", "dense", "moe"]),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, ["dense", "moe"]),
        (GPT_OSS, ["window8+moe", "moe"]),
        (LLAMA4, ["chunk16+dense", "chunk16+moe", "chunk16+dense", "nope+moe"]),
        (DELTA_NET_MOE | {"model_type": "qwen3_next"}, ["linear+moe"] * 3 + ["moe"]),
        (DELTA_NET_MOE | {"model_type": "qwen3_next", "full_attention_interval": 2}, ["linear+moe", "moe"] * 2),
        (DEEPSEEK_V32, ["indexed+dense", "indexed+moe"]),
        (DEEPSEEK_V4, ["window8+hash-moe", "window8-compression4-indexed+moe", "window8-compression128+moe",
                       "window8-compression4-indexed+moe"]),
        (NEMOTRON, ["mamba", "mlp", "nope", "moe-mlp"]),
    ],
)  # fmt: skip
def test_layers_are_as_the_file_orders_them(config: dict[str, Any], layers: list[str]) -> None:
    assert layers_of(config) == layers


def test_plain_layers_are_not_listed() -> None:
    for config in (LLAMA, QWEN3_MOE, DEEPSEEK, MIXTRAL | {"sliding_window": None}):
        assert ModelSpec.from_hf_config(config).layers is None


def test_the_mtp_layer_of_deepseek_v4_sees_its_window_alone(shared: Path) -> None:
    model = ModelSpec.from_hf_config(file_of(shared, "deepseek-ai--DeepSeek-V4-Flash"))
    assert (model.num_mtp_layers, model.mtp_layer) == (1, LayerSpec(window=128, mlp=Mlp.MOE))


def test_deepseek_v3_keeps_its_mtp_module_and_node_limit(shared: Path) -> None:
    model = ModelSpec.from_hf_config(file_of(shared, "deepseek-ai--DeepSeek-V3"))
    assert model.num_mtp_layers == 1
    assert model.moe is not None
    assert model.moe.max_nodes_per_token == 4
    assert round(model.mtp_parameters / 1e9, 2) == 11.61  # published


def test_minimax_has_three_mtp_modules_unless_they_are_off(shared: Path) -> None:
    config = json.loads(file_of(shared, "MiniMaxAI--MiniMax-M2.7").read_text())
    assert ModelSpec.from_hf_config(config).num_mtp_layers == 3
    assert ModelSpec.from_hf_config(config | {"use_mtp": False}).num_mtp_layers == 0


def test_a_single_group_of_experts_is_no_node_limit(shared: Path) -> None:
    model = ModelSpec.from_hf_config(file_of(shared, "moonshotai--Kimi-K2-Instruct"))
    assert model.moe is not None
    assert model.moe.max_nodes_per_token is None


def test_of_a_multimodal_file_the_text_part_is_read_and_a_note_says_so(shared: Path) -> None:
    model = ModelSpec.from_hf_config(file_of(shared, "moonshotai--Kimi-K2.5"), name="kimi")
    assert model == ModelSpec.from_hf_config(file_of(shared, "moonshotai--Kimi-K2-Instruct"), name="kimi")
    assert model.notes == ("the text part alone of 'kimi_k25', without what sees or hears",)


def test_a_multimodal_file_ties_its_text_part() -> None:
    outer = {"model_type": "some_vision_model", "text_config": QWEN3, "vision_config": {}, "tie_word_embeddings": True}
    assert ModelSpec.from_hf_config(outer).tied_embeddings
    with pytest.raises(ValueError, match="num_adapters is not understood for model_type 'some_vision_model'"):
        ModelSpec.from_hf_config(outer | {"num_adapters": 2})


def test_hybrids_have_few_layers_of_attention(shared: Path) -> None:
    nemotron = ModelSpec.from_hf_config(file_of(shared, "nvidia--Nemotron-H-56B-Base-8K"))
    mixers = [layer.mixer for layer in nemotron.layer_specs]
    # arXiv:2504.03624, section 2.1: 54 Mamba-2 layers, 54 MLPs and 10 of attention
    assert [mixers.count(mixer) for mixer in (Mixer.MAMBA, Mixer.NONE, Mixer.ATTENTION)] == [54, 54, 10]


KNOWN = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h"]
FOREIGN = {  # by their own architecture
    "Qwen--Qwen3.5-27B": "qwen3_5_text",
    "deepseek-ai--DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai--DeepSeek-V4-Flash": "deepseek_v4",
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": "llama4_text",
    "MiniMaxAI--MiniMax-M2.5": "minimax_m2",
    "openai--gpt-oss-20b": "gpt_oss",
    "nvidia--Nemotron-H-56B-Base-8K": "nemotron_h",
    "zai-org--GLM-5": "glm_moe_dsa",
}


@pytest.mark.parametrize(
    ("name", "known"), [(name, known) for name, own in FOREIGN.items() for known in KNOWN if known != own]
)
def test_it_refuses_a_foreign_config_that_wears_a_known_model_type(shared: Path, name: str, known: str) -> None:
    config = json.loads(file_of(shared, name).read_text())
    config = config.get("text_config", config)
    with pytest.raises(ValueError, match="not understood|not modelled|required|integer|must|absent"):
        ModelSpec.from_hf_config(config | {"model_type": known})


@pytest.mark.parametrize(("model_type", "reason"), UNMODELLED.items())
def test_what_cannot_be_expressed_is_refused_by_name_with_the_reason(model_type: str, reason: str) -> None:
    for config in (LLAMA | {"model_type": model_type}, {"text_config": {"model_type": model_type}}):
        with pytest.raises(ValueError, match=f"^model_type '{model_type}' is not modelled: {reason}"):
            ModelSpec.from_hf_config(config)


def test_a_config_without_a_model_type_is_told_so() -> None:
    for config in ({}, {key: value for key, value in LLAMA.items() if key != "model_type"}):
        with pytest.raises(
            ValueError, match="^model_type is absent, which names the architecture; give one of .*'llama'"
        ):
            ModelSpec.from_hf_config(config)


@pytest.mark.parametrize("model_type", ["bert", ["llama"], 7, {}])
def test_it_refuses_an_unknown_architecture_by_its_model_type(model_type: object) -> None:
    with pytest.raises(ValueError, match="^model_type .* is not a known architecture; have .*'llama'"):
        ModelSpec.from_hf_config(LLAMA | {"model_type": model_type})


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (LLAMA, {"num_local_experts": 8}, "num_local_experts is not understood for model_type 'llama'"),
        (LLAMA, {"sliding_window": 4096}, "sliding_window must be one of"),
        (LLAMA, {"layer_types": ["full_attention", "linear_attention"]}, "layer_types must be of .*'full_attention'"),
        (LLAMA, {"layer_types": ["full_attention"]}, "layer_types must list num_hidden_layers \\(2\\) layers"),
        (LLAMA, {"add_cross_attention": True}, "add_cross_attention must be one of"),
        (LLAMA, {"pruned_heads": {"0": [1]}}, "pruned_heads must be one of"),
        (LLAMA, {"hidden_size": "64"}, "hidden_size must be an integer, but got '64'"),
        (LLAMA, {"vocab_size": True}, "vocab_size must be an integer, but got True"),
        (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers is required"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers must be from 1 to 100000"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        (LLAMA, {"num_attention_heads": 6}, "hidden_size \\(64\\) must be divisible by num_attention_heads \\(6\\)"),
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads must be from 1 to 1000000000, but got 0"),
        (LLAMA, {"num_key_value_heads": 3}, "num_heads \\(4\\) must be divisible by num_kv_heads \\(3\\)"),
        (LLAMA, {"model_type": "mistral"}, "sliding_window is absent, which means 4096"),
        (MIXTRAL, {"sliding_window": 0}, "sliding_window must be from 1"),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts is required"),
        (QWEN3, {"use_sliding_window": True}, "max_window_layers is required"),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": 0}, "sliding_window is required"),
        (QWEN3, {"head_dim": None}, "head_dim is required"),
        (QWEN2_MOE, {"use_sliding_window": True}, "use_sliding_window must be one of"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step must be from 1"),
        (QWEN3_MOE, {"mlp_only_layers": [2]}, "mlp_only_layers must list layers from 0 to 1"),
        (QWEN3_MOE, {"num_local_experts": 4}, "num_local_experts must be one of"),
        (GPT_OSS, {"layer_types": None}, "layer_types is required"),
        (GPT_OSS, {"experts_per_token": 4}, "experts_per_token must be one of"),
        (LLAMA4, {"no_rope_layers": [1, 1]}, "no_rope_layers must list"),
        (LLAMA4, {"moe_layers": [4]}, "moe_layers must list layers from 0 to 3"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias must be one of"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq must be one of"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method must be one of"),
        (DEEPSEEK, {"topk_group": 5}, "topk_group must be from 1 to n_group \\(4\\)"),
        (DEEPSEEK, {"qk_head_dim": 32}, "qk_head_dim must be one of"),
        (DEEPSEEK, {"index_n_heads": 64}, "index_n_heads is not understood"),
        (DEEPSEEK_V32, {"indexer_types": ["full", "shared"]}, "indexer_types must be of"),
        (DEEPSEEK_V32, {"q_lora_rank": None}, "indexer needs mla with a q_lora_rank"),
        (DEEPSEEK_V4, {"compress_ratios": [0, 4, 128, 4]}, "compress_ratios must list"),
        (DEEPSEEK_V4, {"compress_ratios": [0, 8, 128, 4, 0]}, "compress_ratios must be of"),
        (DEEPSEEK_V4, {"compress_ratios": None}, "compress_ratios is required"),
        (DEEPSEEK_V4, {"num_key_value_heads": 2}, "num_key_value_heads must be one of"),
        (NEMOTRON, {"hybrid_override_pattern": "M-*"}, "hybrid_override_pattern must have a letter"),
        (NEMOTRON, {"hybrid_override_pattern": "M-*A"}, "hybrid_override_pattern must have a letter"),
        (NEMOTRON, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers must be one of"),
        (GPT2, {"n_head": 5}, "n_embd \\(64\\) must be divisible by n_head \\(5\\)"),
        (NEOX, {"use_parallel_residual": True}, "use_parallel_residual must be one of"),
        (FALCON, {"new_decoder_architecture": True}, "new_decoder_architecture must be one of"),
    ],
)
def test_a_key_that_changes_the_shape_is_an_error_that_names_it(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    ModelSpec.from_hf_config(config)
    with pytest.raises(ValueError, match=message):
        ModelSpec.from_hf_config(config | change)


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


GARBAGE = [
    None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**30, "", "a\nb", [], [None], [-1], {}, {"a\nb": [1]},
    nested(200), ["full_attention"] * 2, "x" * 10**5,
]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_garbage_under_any_key_is_read_or_refused_in_one_short_line(name: str) -> None:
    config, _ = FAMILIES[name]
    for key in (*config, "no such\nkey", "layer_types", "sliding_window", "text_config"):
        changes: list[dict[str, Any]] = [config | {key: value} for value in GARBAGE]
        for changed in (*changes, {k: v for k, v in config.items() if k != key}):
            told = refusal(changed)
            assert "\n" not in told
            assert len(told) < 1000


def refusal(config: dict[str, Any]) -> str:
    try:
        ModelSpec.from_hf_config(config)
    except ValueError as error:
        return str(error)
    return ""


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


def test_a_folder_is_read_through_its_config_json_and_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert ModelSpec.from_hf_config(folder) == ModelSpec.from_hf_config(LLAMA, name="my-llama")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON text"),
        ("[1]", "must hold a JSON object, but got a list"),
        ("null", "must hold a JSON object, but got null"),
        ("\xff", "must be JSON text"),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^{path}: it {message}[^\n]*$"):
        ModelSpec.from_hf_config(path)


def test_a_size_is_refused_by_the_name_that_the_file_gives_it() -> None:
    for key in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"):
        with pytest.raises(ValueError, match=f"^{key} must be from 1 to 1000000000, but got -8; give the model's own"):
            ModelSpec.from_hf_config(LLAMA | {key: -8})


def test_a_folder_without_a_config_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{tmp_path}: a folder of a model holds a config.json, but this has none"):
        ModelSpec.from_hf_config(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none.json: it cannot be read"):
        ModelSpec.from_hf_config(tmp_path / "none.json")
