"""A measured graph with other seconds: exact on small jobs, bounded by known limits on the shipped one."""

from __future__ import annotations

import pytest

from capture.traces.dfg import build
from capture.traces.kept import computes_differ, predict_kept
from capture.traces.recognise import read_all
from capture.traces.records import Kind, Topology
from capture.traces.what_if import Change, link_of, predict
from tests.capture.traces.made import collective, compute, trace


def job(*, launched=False):
    """Two ranks that meet at 3 s for 4 s; the first has one compute more. launched: beside a host of 7.5 s."""
    ranks = []
    for rank in (0, 1):
        first = [compute("a", 0.0, 1.0), compute("b", 1.0, 3.0)] if rank == 0 else [compute("ab", 0.0, 3.0)]
        host = [(Kind.HOST, "thread", "launch", 0.0, 7.5, {})] if launched else []
        ranks.append(trace(rank, [
            *host, *first, collective("all_reduce", 3.0, 7.0, tensor="g", posted=3.0, nbytes=100.0),
            compute("update", 7.0, 8.0),
        ], world=2))  # fmt: skip
    return build(ranks)


@pytest.mark.parametrize(
    ("change", "seconds"),
    [
        (Change(), 8.0),
        (Change(bandwidth=2.0), 3.0 + 2.0 + 1.0),  # one size: latency is not told and counts as none
        (Change(compute=2.0), 1.5 + 4.0 + 0.5),
        (Change(latency_s=1.0), 3.0 + 4.0 + 2 * 1.0 + 1.0),  # a ring of two has two steps
        (Change(bandwidth=4.0, compute=0.5, latency_s=0.5), 6.0 + 1.0 + 1.0 + 2.0),
    ],
)
def test_other_links_and_chips_change_seconds_and_keep_the_graph(change, seconds):
    dfg = job()
    assert computes_differ(dfg)
    found = predict_kept(dfg, change)
    assert found.seconds == pytest.approx([seconds])
    assert found.shown.run().span_s == pytest.approx(seconds)
    assert found.notices[0].startswith("ranks compute differently")


def test_the_baseline_is_size_over_bandwidth_on_the_same_graph():
    dfg = job()
    rate = link_of(dfg)[0].bytes_per_s  # 100 bytes in two steps of 50 in 4 s
    assert rate == pytest.approx(25.0)
    assert predict_kept(dfg, Change()).size_over_bandwidth_s == pytest.approx([3.0 + 100.0 / 25.0 + 1.0])


def test_hosts_that_launch_are_no_faster_for_faster_chips():
    assert predict_kept(job(launched=True), Change(compute=1e6)).seconds == pytest.approx([7.5])


@pytest.mark.parametrize(
    "change", [Change(workers=4), Change(bucket_bytes=9.0), Change(topology=Topology.TREE), Change(servers=2)]
)
def test_what_needs_another_graph_is_refused_with_what_does_not(change):
    with pytest.raises(ValueError, match="ask for bandwidth, compute or latency_s"):
        predict_kept(job(), change)


def test_eight_ranks_that_compute_differently_have_what_ifs(shared):
    dfg = build(read_all([shared / "traces" / "param" / "dlrm_kineto.tar.gz"]))
    (measured,) = dfg.iteration_s()
    assert computes_differ(dfg)
    same, fast, slow = (predict_kept(dfg, Change(bandwidth=by)).seconds[0] for by in (1.0, 1e6, 0.01))
    assert same == pytest.approx(measured, rel=1e-3)
    assert same - fast < 0.01 * measured  # the hosts are what takes the time
    assert measured < slow < 2.0 * measured


def test_where_ranks_compute_the_same_both_ways_agree_on_a_faster_link(shared):
    dfg = build(read_all(sorted((shared / "traces" / "fine_ring").glob("ddp2_1gbit_b4_*"))))
    assert not computes_differ(dfg)
    for by in (0.5, 2.0, 4.0):
        kept, made = (how(dfg, Change(bandwidth=by)).seconds.mean() for how in (predict_kept, predict))
        assert kept == pytest.approx(made, rel=0.03)  # of one link the job made anew knows the mean, this each transfer


def test_transfers_that_take_no_time_tell_of_no_link(shared):
    dfg = build(read_all(sorted((shared / "traces" / "astra").glob("custom_ring_allreduce_8.*.et"))))
    with pytest.raises(ValueError, match="needs transfers that take time, but none does"):
        link_of(dfg)
