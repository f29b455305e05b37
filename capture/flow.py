"""How values flow through the records of a forward pass: who makes them, what they depend on, who takes them up.

Three kinds of values: data (it depends on the tokens), trained (on parameters alone) and constant (positions, masks,
empty buffers). Views, casts and copies are looked through; parts (slices, splits) lead to what they are a part of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from capture.records import Record, Recording, Value
from estimator.op import Phase

__all__ = ["Flow", "Region", "Source", "UnknownOp"]

SAME = frozenset(
    """view _unsafe_view reshape transpose permute t unsqueeze squeeze expand detach alias clone _to_copy
contiguous lift_fresh view_as _reshape_alias""".split()
)
PART = frozenset("slice split split_with_sizes select chunk narrow unbind".split())
EMPTY = frozenset(
    """empty empty_like new_empty zeros zeros_like new_zeros ones ones_like new_ones full full_like arange
scalar_tensor""".split()
)  # what they hold depends on no input


class UnknownOp(ValueError):
    """An operation that the canonical form has no place for; the message names it, its module and its line."""


class Source(Enum):
    """What a value depends on."""

    DATA = "data"
    TRAINED = "trained"
    CONSTANT = "constant"


@dataclass(slots=True)
class Region:
    """Records between a value and the values it is made of; the latter with parts looked through, each once."""

    leaves: list[int] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    constants: int = 0  # how many constant values enter


class Flow:
    """The forward records of a recording, from inputs to output."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.values = recording.values
        self.records: list[Record] = list(recording.of_phase(Phase.FORWARD))
        self.producer: dict[int, int] = {}
        self.sources: dict[int, Source] = {recording.ids: Source.DATA}
        self.claims: dict[int, str] = {}  # record -> the canonical op that takes it up
        self.passed: set[int] = set()  # looked through: what is new put behind a cache, factors that are plain numbers
        self.shared: dict[str, str] = {}  # op -> the op whose records it stands for as well
        for i, record in enumerate(self.records):
            source = Source.CONSTANT if record.name in EMPTY else self._strongest(record.inputs)
            if record.name == "cat" and len([v for v in record.inputs if self._is_new(v)]) == 1 < len(record.inputs):
                self.passed.add(i)
            if record.name in {"mul", "div"} and len(record.inputs) == 1:
                self.passed.add(i)
            for value in record.outputs:
                self.producer[value] = i
                self.sources[value] = source

    def _is_new(self, value: int) -> bool:
        """Whether this pass made it; a cache holds values that it did not, or none at all."""
        return value in self.producer and self.values[value].elements > 0

    def _behind(self, index: int, through: frozenset[str] = SAME) -> int | None:
        """The value that a record is a view, a copy or a cached continuation of."""
        record = self.records[index]
        if index in self.passed:
            return next(v for v in record.inputs if self._is_new(v))
        return record.inputs[0] if record.name in through else None

    def _strongest(self, inputs: Iterable[int]) -> Source:
        found = {self.source(value) for value in inputs}
        return next((s for s in (Source.DATA, Source.TRAINED) if s in found), Source.CONSTANT)

    def source(self, value: int) -> Source:
        """What the value depends on. Tensors from outside (a cache) are data."""
        if value not in self.sources:
            given = self.values[value]
            known = Source.TRAINED if given.trained else Source.CONSTANT if given.parameter else Source.DATA
            self.sources[value] = known
        return self.sources[value]

    def is_data(self, value: int) -> bool:
        """Whether it depends on the tokens."""
        return self.source(value) is Source.DATA

    def record_of(self, value: int) -> Record | None:
        """The record that made it; None for what came from outside."""
        index = self.producer.get(value)
        return None if index is None else self.records[index]

    def claim(self, owner: str, *records: int) -> None:
        """The records belong to that canonical op."""
        for index in records:
            self.claims.setdefault(index, owner)

    def strip(self, value: int) -> int:
        """The value behind views, casts and copies."""
        return self._walked(value, SAME)

    def root(self, value: int) -> int:
        """The value that this one is a view, a copy or a part of."""
        return self._walked(value, SAME | PART)

    def _walked(self, value: int, through: frozenset[str]) -> int:
        while (index := self.producer.get(value)) is not None and (behind := self._behind(index, through)) is not None:
            value = behind
        return value

    def made_by(self, value: int, *names: str) -> Record | None:
        """The record that made the value behind views and casts, if it is one of these."""
        record = self.record_of(self.strip(value))
        return record if record is not None and record.name in names else None

    def index_of(self, value: int) -> int:
        """The index of the record that made it."""
        return self.producer[value]

    def parameter(self, value: int) -> Value | None:
        """The parameter or buffer that the value is a view, a cast or a simple function of."""
        seen = {value}
        while not self.values[value].parameter:
            record = self.record_of(value)
            inputs = [v for v in record.inputs if not self.is_data(v)] if record is not None else []
            if len(inputs) != 1 or inputs[0] in seen:
                return None
            value = inputs[0]
            seen.add(value)
        return self.values[value]

    def region(self, value: int, allowed: Callable[[Record], bool], *, parts: bool = True) -> Region:
        """Walks back from a value through views, parts (unless told not to) and allowed records to leaves."""
        found, seen, todo = Region(), set(), [value]
        through = SAME | PART if parts else SAME
        while todo:
            at = todo.pop(0)
            if at in seen:
                continue
            seen.add(at)
            if not self.is_data(at):
                found.constants += self.source(at) is Source.CONSTANT
                continue
            index = self.producer.get(at)
            record = self.records[index] if index is not None else None
            behind = None if index is None else self._behind(index, through)
            if record is None or (behind is None and not allowed(record)):
                if at not in found.leaves:
                    found.leaves.append(at)
                continue
            assert index is not None
            found.records.append(index)
            if index not in self.passed:
                found.names.add(record.name)
            todo = [*(record.inputs if behind is None else (behind,)), *todo]
        return found

    def live(self, results: Sequence[int], stop: frozenset[int] = frozenset()) -> set[int]:
        """Records that lead to one of these values, up to values to stop at."""
        found: set[int] = set()
        todo = list(results)
        while todo:
            value = todo.pop()
            index = self.producer.get(value)
            if index is None or index in found or value in stop:
                continue
            found.add(index)
            todo += self.records[index].inputs
        return found

    def unknown(self, value: int, why: str) -> UnknownOp:
        """The error about the record that made a value."""
        record = self.record_of(self.strip(value))
        if record is None:
            return UnknownOp(f"{self.values[value].parameter or 'a value from outside'}: {why}")
        return self.refused(record, why)

    @staticmethod
    def refused(record: Record, why: str) -> UnknownOp:
        """The error about a record: op, module and line."""
        return UnknownOp(f"{record.scope or 'the model'} ({record.module}, {record.line}): {record.op}: {why}")
