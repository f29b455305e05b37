"""Megatron-Bridge: overrides of a recipe as YAML in and out; NeMo's YAML and Python assignments in.

A recipe stands under such a file, so that what the file leaves out is the recipe's: it is taken as Megatron Core's
default, with a note. What is written is written out in full.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping

import yaml

from results.launchers.job import Given, Imported, Job
from results.launchers.megatron_lm import core_read, core_rest, settings_of
from results.launchers.names import paths, version_of
from results.launchers.paths import flattened, nested
from results.launchers.settings import Setting, Settings, Value
from results.launchers.table import Values
from results.launchers.world import read_world
from results.launchers.writing import Written, script_head

__all__ = ["read_python", "read_yaml", "told", "write"]

_PATHS: dict[str, tuple[str, ...]] = {
    "num_virtual_stages_per_pipeline_rank": ("model.virtual_pipeline_model_parallel_size",),
    "decoder_first_pipeline_num_layers": ("model.num_layers_in_first_pipeline_stage",),
    "decoder_last_pipeline_num_layers": ("model.num_layers_in_last_pipeline_stage",),
    "num_experts": ("model.num_moe_experts",),
    "swiglu": ("model.gated_linear_unit",),
    "bf16": ("mixed_precision.bf16", "model.bf16", "optimizer.bf16"),
    "fp16": ("mixed_precision.fp16", "model.fp16", "optimizer.fp16"),
    "fp8": ("mixed_precision.fp8", "model.fp8"),
    "fp8_recipe": ("mixed_precision.fp8_recipe", "model.fp8_recipe", "optimizer.fp8_recipe"),
    "fp4": ("mixed_precision.fp4", "model.fp4"),
    "fp4_recipe": ("mixed_precision.fp4_recipe", "model.fp4_recipe"),
    "use_distributed_optimizer": ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer"),
    "num_distributed_optimizer_instances": ("ddp.num_distributed_optimizer_instances",
                                            "dist.num_distributed_optimizer_instances"),
    "use_megatron_fsdp": ("ddp.use_megatron_fsdp", "dist.use_megatron_fsdp", "ddp.use_custom_fsdp"),
    "data_parallel_sharding_strategy": ("ddp.data_parallel_sharding_strategy",),
    "use_torch_fsdp2": ("dist.use_torch_fsdp2",),
    "use_tp_pp_dp_mapping": ("dist.use_tp_pp_dp_mapping",),
    "optimizer": ("optimizer.optimizer",),
    "use_precision_aware_optimizer": ("optimizer.use_precision_aware_optimizer",),
    "exp_avg_dtype": ("optimizer.exp_avg_dtype",),
    "exp_avg_sq_dtype": ("optimizer.exp_avg_sq_dtype",),
    "main_grads_dtype": ("optimizer.main_grads_dtype",),
    "main_params_dtype": ("optimizer.main_params_dtype",),
    "optimizer_cpu_offload": ("optimizer.optimizer_cpu_offload",),
    "optimizer_offload_fraction": ("optimizer.optimizer_offload_fraction",),
    "overlap_grad_reduce": ("ddp.overlap_grad_reduce", "comm_overlap.overlap_grad_reduce"),
    "overlap_param_gather": ("ddp.overlap_param_gather", "comm_overlap.overlap_param_gather",
                             "optimizer.overlap_param_gather"),
    "ddp_bucket_size": ("ddp.bucket_size", "comm_overlap.bucket_size"),
    "ddp_num_buckets": ("ddp.num_buckets",),
    "tp_comm_overlap": ("comm_overlap.tp_comm_overlap", "model.tp_comm_overlap"),
    "overlap_p2p_comm": ("comm_overlap.overlap_p2p_comm", "model.overlap_p2p_comm"),
    "overlap_moe_expert_parallel_comm": ("comm_overlap.overlap_moe_expert_parallel_comm",
                                         "model.overlap_moe_expert_parallel_comm"),
    "micro_batch_size": ("train.micro_batch_size",),
    "global_batch_size": ("train.global_batch_size",),
    "seq_length": ("dataset.seq_length", "model.seq_length", "dataset.sequence_length"),
    "bias_swiglu_fusion": ("model.bias_activation_fusion",),
    "cuda_graph_scope_deprecated": ("model.cuda_graph_scope",),
    "ckpt_format": ("checkpoint.ckpt_format",),
    "te_rng_tracker": ("rng.te_rng_tracker",),
    "tokenizer_type": ("tokenizer.tokenizer_type",),
    "vocab_size": ("model.vocab_size", "tokenizer.vocab_size"),
    "check_for_nan_in_loss_and_grad": ("rerun_state_machine.check_for_nan_in_loss",),
}  # fmt: skip
"""Paths of a name of Megatron Core: the first is written, all are read. The others stand under `model`."""

_INVERTED = {
    "untie_embeddings_and_output_weights": "model.share_embeddings_and_output_weights",
    "grad_reduce_in_bf16": "mixed_precision.grad_reduce_in_fp32",
}
_ALSO_INVERTED = {"ddp.grad_reduce_in_fp32": "grad_reduce_in_bf16"}
_NOT_WRITTEN = frozenset({
    "max_position_embeddings", "bias_gelu_fusion", "torch_fsdp2_reshard_after_forward", "group_query_attention",
    "te_rng_tracker",
})  # fmt: skip
"""Names of the parser alone: a configuration has no field for them."""

_OFF: Values = {
    "mixed_precision.bf16": False, "mixed_precision.fp16": False, "mixed_precision.fp8": None,
    "mixed_precision.fp4": None, "mixed_precision.grad_reduce_in_fp32": True, "ddp.use_distributed_optimizer": False,
    "ddp.use_megatron_fsdp": False, "dist.use_torch_fsdp2": False, "model.cuda_graph_impl": "none",
    "model.recompute_granularity": None, "model.recompute_method": None, "model.recompute_num_layers": None,
    "model.recompute_modules": None, "model.pipeline_model_parallel_layout": None,
    "model.virtual_pipeline_model_parallel_size": None, "optimizer.optimizer_cpu_offload": False,
    "optimizer.use_precision_aware_optimizer": False, "model.fine_grained_activation_offloading": False,
}  # fmt: skip
"""What is written where the job has none of it: the recipe under the file may."""

_PRECISIONS: dict[str, dict[str, Value]] = {
    "bf16_mixed": {"bf16": True},
    "fp16_mixed": {"fp16": True},
    "bf16_with_fp8_delayed_scaling_mixed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"},
    "bf16_with_fp8_current_scaling_mixed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "bf16_with_fp8_subchannel_scaling_mixed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"},
    "bf16_with_mxfp8_mixed": {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "bf16_with_nvfp4_mixed": {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
    "bf16-mixed": {"bf16": True},
    "bf16": {"bf16": True},
    "16-mixed": {"fp16": True},
    "16": {"fp16": True},
    "32": {},
}
"""Recipes by name: those that Megatron-Bridge registers, and the words of NeMo's trainer."""

_NEMO = (  # (a path of NeMo, its place in Megatron-Bridge); the first that fits
    (r"model\.config\.", "model."),
    (r"trainer\.strategy\.ddp\.", "ddp."),
    (r"trainer\.strategy\.", "model."),
    (r"trainer\.plugins\.precision$", "mixed_precision"),
    (r"trainer\.plugins\.", "mixed_precision."),
    (r"trainer\.precision$", "mixed_precision"),
    (r"optim\.config\.", "optimizer."),
    (r"data\.(micro|global)_batch_size$", r"train.\1_batch_size"),
    (r"model\.(micro|global)_batch_size$", r"train.\1_batch_size"),
    (r"data\.seq_length$", "dataset.seq_length"),
    (r"model\.(encoder_seq_length|data\.seq_length)$", "dataset.seq_length"),
    (r"model\.activations_checkpoint_", "model.recompute_"),
    (r"model\.ub_tp_comm_overlap$", "comm_overlap.tp_comm_overlap"),
)
_OF_RUN = re.compile(
    r"(^|\.)_(target|partial|call|factory)_$|^(trainer|exp_manager|log|resume|name|run|env_vars)(\.|$)"
)
_LAUNCH = re.compile(r"^# launch: (.*)$", re.MULTILINE)


def read_yaml(content: Mapping[str, object], text: str, source: str, given: Given) -> Imported:
    """The job of a YAML file of Megatron-Bridge or NeMo."""
    found = flattened(content, text, source)
    if not any(path.split(".")[0] in _SECTIONS for path in found):
        raise ValueError(
            f"{source}: must have sections of Megatron-Bridge or NeMo ({', '.join(sorted(_SECTIONS))}), but has "
            f"{', '.join(map(str, list(content)[:5]))}"
        )
    return _read(found, text, source, given, "nemo" if "trainer" in content else "megatron-bridge")


_SECTIONS = frozenset({"model", "train", "trainer", "ddp", "dataset", "data", "optimizer", "optim", "mixed_precision",
                       "comm_overlap", "dist"})  # fmt: skip


def read_python(text: str, source: str, given: Given) -> Imported:
    """The job of assignments to a configuration, such as `cfg.model.tensor_model_parallel_size = 4`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Python thinks of a user's style
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise ValueError(
            f"{source}{f':{line}' if line else ''}: must be Python: {getattr(error, 'msg', error)}"
        ) from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    recipes = [node.name for node in functions if _assigned(node, source)]
    if len(recipes) > 1:
        names = ", ".join(recipes[:4]) + (", ..." if len(recipes) > 4 else "")
        raise ValueError(f"{source}: must hold one recipe, but holds {len(recipes)} ({names}); keep one of them")
    return _read(_assigned(tree, source), text, source, given, "megatron-bridge")


def _assigned(tree: ast.AST, source: str) -> dict[str, Setting]:
    """Values by path below the configuration's own name, in the order of the file."""
    found: dict[str, Setting] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                spelling = ast.unparse(target)
                path = spelling.partition(".")[2]
                place = f"{source}:{node.lineno}"
                found[path] = Setting(value=_literal(node.value), spelling=spelling, place=place)
    return found


def _literal(node: ast.expr) -> Value:
    """A literal's value; of anything else its text."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return ast.unparse(node)
    if isinstance(value, list | tuple):
        return [item if isinstance(item, bool | int | float | str) else str(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _read(found: Mapping[str, Setting], text: str, source: str, given: Given, framework: str) -> Imported:
    by_path = {path: name for name, many in _PATHS.items() for path in many}
    by_path |= {path: name for name, path in _INVERTED.items()} | _ALSO_INVERTED
    inverted = {*_INVERTED.values(), *_ALSO_INVERTED}
    settings: dict[str, Setting] = {}
    world: dict[str, Setting] = {}
    for path, setting in found.items():
        place = _renamed(path)
        if path == "model":
            continue  # made by a call: --model names it
        if path in {"trainer.devices", "trainer.num_nodes", "trainer.strategy.devices", "trainer.strategy.num_nodes"}:
            world[path.rpartition(".")[2]] = setting
        elif place == "mixed_precision":
            settings |= _named_precision(setting, framework)
        elif place in inverted and isinstance(setting.value, bool):
            settings[by_path[place]] = _with(setting, not setting.value)
        elif place in by_path:
            settings.setdefault(by_path[place], setting)
        elif place.startswith("model.") and place.removeprefix("model.") in core_rest():
            settings.setdefault(place.removeprefix("model."), setting)
        else:
            settings[place] = setting
    if (groups := settings.get("num_query_groups")) is not None:
        settings["group_query_attention"] = _with(groups, True)  # which the parser alone has
    given_settings = Settings(settings, source)
    num_chips = given.num_chips or _world(given_settings, world, text)
    if not any(name in settings for name in ("bf16", "fp16", "fp8", "fp4")):
        settings["bf16"] = Setting(value=True, spelling="mixed_precision", place=source)
        given_settings = _again(given_settings, settings)
        given_settings.note("precision=bf16", "recipes train in bf16 unless the file says otherwise")
    given_settings.note("recipe", "what the file leaves to its recipe is taken as Megatron Core's default")
    if num_chips is None:
        given_settings.missing.append("GPUs: the file does not say how many it runs on; give --gpus N")
    listed = paths("megatron_bridge")

    def costs(name: str) -> bool | None:
        for path in (*_PATHS.get(name, ()), _INVERTED.get(name, ""), name, f"model.{name}"):
            if (known := listed.find(path)) is not None and path:
                return listed.costs[known]
        return False if _OF_RUN.search(name) else None

    return core_read(given_settings, framework, num_chips, given, unknown=(), costs=costs)


def _again(old: Settings, settings: Mapping[str, Setting]) -> Settings:
    new = Settings(settings, old.source)
    new.assumed, new.missing = old.assumed, old.missing
    return new


def _with(setting: Setting, value: Value) -> Setting:
    return Setting(value=value, spelling=setting.spelling, place=setting.place)


def _renamed(path: str) -> str:
    for pattern, to in _NEMO:
        changed, count = re.subn(rf"^{pattern}", to, path)
        if count:
            return changed
    return path


def _named_precision(setting: Setting, framework: str) -> dict[str, Setting]:
    """A recipe by its name, with or without the brackets of a call."""
    name = str(setting.value).removesuffix("()").rpartition(".")[2]
    if name not in _PRECISIONS:
        raise ValueError(
            f"{setting.place}: {setting.spelling} must be one of {', '.join(_PRECISIONS)}, but got {name!r}"
        )
    return {key: _with(setting, value) for key, value in _PRECISIONS[name].items()} or {"bf16": _with(setting, False)}


def _world(given: Settings, world: Mapping[str, Setting], text: str) -> int | None:
    """GPUs of NeMo's trainer, or of the launch line that export writes."""
    if "devices" in world:
        counts = Settings(world, given.source)
        nodes = counts.whole("num_nodes")
        if nodes is None:
            given.note("nodes=1", "trainer.num_nodes is absent")
        return (counts.whole("devices") or 1) * (nodes or 1)
    launch = _LAUNCH.search(text)
    return read_world(launch[1].split(), "").num_chips if launch else None


def _bridged(job: Job, *, lenient: bool = False) -> Written:
    """Settings by path."""
    out = settings_of(job, framework="Megatron-Bridge", lenient=lenient)
    if out.settings.get("torch_fsdp2_reshard_after_forward") is False:
        why = "torch's FSDP2 always gathers weights again for backward there"
        if not lenient:
            raise ValueError(f"{job.name}: Megatron-Bridge has no words for reshard_after_forward 0: {why}; "
                             "give --set strategy.reshard_after_forward=1")  # fmt: skip
        out.notes.append(f"reshard_after_forward 0 is not written: {why}")
    flat: Values = dict(_OFF)
    for name, value in out.settings.items():
        if value is None or name in _NOT_WRITTEN:
            continue
        if name in _INVERTED:
            flat[_INVERTED[name]] = not value
        else:
            flat[_PATHS.get(name, (f"model.{name}",))[0]] = value
    if flat.get("model.num_query_groups") is None:
        flat["model.num_query_groups"] = job.model["num_heads"]
    out.settings = dict(sorted(flat.items()))
    return out


def write(job: Job) -> str:
    """Overrides of a recipe, with the launch as a comment."""
    out = _bridged(job)
    head = script_head(job, "Megatron-Bridge", version_of("megatron_bridge"), out.notes)
    launch = f"# launch: torchrun --nproc_per_node {job.chips_per_node} --nnodes {job.num_nodes} RECIPE.py\n"
    body = yaml.safe_dump(nested(out.settings), sort_keys=False, default_flow_style=None, width=110)
    return head + launch + body


def told(job: Job) -> tuple[dict[str, str], list[str]]:
    """What the job says, path by path."""
    out = _bridged(job, lenient=True)
    return {path: str(value) for path, value in out.settings.items()}, out.notes
