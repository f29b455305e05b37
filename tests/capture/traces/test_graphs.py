"""Execution traces, Chakra's and PyTorch's: every shipped one, and small ones by hand."""

import json
import tarfile

import numpy as np
import pytest

from capture.traces.assemble import CODE
from capture.traces.chakra import _messages
from capture.traces.pairing import pair
from capture.traces.recognise import read_all
from capture.traces.records import Kind


def count(trace, kind):
    return int((trace.kind == CODE[kind]).sum())


def names(trace, kind):
    return [trace.names[name] for name in trace.name[trace.kind == CODE[kind]]]


@pytest.fixture(scope="module")
def folder(shared):
    return shared / "traces"


@pytest.fixture(scope="module")
def chakra_json(folder, tmp_path_factory):
    made = tmp_path_factory.mktemp("chakra")
    with tarfile.open(folder / "chakra" / "json_trace.tar.gz") as archive:
        archive.extractall(made, filter="data")
    return made / "jsonData"


# Shipped.


def test_the_custom_ring_pairs_every_send_with_its_receive(folder):
    traces = read_all(sorted((folder / "astra").glob("custom_ring_allreduce_8.*.et")))
    assert [trace.rank for trace in traces] == list(range(8))
    for trace in traces:
        # A ring of eight sends 2 * 7 chunks and reduces 7 of them.
        assert [count(trace, kind) for kind in (Kind.SEND, Kind.RECV, Kind.COMPUTE)] == [14, 14, 7]
        assert set(trace.peer[trace.kind == CODE[Kind.SEND]]) == {(trace.rank + 1) % 8}
        assert set(trace.nbytes[trace.kind == CODE[Kind.SEND]]) == {2**20 / 8}
        assert not (trace.end_s - trace.start_s)[trace.kind != CODE[Kind.COMPUTE]].any()
        assert any(notice.startswith("no times") for notice in trace.notices)
    assert pair(traces).num_transfers == 8 * 14


def test_the_microbenchmark_is_one_collective_on_eight_ranks(folder):
    traces = read_all(sorted((folder / "astra").glob("all_reduce_8npus_1MB.*.et")))
    for trace in traces:
        assert names(trace, Kind.COLLECTIVE) == ["all_reduce"]
        assert trace.nbytes.tolist() == [2**20]
        assert not trace.end_s.any()
    found = pair(traces)
    assert (found.num_collectives, found.agreements) == (1, ())


def test_chakra_is_the_same_as_protobuf_and_as_json(folder, chakra_json):
    (binary,) = read_all([folder / "chakra" / "feeder_tests_trace.tar.gz"])
    (text,) = read_all([chakra_json / "chakra.0.json"])
    assert len(binary) == len(text) == 3664
    assert names(binary, Kind.COLLECTIVE) == names(text, Kind.COLLECTIVE)
    assert names(binary, Kind.COLLECTIVE).count("all_reduce") == 5
    np.testing.assert_array_equal(binary.kind, text.kind)
    np.testing.assert_array_equal(binary.start_s, text.start_s)
    np.testing.assert_array_equal(binary.end_s, text.end_s)
    np.testing.assert_array_equal(binary.before, text.before)


def test_two_graphs_of_rank_zero_in_one_archive_are_no_job(folder, chakra_json):
    (small,) = read_all([chakra_json / "small_chakra.0.json"])
    assert len(small) == 7
    with pytest.raises(ValueError, match="rank 0 must have one trace"):
        pair(read_all([folder / "chakra" / "json_trace.tar.gz"]))


def test_the_execution_trace_tells_groups_and_bytes(folder):
    (trace,) = read_all([folder / "param" / "resnet_2gpu_et.json.gz"])
    assert (trace.rank, trace.world) == (1, 2)
    told = names(trace, Kind.COLLECTIVE)
    # grep counts 27 record_param_comms in the file: 6 are waits.
    assert (len(told), told.count("all_reduce"), told.count("broadcast")) == (21, 15, 6)
    assert names(trace, Kind.HOST).count("record_param_comms") == 6
    assert trace.groups[0].ranks == (0, 1)
    assert count(trace, Kind.ITERATION) == 3
    rows = np.flatnonzero(trace.kind == CODE[Kind.COLLECTIVE])
    assert trace.nbytes[rows[:3]].tolist() == [53120 * 4, 53 * 8, 2049000 * 4]
    assert any(notice.startswith("no times") for notice in trace.notices)


def test_the_profile_and_the_execution_trace_of_one_job_tell_the_same_collectives(folder):
    """The same ResNet on two GPUs, one rank each way."""
    (profile,) = read_all([folder / "hta" / "nccl_data.json.gz"])
    (graph,) = read_all([folder / "param" / "resnet_2gpu_et.json.gz"])
    assert names(profile, Kind.COLLECTIVE) == names(graph, Kind.COLLECTIVE)
    mine, its = (trace.nbytes[trace.kind == CODE[Kind.COLLECTIVE]] for trace in (profile, graph))
    np.testing.assert_array_equal(mine, its)


# By hand.


def message(content):
    assert len(content) < 128
    return bytes([len(content)]) + content


def chakra(path, *nodes):
    metadata, node = _messages()
    parts = [metadata(version="0.0.4").SerializeToString()]
    for told in nodes:
        attributes = told.pop("attr", {})
        made = node(**told)
        for name, (field, value) in attributes.items():
            setattr(made.attr.add(name=name), field, value)
        parts.append(made.SerializeToString())
    path.write_bytes(b"".join(message(part) for part in parts))
    return path


def test_starts_follow_from_dependencies_and_durations(tmp_path):
    path = chakra(
        tmp_path / "a.3.et",
        {"id": 5, "name": "a", "type": 4, "duration_micros": 10},
        {"id": 6, "name": "b", "type": 4, "duration_micros": 4, "data_deps": [5]},
        {"id": 7, "name": "c", "type": 7, "ctrl_deps": [6], "attr": {"comm_type": ("int64_val", 7)}},
    )
    (trace,) = read_all([path])
    assert trace.rank == 3
    assert [round(start * 1e6) for start in trace.start_s] == [0, 10, 14]
    assert names(trace, Kind.COLLECTIVE) == ["reduce_scatter"]


def test_recorded_starts_are_kept(tmp_path):
    told = [{"id": n, "name": "a", "type": 4, "start_time_micros": at, "duration_micros": 5, "data_deps": deps}
            for n, at, deps in ((1, 100, []), (2, 200, [1]), (3, 203, [2]))]  # fmt: skip
    (trace,) = read_all([chakra(tmp_path / "a.0.et", *told)])
    assert [round(start * 1e6) for start in trace.start_s] == [0, 100, 103]
    assert (trace.before.tolist(), trace.after.tolist()) == ([0], [1])
    assert any("1 dependencies overlap in time" in notice for notice in trace.notices)


def refusal(path):
    with pytest.raises(ValueError, match=path.name) as caught:
        read_all([path])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_cycle_a_missing_node_a_repeated_one_and_an_unknown_type_are_refused(tmp_path):
    path, node = tmp_path / "a.0.et", {"name": "a", "type": 4}
    cycle = [{**node, "id": 1, "data_deps": [2]}, {**node, "id": 2, "data_deps": [1]}]
    assert "its dependencies form a cycle" in refusal(chakra(path, *cycle))
    assert "node 1 ('a') must depend on nodes of the file, but 9 is none" in refusal(
        chakra(path, {**node, "id": 1, "data_deps": [9]})
    )
    assert "node 1 ('a') must stand once" in refusal(chakra(path, {**node, "id": 1}, {**node, "id": 1}))
    assert "must be of a type in [2, 3, 4, 5, 6, 7], but is of 9" in refusal(chakra(path, {**node, "id": 1, "type": 9}))


def test_a_chakra_file_that_was_cut_short_is_refused_by_its_last_node(folder, tmp_path):
    whole = (folder / "astra" / "custom_ring_allreduce_8.0.et").read_bytes()
    path = tmp_path / "a.0.et"
    path.write_bytes(whole[:-5])
    assert "after node 33 ('COMM_SEND_NODE_tb0_step26'): the file ends within a message" in refusal(path)


def test_graphs_in_json_are_refused_where_they_are_wrong(tmp_path):
    path = tmp_path / "a.0.json"
    path.write_text('{"workload_graph": [{"Id": 1, "Name": "a", "NodeType": "x"}]}')
    assert "must be a Chakra graph in JSON, but Expected `int`" in refusal(path)
    path.write_text('{"schema": "1.1.0", "nodes": [{"id": 1, ')
    assert "must be a PyTorch execution trace, but Input data was truncated" in refusal(path)
    path.write_text('{"schema": "1.1.0", "nodes": []}')
    assert "must hold nodes, but holds none" in refusal(path)


def test_execution_traces_of_the_old_schema_are_read(tmp_path):
    def tensor(number):
        return [number, number, 0, 4, 4, "cuda:2"]

    nodes = [
        {"id": 1, "name": "[pytorch|profiler|execution_trace|thread]", "parent": 1, "tid": 1},
        {"id": 2, "name": "aten::a", "parent": 1, "inputs": [tensor(7)], "outputs": [tensor(8)], "tid": 1},
        {"id": 3, "name": "aten::b", "parent": 1, "inputs": [[tensor(8)], 1], "outputs": [tensor(9)], "tid": 1},
    ]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"schema": "1.0.1", "nodes": nodes}))
    (trace,) = read_all([path])
    assert (trace.rank, names(trace, Kind.HOST)) == (2, ["aten::a", "aten::b"])
    assert (trace.before.tolist(), trace.after.tolist()) == ([0], [1])
