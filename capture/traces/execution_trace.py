"""Reads PyTorch's execution traces: what the host executed, with tensors and process groups, and no times.

Kept are the innermost operations and `record_param_comms`, which tells a collective; waits are of the host. An
operation depends on those that made its inputs. The rank is not recorded: that of the device of its tensors is taken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec

from capture.traces.communication import collective_name, element_bytes, rank_list
from capture.traces.nodes import Node, node_trace
from capture.traces.opened import Opened, named
from capture.traces.records import Group, Kind, RankTrace

__all__ = ["read_execution_trace"]

COMMUNICATION = "record_param_comms"
CONTAINER = "[pytorch|profiler|execution_trace|"
GROUPS = "## process_group:init ##"
STEP = "ProfilerStep#"
DEVICE = re.compile(r"(?:cuda|hip|xpu|npu):(\d+)")


class _Values(msgspec.Struct):
    values: list[Any] = []


class _Attribute(msgspec.Struct):
    name: str
    value: Any = None


class _Told(msgspec.Struct):
    """A node; schema 1.0 tells `parent`, and inputs as a list, where 1.1 tells `ctrl_deps` and an object."""

    id: int
    name: str = ""
    ctrl_deps: int | None = None
    parent: int | None = None
    inputs: _Values | list[Any] = []
    outputs: _Values | list[Any] = []
    attrs: list[_Attribute] = []
    tid: int = 0

    def attributes(self) -> dict[str, Any]:
        """By name."""
        return {attribute.name: attribute.value for attribute in self.attrs}


class _Group(msgspec.Struct):
    pg_name: str
    ranks: Any = None
    group_size: int | None = None


class _Document(msgspec.Struct):
    schema: str
    nodes: list[_Told]


def read_execution_trace(file: Opened) -> RankTrace:
    """The trace of one rank."""
    with named(file.source):
        content = file.stream.read()
    try:
        told = msgspec.json.decode(content, type=_Document).nodes
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file.source}: must be a PyTorch execution trace, but {error}; record again") from error
    if not told:
        raise ValueError(f"{file.source}: must hold nodes, but holds none; record longer")
    above = {node.id: node.parent if node.ctrl_deps is None else node.ctrl_deps for node in told}
    named_groups = dict(_groups(file.source, told))
    devices = Counter(device for node in told for device in _devices(node))
    rank = min(devices, key=lambda d: (-devices[d], d)) if devices else 0
    notice = "ranks are not recorded: taken " + ("from the device of most tensors" if devices else "for rank 0")
    nodes = _Nodes(above, named_groups).of(sorted(told, key=lambda node: node.id))
    sizes = [group.size for group in (*named_groups.values(), *(node.group for node in nodes if node.group))]
    return node_trace(
        file.source, nodes, rank=rank, notices=[notice], format="execution trace", machine=None, job="",
        world=max(sizes, default=None),
    )  # fmt: skip


def _groups(source: str, told: list[_Told]) -> Iterator[tuple[str, Group]]:
    """Groups that the job told of when it made them."""
    for node in told:
        if node.name == GROUPS:
            for text in _values(node.inputs):
                try:
                    made = msgspec.json.decode(text, type=list[_Group]) if isinstance(text, str) else []
                except msgspec.MsgspecError as error:
                    raise ValueError(
                        f"{source}: node {node.id} ({GROUPS!r}) must tell groups, but {error}; record again"
                    ) from error
                for one in made:
                    ranks = rank_list(one.ranks)
                    yield one.pg_name, Group(name=one.pg_name, size=one.group_size or len(ranks), ranks=ranks)


def _values(held: _Values | list[Any]) -> list[Any]:
    return held.values if isinstance(held, _Values) else held


def _tensors(values: list[Any]) -> Iterator[list[Any]]:
    """Tensors among values: (tensor, storage, offset, elements, bytes of an element, device), in lists or alone."""
    for value in values:
        if isinstance(value, list):
            if len(value) >= 6 and isinstance(value[5], str) and all(isinstance(part, int) for part in value[:5]):
                yield value
            else:
                yield from _tensors(value)


def _devices(node: _Told) -> Iterator[int]:
    for tensor in _tensors(_values(node.outputs)):
        if (match := DEVICE.fullmatch(tensor[5])) is not None:
            yield int(match[1])


class _Nodes:
    """Innermost operations in order, each after those that made what it reads."""

    def __init__(self, above: dict[int, int | None], groups: dict[str, Group]) -> None:
        self.above, self.groups = above, groups
        self.made: dict[int, int] = {}  # by tensor, the last node that made it
        self.step = -1

    def of(self, told: list[_Told]) -> list[Node]:
        """The nodes that are kept."""
        parents = set(self.above.values())
        communication = {node.id for node in told if node.name == COMMUNICATION}
        kept = []
        for node in told:
            if node.name.startswith(STEP):
                self.step += 1
                kept.append(
                    Node(id=node.id, name=node.name, kind=Kind.ITERATION, stream="iterations", iteration=self.step)
                )
            elif node.name.startswith(CONTAINER) or node.name == GROUPS or self._within(node.id, communication):
                continue
            elif node.id in communication or node.id not in parents:
                kept.append(self._node(node))
        return kept

    def _within(self, node: int, communication: set[int]) -> bool:
        above = self.above[node]
        return above in communication and above != node

    def _node(self, node: _Told) -> Node:
        attributes = node.attributes()
        stream = f"thread {attributes.get('tid', node.tid)}"
        needs = sorted({self.made[t[0]] for t in _tensors(_values(node.inputs)) if t[0] in self.made})
        for tensor in _tensors(_values(node.outputs)):
            self.made[tensor[0]] = node.id
        name = collective_name(str(attributes.get("collective_name", "")))
        if node.name != COMMUNICATION or name in ("wait", ""):
            return Node(id=node.id, name=node.name, kind=Kind.HOST, stream=stream, needs=needs, iteration=self.step)
        width, elements = element_bytes(str(attributes.get("dtype", ""))), attributes.get("in_msg_nelems")
        nbytes = float("nan") if width is None or elements is None else float(width * elements)
        return Node(
            id=node.id, name=name, kind=Kind.COLLECTIVE, stream="communication", needs=needs, iteration=self.step,
            group=self._group(attributes), nbytes=nbytes,
        )  # fmt: skip

    def _group(self, attributes: dict[str, Any]) -> Group:
        name, size = str(attributes.get("pg_name", "")), int(attributes.get("pg_size") or 0)
        start, stride = attributes.get("global_rank_start"), attributes.get("global_rank_stride")
        ranks = () if start is None or not stride else tuple(int(start) + int(stride) * index for index in range(size))
        told = self.groups.get(name)
        return told if told is not None and (told.ranks or not ranks) else Group(name=name, size=size, ranks=ranks)
