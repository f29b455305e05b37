"""Which framework a launch file is of, by its content, and the modules that read and write it."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml

from results.launchers import deepspeed, megatron_bridge, megatron_lm, nanotron, torchtitan
from results.launchers.job import Given, Imported, Job
from results.launchers.names import paths

__all__ = ["FRAMEWORKS", "flags_of", "read_launch_file", "write_launch_file"]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_BYTES = 1 << 20
_DEEPSPEED = re.compile(r"(^|\s)--deepspeed(_config)?(\s|=|$)|^\s*(\w+=\S+\s+)*deepspeed\s", re.MULTILINE)
_ASSIGNMENT = re.compile(r"^\s*\w+(\.\w+)+\s*=\s*\S", re.MULTILINE)
_FLAG = re.compile(r"(^|\s)--[a-z]", re.MULTILINE)

_WRITERS: dict[str, Callable[[Job], str]] = {
    "megatron-lm": megatron_lm.write,
    "megatron-bridge": megatron_bridge.write,
    "torchtitan": torchtitan.write,
    "deepspeed": deepspeed.write,
}
FRAMEWORKS = tuple(_WRITERS)
"""What a configuration can be written for."""


def write_launch_file(job: Job, framework: str) -> str:
    """The file's text; ValueError for what the framework cannot say and a note cannot excuse."""
    return _WRITERS[framework](job)


def flags_of(job: Job, framework: str) -> tuple[dict[str, str], list[str]]:
    """What the job says in a framework's own words, name by name, and notes for what it cannot say."""
    return {
        "megatron-lm": megatron_lm.told,
        "megatron-bridge": megatron_bridge.told,
        "torchtitan": torchtitan.told,
        "deepspeed": deepspeed.told,
        "nanotron": megatron_lm.told,
    }[framework](job)


def read_launch_file(path: Path, given: Given) -> Imported:
    """The job of a file; ValueError with the file, and its line where there is one, for what is none."""
    text = _text(path)
    source = str(path)
    stripped = text.lstrip("\ufeff \t\r\n")
    if stripped.startswith("{"):
        content = _json(text, source)
        _check_known(content, "deepspeed", source, "DeepSpeed")
        return deepspeed.read_json(content, text, source, given)
    if _is_toml(stripped):
        content = _toml(text, source)
        _check_known(content, "torchtitan", source, "TorchTitan")
        return torchtitan.read(content, text, source, given)
    if _ASSIGNMENT.search(text) and not _FLAG.search(_without_comments(text)):
        return megatron_bridge.read_python(text, source, given)
    if _FLAG.search(_without_comments(text)):
        is_deepspeed = _DEEPSPEED.search(_without_comments(text)) is not None
        reader = deepspeed.read_script if is_deepspeed else megatron_lm.read
        return reader(text, source, given)
    loaded = _yaml(text, source)
    if not isinstance(loaded, dict):
        raise ValueError(
            f"{path}: must be a launch file: a script or arguments of Megatron-LM, a recipe's YAML of Megatron-Bridge "
            "or NeMo, a TOML of TorchTitan, a JSON or script of DeepSpeed"
        )
    if {"workload", "strategy"} & loaded.keys():
        raise ValueError(f"{path}: is a configuration already; give it to search estimate, launch or export")
    if nanotron.is_nanotron(loaded):
        return nanotron.read(loaded, text, source, given)
    return megatron_bridge.read_yaml(loaded, text, source, given)


def _check_known(content: Mapping[str, object], name: str, source: str, framework: str) -> None:
    """ValueError where no key is one of the framework: the file is something else."""
    sections = {path.split(".")[0] for path in paths(name).costs}
    if not sections & content.keys():
        keys = ", ".join(map(str, list(content)[:5])) or "none"
        hint = "; a config.json of Hugging Face goes to --model" if "model_type" in content else ""
        raise ValueError(f"{source}: must have keys of {framework}, but has {keys}{hint}")


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot read: {error.strerror or error}") from error
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"{path}: a launch file must be at most {_MAX_BYTES} bytes, but this has {len(raw)}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ValueError(f"{path}: must be text in UTF-8, but it is binary; give a script, YAML, TOML or JSON")
    if not text.strip():
        raise ValueError(f"{path}: is empty; a launch file has at least the arguments of a job")
    return text


def _without_comments(text: str) -> str:
    return re.sub(r"(^|\s)#.*", "", text)


def _is_toml(text: str) -> bool:
    """A table header, or a bare `key = value`, before anything else but comments."""
    lines = [line.strip() for line in text.splitlines()]
    first = next((line for line in lines if line and not line.startswith("#")), "")
    return re.match(r"\[\[?[\w.\"' -]+\]\]?(\s*#.*)?$|[\w-]+\s*=\s", first) is not None


def _json(text: str, source: str) -> dict[str, object]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}:{error.lineno}: must be JSON: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"{source}: is nested too deep for a launch file") from None
    assert isinstance(content, dict), "it starts with a brace"
    return content


def _toml(text: str, source: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"line (\d+)", str(error))
        at = f":{found[1]}" if found else ""
        raise ValueError(f"{source}{at}: must be TOML: {re.sub(r' *[(]at .*', '', str(error))}") from None
    except RecursionError:
        raise ValueError(f"{source}: is nested too deep for a launch file") from None


def _yaml(text: str, source: str) -> object:
    try:
        return yaml.load(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        at = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise ValueError(f"{source}{at}: must be YAML: {' '.join(str(error.problem).split())}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{source}: must be YAML: {' '.join(str(error).split())[:120]}") from None
