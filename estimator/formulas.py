"""FLOPs and bytes of every op as formulas over named sizes: what `work` does, told in letters.

A size is named after its logical axis; an axis that has several sizes in a graph names them apart (`latent_1536`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import numpy as np

from estimator.graph import Block, OpGraph
from estimator.inventory import Entry, amounts
from estimator.op import Axis, Dim, Op, OpKind, Tensor
from estimator.polynomial import Polynomial, letter
from estimator.precision import PrecisionRecipe

__all__ = ["FORMULAS", "Formulas", "formulas"]

FORMULAS = ("flops", "read_bytes", "written_bytes", "link_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Formulas:
    """`sizes`: what each letter stands for; `of`: for each entry, its formulas by the name of the amount."""

    sizes: Mapping[str, float]
    of: tuple[Mapping[str, Polynomial], ...]


def formulas(graph: OpGraph, entries: tuple[Entry, ...], recipe: PrecisionRecipe) -> Formulas:
    """The formulas of these entries of the graph."""
    names = _names(graph)
    lettered = {kind: _lettered(block, names) for kind, block in graph.blocks.items()}
    of = []
    for entry in entries:
        block = lettered[entry.block.kind]
        found = amounts(_in_letters(entry.op, names), block, recipe)
        of.append({name: _polynomial(found[name]) for name in FORMULAS})
    return Formulas(sizes={name: size for (_, size), name in names.items()}, of=tuple(of))


def _names(graph: OpGraph) -> dict[tuple[Axis, float], str]:
    sizes: dict[Axis, dict[float, None]] = {}
    for block in graph.blocks.values():
        for dim in (d for op in block.ops for d in op.dims):
            sizes.setdefault(dim.axis, {})[_size(dim)] = None
        for dim in (d for tensor in block.tensors.values() for d in tensor.dims):
            sizes.setdefault(dim.axis, {})[_size(dim)] = None
    return {
        (axis, size): axis.value if len(found) == 1 else f"{axis.value}_{size:.10g}".replace(".", "_")
        for axis, found in sizes.items()
        for size in found
    }


def _lettered(block: Block, names: Mapping[tuple[Axis, float], str]) -> Block:
    tensors = {name: Tensor(_dims(t.dims, names), t.role) for name, t in block.tensors.items()}
    return Block(kind=block.kind, ops=block.ops, tensors=tensors, input=block.input)


def _in_letters(op: Op, names: Mapping[tuple[Axis, float], str]) -> Op:
    return op if op.kind is OpKind.COLLECTIVE else op.but(dims=_dims(op.dims, names))


def _dims(dims: tuple[Dim, ...], names: Mapping[tuple[Axis, float], str]) -> tuple[Dim, ...]:
    """A size of one stays a number: it says that there is nothing along the axis."""
    return tuple(
        dim if _size(dim) == 1.0 else dim._replace(size=cast(float, letter(names[dim.axis, _size(dim)])))
        for dim in dims
    )


def _polynomial(value: object) -> Polynomial:
    return value if isinstance(value, Polynomial) else Polynomial({(): Fraction(_number(value))})


def _number(value: object) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(-1)[0])


def _size(dim: Dim) -> float:
    return _number(dim.size)
