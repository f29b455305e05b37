"""Horovod's timeline and BytePS's communication traces, written by hand after their documentation: none is public."""

import json

import pytest

from capture.traces.assemble import CODE
from capture.traces.pairing import pair
from capture.traces.recognise import read_all
from capture.traces.records import Kind, Topology

START = 1_700_000_000_000_000


def count(trace, kind):
    return int((trace.kind == CODE[kind]).sum())


def spans(trace, kind):
    rows = trace.kind == CODE[kind]
    return [(round(a * 1e6), round(b * 1e6)) for a, b in zip(trace.start_s[rows], trace.end_s[rows], strict=True)]


# Horovod: an array, B and E by tensor, ticks of ranks within the negotiation.


def tensor(pid, name):
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def reduced(pid, at, ranks=(0, 1), activities=(("NCCL_ALLREDUCE", 30, 90),), shape="[10, 5]", end=100):
    """One all-reduce of a tensor from its negotiation at `at` to its end."""
    events = [{"name": "NEGOTIATE_ALLREDUCE", "ph": "B", "pid": pid, "ts": at}]
    events += [{"name": str(rank), "ph": "X", "pid": pid, "ts": at + 2 * rank, "dur": 0} for rank in ranks]
    events += [{"ph": "E", "pid": pid, "ts": at + 10}, {"name": "ALLREDUCE", "ph": "B", "pid": pid, "ts": at + 11}]
    for name, start, stop in activities:
        events += [{"name": name, "ph": "B", "pid": pid, "ts": at + start}, {"ph": "E", "pid": pid, "ts": at + stop}]
    return [*events, {"ph": "E", "pid": pid, "ts": at + end, "args": {"dtype": "float32", "shape": shape}}]


HEAD = [{"name": "start", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": START}}, tensor(1, "a"),
        tensor(2, "b")]  # fmt: skip
FUSED = (("QUEUE", 12, 15), ("MEMCPY_IN_FUSION_BUFFER", 20, 28), ("NCCL_ALLREDUCE", 30, 90),
         ("MEMCPY_OUT_FUSION_BUFFER", 91, 95))  # fmt: skip


def timeline(tmp_path, *events, text=None):
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps([*HEAD, *events]) if text is None else text)
    return path


def test_a_timeline_gives_each_all_reduce_with_its_posting_and_bytes(tmp_path):
    cycle = {"name": "CYCLE_START", "ph": "i", "pid": 0, "ts": 5, "s": "g"}
    (trace,) = read_all([timeline(tmp_path, cycle, *reduced(1, 100), *reduced(1, 300), *reduced(2, 310, shape="[3]"))])
    assert (trace.rank, trace.world, trace.format) == (0, 2, "horovod")
    assert trace.epoch_ns == (START + 130) * 1000
    assert spans(trace, Kind.COLLECTIVE) == [(0, 60), (200, 260), (210, 270)]
    assert [round(s * 1e6) for s in trace.posted_s] == [-30, 170, 180]
    assert trace.nbytes.tolist() == [200, 200, 12]
    assert trace.iteration.tolist() == [0, 1, 0]
    assert pair([trace]).missing == (1,)


def test_fused_tensors_are_one_collective_between_copies(tmp_path):
    both = [*reduced(1, 100, activities=FUSED), *reduced(2, 101, activities=FUSED, shape="[3]")]
    (trace,) = read_all([timeline(tmp_path, *both)])
    assert spans(trace, Kind.COLLECTIVE) == [(10, 71)]
    assert spans(trace, Kind.COPY) == [(0, 9), (71, 76)]
    assert trace.tensors == ("a + b",)
    assert trace.nbytes.tolist() == [212.0] * len(trace)


def test_a_hierarchical_reduction_is_one_collective(tmp_path):
    steps = (("NCCL_REDUCESCATTER", 20, 30), ("MEMCPY_IN_HOST_BUFFER", 31, 35), ("MPI_ALLREDUCE", 36, 60),
             ("MEMCPY_OUT_HOST_BUFFER", 61, 65), ("NCCL_ALLGATHER", 66, 80))  # fmt: skip
    (trace,) = read_all([timeline(tmp_path, *reduced(1, 100, activities=steps))])
    assert spans(trace, Kind.COLLECTIVE) == [(0, 60)]
    assert trace.topology is Topology.HIERARCHICAL


def test_a_timeline_of_a_job_that_was_killed_is_read_to_its_end(tmp_path):
    whole = json.dumps([*HEAD, *reduced(1, 100), *reduced(2, 310)[:6]])
    (trace,) = read_all([timeline(tmp_path, text=whole[:-1] + ",\n")])
    assert count(trace, Kind.COLLECTIVE) == 1
    assert any("2 activities were cut off" in notice for notice in trace.notices)


def test_wrong_timelines_are_refused(tmp_path):
    end = {"ph": "E", "pid": 1, "ts": 7}
    for events, told in (([end, *reduced(1, 100)], "an end of 'a' at 7.0 us must have a beginning"),
                         (reduced(1, 100, end=5), "event 'ALLREDUCE' of 'a' must not end before it starts"),
                         (reduced(1, 100)[:4], "must hold a collective from beginning to end")):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            read_all([timeline(tmp_path, *events)])


# BytePS: X by gradient (pid) and partition (tid), `total` for the whole.


def stage(name, gradient, part, ts, dur):
    pid = f"Comm.byteps.gradient_{gradient}"
    return {
        "ph": "X",
        "args": {"name": pid},
        "pid": pid,
        "name": f"{pid}.{name}",
        "ts": ts,
        "dur": dur,
        "tid": str(part),
    }


def comm(path, *events):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))
    return path


def worker(later=0):
    total = {**stage("", 0, "total", START + later, 900), "name": "Comm.byteps.gradient_0"}
    stages = [("REDUCE", 7, 10, 50), ("COPYD2H", 7, 70, 10), ("PUSH", 7, 90, 200), ("PULL", 7, 300, 200),
              ("COPYH2D", 7, 510, 10), ("BROADCAST", 7, 530, 50), ("PUSH", 8, 95, 100)]  # fmt: skip
    return [total, *(stage(name, 0, part, START + later + at, dur) for name, part, at, dur in stages)]


def test_a_worker_pushes_and_pulls_its_partitions(tmp_path):
    (trace,) = read_all([comm(tmp_path / "3" / "comm.json", *worker(), *worker(1000))])
    assert (trace.rank, trace.format, trace.topology) == (3, "byteps", Topology.PARAMETER_SERVER)
    assert [count(trace, kind) for kind in (Kind.SEND, Kind.RECV, Kind.COPY, Kind.COLLECTIVE)] == [4, 2, 4, 4]
    assert trace.iteration.tolist() == [0] * 7 + [1] * 7
    assert trace.epoch_ns == (START + 10) * 1000
    assert [round(s * 1e6) for s in trace.posted_s[:2]] == [-10, -10]
    names = [trace.names[name] for name in trace.name]
    ties = [(names[a], names[b]) for a, b in zip(trace.before[:5], trace.after[:5], strict=True)]
    assert sorted(ties) == [("copyd2h", "push"), ("copyh2d", "broadcast"), ("pull", "copyh2d"), ("push", "pull"),
                            ("reduce", "copyd2h")]  # fmt: skip


def test_workers_of_a_machine_pair_by_their_local_collectives(tmp_path):
    traces = read_all([comm(tmp_path / str(r) / "comm.json", *worker(), *worker(1000)) for r in (0, 1)])
    found = pair(traces)
    assert (found.num_collectives, found.num_transfers) == (4, 0)


def test_wrong_worker_traces_are_refused(tmp_path):
    path = tmp_path / "0" / "comm.json"
    unknown, backwards = stage("TELEPORT", 0, 7, START, 5), stage("PUSH", 0, 7, START, -5)
    for event, told in ((unknown, "event 'Comm.byteps.gradient_0.TELEPORT' must be of a stage"),
                        (backwards, "PUSH' must not end before it starts, but ends 5 us earlier")):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            read_all([comm(path, *worker(), event)])
    with pytest.raises(ValueError, match="must hold stages of partitions"):
        read_all([comm(path, worker()[0])])
