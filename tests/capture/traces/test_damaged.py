"""Whatever a file holds, it is imported or refused in one line that names it: small traces, broken at random."""

import copy
import gzip
import io
import json
import random
import tarfile
import zipfile

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


def refusal(path):
    with pytest.raises(ValueError, match=path.name) as caught:
        read_all([path])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_stands_before_a_cut_is_read_so_that_the_last_whole_line_or_event_is_told(tmp_path):
    path = tmp_path / "a.gz"
    many = [written.header(0), *(line for it in range(300) for line in written.step(it=it))]
    content = gzip.compress(text(many))
    path.write_bytes(content[: len(content) // 2])
    number = int(refusal(path).rpartition("the last whole line is ")[2])
    assert 300 < number < 900  # of 1,201 lines, half of what they are packed into
    events = [profiled.span(f"op{k}", "cpu_op", 10 * k, 5) for k in range(3000)]
    content = gzip.compress(text([profiled.document(events)]))
    path.write_bytes(content[: len(content) // 2])
    assert 500 < int(refusal(path).partition("the last whole event is number ")[2].partition(",")[0]) < 2500


def test_a_cut_archive_names_the_file_within_that_the_cut_is_in(tmp_path):
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for name in ("first.json", "second.json"):
            content = text(
                [profiled.document([{**one, "noise": random.Random(name).random()} for one in gloo()] * 200)]
            )
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    path = tmp_path / "job.tar.gz"
    path.write_bytes(held.getvalue()[: len(held.getvalue()) * 3 // 4])
    assert f"{path.name}:second.json: must be whole" in refusal(path)


def test_a_locked_archive_an_empty_one_and_endless_nesting_are_refused(tmp_path):
    path = tmp_path / "locked.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jsonl", text(lines()))
    content = bytearray(path.read_bytes())
    content[6] |= 1
    content[content.find(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(content)
    assert "locked.zip:a.jsonl: must be readable, but needs a password" in refusal(path)
    path = tmp_path / "deep.json"
    path.write_bytes(b'{"traceEvents": ' + b"[" * 100_000)
    assert "nests too deep" in refusal(path)


def test_a_run_of_blanks_takes_no_longer_than_its_length(tmp_path):
    path = tmp_path / "blank.json"
    path.write_bytes(b'{"traceEvents": [' + b" " * 1_000_000)  # by a search from each blank: an hour
    assert "must be whole JSON" in refusal(path)


def kernel(size, count):
    told = {"Process Group Name": "9", "Group size": size, "Collective name": "allreduce", "In msg nelems": count}
    return profiled.document([profiled.span("ncclKernel_AllReduce", "kernel", 1, 2, dtype="Float", **told)])


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ([written.header(0)], "must hold operations, but holds none"),
        ([written.header(0), written.event("M", "MEM", 1, 1, bytes=5)], "must hold operations, but holds none"),
        ([written.header(0), written.event("I", "ITER", 1, 2, it=0)], "must hold operations, but holds none"),
        ([{"workload_graph": []}], "must hold operations, but holds none"),
        ([written.header(0), *(written.event("a", "FW", t, t, id=7) for t in (1, 2))],
         ":3: event 'a' must have an id of its own, but 7 is that of line 2"),
        ([written.header(0, groups=[{"name": "tp", "ranks": [0, 2]}]), *written.step()],
         "process group 'tp' must be of ranks below 2, but has 2"),
        ([written.header(0, groups=[{"name": "tp", "ranks": [1, 1]}]), *written.step()],
         "process group 'tp' must have each rank once"),
        ([kernel(-3, 5)], "process group '9' must have up to"),
        ([kernel(2**21, 5)], "process group '9' must have up to"),
        ([kernel(2, -5)], "must have at least 0 bytes, but has -20"),
    ],
)  # fmt: skip
def test_what_no_job_can_hold_is_refused(tmp_path, document, told):
    path = tmp_path / "a.json"
    path.write_bytes(text(document))
    assert told in refusal(path)
