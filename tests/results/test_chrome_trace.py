"""Claims about traces: held to the Trace Event Format, event by event, as a viewer reads them."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from estimator.tasks import Category, Device, Stream, Tasks
from estimator.timeline import Timeline, memory
from results import chrome_trace
from results.chrome_trace import check_free, write_trace
from tests.results.laid import laid, pipeline


@pytest.fixture
def written(tmp_path):
    """Writes a timeline, and gives the trace back as a reader has it."""

    def write(timeline, name="trace.json", **options):
        told = write_trace(tmp_path / name, timeline, subject="probe", **options)
        opened = gzip.open if name.endswith(".gz") else open
        with opened(told.path, "rt") as file:
            return told, json.load(file)

    return write


def slices(trace, **wanted):
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and all(e[k] == v for k, v in wanted.items())]


def named(trace, kind):
    return {(e["pid"], e.get("tid")): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == kind}


def nanoseconds(microseconds):
    return round(microseconds * 1000)


def by_thread(trace):
    ordered = sorted(slices(trace), key=lambda e: (e["pid"], e["tid"]))
    return {key: list(group) for key, group in itertools.groupby(ordered, lambda e: (e["pid"], e["tid"]))}


def test_every_task_that_ran_is_a_slice_on_its_stream_at_its_time(written):
    timeline = pipeline(ranks=3, micro_batches=4)
    _, trace = written(timeline)
    streams = named(trace, "thread_name")
    found = sorted((s["pid"] - 1, streams[s["pid"], s["tid"]], s["name"], s["cat"], nanoseconds(s["ts"]),
                    nanoseconds(s["dur"])) for s in slices(trace) if s["cat"] != "pass")  # fmt: skip
    tasks = timeline.tasks
    expected = sorted(
        (int(tasks.device[i]), tasks.streams[tasks.stream[i]].name, tasks.names[i], "forward" if tasks.takes[i] == 0
         else "pp", round(timeline.start[i] * 1e9), round(timeline.end[i] * 1e9) - round(timeline.start[i] * 1e9))
        for i in range(len(tasks))
    )  # fmt: skip
    assert found == expected


def test_a_process_is_a_device_and_says_how_many_ranks_it_stands_for(written):
    told, trace = written(pipeline(ranks=2, micro_batches=1))
    assert list(named(trace, "process_name").values()) == ["rank 0 (stands for 8 ranks)", "rank 1 (stands for 8 ranks)"]
    assert trace["otherData"]["ranks"] == "2 processes stand for 16 ranks"
    assert told.ops == trace["otherData"]["ops"] == "all"


def test_args_hold_the_place_the_seconds_alone_and_the_stretch(written):
    tasks = Tasks.of(
        devices=[Device(name="rank 0")], streams=[Stream(device=0, name="tp")], stream=[0], seconds=[2e-6],
        names=["all-reduce"], category=[Category.TP], micro_batch=[3], chunk=[1],
    )  # fmt: skip
    timeline = Timeline(
        tasks=tasks, start=np.array([1e-6]), end=np.array([4e-6]), blame=np.array([-1]), host_s=np.zeros(1)
    )
    _, trace = written(timeline)
    (found,) = slices(trace, cat="tp")
    assert found["args"] == {"micro_batch": 3, "chunk": 1, "own_s": 2e-6, "stretch": 1.5}
    assert (found["name"], found["ts"], found["dur"]) == ("all-reduce", 1.0, 3.0)


def test_nothing_overlaps_on_a_thread(written):
    _, trace = written(pipeline(ranks=4, micro_batches=6, seconds=1e-4 / 3))
    for events in by_thread(trace).values():
        for before, after in itertools.pairwise(events):
            assert nanoseconds(before["ts"]) + nanoseconds(before["dur"]) <= nanoseconds(after["ts"])


def test_a_pass_lasts_from_its_first_to_its_last_compute(written):
    timeline = pipeline(ranks=2, micro_batches=3)
    _, trace = written(timeline)
    tasks = timeline.tasks
    for device, scope in itertools.product(range(2), range(3)):
        mine = (tasks.device == device) & (tasks.scope == scope) & (tasks.takes == 0)
        (found,) = slices(trace, cat="pass", pid=device + 1, name=tasks.scopes[scope])
        assert nanoseconds(found["ts"]) == round(timeline.start[mine].min() * 1e9)
        assert nanoseconds(found["ts"]) + nanoseconds(found["dur"]) == round(timeline.end[mine].max() * 1e9)
        assert found["args"] == {"micro_batch": scope}


def test_passes_that_run_at_the_same_time_get_threads_of_their_own(written):
    tasks = Tasks.of(
        devices=[Device(name="rank 0")], streams=[Stream(device=0, name="compute", computes=True)],
        stream=[0] * 4, seconds=[1.0] * 4, scope=[0, 1, 0, 1],
    )  # fmt: skip
    tasks = replace(tasks, scopes=("forward 0", "backward 0"))
    _, trace = written(laid(tasks))
    first, second = slices(trace, cat="pass")
    assert first["tid"] != second["tid"]
    assert [(e["ts"], e["dur"]) for e in (first, second)] == [(0.0, 3e6), (1e6, 3e6)]


def test_arrows_go_from_transfers_to_other_devices_only_and_bind_to_slices(written):
    timeline = pipeline(ranks=3, micro_batches=4)
    last = np.flatnonzero(timeline.tasks.device == 2)[-1]  # that a kernel of another rank comes first is no transfer
    edges = {"before": np.append(timeline.tasks.before, 0), "after": np.append(timeline.tasks.after, last)}
    timeline = replace(timeline, tasks=replace(timeline.tasks, **edges))
    _, trace = written(timeline)
    tasks = timeline.tasks
    ends = {phase: {e["id"]: e for e in trace["traceEvents"] if e["ph"] == phase} for phase in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    at = {(e["pid"], e["tid"], e["name"]): e for e in slices(trace)}
    streams = {(tasks.device[i] + 1, tasks.names[i]): i for i in range(len(tasks))}
    found = set()
    for number, start in ends["s"].items():
        end = ends["f"][number]
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        assert end["bp"] == "e"
        assert nanoseconds(start["ts"]) < nanoseconds(end["ts"])
        binding = []
        for event in (start, end):
            (held,) = [
                e for (pid, tid, _), e in at.items()
                if (pid, tid) == (event["pid"], event["tid"])
                and nanoseconds(e["ts"]) <= nanoseconds(event["ts"]) < nanoseconds(e["ts"]) + nanoseconds(e["dur"])
            ]  # fmt: skip
            binding.append(streams[held["pid"], held["name"]])
        found.add(tuple(binding))
    crossing = {(b, a) for b, a in zip(tasks.before.tolist(), tasks.after.tolist(), strict=True)
                if tasks.device[b] != tasks.device[a] and b}  # fmt: skip
    assert found == crossing
    assert len(crossing) == 8


def test_an_arrow_follows_its_slice_before_the_next_slice_of_its_thread_begins(written):
    """A reader that keeps a stack of open slices binds an arrow to the topmost."""
    _, trace = written(pipeline(ranks=3, micro_batches=4))
    events = [e for e in trace["traceEvents"] if e["ph"] in "Xsf"]
    open_slice = {}
    for event in sorted(events, key=lambda e: nanoseconds(e["ts"])):
        thread = (event["pid"], event["tid"])
        if event["ph"] == "X":
            open_slice[thread] = event
        else:
            held = open_slice[thread]
            assert nanoseconds(event["ts"]) < nanoseconds(held["ts"]) + nanoseconds(held["dur"])
            assert held["cat"] == ("pp" if event["ph"] == "s" else "forward")


def test_an_arrow_to_a_task_of_no_length_goes_on_to_the_next_of_its_pass(written):
    tasks = pipeline(ranks=3, micro_batches=4).tasks  # as where a pass begins with a task that only waits for weights
    seconds = np.where([name.startswith("kernel 0") for name in tasks.names], 0.0, tasks.seconds)
    _, trace = written(laid(replace(tasks, seconds=seconds)))
    ends = {phase: {e["id"]: e for e in trace["traceEvents"] if e["ph"] == phase} for phase in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    assert len(ends["f"]) == 8
    starts = {(e["pid"], e["tid"], e["ts"]) for e in slices(trace) if e["name"].startswith("kernel 1")}
    assert {(e["pid"], e["tid"], e["ts"]) for e in ends["f"].values()} <= starts


def test_memory_is_a_counter_in_order_of_time_with_its_capacity_in_the_name(written):
    timeline = pipeline(ranks=2, micro_batches=3)
    _, trace = written(timeline)
    for device in range(2):
        points = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == device + 1]
        times = [e["ts"] for e in points]
        assert times == sorted(times)
        assert {e["name"] for e in points} == {"memory of 10.0 GiB"}
        curves = memory(timeline)
        assert [e["args"]["bytes"] for e in points] == curves.bytes[device].tolist()
        assert [nanoseconds(t) for t in times] == [round(t * 1e9) for t in curves.times[device].tolist()]


def test_a_curve_of_too_many_steps_keeps_its_peak(written):
    timeline = pipeline(ranks=2, micro_batches=500, ops=5)
    told, trace = written(timeline, max_bytes=2_000_000)
    assert told.path.stat().st_size <= 2_000_000
    for device in range(2):
        points = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == device + 1]
        assert 100 < len(points) < len(memory(timeline).times[device])
        assert max(e["args"]["bytes"] for e in points) == memory(timeline).peak[device]
        assert [e["ts"] for e in points] == sorted(e["ts"] for e in points)


def test_processes_and_threads_have_numbers_of_their_own(written):
    _, trace = written(pipeline(ranks=3, micro_batches=2))
    threads = list(named(trace, "thread_name"))
    assert len({tid for _, tid in threads}) == len(threads)
    assert not {pid for pid, _ in threads} & {tid for _, tid in threads}
    used = {(e["pid"], e["tid"]) for e in slices(trace)}
    assert used <= set(threads)


@pytest.mark.parametrize("limit", [1_000_000, 2_000_000])
def test_a_trace_that_would_be_too_large_keeps_all_passes_and_chosen_micro_batches(written, limit):
    timeline = pipeline(ranks=4, micro_batches=600, ops=6)
    told, trace = written(timeline, max_bytes=limit)
    assert told.path.stat().st_size <= limit
    assert len(slices(trace, cat="pass")) == 4 * 600
    shown = {e["args"]["micro_batch"] for e in slices(trace, cat="forward")}
    assert {0, 300, 599} <= shown
    assert 6 < len(shown) < 600
    per_batch = 4 * 6
    assert len(slices(trace, cat="forward")) == per_batch * len(shown)
    note = trace["otherData"]["ops"]
    assert note == told.ops
    ranges = re.fullmatch(r"of micro-batches (.*) of 600; of the others passes only", note)[1].split(", ")
    bounds = [[int(n) for n in part.split("-")] for part in ranges]
    assert {n for b in bounds for n in range(b[0], b[-1] + 1)} == shown
    assert len(bounds) == 3  # first, middle, last
    assert told.path.stat().st_size > 0.7 * limit


def test_tasks_of_no_micro_batch_are_kept_first_and_their_beginning_where_they_are_too_many(written):
    timeline = pipeline(ranks=4, micro_batches=600, ops=6)
    batch = timeline.tasks.micro_batch
    some = replace(timeline, tasks=replace(timeline.tasks, micro_batch=np.where(batch >= 580, -1, batch)))
    _, trace = written(some, max_bytes=2_000_000)
    loose = [e for e in slices(trace, cat="forward") if "micro_batch" not in e["args"]]
    assert len(loose) == 20 * 4 * 6
    none = replace(timeline, tasks=replace(timeline.tasks, micro_batch=np.full(len(batch), -1)))
    told, trace = written(none, name="none.json", max_bytes=2_000_000)
    shown = [e for e in slices(trace) if e["cat"] != "pass"]
    assert told.ops == f"the first {len(shown)} of {len(batch)}; of the others passes only"
    assert sorted(e["ts"] for e in shown)[-1] < 0.9 * timeline.span_s * 1e6
    assert len(slices(trace, cat="pass")) == 4 * 600


def test_a_large_timeline_stays_below_the_limit_with_real_lines(written):
    timeline = pipeline(ranks=2, micro_batches=50, ops=5)
    told, trace = written(timeline)
    tight, _ = written(timeline, name="tight.json", max_bytes=told.text_bytes + 400_000)
    assert tight.path.stat().st_size <= told.text_bytes + 400_000


def test_passes_that_alone_are_too_many_are_one_line(tmp_path):
    with pytest.raises(
        ValueError, match=r"passes alone take .*; a replay of this point alone may take 100000000"
    ) as caught:
        write_trace(tmp_path / "a.json", pipeline(ranks=2, micro_batches=900), subject="a", max_bytes=300_000)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_gzip_holds_the_same_trace_and_the_same_bytes_every_time(written):
    timeline = pipeline(ranks=2, micro_batches=3)
    _, plain = written(timeline)
    first, packed = written(timeline, "trace.json.gz")
    before = first.path.read_bytes()
    second, _ = written(timeline, "trace.json.gz")
    assert packed == plain
    assert second.path.read_bytes() == before
    assert before[:2] == b"\x1f\x8b"


def test_a_timeline_without_tasks_is_a_trace_of_devices(written):
    tasks = Tasks.of(devices=[Device(name="a")], streams=[Stream(device=0, name="c")], stream=[], seconds=[])
    _, trace = written(laid(tasks))
    assert slices(trace) == []
    assert list(named(trace, "process_name").values()) == ["a"]


def test_names_need_not_be_plain(written):
    tasks = Tasks.of(
        devices=[Device(name='rank "0"')], streams=[Stream(device=0, name="a\\b")], stream=[0], seconds=[1.0],
        names=['söft"max\n'],
    )  # fmt: skip
    _, trace = written(laid(tasks))
    assert slices(trace, cat="other")[0]["name"] == 'söft"max\n'
    assert list(named(trace, "process_name").values()) == ['rank "0"']


def test_what_did_not_run_is_not_in_the_trace(written):
    timeline = pipeline(ranks=2, micro_batches=2)
    cut = timeline.tasks.device == 1
    partial = Timeline(
        tasks=timeline.tasks, start=np.where(cut, np.nan, timeline.start), end=np.where(cut, np.nan, timeline.end),
        blame=timeline.blame, host_s=timeline.host_s,
    )  # fmt: skip
    _, trace = written(partial)
    assert {e["pid"] for e in slices(trace)} == {1}
    assert not [e for e in trace["traceEvents"] if e["ph"] in "sf"]


def test_nothing_but_a_trace_of_the_same_subject_is_replaced(tmp_path):
    timeline = pipeline(ranks=1, micro_batches=1)
    path = tmp_path / "a.json.gz"
    write_trace(path, timeline, subject="mine")
    write_trace(path, timeline, subject="mine", about={"again": 1})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="nothing is overwritten"):
        write_trace(path, timeline, subject="other")
    assert path.read_bytes() == before
    for content in (b"", b"notes", b"{}", gzip.compress(b"[1]\n"), gzip.compress(b"x")[:-9]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="nothing is overwritten"):
            write_trace(path, timeline, subject="mine")
        assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["a.json.gz"]
    check_free(tmp_path / "new.json", "mine")


@pytest.mark.parametrize("place", ["none/a.json", "file/a.json", "folder"])
def test_a_place_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path, place):
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=place.partition("/")[0]) as caught:
        write_trace(tmp_path / place, pipeline(ranks=1, micro_batches=1), subject="a")
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_full_disk_is_one_line_and_leaves_the_old_trace(tmp_path, monkeypatch):
    path, timeline = tmp_path / "a.json", pipeline(ranks=1, micro_batches=1)
    write_trace(path, timeline, subject="a")
    before = path.read_bytes()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("results.chrome_trace.os.replace", refuse)
    with pytest.raises(ValueError, match="cannot write the trace: No space left on device"):
        write_trace(path, timeline, subject="a")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_lines_are_on_their_way_to_the_disk_before_the_last_is_made(tmp_path, monkeypatch):
    whole, seen = chrome_trace._Trace.lines, []

    def watched(trace):
        for line in whole(trace):
            seen.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
            yield line

    monkeypatch.setattr(chrome_trace._Trace, "lines", watched)
    told = write_trace(tmp_path / "a.json", pipeline(ranks=4, micro_batches=100), subject="a")
    assert seen[-1] > 0.5 * told.text_bytes
