"""What a model did, operation by operation: the plain records of a capture. Imports no framework.

A value is one tensor at one time: an operation that writes in place makes a new value of the same storage. Values of a
record are numbers; shapes and dtypes stand beside them in `Recording.values`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from estimator.op import Phase

__all__ = ["LayerPlace", "Record", "Recording", "Ref", "Value"]


@dataclass(frozen=True, slots=True)
class Ref:
    """A value among the arguments of a record."""

    value: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor. `parameter`: its name in the model, of parameters and buffers."""

    shape: tuple[int, ...]
    dtype: str
    parameter: str = ""
    trained: bool = False  # a parameter, not a buffer

    @property
    def elements(self) -> int:
        """Number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True)
class Record:
    """One operation as it ran.

    `arguments` are those of the call in order: `Ref` of a value, lists of them, or plain numbers, texts and None.
    `scope` is the path of the innermost module, `module` its class; `line` is where the model's code called.
    """

    op: str  # aten.mm.default; capture.NAME of what a patch records in one piece
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: tuple[Any, ...] = ()
    scope: str = ""
    module: str = ""
    line: str = ""
    phase: Phase = Phase.FORWARD
    in_place: bool = False

    @property
    def name(self) -> str:
        """`mm` of `aten.mm.default`."""
        return self.op.split(".")[1]


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """A layer of the model: which distinct kind it is of, and for the first of a kind what went in and came out."""

    kind: int
    scope: str


@dataclass(slots=True)
class Recording:
    """One run of a model: its records in order, and how its layers repeat.

    Only the first layer of each kind has records. `entry` and `result`: per kind, the value of the hidden state before
    and behind that layer.
    """

    architecture: str
    phase: str
    batch: int
    seq: int
    context: int  # tokens that a cache holds before the first of `seq`
    num_parameters: int  # of the layers that were asked for and the ends; buffers are none
    tied: bool
    values: list[Value] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    layers: tuple[LayerPlace, ...] = ()
    entry: dict[int, int] = field(default_factory=dict)
    result: dict[int, int] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)  # class of each module, by path
    bases: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of these classes, the nearest first
    ids: int = -1
    output: int = -1

    def of_phase(self, *phases: Phase) -> Iterator[Record]:
        """Records of these phases, in order."""
        return (record for record in self.records if record.phase in phases)
