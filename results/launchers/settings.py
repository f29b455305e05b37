"""What a launch file says, name by name, and what becomes of each: used, ignored, unmodelled, unknown. Decides nothing.

Names are those of the framework's own configuration (for Megatron the `dest` of its parser); every value keeps the
spelling and the place that an error or a listing shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from results.launchers.open_words import open_names

__all__ = ["Setting", "Settings", "Value"]

Value: TypeAlias = "None | bool | int | float | str | list[Value] | dict[str, Value]"
"""What a file can say of a name. Arguments of a command line are text, or lists of it, or booleans."""

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_LARGEST = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value, as it is spelled in the file and where."""

    value: Value
    spelling: str
    place: str


class Settings:
    """A file's settings. Whoever reads one has used it; the rest is told apart at the end."""

    __slots__ = ("_given", "_used", "assumed", "missing", "source", "unmodelled")

    def __init__(self, given: Mapping[str, Setting], source: str) -> None:
        self._given = dict(given)
        self._used: set[str] = set()
        self.source = source
        self.assumed: list[str] = []
        self.missing: list[str] = []
        self.unmodelled: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._given and self._given[name].value is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def take(self, name: str) -> Value:
        """The value as it stands, None where there is none; it counts as used."""
        self._used.add(name)
        if name not in self._given:
            return None
        value = self._given[name].value
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and (names := open_names(word)):
                setting = self._given[name]
                remedy = f"give --define {names[0]}=VALUE"
                raise ValueError(
                    f"{setting.place}: {setting.spelling} needs ${names[0]}, which the script does not set; {remedy}"
                )
        return value

    def whole(self, name: str, *, least: int = 1) -> int | None:
        """A whole number; 25e6 is one."""
        value = self.take(name)
        if value is None:
            return None
        number = _number(value)
        if number is None or number != int(number) or not least <= number <= _LARGEST:
            raise self.bad(name, f"must be a whole number of at least {least}")
        return int(number)

    def number(self, name: str) -> float | None:
        """Any number."""
        value = self.take(name)
        if value is None:
            return None
        number = _number(value)
        if number is None:
            raise self.bad(name, "must be a number")
        return number

    def flag(self, name: str) -> bool | None:
        """True or false."""
        value = self.take(name)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).lower()
        if word not in _WORDS:
            raise self.bad(name, "must be true or false")
        return _WORDS[word]

    def text(self, name: str) -> str | None:
        """A word or a sentence."""
        value = self.take(name)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None:
            return None
        if not isinstance(value, str | int | float):
            raise self.bad(name, "must be one word")
        return str(value)

    def words(self, name: str) -> list[str]:
        """A list of words; one that is written with spaces or commas is split."""
        value = self.take(name)
        if value is None:
            return []
        items = value if isinstance(value, list) else [value]
        return [word for item in items for word in str(item).replace(",", " ").split()]

    def note(self, what: str, why: str) -> None:
        """Lists what the file did not say and how it was taken."""
        line = f"{what}: {why}"
        if line not in self.assumed:
            self.assumed.append(line)

    def without_counterpart(self, *names: str) -> None:
        """Lists settings that have no counterpart here, as the file spells them."""
        for name in names:
            self._used.add(name)
            if name in self and (told := self._given[name].spelling) not in self.unmodelled:
                self.unmodelled.append(told)

    def spelled(self, name: str) -> str:
        """The setting as the file writes it, for an error or a listing."""
        return self._given[name].spelling if name in self._given else name

    def bad(self, name: str, rule: str) -> ValueError:
        """The error about one setting: place, spelling, law, offence."""
        setting = self._given[name]
        shown = repr(setting.value)
        cut = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return ValueError(f"{setting.place}: {setting.spelling} {rule}, but got {cut}")

    def place(self, name: str) -> str:
        """Where it stands."""
        return self._given[name].place if name in self._given else self.source

    def rest(self) -> list[str]:
        """Names that nobody has used."""
        return [name for name in self._given if name not in self._used]


def _number(value: Value) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if number - number == 0 else None  # neither infinite nor nan
