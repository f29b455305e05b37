"""The names that each framework's own parser knows, pinned by version: `names/*.tsv`. Knows nothing of what they mean.

A name outside these lists is unknown; one that is on them and cannot change time or memory is ignored on import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from importlib import resources

__all__ = ["Argument", "NameList", "arguments", "paths", "version_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a command line: how it is spelled, what the parser calls it, which values follow it."""

    spellings: tuple[str, ...]
    dest: str
    kind: str  # value, list, on, off, switch, or valueN: N values follow
    costs: bool  # may change time or memory


@dataclass(frozen=True, slots=True, kw_only=True)
class NameList:
    """Dotted paths of a configuration file; `costs` says of each whether it may change time or memory."""

    costs: Mapping[str, bool]

    def find(self, path: str) -> str | None:
        """The listed path that covers `path`: itself or a whole section above it."""
        parts = path.split(".")
        return next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in self.costs), None)

    def nearest(self, path: str) -> str:
        """What an error or a listing says after a path that is not known."""
        near = get_close_matches(path, list(self.costs), n=1)
        return f"; did you mean {near[0]}?" if near else ""


@lru_cache(maxsize=8)
def arguments(*lists: str) -> Mapping[str, Argument]:
    """Every argument of these lists by each of its spellings; a later list goes before an earlier one."""
    found: dict[str, Argument] = {}
    for name in lists:
        for spellings, dest, kind, cost in _rows(name):
            argument = Argument(spellings=tuple(spellings.split(",")), dest=dest, kind=kind, costs=cost == "cost")
            found |= dict.fromkeys(argument.spellings, argument)
    return found


@lru_cache(maxsize=8)
def paths(name: str) -> NameList:
    """The paths of one list."""
    return NameList(costs={path: cost == "cost" for path, cost in _rows(name)})


def version_of(name: str) -> str:
    """Which version a list was taken from, and when.

    >>> version_of("torchtitan")
    'torchtitan 0.2.2, the last whose jobs are TOML files, recorded 2026-12-01'
    """
    told = dict(line[2:].split(": ", 1) for line in _lines(name) if line.startswith("# "))
    return f"{told['version']}, recorded {told['recorded']}"


def _rows(name: str) -> Iterator[list[str]]:
    return (line.split("\t") for line in _lines(name) if not line.startswith("#"))


def _lines(name: str) -> list[str]:
    return resources.files("results.launchers").joinpath(f"names/{name}.tsv").read_text("utf-8").splitlines()
