"""From plain mappings (YAML, JSON) to frozen specs, every key and type checked. Knows no spec by name.

A value that is already what its field wants passes, so that a caller may convert what has a form of its own.
"""

from __future__ import annotations

import reprlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["from_mapping", "given", "nearest", "shown", "told_kind"]

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 80, 80, 80
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
FORMS = TYPE_NAMES | {type(None): "null", list: "a list", dict: "a mapping"}  # of what a YAML or JSON file holds


def from_mapping(cls: type[T], mapping: Mapping[str, Any], prefix: str = "") -> T:
    """The spec whose fields `mapping` holds; ValueError names the key, with `prefix` before it."""
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]  # T is a dataclass
    for key in mapping:
        if key not in known:
            raise ValueError(f"{prefix}{key} is not a key of a model{nearest(str(key), sorted(known))}")
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
    if get_origin(hint) is tuple:
        assert isinstance(value, tuple), f"{key} has a form of its own"
        return value
    if isinstance(value, hint) and (is_dataclass(hint) or issubclass(hint, Enum)):
        return value
    if is_dataclass(hint):
        if isinstance(value, Mapping):
            return from_mapping(hint, value, f"{key}.")
        names = [f.name for f in fields(hint)]
        raise ValueError(f"{key} must hold fields of its own, but got {shown(value)}; fields: {names}")
    if issubclass(hint, Enum):
        accepted = [member.value for member in hint]
        if value in accepted:
            return hint(value)
        raise ValueError(f"{key} must be one of {accepted}, but got {shown(value)}")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:  # exact: true is not the integer 1
        raise ValueError(f"{key} must be {TYPE_NAMES[hint]}, but got {shown(value)}")
    return value


def shown(value: object) -> str:
    """`repr`, cut: an alias may stand for a thousand million values."""
    return _SHORT.repr(value)


def given(mapping: Mapping[str, Any], key: str) -> str:
    """What an error says of a key that must be there.

    >>> given({"version": 1}, "version"), given({}, "version")
    ('got 1', 'is absent')
    """
    return f"got {shown(mapping[key])}" if key in mapping else "is absent"


def told_kind(value: object) -> str:
    """What a file holds, in its own words.

    >>> told_kind(None), told_kind([1]), told_kind("x")
    ('null', 'a list', 'text')
    """
    return FORMS.get(type(value), f"a {type(value).__name__}")


def nearest(word: str, known: Sequence[str]) -> str:
    """What an error says after a word that is not known."""
    near = get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; have {list(known)}"
