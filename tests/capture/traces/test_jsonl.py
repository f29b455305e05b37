"""This package's own traces: read in full, and refused where a line breaks a law."""

import gzip

import numpy as np
import pytest

from capture.traces.assemble import CODE
from capture.traces.recognise import read_all
from capture.traces.records import Kind, Topology
from tests.capture.traces.written import EPOCH, NS, event, header, step, write


def count(trace, kind):
    return int((trace.kind == CODE[kind]).sum())


# Rows by category, counted in the files with grep: the README beside them has no counts.
@pytest.mark.parametrize(
    ("job", "ranks", "compute", "collectives", "transfers", "iterations"),
    [
        ("ring4_400mbit", 4, 530, 30, 180, 10),
        ("ddp2_1gbit_b1", 2, 915, 195, 0, 15),
        ("ddp2_1gbit_b4", 2, 915, 105, 0, 15),
        ("ddp2_1gbit_b25", 2, 915, 30, 0, 15),
    ],
)
def test_every_line_of_the_fine_traces_becomes_an_event(
    shared, job, ranks, compute, collectives, transfers, iterations
):
    traces = read_all(sorted((shared / "traces" / "fine_ring").glob(f"{job}_rank*")))
    assert [trace.rank for trace in traces] == list(range(ranks))
    for trace in traces:
        assert trace.world == ranks
        assert count(trace, Kind.COMPUTE) == compute
        assert count(trace, Kind.COLLECTIVE) == collectives
        assert count(trace, Kind.SEND) == count(trace, Kind.RECV) == transfers
        assert count(trace, Kind.ITERATION) == iterations == trace.iteration.max() + 1
        assert np.all(trace.start_s[trace.after] >= trace.end_s[trace.before])


def test_the_ring_names_its_topology_and_its_transfers(shared):
    trace, *_ = read_all([shared / "traces" / "fine_ring" / "ring4_400mbit_rank0.jsonl.gz"])
    assert trace.topology is Topology.RING
    assert trace.transactions[0] == "i2|0>1|b0|c0|s0"
    assert len(trace.transactions) == 360


def test_times_keep_their_nanoseconds(tmp_path):
    odd = {**event("FW", "FW", 0, 0), "ts": EPOCH + 123_456_789, "end": EPOCH + 123_456_790}
    (trace,) = read_all([write(tmp_path / "a", header(), event("UPD", "UPD", 0, 1), odd)])
    assert trace.epoch_ns == EPOCH
    assert [round(s * NS) for s in (trace.start_s[1], trace.end_s[1])] == [123_456_789, 123_456_790]


def test_gradients_go_before_their_bucket_and_that_before_the_update(tmp_path):
    (trace,) = read_all([write(tmp_path / "a", header(), *step())])
    names = [trace.names[name] for name in trace.name]
    edges = {(names[a], names[b]) for a, b in zip(trace.before, trace.after, strict=True)}
    assert edges == {("AR", "UPD")}
    (trace,) = read_all([write(tmp_path / "b", {**header(), "bof": {"w": 0}}, *step())])
    edges = {(names[a], names[b]) for a, b in zip(trace.before, trace.after, strict=True)}
    assert edges == {("BW.w", "AR"), ("AR", "UPD")}


def test_samples_of_memory_and_written_dependencies_are_kept(tmp_path):
    sample = {"name": "memory", "cat": "MEM", "ts": EPOCH, "bytes": 7}
    first, last = event("a", "COMP", 0, 1, id=5), event("b", "COPY", 1, 2, deps=[5])
    (trace,) = read_all([write(tmp_path / "a", header(), sample, first, last)])
    assert trace.memory_bytes.tolist() == [7.0]
    assert (trace.before.tolist(), trace.after.tolist()) == ([0], [1])


def refusal(tmp_path, *lines):
    with pytest.raises(ValueError, match=r".") as caught:
        read_all([write(tmp_path / "a.jsonl", *lines)])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (event("FW", "FW", 5, 4), "a.jsonl:2: event 'FW' must end after"),
        (event("FW", "FW", 5, 6, enq=EPOCH + 6 * NS), "a.jsonl:2: event 'FW' must be posted before"),
        (event("FW", "FOO", 5, 6), "a.jsonl:2: event 'FW' must have a cat of"),
        (event("FW", "FW", 5, 6, colour="red"), "unknown field `colour`"),
        (event("S", "SEND", 5, 6, peer=1), "a.jsonl:2: event 'S' is a SEND and must have tx and peer"),
        (event("C", "COMM", 5, 6, group="tp"), "must be of a group in the header, but 'tp' is none"),
        (event("FW", "FW", 5, 6, deps=[3]), "event 'FW' must depend on events of the file, but 3 is none"),
        ({"name": "m", "cat": "MEM", "ts": 1}, "a.jsonl:2: event 'm' is a sample of memory and must have bytes"),
    ],
)
def test_a_line_that_breaks_a_law_is_refused_by_number_and_name(tmp_path, wrong, told):
    assert told in refusal(tmp_path, header(), wrong)


def test_a_clock_that_goes_backwards_is_refused(tmp_path):
    told = refusal(tmp_path, header(), *step(100.0), *step(50.0, it=1))
    assert (
        "a.jsonl:6: event 'FW' must end after those above it on stream 'compute', but ends 48.000 ms before one" in told
    )


def test_lines_of_racing_threads_may_change_places(tmp_path):
    lines = [event("a", "COMP", 1, 2), event("b", "COMP", 0.5, 1.5)]
    (trace,) = read_all([write(tmp_path / "a", header(), *lines)])
    assert trace.names[trace.name[0]] == "b"


def test_a_transaction_that_stands_twice_is_refused(tmp_path):
    sends = [event("S", "SEND", at, at + 1, tx="0>1|k", peer=1, it=0) for at in (1, 3)]
    assert "'0>1|k' stands twice among the SEND of iteration 0" in refusal(tmp_path, header(), *sends)


def test_a_cycle_of_dependencies_is_refused_by_an_event_of_it(tmp_path):
    ring = [event("a", "COMP", 0, 1, id=1, deps=[3]), event("b", "COMP", 1, 2, id=2, deps=[1]),
            event("c", "COMP", 2, 3, id=3, deps=[2]), event("0", "COMP", 3, 4, id=4, deps=[3])]  # fmt: skip
    told = refusal(tmp_path, header(), *ring)
    assert "dependencies form a cycle" in told
    assert "event '0'" not in told


def test_a_later_version_and_another_format_are_refused(tmp_path):
    assert "version 0 to 1, but is 'trainspace.trace' of version 2" in refusal(tmp_path, {**header(), "version": 2})
    assert "but is 'other' of version 1" in refusal(tmp_path, {**header(), "format": "other"})


def test_a_trace_that_was_cut_short_is_refused(shared, tmp_path):
    whole = (shared / "traces" / "fine_ring" / "ring4_400mbit_rank0.jsonl.gz").read_bytes()
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz: must be whole, but is cut short"):
        read_all([cut])
    line = gzip.decompress(whole)[:5000]
    cut.write_bytes(gzip.compress(line))
    with pytest.raises(ValueError, match=r"cut\.jsonl\.gz:\d+: each line must be an event"):
        read_all([cut])


def test_empty_files_and_unknown_kinds_are_refused(tmp_path):
    empty, unknown = "is empty", "must be a trace of a known kind"
    contents = {b"": empty, b"\n \n": empty, gzip.compress(b""): empty, b"hello": unknown, bytes(range(256)): unknown}
    for content, told in contents.items():
        path = tmp_path / "x"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=told):
            read_all([path])
    with pytest.raises(ValueError, match="cannot read: No such file"):
        read_all([tmp_path / "none"])
