"""How two graphs differ, op by op: what one has and the other lacks, what is called otherwise, what is another op.

Ops are matched by block, phase and name; of those left over, ops of one block that do the same are taken for renamed.
Tensors are compared where an op reads or writes them. Says nothing of what a difference costs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from estimator.graph import Block, OpGraph
from estimator.graph_json import op_json, tensor_json
from estimator.inventory import scope_of
from estimator.op import Op, Phase

__all__ = ["Changed", "GraphDiff", "diff"]

NAMES = ("name", "inputs", "outputs", "saves", "partners", "held")  # fields that a renaming changes
Key = tuple[str, Phase, str]
"""Block, phase and name of an op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """One op in both graphs. `fields`: what differs, as values of either; a tensor by its name."""

    scope: str
    phase: str
    fields: dict[str, tuple[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDiff:
    """What must be done to the first graph to have the second. Ops as (scope, phase, kind).

    `times`: blocks that one graph runs more often; `reordered`: blocks whose common ops stand in another order.
    """

    removed: tuple[tuple[str, str, str], ...]
    added: tuple[tuple[str, str, str], ...]
    renamed: tuple[tuple[str, str], ...]
    changed: tuple[Changed, ...]
    times: dict[str, tuple[int, int]]
    reordered: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Whether the graphs are one."""
        lists = (self.removed, self.added, self.renamed, self.changed, self.times, self.reordered)
        return not any(lists)


def diff(a: OpGraph, b: OpGraph) -> GraphDiff:
    """The differences from `a` to `b`."""
    left, right = _ops(a), _ops(b)
    gone = {key: left[key] for key in left if key not in right}
    new = {key: right[key] for key in right if key not in left}
    renamed = dict(_renamed(gone, new))
    taken = set(renamed.values())
    both = [key for key in left if key in right]
    changed = [Changed(scope=_scope(left[key]), phase=key[1].value, fields=fields) for key in both
               if (fields := _differing(left[key], right[key]))]  # fmt: skip
    runs = [{kind.value: graph.sequence.count(kind) for kind in graph.kinds} for graph in (a, b)]
    return GraphDiff(
        removed=tuple(_told(op) for key, op in gone.items() if key not in renamed),
        added=tuple(_told(op) for key, op in new.items() if key not in taken),
        renamed=tuple((_scope(left[old]), _scope(right[key])) for old, key in renamed.items()),
        changed=tuple(changed),
        times={name: (runs[0].get(name, 0), runs[1].get(name, 0)) for name in {**runs[0], **runs[1]}
               if runs[0].get(name) != runs[1].get(name)},
        reordered=tuple(_reordered(both, list(right))),
    )  # fmt: skip


def _ops(graph: OpGraph) -> dict[Key, tuple[Block, Op]]:
    return {(kind.value, op.phase, op.name): (graph.blocks[kind], op)
            for kind in graph.kinds for op in graph.blocks[kind].ops}  # fmt: skip


def _renamed(gone: dict[Key, tuple[Block, Op]], new: dict[Key, tuple[Block, Op]]) -> Iterator[tuple[Key, Key]]:
    """Pairs of one block and phase that do the same, in order."""
    found: dict[Hashable, list[Key]] = {}
    for key, (block, op) in new.items():
        found.setdefault((key[:2], _signature(block, op)), []).append(key)
    for key, (block, op) in gone.items():
        same = found.get((key[:2], _signature(block, op)), [])
        if same:
            yield key, same.pop(0)


def _signature(block: Block, op: Op) -> Hashable:
    """What an op does, whatever it is called."""
    told = {name: value for name, value in op_json(op).items() if name not in (*NAMES, "weights")}
    weights = [(tuple(weight.dims), weight.expert, weight.linear) for weight in op.weights]
    shapes = [[(block.tensors[n].dims, block.tensors[n].role) for n in names] for names in (op.inputs, op.outputs)]
    return repr((sorted(told.items()), weights, shapes))


def _differing(left: tuple[Block, Op], right: tuple[Block, Op]) -> dict[str, tuple[Any, Any]]:
    told = [op_json(op) for _, op in (left, right)]
    fields = {name: (told[0].get(name), told[1].get(name)) for name in {**told[0], **told[1]}}
    for name in dict.fromkeys((*left[1].inputs, *left[1].outputs)):
        if name in (*right[1].inputs, *right[1].outputs):
            fields[f"tensor {name}"] = (tensor_json(left[0].tensors[name]), tensor_json(right[0].tensors[name]))
    return {name: values for name, values in fields.items() if values[0] != values[1]}


def _reordered(both: list[Key], there: list[Key]) -> Iterator[str]:
    common = set(both)
    for name in dict.fromkeys(key[0] for key in both):
        orders = [[key for key in keys if key[0] == name and key in common] for keys in (both, there)]
        if orders[0] != orders[1]:
            yield name


def _told(op: tuple[Block, Op]) -> tuple[str, str, str]:
    return _scope(op), op[1].phase.value, op[1].kind.value


def _scope(op: tuple[Block, Op]) -> str:
    return "/".join(scope_of(op[0].kind, op[1].name))
