"""Profiler traces, old and new: every shipped one by the counts of its README, small ones by hand."""

import gzip
import json
import random
import re
import tarfile
import zipfile

import numpy as np
import pytest

from capture.traces import chrome
from capture.traces.assemble import CODE
from capture.traces.dfg import build
from capture.traces.pairing import pair
from capture.traces.recognise import read_all
from capture.traces.records import Group, Kind
from capture.traces.replay import replay_trace
from tests.capture.traces.profiled import INFO, all_reduce, document, launched, numbered, span, step, write


def named(trace, kind=None, column="name"):
    rows = np.arange(len(trace)) if kind is None else np.flatnonzero(trace.kind == CODE[kind])
    return [trace.names[index] for index in getattr(trace, column)[rows]]


def count(trace, kind):
    return int((trace.kind == CODE[kind]).sum())


@pytest.fixture(scope="module")
def folder(shared):
    return shared / "traces"


# The counts of the README beside the traces.


def test_dlrm_has_eight_ranks_that_end_together(folder):
    traces = read_all([folder / "param" / "dlrm_kineto.tar.gz"])
    assert [trace.rank for trace in traces] == list(range(8))
    for trace in traces:
        assert sorted(named(trace, Kind.COLLECTIVE)) == ["all_reduce"] * 3 + ["all_to_all"] * 5
        assert trace.iteration.max() == 0
    assert count(traces[0], Kind.COMPUTE) + count(traces[0], Kind.COLLECTIVE) == 245
    found = pair(traces)
    assert (found.num_collectives, found.missing) == (8, ())
    assert len(found.agreements) == 7
    assert max(agreement.worst_s for agreement in found.agreements) <= 7e-6


def test_the_bytes_of_old_collectives_come_from_the_annotation_around_the_launch(folder):
    trace, *_ = read_all([folder / "param" / "dlrm_kineto.tar.gz"])
    rows = np.flatnonzero(trace.kind == CODE[Kind.COLLECTIVE])
    sizes = {"float": 4, "long int": 8, "int": 4}
    told = [(6144, "float"), (24, "long int"), (384, "int"), (3392, "int"),
            (394241, "float"), (6144, "float"), (112, "float"), (226960, "float")]  # fmt: skip
    assert trace.nbytes[rows].tolist() == [elements * sizes[dtype] for elements, dtype in told]


def test_the_new_nccl_trace_tells_groups_sizes_and_steps(folder):
    (trace,) = read_all([folder / "hta" / "nccl_data.json.gz"])
    assert (trace.rank, trace.world) == (0, 2)
    names = named(trace, Kind.COLLECTIVE)
    assert (len(names), names.count("all_reduce"), names.count("broadcast")) == (21, 15, 6)
    assert trace.groups == (Group(name="0", size=2, ranks=(0, 1)),)
    assert count(trace, Kind.ITERATION) == 3
    rows = np.flatnonzero(trace.kind == CODE[Kind.COLLECTIVE])
    assert trace.sequence[rows].tolist() == list(range(21))
    assert trace.nbytes[rows[2]] == 2049000 * 4
    assert {trace.streams[stream] for stream in trace.stream[rows]} == {"device 0 stream 40"}
    assert not np.isnan(trace.posted_s[rows]).any()


def test_the_old_trace_of_one_rank_of_eight_imports(folder):
    (trace,) = read_all([folder / "hta" / "trace_diff_control_rank3of8.json.gz"])
    assert (trace.rank, trace.world, count(trace, Kind.COLLECTIVE)) == (3, 8, 60)
    assert count(trace, Kind.ITERATION) == 6
    assert pair([trace]).missing == (0, 1, 2, 4, 5, 6, 7)


def test_the_gloo_pair_has_real_starts_and_postings(folder):
    traces = read_all(sorted((folder / "kineto_gloo").glob("*.json.gz")))
    for trace in traces:
        rows = np.flatnonzero(trace.kind == CODE[Kind.COLLECTIVE])
        assert len(rows) == 35
        assert not np.isnan(trace.posted_s[rows]).any()
        assert trace.machine == "vm"
        assert count(trace, Kind.ITERATION) == 5
        assert len(trace.memory_s) > 1000
        last = [row for row in rows if trace.nbytes[row] == 1536 * 4]
        assert len(last) == 5  # the small bucket of each step
        computes = [trace.kind[before] == CODE[Kind.COMPUTE] for before in trace.before[np.isin(trace.after, rows)]]
        assert len(computes) == 35
        assert all(computes)
    (agreement,) = pair(traces).agreements
    assert agreement.num_paired == 35
    assert agreement.median_s == pytest.approx(0.55e-3, abs=0.05e-3)  # README: 0.53 ms


def test_the_posting_of_a_gloo_collective_is_its_enqueue_and_its_start_the_threads(folder):
    path = folder / "kineto_gloo" / "ddp2_1gbit_rank0.pt.trace.json.gz"
    with gzip.open(path) as file:
        held = json.load(file)
    (trace,) = read_all([path])
    for name, seconds in (("c10d::allreduce_", trace.posted_s), ("gloo:all_reduce", trace.start_s)):
        told = sorted(event["ts"] for event in held["traceEvents"] if event["name"] == name)
        ours = np.sort(seconds[trace.kind == CODE[Kind.COLLECTIVE]])
        np.testing.assert_allclose(
            (np.array(told) - told[0]) * 1e-6, ours - ours[0], rtol=0, atol=2e-9
        )  # ns in a float


def test_the_sampled_pair_is_refused_with_its_figure(folder):
    traces = read_all(sorted((folder / "hta").glob("sampled_rank-*.json.gz")))
    assert [count(trace, Kind.COLLECTIVE) for trace in traces] == [10, 10]
    with pytest.raises(ValueError, match=r"sampled_rank-1.*ends matched by order differ by up to 134\.0 ms"):
        pair(traces)


def test_the_sampled_pair_is_refused_by_its_ends_alone(folder):
    import dataclasses

    traces = [
        dataclasses.replace(
            trace, nbytes=np.full(len(trace), np.nan), name=np.zeros(len(trace), np.int32), names=("x",)
        )
        for trace in read_all(sorted((folder / "hta").glob("sampled_rank-*.json.gz")))
    ]
    with pytest.raises(
        ValueError, match=r"collectives must end when those of rank 0 .* do, but ends .* up to 134\.0 ms"
    ):
        pair(traces)


def test_events_of_a_stream_do_not_overlap_and_edges_hold_in_every_shipped_trace(folder):
    paths = [folder / "param" / "dlrm_kineto.tar.gz", folder / "hta" / "nccl_data.json.gz",
             *sorted((folder / "kineto_gloo").glob("*.json.gz"))]  # fmt: skip
    for trace in read_all(paths):
        assert len(trace.before)
        assert np.all(trace.start_s[trace.after] - trace.end_s[trace.before] > -1e-9)
        for stream in range(len(trace.streams)):
            rows = np.flatnonzero((trace.stream == stream) & (trace.kind != CODE[Kind.ITERATION]))
            assert np.all(trace.end_s[rows[:-1]] - trace.start_s[rows[1:]] < 1.5e-6)  # old traces round to microseconds


# Small traces, by hand.


def test_an_operation_is_cut_where_it_launches(tmp_path):
    (trace,) = read_all([write(tmp_path / "a.json", step())])
    rows = np.flatnonzero(trace.kind == CODE[Kind.HOST])
    us = np.round(np.stack([trace.start_s[rows], trace.end_s[rows]], axis=1) * 1e6).astype(int).tolist()
    assert us == [[10, 30], [30, 35], [35, 60], [60, 65], [65, 110]]
    assert [trace.names[trace.name[row]] for row in rows] == [
        "aten::mm", "cudaLaunchKernel", "aten::mm", "cudaLaunchKernel", "aten::mm",
    ]  # fmt: skip


def test_a_kernel_depends_on_its_launch_and_a_collective_on_the_kernel_before(tmp_path):
    (trace,) = read_all([write(tmp_path / "a.json", step())])
    names = named(trace)
    ties = {(names[a], names[b]) for a, b in zip(trace.before, trace.after, strict=True)}
    assert ties == {("cudaLaunchKernel", "gemm"), ("cudaLaunchKernel", "all_reduce"), ("gemm", "all_reduce")}
    (row,) = np.flatnonzero(trace.kind == CODE[Kind.COLLECTIVE])
    assert trace.posted_s[row] == pytest.approx(60e-6)
    assert trace.nbytes[row] == 4000


def test_a_kernel_that_starts_before_its_launch_returns_depends_on_the_piece_before(tmp_path):
    events = [span("aten::mm", "cpu_op", 10, 100), *launched("gemm", 30, 33, 10, 1)]
    (trace,) = read_all([write(tmp_path / "a.json", events)])
    ((before, after),) = zip(trace.before, trace.after, strict=True)
    assert (named(trace)[before], named(trace)[after]) == ("aten::mm", "gemm")
    assert trace.end_s[before] == pytest.approx(20e-6)  # 30 us, 10 us after the first event


def test_a_thread_goes_on_after_what_it_waited_for(tmp_path):
    events = [*launched("gemm", 10, 20, 100, 1), span("cudaDeviceSynchronize", "cuda_runtime", 30, 95, correlation=2),
              span("aten::add", "cpu_op", 130, 5)]  # fmt: skip
    (trace,) = read_all([write(tmp_path / "a.json", events)])
    names = named(trace)
    assert ("gemm", "aten::add") in {(names[a], names[b]) for a, b in zip(trace.before, trace.after, strict=True)}


def ties(path):
    (trace,) = read_all([path])
    names = named(trace)
    return {(names[a], names[b]) for a, b in zip(trace.before, trace.after, strict=True)}


def test_a_backward_pass_is_handed_to_the_engine_and_back(tmp_path):
    engine = "autograd::engine::evaluate_function: "
    events = [
        span("forward", "cpu_op", 0, 50), span("loss", "cpu_op", 60, 20), span("update", "cpu_op", 400, 20),
        span("log", "cpu_op", 430, 20), span("hook", "cpu_op", 200, 10, tid=2),
        *(span(engine + name, "cpu_op", at, 50, tid=2) for name, at in (("A", 100), ("B", 150), ("C", 300))),
    ]  # fmt: skip
    profile = [*events, *launched("gemm", 500, 510, 5, 1)]  # with a device the host is a host
    found = ties(write(tmp_path / "b.json", profile))
    assert {("loss", engine + "A"), (engine + "C", "update")} <= found
    assert not {("forward", engine + "A"), (engine + "B", "update"), (engine + "C", "log")} & found
    busy = [span("else", "cpu_op", 90, 30), *profile]  # the caller works when the engine begins: it handed over nothing
    assert not any(after == engine + "A" for _, after in ties(write(tmp_path / "c.json", busy)))


def test_a_stream_that_was_told_to_wait_goes_on_after_what_ended_on_another(tmp_path):
    def events(*calls):
        return [*launched("before", 0, 10, 20, 1, stream=7), *launched("slow", 6, 12, 88, 2, stream=9), *calls,
                *launched("copy", 30, 102, 5, 3, stream=7)]  # fmt: skip

    asked = span("cudaStreamWaitEvent", "cuda_runtime", 20, 2, correlation=9)
    assert ("slow", "copy") in ties(write(tmp_path / "a.json", events(asked)))
    assert ("slow", "copy") not in ties(write(tmp_path / "b.json", events()))
    early = span("cudaStreamWaitEvent", "cuda_runtime", 5.5, 0.2, correlation=9)  # before what it could wait for
    assert ("slow", "copy") not in ties(write(tmp_path / "c.json", events(early)))


def test_of_a_real_job_what_order_does_not_explain_is_python(folder):
    dfg = build(read_all([folder / "param" / "dlrm_kineto.tar.gz"]))
    off = [replay_trace(one).mean_error for one in (dfg, dfg.without_lags(), dfg.without_lags(but_pauses=True))]
    assert abs(off[0]) < 0.001
    assert -0.25 < off[1] < -0.15  # -29 % where the engine's thread had no caller
    assert -0.03 < off[2] < 0.0


@pytest.mark.parametrize(
    ("kernel", "call", "cat"),
    [
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "cudaLaunchKernelExC",
            "cuda_runtime",
        ),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "cuLaunchKernelEx", "cuda_driver"),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", "hipExtLaunchKernel", "hip_runtime"),
        ("void rcclKernel_AllReduce_RING_SIMPLE(ncclDevComm*)", "hipLaunchKernel", "Runtime"),
    ],
)
def test_nccl_and_rccl_kernels_are_collectives(tmp_path, kernel, call, cat):
    (trace,) = read_all([write(tmp_path / "a.json", all_reduce(10, 30, 50, 3, kernel, call=call, cat=cat))])
    assert named(trace, Kind.COLLECTIVE) == ["all_reduce"]
    assert len(trace.before) == 1


def test_kernels_without_arguments_are_named_by_themselves_in_a_group_per_stream(tmp_path):
    events = launched("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 10, 30, 50, 3, stream=20)
    events += launched("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", 40, 60, 50, 4, stream=21)
    (trace,) = read_all([write(tmp_path / "a.json", events, {"rank": 1, "world_size": 4})])
    assert sorted(named(trace, Kind.COLLECTIVE)) == ["all_gather", "all_reduce"]
    assert trace.groups == (Group(name="stream 0", size=4), Group(name="stream 1", size=4))
    assert any("one is assumed per stream" in notice for notice in trace.notices)


def test_gloo_beside_nccl_counts_in_the_same_group(tmp_path):
    gloo = span("gloo:barrier", "user_annotation", 600, 50, tid=9)
    (trace,) = read_all([write(tmp_path / "a.json", [*step(), gloo])])
    assert named(trace, Kind.COLLECTIVE) == ["all_reduce", "barrier"]
    assert trace.sequence[trace.kind == CODE[Kind.COLLECTIVE]].tolist() == [0, 1]


def test_sends_and_receives_that_tell_the_other_rank_are_transfers(tmp_path):
    told = {"In msg nelems": 10, "Out msg nelems": 10, "dtype": "BFloat16", "Process Group Name": "pp", "Group size": 2,
            "Process Group Ranks": [0, 1]}  # fmt: skip
    kernel = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    paths = []
    for rank, name, key in ((0, "send", "Dst Rank"), (1, "recv", "Src Rank")):
        mine = {**told, "Collective name": name, key: 1 - rank}
        events = [e for i in range(3) for e in launched(kernel, 100 * i, 100 * i + 10, 20, i, stream=20, **mine)]
        paths.append(write(tmp_path / f"{rank}.json", events, {**INFO, "rank": rank}))
    traces = read_all(paths)
    assert traces[0].transactions == traces[1].transactions == ("pp|0>1|0", "pp|0>1|1", "pp|0>1|2")
    assert (count(traces[0], Kind.SEND), count(traces[1], Kind.RECV)) == (3, 3)
    assert pair(traces).num_transfers == 3


def test_correlations_may_be_unsigned(tmp_path):
    (trace,) = read_all([write(tmp_path / "a.json", launched("gemm", 10, 30, 50, 2**64 - 3))])
    assert len(trace.before) == 1


def test_transfers_that_run_in_one_kernel_are_paired_with_nothing(tmp_path):
    note = span("nccl:coalesced", "user_annotation", 5, 20)
    events = [note, *launched("ncclDevKernel_SendRecv(...)", 10, 30, 50, 3, stream=20)]
    (trace,) = read_all([write(tmp_path / "a.json", events)])
    (row,) = np.flatnonzero(trace.kind == CODE[Kind.COLLECTIVE])
    assert (trace.names[trace.name[row]], trace.sequence[row]) == ("coalesced", -1)
    assert any("paired with nothing" in notice for notice in trace.notices)


def test_iterations_are_steps_of_the_profiler_or_of_the_optimizer(tmp_path):
    (trace,) = read_all([write(tmp_path / "a.json", numbered(3))])
    assert sorted(set(trace.iteration.tolist())) == [0, 1, 2]
    assert trace.iteration[trace.kind == CODE[Kind.COLLECTIVE]].tolist() == [0, 1, 2]
    events = [span("aten::mm", "cpu_op", 100 * i, 10) for i in range(4)]
    events += [span("Optimizer.step#SGD.step", "user_annotation", at, 10) for at in (150, 350)]
    (trace,) = read_all([write(tmp_path / "b.json", events)])
    assert trace.iteration[trace.kind == CODE[Kind.COMPUTE]].tolist() == [0, 0, 1, 1]
    assert any("no marks" in notice for notice in trace.notices)


def test_a_trace_without_distributed_info_is_of_rank_zero_with_a_notice(tmp_path):
    (trace,) = read_all([write(tmp_path / "a.json", step(), None)])
    assert (trace.rank, trace.world) == (0, None)
    assert "no distributedInfo: taken for rank 0" in trace.notices


def test_times_keep_their_nanoseconds(tmp_path):
    events = [span("a", "cpu_op", 5148193913461.636, 1.001), span("b", "cpu_op", 5148193913500.125, 2)]
    (trace,) = read_all([write(tmp_path / "a.json", events)])
    assert trace.epoch_ns == 10**18 + 5148193913461636
    assert trace.start_s[1] == pytest.approx(38.489e-6, abs=1e-9)
    whole = [span("a", "cpu_op", 1694128201426556, 1), span("b", "cpu_op", 1694128201426560, 1)]
    (trace,) = read_all([write(tmp_path / "b.json", whole, baseTimeNanoseconds=0)])
    assert trace.epoch_ns == 1694128201426556000


# Streaming.


@pytest.mark.parametrize("block", [64, 300, 5000])
def test_where_a_file_is_cut_while_streaming_does_not_matter(tmp_path, monkeypatch, block):
    events = [*numbered(5), span('},{"name": "trap"}, {', "cpu_op", 9000, 5, nested=[{"a": 1}, {"b": [{}, {}]}])]
    random.Random(1).shuffle(events)
    path = write(tmp_path / "a.json", events, trap='"traceEvents": [', tail={"traceEvents": []})
    (whole,) = read_all([path])
    monkeypatch.setattr(chrome, "BLOCK", block)
    (cut,) = read_all([path])
    assert named(whole) == named(cut)
    np.testing.assert_array_equal(whole.start_s, cut.start_s)


def test_the_header_may_follow_the_events_and_the_array_may_stand_alone(tmp_path):
    held = document(step())
    events = held.pop("traceEvents")
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events, **held}))
    (tmp_path / "b.json").write_text(json.dumps(events))
    (after,), (alone,) = (read_all([tmp_path / name]) for name in ("a.json", "b.json"))
    assert (after.world, alone.world) == (2, None)
    np.testing.assert_array_equal(after.start_s, alone.start_s)


def test_archives_give_the_files_within(tmp_path):
    paths = [write(tmp_path / f"{r}.json", step(), {**INFO, "rank": r}) for r in (0, 1)]
    with tarfile.open(tmp_path / "a.tar", "w") as tar, zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for path in paths:
            tar.add(path, f"job/{path.name}")
            archive.write(path, f"job/{path.name}")
    (tmp_path / "a.json.gz.gz").write_bytes(gzip.compress(gzip.compress(paths[0].read_bytes())))
    for name in ("a.tar", "a.zip"):
        traces = read_all([tmp_path / name])
        assert [trace.rank for trace in traces] == [0, 1]
        assert traces[0].source == f"{tmp_path / name}:job/0.json"
    assert len(read_all([tmp_path / "a.json.gz.gz"])) == 1


# Bad input.


def refusal(path):
    with pytest.raises(ValueError, match=r"a\.json") as caught:
        read_all([path])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_event_that_ends_before_it_starts_is_refused(tmp_path):
    events = [*step(), span("backwards", "cpu_op", 2000, -5.5)]
    told = refusal(write(tmp_path / "a.json", events))
    assert "event 'backwards' must not end before it starts, but ends 5.500 us earlier" in told


def test_truncated_json_is_refused_by_its_last_event(tmp_path):
    path = write(tmp_path / "a.json", numbered(3))
    text = path.read_text()
    path.write_text(text[: text.rindex('"ncclDevKernel')])
    assert "must be whole JSON, but after event 20 ('cudaLaunchKernel'):" in refusal(path)


def test_a_time_that_cannot_be_is_refused(tmp_path):
    told = refusal(write(tmp_path / "a.json", [*step(), span("late", "cpu_op", 1e300, 1)]))
    assert "Expected `float` <= 1e+17" in told


def test_malformed_and_mistyped_events_are_refused_where_they_stand(tmp_path, monkeypatch):
    path = write(tmp_path / "a.json", numbered(3))
    text = path.read_text()
    path.write_text(text.replace('"ts": 1030.0', '"ts": 10x30.0'))
    assert "after event 10 ('aten::inner')" in refusal(path)
    monkeypatch.setattr(chrome, "BLOCK", 300)
    path.write_text(text.replace('"ts": 1030.0', '"ts": "soon"'))
    assert "after event 10 ('aten::inner'): Expected `float`, got `str`" in refusal(path)


def test_a_truncated_gz_of_a_real_trace_is_refused(folder, tmp_path):
    whole = (folder / "hta" / "nccl_data.json.gz").read_bytes()
    (tmp_path / "a.json.gz").write_bytes(whole[: len(whole) // 2])
    told = refusal(tmp_path / "a.json.gz")
    assert "must be whole, but is cut short or damaged" in told
    events = json.loads(gzip.decompress(whole))["traceEvents"]
    number, name = re.search(r"the last whole event is number (\d+), '(.*)'$", told).groups()
    assert 1000 < int(number) < len(events)
    assert events[int(number) - 1]["name"] == name
    tar = (folder / "param" / "dlrm_kineto.tar.gz").read_bytes()
    (tmp_path / "a.json.tgz").write_bytes(tar[: len(tar) // 2])
    assert "cut short or damaged" in refusal(tmp_path / "a.json.tgz")


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"info": {"rank": "first"}}, "distributedInfo must tell rank, world and groups"),
        ({"info": {"rank": 2, "world_size": 2}}, "rank must be below the world of 2, but is 2"),
        ({"info": {"rank": 0, "world_size": 10**9}}, "world must be 1 to 1048576 ranks"),
        ({"baseTimeNanoseconds": "now"}, "baseTimeNanoseconds must be nanoseconds since 1970, but is 'now'"),
    ],
)
def test_headers_that_cannot_be_are_refused(tmp_path, header, told):
    assert told in refusal(write(tmp_path / "a.json", step(), **header))


def test_a_trace_without_operations_is_refused(tmp_path):
    assert "must hold operations or kernels" in refusal(write(tmp_path / "a.json", []))
