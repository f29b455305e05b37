"""The strategy and the workload in the words of Megatron Core: one table for Megatron-LM's flags and Bridge's fields.

Names are the `dest` of megatron-core's parser. What `absent` and first cases say is what the parser does without the
argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from estimator.precision import recipe
from results.launchers.megatron_cases import CUDA_GRAPH, OPTIMIZER, PRECISION, SHARDING
from results.launchers.settings import Settings, Value
from results.launchers.table import Custom, Flag, Inexpressible, Number, Row, Values, Words

__all__ = [
    "ALWAYS_FUSED",
    "FUSIONS",
    "PRICED_AS",
    "STRATEGY",
    "WITHOUT_WORDS",
    "check_always",
    "idle_kernels",
    "read_recompute",
    "write_recompute",
]

MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act")
"""Of selective recompute, that both have."""

ALWAYS_FUSED = ("fused_gate_up", "fused_norm", "fused_qkv")
"""Kernels that Megatron Core on Transformer Engine always has: linear_fc1 and linear_qkv are one GEMM each."""

FUSIONS = {
    "fused_loss": ("cross_entropy_loss_fusion", False),
    "fused_rope": ("apply_rope_fusion", True),
    "fused_dropout": ("bias_dropout_fusion", True),
    "fused_softmax": ("masked_softmax_fusion", True),
    "fused_permute": ("moe_permute_fusion", False),
    "fused_router": ("moe_router_fusion", False),
    "fused_residual_norm": ("fused_residual_rmsnorm", False),
    "fused_mla_projections": ("mla_down_proj_fusion", False),
}
"""Kernels with a switch of their own, and what it is where the file is silent."""

PRICED_AS = {
    "moe_grouped_gemm": ("true",),
    "moe_token_dispatcher_type": ("alltoall",),
    "transformer_impl": ("transformer_engine",),
    "accumulate_allreduce_grads_in_fp32": ("true",),
    "overlap_param_gather": ("true",),
    "main_grads_dtype": ("fp32", "torch.float32"),
    "main_params_dtype": ("fp32", "torch.float32"),
    "moe_router_dtype": ("fp32",),
    "ckpt_format": ("fsdp_dtensor", "torch_dist"),
    "check_for_nan_in_loss_and_grad": ("false",),
    "cross_entropy_fusion_impl": ("te", "native"),
    "moe_router_force_load_balancing": ("true",),
    "init_model_with_meta_device": ("true",),
}
"""Settings beside the table whose value here is what is priced anyway; another value has no counterpart."""

WITHOUT_WORDS = {
    "tp_chunks": ("4", "a file of --tp-comm-overlap-cfg decides how overlapped traffic is cut, not an argument"),
    "prefetch_blocks": (1, "Megatron-FSDP prefetches by --suggested-communication-unit-size, not by blocks"),
    "expert_bucket_bytes": (None, "experts share --ddp-bucket-size"),
    "redundant_experts": (0, "experts have no copies (EPLB)"),
    "recompute_per_chunk": (None, "--recompute-num-layers is one number for all chunks"),
    "offload_parameters": (0, "parameters stay on the chip"),
    "offload_gradients": (0, "gradients stay on the chip"),
    "overlap_cp": (1, "the ring of context parallelism always overlaps"),
}
"""Axes that Megatron has no argument for: the value that it has instead, and why."""


def _read_chunks(given: Settings, so_far: Values) -> Values:
    """Chunks of a rank; with more than one the schedule is interleaved. A layout string says more, and later."""
    layout = given.text("pipeline_model_parallel_layout")
    stages = given.whole("num_virtual_stages_per_pipeline_rank")
    each = given.whole("num_layers_per_virtual_pipeline_stage")
    group = given.whole("microbatch_group_size_per_vp_stage")
    first, last = given.whole("decoder_first_pipeline_num_layers"), given.whole("decoder_last_pipeline_num_layers")
    vpp, pp, layers = stages or 1, so_far["pp"], so_far.get("num_layers")
    assert isinstance(pp, int)
    if each is not None:
        name = "num_layers_per_virtual_pipeline_stage"
        if not isinstance(layers, int):
            raise given.bad(name, "needs the number of layers of the model; give --num-layers or --model NAME")
        if layers % (pp * each):
            raise given.bad(name, f"must divide layers ({layers}) / pp ({pp})")
        vpp = layers // (pp * each)
    found: Values = {"vpp": vpp, "schedule": "interleaved" if vpp > 1 else "1f1b"}
    if layout is not None:
        found["layout"] = layout
    elif first is not None or last is not None:
        found["layout"] = _ends(given, layers, pp * vpp, first, last)
    return found | {"interleave_group": (group or 0) if vpp > 1 or layout is not None else 0}


def _ends(given: Settings, layers: Value, chunks: int, first: int | None, last: int | None) -> list[Value]:
    """Layers per chunk where the first, the last or both have a number of their own."""
    name = "decoder_first_pipeline_num_layers" if first is not None else "decoder_last_pipeline_num_layers"
    ends = (first is not None) + (last is not None)
    rest = None if not isinstance(layers, int) else layers - (first or 0) - (last or 0)
    if rest is None or chunks <= ends or rest % (chunks - ends):
        raise given.bad(name, f"must leave layers that {max(chunks - ends, 0)} other chunks can share evenly")
    middle: list[Value] = [rest // (chunks - ends)] * (chunks - ends)
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def _write_chunks(values: Values) -> Values:
    schedule, pp, vpp = values["schedule"], values["pp"], values["vpp"]
    if pp != 1 and schedule != ("interleaved" if vpp != 1 else "1f1b"):
        raise Inexpressible("schedule", "Megatron has 1f1b, and interleaved with vpp above 1")
    group: Values = {"microbatch_group_size_per_vp_stage": values["interleave_group"] or None} if vpp != 1 else {}
    if not values["is_even"] and pp != 1:
        return group | {"pipeline_model_parallel_layout": values["layout_text"]}
    return group | {"num_virtual_stages_per_pipeline_rank": vpp if vpp != 1 else None}


def read_recompute(given: Settings, so_far: Values) -> Values:
    """What backward runs again, of the granularity, the method and the modules."""
    kind, method = given.text("recompute_granularity"), given.text("recompute_method")
    number, modules = given.whole("recompute_num_layers"), given.words("recompute_modules")
    if given.flag("recompute_activations") and kind is None:
        kind = "selective"
    if given.flag("checkpoint_activations") and kind is None:
        kind, method = "full", method or "uniform"
    nothing: Values = {"recompute": "none", "recompute_layers": 0}
    if kind is None:
        return nothing
    if kind == "full":
        if method == "block" and number:
            return {"recompute": "block", "recompute_layers": number}
        if method == "block":
            return nothing
        if number and number > 1:
            given.note("recompute=full", f"the input of every layer is kept, not of every {number}th")
        return {"recompute": "full", "recompute_layers": 0}
    if kind != "selective":
        raise given.bad("recompute_granularity", "must be full or selective")
    strange = [m for m in modules if m not in MODULES]
    if strange:
        given.unmodelled.append(f"{given.spelled('recompute_modules')} {' '.join(strange)}")
    mine = sorted(m for m in modules if m in MODULES) or ([] if modules else ["core_attn"])
    if not modules:
        given.note("recompute=core_attn", "what selective recompute means where no modules are named")
    return {"recompute": "+".join(mine) or "none", "recompute_layers": 0}


def write_recompute(values: Values) -> Values:
    """The inverse; Inexpressible for modules that Megatron does not name."""
    kind = str(values["recompute"])
    if kind == "none":
        return {}
    if kind == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if kind == "block":
        layers = values["recompute_layers"]
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    modules = kind.split("+")
    if lacking := [m for m in modules if m not in MODULES]:
        raise Inexpressible("recompute", f"--recompute-modules has {', '.join(MODULES)}, not {', '.join(lacking)}")
    named: list[Value] = [*modules]
    return {"recompute_granularity": "selective", "recompute_modules": named}


def _read_overlap_dp(given: Settings, so_far: Values) -> Values:
    """Overlap of data parallelism and its buckets, which count parameters there and bytes of gradients here."""
    is_sharded = so_far["zero_stage"] == 3  # block by block, which has no buckets
    overlaps = bool(given.flag("overlap_grad_reduce")) or is_sharded
    size, number = given.whole("ddp_bucket_size"), given.whole("ddp_num_buckets")
    each = int(recipe(str(so_far["precision"])).grad_bytes)
    if number == 1:
        return {"overlap_dp": int(overlaps), "bucket_bytes": 0}
    if number is not None:
        given.without_counterpart("ddp_num_buckets")
    if size is not None:
        return {"overlap_dp": int(overlaps), "bucket_bytes": size * each}
    if not overlaps or is_sharded:
        return {"overlap_dp": int(overlaps), "bucket_bytes": 0}
    dp = so_far.get("dp")
    elements = max(40_000_000, 1_000_000 * dp) if isinstance(dp, int) else 40_000_000
    given.note(f"bucket_bytes={elements * each}", "Megatron Core's bucket: 40 million parameters, a million per rank")
    return {"overlap_dp": 1, "bucket_bytes": elements * each}


def _write_overlap_dp(values: Values) -> Values:
    if not values["overlap_dp"]:
        return {"overlap_grad_reduce": False}
    theirs: Values = {"overlap_grad_reduce": True}
    if values["zero_stage"] in (1, 2, 3):
        theirs["overlap_param_gather"] = True
    size = values["bucket_bytes"]
    assert isinstance(size, int | float)
    if values["zero_stage"] == 3:
        return theirs
    if not size:
        return theirs | {"ddp_num_buckets": 1}
    return theirs | {"ddp_bucket_size": max(round(size / recipe(str(values["precision"])).grad_bytes), 1)}


def _read_overlap_pp(given: Settings, so_far: Values) -> Values:
    """Sends between stages overlap only where chunks are interleaved."""
    flag = given.flag("overlap_p2p_comm")
    is_interleaved = so_far["schedule"] == "interleaved" or "layout" in so_far
    return {"overlap_pp": int(is_interleaved and flag is not False)}


def _write_overlap_pp(values: Values) -> Values:
    if values["schedule"] != "interleaved":
        if values["overlap_pp"] and values["pp"] != 1:
            raise Inexpressible("overlap_pp", "Megatron overlaps sends between stages only where it interleaves")
        return {}
    return {"overlap_p2p_comm": values["overlap_pp"] == 1}


def _read_expert_tp(given: Settings, so_far: Values) -> Values:
    etp = given.whole("expert_tensor_parallel_size")
    if etp is not None or "num_experts" not in given:
        return {"etp": etp or 1}
    if so_far["tp"] != 1:
        given.note(f"etp={so_far['tp']}", "Megatron splits experts as tp does unless --expert-tensor-parallel-size")
    return {"etp": so_far["tp"]}


def _write_expert_tp(values: Values) -> Values:
    return {"expert_tensor_parallel_size": values["etp"]}


def _read_fusion(given: Settings, so_far: Values) -> Values:
    names = [*ALWAYS_FUSED]
    backend = given.text("attention_backend")
    if (backend or "auto").rpartition(".")[2] not in {"unfused", "local"}:
        names.append("flash_attention")
    given.flag("use_flash_attn")  # which the attention kernels of Transformer Engine make superfluous
    gated = bool(given.flag("swiglu")) or bool(given.flag("quick_geglu"))
    activation = given.flag("bias_swiglu_fusion" if gated else "bias_gelu_fusion")
    given.take("bias_gelu_fusion" if gated else "bias_swiglu_fusion")
    if activation is not False:
        names.append("fused_activation")
    for ours, (theirs, absent) in FUSIONS.items():
        flag = given.flag(theirs)
        if absent if flag is None else flag:
            names.append(ours)
    fusion: list[Value] = [*sorted(names)]
    return {"fusion": fusion}


def _write_fusion(values: Values) -> Values:
    """Switches that have an effect on the job."""
    fusion, model = values["fusion"], values["model"]
    assert isinstance(fusion, list)
    assert isinstance(model, dict)
    has_flash = "flash_attention" in fusion
    theirs: Values = {} if has_flash else {"attention_backend": "unfused"}
    theirs[f"bias_{'swiglu' if model['gated_mlp'] else 'gelu'}_fusion"] = "fused_activation" in fusion
    idle = idle_kernels(fusion, model)
    theirs |= {name: ours in fusion for ours, (name, _) in FUSIONS.items() if ours not in idle}
    check_always(fusion, model, theirs)
    return theirs


def idle_kernels(fusion: Sequence[Value], model: Mapping[str, Value]) -> set[str]:
    """Kernels that find nothing to merge on a model, or beside the others."""
    found = {
        "fused_softmax": "flash_attention" in fusion,
        "fused_dropout": not (model["attention_dropout"] or model["hidden_dropout"]),
        "fused_permute": model["moe"] is None,
        "fused_router": model["moe"] is None,
        "fused_mla_projections": model["mla"] is None,
    }
    return {name for name, is_idle in found.items() if is_idle}


def check_always(fusion: Sequence[Value], model: Mapping[str, Value], said: Values) -> None:
    """Inexpressible, beside what is `said`, where kernels are left out that Megatron always has."""
    more = [name for name in ALWAYS_FUSED if name not in fusion and (name != "fused_gate_up" or model["gated_mlp"])]
    if more:
        raise Inexpressible("fusion", f"Megatron always has {', '.join(more)} as well", said)


def _read_offload(given: Settings, so_far: Values) -> Values:
    share = given.number("optimizer_offload_fraction")
    states: Value = (1.0 if share is None else share) if given.flag("optimizer_cpu_offload") else 0
    fine = given.flag("fine_grained_activation_offloading")
    fraction = given.number("activation_offload_fraction")
    given.words("offload_modules")
    activations: Value = (1.0 if fraction is None else fraction) if fine else 0
    return {"offload_states": _share(states), "offload_activations": _share(activations)}


def _share(value: Value) -> Value:
    return int(value) if isinstance(value, float) and value in (0.0, 1.0) else value


_OFFLOADED: list[Value] = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]


def _write_offload(values: Values) -> Values:
    theirs: Values = {}
    if values["offload_states"]:
        theirs |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": values["offload_states"]}
    if values["offload_activations"]:
        theirs |= {"fine_grained_activation_offloading": True, "offload_modules": _OFFLOADED}
        theirs |= {"activation_offload_fraction": values["offload_activations"]}
    return theirs


STRATEGY: tuple[Row, ...] = (
    Number(key="tp", name="tensor_model_parallel_size"),
    Number(key="cp", name="context_parallel_size"),
    Number(key="pp", name="pipeline_model_parallel_size"),
    Number(key="ep", name="expert_model_parallel_size"),
    Custom(keys=("etp",), names=("expert_tensor_parallel_size",), reads=_read_expert_tp, writes=_write_expert_tp),
    Number(key="micro_batch", name="micro_batch_size"),
    Number(key="dp_replicate", name="num_distributed_optimizer_instances"),
    Custom(
        keys=("vpp", "schedule", "layout", "interleave_group"),
        names=(
            "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
            "pipeline_model_parallel_layout", "microbatch_group_size_per_vp_stage",
            "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
        ),
        reads=_read_chunks,
        writes=_write_chunks,
    ),
    Flag(key="sequence_parallel", name="sequence_parallel"),
    Words(
        key="context_parallel",
        name="cp_comm_type",
        words={"ring": "p2p", "all-gather": "allgather", "ulysses": "a2a"},
        absent="ring",
        also={"all_gather": "all-gather"},
    ),
    Flag(key="rank_order", name="use_tp_pp_dp_mapping", on="tp-cp-pp-dp", off="tp-cp-dp-pp"),
    PRECISION,
    SHARDING,
    OPTIMIZER,
    Custom(
        keys=("recompute", "recompute_layers"),
        names=(
            "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules",
            "recompute_activations", "checkpoint_activations",
        ),
        reads=read_recompute,
        writes=write_recompute,
    ),
    Flag(key="overlap_tp", name="tp_comm_overlap", on=1, off=0),
    Flag(key="overlap_ep", name="overlap_moe_expert_parallel_comm", on=1, off=0),
    Custom(
        keys=("overlap_dp", "bucket_bytes"),
        names=("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size", "ddp_num_buckets"),
        reads=_read_overlap_dp,
        writes=_write_overlap_dp,
    ),
    Custom(keys=("overlap_pp",), names=("overlap_p2p_comm",), reads=_read_overlap_pp, writes=_write_overlap_pp),
    Custom(
        keys=("fusion",),
        names=(
            "attention_backend", "use_flash_attn", "bias_swiglu_fusion", "bias_gelu_fusion",
            *(name for name, _ in FUSIONS.values()),
        ),
        reads=_read_fusion,
        writes=_write_fusion,
    ),
    CUDA_GRAPH,
    Flag(key="shared_expert_overlap", name="moe_shared_expert_overlap"),
    Custom(
        keys=("offload_states", "offload_activations"),
        names=(
            "optimizer_cpu_offload", "optimizer_offload_fraction", "fine_grained_activation_offloading",
            "offload_modules", "activation_offload_fraction",
        ),
        reads=_read_offload,
        writes=_write_offload,
    ),
)  # fmt: skip
