"""One block being lifted: records go in, ops of the one vocabulary (estimator/build) come out.

Every op is written by the function that writes it for a model file too; what is decided here is which ops there are,
their sizes, and which records they stand for. Whatever no pattern takes up is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from capture.flow import Flow, UnknownOp
from capture.patterns import NormFound, Product, norm
from estimator.build.writer import Writer
from estimator.layers import LayerSpec
from estimator.model import ModelSpec
from estimator.op import Axis, Component, Dim, Tensor, Weight
from estimator.precision import Role

__all__ = ["Facts", "Lift"]


class Facts:
    """What the layers tell of the model (fields of ModelSpec); two that disagree are refused."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def tell(self, name: str, value: object, where: str = "") -> None:
        """ValueError where an earlier layer told otherwise: a model has one value of each."""
        before = self.known.setdefault(name, value)
        if before != value:
            raise ValueError(f"{where or 'a layer'}: {name} is {value}, but {before} in an earlier layer; layers that "
                             "differ in sizes have no place in a model yet")  # fmt: skip


@dataclass(slots=True)
class Lift:
    """The ops of one block so far, and what the values between them are called."""

    flow: Flow
    model: ModelSpec  # sizes that all layers share; see canonical.py
    facts: Facts
    block: str
    tokens: int  # of the sequence that is written
    keys: int  # that its tokens see at most
    layer: LayerSpec = field(default_factory=LayerSpec)
    names: dict[int, str] = field(default_factory=dict)
    w: Writer = field(init=False)
    traits: dict[str, Any] = field(default_factory=dict)  # of the layer, found on the way

    def __post_init__(self) -> None:
        self.w = Writer(self.model, self.tokens, self.layer)

    @property
    def rows(self) -> int:
        """Tokens of the recorded run."""
        return self.flow.recording.batch * self.flow.recording.seq

    def claim(self, op: str, *records: int) -> None:
        """These records are what `op` stands for."""
        self.flow.claim(f"{self.block}/{op}", *records)

    def share(self, op: str, owner: str) -> None:
        """`op` stands for records of `owner`: a model ran them in one."""
        self.flow.shared[f"{self.block}/{op}"] = f"{self.block}/{owner}"

    def claim_values(self, op: str, *values: int) -> None:
        """The records that made these values are what `op` stands for."""
        self.claim(op, *(self.flow.index_of(v) for v in values))

    def linear(
        self, found: Product, name: str, x: str, k: Dim, n: Dim, component: Component, *, rows: int = 0,
        **options: Any,
    ) -> str:  # fmt: skip
        """A product, its sizes checked against the record."""
        made = self.flow.values[found.out].elements // found.n
        if (found.k, found.n, made) != (k.size, n.size, rows or self.rows):
            raise self.flow.unknown(found.out, f"is {made} x {found.k} x {found.n}, but {name} was to be "
                                    f"{rows or self.rows} x {k.size:g} x {n.size:g}")  # fmt: skip
        self.claim(name, *found.records)
        return self.w.linear(name, x, k, n, component, bias=found.bias is not None, **options)

    def seen(self) -> dict[str, Any]:
        """Of a token behind a cache: as many keys as the cache holds, and all are seen: twice a causal half."""
        return {"keys": float(self.keys), "visible": 2.0} if self.flow.recording.context else {}

    def over_keys(self, *names: str) -> None:
        """Behind a cache, these tensors have a row for every key, and the last op that made one works on as many."""
        if not self.flow.recording.context:
            return
        w, keys = self.w, Dim(float(self.keys), Axis.KEY)
        for name in names:
            w.tensors[name] = Tensor((keys, *w.tensors[name].dims[1:]), w.tensors[name].role)
        if w.ops[-1].dims and w.ops[-1].outputs == names:
            w.ops[-1] = w.ops[-1].but(dims=(keys, *w.ops[-1].dims[1:]))

    def share_of(
        self, found: Product, name: str, owner: str, x: str, n: Dim, component: Component, **options: Any
    ) -> str:  # fmt: skip
        """A product of its own for a part of the columns of one that a model runs in one piece."""
        rows = self.flow.values[found.out].elements // found.n
        if (found.k, rows) != (self.w.hidden.size, self.rows) or n.size > found.n:
            raise self.flow.unknown(found.out, f"is {rows} x {found.k} x {found.n}, of which {name} was to be a part")
        self.claim(owner, *found.records)
        if name != owner:
            self.share(name, owner)
        return self.w.linear(name, x, self.w.hidden, n, component, bias=found.bias is not None, **options)

    def known(self, value: int) -> str | None:
        """The name of a value of the block, if it has one yet."""
        return self.names.get(self.flow.strip(value))

    def normed(self, value: int, name: str) -> str:
        """The norm in front of a branch; the value itself where a branch reads the stream as it is."""
        if (known := self.known(value)) is not None:
            return known
        found = norm(self.flow, value)
        if found is None or found.gate is not None or self.known(found.x) is None:
            raise self.flow.unknown(value, f"is read as the {name}, but is neither a norm nor the stream of the layer")
        x = self.known(found.x)
        assert x is not None
        out = self.norm(found, name, x, self.w.hidden, Component.NORM)
        self.names[self.flow.strip(value)] = out
        return out

    def norm(self, found: NormFound, name: str, x: str, width: Dim, component: Component) -> str:
        """A norm over `width`."""
        if found.width != width.size:
            raise self.flow.unknown(found.x, f"has a norm over {found.width}, but {name} was to be over {width.size:g}")
        self.claim(name, *found.records)
        out = self.w.norm(name, x, width, component, centred=found.centred)
        there = {"weight": found.weight, "bias": found.bias}
        last = self.w.ops[-1]
        weights = tuple(Weight(f"{name}.{word}", (width,), linear=False) for word, given in there.items() if given)
        self.w.ops[-1] = last.but(weights=weights)
        return out

    def role_of(self, value: int) -> Role:
        """The role of a value by its dtype."""
        return Role.FULL if self.flow.values[value].dtype == "float32" else Role.ACTIVATION

    def options(self, value: int) -> Mapping[str, Any]:
        """Named arguments of a record in one piece that made the value."""
        record = self.flow.record_of(value)
        assert record is not None
        return dict(record.arguments)

    def need(self, found: Any, value: int, what: str) -> Any:  # noqa: ANN401 - whatever the pattern gives
        """What a pattern found; UnknownOp where it found nothing."""
        if found is None:
            raise self.flow.unknown(value, f"no {what} ends here")
        return found

    def refuse(self, value: int, why: str) -> UnknownOp:
        """An error about the record behind a value."""
        return self.flow.unknown(value, why)
