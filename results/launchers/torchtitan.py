"""TorchTitan: the TOML of a job, in and out. Its models are flavours by name: sizes do not stand in the file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from results.launchers.job import Given, Imported, Job
from results.launchers.names import paths, version_of
from results.launchers.paths import flattened
from results.launchers.reading import data_parallel, finished, skip_as_priced, whole_batch
from results.launchers.settings import Setting, Settings
from results.launchers.table import Inexpressible, Values, read_rows
from results.launchers.torchtitan_table import PRICED_AS, STRATEGY, WITHOUT_WORDS
from results.launchers.world import read_world
from results.launchers.writing import Written, compose, script_head

__all__ = ["read", "told", "write"]

FLAVOURS = {
    "llama3_8b": ("llama3", "8B"),
    "llama3_70b": ("llama3", "70B"),
    "llama3_405b": ("llama3", "405B"),
    "deepseek_v3": ("deepseek_v3", "671B"),
    "qwen3_32b": ("qwen3", "32B"),
    "qwen3_30b_a3b": ("qwen3", "30B-A3B"),
    "qwen3_235b_a22b": ("qwen3", "235B-A22B"),
    "llama4_scout": ("llama4", "17bx16e"),
    "llama4_maverick": ("llama4", "17bx128e"),
    "gpt_oss_20b": ("gpt_oss", "20b"),
    "gpt_oss_120b": ("gpt_oss", "120b"),
}
"""Models shipped here, by TorchTitan's name and flavour."""

_FORMER = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_": "parallelism.data_parallel_",
    "experimental.pipeline_parallel_": "parallelism.pipeline_parallel_",
    "experimental.context_parallel_": "parallelism.context_parallel_",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "float8.": "quantize.linear.float8.",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
}
"""Starts of paths in files of former versions, and what they are now."""

_LAUNCH = re.compile(r"^# launch: (.*)$", re.MULTILINE)


def read(content: Mapping[str, object], text: str, source: str, given: Given) -> Imported:
    """The job of a TOML file."""
    settings = Settings(_of_today(flattened(content, text, source)), source)
    model = _flavour(settings, given)
    degrees = {
        axis: settings.whole(f"parallelism.{word}_parallel_degree") or 1
        for axis, word in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"))
    }
    num_chips = given.num_chips or _world(settings, text, degrees)
    dp = data_parallel(settings, num_chips, degrees)
    layers = given.num_layers or (given.layers_of.get(model) if model else None)
    strategy = read_rows(STRATEGY, settings, {"num_layers": layers, "dp": dp})
    strategy |= {"overlap_dp": int(strategy["zero_stage"] == 3), "bucket_bytes": 0}
    batch = settings.number("training.global_batch_size")
    local = settings.whole("training.local_batch_size") or 8
    whole = whole_batch(settings, int(batch) if batch is not None and batch > 0 else None, local, dp)
    seq = settings.whole("training.seq_len")
    if seq is None:
        settings.note("seq=2048", "TorchTitan's default")
    skip_as_priced(settings, PRICED_AS)
    listed = paths("torchtitan")
    return finished(
        settings,
        framework="torchtitan",
        model=model,
        num_chips=num_chips,
        seq=seq or 2048,
        global_batch=whole,
        strategy={axis: value for axis, value in strategy.items() if axis not in {"num_layers", "dp"}},
        unknown=(),
        costs=lambda path: None if (known := listed.find(path)) is None else listed.costs[known],
    )


def _of_today(given: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings with the names that older files use."""
    found: dict[str, Setting] = {}
    for path, setting in given.items():
        changed = next((to + path.removeprefix(old) for old, to in _FORMER.items() if path.startswith(old)), path)
        found[changed] = setting
    return found


def _flavour(given: Settings, on_command_line: Given) -> str | None:
    name, flavour = given.text("model.name"), given.text("model.flavor")
    found = next((ours for ours, theirs in FLAVOURS.items() if theirs == (name, flavour)), None)
    if on_command_line.num_layers is None and found is None:
        known = ", ".join(f"{n} {f}" for n, f in FLAVOURS.values())
        told = f"{name} {flavour}" if name or flavour else "none"
        given.missing.append(f"model: {told} is not among the flavours known here ({known}); give --model NAME")
    return found


def _world(given: Settings, text: str, degrees: Mapping[str, int]) -> int | None:
    """GPUs: the product of the degrees where the file has them all, else of the launch line."""
    shard = given.number("parallelism.data_parallel_shard_degree")
    replicas = given.whole("parallelism.data_parallel_replicate_degree") or 1
    if shard is not None and shard >= 1:
        return int(shard) * replicas * degrees["tp"] * degrees["cp"] * degrees["pp"]
    if (launch := _LAUNCH.search(text)) is not None:
        return read_world(launch[1].split(), "").num_chips
    given.missing.append("GPUs: data_parallel_shard_degree -1 takes what there is; give --gpus N")
    return None


def _settings_of(job: Job, *, lenient: bool = False) -> Written:
    def model() -> Values:
        if job.model_name not in FLAVOURS:
            raise Inexpressible("model", f"its flavours are those of {', '.join(FLAVOURS)}")
        name, flavour = FLAVOURS[job.model_name]
        return {"model.name": name, "model.flavor": flavour}

    out = compose(job, STRATEGY, WITHOUT_WORDS, model, framework="TorchTitan", lenient=lenient)
    out.settings |= {"training.seq_len": job.seq, "training.global_batch_size": job.global_batch}
    if job.model["moe"] is None:
        out.settings.pop("parallelism.expert_parallel_degree", None)
        out.settings.pop("parallelism.expert_tensor_parallel_degree", None)
    return out


def write(job: Job) -> str:
    """The job's TOML, with the launch as a comment."""
    out = _settings_of(job)
    sections: dict[str, list[str]] = {}
    for path, value in out.settings.items():
        section, _, key = path.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    each, nodes = job.chips_per_node, job.num_nodes
    launch = f"torchrun --nproc_per_node {each} --nnodes {nodes} -m torchtitan.train --job.config_file THIS.toml"
    head = script_head(job, "TorchTitan", version_of("torchtitan"), out.notes) + f"# launch: {launch}\n"
    body = "".join(
        f"\n[{section}]\n" + "".join(f"{line}\n" for line in lines) for section, lines in sorted(sections.items())
    )
    return head + body


def told(job: Job) -> tuple[dict[str, str], list[str]]:
    """What the job says, path by path."""
    out = _settings_of(job, lenient=True)
    return {path: str(value) for path, value in out.settings.items()}, out.notes
