"""Frozen specs as plain data and back, field by field. The form in which a run stores what it was asked."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from estimator.captured import CapturedModel
from estimator.graph_file import graph_text
from search.yaml_lines import Plain, shown

__all__ = ["from_plain", "plain"]

T = TypeVar("T")
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def plain(value: object) -> Plain:
    """A dataclass (or what it holds): enums by value, tuples as lists. A captured model is the text of its graph."""
    if isinstance(value, CapturedModel):
        return {"graph": graph_text(value)}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    assert value is None or isinstance(value, bool | int | float | str), value
    return value


def from_plain(cls: type[T], value: Plain, where: str = "") -> T:
    """The dataclass that `plain` wrote; ValueError names the key that is wrong."""
    if not isinstance(value, dict):
        raise ValueError(f"{where or cls.__name__} must be a mapping, but got {shown(value)}; give its fields")
    dot = f"{where}." if where else ""
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # T is a dataclass
    for name in value:
        if name not in known:
            raise ValueError(f"{dot}{name} is not a field of {cls.__name__}; have {', '.join(known)}")
    for name, f in known.items():
        if name not in value and f.default is MISSING and f.default_factory is MISSING:
            raise ValueError(f"{dot}{name} is required, but absent; add it")
    hints = get_type_hints(cls)
    return cls(**{name: _value(hints[name], item, f"{dot}{name}") for name, item in value.items()})


def _value(hint: Any, value: Plain, where: str) -> object:  # noqa: ANN401  # a type hint has no type of its own
    arms = get_args(hint)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (arm for arm in arms if arm is not type(None))
        return None if value is None else _value(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, but got {shown(value)}; write [a, b]")
        return tuple(_value(arms[0], item, f"{where}.{i}") for i, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be a mapping, but got {shown(value)}; write KEY: VALUE lines")
        return {_key(arms[0], k, f"{where}.{k}"): _value(arms[1], v, f"{where}.{k}") for k, v in value.items()}
    if is_dataclass(hint):
        return from_plain(hint, value, where)  # type: ignore[arg-type]  # a class, as hints hold no instances
    return _scalar(hint, value, where)


def _key(hint: Any, key: str, where: str) -> object:  # noqa: ANN401  # a type hint has no type of its own
    """A mapping's key, which `plain` wrote as text."""
    return _value(hint, int(key) if hint is int and key.isdecimal() else key, where)


def _scalar(kind: type, value: Plain, where: str) -> object:
    if issubclass(kind, Enum):
        accepted = [item.value for item in kind]
        if value not in accepted:
            raise ValueError(f"{where} must be one of {accepted}, but got {shown(value)}")
        return kind(value)
    whole = isinstance(value, int) and not isinstance(value, bool)
    if type(value) is kind or (kind is float and whole):
        return value
    raise ValueError(f"{where} must be {_NAMES[kind]}, but got {shown(value)}")
