"""YAML text as plain values that remember their line: a mistake is told by file, line and key. Knows no rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, TypeVar

import yaml

from estimator.mapping import nearest, shown

__all__ = ["Node", "parse"]

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_NODES = 100_000  # an alias may stand for a thousand million values
WORDS = {"OpKind": "a kind of op", "Component": "a component", "Axis": "an axis", "Role": "a role"}
E_ = TypeVar("E_", bound=Enum)


@dataclass(frozen=True, slots=True)
class Node:
    """One value: text, number, truth value or None, a list of nodes, or a mapping of them. `line` 0: of no file."""

    value: Any
    source: str
    line: int
    key: str = ""

    @classmethod
    def plain(cls, value: object, source: str, key: str = "") -> Node:
        """Values that come from elsewhere, whose lines are not known."""
        below = f"{key}." if key else ""
        if isinstance(value, dict):
            made: object = {str(k): cls.plain(v, source, f"{below}{k}") for k, v in value.items()}
        elif isinstance(value, list | tuple):
            made = [cls.plain(v, source, f"{below}{i}") for i, v in enumerate(value)]
        else:
            made = value
        return cls(made, source, 0, key)

    def refuse(self, law: str, got: object = None) -> NoReturn:
        """ValueError at this place: the law and, where given, the offence."""
        where = f"{self.source}:{self.line}" if self.line else self.source
        key = f" {self.key}:" if self.key else ""
        raise ValueError(f"{where}:{key} {law}" + ("" if got is None else f", but got {shown(got)}"))

    def bare(self) -> Any:  # noqa: ANN401 - any plain value
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: node.bare() for key, node in self.value.items()}
        return [node.bare() for node in self.value] if isinstance(self.value, list) else self.value

    def mapping(self, known: Sequence[str] | None = None, what: str = "a mapping") -> dict[str, Node]:
        """A mapping with known keys."""
        if not isinstance(self.value, dict):
            self.refuse(f"must be {what}", self.bare())
        found: dict[str, Node] = self.value
        for key, node in found.items():
            if known is not None and key not in known:
                node.refuse(f"{key} is not a key of {what}{nearest(key, known)}")
        return found

    def items(self) -> Iterator[Node]:
        """The nodes of a list, or the one value that stands for it."""
        return iter(self.value if isinstance(self.value, list) else [self])

    def text(self, what: str = "text") -> str:
        """A text."""
        if not isinstance(self.value, str) or not self.value.strip():
            self.refuse(f"must be {what}", self.bare())
        return str(self.value)

    def texts(self, what: str = "text") -> tuple[str, ...]:
        """A text or a list of texts."""
        return tuple(node.text(what) for node in self.items())

    def number(self, low: float = 0.0) -> float:
        """A finite number, which a truth value is not."""
        value = self.value
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value < float("inf"):
            self.refuse(f"must be a number of at least {low:g}", self.bare())
        return float(value)

    def whole(self) -> int:
        """A whole number of either sign."""
        if type(self.value) is not int:
            self.refuse("must be a whole number", self.bare())
        return int(self.value)

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.refuse("must be true or false", self.bare())
        return bool(self.value)

    def member(self, kind: type[E_]) -> E_:
        """A member of an enum by its value."""
        names = [str(m.value) for m in kind]
        if self.value not in names:
            self.refuse(f"must be {WORDS.get(kind.__name__, 'known')}{nearest(str(self.bare()), names)}", self.bare())
        return kind(self.value)

    def members(self, kind: type[E_]) -> frozenset[E_]:
        """One member or a list of them."""
        return frozenset(node.member(kind) for node in self.items())


def parse(text: str, source: str) -> Node:
    """The document in a text; ValueError names file and line where it is no YAML."""
    try:
        root = yaml.compose(text, Loader=LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        problem = " ".join((error.problem or error.context or "malformed").split())
        raise ValueError(f"{place}: must be YAML, but got {problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{source}: must be YAML, but got {' '.join(str(error).split())}") from None
    if root is None:
        return Node({}, source, 1)
    return _Builder(source).node(root, "")


class _Builder:
    """Turns composed nodes into ours, and refuses keys that stand twice."""

    def __init__(self, source: str) -> None:
        self.source, self.left = source, MAX_NODES
        self.constructor = yaml.constructor.SafeConstructor()

    def node(self, given: yaml.Node, key: str, line: int = 0) -> Node:
        self.left -= 1
        line = line or given.start_mark.line + 1
        if self.left < 0 or key.count(".") > 40:
            raise ValueError(f"{self.source}:{line}: a rule file must be small, but aliases make this one large")
        below = f"{key}." if key else ""
        if isinstance(given, yaml.MappingNode):
            found: dict[str, Node] = {}
            for name, value in given.value:
                word, at = str(getattr(name, "value", "")), name.start_mark.line + 1
                if word in found:
                    raise ValueError(f"{self.source}:{at}: {below}{word}: a key must stand once, but stands twice")
                found[word] = self.node(value, below + word, at)
            return Node(found, self.source, line, key)
        if isinstance(given, yaml.SequenceNode):
            return Node([self.node(n, f"{below}{i}") for i, n in enumerate(given.value)], self.source, line, key)
        try:
            return Node(self.constructor.construct_object(given), self.source, line, key)
        except (yaml.YAMLError, ValueError) as error:  # a date that is none, a tag that makes objects
            problem = " ".join(str(getattr(error, "problem", error)).split())
            raise ValueError(f"{self.source}:{line}: {key}: must be a plain value, but got {problem}") from None
