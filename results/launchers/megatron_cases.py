"""Choices that Megatron Core spreads over several names: precision, sharding, optimizer, CUDA graphs. Both ways."""

from __future__ import annotations

from results.launchers.settings import Value
from results.launchers.table import Cases

__all__ = ["CUDA_GRAPH", "OPTIMIZER", "PRECISION", "SHARDING"]

_GRADS_BF16 = "_bf16_grads"
_PRECISIONS: tuple[tuple[str, dict[str, Value]], ...] = (
    ("fp32", {}),
    ("bf16", {"bf16": True}),
    ("fp16", {"fp16": True}),
    ("fp8", {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"}),
    ("fp8_1x128", {"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"}),
    ("mxfp8", {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}),
    ("nvfp4", {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"}),
)
_HALVED = tuple(
    ("bf16_grads" if name == "bf16" else name + _GRADS_BF16, theirs | {"grad_reduce_in_bf16": True})
    for name, theirs in _PRECISIONS
    if name not in {"fp32", "fp16"}
)
_ALSO_PRECISIONS: tuple[tuple[str, dict[str, Value]], ...] = (
    ("fp8", {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    ("fp8", {"bf16": True, "fp8": "hybrid"}),
    ("fp8", {"bf16": True, "fp8": "e4m3"}),
    ("fp8", {"bf16": True, "fp8": "e4m3", "fp8_recipe": "tensorwise"}),
    ("fp8", {"bf16": True, "fp8": "e4m3", "fp8_recipe": "delayed"}),
    ("fp8_1x128", {"bf16": True, "fp8": "e4m3", "fp8_recipe": "blockwise"}),
    ("mxfp8", {"bf16": True, "fp8": "hybrid", "fp8_recipe": "mxfp8"}),
    ("nvfp4", {"bf16": True, "fp4": "e2m1"}),
)
_ALSO_HALVED = tuple((name + _GRADS_BF16, theirs | {"grad_reduce_in_bf16": True}) for name, theirs in _ALSO_PRECISIONS)


def _one(cases: tuple[tuple[str, dict[str, Value]], ...]) -> list[tuple[tuple[Value, ...], dict[str, Value]]]:
    return [((name,), theirs) for name, theirs in cases]


PRECISION = Cases(
    keys=("precision",),
    names=("bf16", "fp16", "fp8", "fp8_recipe", "fp4", "fp4_recipe", "grad_reduce_in_bf16"),
    cases=_one((*_PRECISIONS, *_HALVED)),
    also=_one((*_ALSO_PRECISIONS, *_ALSO_HALVED)),
    gates={"fp8_recipe": ("fp8",), "fp4_recipe": ("fp4",)},
    told={
        "fp8": "delayed and current scaling are priced alike, per tensor",
        "fp16": "gradients are accumulated in fp32",
    },
)

_FSDP: dict[str, Value] = {"use_distributed_optimizer": True, "use_megatron_fsdp": True}
_FSDP_ALONE: dict[str, Value] = {"use_megatron_fsdp": True}
_STATES: dict[str, Value] = {"data_parallel_sharding_strategy": "optim"}
_GRADS: dict[str, Value] = {"data_parallel_sharding_strategy": "optim_grads"}
_WEIGHTS: dict[str, Value] = {"data_parallel_sharding_strategy": "optim_grads_params"}

SHARDING = Cases(
    keys=("zero_stage", "reshard_after_forward"),
    names=(
        "use_distributed_optimizer", "use_megatron_fsdp", "data_parallel_sharding_strategy", "use_torch_fsdp2",
        "torch_fsdp2_reshard_after_forward",
    ),
    cases=(
        ((0, 1), {}),
        ((1, 1), {"use_distributed_optimizer": True}),
        ((2, 1), _FSDP | _GRADS),
        ((3, 1), _FSDP | _WEIGHTS),
        ((3, 0), {"use_torch_fsdp2": True, "torch_fsdp2_reshard_after_forward": False}),
    ),
    also=(
        ((2, 1), _FSDP_ALONE | _GRADS),
        ((3, 1), _FSDP_ALONE | _WEIGHTS),
        ((1, 1), _FSDP | _STATES),
        ((1, 1), _FSDP_ALONE | _STATES),
        ((0, 1), _FSDP_ALONE),
        ((0, 1), _FSDP),
        ((3, 1), {"use_torch_fsdp2": True}),
        ((3, 1), {"use_torch_fsdp2": True, "torch_fsdp2_reshard_after_forward": True}),
    ),
    gates={
        "data_parallel_sharding_strategy": ("use_megatron_fsdp",),
        "torch_fsdp2_reshard_after_forward": ("use_torch_fsdp2",),
    },
    same={"data_parallel_sharding_strategy": {"no_shard": ""}},
)  # fmt: skip

OPTIMIZER = Cases(
    keys=("optimizer",),
    names=("optimizer", "use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype"),
    cases=(
        (("adam",), {"optimizer": "adam"}),
        (("sgd",), {"optimizer": "sgd"}),
        (("muon",), {"optimizer": "muon"}),
        (("adam_8bit",), {"optimizer": "adam", "use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8",
                          "exp_avg_sq_dtype": "fp8"}),
    ),
    also=(
        (("adam",), {}),
        (("muon",), {"optimizer": "dist_muon"}),
        (("adam",), {"use_precision_aware_optimizer": True}),
        (("adam",), {"optimizer": "adam", "use_precision_aware_optimizer": True}),
        (("adam_8bit",), {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}),
    ),
    gates=dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), ("use_precision_aware_optimizer",)),
    same=dict.fromkeys(
        ("exp_avg_dtype", "exp_avg_sq_dtype"), {"fp32": "", "torch.float32": "", "torch.uint8": "fp8"}
    ),
)  # fmt: skip

CUDA_GRAPH = Cases(
    keys=("cuda_graph",),
    names=("cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope_deprecated", "enable_cuda_graph",
           "external_cuda_graph"),
    cases=(
        (("none",), {}),
        (("layer",), {"cuda_graph_impl": "transformer_engine"}),
        (("attention",), {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "attn"}),
        (("full",), {"cuda_graph_impl": "full_iteration"}),
    ),
    also=(
        (("none",), {"cuda_graph_impl": "none"}),
        (("layer",), {"cuda_graph_impl": "local"}),
        (("layer",), {"cuda_graph_impl": "local", "cuda_graph_scope_deprecated": "full"}),
        (("layer",), {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope_deprecated": "full"}),
        (("layer",), {"enable_cuda_graph": True}),
        (("layer",), {"external_cuda_graph": True}),
        (("attention",), {"cuda_graph_impl": "local", "cuda_graph_modules": "attn"}),
        (("attention",), {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope_deprecated": "attn"}),
        (("full",), {"cuda_graph_impl": "local", "cuda_graph_scope_deprecated": "full_iteration"}),
        (("full",), {"enable_cuda_graph": True, "cuda_graph_scope_deprecated": "full_iteration"}),
    ),
    gates=dict.fromkeys(
        ("cuda_graph_modules", "cuda_graph_scope_deprecated"),
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
    ),
    same={"cuda_graph_impl": {"none": ""}, "cuda_graph_scope_deprecated": {"full": ""},
          "cuda_graph_modules": {"full": ""}},
)  # fmt: skip
