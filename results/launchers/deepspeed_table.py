"""The table of DeepSpeed: paths of its JSON and arguments of Megatron-DeepSpeed, both ways.

Buckets count elements there and bytes of gradients here.
"""

from __future__ import annotations

from collections.abc import Mapping

from estimator.precision import recipe
from results.launchers.megatron import check_always, idle_kernels, read_recompute, write_recompute
from results.launchers.megatron_model import write_model
from results.launchers.settings import Setting, Settings, Value
from results.launchers.table import Cases, Custom, Flag, Inexpressible, Number, Row, Values

__all__ = ["ALWAYS_FUSED", "FUSIONS", "PRICED_AS", "STRATEGY", "WITHOUT_WORDS", "described", "write_sizes"]

ALWAYS_FUSED = ("fused_gate_up", "fused_norm", "fused_qkv")
FUSIONS = {"fused_dropout": "bias_dropout_fusion", "fused_softmax": "masked_softmax_fusion",
            "fused_activation": "bias_gelu_fusion"}  # fmt: skip
_FLASH = ("use_flash_attn_v2", "use_flash_attn_v1", "use_flash_attn_triton", "use_flash_attn_builder", "use_flash_attn")

WITHOUT_WORDS = {
    "tp_chunks": ("4", "tensor-parallel traffic does not overlap"),
    "overlap_tp": (0, "tensor-parallel traffic does not overlap"),
    "overlap_ep": (0, "all-to-alls do not overlap"),
    "overlap_pp": (0, "sends between stages do not overlap"),
    "overlap_cp": (1, "sequence parallelism of DeepSpeed is Ulysses"),
    "vpp": (1, "the pipeline engine has one chunk a rank"),
    "dp_replicate": (1, "ZeRO shards over all ranks"),
    "interleave_group": (0, "the pipeline engine does not interleave"),
    "rank_order": ("tp-cp-dp-pp", "the order of ranks is fixed"),
    "prefetch_blocks": (1, "stage3_prefetch_bucket_size counts elements, not blocks"),
    "expert_bucket_bytes": (None, "experts share reduce_bucket_size"),
    "redundant_experts": (0, "experts have no copies (EPLB)"),
    "recompute_per_chunk": (None, "it is one choice for all layers"),
    "cuda_graph": ("none", "training captures no graphs"),
    "shared_expert_overlap": (False, "there are no shared experts"),
    "reshard_after_forward": (1, "ZeRO-3 always gathers weights again for backward"),
}
"""Axes without a setting: the value that DeepSpeed has instead, and why."""

PRICED_AS = {
    "deepspeed": ("true",),
    "zero_optimization.contiguous_gradients": ("true",),
    "zero_optimization.reduce_scatter": ("true",),
    "zero_optimization.allgather_partitions": ("true",),
    "zero_optimization.cpu_offload_param": ("false",),
    "expert_interval": ("1",),
}

_RENAMED = {"num_key_value_heads": "num_query_groups", "topk": "moe_router_topk", "rope_theta": "rotary_base",
            "layernorm_epsilon": "norm_epsilon"}  # fmt: skip


def described(given: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings with Megatron-DeepSpeed's names for a model's sizes as Megatron Core has them."""
    found = {_RENAMED.get(name, name): setting for name, setting in given.items()}
    if (groups := given.get("num_key_value_heads")) is not None:
        found["group_query_attention"] = Setting(value=True, spelling=groups.spelling, place=groups.place)
    experts = given.get("num_experts")
    if experts is not None and isinstance(experts.value, list):
        number = experts.value[0] if experts.value else "1"
        del found["num_experts"]
        if number != "1":
            found["num_experts"] = Setting(value=number, spelling=experts.spelling, place=experts.place)
    return found


def write_sizes(model: Mapping[str, Value]) -> Values:
    """A model's sizes as Megatron-DeepSpeed has them; Inexpressible for what it lacks."""
    moe = model["moe"]
    lacking = [
        name
        for name, has in (
            ("mla", model["mla"]), ("layers", model["layers"]), ("num_mtp_layers", model["num_mtp_layers"]),
            ("qk_norm", model["qk_norm"] != "none"), ("attention_sinks", model["attention_sinks"]),
            ("attention_gate", model["attention_gate"]),
            ("attention_bias alone", model["attention_bias"] and not model["mlp_bias"]),
        )
        if has
    ]  # fmt: skip
    if isinstance(moe, dict):
        given = ("num_experts", "top_k", "ffn", "capacity_factor")
        lacking += [name for name, value in moe.items() if name not in given and value not in (None, False, 0)]
        lacking += ["experts narrower than ffn"] if moe["ffn"] != model["ffn"] else []
    if lacking:
        raise Inexpressible("model", f"Megatron-DeepSpeed has no arguments for {', '.join(lacking)}")
    core = write_model(dict(model), chips_per_node=1, ep=1)
    kept = (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "vocab_size",
        "make_vocab_size_divisible_by", "swiglu", "untie_embeddings_and_output_weights", "add_bias_linear",
        "max_position_embeddings", "attention_dropout", "hidden_dropout",
    )  # fmt: skip
    theirs: Values = {name: core[name] for name in kept}
    theirs |= {"normalization": str(core["normalization"]).lower()}
    theirs |= {"use_rotary_position_embeddings": core["position_embedding_type"] == "rope"}
    theirs |= {"add_position_embedding": core["position_embedding_type"] != "rope"}
    if model["num_kv_heads"] != model["num_heads"]:
        theirs["num_key_value_heads"] = model["num_kv_heads"]
    if isinstance(moe, dict):
        theirs |= {"num_experts": [moe["num_experts"]], "topk": moe["top_k"], "expert_interval": 1}
        theirs |= {"moe_train_capacity_factor": moe["capacity_factor"]}
    return theirs


def _read_micro(given: Settings, so_far: Values) -> Values:
    micro = given.whole("train_micro_batch_size_per_gpu") or given.whole("micro_batch_size")
    given.take("micro_batch_size")
    if micro is None:
        given.note("micro_batch=1", "the file has none")
    return {"micro_batch": micro or 1}


def _read_context(given: Settings, so_far: Values) -> Values:
    cp = given.whole("ds_sequence_parallel_size") or 1
    return {"cp": cp, "context_parallel": "ulysses" if cp != 1 else "ring"}


def _write_context(values: Values) -> Values:
    if values["cp"] != 1 and values["context_parallel"] != "ulysses":
        raise Inexpressible("context_parallel", "sequence parallelism of DeepSpeed is Ulysses")
    return {"ds_sequence_parallel_size": values["cp"] if values["cp"] != 1 else None}


def _read_expert_tp(given: Settings, so_far: Values) -> Values:
    return {"etp": so_far["tp"] if given.flag("enable_expert_tensor_parallelism") else 1}


def _write_expert_tp(values: Values) -> Values:
    if values["etp"] not in (1, values["tp"]):
        raise Inexpressible("etp", "experts are split as tp, or not at all")
    return {"enable_expert_tensor_parallelism": values["etp"] != 1}


def _read_chunks(given: Settings, so_far: Values) -> Values:
    return {"schedule": "1f1b", "vpp": 1}


def _write_chunks(values: Values) -> Values:
    if values["pp"] != 1 and values["schedule"] != "1f1b":
        raise Inexpressible("schedule", "the pipeline engine has 1f1b")
    if values["pp"] != 1 and not values["is_even"]:
        raise Inexpressible("layout", "the pipeline engine divides layers evenly")
    return {}


def _read_sharding(given: Settings, so_far: Values) -> Values:
    stage, other = given.whole("zero_optimization.stage", least=0), given.whole("zero_stage", least=0)
    chosen = stage if stage is not None else other if other is not None else 0
    if chosen > 3:
        raise given.bad("zero_optimization.stage" if stage is not None else "zero_stage", "must be 0 to 3")
    return {"zero_stage": chosen, "reshard_after_forward": 1}


def _write_sharding(values: Values) -> Values:
    if values["pp"] != 1 and values["zero_stage"] in (2, 3):
        raise Inexpressible("zero_stage", "the pipeline engine takes ZeRO-0 and ZeRO-1")
    return {"zero_optimization.stage": values["zero_stage"], "zero_stage": values["zero_stage"]}


_PRECISION = Cases(
    keys=("precision",),
    names=("bf16.enabled", "fp16.enabled", "bf16", "fp16", "data_types.grad_accum_dtype", "fp8_hybrid", "fp8_e4m3"),
    cases=(
        (("fp32",), {}),
        (("bf16",), {"bf16.enabled": True, "bf16": True, "data_types.grad_accum_dtype": "fp32"}),
        (("bf16_grads",), {"bf16.enabled": True, "bf16": True, "data_types.grad_accum_dtype": "bf16"}),
        (("fp16",), {"fp16.enabled": True, "fp16": True}),
    ),
    also=(
        (("bf16",), {"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32"}),
        (("bf16_grads",), {"bf16.enabled": True, "data_types.grad_accum_dtype": "bf16"}),
        (("bf16_grads",), {"bf16.enabled": True}),
        (("bf16_grads",), {"bf16.enabled": True, "bf16": True}),
        (("bf16",), {"bf16": True}),
        (("fp16",), {"fp16.enabled": True}),
        (("fp16",), {"fp16": True}),
        (("fp16",), {"fp16.enabled": True, "fp16": True, "data_types.grad_accum_dtype": "fp32"}),
        (("fp16",), {"fp16.enabled": True, "data_types.grad_accum_dtype": "fp32"}),
    ),
    told={
        "fp16": "gradients are accumulated in fp32",
        "bf16_grads": "DeepSpeed accumulates gradients in the model's dtype unless grad_accum_dtype says otherwise",
    },
)


def _read_optimizer(given: Settings, so_far: Values) -> Values:
    words = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd", "muon": "muon"}
    word = given.text("optimizer.type") or given.text("optimizer")
    given.take("optimizer")
    if word is None or word.lower() in words:
        return {"optimizer": words[(word or "adam").lower()]}
    given.without_counterpart("optimizer.type", "optimizer")
    given.note("optimizer=adam", f"{word} has no counterpart here")
    return {"optimizer": "adam"}


def _write_optimizer(values: Values) -> Values:
    if values["optimizer"] not in {"adam", "sgd"}:
        raise Inexpressible("optimizer", "Megatron-DeepSpeed makes adam and sgd")
    return {"optimizer": values["optimizer"]}


def _read_overlap(given: Settings, so_far: Values) -> Values:
    """Overlap, which stage 3 has unless told otherwise, and buckets of 500 million elements unless told otherwise."""
    flag = given.flag("zero_optimization.overlap_comm")
    overlaps = so_far["zero_stage"] == 3 if flag is None else flag
    size = given.whole("zero_optimization.reduce_bucket_size")
    given.whole("zero_optimization.allgather_bucket_size", least=0)
    if size is None and overlaps:
        given.note("reduce_bucket_size=5e8", "DeepSpeed's default")
    elements = size if size is not None else 500_000_000 if overlaps else 0
    return {"overlap_dp": int(overlaps), "bucket_bytes": elements * int(recipe(str(so_far["precision"])).grad_bytes)}


def _write_overlap(values: Values) -> Values:
    size = values["bucket_bytes"]
    assert isinstance(size, int | float)
    theirs: Values = {"zero_optimization.overlap_comm": bool(values["overlap_dp"])}
    if not values["overlap_dp"]:
        return theirs
    if not size:
        raise Inexpressible("bucket_bytes", "a bucket has a size: reduce_bucket_size", theirs)
    elements = max(round(size / recipe(str(values["precision"])).grad_bytes), 1)
    return theirs | {"zero_optimization.reduce_bucket_size": elements}


def _read_offload(given: Settings, so_far: Values) -> Values:
    device = given.text("zero_optimization.offload_optimizer.device")
    ratio = given.number("zero_optimization.offload_optimizer.ratio")
    old = given.flag("zero_optimization.cpu_offload")
    share: Value = (1 if ratio is None else ratio) if device == "cpu" or old or given.flag("cpu_optimizer") else 0
    share = int(share) if isinstance(share, float) and share in (0.0, 1.0) else share
    parameters = given.text("zero_optimization.offload_param.device")
    remote = given.text("remote_device")
    for name, word in (("zero_optimization.offload_optimizer.device", device),
                       ("zero_optimization.offload_param.device", parameters), ("remote_device", remote)):  # fmt: skip
        if word == "nvme":
            given.without_counterpart(name)
    kept = given.flag("activation_checkpointing.cpu_checkpointing") or given.flag("checkpoint_in_cpu")
    return {
        "offload_states": share,
        "offload_gradients": share,
        "offload_parameters": int("cpu" in (parameters, remote)),
        "offload_activations": int(bool(kept) and so_far["recompute"] == "full"),
    }


def _write_offload(values: Values) -> Values:
    states, gradients = values["offload_states"], values["offload_gradients"]
    parameters, activations = values["offload_parameters"], values["offload_activations"]
    if states != gradients:
        raise Inexpressible("offload_gradients", "offload_optimizer moves states and gradients together")
    if parameters not in (0, 1):
        raise Inexpressible("offload_parameters", "offload_param moves all of them")
    if activations not in (0, 1) or (activations and values["recompute"] != "full"):
        raise Inexpressible("offload_activations", "cpu_checkpointing moves all checkpoints of full recompute")
    theirs: Values = {}
    if states:
        theirs |= {"zero_optimization.offload_optimizer.device": "cpu"}
        theirs |= {"zero_optimization.offload_optimizer.ratio": states}
    theirs |= {"zero_optimization.offload_param.device": "cpu"} if parameters else {}
    return theirs | ({"activation_checkpointing.cpu_checkpointing": True} if activations else {})


def _read_fusion(given: Settings, so_far: Values) -> Values:
    names = [*ALWAYS_FUSED]
    if any([given.flag(name) for name in _FLASH]):
        names.append("flash_attention")
    names += [ours for ours, theirs in FUSIONS.items() if given.flag(theirs) is not False]
    fusion: list[Value] = [*sorted(names)]
    return {"fusion": fusion}


def _write_fusion(values: Values) -> Values:
    fusion = values["fusion"]
    assert isinstance(fusion, list)
    assert isinstance(model := values["model"], dict)
    idle = idle_kernels(fusion, model)
    theirs: Values = {"use_flash_attn_v2": "flash_attention" in fusion}
    theirs |= {name: ours in fusion for ours, name in FUSIONS.items() if ours not in idle}
    more = sorted(set(map(str, fusion)) - {*ALWAYS_FUSED, *FUSIONS, *idle, "flash_attention"})
    if more:
        raise Inexpressible("fusion", f"its layers have no kernels for {', '.join(more)}", theirs)
    check_always(fusion, model, theirs)
    return theirs


STRATEGY: tuple[Row, ...] = (
    Number(key="tp", name="tensor_model_parallel_size"),
    Number(key="pp", name="pipeline_model_parallel_size"),
    Custom(
        keys=("cp", "context_parallel"), names=("ds_sequence_parallel_size",), reads=_read_context,
        writes=_write_context,
    ),
    Number(key="ep", name="moe_expert_parallel_size"),
    Custom(
        keys=("etp",), names=("enable_expert_tensor_parallelism",), reads=_read_expert_tp, writes=_write_expert_tp
    ),
    Custom(
        keys=("micro_batch",),
        names=("train_micro_batch_size_per_gpu", "micro_batch_size"),
        reads=_read_micro,
        writes=lambda values: {"train_micro_batch_size_per_gpu": values["micro_batch"]},
    ),
    Custom(keys=("schedule", "layout"), names=(), reads=_read_chunks, writes=_write_chunks),
    Flag(key="sequence_parallel", name="sequence_parallel"),
    Custom(
        keys=("zero_stage",), names=("zero_optimization.stage", "zero_stage"), reads=_read_sharding,
        writes=_write_sharding,
    ),
    _PRECISION,
    Custom(keys=("optimizer",), names=("optimizer.type", "optimizer"), reads=_read_optimizer, writes=_write_optimizer),
    Custom(
        keys=("recompute", "recompute_layers"),
        names=(
            "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
            "recompute_activations", "checkpoint_activations",
        ),
        reads=read_recompute,
        writes=write_recompute,
    ),
    Custom(
        keys=("overlap_dp", "bucket_bytes"),
        names=("zero_optimization.overlap_comm", "zero_optimization.reduce_bucket_size",
               "zero_optimization.allgather_bucket_size"),
        reads=_read_overlap,
        writes=_write_overlap,
    ),
    Custom(
        keys=("offload_states", "offload_gradients", "offload_parameters", "offload_activations"),
        names=("zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.ratio",
               "zero_optimization.offload_param.device", "activation_checkpointing.cpu_checkpointing"),
        reads=_read_offload,
        writes=_write_offload,
    ),
    Custom(
        keys=("fusion",), names=("use_flash_attn_v2", *FUSIONS.values()), reads=_read_fusion, writes=_write_fusion
    ),
)  # fmt: skip
