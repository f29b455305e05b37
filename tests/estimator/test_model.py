"""Claims about model specs: their laws, their counts, and reading them from files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from estimator.model import LayerSpec, MLASpec, Mlp, ModelSpec, MoESpec, Norm, QKNorm
from estimator.model_io import load_model, model_from_mapping, model_names
from spaces import MODELS

TINY = ModelSpec(name="tiny", num_layers=3, hidden=8, ffn=32, num_heads=4, num_kv_heads=2, head_dim=2, vocab=10)
MOE = MoESpec(num_experts=4, top_k=2, ffn=16)
MOE_LAYER = LayerSpec(mlp=Mlp.MOE)
MLA = MLASpec(q_lora_rank=6, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)

# name: parameters without MTP, as transformers 5.24 counts them on the meta device (with the router's corrections)
LIBRARY = {
    "gpt3_175b": 174_604_259_328,  # by the equation in test_gpt3_is_counted_as_narayanan_does
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mixtral_8x7b": 46_702_792_704,
    "deepseek_v3": 671_026_419_200,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_32b": 32_762_123_264,
    "qwen3_235b_a22b": 235_093_634_560,
    "mixtral_8x22b": 140_620_634_112,
    "kimi_k2": 1_026_408_232_448,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "glm_5": 743_911_218_432,
    "deepseek_v3_2": 671_877_944_064,
    "deepseek_v4_flash": 284_332_240_471,
    "deepseek_v4_pro": 1_572_997_201_763,
    "nemotron_h_56b": 56_324_350_464,
    "nemotron_3_nano": 31_577_940_288,
    "llama4_maverick": 400_711_848_960,
    "llama4_scout": 107_769_861_120,
}


def library(name: str) -> ModelSpec:
    return load_model(name, [MODELS])


@pytest.mark.parametrize(("name", "count"), LIBRARY.items())
def test_a_library_model_has_the_published_parameters(name: str, count: int) -> None:
    assert library(name).num_parameters() == count


def test_the_library_holds_these_models_under_their_own_names_and_with_a_source() -> None:
    assert model_names([MODELS]) == sorted(LIBRARY)
    for name in LIBRARY:
        assert library(name).name == name
        assert yaml.safe_load((MODELS / f"{name}.yaml").read_text())["source"]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama3_8b", "meta-llama--Meta-Llama-3.1-8B"),
        ("llama3_70b", "meta-llama--Meta-Llama-3.1-70B"),
        ("llama3_405b", "meta-llama--Meta-Llama-3.1-405B"),
        ("mixtral_8x7b", "mistralai--Mixtral-8x7B-v0.1"),
        ("deepseek_v3", "deepseek-ai--DeepSeek-V3"),
        ("qwen3_235b_a22b", "Qwen--Qwen3-235B-A22B"),
        ("qwen3_30b_a3b", "Qwen--Qwen3-30B-A3B"),
        ("kimi_k2", "moonshotai--Kimi-K2-Instruct"),
        ("gpt_oss_20b", "openai--gpt-oss-20b"),
        ("gpt_oss_120b", "openai--gpt-oss-120b"),
        ("glm_5", "zai-org--GLM-5"),
        ("deepseek_v3_2", "deepseek-ai--DeepSeek-V3.2"),
        ("deepseek_v4_flash", "deepseek-ai--DeepSeek-V4-Flash"),
        ("nemotron_h_56b", "nvidia--Nemotron-H-56B-Base-8K"),
        ("nemotron_3_nano", "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        ("llama4_maverick", "meta-llama--Llama-4-Maverick-17B-128E-Instruct"),
    ],
)
def test_a_library_model_equals_its_publishers_config(shared: Path, name: str, config: str) -> None:
    assert library(name) == ModelSpec.from_hf_config(shared / "hf_configs" / f"{config}_config.json", name=name)


def test_gpt3_is_counted_as_narayanan_does() -> None:
    # Narayanan 2021, arXiv:2104.04473, Eq. 2: 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)); without the final norm.
    gpt3 = library("gpt3_175b")
    layers, h, v, s = gpt3.num_layers, gpt3.hidden, gpt3.vocab, gpt3.max_positions
    assert gpt3.num_parameters() == 12 * layers * h * h + 13 * layers * h + (v + s) * h + 2 * h


@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    # Published: "37B activated" (arXiv:2412.19437), "13B active" (arXiv:2401.04088), A22B (arXiv:2505.09388), 49B
    # (arXiv:2606.19348), and 39B and 17B in the announcements of Mixtral 8x22B and Llama 4.
    [
        ("deepseek_v3", 37, 0),
        ("mixtral_8x7b", 13, 0),
        ("qwen3_235b_a22b", 22, 0),
        ("deepseek_v4_pro", 49, 0),
        ("mixtral_8x22b", 39, 0),
        ("llama4_scout", 17, 0),
    ],
)
def test_a_library_model_has_the_published_active_parameters(name: str, billions: float, digits: int) -> None:
    # Publishers name neither convention and cut the digits differently: one of the two rounds to the figure.
    model = library(name)
    figures = {round(model.num_active_parameters(flag) / 1e9, digits) for flag in (True, False)}
    assert billions in figures


def test_deepseek_mtp_adds_two_norms_a_projection_a_layer_and_a_last_norm() -> None:
    model = library("deepseek_v3")
    h = model.hidden
    assert model.mtp_parameters == 2 * h + 2 * h * h + model.layer_parameters(MOE_LAYER) + h
    assert model.num_parameters(include_mtp=True) - model.num_parameters() == model.mtp_parameters == 11_610_068_224


def test_router_biases_are_counted_and_told_apart() -> None:
    model = library("deepseek_v3")
    assert model.moe is not None
    without = replace(model, moe=replace(model.moe, router_correction_bias=False))
    assert model.num_router_biases() == model.num_parameters() - without.num_parameters() == 58 * 256
    assert model.num_router_biases(include_mtp=True) == 59 * 256
    assert without.num_router_biases() == library("llama3_8b").num_router_biases() == 0


def test_layers_are_dense_first_and_moe_after() -> None:
    model = replace(TINY, moe=replace(MOE, num_dense_layers=1))
    assert model.layer_specs == (LayerSpec(), MOE_LAYER, MOE_LAYER)
    assert TINY.layer_specs == (LayerSpec(),) * 3
    assert replace(TINY, moe=replace(MOE, num_dense_layers=3)).layer_specs == (LayerSpec(),) * 3


@pytest.mark.parametrize(
    ("change", "added"),
    [
        ({"gated_mlp": False}, -3 * 8 * 32),
        ({"tied_embeddings": True}, -80),
        ({"norm": Norm.LAYER}, 7 * 8),
        ({"qk_norm": QKNorm.HEAD}, 3 * 2 * 2),
        ({"attention_bias": True}, 3 * (4 + 2 + 2) * 2),
        ({"attention_output_bias": True}, 3 * 8),
        ({"mlp_bias": True}, 3 * (2 * 32 + 8)),
        ({"mlp_bias": True, "gated_mlp": False}, 3 * (32 + 8 - 8 * 32)),
        ({"max_positions": 7}, 7 * 8),
        ({"num_mtp_layers": 2}, 0),
        ({"moe": MOE}, 3 * (4 * 3 * 8 * 16 + 4 * 8 - 3 * 8 * 32)),
        ({"moe": replace(MOE, num_shared_experts=2, shared_ffn=20)}, 3 * (4 * 384 + 3 * 8 * 20 + 32 - 768)),
        ({"moe": replace(MOE, router_correction_bias=True)}, 3 * (4 * 384 + 36 - 768)),
        # q: 8*6 + 6 + 6*4*6; kv: 8*(5+2) + 5 + 5*4*(4+3); out: 4*3*8; before: 8*16 + 8*8
        ({"mla": MLA, "num_kv_heads": 4}, 3 * (48 + 6 + 144 + 56 + 5 + 140 + 96 - 192)),
        ({"mla": replace(MLA, q_lora_rank=0), "num_kv_heads": 4}, 3 * (192 + 56 + 5 + 140 + 96 - 192)),
    ],
)
def test_each_feature_adds_its_own_parameters(change: dict[str, Any], added: int) -> None:
    assert replace(TINY, **change).num_parameters() - TINY.num_parameters() == added


def test_head_widths_follow_mla() -> None:
    assert (TINY.qk_head_dim, TINY.v_head_dim) == (2, 2)
    with_mla = replace(TINY, mla=MLA, num_kv_heads=4)
    assert (with_mla.qk_head_dim, with_mla.v_head_dim) == (6, 3)


def test_active_parameters_leave_out_idle_experts() -> None:
    model = replace(TINY, moe=replace(MOE, num_dense_layers=1))
    assert model.num_parameters() - model.num_active_parameters() == 2 * (4 - 2) * 3 * 8 * 16
    assert TINY.num_active_parameters() == TINY.num_parameters()


def test_without_input_embedding_only_what_is_looked_up_goes() -> None:
    def lookups(model: ModelSpec) -> int:
        return model.num_active_parameters() - model.num_active_parameters(include_input_embedding=False)

    assert lookups(TINY) == 80
    assert lookups(replace(TINY, max_positions=7)) == 80 + 56
    assert lookups(replace(TINY, tied_embeddings=True)) == 0


def test_all_experts_active_is_all_parameters() -> None:
    model = replace(TINY, moe=replace(MOE, top_k=4))
    assert model.num_active_parameters() == model.num_parameters()
    assert model.active_layer_parameters(MOE_LAYER) == model.layer_parameters(MOE_LAYER)


def test_parameters_are_the_sum_over_layers_and_ends() -> None:
    model = library("deepseek_v3")
    layers = sum(model.layer_parameters(layer) for layer in model.layer_specs)
    assert model.num_parameters() == layers + 2 * model.vocab * model.hidden + model.hidden


def test_a_dense_model_has_no_moe_layer() -> None:
    with pytest.raises(ValueError, match="tiny has no moe layers"):
        TINY.layer_parameters(MOE_LAYER)


def test_the_vocabulary_is_padded_to_a_multiple_for_one_degree_or_many() -> None:
    gpt3 = library("gpt3_175b")
    assert [gpt3.padded_vocab(tp) for tp in (1, 2, 8)] == [50304, 50432, 51200]
    assert np.array_equal(gpt3.padded_vocab(np.array([1.0, 2.0, 8.0])), [50304.0, 50432.0, 51200.0])
    assert replace(gpt3, vocab_multiple=1).padded_vocab(1) == 50257


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: replace(TINY, hidden=0), "hidden must be at least 1, but got 0"),
        (lambda: replace(TINY, num_layers=-1), "num_layers must be at least 1"),
        (lambda: replace(TINY, vocab_multiple=0), "vocab_multiple must be at least 1"),
        (lambda: replace(TINY, num_mtp_layers=-1), "num_mtp_layers must be at least 0"),
        (lambda: replace(TINY, max_positions=-1), "max_positions must be at least 0"),
        (lambda: replace(TINY, name=""), "name must not be empty"),
        (lambda: replace(TINY, num_kv_heads=3), r"num_heads \(4\) must be divisible by num_kv_heads \(3\); try .*2, 4"),
        (lambda: replace(TINY, mla=MLA), r"num_kv_heads \(2\) must equal num_heads \(4\) with mla"),
        (lambda: replace(TINY, mla=MLA, num_kv_heads=4, qk_norm=QKNorm.HEAD), "qk_norm must be none with mla"),
        (lambda: replace(TINY, mla=MLA, num_kv_heads=4, attention_bias=True), "attention_bias must be false with mla"),
        (lambda: replace(TINY, moe=replace(MOE, num_dense_layers=4)), r"num_dense_layers \(4\) must be at most"),
        (lambda: replace(MOE, top_k=5), r"top_k \(5\) must be at most num_experts \(4\)"),
        (lambda: replace(MOE, top_k=0), "top_k must be at least 1"),
        (lambda: replace(MOE, num_shared_experts=1), r"shared_ffn \(0\) must both be positive or both be 0"),
        (lambda: replace(MOE, shared_ffn=8), r"num_shared_experts \(0\) and shared_ffn \(8\)"),
        (lambda: replace(MOE, capacity_factor=0.0), "capacity_factor must be a finite number above 0"),
        (lambda: replace(MOE, capacity_factor=float("nan")), "capacity_factor must be a finite number above 0"),
        (lambda: replace(MOE, capacity_factor=float("inf")), "capacity_factor must be a finite number above 0"),
        (lambda: replace(MOE, max_nodes_per_token=0), "max_nodes_per_token must be at least 1"),
        (lambda: replace(MLA, kv_lora_rank=0), "kv_lora_rank must be at least 1"),
        (lambda: replace(MLA, q_lora_rank=-1), "q_lora_rank must be at least 0"),
    ],
)
def test_an_impossible_shape_is_refused_with_the_law(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


FIELDS: dict[str, Any] = {
    "name": "tiny", "num_layers": 3, "hidden": 8, "ffn": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2,
    "vocab": 10,
}  # fmt: skip


def test_a_mapping_gives_the_spec_with_nested_parts_and_ignores_its_source() -> None:
    moe = {"num_experts": 4, "top_k": 2, "ffn": 16, "capacity_factor": 1}
    mapping = FIELDS | {"source": "a paper", "norm": "layer", "moe": moe, "mla": None}
    assert model_from_mapping(mapping) == replace(TINY, norm=Norm.LAYER, moe=replace(MOE, capacity_factor=1.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layer": 3}, "num_layer is not a key of a model; did you mean 'num_layers'?"),
        ({"zzz": 3}, "zzz is not a key of a model; have \\["),
        ({1: 3}, "1 is not a key of a model"),
        ({"moe": {"num_experts": 4, "topk": 2, "ffn": 16}}, "moe.topk is not a key of a model; did you mean 'top_k'?"),
        ({"moe": {"num_experts": 4}}, "moe.top_k is required, but is absent"),
        ({"moe": {"num_experts": 4, "top_k": 5, "ffn": 16}}, "moe.top_k \\(5\\) must be at most"),
        ({"moe": 8}, "moe must hold fields of its own, but got 8; fields: \\['num_experts'"),
        ({"mla": {"q_lora_rank": 1.0}}, "mla.kv_lora_rank is required"),
        ({"hidden": True}, "hidden must be an integer, but got True"),
        ({"hidden": 8.0}, "hidden must be an integer, but got 8.0"),
        ({"hidden": "8"}, "hidden must be an integer, but got '8'"),
        ({"hidden": None}, "hidden must be an integer, but got None"),
        ({"gated_mlp": 1}, "gated_mlp must be true or false, but got 1"),
        ({"name": 7}, "name must be text, but got 7"),
        ({"norm": "batch"}, "norm must be one of \\['rms', 'layer'\\], but got 'batch'"),
        ({"moe": {"num_experts": 4, "top_k": 2, "ffn": 16, "capacity_factor": "x"}}, "moe.capacity_factor must be a n"),
        ({"moe": {"num_experts": 4, "top_k": 2, "ffn": 16, "capacity_factor": True}}, "moe.capacity_factor must be a"),
    ],
)
def test_a_wrong_key_or_type_is_named(change: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_from_mapping(FIELDS | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="^vocab is required, but is absent"):
        model_from_mapping({key: value for key, value in FIELDS.items() if key != "vocab"})


def test_a_path_is_read_as_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(FIELDS))
    assert load_model(tmp_path / "own.yaml") == TINY
    hf = (
        '{"model_type": "llama", "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 3, '
        '"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 10}'
    )
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(hf)
    assert load_model(str(folder)) == load_model(folder / "config.json") == TINY


def test_a_name_goes_before_a_path_and_an_earlier_folder_before_a_later(tmp_path: Path) -> None:
    for folder, layers in (("a", 5), ("b", 6)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tiny.yaml").write_text(yaml.safe_dump(FIELDS | {"num_layers": layers}))
    assert load_model("tiny", [tmp_path / "a", tmp_path / "b"]).num_layers == 5
    assert load_model(tmp_path / "b" / "tiny.yaml", [tmp_path / "a"]).num_layers == 6


@pytest.mark.parametrize("reference", ["lama3_8b", "../models/llama3_8b", "x" * 5000, "a\0b"])
def test_an_unknown_reference_is_refused_with_what_there_is(reference: str) -> None:
    with pytest.raises(ValueError, match="is neither a known name nor a file; (did you mean 'llama3_8b'|have)"):
        load_model(reference, [MODELS])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "must be YAML or JSON text"),
        (b"\xff\xfe\xfa", "must be YAML or JSON text"),
        (b"- 1", "must hold the fields of a model, but got a list"),
        (b"", "must hold the fields of a model, but got nothing: the file is empty"),
        (b"nam: x", "nam is not a key of a model; did you mean 'name'?"),
        (b"!!python/object/apply:os.getcwd []", "must be YAML or JSON text"),
        (b"model_type: gpt_oss", "must be JSON text"),
        (b'{"model_type": "bert"}', "model_type 'bert' is not a known architecture"),
    ],
)
def test_a_broken_file_is_one_line_that_names_it(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: (it )?{message}[^\n]*$"):
        load_model(path)
