"""Whatever a file holds, it is imported or refused in one line that names it: small traces, broken at random."""

import copy
import json
import random

import pytest

from capture.traces.pairing import pair
from capture.traces.recognise import read_all
from tests.capture.traces import profiled, written
from tests.capture.traces.test_graphs import chakra
from tests.capture.traces.test_workers import FUSED, HEAD, reduced, worker

VALUES = [
    None, 0, -1, 1, 2.5, -1e18, 1e308, 2**63, 2**64, -(2**70), 10**30, "x", "", "[0, 1]", "[]", True, {}, {"a": 1}, [],
    [1], ["a"], [[]], [["a"]], [[1.5]],
]  # fmt: skip
NUM = 60


def gloo():
    dims = {"Input Dims": [[100]], "Input type": ["float"]}
    return [
        profiled.span("aten::mm", "cpu_op", 10, 5),
        profiled.span("c10d::allreduce_", "cpu_op", 20, 5, **{"Input Dims": [[[100]], []], "Input type": ["", ""]}),
        profiled.span("gloo:all_reduce", "user_annotation", 26, 50, tid=9, **dims),
        profiled.span("Optimizer.step#SGD", "user_annotation", 90, 5),
        {"ph": "i", "name": "[memory]", "ts": 5, "args": {"Total Allocated": 5, "Device Type": 0}},
    ]


def lines():
    groups = [{"name": "a", "ranks": [0, 1]}]
    transfer = written.event("S", "SEND", 50, 60, tx="t", peer=1, bytes=4, it=0)
    return [
        written.header(0, groups=groups),
        *written.step(),
        transfer,
        {"name": "m", "cat": "MEM", "ts": 5, "bytes": 4},
    ]


def execution_trace():
    attrs = {"collective_name": "allreduce", "dtype": "Float", "in_msg_nelems": 7, "pg_name": "0", "pg_size": 2,
             "global_rank_start": 0, "global_rank_stride": 1, "tid": 1}  # fmt: skip
    tensor = [4, 5, 0, 7, 4, "cuda:1"]
    groups = json.dumps([{"pg_name": "0", "ranks": [], "group_size": 2}])
    return {
        "schema": "1.1.0",
        "nodes": [
            {"id": 1, "name": "[pytorch|profiler|execution_trace|process]", "ctrl_deps": 1},
            {"id": 2, "name": "## process_group:init ##", "ctrl_deps": 1, "inputs": {"values": [groups]}},
            {"id": 3, "name": "aten::a", "ctrl_deps": 1, "outputs": {"values": [tensor]}},
            {"id": 4, "name": "record_param_comms", "ctrl_deps": 1, "inputs": {"values": [[tensor]]},
             "attrs": [{"name": name, "value": value} for name, value in attrs.items()]},
        ],
    }  # fmt: skip


SAMPLES = {
    "profile.json": [profiled.document(profiled.numbered(2))],
    "gloo.json": [profiled.document(gloo())],
    "lines.jsonl": lines(),
    "timeline.json": [[*HEAD, *reduced(1, 100, activities=FUSED), *reduced(2, 101, activities=FUSED)]],
    "comm.json": [{"traceEvents": worker()}],
    "execution.json": [execution_trace()],
    "graph.json": [{"workload_graph": [
        {"Id": 1, "Name": "a", "NodeType": 4, "data_deps": [], "runtime": 5, "is_cpu_op": True},
        {"Id": 2, "Name": "b", "NodeType": 7, "data_deps": [1], "comm_type": 0, "comm_size": 5, "is_cpu_op": False}]}],
}  # fmt: skip


def text(documents):
    return b"\n".join(json.dumps(document).encode() for document in documents)


def places(value, holder, key):
    """Every value within, as what holds it and where."""
    yield holder, key
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from places(each, value, name)


def with_other_values(documents, draw):
    documents = copy.deepcopy(documents)
    found = [place for index, document in enumerate(documents) for place in places(document, documents, index)]
    holder, key = draw.choice(found)
    chance = draw.random()
    if chance < 0.75:
        holder[key] = copy.deepcopy(draw.choice(VALUES))
    elif isinstance(holder, list) and chance < 0.9:
        holder.insert(key, copy.deepcopy(holder[key]))
    else:
        del holder[key]
    return text(documents)


def with_other_bytes(content, draw):
    content = bytearray(content)
    for _ in range(draw.choice([1, 1, 3, 10])):
        at, chance = draw.randrange(len(content)), draw.random()
        if chance < 0.6:
            content[at] = draw.randrange(256)
        elif chance < 0.8:
            del content[at : at + draw.choice([1, 1, 5, 50])]
        else:
            content[at:at] = draw.randbytes(3)
    return bytes(content)


def imported_or_refused(path):
    """Whether it was imported; a refusal must be one line that names the file."""
    told = None
    try:
        pair(read_all([path]))
    except ValueError as refusal:
        told = str(refusal)
    assert told is None or (path.name in told and "\n" not in told)
    return told is None


@pytest.mark.parametrize("name", SAMPLES)
def test_whatever_is_done_to_a_trace_it_is_imported_or_refused_in_one_line(tmp_path, name):
    path = tmp_path / f"a.0.{name.rpartition('.')[2]}"
    path.write_bytes(text(SAMPLES[name]))
    assert imported_or_refused(path)
    outcomes = []
    for number in range(NUM):
        draw = random.Random(number)
        change = with_other_values(SAMPLES[name], draw) if number % 3 else with_other_bytes(text(SAMPLES[name]), draw)
        path.write_bytes(change)
        outcomes.append(imported_or_refused(path))
    assert True in outcomes
    assert False in outcomes


def test_whatever_is_done_to_a_chakra_file_it_is_imported_or_refused_in_one_line(tmp_path):
    attributes = {"comm_type": ("int64_val", 0), "comm_size": ("int64_val", 64), "comm_dst": ("int32_val", 1)}
    path = chakra(tmp_path / "a.0.et", {"id": 1, "name": "a", "type": 4, "duration_micros": 3},
                  {"id": 2, "name": "b", "type": 5, "data_deps": [1], "attr": attributes})  # fmt: skip
    whole = path.read_bytes()
    assert imported_or_refused(path)
    for number in range(3 * NUM):
        path.write_bytes(with_other_bytes(whole, random.Random(number)))
        imported_or_refused(path)
