"""The row mapping: what the cells of a measured row become."""

from __future__ import annotations

import pytest

from estimator.model import Norm
from estimator.strategy import Fusion, Module, Optimizer, Recompute, RecomputeKind, Schedule
from hardware.units import GIB
from search.assumptions import generation
from search.configuration import Configuration, configuration
from search.measured import Row, measured_of
from tests.search.measured_rows import MLA, MOE, cells


def _of(**changes: str) -> Configuration:
    return configuration(_row(**changes))


def _row(**changes: str) -> Row:
    return Row(place="t.csv line 2", cells=cells(**changes))


def test_a_plain_row_maps_field_by_field() -> None:
    config = _of()
    strategy, model = config.strategy, config.model
    assert (model.num_layers, model.hidden, model.ffn, model.num_heads, model.num_kv_heads, model.head_dim) == (
        32, 4096, 14336, 32, 8, 128,
    )  # fmt: skip
    assert (model.vocab, model.vocab_multiple, model.gated_mlp, model.tied_embeddings) == (128256, 1, True, False)
    assert (model.moe, model.mla, model.norm) == (None, None, Norm.RMS)
    assert (strategy.tp, strategy.cp, strategy.pp, strategy.vpp, strategy.micro_batch) == (4, 1, 2, 1, 1)
    assert (strategy.zero_stage, strategy.sequence_parallel, strategy.precision) == (1, True, "bf16")
    assert (config.workload.seq, config.workload.global_batch) == (8192, 128)
    assert config.system.num_chips == 64


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"schedule": "none", "pp": "1", "dp": "16"}, "schedule", Schedule.ONE_F_ONE_B),
        ({"schedule": "", "pp": "1", "dp": "16"}, "schedule", Schedule.ONE_F_ONE_B),
        ({"schedule": "zb-h1"}, "schedule", Schedule.ZB_H1),
        ({"schedule": "interleaved", "vpp": "4"}, "schedule", Schedule.INTERLEAVED),
        ({"schedule": "interleaved", "vpp": "4"}, "vpp", 4),
        ({"schedule": "interleaved", "vpp": "1"}, "schedule", Schedule.ONE_F_ONE_B),
        ({"schedule": "", "vpp": "4"}, "schedule", Schedule.INTERLEAVED),
        ({"recompute": "full"}, "recompute", Recompute(kind=RecomputeKind.FULL)),
        ({"recompute": "full", "recompute_layers": "0"}, "recompute", Recompute()),
        ({"recompute": "none", "recompute_modules": "unset"}, "recompute", Recompute()),
        ({"recompute": "selective"}, "recompute", Recompute.parse(["core_attn"])),
        ({"recompute": "selective", "recompute_modules": "unset"}, "recompute", Recompute.parse(["core_attn"])),
        (
            {"recompute": "selective", "recompute_modules": "moe;layernorm, core_attn"},
            "recompute",
            Recompute(
                kind=RecomputeKind.SELECTIVE, modules=frozenset({Module.MOE, Module.LAYERNORM, Module.CORE_ATTENTION})
            ),
        ),
        ({"recompute": "block-3"}, "recompute", Recompute(kind=RecomputeKind.BLOCK)),
        ({"recompute": "block-3"}, "recompute_layers", 3),
        ({"recompute": "block", "recompute_layers": "5"}, "recompute_layers", 5),
        ({"recompute": "block-0"}, "recompute", Recompute()),
        ({"precision": "fp8"}, "precision", "fp8"),
        ({"precision": "", "gpu": "v100-32g", "intra_node": "nvlink2-300"}, "precision", "fp16"),
        ({"zero_stage": ""}, "zero_stage", 0),
        ({"zero_stage": "3"}, "zero_stage", 3),
        ({"tp": "1", "dp": "32"}, "sequence_parallel", False),
        ({"layers": "30", "schedule": "interleaved", "vpp": "4"}, "layout", (3, 4, 4, 4, 4, 4, 4, 3)),
        ({"layers": "6", "schedule": "interleaved", "vpp": "4"}, "layout", (0, 1, 1, 1, 1, 1, 1, 0)),
        ({"sp": "", "tp_comm_overlap": "1"}, "sequence_parallel", True),
        ({"sp": "", "tp_comm_overlap": "0"}, "sequence_parallel", False),
        ({"layers": "13", "mtp_layers": "1", "schedule": "interleaved", "vpp": "2"}, "layout", (4, 4, 4, 1)),
        ({"layers": "12", "mtp_layers": "1", "schedule": "interleaved", "vpp": "2"}, "layout", None),
        ({"optimizer": "adamw"}, "optimizer", Optimizer.ADAM),
        ({"dp_overlap": "1"}, "bucket_bytes", 160e6),
        ({"dp_overlap": "1", "zero_stage": "3"}, "bucket_bytes", 0),
        ({"dp_overlap": "1", "dp": "128", "n_gpus": "1024"}, "bucket_bytes", 512e6),
        ({"layers": "4", "pp_layout": "Et*3|tL"}, "layout", (3, 1)),
        ({"pp_layout": ""}, "layout", None),
        (MOE | {"etp": ""}, "etp", 1),
        (MOE, "ep", 8),
        ({"ep": "", "etp": ""}, "ep", 1),
    ],
)
def test_cells_become_strategy_fields(changes: dict[str, str], field: str, expected: object) -> None:
    assert getattr(_of(**changes).strategy, field) == expected


@pytest.mark.parametrize(
    ("changes", "flag", "expected"),
    [
        ({"tp_comm_overlap": "1"}, "tp", 1),
        ({"tp_comm_overlap": "1", "tp": "1", "dp": "32"}, "tp", 0),
        ({"dp_overlap": "1"}, "dp", 1),
        ({"dp_overlap": "", "framework": "nemo/megatron-core"}, "dp", 1),
        ({"dp_overlap": ""}, "dp", 0),
        (MOE | {"ep_overlap": "1"}, "ep", 1),
        ({"schedule": "interleaved", "vpp": "2"}, "pp", 1),
        ({}, "pp", 0),
    ],
)
def test_overlap_flags_follow_the_columns_where_there_is_traffic(
    changes: dict[str, str], flag: str, expected: int
) -> None:
    assert getattr(_of(**changes).strategy.overlap, flag) == expected


def test_fusion_follows_the_attention_columns_and_the_framework() -> None:
    assert Fusion.FLASH_ATTENTION in _of(flash_attention="1").strategy.fusion
    assert Fusion.FLASH_ATTENTION not in _of(flash_attention="0").strategy.fusion
    assert Fusion.FLASH_ATTENTION not in _of(flash_attention="").strategy.fusion  # Megatron-LM has to be asked for it.
    assert Fusion.FLASH_ATTENTION in _of(flash_attention="", framework="nemo").strategy.fusion
    assert Fusion.FLASH_ATTENTION in _of(flash_attention="", framework="").strategy.fusion
    assert Fusion.FLASH_ATTENTION in _of(flash_attention="", attention_kernel="flash").strategy.fusion
    assert Fusion.FLASH_ATTENTION not in _of(flash_attention="", attention_kernel="unfused").strategy.fusion
    assert Fusion.FUSED_LOSS in _of(framework="megatron-bridge").strategy.fusion
    assert Fusion.FUSED_LOSS not in _of(framework="").strategy.fusion
    assert generation("unheard of") == generation("")


def test_moe_and_mla_columns_become_their_specs() -> None:
    model = _of(**MOE, **MLA, shared_experts="2", first_dense_layers="3", mtp_layers="1").model
    assert model.moe is not None
    assert model.mla is not None
    assert (model.moe.num_experts, model.moe.top_k, model.moe.ffn) == (8, 2, 14336)
    assert (model.moe.num_shared_experts, model.moe.shared_ffn, model.moe.num_dense_layers) == (2, 2 * 14336, 3)
    assert model.moe.capacity_factor is None
    assert (model.mla.q_lora_rank, model.mla.kv_lora_rank, model.mla.v_head_dim) == (1536, 512, 128)
    assert (model.head_dim, model.num_mtp_layers) == (192, 1)


def test_windows_lie_in_every_other_layer_of_a_mixture_and_in_all_of_a_dense_model() -> None:
    mixture = _of(**MOE | {"attention": "window", "first_dense_layers": "1"}).model
    assert [layer.name for layer in mixture.layer_specs[:4]] == ["window128+dense", "moe", "window128+moe", "moe"]
    assert len(mixture.layer_specs) == 32
    assert {layer.name for layer in _of(attention="window").model.layer_specs} == {"window4096+dense"}


def test_dropped_tokens_mean_a_capacity_of_one() -> None:
    moe = _of(**MOE | {"moe_routing": "token-drop"}).model.moe
    assert moe is not None
    assert moe.capacity_factor == 1.0


def test_a_vocabulary_that_is_not_given_is_padded_as_megatron_pads() -> None:
    model = _of(arch="gpt", vocab="").model
    assert (model.vocab, model.vocab_multiple, model.norm) == (50257, 128, Norm.LAYER)


def test_gpt_has_biases_and_llama_has_none() -> None:
    for arch, expected in (("gpt", True), ("llama", False)):
        model = _of(arch=arch).model
        assert {model.attention_bias, model.attention_output_bias, model.mlp_bias} == {expected}


def test_a_node_of_gb200_has_four_chips_and_others_eight() -> None:
    assert _of(gpus_per_node="").system.chips_per_node == 8
    blackwell = {"gpu": "gb200", "gpus_per_node": "", "intra_node": "nvlink5-1800-nvl72", "inter_node": ""}
    assert _of(**blackwell).system.chips_per_node == 4


@pytest.mark.parametrize(
    ("changes", "listed"),
    [
        ({"zero_stage": ""}, "zero_stage=0"),
        ({"dp": ""}, "dp=8"),
        ({"head_dim": ""}, "head_dim=128"),
        ({"tied_embeddings": ""}, "tied_embeddings=0"),
        ({"layers": "30", "schedule": "interleaved", "vpp": "4"}, "pp_layout=3 ... 3"),
        ({"layers": "13", "mtp_layers": "1", "schedule": "interleaved", "vpp": "2"}, "pp_layout=4 ... 1"),
        ({"dp_overlap": "1"}, "bucket_bytes=160000000"),
        ({"cp": "2", "dp": "4"}, "context_parallel=ring"),
        ({"cuda_graph": "local"}, "cuda_graph=layer: local captures layer by layer"),
        ({"cuda_graph": "transformer_engine:attn,moe_router"}, "cuda_graph=attention: of attn,moe_router"),
        ({"framework": "nemo"}, "software=megatron_moe"),
        ({"grad_accum_dtype": "bf16"}, "grad_accum_dtype=bf16 ignored"),
        ({"heads": "", "kv_heads": "", "head_dim": ""}, "heads=32"),
        ({"ffn": ""}, "ffn=11008"),
        ({"ffn": "", "arch": "gpt", "gated_mlp": ""}, "ffn=16384"),
        ({"vocab": ""}, "vocab=32000"),
        (MOE | {"top_k": ""}, "top_k=2"),
        ({"schedule": "interleaved", "vpp": ""}, "vpp=2"),
        ({"layers": "30", "schedule": "interleaved", "vpp": ""}, "vpp=3"),
        ({"tp": "", "dp": "32"}, "tp=1"),
        ({"pp": "", "dp": "16"}, "pp=1"),
        ({"n_gpus": ""}, "n_gpus=64"),
        ({"global_batch": ""}, "global_batch=16"),
        ({"optimizer": "lamb"}, "optimizer=adam"),
        ({"attention": "window"}, "window=4096, one layer of 1"),
        (MOE | {"attention": "window"}, "window=128, one layer of 2"),
    ],
)
def test_what_a_row_does_not_say_is_listed(changes: dict[str, str], listed: str) -> None:
    assert any(line.startswith(listed) for line in _of(**changes).assumed)
    assert not any(line.startswith(listed) for line in _of().assumed)


def test_an_assumption_is_listed_once_however_often_it_is_used() -> None:
    assumed = _of(kv_heads="", attention="", head_dim="").assumed
    assert len(assumed) == len(set(assumed))


def test_a_full_row_assumes_only_what_has_no_column() -> None:
    heads = [line.split(":")[0] for line in _of().assumed if not line.startswith("system")]
    kernels = "fusion has fused_dropout, fused_gate_up, fused_qkv, fused_softmax"
    assert heads == ["norm and biases", "overlap_pp=0", kernels, "software=eager_2022"]


@pytest.mark.parametrize(("framework", "arch", "rate"), [
    ("megatron-lm", "gpt", 0.1), ("megatron-deepspeed", "gpt", 0.1), ("megatron-lm", "llama", 0.0),
    ("llm-foundry", "gpt", 0.0),
])  # fmt: skip
def test_gpt_stacks_that_have_dropout_unless_told_otherwise_are_taken_to_have_it(framework, arch, rate):
    model = _of(framework=framework, arch=arch).model
    assert (model.attention_dropout, model.hidden_dropout) == (rate, rate)


@pytest.mark.parametrize(("framework", "told", "recipe"), [
    ("megatron-bridge", "", "bf16_grads"), ("nemo/megatron-core", "", "bf16_grads"), ("megatron-lm", "", "bf16"),
    ("megatron-bridge", "fp32", "bf16"),
])  # fmt: skip
def test_presets_that_reduce_gradients_in_bf16_do_so_where_the_row_is_silent(framework, told, recipe):
    assert _of(framework=framework, grad_accum_dtype=told, precision="bf16").strategy.precision == recipe


@pytest.mark.parametrize(("graph", "told", "pairs"), [
    ("full_iteration", "", 1), ("full_iteration", "0", 0), ("none", "", 0),
])  # fmt: skip
def test_ep_overlap_goes_with_graphs_of_whole_iterations_where_nothing_is_said(graph, told, pairs):
    moe = {"arch": "moe-mixtral", "experts": "8", "top_k": "2", "ep": "4", "moe_ffn": "1024"}
    assert _of(**moe, cuda_graph=graph, ep_overlap=told).strategy.overlap.ep == pairs


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": "int4"}, "precision int4 is not modelled"),
        ({"schedule": "chimera"}, "schedule chimera is not modelled"),
        ({"attention": "linear"}, "attention linear is not modelled"),
        ({"arch": "other"}, "arch other is not modelled"),
        ({"optimizer": "adagrad"}, "optimizer adagrad is not modelled"),
        ({"seq": ""}, "column seq is empty, and nothing is assumed"),
        ({"hidden": "4100", "heads": ""}, "column heads is empty, and nothing is assumed"),
        ({"tp": "x"}, "t.csv line 2, column tp: must be a whole number"),
        ({"tp": "2.5"}, "t.csv line 2, column tp: must be a whole number"),
        ({"tp": "nan"}, "t.csv line 2, column tp: "),
        ({"tp": "1e300"}, "t.csv line 2, column tp: "),
        ({"seq": "-8192"}, "t.csv line 2, column seq: must be a whole number of at least 1, but got -8192"),
        ({"sp": "2"}, "t.csv line 2, column sp: must be 0 or 1"),
        ({"n_gpus": "60"}, r"t.csv line 2, column n_gpus: must be divisible by tp \* cp \* pp \(8\), but got 60"),
        ({"dp": "3"}, "t.csv line 2, column dp: must be .* = 8, but got 3"),
        ({"schedule": "none"}, "t.csv line 2, column schedule: must name a pipeline schedule"),
        ({"recompute": "some"}, "t.csv line 2, column recompute: "),
        ({"recompute": "selective", "recompute_modules": "nose"}, "column recompute_modules: .*'nose'"),
        ({"pp_layout": "EtL"}, "t.csv line 2, column pp_layout: "),
        ({"gpu": "abacus"}, "t.csv line 2, column gpu, .*abacus"),
        (MOE | {"moe_routing": "chaotic"}, "column moe_routing: "),
    ],
)
def test_an_unusable_row_says_why(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _of(**changes)


def test_numbers_that_spreadsheets_write_are_read() -> None:
    assert _of(layers="32.0").model.num_layers == 32


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"step_time_s": "2.5"}, 2.5),
        ({"step_time_s": "", "tokens_per_s_per_gpu": "4096"}, 128 * 8192 / (4096 * 64)),
        ({"step_time_s": "2.5", "tokens_per_s_per_gpu": "1"}, 2.5),
        ({"step_time_s": ""}, None),
    ],
)
def test_the_step_time_comes_from_its_column_or_the_token_rate(changes: dict[str, str], seconds: float | None) -> None:
    assert measured_of(_row(**changes), tokens=128 * 8192, num_gpus=64).step_time_s == seconds


def test_measured_memory_is_in_gib() -> None:
    assert measured_of(_row(peak_mem_gib="1.5"), tokens=1, num_gpus=1).peak_memory_bytes == 1.5 * GIB


@pytest.mark.parametrize(
    ("cell", "scope"),
    [("", "none"), ("none", "none"), ("local", "layer"), ("te:attn,mamba", "attention"), ("full_iteration", "full")],
)
def test_a_graph_holds_what_its_scopes_say(cell, scope):
    assert _of(cuda_graph=cell).strategy.cuda_graph.value == scope


@pytest.mark.parametrize(
    ("framework", "software"), [("nemo/megatron-core", "megatron_moe"), ("llm-foundry", "fsdp_2023"), ("unknown", None)]
)
def test_software_is_that_of_the_frameworks_generation(framework, software):
    ran = _of(framework=framework).system.software
    assert (ran and ran.name) == software
