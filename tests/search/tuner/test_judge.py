"""What a quick judge says is what a full replay of every worker says; where it is not exact, by the stated error."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from capture.traces.model_jobs import Chip, bert_base
from capture.traces.records import Topology
from capture.traces.synthesise import Link, Wire, sync_alone_s, synthesise
from estimator.timeline import memory
from search.tuner.coarse import coarsened
from search.tuner.decisions import apart, fusible
from search.tuner.judge import Judge, SpeedUps
from search.tuner.sync import PARTS, Sync
from tests.search.tuner.jobs import WHOLE, drawn, job, subject, wire

ALL = SpeedUps(coarse=False, partial=False, symmetry=False)


@pytest.mark.parametrize("over", [wire(), wire(Topology.PARAMETER_SERVER), wire(Topology.PARAMETER_SERVER, servers=3),
                                  wire(Topology.PARAMETER_SERVER, servers=6)])  # fmt: skip
@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("more", [{}, {"part_bytes": WHOLE}, {"part_bytes": 3e6}, {"cycle_s": 2e-3}])
def test_alike_workers_fold_into_one_exactly(over, workers, more):
    for seed in range(6):
        made = job(seed, workers=workers, copies=seed % 2 == 1)
        one = subject(made, over)
        decisions = drawn(made, seed, **more)
        quick, folded, full = (
            Judge(one, SpeedUps()).look(decisions).seconds,
            Judge(one, SpeedUps()).replayed(decisions).seconds,
            Judge(one, ALL).replayed(decisions).seconds,
        )
        assert quick == pytest.approx(full, rel=1e-12)
        assert folded == pytest.approx(full, rel=1e-12)


def test_folded_workers_hold_what_each_of_them_holds():
    for seed in range(6):
        made = job(seed)
        decisions = drawn(made, seed)
        folded = Judge(subject(made, wire()), SpeedUps()).replayed(decisions)
        full = Judge(subject(made, wire()), ALL).replayed(decisions)
        quick = Judge(subject(made, wire()), SpeedUps()).look(decisions)
        assert folded.peak_bytes == pytest.approx(full.peak_bytes, rel=1e-12)
        assert quick.peak_bytes == pytest.approx(full.peak_bytes, rel=1e-12)


def test_a_critical_path_is_that_of_every_worker():
    for seed in range(6):
        made = job(seed)
        decisions = drawn(made, seed)
        folded = Judge(subject(made, wire()), SpeedUps()).replayed(decisions)
        full = Judge(subject(made, wire()), ALL).replayed(decisions)
        assert folded.path_groups.tolist() == full.path_groups.tolist()
        assert folded.path_buckets.tolist() == full.path_buckets.tolist()


@pytest.mark.parametrize(("over", "most"), [(wire(), 1e-12), (wire(Topology.TREE), 0.05)])
def test_workers_that_differ_are_judged_exactly_on_a_ring_and_5_percent_too_long_on_a_tree(over, most):
    for seed in range(10):
        made = job(seed, alike=False)
        one, decisions = subject(made, over), drawn(made, seed)
        quick, full = Judge(one, SpeedUps()).look(decisions).seconds, Judge(one, ALL).replayed(decisions).seconds
        assert full * (1.0 - 1e-12) <= quick <= (1.0 + most) * full  # stated in judge.py


def test_servers_of_workers_that_differ_are_replayed_for_every_candidate():
    made = job(1, alike=False)
    one = subject(made, wire(Topology.PARAMETER_SERVER, servers=2))
    decisions = drawn(made, 1, part_bytes=3e6)
    assert Judge(one, SpeedUps()).seconds(decisions) == Judge(one, ALL).replayed(decisions).seconds


@pytest.mark.parametrize("topology", [Topology.RING, Topology.TREE, Topology.PARAMETER_SERVER])
def test_synchronising_a_bucket_is_what_its_partial_replay_takes(topology):
    over = wire(topology, servers=2)
    sync = Sync(6, over)
    sizes, parts = np.array([3e4, 5.5e6, 8e7]), np.array([1, 8, 32])
    found = sync.seconds(sizes, parts)
    for s, k, seconds in zip(sizes, parts, found, strict=True):
        part = s / k * (1 + 1e-12)
        assert seconds == pytest.approx(sync_alone_s(6, s, replace(over, part_bytes=part)), rel=1e-9)
    assert sync.replays <= 9  # three a number of parts
    best = sync.best_parts(sizes)
    for s, k in zip(sizes, best, strict=True):
        every = [float(sync.seconds(np.array([s]), np.array([n]))[0]) for n in PARTS]
        assert float(sync.seconds(np.array([s]), np.array([k]))[0]) == min(every)


def test_a_fused_compute_takes_what_its_parts_take_less_what_is_saved():
    made = job(3)
    fast = Wire(topology=Topology.RING, link=Link(bytes_per_s=1e18))
    judge = Judge(subject(made, fast), SpeedUps())
    nothing = apart(made)
    assert judge.seconds(nothing) == pytest.approx((made.seconds + made.lag_s)[0].sum(), rel=1e-6)
    for k in np.flatnonzero(fusible(made)):
        saved = judge.seconds(nothing) - judge.seconds(nothing.with_op(int(k)))
        assert saved == pytest.approx(made.saves_s[k], rel=1e-6)


def test_the_coarsened_view_of_a_job_takes_as_long_as_the_same_job_with_its_groups_made_by_hand():
    made = job(5, layers=6, silent=0.6)
    judge = Judge(subject(made, wire()), SpeedUps())
    view = coarsened(made, apart(made), ops=True, tensors=True)
    held, cut = judge.job_of(view, made)
    assert judge.look(view).seconds == pytest.approx(synthesise(held, cut, wire()).run().span_s, rel=1e-12)
    makes = {g.op for g in held.gradients}
    backward = [k for k, name in enumerate(held.names) if name.startswith("BW")]
    assert set(backward) <= makes  # no backward compute without a gradient is left
    assert len({b.op for b in cut}) == len(cut)  # and no compute with two buckets


def test_a_job_of_berts_size_is_folded_exactly():
    one = subject(bert_base(workers=4, chip=Chip()), wire(rate=12.5e9))
    decisions = drawn(one.jobs[0], 1)
    assert Judge(one, SpeedUps()).look(decisions).seconds == pytest.approx(
        Judge(one, ALL).replayed(decisions).seconds, rel=1e-12
    )


def test_accumulating_sends_once_and_takes_launches_again():
    made = job(2)
    judge = Judge(subject(made, wire()), SpeedUps())
    twice = replace(apart(made), accumulate=2)
    laid = judge.laid(twice, made)
    assert len(laid.origin) == 2 * made.waits + 1
    compute = (made.seconds + made.lag_s)[0][: made.waits].sum()
    spent = laid.spent_s[0][:-1].sum()
    lags = made.lag_s[0][: made.waits].sum()  # of each micro-batch
    assert spent == pytest.approx(compute + made.waits * 1e-5 + lags, rel=1e-9)
    assert len(judge.look(twice).nbytes) == len(made.gradients)
    held, sent = made.keeps[:4].sum(), sum(g.nbytes for g in made.gradients)
    assert judge.look(apart(made)).peak_bytes > made.base_bytes + held
    assert judge.look(twice).peak_bytes <= made.base_bytes + held / 2 + sent
    assert judge.look(twice).peak_bytes == pytest.approx(
        Judge(subject(made, wire()), ALL).replayed(twice).peak_bytes, rel=1e-12
    )


def test_what_is_computed_again_is_not_kept_and_runs_before_its_backward():
    made = job(2, layers=6)
    judge = Judge(subject(made, wire()), SpeedUps())
    chosen = judge.segments[0]
    again = replace(apart(made), recompute=frozenset([0]))
    laid = judge.laid(again, made)
    place = int(np.flatnonzero(laid.origin == -1)[0])
    assert laid.origin[place + 1] == chosen.behind
    inner = slice(chosen.first, chosen.last)
    assert laid.spent_s[0][place] == pytest.approx((made.seconds + made.lag_s)[0][inner].sum())
    full = Judge(subject(made, wire()), ALL).replayed(again)
    assert judge.look(again).peak_bytes == pytest.approx(full.peak_bytes)
    assert laid.job.keeps.sum() == pytest.approx(laid.job.frees.sum())
    timeline = synthesise(*judge.job_of(again, made), wire()).run()
    assert memory(timeline).bytes[0][-1] == pytest.approx(made.base_bytes)  # all is given back
