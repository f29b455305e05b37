"""Reads one YAML document of plain values and remembers the line of every key. Refuses all that is not plain data.

Only the parser's events are used: no object is ever constructed from a tag. Scalars are read as YAML 1.2 reads them, so
`25e6` is a number, `1f1b` and `1:30` are text and `010` is ten; `yes`, `no`, `on` and `off` stay the booleans that YAML
1.1 users expect. Tags, merge keys, duplicate keys, several documents, deep nesting and alias bombs are errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Protocol, TypeAlias

import yaml
from yaml.reader import ReaderError

from estimator.strategy import OwnFusion

__all__ = ["Document", "Key", "Plain", "SpaceError", "parse_document", "parse_scalar", "read_document", "shown"]

Plain: TypeAlias = "None | bool | int | float | str | list[Plain] | dict[str, Plain]"
"""What a document can hold."""

Key = tuple[str | int, ...]
"""Where a value stands: mapping keys and list indices from the root."""

MAX_BYTES = 1 << 20  # a space is a page of text; a file over 1 MiB is something else
MAX_VALUES = 100_000  # scalars after aliases are expanded
MAX_DEPTH = 32
_SHOWN = 80  # characters of an offending value that an error repeats


class _Parser(Protocol):
    """The event half of a PyYAML loader."""

    def check_event(self) -> bool: ...
    def get_event(self) -> yaml.Event: ...
    def dispose(self) -> None: ...


_PARSER: Callable[[str], _Parser] = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # libyaml where PyYAML was built with it
_WORDS: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "true": True, "yes": True, "on": True, "false": False, "no": False, "off": False,
}  # fmt: skip
_INTEGER = re.compile(r"[-+]?[0-9](_?[0-9])*")
_REAL = re.compile(r"[-+]?([0-9](_?[0-9])*)?\.?[0-9]*([eE][-+]?[0-9]+)?")
_SPECIAL = {".inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}


class SpaceError(ValueError):
    """Input that is not a space: one line with place, key, rule, offence and remedy."""


def shown(value: object) -> str:
    """`repr` on one line, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def dotted(key: Key) -> str:
    """A key as `--set` takes it.

    >>> dotted(("strategy", "tp", 0))
    'strategy.tp.0'
    """
    return ".".join(str(part) for part in key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A plain value, and for each key the place that set it (`FILE:LINE`, or `--set` for an override)."""

    source: str
    value: Plain
    places: Mapping[Key, str] = field(repr=False)
    fusion_rules: tuple[OwnFusion, ...] = ()  # that it brings (search/fusion_rules.py)

    def get(self, key: Key) -> Plain:
        """The value at `key`; None where there is none."""
        value = self.value
        for part in key:
            if isinstance(value, dict):
                value = value.get(str(part))
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                return None
        return value

    def mapping(self, key: Key, known: Sequence[str] | None = None) -> dict[str, Plain]:
        """The mapping at `key`, empty where there is none; keys outside `known` are errors."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, "must be a mapping", value, "KEY: VALUE lines")
        for name in value if known is not None else ():
            if name not in (known or ()):
                raise self.unknown((*key, name), known or ())
        return value

    def place(self, key: Key) -> str:
        """Where `key` was set, or else the nearest key around it."""
        while key and key not in self.places:
            key = key[:-1]
        return self.places.get(key, self.source)

    def error(self, key: Key, rule: str, got: object = ..., accepted: str = "") -> SpaceError:
        """The one line that an offending key earns: `FILE:LINE: KEY: rule; got VALUE; accepted ...`."""
        parts = [rule]
        if got is not ...:
            parts.append(f"got {shown(got)}")
        if accepted:
            parts.append(f"accepted {accepted}")
        where = f"{self.place(key)}: {dotted(key)}" if key else self.place(key)
        return SpaceError(f"{where}: {'; '.join(parts)}".replace("\n", " "))

    def unknown(self, key: Key, known: Sequence[str]) -> SpaceError:
        """An unknown last part of `key`, with the nearest known one."""
        near = get_close_matches(str(key[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? accepted " if near else "accepted "
        return self.error(key, f"unknown key {str(key[-1])!r}; {hint}{', '.join(known)}")

    def with_value(self, key: Key, value: Plain, place: str) -> Document:
        """A copy in which `key` holds `value`, set at `place`. Mappings on the way to it are made where absent."""
        root = _put(self, self.value, (), key, value)
        outside = {k: v for k, v in self.places.items() if k[: len(key)] != key}
        return replace(self, value=root, places=outside | {key: place})

    def with_document(self, key: Key, other: Document, changes: Mapping[str, Plain]) -> Document:
        """A copy in which `key` holds a mapping of another file, but for changes of its own; each knows its place."""
        mine = {k: self.place((*key, k)) for k in changes}
        whole = self.with_value(key, {**other.mapping(()), **changes}, other.source)
        theirs = {(*key, *k): place for k, place in other.places.items() if k and k[0] not in changes}
        return replace(whole, places={**whole.places, **theirs, **{(*key, k): place for k, place in mine.items()}})


def _put(document: Document, holder: Plain, done: Key, rest: Key, value: Plain) -> Plain:
    """`holder` with `value` at `rest`; `done` leads to `holder`."""
    if not rest:
        return value
    head, tail = rest[0], rest[1:]
    if isinstance(holder, list):
        if not (isinstance(head, str) and head.isascii() and head.isdigit() and int(head) < len(holder)):
            raise document.error((*done, *rest), "a list is entered by an index", head, f"0 to {len(holder) - 1}")
        changed = list(holder)
        changed[int(head)] = _put(document, holder[int(head)], (*done, int(head)), tail, value)
        return changed
    if holder is None:
        holder = {}
    if not isinstance(holder, dict):
        raise document.error(done, f"a single value has no key {dotted(rest)!r}; set {dotted(done)} as a whole", holder)
    name = str(head)
    return {**holder, name: _put(document, holder.get(name), (*done, name), tail, value)}


def read_document(path: Path, source: str | None = None) -> Document:
    """The document in a file. Every way in which a file can disappoint is a SpaceError."""
    source = source or str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise SpaceError(f"{source}: a space is a file; got a directory; accepted a YAML file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise SpaceError(f"{source}: the file must be readable; got {reason!r}; accepted a YAML file") from None
    if len(raw) > MAX_BYTES:
        raise SpaceError(f"{source}: a space must be at most {MAX_BYTES} bytes; got more")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = f"0x{raw[error.start]:02x}"
        raise SpaceError(f"{source}:{line}: must be UTF-8; got byte {byte}; accepted UTF-8 text") from None
    return parse_document(text, source)


def parse_document(text: str, source: str) -> Document:
    """The document in a text.

    >>> document = parse_document("tp: [1, 2]", "x.yaml")
    >>> document.value, document.place(("tp", 1))
    ({'tp': [1, 2]}, 'x.yaml:1')
    """
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:  # an argument of the command line that is not UTF-8
        raise SpaceError(f"{source}: must be UTF-8; got {shown(text[error.start])}; accepted UTF-8 text") from None
    loader = None
    try:
        loader = _PARSER(text)
        value, places = _Builder(source, _events(loader)).document()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}" if mark else source
        problem = " ".join((error.problem or error.context or "malformed").split())
        raise SpaceError(f"{place}: must be YAML; got {problem}{_tab_hint(text, mark)}") from None
    except ReaderError as error:  # a character that YAML does not allow; libyaml counts bytes
        line = raw[: error.position].count(b"\n") + 1
        raise SpaceError(f"{source}:{line}: must be YAML; got character #x{int(error.character):02x}") from None
    finally:
        if loader is not None:
            loader.dispose()
    return Document(source=source, value=value, places=places)


def _tab_hint(text: str, mark: yaml.Mark | None) -> str:
    """What to do about a tab, where the offending line starts with one."""
    if mark is None:
        return ""
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    blank = line[: len(line) - len(line.lstrip())]
    return "; a tab must not indent; accepted spaces" if "\t" in blank else ""


def _events(loader: _Parser) -> Iterator[yaml.Event]:
    while loader.check_event():
        yield loader.get_event()


def parse_scalar(text: str) -> Plain:
    """A plain (unquoted) scalar.

    >>> [parse_scalar(t) for t in ("25e6", "1f1b", "off", "010", "1_000", ".inf", "none")]
    [25000000.0, '1f1b', False, 10, 1000, inf, 'none']
    """
    lower = text.lower()
    if lower in _WORDS:
        return _WORDS[lower]
    if lower in _SPECIAL:
        return _SPECIAL[lower]
    if _INTEGER.fullmatch(text) and len(text) <= 30:  # longer ones exceed every quantity and stay text
        return int(text.replace("_", ""))
    if any(c.isdigit() for c in text) and _REAL.fullmatch(text):
        try:
            return float(text.replace("_", ""))
        except ValueError:  # e5
            return text
    return text


@dataclass(slots=True)
class _Open:
    """A collection whose end has not been read."""

    value: list[Plain] | dict[str, Plain]
    key: Key
    line: int
    anchor: str | None
    start: int  # values counted before it
    pending: str = ""  # the key of a mapping whose value comes next
    has_pending: bool = False


class _Builder:
    """Events to plain values, without recursion."""

    def __init__(self, source: str, events: Iterator[yaml.Event]) -> None:
        self.source = source
        self.events = events
        self.places: dict[Key, str] = {}
        self.anchors: dict[str, tuple[Plain, int]] = {}
        self.stack: list[_Open] = []
        self.count = 0
        self.root: Plain = None
        self.num_documents = 0

    def fail(self, line: int, rule: str) -> SpaceError:
        return SpaceError(f"{self.source}:{line}: {rule}")

    def document(self) -> tuple[Plain, dict[Key, str]]:
        for event in self.events:
            assert event.start_mark is not None
            self.take(event, event.start_mark.line + 1)
        return self.root, self.places

    def take(self, event: yaml.Event, line: int) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self.num_documents += 1
            if self.num_documents > 1:
                raise self.fail(line, "a file must hold one document; got a second after '---'")
        elif isinstance(event, yaml.AliasEvent):
            self.alias(str(event.anchor), line)
        elif isinstance(event, yaml.ScalarEvent):
            self.tagless(event, line)
            self.counted(1, line)
            self.scalar(event, line)
        elif isinstance(event, yaml.CollectionStartEvent):
            self.open(event, line)
        elif isinstance(event, yaml.CollectionEndEvent):
            self.close()

    def scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        plain = event.implicit[0] and event.style in (None, "") and not self.key_next()
        value = parse_scalar(event.value) if plain else event.value
        if event.anchor:
            self.anchors[event.anchor] = (value, 1)
        self.add(value, line)

    def tagless(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, line: int) -> None:
        if event.tag is not None and event.tag != "!":
            raise self.fail(line, f"tags are not read; got {shown(event.tag)}; accepted plain values")

    def counted(self, number: int, line: int) -> None:
        self.count += number
        if self.count > MAX_VALUES:
            raise self.fail(line, f"a file must hold at most {MAX_VALUES} values, aliases written out; got more")

    def key_next(self) -> bool:
        """Whether the next scalar is a mapping's key: keys are text, whatever they look like."""
        return bool(self.stack) and isinstance(self.stack[-1].value, dict) and not self.stack[-1].has_pending

    def alias(self, anchor: str, line: int) -> None:
        if anchor not in self.anchors:
            raise self.fail(line, f"an alias must follow its complete anchor; got *{anchor}")
        value, number = self.anchors[anchor]
        self.counted(number, line)
        if self.key_next():
            raise self.fail(line, f"a key must be text; got *{anchor}")
        self.add(value, line)

    def open(self, event: yaml.CollectionStartEvent, line: int) -> None:
        self.tagless(event, line)
        if self.key_next():
            raise self.fail(line, "a key must be text; got a list or mapping")
        if len(self.stack) >= MAX_DEPTH:
            raise self.fail(line, f"values must nest at most {MAX_DEPTH} deep; got more")
        value: list[Plain] | dict[str, Plain] = {} if isinstance(event, yaml.MappingStartEvent) else []
        start = self.count
        self.counted(1, line)
        key = self.add(value, line)
        self.stack.append(_Open(value=value, key=key, line=line, anchor=event.anchor, start=start))

    def close(self) -> None:
        done = self.stack.pop()
        if done.anchor:
            self.anchors[done.anchor] = (done.value, self.count - done.start)

    def add(self, value: Plain, line: int) -> Key:
        """Puts a value (or a key) into the innermost open collection and returns where it stands."""
        if not self.stack:
            self.root = value
            self.places[()] = f"{self.source}:{line}"
            return ()
        top = self.stack[-1]
        if isinstance(top.value, list):
            top.value.append(value)
            key: Key = (*top.key, len(top.value) - 1)
        elif not top.has_pending:
            return self.add_key(top, top.value, str(value), line)
        else:
            top.value[top.pending] = value
            key = (*top.key, top.pending)
            top.has_pending = False
        self.places.setdefault(key, f"{self.source}:{line}")
        return key

    def add_key(self, top: _Open, holder: dict[str, Plain], name: str, line: int) -> Key:
        key = (*top.key, name)
        if name == "<<":
            raise self.fail(line, "merge keys (<<) are not read; accepted the keys written out")
        if name in holder:
            raise self.fail(line, f"{dotted(key)}: a key must appear once; got it again after {self.places[key]}")
        self.places[key] = f"{self.source}:{line}"
        top.pending, top.has_pending = name, True
        return key
