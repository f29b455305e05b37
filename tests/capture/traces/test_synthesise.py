"""Jobs that nobody ran: transfers by closed forms, buckets as DDP cuts them, what-ifs against measured runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from capture.traces.dfg import build
from capture.traces.model_jobs import Chip, bert_base, inception_v3, resnet50, vgg16
from capture.traces.recognise import read_all
from capture.traces.records import Topology
from capture.traces.synthesise import (
    Bucket,
    Gradient,
    Job,
    Link,
    Wire,
    buckets,
    size_over_bandwidth,
    sync_alone_s,
    synthesise,
)
from capture.traces.topologies import flow, num_steps
from capture.traces.what_if import Change, measured_job, predict
from estimator.tasks import Category
from estimator.timeline import memory
from tests.capture.traces.made import collective, compute, fine, trace
from tests.capture.traces.test_dfg import ddp

LINK = Link(bytes_per_s=1e9, latency_s=1e-4)
NBYTES = 64e6
MIB = 2**20


def wire(topology, **how):
    return Wire(topology=topology, link=LINK, **how)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_ring_takes_two_n_minus_one_steps_of_a_chunk(n):
    expected = 2 * (n - 1) * (1e-4 + NBYTES / n / 1e9)
    assert sync_alone_s(n, NBYTES, wire(Topology.RING)) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "depth"), [(1, 0), (2, 1), (3, 1), (7, 2), (8, 3)])
def test_a_tree_takes_its_depth_up_and_down(n, depth):
    assert sync_alone_s(n, NBYTES, wire(Topology.TREE)) == pytest.approx(2 * depth * (1e-4 + NBYTES / 1e9))


def test_parts_of_a_tree_follow_each_other():
    k, part = 8, 1e-4 + NBYTES / 8 / 1e9
    chain = sync_alone_s(2, NBYTES, wire(Topology.TREE, part_bytes=NBYTES / k))
    assert chain == pytest.approx((k + 1) * part)  # the last part goes up k-th and then down


def test_machines_are_chains_with_a_ring_between_them():
    inner = Link(bytes_per_s=1e10)
    found = sync_alone_s(8, NBYTES, wire(Topology.HIERARCHICAL, per_machine=4, inner=inner))
    assert found == pytest.approx(2 * 3 * NBYTES / 1e10 + 2 * (1e-4 + NBYTES / 2 / 1e9))
    with pytest.raises(ValueError, match=r"workers \(8\) must be divisible by workers per machine \(3\)"):
        sync_alone_s(8, NBYTES, wire(Topology.HIERARCHICAL, per_machine=3))


def test_a_server_takes_what_all_workers_push_one_after_the_other():
    assert sync_alone_s(4, NBYTES, wire(Topology.PARAMETER_SERVER)) == pytest.approx(8 * (1e-4 + NBYTES / 1e9))
    two = sync_alone_s(4, NBYTES, wire(Topology.PARAMETER_SERVER, servers=2, part_bytes=NBYTES / 2))
    assert two == pytest.approx(8 * (1e-4 + NBYTES / 2 / 1e9))


def test_an_unknown_topology_is_refused():
    with pytest.raises(ValueError, match="must be one of ring, tree, hierarchical, parameter_server"):
        sync_alone_s(4, NBYTES, wire(Topology.UNKNOWN))


def job(workers=2, release=(0.0, 0.0), **more):
    """FW 1 s, BW a 1 s, BW b 1 s, UPD 1 s."""
    names, kinds = ("FW", "BW a", "BW b", "UPD"), (Category.FORWARD, Category.BACKWARD, Category.BACKWARD)
    gradients = (Gradient(name="a", nbytes=4e9, op=1), Gradient(name="b", nbytes=2e9, op=2))
    return Job(names=names, category=(*kinds, Category.OPTIMIZER), seconds=np.ones((workers, 4)),
               lag_s=np.zeros((workers, 4)), release_s=np.array(release), waits=3, gradients=gradients,
               **more)  # fmt: skip


FAST = Wire(topology=Topology.RING, link=Link(bytes_per_s=1e9))


def test_a_bucket_leaves_when_its_last_gradient_is_made_and_the_update_waits_for_all():
    apart = synthesise(job(), buckets(job().gradients, 1.0), FAST).run()
    assert apart.span_s == pytest.approx(2 + 4 + 2 + 1)  # b queues behind a
    together = synthesise(job(), buckets(job().gradients, 1e12), FAST).run()
    assert together.span_s == pytest.approx(3 + 6 + 1)


def test_the_slowest_worker_and_copies_delay_all():
    late = synthesise(job(release=(0.0, 0.5)), buckets(job().gradients, 1.0), FAST).run()
    assert late.span_s == pytest.approx(9.5)
    copied = synthesise(job(copy_s_per_byte=1e-10), buckets(job().gradients, 1e12), FAST).run()
    assert copied.span_s == pytest.approx(10.6)


def test_two_lanes_let_a_small_bucket_pass():
    cut = buckets(job().gradients, 1.0)
    two = Wire(topology=Topology.RING, link=Link(bytes_per_s=1e9), lanes=2)
    timeline = synthesise(job(), cut, two).run()
    assert timeline.span_s == pytest.approx(9.0)  # the wire carries the same bytes
    first = [timeline.start[k] for k in np.flatnonzero(synthesise(job(), cut, two).bucket == 1)]
    assert min(first) < 6.0


def test_size_over_bandwidth_knows_neither_latency_nor_other_workers():
    cut = buckets(job().gradients, 1.0)
    slow = Wire(topology=Topology.RING, link=Link(bytes_per_s=1e9, latency_s=0.5))
    assert size_over_bandwidth(job(release=(0.0, 0.5)), cut, slow) == pytest.approx(9.0)
    assert synthesise(job(release=(0.0, 0.5)), cut, slow).run().span_s > 10.5


@pytest.mark.parametrize(
    ("make", "tensors", "parameters"),
    [(resnet50, 161, 25_557_032), (bert_base, 199, 109_482_240), (vgg16, 32, 138_357_544),
     (inception_v3, 284, 23_834_568)],
)  # fmt: skip
@pytest.mark.parametrize("chip", [None, Chip()])
def test_known_models_have_their_published_parameters(make, tensors, parameters, chip):
    made = make(workers=2, chip=chip)
    assert len(made.gradients) == tensors
    assert sum(gradient.nbytes for gradient in made.gradients) == 4 * parameters


def test_activations_live_until_their_backward_and_gradients_until_the_update():
    made = resnet50(workers=1, batch=1)
    peak = memory(synthesise(made, buckets(made.gradients, 25e6), FAST).run()).peak[0]
    kept = made.keeps[: made.waits // 2].sum()
    assert kept <= peak < kept + 4 * 25_557_032
    assert made.keeps.sum() == made.frees.sum()


@pytest.mark.parametrize(("make", "flops"), [(resnet50, 4.1e9), (vgg16, 15.5e9), (inception_v3, 5.7e9)])
def test_known_models_do_their_published_multiply_adds(make, flops):
    made = make(workers=1, batch=1, flops_per_s=2.0)  # seconds of the forward pass are multiply-adds
    forward = made.seconds[0][: made.waits // 2].sum()
    assert forward == pytest.approx(flops, rel=0.02)  # published to two digits


def test_kernels_told_apart_are_the_same_model_and_save_what_their_roofline_leaves():
    coarse, fine = resnet50(workers=1, batch=1), resnet50(workers=1, batch=1, chip=Chip())
    assert len(fine.names) > 2 * len(coarse.names)
    assert [(g.name, g.nbytes) for g in fine.gradients] == [(g.name, g.nbytes) for g in coarse.gradients]
    assert fine.keeps.sum() == pytest.approx(coarse.keeps.sum())
    slow = Chip(flops_per_s=1.0)  # nothing but FLOPs counts: fusing saves a launch
    saves = resnet50(workers=1, batch=1, chip=slow).saves_s
    convolutions = np.flatnonzero([name.endswith("conv1") for name in fine.names[: fine.waits // 2]])
    assert saves[convolutions].min() >= slow.launch_s
    every = Chip(flops_per_s=1e30)  # nothing but bytes counts: all kernels as one still read and write both ends
    job = resnet50(workers=1, batch=1, chip=every)
    assert np.nansum(job.saves_s) < job.seconds[0].sum()
    assert np.nanmin(job.saves_s) > every.launch_s


def test_a_bucket_may_have_parts_of_its_own_and_wait_for_a_moment():
    whole = buckets(job().gradients, 1e12)
    own = [replace(bucket, part_bytes=bucket.nbytes / 2) for bucket in whole]
    served = Wire(topology=Topology.PARAMETER_SERVER, link=Link(bytes_per_s=1e9), servers=2)
    one, two = (synthesise(job(), cut, served).run().span_s for cut in (whole, own))
    assert one - two == pytest.approx(2 * 6.0)  # each of two servers takes half of what both workers push and pull
    late = [replace(bucket, not_before_s=5.0) for bucket in whole]
    assert synthesise(job(), late, FAST).run().span_s == pytest.approx(5 + 6 + 1)


def test_buckets_go_round_the_servers():
    cut = buckets(job().gradients, 1.0)  # two, whole
    wires = [Wire(topology=Topology.PARAMETER_SERVER, link=Link(bytes_per_s=1e9), servers=s, lanes=9) for s in (1, 2)]
    one, two = (synthesise(job(), cut, over).run().span_s for over in wires)
    assert one == pytest.approx(2 + 2 * 4 + 2 * 4 + 1 + 2 * 2)  # b is pushed while a is pulled, and pulled after it
    assert two == pytest.approx(2 + 2 * 4 + 2 * 4 + 1)  # b, on the other server, is back before a


@pytest.mark.parametrize(("name", "count"), [("b1", 13), ("b4", 7), ("b25", 2)])
def test_buckets_are_cut_as_ddp_cut_them_in_the_shipped_runs(shared, name, count):
    dfg = build(fine(shared, f"ddp2_1gbit_{name}", 2))
    one = measured_job(dfg, 0)
    again = buckets(one.job.gradients, float(name[1:]) * MIB)
    assert one.can_cut
    assert len(again) == count
    assert [(b.nbytes, b.op) for b in again] == [(b.nbytes, b.op) for b in one.cut]


@pytest.mark.parametrize("made", ["b1", "b4", "b25"])
def test_what_ifs_of_buckets_are_within_10_percent_of_runs_and_nearer_than_size_over_bandwidth(shared, made):
    runs = {name: build(fine(shared, f"ddp2_1gbit_{name}", 2)) for name in ("b1", "b4", "b25")}
    ours, plain = [], []
    for name, run in runs.items():
        found = predict(runs[made], Change(bucket_bytes=float(name[1:]) * MIB))
        ours.append(abs(found.seconds.mean() / run.iteration_s().mean() - 1.0))
        plain.append(abs(found.size_over_bandwidth_s.mean() / run.iteration_s().mean() - 1.0))
    assert max(ours) < 0.10
    assert np.mean(ours) < np.mean(plain)


def test_the_same_ring_synthesised_takes_as_long_as_the_measured(shared):
    dfg = build(fine(shared, "ring4_400mbit", 4))
    found = predict(dfg, Change())
    assert found.seconds.mean() == pytest.approx(dfg.iteration_s().mean(), rel=0.05)
    assert found.size_over_bandwidth_s.mean() < 0.85 * dfg.iteration_s().mean()
    slower = [predict(dfg, Change(bandwidth=f)).seconds.mean() for f in (4.0, 1.0, 0.25)]
    assert slower == sorted(slower)
    assert predict(dfg, Change(workers=8)).seconds.mean() > found.seconds.mean()


@pytest.mark.parametrize(
    ("traces", "change", "what"),
    [
        (ddp(), Change(), "a what-if needs transfers whose bytes are known"),
        ([trace(0, [compute("FW", 0.0, 1.0)])], Change(), "a what-if needs transfers whose bytes are known"),
    ],
)
def test_what_a_trace_does_not_hold_is_refused(traces, change, what):
    with pytest.raises(ValueError, match=what):
        predict(build(traces), change)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="bandwidth must be at least 1e-06 .* but is 0"):
        Change(bandwidth=0)
    with pytest.raises(ValueError, match="a link must carry more than 0 bytes a second"):
        Link(bytes_per_s=0.0)
    with pytest.raises(ValueError, match="a bucket must hold more than 0 bytes"):
        buckets([], 0.0)
    assert buckets([], 1.0) == []
    assert Bucket(nbytes=1.0, op=0, names=()).nbytes == 1.0


@pytest.mark.parametrize("topology", [t for t in Topology if t is not Topology.UNKNOWN])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_what_a_node_sends_on_it_has_received_and_every_worker_contributes(topology, n):
    made = flow(topology, n, parts=2, servers=2, per_machine=2)
    ends = np.stack([made.source[made.after], made.target[made.after]], axis=1)
    before = np.stack([made.source[made.before], made.target[made.before]], axis=1)
    assert all(set(a) & set(b) for a, b in zip(ends.tolist(), before.tolist(), strict=True))
    sends_on = made.target[made.before] == made.source[made.after]
    assert set(made.after[sends_on].tolist()) == set(made.after.tolist())
    assert set(made.begins[made.begins >= 0].tolist()) == set(range(n))
    assert (made.begins[made.begins >= 0] == made.source[made.begins >= 0]).all()
    assert set(made.ends[:, 0].tolist()) == set(range(n))
    # A worker has the bucket back only after every other has handed its own over.
    behind = [{int(k)} for k in made.begins]
    for b, a in sorted(zip(made.before.tolist(), made.after.tolist(), strict=True), key=lambda edge: edge[1]):
        behind[a] |= behind[b]
    for worker in range(n):
        seen = set().union(*(behind[k] for w, k in made.ends.tolist() if w == worker))
        assert set(range(n)) - {worker} <= seen


@pytest.mark.parametrize(("n", "starts"), [(2, [4.0, 4.0]), (4, [2.0, 2.0, 4.0, 4.0])])
def test_a_message_of_a_ring_moves_once_both_ends_are_at_its_step(n, starts):
    late = job(workers=n, release=(*[0.0] * (n - 1), 2.0))  # gradients are there at 2 s, and at 4 s
    made = synthesise(late, [Bucket(nbytes=float(n), op=1, names=())], slow_ring())
    timeline = made.run()
    moves = timeline.start[made.bucket >= 0]
    assert sorted(moves[:n].tolist()) == starts
    assert moves[n:].min() >= 4.0 + 1.0 * (n == 2)  # nobody goes on to the second step without both neighbours


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_among_workers_move_each_part_to_one_and_back(servers):
    made = flow(Topology.PARAMETER_SERVER, 3, parts=4, servers=servers, colocated=True, first=1 % servers)
    assert made.num_servers == 0
    assert made.share.sum() == pytest.approx(4.0)  # (n - 1) workers, there and back
    pushes = made.begins >= 0
    assert (made.begins[pushes] == made.source[pushes]).all()
    assert set(made.target[pushes].tolist()) == set(range(servers))
    assert (made.posts[~pushes] == made.source[~pushes]).all()  # the server hands its own part over too
    assert set(made.ends[:, 0].tolist()) == {0, 1, 2}


def test_more_servers_than_workers_to_be_them_are_refused():
    with pytest.raises(ValueError, match=r"at most as many as these \(2\), but are 3"):
        flow(Topology.PARAMETER_SERVER, 2, servers=3, colocated=True)


def test_directions_that_take_turns_take_twice_as_long():
    def span(half):
        wire = Wire(topology=Topology.PARAMETER_SERVER, link=Link(bytes_per_s=1.0), part_bytes=1.0, colocated=True,
                    lanes=9, half_duplex=half)  # fmt: skip
        return sync_alone_s(2, 8.0, wire)

    assert span(True) == 16.0
    assert span(False) == 9.0  # a pull runs beside the next push


def test_a_transfer_slows_compute_of_its_worker_by_its_bytes():
    made = synthesise(job(), [Bucket(nbytes=2.0, op=0, names=())], slow_ring(host_s_per_byte=0.25))
    ends = made.run().end[:4]
    # Two messages of a byte each from 1 s to 3 s, which take a quarter of the compute beside them.
    assert ends == pytest.approx([1.0, 1.0 + 4 / 3, 3.5, 4.5])


def slow_ring(**link):
    return Wire(topology=Topology.RING, link=Link(bytes_per_s=1.0, **link))


def test_collectives_without_tensors_are_buckets_of_their_own(shared):
    traces = read_all(sorted((shared / "traces" / "kineto_gloo").glob("*.gz")))
    dfg = build(traces, hosts=False)
    same = predict(dfg, Change()).seconds.mean()
    assert same == pytest.approx(dfg.iteration_s().mean(), rel=0.05)
    assert predict(dfg, Change(bandwidth=2.0)).seconds.mean() < 0.8 * same
    with pytest.raises(ValueError, match="buckets can be cut anew where the trace says the bytes of each gradient"):
        predict(dfg, Change(bucket_bytes=1e6))


def test_ranks_that_compute_different_things_are_refused():
    different = [trace(r, [compute(f"FW {k}", float(k), k + 1.0) for k in range(1 + r)]
                       + [collective("all_reduce", 2.0, 3.0, nbytes=8.0)], world=2) for r in range(2)]  # fmt: skip
    with pytest.raises(
        ValueError, match=r"ranks that compute the same, but in iteration 0 they have \[1, 2\] operations"
    ):
        predict(build(different), Change())


@pytest.mark.parametrize("topology", [Topology.RING, Topology.TREE, Topology.HIERARCHICAL, Topology.PARAMETER_SERVER])
@pytest.mark.parametrize(("workers", "per_machine", "parts"), [(2, 1, 1), (8, 4, 3), (12, 1, 5)])
def test_the_size_of_a_flow_is_known_before_it_is_made(topology, workers, per_machine, parts):
    made = flow(topology, workers, parts=parts, per_machine=per_machine)
    told = num_steps(topology, workers, parts=parts, per_machine=per_machine)
    assert len(made.source) <= told
    assert max(len(made.source), len(made.before)) <= told <= 3 * max(len(made.source), len(made.before))
