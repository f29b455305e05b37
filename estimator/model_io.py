"""Model files: from a name or a path, or a mapping, to a ModelSpec. Refuses what it does not know.

Our own files hold ModelSpec's fields, `mla` and `moe` nested; `source` says where the numbers come from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from estimator.graph_file import is_graph_text, read_graph
from estimator.mapping import given, nearest, shown, told_kind
from estimator.model import ModelSpec
from estimator.ops_file import is_ops_text

__all__ = ["load_model", "model_from_mapping", "model_names"]

YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
NOT_FIELDS = frozenset({"source"})  # allowed in a model file, not part of the spec
HF_KEYS = frozenset({"architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "text_config"})
"""Keys that a Hugging Face config.json has, with or without the model_type that it needs, and no model file of ours."""
FORMS_OF_MODELS = "give a model file (spaces/models), a Hugging Face config.json or a captured graph"


def model_names(folders: Sequence[Path]) -> list[str]:
    """Names that `load_model` finds in these folders."""
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def load_model(reference: str | Path, folders: Sequence[Path] = ()) -> ModelSpec:
    """The model of that name in the first folder that has it, or else at that path.

    A path is a model file of ours, a Hugging Face config.json (it has a `model_type`), a folder with one, or a captured
    graph.
    A name goes before a path; write `./name` for the path.
    """
    for folder in folders:
        if str(reference) in model_names([folder]):
            return _read(folder / f"{reference}.yaml")
    path = Path(reference)
    if os.path.isdir(path):  # not path.is_dir(), which raises on a name too long
        return ModelSpec.from_hf_config(path)
    if os.path.isfile(path):
        return _read(path)
    names = model_names(folders)
    hint = nearest(str(reference)[:200], names)
    raise ValueError(f"model {shown(str(reference))} is neither a known name nor a file{hint}")


def _read(path: Path) -> ModelSpec:
    try:
        text = path.read_text(encoding="utf-8")
        if is_graph_text(text):
            return read_graph(path, text)
        if is_ops_text(text):
            raise ValueError(f"{path}: holds the ops of one layout, which are no model; name the model that it is of")
        content = yaml.load(text, Loader=YAML_LOADER)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: must be YAML or JSON text ({reason}); {FORMS_OF_MODELS}") from error
    if isinstance(content, dict) and ("model_type" in content or not HF_KEYS.isdisjoint(content)):
        return ModelSpec.from_hf_config(path)
    if not isinstance(content, dict):
        held = told_kind(content) if text.strip() else "nothing: the file is empty"
        raise ValueError(f"{path}: must hold the fields of a model, but got {held}; {FORMS_OF_MODELS}")
    if "format" in content:  # a graph's, of which the first words did not tell
        law = "a file with a format is a captured graph (trainspace-graph) or its ops (trainspace-ops)"
        raise ValueError(f"{path}: {law}, but {given(content, 'format')}; capture or export it again")
    try:
        return model_from_mapping(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def model_from_mapping(mapping: Mapping[str, Any]) -> ModelSpec:
    """A ModelSpec from its fields, every key and type checked.

    >>> model_from_mapping({"name": "x", "num_layer": 2})
    Traceback (most recent call last):
    ValueError: num_layer is not a key of a model; did you mean 'num_layers'?
    """
    return ModelSpec.from_mapping({k: v for k, v in mapping.items() if k not in NOT_FIELDS})
