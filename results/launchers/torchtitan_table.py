"""The table of TorchTitan: paths of its TOML and axes of a strategy, both ways.

FSDP2 shards everything or nothing, tensor parallelism comes with sequence parallelism, and a pipeline's chunks are
lists of modules.
"""

from __future__ import annotations

from results.launchers.settings import Settings, Value
from results.launchers.table import Cases, Custom, Flag, Inexpressible, Number, Row, Values, Words

__all__ = ["PRICED_AS", "SCHEDULES", "STRATEGY", "WITHOUT_WORDS"]

SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "breadth-first": "LoopedBFS",
    "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip
_ONE_CHUNK = frozenset({"1f1b", "gpipe"})

WITHOUT_WORDS = {
    "tp_chunks": ("4", "asynchronous tensor parallelism chooses its pieces itself"),
    "prefetch_blocks": (1, "FSDP2 prefetches the next block"),
    "bucket_bytes": (0, "FSDP2 reduces block by block"),
    "expert_bucket_bytes": (None, "FSDP2 reduces block by block"),
    "redundant_experts": (0, "experts have no copies (EPLB)"),
    "recompute_per_chunk": (None, "activation_checkpoint is one choice for all layers"),
    "offload_activations": (0, "activations stay on the chip"),
    "cuda_graph": ("none", "its jobs capture no graphs"),
    "shared_expert_overlap": (False, "shared experts run beside nothing"),
    "interleave_group": (0, "torch's schedules choose their groups"),
    "rank_order": ("tp-cp-dp-pp", "its mesh is pp, dp, cp, tp from the outside in"),
    "overlap_cp": (1, "the rotation of keys overlaps"),
    "overlap_pp": (0, "sends between stages do not overlap"),
    "overlap_dp": (1, "FSDP2 always overlaps"),
}
"""Axes without a setting: the value that TorchTitan has instead, and why."""

PRICED_AS = {
    "parallelism.context_parallel_load_balancer": ("headtail",),
    "training.mixed_precision_reduce": ("float32",),
    "parallelism.disable_loss_parallel": ("false",),
    "parallelism.expert_parallel_comm_backend": ("standard",),
    "optimizer.early_step_in_backward": ("false",),
    "training.dtype": ("float32",),
    "quantize.linear.float8.filter_fqns": ("['output']", "output"),
    "quantize.linear.mx.filter_fqns": ("['output']",),
    "parallelism.pipeline_parallel_schedule_csv": ("",),
}
_FUSED = ("fused_activation", "fused_norm", "fused_rope")
"""What torch.compile fuses of a model."""


def _read_sharding(given: Settings, so_far: Values) -> Values:
    """ZeRO-3 where anything is sharded. What is left of the ranks is sharded unless the file says how many."""
    replicas = given.whole("parallelism.data_parallel_replicate_degree") or 1
    shard = given.number("parallelism.data_parallel_shard_degree")
    policy = given.text("parallelism.fsdp_reshard_after_forward") or "default"
    if policy not in {"default", "always", "never"}:
        raise given.bad("parallelism.fsdp_reshard_after_forward", "must be default, always or never")
    if shard is not None and shard != int(shard):
        raise given.bad("parallelism.data_parallel_shard_degree", "must be a whole number, or -1")
    if shard == 1 and so_far["cp"] == 1:
        return {"zero_stage": 0, "reshard_after_forward": 1, "dp_replicate": 1}
    keeps = policy == "never" or (policy == "default" and so_far["pp"] != 1)
    return {"zero_stage": 3, "reshard_after_forward": int(not keeps), "dp_replicate": replicas}


def _write_sharding(values: Values) -> Values:
    dp, replicas, stage = values["dp"], values["dp_replicate"], values["zero_stage"]
    assert isinstance(dp, int)
    assert isinstance(replicas, int)
    if stage not in (0, 3):
        raise Inexpressible("zero_stage", "FSDP2 shards weights, gradients and states, or nothing")
    if stage == 0 and values["cp"] != 1:
        raise Inexpressible("zero_stage", "with context parallelism FSDP2 shards over its ranks")
    policy = "always" if values["reshard_after_forward"] else "never"
    return {
        "parallelism.data_parallel_replicate_degree": replicas if stage else dp,
        "parallelism.data_parallel_shard_degree": dp // replicas if stage else 1,
        "parallelism.fsdp_reshard_after_forward": policy,
    }


def _read_chunks(given: Settings, so_far: Values) -> Values:
    """Schedule and chunks: of the modules that are listed, else as TorchTitan divides layers."""
    word = given.text("parallelism.pipeline_parallel_schedule") or "1F1B"
    modules = given.take("parallelism.module_fqns_per_model_part")
    each = given.whole("parallelism.pipeline_parallel_layers_per_stage")
    first = given.whole("parallelism.pipeline_parallel_first_stage_less_layers", least=0)
    last = given.whole("parallelism.pipeline_parallel_last_stage_less_layers", least=0)
    pp = so_far["pp"]
    assert isinstance(pp, int)
    if pp == 1:
        return {"schedule": "1f1b", "vpp": 1}
    ours = next((mine for mine, theirs in SCHEDULES.items() if theirs.lower() == word.lower()), None)
    if ours is None:
        given.without_counterpart("parallelism.pipeline_parallel_schedule")
        given.note("schedule=1f1b", f"{word} has no counterpart here")
        ours = "1f1b"
    if isinstance(modules, list) and modules:
        counts: list[Value] = [
            sum(str(m).startswith("layers.") for m in part) for part in modules if isinstance(part, list)
        ]
        if len(counts) % pp:
            name = "parallelism.module_fqns_per_model_part"
            raise given.bad(name, f"must have a multiple of pp ({pp}) parts (it has {len(counts)})")
        return {"schedule": ours, "vpp": len(counts) // pp, "layout": counts}
    layers = so_far.get("num_layers")
    weights = (1 if first is None else first, 1 if last is None else last)
    effective = layers + sum(weights) if isinstance(layers, int) else None
    vpp = 1 if ours in _ONE_CHUNK else 2
    if each is not None and effective is not None:
        vpp = max(-(-effective // each) // pp, 1)
    elif each is not None:
        given.missing.append("chunks: layers per stage need the model's layers; give --model NAME")
    if effective is None:
        return {"schedule": ours, "vpp": vpp}
    return {"schedule": ours, "vpp": vpp, "layout": _divided(effective, pp * vpp, *weights)}


def _divided(effective: int, stages: int, first: int, last: int) -> list[Value]:
    """Layers per stage where embedding and head weigh as so many layers; the first stages take what is left over."""
    each, extra = divmod(effective, stages)
    counts = [each + (i < extra) for i in range(stages)]
    counts[0] -= first
    counts[-1] -= last
    return [*counts]


def _write_chunks(values: Values) -> Values:
    if values["pp"] == 1:
        return {}
    schedule, layers = str(values["schedule"]), values["layers"]
    if schedule not in SCHEDULES:
        raise Inexpressible("schedule", f"torch has {', '.join(SCHEDULES)}")
    assert isinstance(layers, list)
    parts: list[Value] = []
    at = 0
    for i, count in enumerate(layers):
        assert isinstance(count, int)
        part: list[Value] = ["tok_embeddings"] if i == 0 else []
        part += [f"layers.{n}" for n in range(at, at + count)]
        at += count
        parts.append(part + (["norm", "output"] if i == len(layers) - 1 else []))
    return {
        "parallelism.pipeline_parallel_schedule": SCHEDULES[schedule],
        "parallelism.module_fqns_per_model_part": parts,
    }


def _read_batch(given: Settings, so_far: Values) -> Values:
    """Micro-batch: the local batch, or of a pipeline what it cuts that into."""
    local = given.whole("training.local_batch_size")
    piece = given.whole("parallelism.pipeline_parallel_microbatch_size")
    if local is None:
        given.note("local_batch_size=8", "TorchTitan's default")
    local = local or 8
    if so_far["pp"] == 1:
        return {"micro_batch": local}
    dp, batch = so_far.get("dp"), given.number("training.global_batch_size")
    if isinstance(dp, int) and batch and batch > local * dp:
        given.note(
            f"pipelines of {batch / dp:g} sequences",
            f"the file runs {batch / (local * dp):g} pipelines of {local} in turn, with a bubble each; one is priced",
        )
    return {"micro_batch": piece or 1}


def _write_batch(values: Values) -> Values:
    micro, dp, batch = values["micro_batch"], values["dp"], values["global_batch"]
    assert isinstance(dp, int)
    assert isinstance(batch, int)
    if values["pp"] == 1:
        return {"training.local_batch_size": micro}
    return {
        "training.local_batch_size": batch // dp,
        "parallelism.pipeline_parallel_microbatch_size": micro,
    }


def _read_recompute(given: Settings, so_far: Values) -> Values:
    mode = given.text("activation_checkpoint.mode") or "selective"
    option = given.text("activation_checkpoint.selective_ac_option") or "2"
    if mode in {"none", "full"}:
        return {"recompute": mode, "recompute_layers": 0}
    layers, chunks = so_far.get("num_layers"), so_far["vpp"]
    pp = so_far["pp"]
    if mode == "selective" and option.isdecimal() and int(option) >= 1 and isinstance(layers, int):
        assert isinstance(pp, int)
        assert isinstance(chunks, int)
        if option == "1":
            return {"recompute": "full", "recompute_layers": 0}
        count = max(layers // (pp * chunks * int(option)), 1)
        given.note(f"recompute=block of {count} layers", f"one layer of {option} is recomputed, as many as that")
        return {"recompute": "block", "recompute_layers": count}
    given.without_counterpart("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option")
    given.note("recompute=none", f"activation checkpointing {mode} {option} has no counterpart here")
    return {"recompute": "none", "recompute_layers": 0}


def _write_recompute(values: Values) -> Values:
    kind = values["recompute"]
    if kind not in {"none", "full"}:
        raise Inexpressible("recompute", "activation_checkpoint.mode has none and full of ours")
    return {"activation_checkpoint.mode": kind}


def _read_fusion(given: Settings, so_far: Values) -> Values:
    """What torch.compile makes of the components that it is given; attention is a fused kernel anyway."""
    names = ["flash_attention"]
    parts = given.words("compile.components") or ["model", "loss"]
    if given.flag("compile.enable"):
        names += [*_FUSED] if "model" in parts else []
        names += ["fused_loss"] if "loss" in parts else []
    fusion: list[Value] = [*sorted(names)]
    return {"fusion": fusion}


def _write_fusion(values: Values) -> Values:
    fusion = values["fusion"]
    assert isinstance(fusion, list)
    of_model = [name for name in _FUSED if name in fusion]
    has_loss = "fused_loss" in fusion
    parts: list[Value] = [*(["model"] if of_model else []), *(["loss"] if has_loss else [])]
    mine = {"flash_attention", *(_FUSED if of_model else ()), *(["fused_loss"] if has_loss else [])}
    theirs: Values = {"compile.enable": bool(parts)} | ({"compile.components": parts} if parts else {})
    if mine != set(map(str, fusion)):
        raise Inexpressible("fusion", f"torch.compile makes it {', '.join(sorted(mine))}", theirs)
    return theirs


def _read_sequence(given: Settings, so_far: Values) -> Values:
    return {"sequence_parallel": so_far["tp"] != 1}


def _write_sequence(values: Values) -> Values:
    if values["tp"] != 1 and not values["sequence_parallel"]:
        raise Inexpressible("sequence_parallel", "tensor parallelism is sequence parallel there")
    return {}


def _read_overlap_ep(given: Settings, so_far: Values) -> Values:
    flag = given.flag("parallelism.pipeline_parallel_expert_parallel_overlap")
    return {"overlap_ep": int(so_far["schedule"] == "dualpipe-v" and flag is not False)}


def _write_overlap_ep(values: Values) -> Values:
    if values["schedule"] != "dualpipe-v":
        if values["overlap_ep"] and values["ep"] != 1:
            raise Inexpressible("overlap_ep", "only DualPipeV runs two micro-batches side by side")
        return {}
    return {"parallelism.pipeline_parallel_expert_parallel_overlap": values["overlap_ep"] == 1}


def _read_offload(given: Settings, so_far: Values) -> Values:
    on = int(bool(given.flag("training.enable_cpu_offload")))
    return dict.fromkeys(("offload_parameters", "offload_gradients", "offload_states"), on)


def _write_offload(values: Values) -> Values:
    shares = {values[f"offload_{part}"] for part in ("parameters", "gradients", "states")}
    if shares not in ({0}, {1}):
        raise Inexpressible(
            "offload_states", "training.enable_cpu_offload moves parameters, gradients and states whole"
        )
    return {"training.enable_cpu_offload": shares == {1}}


_CONVERTERS = ("model.converters", "quantize.linear.float8.recipe_name", "quantize.linear.mx.recipe_name",
               "training.mixed_precision_param")  # fmt: skip

STRATEGY: tuple[Row, ...] = (
    Number(key="tp", name="parallelism.tensor_parallel_degree"),
    Number(key="cp", name="parallelism.context_parallel_degree"),
    Number(key="pp", name="parallelism.pipeline_parallel_degree"),
    Number(key="ep", name="parallelism.expert_parallel_degree"),
    Number(key="etp", name="parallelism.expert_tensor_parallel_degree"),
    Custom(
        keys=("zero_stage", "reshard_after_forward", "dp_replicate"),
        names=(
            "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree",
            "parallelism.fsdp_reshard_after_forward",
        ),
        reads=_read_sharding,
        writes=_write_sharding,
    ),
    Custom(
        keys=("schedule", "vpp", "layout"),
        names=(
            "parallelism.pipeline_parallel_schedule", "parallelism.module_fqns_per_model_part",
            "parallelism.pipeline_parallel_layers_per_stage", "parallelism.pipeline_parallel_first_stage_less_layers",
            "parallelism.pipeline_parallel_last_stage_less_layers",
        ),
        reads=_read_chunks,
        writes=_write_chunks,
    ),
    Custom(
        keys=("micro_batch",),
        names=("training.local_batch_size", "parallelism.pipeline_parallel_microbatch_size"),
        reads=_read_batch,
        writes=_write_batch,
    ),
    Custom(keys=("sequence_parallel",), names=(), reads=_read_sequence, writes=_write_sequence),
    Words(
        key="context_parallel",
        name="parallelism.context_parallel_rotate_method",
        words={"all-gather": "allgather", "ring": "alltoall"},
        absent="all-gather",
    ),
    Cases(
        keys=("precision",),
        names=_CONVERTERS,
        cases=(
            (("bf16",), {"training.mixed_precision_param": "bfloat16"}),
            (("fp32",), {"training.mixed_precision_param": "float32"}),
            (("fp8",), {"model.converters": ["quantize.linear.float8"], "training.mixed_precision_param": "bfloat16",
                        "quantize.linear.float8.recipe_name": "tensorwise"}),
            (("mxfp8",), {"model.converters": ["quantize.linear.mx"], "training.mixed_precision_param": "bfloat16",
                          "quantize.linear.mx.recipe_name": "mxfp8_cublas"}),
        ),
        also=(
            (("bf16",), {}),
            (("fp8",), {"model.converters": ["quantize.linear.float8"]}),
            (("fp8",), {"model.converters": ["float8"]}),
            (("fp8",), {"model.converters": ["quantize.linear.float8"],
                        "quantize.linear.float8.recipe_name": "tensorwise"}),
            (("mxfp8",), {"model.converters": ["mx"]}),
            (("mxfp8",), {"model.converters": ["quantize.linear.mx"]}),
            (("mxfp8",), {"model.converters": ["quantize.linear.mx"],
                          "quantize.linear.mx.recipe_name": "mxfp8_cublas"}),
        ),
    ),
    Words(key="optimizer", name="optimizer.name", words={"adam": "AdamW"}, absent="adam", also={"Adam": "adam"}),
    Custom(
        keys=("recompute", "recompute_layers"),
        names=("activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"),
        reads=_read_recompute,
        writes=_write_recompute,
    ),
    Flag(key="overlap_tp", name="parallelism.enable_async_tensor_parallel", on=1, off=0),
    Custom(
        keys=("overlap_ep",),
        names=("parallelism.pipeline_parallel_expert_parallel_overlap",),
        reads=_read_overlap_ep,
        writes=_write_overlap_ep,
    ),
    Custom(
        keys=("fusion",),
        names=("compile.enable", "compile.components"),
        reads=_read_fusion,
        writes=_write_fusion,
    ),
    Custom(
        keys=("offload_parameters", "offload_gradients", "offload_states"),
        names=("training.enable_cpu_offload",),
        reads=_read_offload,
        writes=_write_offload,
    ),
)  # fmt: skip
