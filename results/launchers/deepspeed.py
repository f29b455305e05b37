"""DeepSpeed: its JSON beside the arguments of Megatron-DeepSpeed, in; one script that holds both, out.

What the JSON and the arguments both say must agree. The pipeline engine takes ZeRO-0 and 1.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from results.launchers.command_line import launch_of, read_arguments
from results.launchers.deepspeed_table import ALWAYS_FUSED, PRICED_AS, STRATEGY, WITHOUT_WORDS, described, write_sizes
from results.launchers.job import Given, Imported, Job
from results.launchers.megatron_lm import EXCLUSIVE, cost_of, flags
from results.launchers.megatron_model import MODEL_NAMES, is_described, read_model
from results.launchers.names import arguments, paths, version_of
from results.launchers.paths import flattened, nested
from results.launchers.reading import (
    check_exclusive,
    data_parallel,
    finished,
    model_label,
    skip_as_priced,
    whole_batch,
)
from results.launchers.settings import Setting, Settings
from results.launchers.shell import Script
from results.launchers.table import Values, read_rows
from results.launchers.world import World, read_world
from results.launchers.writing import Written, compose, script_head

__all__ = ["ALWAYS_FUSED", "LISTS", "read_json", "read_script", "told", "write"]

LISTS = ("megatron_lm", "megatron_deepspeed")
_CONFIG = "deepspeed_config"
_NO_WORLD = World(None, "the file does not say how many GPUs it runs on")


def read_json(content: Mapping[str, object], text: str, source: str, given: Given) -> Imported:
    """The job of a JSON, with launch arguments of the command line or of a script beside it that names it."""
    beside = given.launch_arguments
    where = "--args"
    if beside is None:
        found = [
            p for p in sorted(Path(source).parent.glob("*.sh")) if Path(source).name in p.read_text("utf-8", "replace")
        ]
        if found:
            beside, where = found[0].read_text("utf-8", "replace"), str(found[0])
    settings = _of_json(content, text, source)
    if beside is None:
        return _job(settings, source, _NO_WORLD, given, (), has_arguments=False)
    arguments_there, world, unknown, notes, _ = _of_script(beside, where, given)
    return _job(settings | arguments_there, source, world, given, unknown, notes=notes)


def read_script(text: str, source: str, given: Given) -> Imported:
    """The job of a script; its JSON stands in it, or beside it."""
    found, world, unknown, notes, script = _of_script(text, source, given)
    name = found.pop(_CONFIG, None)
    missing: list[str] = []
    settings: dict[str, Setting] = {}
    if name is not None:
        path = str(name.value)
        beside = Path(source).parent / path
        if path in script.files:
            body, line = script.files[path]
            settings = _of_json(_parsed(body, source, line), body, source)
        elif beside.is_file():
            body = beside.read_text("utf-8", "replace")
            settings = _of_json(_parsed(body, str(beside), 1), body, str(beside))
        else:
            missing.append(f"{path}: is not beside the script; what it says of ZeRO, buckets and precision is not seen")
    return _job(settings | found, source, world, given, unknown, notes=notes, missing=tuple(missing))


def _parsed(body: str, source: str, line: int) -> Mapping[str, object]:
    try:
        content = json.loads(body)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}:{line + error.lineno - 1}: must be JSON: {error.msg}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{source}:{line}: must be a JSON object of DeepSpeed")
    return content


def _of_json(content: Mapping[str, object], text: str, source: str) -> dict[str, Setting]:
    """Settings by path; `auto` leaves a value to the arguments."""
    found = flattened(content, text, source)
    return {path: setting for path, setting in found.items() if setting.value != "auto"}


def _of_script(
    text: str, source: str, given: Given
) -> tuple[dict[str, Setting], World, tuple[str, ...], tuple[str, ...], Script]:
    known = arguments(*LISTS)
    script, command = launch_of(text, known, source, given.defined)
    found = read_arguments(command, known, source)
    world = read_world(found.before, text)
    return found.settings, world, found.unknown, found.repeated, script


def _job(
    given_settings: Mapping[str, Setting], source: str, world: World, given: Given, unknown: tuple[str, ...], *,
    has_arguments: bool = True, notes: tuple[str, ...] = (), missing: tuple[str, ...] = (),
) -> Imported:  # fmt: skip
    settings = Settings(described(given_settings), source)
    settings.assumed += notes
    settings.missing += missing
    check_exclusive(settings, (*EXCLUSIVE, ("bf16.enabled", "fp16.enabled"), ("bf16", "fp16.enabled")))
    _check_agreement(settings)
    if not has_arguments:
        settings.note("tp, pp, cp, ep=1, recompute=none", "launch arguments are not beside the file; give --args")
    model: Values | None = None
    if given.num_layers is None and is_described(settings):
        model = read_model(settings, model_label(source))
    elif given.num_layers is None:
        settings.missing.append("model: the file does not have the sizes of one; give --model NAME")
    if model is None:
        for name in MODEL_NAMES:
            settings.take(name)
    degrees = {
        "tp": settings.whole("tensor_model_parallel_size") or 1,
        "pp": settings.whole("pipeline_model_parallel_size") or 1,
        "cp": settings.whole("ds_sequence_parallel_size") or 1,
    }
    num_chips = given.num_chips or world.num_chips or _told_by_batch(settings, degrees)
    if num_chips is None:
        settings.missing.append(f"GPUs: {world.why}; give --gpus N")
    elif given.num_chips is None:
        settings.assumed += world.assumed
    dp = data_parallel(settings, num_chips, degrees)
    start: Values = {"num_layers": model["num_layers"] if model else given.num_layers, "dp": dp}
    strategy = read_rows(STRATEGY, settings, start)
    if degrees["pp"] != 1 and strategy["zero_stage"] in (2, 3):
        stage = strategy["zero_stage"]
        settings.missing.append(
            f"ZeRO-{stage} with pp {degrees['pp']}: DeepSpeed's pipeline engine refuses it; use ZeRO-1"
        )
    seq = settings.whole("seq_length")
    if seq is None:
        settings.missing.append("sequence length: the file has none; give --set workload.seq=N")
    batch = settings.whole("train_batch_size") or settings.whole("global_batch_size")
    steps = settings.whole("gradient_accumulation_steps")
    micro = strategy["micro_batch"]
    if batch is None and steps is not None and dp is not None and isinstance(micro, int):
        batch = micro * steps * dp
    batch = whole_batch(settings, batch, micro, dp)
    for name in ("train_batch_size", "global_batch_size", "max_position_embeddings", _CONFIG):
        settings.take(name)
    skip_as_priced(settings, PRICED_AS)
    of_arguments, of_json = cost_of(LISTS), paths("deepspeed")

    def costs(name: str) -> bool | None:
        if (known := of_json.find(name)) is not None:
            return of_json.costs[known]
        return of_arguments(name)

    return finished(
        settings,
        framework="deepspeed",
        model=model,
        num_chips=num_chips,
        seq=seq,
        global_batch=batch,
        strategy={axis: value for axis, value in strategy.items() if axis not in {"num_layers", "dp"}},
        unknown=unknown,
        costs=costs,
    )


def _check_agreement(settings: Settings) -> None:
    """ValueError where JSON and arguments say different things: DeepSpeed would stop at it, or use one of them."""
    for path, name in (
        ("train_batch_size", "global_batch_size"),
        ("train_micro_batch_size_per_gpu", "micro_batch_size"),
        ("zero_optimization.stage", "zero_stage"),
    ):
        least = 0 if "stage" in name else 1
        one, other = settings.whole(path, least=least), settings.whole(name, least=least)
        if one is not None and other is not None and one != other:
            raise ValueError(
                f"{settings.place(path)}: {path} ({one}) must be {settings.spelled(name)} ({other}); correct one"
            )


def _told_by_batch(settings: Settings, degrees: Mapping[str, int]) -> int | None:
    """GPUs of what a batch is made of, where the JSON has all three of its numbers."""
    batch, micro = settings.whole("train_batch_size"), settings.whole("train_micro_batch_size_per_gpu")
    steps = settings.whole("gradient_accumulation_steps")
    if batch is None or micro is None or steps is None:
        return None
    if batch % (micro * steps):
        rule = f"must be train_micro_batch_size_per_gpu ({micro}) * gradient_accumulation_steps ({steps}) * ranks"
        raise settings.bad("train_batch_size", rule)
    return batch // (micro * steps) * degrees["tp"] * degrees["pp"] * degrees["cp"]


def _settings_of(job: Job, *, lenient: bool = False) -> Written:
    out = compose(job, STRATEGY, WITHOUT_WORDS, lambda: write_sizes(job.model), framework="DeepSpeed", lenient=lenient)
    out.settings |= {"train_batch_size": job.global_batch, "global_batch_size": job.global_batch}
    out.settings |= {"seq_length": job.seq, "micro_batch_size": job.strategy["micro_batch"]}
    steps = job.global_batch // (job.dp * job.size("micro_batch"))
    out.settings |= {"gradient_accumulation_steps": max(steps, 1)}
    if job.model["moe"] is None:
        for name in ("moe_expert_parallel_size", "enable_expert_tensor_parallelism"):
            out.settings.pop(name, None)
    if out.settings.get("max_position_embeddings") is None:
        out.settings["max_position_embeddings"] = job.seq
    return out


def _split(out: Written) -> tuple[Values, Values]:
    """What goes into the JSON, and what onto the command line."""
    listed = paths("deepspeed")
    of_json = {name: value for name, value in out.settings.items() if listed.find(name) and "." in name}
    of_json |= {
        name: out.settings[name]
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        if name in out.settings
    }
    rest = {name: value for name, value in out.settings.items() if name not in of_json}
    return {name: value for name, value in of_json.items() if value is not None}, rest


def write(job: Job) -> str:
    """A script with the JSON as a here-document, and the launch."""
    out = _settings_of(job)
    of_json, rest = _split(out)
    beside: Values = {"deepspeed": True, "deepspeed_config": "ds_config.json"}
    beside |= {"no_pipeline_parallel": True} if job.size("pp") == 1 else {}
    lines = [" ".join(map(shlex.quote, words)) for words in flags(rest | beside, *LISTS)]
    each, nodes = job.chips_per_node, job.num_nodes
    head = script_head(job, "DeepSpeed", f"{version_of('deepspeed')}, {version_of('megatron_deepspeed')}", out.notes)
    config = json.dumps(nested(of_json), indent=1)
    launch = f"deepspeed --num_gpus {each} --num_nodes {nodes} pretrain_gpt.py"
    return f"{head}\ncat > ds_config.json <<'JSON'\n{config}\nJSON\n\n" + " \\\n  ".join([launch, *lines]) + "\n"


def told(job: Job) -> tuple[dict[str, str], list[str]]:
    """What the job says: paths of the JSON, and arguments."""
    out = _settings_of(job, lenient=True)
    of_json, rest = _split(out)
    named = {words[0]: " ".join(words[1:]) or "on" for words in flags(rest, *LISTS)}
    return {path: str(value) for path, value in of_json.items()} | named, out.notes
