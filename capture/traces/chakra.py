"""Reads Chakra execution traces, as protobuf and as JSON: MLCommons' graphs of a rank, which ASTRA-sim runs.

What the format does not tell is assumed with a notice: the rank is that of the file's name, and graphs without times
take none (nodes.py). Refuses what does not parse as these messages, and nodes of types that are not of a training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

import msgspec
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from capture.traces.assemble import MAX_WORLD, topological_order
from capture.traces.chrome import Microseconds
from capture.traces.communication import collective_name, kernel_collective
from capture.traces.nodes import Node, node_trace, rank_of_name
from capture.traces.opened import Opened, named
from capture.traces.records import Group, Kind, RankTrace

__all__ = ["read_chakra", "read_chakra_json", "starts_as_chakra"]

METADATA, LOAD, STORE, COMPUTE, SEND, RECV, COLLECTIVE = range(1, 8)  # NodeType of et_def.proto
KINDS = {LOAD: Kind.COPY, STORE: Kind.COPY, COMPUTE: Kind.COMPUTE, SEND: Kind.SEND, RECV: Kind.RECV,
         COLLECTIVE: Kind.COLLECTIVE}  # fmt: skip
COLLECTIVES = ("all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter",
               "reduce_scatter", "barrier")  # fmt: skip
"""CollectiveCommType of et_def.proto, by number."""
STREAMS = {LOAD: "memory", STORE: "memory", COMPUTE: "compute", SEND: "send", RECV: "recv",
           COLLECTIVE: "communication"}  # fmt: skip
ALL = Group(name="all", size=0)

VARIANTS = {  # fields of the value of an AttributeProto: number and protobuf's type
    "double_val": (3, "DOUBLE"), "float_val": (5, "FLOAT"), "int32_val": (7, "INT32"), "int64_val": (9, "INT64"),
    "uint32_val": (11, "UINT32"), "uint64_val": (13, "UINT64"), "sint32_val": (15, "SINT32"),
    "sint64_val": (17, "SINT64"), "fixed32_val": (19, "FIXED32"), "fixed64_val": (21, "FIXED64"),
    "sfixed32_val": (23, "SFIXED32"), "sfixed64_val": (25, "SFIXED64"), "bool_val": (27, "BOOL"),
    "string_val": (29, "STRING"),
}  # fmt: skip


@cache
def _messages() -> tuple[type[Message], type[Message]]:
    """(GlobalMetadata, Node) of et_def.proto: its fields that mean something here; protobuf skips the others."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="chakra_subset.proto", package="chakra_subset", syntax="proto3")

    def message(
        name: str, fields: dict[str, tuple[int, str]], *, attributes: int = 0, repeated: tuple[str, ...] = ()
    ) -> Any:  # noqa: ANN401
        made = file.message_type.add(name=name)
        for key, (number, kind) in fields.items():
            label = field.LABEL_REPEATED if key in repeated else field.LABEL_OPTIONAL
            made.field.add(name=key, number=number, type=getattr(field, f"TYPE_{kind}"), label=label)
        if attributes:
            made.field.add(name="attr", number=attributes, type=field.TYPE_MESSAGE, label=field.LABEL_REPEATED,
                           type_name=".chakra_subset.Attribute")  # fmt: skip
        return made

    attribute = message("Attribute", {"name": (1, "STRING"), **VARIANTS})
    attribute.oneof_decl.add(name="value")
    for each in attribute.field[1:]:
        each.oneof_index = 0
    message("GlobalMetadata", {"version": (1, "STRING")}, attributes=2)
    message("Node", {"id": (1, "UINT64"), "name": (2, "STRING"), "type": (3, "INT32"), "ctrl_deps": (4, "UINT64"),
                     "data_deps": (5, "UINT64"), "start_time_micros": (6, "UINT64"), "duration_micros": (7, "UINT64")},
            attributes=10, repeated=("ctrl_deps", "data_deps"))  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = [pool.FindMessageTypeByName(f"chakra_subset.{name}") for name in ("GlobalMetadata", "Node")]
    metadata, node = (message_factory.GetMessageClass(each) for each in found)
    return metadata, node


Peer = Annotated[int, msgspec.Meta(ge=-1, le=MAX_WORLD)]


class _Told(msgspec.Struct, kw_only=True):
    """A node as both forms tell it."""

    id: int = msgspec.field(name="Id")
    name: str = msgspec.field(name="Name", default="")
    type: int = msgspec.field(name="NodeType")
    ctrl_deps: list[int] = msgspec.field(name="ctrlDeps", default_factory=list)
    data_deps: list[int] = []
    start: Microseconds | None = None
    runtime: Microseconds | None = None
    is_cpu_op: bool = False
    tid: int | None = None
    comm_type: int | None = None
    comm_size: float | None = None
    comm_src: Peer = -1
    comm_dst: Peer = -1
    comm_tag: int = 0
    pg_name: str = ""


ATTRIBUTES = frozenset({"is_cpu_op", "tid", "comm_type", "comm_size", "comm_src", "comm_dst", "comm_tag", "pg_name"})


class _Document(msgspec.Struct):
    workload_graph: list[_Told]


def starts_as_chakra(head: bytes) -> bool:
    """Whether bytes begin as a length and a GlobalMetadata, whose first field is a version or an attribute."""
    length, at = _varint(head, 0)
    return 0 < length <= 1 << 24 and head[at : at + 1] in (b"\x0a", b"\x12")


def read_chakra(file: Opened) -> RankTrace:
    """The graph of one rank in protobuf's form: messages, each after its length."""
    metadata, node = _messages()
    with named(file.source):
        content = file.stream.read()
    found, last = [], "the metadata"
    try:
        for number, text in enumerate(_split(content)):
            if number == 0:
                metadata.FromString(text)
            else:
                found.append(_told(node.FromString(text)))
                last = f"node {found[-1].id} ({found[-1].name!r})"
    except (DecodeError, ValueError, TypeError) as error:
        raise ValueError(
            f"{file.source}: must be whole Chakra messages, but after {last}: {error}; copy it again"
        ) from error
    return _trace(file.source, "chakra", found)


def read_chakra_json(file: Opened) -> RankTrace:
    """The graph of one rank in JSON."""
    with named(file.source):
        content = file.stream.read()
    try:
        found = msgspec.json.decode(content, type=_Document).workload_graph
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file.source}: must be a Chakra graph in JSON, but {error}; write it again") from error
    return _trace(file.source, "chakra json", found)


def _split(content: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        length, at = _varint(content, at)
        if length < 0 or at + length > len(content):
            raise ValueError("the file ends within a message")
        yield content[at : at + length]
        at += length


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number in protobuf's base 128 and where it ends; -1 where it does not."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            break
        byte, at = content[at], at + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    return -1, at


def _told(node: Any) -> _Told:  # noqa: ANN401 - a message class made at run time
    attributes = {a.name: getattr(a, a.WhichOneof("value") or "string_val") for a in node.attr if a.name in ATTRIBUTES}
    fields = {
        "Id": node.id, "Name": node.name, "NodeType": node.type, "ctrlDeps": list(node.ctrl_deps),
        "data_deps": list(node.data_deps), "start": node.start_time_micros or None,
        "runtime": node.duration_micros or None, **attributes,
    }  # fmt: skip
    return msgspec.convert(fields, _Told, strict=False)


def _trace(source: str, form: str, found: list[_Told]) -> RankTrace:
    rank, *notices = rank_of_name(source)
    control = _control(found)
    if not control and any(told.ctrl_deps for told in found):
        notices.append("dependencies of control form cycles with those of data, and are left out")
    nodes = [_node(source, told, control) for told in found if told.type != METADATA]
    return node_trace(source, nodes, rank=rank, notices=notices, format=form, world=None, machine=None, job="")


def _control(found: list[_Told]) -> set[int]:
    """Nodes of the file that dependencies of control may name: none where these tell of calls, not of an order.

    A converter names the caller of each node, be it in the file or not; others mean what must have ended.
    """
    index = {told.id: number for number, told in enumerate(found)}
    pairs = [(index[need], number) for number, told in enumerate(found)
             for need in (*told.data_deps, *told.ctrl_deps) if need in index]  # fmt: skip
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    whole = len(topological_order(len(found), edges[:, 0], edges[:, 1])) == len(found)
    return set(index) if whole else set()


def _node(source: str, told: _Told, control: set[int]) -> Node:
    """A node; what runs on the host is of the host, whatever it posts."""
    if told.type not in KINDS:
        raise ValueError(
            f"{source}: node {told.id} ({told.name!r}) must be of a type in {sorted(KINDS)}, but is of {told.type}"
        )
    kind, stream = KINDS[told.type], STREAMS[told.type]
    if told.tid is not None or told.is_cpu_op:
        stream = f"{'thread' if told.is_cpu_op else 'stream'} {told.tid or 0}"
    name, group = told.name, None
    if told.is_cpu_op and kind not in (Kind.SEND, Kind.RECV):
        kind = Kind.HOST
    elif kind is Kind.COLLECTIVE:
        name, group = _collective(told), Group(name=told.pg_name, size=0) if told.pg_name else ALL
    elif kind is Kind.COMPUTE and name.startswith(("Memcpy", "Memset")):
        kind = Kind.COPY
    return Node(
        id=told.id, name=name, kind=kind, stream=stream, start_us=told.start, duration_us=told.runtime, group=group,
        needs=sorted({*told.data_deps, *(need for need in told.ctrl_deps if need in control)}),
        nbytes=float("nan") if told.comm_size is None else told.comm_size,
        peer={Kind.SEND: told.comm_dst, Kind.RECV: told.comm_src}.get(kind, -1), tag=str(told.comm_tag),
    )  # fmt: skip


def _collective(told: _Told) -> str:
    of_kernel = kernel_collective(told.name)
    if of_kernel is not None:
        return of_kernel
    if told.comm_type is not None and 0 <= told.comm_type < len(COLLECTIVES):
        return COLLECTIVES[told.comm_type]
    return collective_name(told.name)
