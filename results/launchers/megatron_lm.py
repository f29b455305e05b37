"""Megatron-LM: a shell script, or a bare list of arguments, in; a script with torchrun out."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from functools import lru_cache

from results.launchers.command_line import launch_of, read_arguments, written
from results.launchers.job import Given, Imported, Job
from results.launchers.megatron import PRICED_AS, STRATEGY, WITHOUT_WORDS
from results.launchers.megatron_model import MODEL_NAMES, is_described, read_model, write_model
from results.launchers.names import Argument, arguments, version_of
from results.launchers.reading import (
    check_exclusive,
    data_parallel,
    finished,
    model_label,
    skip_as_priced,
    whole_batch,
)
from results.launchers.settings import Settings, Value
from results.launchers.table import Values, read_rows
from results.launchers.world import read_world
from results.launchers.writing import Written, compose, script_head

__all__ = ["EXCLUSIVE", "LISTS", "core_read", "core_rest", "cost_of", "flags", "read", "settings_of", "told", "write"]

LISTS = ("megatron_lm",)

EXCLUSIVE = (
    ("bf16", "fp16"),
    ("fp8", "fp4"),
    ("swiglu", "squared_relu", "quick_geglu"),
    ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout"),
    ("use_megatron_fsdp", "use_torch_fsdp2"),
    ("ddp_bucket_size", "ddp_num_buckets"),
)
_BESIDE: dict[str, Values] = {  # what the parser wants beside an argument that we write
    "use_megatron_fsdp": {"ckpt_format": "fsdp_dtensor"},
    "cuda_graph_impl": {"te_rng_tracker": True},
}


def read(text: str, source: str, given: Given) -> Imported:
    """The job of a script."""
    known = arguments(*LISTS)
    _, command = launch_of(text, known, source, given.defined)
    found = read_arguments(command, known, source)
    world = read_world(found.before, text)
    settings = Settings(found.settings, source)
    settings.assumed += found.repeated
    for name in found.open_words:
        rule = "is not determined by the script, and may hold arguments"
        settings.missing.append(f"${name} {rule}; give --define {name}=VALUE")
    if given.num_chips is None:
        settings.assumed += world.assumed
        if world.why:
            settings.missing.append(f"GPUs: {world.why}; give --gpus N")
    check_exclusive(settings, EXCLUSIVE)
    return core_read(
        settings, "megatron-lm", given.num_chips or world.num_chips, given,
        unknown=(*found.unknown, *(f"${name}" for name in found.open_words)), costs=cost_of(LISTS),
    )  # fmt: skip


def core_read(
    settings: Settings, framework: str, num_chips: int | None, given: Given, *, unknown: tuple[str, ...],
    costs: Callable[[str], bool | None],
) -> Imported:  # fmt: skip
    """A job from settings in the names of Megatron Core."""
    model: Values | None = None
    if given.num_layers is None and is_described(settings):
        model = read_model(settings, model_label(settings.source))
    elif given.num_layers is None:
        settings.missing.append("model: the file does not have the sizes of one; give --model NAME")
    for name in MODEL_NAMES:
        if given.num_layers is not None or model is None:
            settings.take(name)
    if "micro_batch_size" not in settings:
        settings.note("micro_batch=1", "the file has none")
    start: Values = {"num_layers": model["num_layers"] if model else given.num_layers}
    degrees = {axis: settings.whole(name) or 1 for axis, name in _DEGREES.items()}
    dp = data_parallel(settings, num_chips, degrees)
    strategy = read_rows(STRATEGY, settings, start | {"dp": dp})
    seq = settings.whole("seq_length")
    if seq is None:
        settings.missing.append("sequence length: the file has none; give --set workload.seq=N")
    batch = whole_batch(settings, settings.whole("global_batch_size"), strategy["micro_batch"], dp)
    settings.take("max_position_embeddings")
    skip_as_priced(settings, PRICED_AS)
    return finished(
        settings,
        framework=framework,
        model=model,
        num_chips=num_chips,
        seq=seq,
        global_batch=batch,
        strategy={axis: value for axis, value in strategy.items() if axis not in {"num_layers", "dp"}},
        unknown=unknown,
        costs=costs,
    )


_DEGREES = {
    "tp": "tensor_model_parallel_size", "cp": "context_parallel_size", "pp": "pipeline_model_parallel_size",
}  # fmt: skip


def cost_of(lists: tuple[str, ...]) -> Callable[[str], bool | None]:
    """Whether a name of the parser may change time or memory; None for a name that it does not have."""
    return {argument.dest: argument.costs for argument in arguments(*lists).values()}.get


@lru_cache(maxsize=1)
def core_rest() -> frozenset[str]:
    """Names of Megatron Core that the table or the model reads."""
    return frozenset({*MODEL_NAMES, *PRICED_AS, *(name for row in STRATEGY for name in row.names)})


def settings_of(job: Job, *, framework: str = "Megatron-LM", lenient: bool = False) -> Written:
    """What the job says in the names of Megatron Core; ValueError, or notes where lenient, for what has no words."""
    model = lambda: write_model(job.model, chips_per_node=job.chips_per_node, ep=job.size("ep"))  # noqa: E731
    out = compose(job, STRATEGY, WITHOUT_WORDS, model, framework=framework, lenient=lenient)
    out.settings |= {"seq_length": job.seq, "global_batch_size": job.global_batch}
    out.settings.setdefault("max_position_embeddings", job.seq)
    if out.settings["max_position_embeddings"] is None:
        out.settings["max_position_embeddings"] = job.seq
    if job.model["moe"] is None:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            out.settings.pop(name, None)
    for name, beside in _BESIDE.items():
        if out.settings.get(name):
            out.settings |= beside
    if out.settings.get("cuda_graph_impl") == "full_iteration":
        out.settings["check_for_nan_in_loss_and_grad"] = False
    return out


def write(job: Job) -> str:
    """A script that launches the job."""
    out = settings_of(job)
    lines = [" ".join(map(shlex.quote, words)) for words in flags(out.settings)]
    one = "CUDA_DEVICE_MAX_CONNECTIONS" if not out.settings.get("use_megatron_fsdp") else ""
    head = script_head(job, "Megatron-LM", version_of("megatron_lm"), out.notes)
    export = f"export {one}=1  # tensor and context parallelism overlap only so\n\n" if one else "\n"
    launch = f"torchrun --nproc_per_node {job.chips_per_node} --nnodes {job.num_nodes} pretrain_gpt.py"
    return head + export + " \\\n  ".join([launch, *lines]) + "\n"


def told(job: Job) -> tuple[dict[str, str], list[str]]:
    """What the job says, argument by argument."""
    out = settings_of(job, lenient=True)
    return {words[0]: " ".join(words[1:]) or "on" for words in flags(out.settings)}, out.notes


def flags(settings: Mapping[str, Value], *lists: str) -> list[list[str]]:
    """Settings as arguments, in the order in which they were made; what the parser does unasked is left out."""
    by_dest: dict[str, Argument] = {}
    for argument in arguments(*(lists or LISTS)).values():
        by_dest.setdefault(argument.dest, argument)
    words = [
        written(by_dest[name], value)
        for name, value in settings.items()
        if value is not None and _FILLED.get(name) != value
    ]
    return [said for said in words if said]


_FILLED: dict[str, Value] = {
    "context_parallel_size": 1, "expert_model_parallel_size": 1, "num_distributed_optimizer_instances": 1,
    "cp_comm_type": "p2p", "optimizer": "adam", "make_vocab_size_divisible_by": 128,
}  # fmt: skip
"""What the parser takes where an argument is left out, of those that are left out where they say no more."""
