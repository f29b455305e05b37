"""Model files: from a name or a path, or a mapping, to a ModelSpec. Refuses what it does not know.

Our own files hold ModelSpec's fields, `mla` and `moe` nested; `source` says where the numbers come from.
"""

from __future__ import annotations

import os
import reprlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from estimator.model import MLASpec, ModelSpec, MoESpec

__all__ = ["load_model", "model_from_mapping", "model_names"]

T = TypeVar("T")
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 80, 80, 80
NOT_FIELDS = frozenset({"source"})  # allowed in a model file, not part of the spec


def model_names(folders: Sequence[Path]) -> list[str]:
    """Names that `load_model` finds in these folders."""
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def load_model(reference: str | Path, folders: Sequence[Path] = ()) -> ModelSpec:
    """The model of that name in the first folder that has it, or else at that path.

    A path is a model file of ours, a Hugging Face config.json (it has a `model_type`), or a folder with a config.json.
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
    hint = _nearest(str(reference)[:200], names)
    raise ValueError(f"model {_shown(str(reference))} is neither a known name nor a file{hint}")


def _read(path: Path) -> ModelSpec:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=YAML_LOADER)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: must be YAML or JSON text ({reason})") from error
    if isinstance(content, dict) and "model_type" in content:
        return ModelSpec.from_hf_config(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold the fields of a model, but got {type(content).__name__}")
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
    return _build(ModelSpec, {k: v for k, v in mapping.items() if k not in NOT_FIELDS}, "")


def _build(cls: type[T], mapping: Mapping[str, Any], prefix: str) -> T:
    known = {f.name: f for f in _fields(cls)}
    for key in mapping:
        if key not in known:
            raise ValueError(f"{prefix}{key} is not a key of a model{_nearest(str(key), sorted(known))}")
    missing = [n for n, f in known.items() if f.default is MISSING and n not in mapping]
    if missing:
        raise ValueError(f"{prefix}{missing[0]} is required, but is absent (absent in all: {missing}); add it")
    hints = get_type_hints(cls)
    values: dict[str, Any] = {key: _convert(prefix + key, value, hints[key]) for key, value in mapping.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error


def _convert(key: str, value: object, hint: type[Any]) -> object:
    """`value` as the type `hint`, or an error that names `key`."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arm for arm in get_args(hint) if arm is not type(None))
        return None if value is None else _convert(key, value, hint)
    if hint in (MLASpec, MoESpec):
        if isinstance(value, Mapping):
            return _build(hint, value, f"{key}.")
        names = [f.name for f in _fields(hint)]
        raise ValueError(f"{key} must hold fields of its own, but got {_shown(value)}; fields: {names}")
    if issubclass(hint, Enum):
        accepted = [member.value for member in hint]
        if value in accepted:
            return hint(value)
        raise ValueError(f"{key} must be one of {accepted}, but got {_shown(value)}")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # exact: true is not the integer 1
        raise ValueError(f"{key} must be {TYPE_NAMES[hint]}, but got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """`repr`, cut: an alias may stand for a thousand million values."""
    return _SHORT.repr(value)


TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _fields(cls: type[Any]) -> tuple[Field[Any], ...]:
    return fields(cls)


def _nearest(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; have {list(known)}"
