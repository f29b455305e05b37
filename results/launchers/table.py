"""One table between our keys and a framework's names, read in two directions: import reads rows, export writes them.

A row that cannot say a value in the framework's words raises Inexpressible; export decides what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from results.launchers.settings import Settings, Value

__all__ = ["Cases", "Custom", "Flag", "Inexpressible", "Number", "Row", "Values", "Words", "read_rows"]

Values = dict[str, Value]
"""Our values by key: axes of a strategy, `seq`, `global_batch`, fields of a model."""


class Inexpressible(ValueError):
    """The framework has no words for the value of `key`; `why` says what it has instead, `said` the part it can say."""

    def __init__(self, key: str, why: str, said: Values | None = None) -> None:
        super().__init__(why)
        self.key, self.why, self.said = key, why, said or {}


class Row(Protocol):
    """Some of our keys and some of their names."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Ours."""

    @property
    def names(self) -> tuple[str, ...]:
        """Theirs."""

    def read(self, given: Settings, so_far: Values) -> Values:
        """Our values of what a file says; `so_far` holds those of earlier rows."""

    def write(self, values: Values) -> Values:
        """Their settings of our values; Inexpressible where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """One of our keys under one of their names."""

    key: str
    name: str

    @property
    def keys(self) -> tuple[str, ...]:
        """Ours."""
        return (self.key,)

    @property
    def names(self) -> tuple[str, ...]:
        """Theirs."""
        return (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number(_Pair):
    """A whole number under one name; `absent` is what the framework takes without it."""

    absent: int = 1
    least: int = 1

    def read(self, given: Settings, so_far: Values) -> Values:
        """The number, or what the framework takes."""
        number = given.whole(self.name, least=self.least)
        return {self.key: self.absent if number is None else number}

    def write(self, values: Values) -> Values:
        """The number."""
        return {self.name: values[self.key]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(_Pair):
    """A switch; `on` and `off` are our values for true and false, `absent` is true or false."""

    absent: bool = False
    on: Value = True
    off: Value = False

    def read(self, given: Settings, so_far: Values) -> Values:
        """Whether it is on."""
        flag = given.flag(self.name)
        return {self.key: self.on if (self.absent if flag is None else flag) else self.off}

    def write(self, values: Values) -> Values:
        """True or false."""
        return {self.name: values[self.key] == self.on}


@dataclass(frozen=True, slots=True, kw_only=True)
class Words(_Pair):
    """A closed choice under one name. `also`: their other words, which are read but never written."""

    words: Mapping[str, str]  # ours -> theirs
    absent: str  # ours
    also: Mapping[str, str] = field(default_factory=dict)  # theirs -> ours

    def read(self, given: Settings, so_far: Values) -> Values:
        """Our word; the framework's own choice, with a note, where theirs has no counterpart."""
        word = given.text(self.name)
        if word is None:
            return {self.key: self.absent}
        ours = {theirs.lower(): mine for mine, theirs in self.words.items()}
        ours = {theirs.lower(): mine for theirs, mine in self.also.items()} | ours
        if word.lower() in ours:
            return {self.key: ours[word.lower()]}
        given.without_counterpart(self.name)
        given.note(f"{self.key}={self.absent}", f"{given.spelled(self.name)} {word} has no counterpart here")
        return {self.key: self.absent}

    def write(self, values: Values) -> Values:
        """Their word."""
        word = str(values[self.key])
        if word not in self.words:
            raise Inexpressible(self.key, f"{word} is not among {', '.join(self.words)}")
        return {self.name: self.words[word]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """Several names that together say one of a few things. Each case pairs our values with their settings.

    In a case a name that is left out is off or absent. The first case of a value is the one that is written; `also`
    are cases that are only read. Where nothing fits, the first case stands, with a note. `gates`: a name counts where
    one of these is on; `same`: words that mean another one, or nothing.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    cases: Sequence[tuple[tuple[Value, ...], Mapping[str, Value]]]
    also: Sequence[tuple[tuple[Value, ...], Mapping[str, Value]]] = ()
    told: Mapping[str, str] = field(default_factory=dict)  # of a value of the first key: what a reader should know
    gates: Mapping[str, Sequence[str]] = field(default_factory=dict)
    same: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def read(self, given: Settings, so_far: Values) -> Values:
        """The values of the first case whose settings are those of the file."""
        said = {name: _plain(given.take(name)) for name in self.names}
        said = {name: self.same.get(name, {}).get(word, word) for name, word in said.items()}
        closed = {name for name, gates in self.gates.items() if not any(said[gate] for gate in gates)}
        actual = {name: "" if name in closed else word for name, word in said.items()}
        for ours, theirs in (*self.cases, *self.also):
            if all(actual[name] == _plain(theirs.get(name)) for name in self.names):
                found = dict(zip(self.keys, ours, strict=True))
                if (line := self.told.get(str(ours[0]))) is not None and any(actual.values()):
                    given.note(f"{self.keys[0]}={ours[0]}", line)
                return found
        spelled = " ".join(f"{given.spelled(n)} {given.take(n)}" for n in self.names if n in given)
        given.without_counterpart(*self.names)
        ours = self.cases[0][0]
        given.note(f"{self.keys[0]}={ours[0]}", f"{spelled} has no counterpart here")
        return dict(zip(self.keys, ours, strict=True))

    def write(self, values: Values) -> Values:
        """The settings of the first case with these values."""
        mine = tuple(values[key] for key in self.keys)
        for ours, theirs in self.cases:
            if ours == mine:
                return dict(theirs)
        known = ", ".join(dict.fromkeys(" with ".join(map(str, ours)) for ours, _ in self.cases))
        raise Inexpressible(self.keys[0], f"{' with '.join(map(str, mine))} is not among {known}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A row whose two directions are functions."""

    keys: tuple[str, ...]
    names: tuple[str, ...]
    reads: Callable[[Settings, Values], Values]
    writes: Callable[[Values], Values]

    def read(self, given: Settings, so_far: Values) -> Values:
        """What the function finds."""
        return self.reads(given, so_far)

    def write(self, values: Values) -> Values:
        """What the function writes."""
        return self.writes(values)


def read_rows(rows: Sequence[Row], given: Settings, so_far: Values | None = None) -> Values:
    """Every row in turn."""
    found: Values = dict(so_far or {})
    for row in rows:
        found |= row.read(given, found)
    return found


def _plain(value: Value) -> str:
    """A value as text that compares: off and absent are one."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "" if value in (None, False) else "true" if value is True else str(value).lower()
