"""Nested files (YAML, TOML, JSON) as settings by dotted path, each with the line on which its key first stands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from results.launchers.settings import Setting, Value

__all__ = ["flattened", "nested"]

_MOST = 10_000  # values of a file; aliases may stand for more


def flattened(content: Mapping[str, object], text: str, source: str) -> dict[str, Setting]:
    """Every leaf by its path; a list is a leaf, and so is an empty section."""
    lines = text.splitlines()
    found: dict[str, Setting] = {}
    try:
        for path, value in _leaves(content, ""):
            found[path] = Setting(value=value, spelling=path, place=f"{source}{_line(lines, path)}")
            if len(found) > _MOST:
                raise ValueError(f"{source}: a launch file must have at most {_MOST} values; it has more")
    except RecursionError:
        raise ValueError(f"{source}: is nested too deep for a launch file") from None
    return found


def _leaves(content: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Value]]:
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, _plain(value)


def _plain(value: object) -> Value:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)  # a date, which no setting of ours is


def _line(lines: list[str], path: str) -> str:
    """`:LINE` of the first line on or after which the keys of the path stand in order; nothing where none does."""
    at = -1
    for key in path.split("."):
        pattern = re.compile(rf"(?<![\w-])[\"']?{re.escape(key)}[\"']?\s*[:=\].]|\[[\w.]*\b{re.escape(key)}\]")
        at = next((i for i in range(max(at, 0), len(lines)) if pattern.search(lines[i].split("#")[0])), at)
    return f":{at + 1}" if at >= 0 else ""


def nested(flat: Mapping[str, Value]) -> dict[str, object]:
    """The inverse of `flattened`, for writing.

    >>> nested({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    out: dict[str, object] = {}
    for path, value in flat.items():
        *sections, key = path.split(".")
        holder = out
        for section in sections:
            inner = holder.setdefault(section, {})
            assert isinstance(inner, dict)
            holder = inner
        holder[key] = value
    return out
