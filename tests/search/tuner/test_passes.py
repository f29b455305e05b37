"""The theorems hold; each pass changes a number where it applies, and nothing where it does not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from capture.traces.records import Topology
from capture.traces.synthesise import Gradient, Job
from estimator.tasks import Category
from search.tuner.climb import climb, seen_of
from search.tuner.decisions import apart, lay
from search.tuner.judge import Judge, SpeedUps
from search.tuner.passes import DEFAULT, known_passes, theorem_1, theorem_2
from tests.search.tuner.jobs import WHOLE, job, subject, wire

CASES = 20_000


def pair(rng):
    """Two computes and their buckets, behind an earlier one that keeps the link for a while; t_sync is affine."""
    first, second, saved = rng.uniform(0.0, 1.0, 3) * (1.0, 1.0, 0.5)
    latency, rate = rng.uniform(0.0, 0.3), rng.uniform(0.2, 3.0)
    sizes, busy = rng.uniform(0.0, 1.0, 2), rng.uniform(0.0, 2.0)

    def sync(size):
        return latency + size / rate

    def end(ready, size, free):
        return max(ready, free) + sync(size)

    saved = min(saved, first, second)
    return first, second, saved, sizes, busy, sync, end


def test_theorem_1_never_loses():
    rng, fired = np.random.default_rng(0), 0
    for _ in range(CASES):
        first, second, saved, (s, t), busy, sync, end = pair(rng)
        if not theorem_1(sync(s), saved):
            continue
        fired += 1
        kept = end(first + second, t, end(first, s, busy))
        joined = end(first + second - saved, s + t, busy)
        assert joined <= kept + 1e-12
        ops_alone = end(first + second - saved, t, end(first + second - saved, s, busy))
        assert ops_alone <= kept + 1e-12
    assert fired > CASES / 50


def test_theorem_2_never_loses():
    rng, fired = np.random.default_rng(1), 0
    for _ in range(CASES):
        first, second, _, (s, t), busy, sync, end = pair(rng)
        q = end(first, s, busy)
        if not theorem_2(q, first + second, sync(s + t), sync(t)):
            continue
        fired += 1
        assert end(first + second, s + t, busy) <= end(first + second, t, q) + 1e-12
    assert fired > CASES / 10


def test_theorem_1_is_not_necessary():
    rng, missed, gained = np.random.default_rng(2), 0, 0
    for _ in range(CASES):
        first, second, saved, (s, t), busy, sync, end = pair(rng)
        gains = end(first + second - saved, s + t, busy) < end(first + second, t, end(first, s, busy)) - 1e-12
        gained += gains
        missed += gains and not theorem_1(sync(s), saved)
    assert gained / 10 < missed < gained  # so a judge decides what it does not promise


def bare(**more):
    """One compute a pass and one gradient: nothing to fuse, nothing between to compute again."""
    kinds = (Category.FORWARD, Category.BACKWARD, Category.OPTIMIZER)
    return Job(
        names=("FW.a", "BW.a", "UPD"), category=kinds, seconds=np.full((2, 3), 1e-2), lag_s=np.zeros((2, 3)),
        release_s=np.zeros(2), waits=2, gradients=(Gradient(name="a", nbytes=1e6, op=1),),
        saves_s=np.array([np.nan] * 3), **more,
    )  # fmt: skip


def proposals(made, over, name, start=None, number=0):
    judge = Judge(subject(made, over), SpeedUps(coarse=False))
    one = known_passes()[name]
    start = start or apart(made)
    seen = seen_of(judge, start, [one], number)
    return judge, start, [move for group in one.propose(seen) for move in group]


@pytest.mark.parametrize("name", known_passes())
def test_a_pass_changes_a_number_where_it_applies(name):
    over = wire(Topology.PARAMETER_SERVER, servers=2)
    made = job(4, layers=6, silent=0.0)
    judge, start, moves = proposals(made, over, name)
    changed = [judge.look(move.applied(start)) for move in moves]
    before = judge.look(start)
    assert any(look.seconds != before.seconds or look.peak_bytes != before.peak_bytes for look in changed)


@pytest.mark.parametrize("name", ["op_fusion", "tensor_fusion", "tensor_partition", "recomputation"])
def test_a_pass_proposes_nothing_where_it_does_not_apply(name):
    assert proposals(bare(), wire(), name)[2] == []


def test_no_pass_touches_the_update_or_crosses_from_forward_to_backward():
    made = replace(job(1), saves_s=np.full(9, 1e-4))  # told of every pair
    judge = Judge(subject(made, wire()), SpeedUps())
    every = replace(apart(made), ops=np.ones(len(made.names) - 1, np.bool_))
    look = judge.look(every)
    assert len(look.first) == 3
    assert judge.job_of(every, made)[0].names[-1] == "UPD"


def test_partition_takes_the_parts_that_synchronise_fastest():
    made = job(0, layers=3, workers=4, silent=0.0)
    over = wire(Topology.PARAMETER_SERVER, servers=2)
    judge = Judge(subject(made, over), SpeedUps())
    best, whole = replace(apart(made), part_bytes=None), apart(made, part_bytes=WHOLE)
    assert judge.seconds(best) < judge.seconds(whole)
    ring = Judge(subject(made, wire()), SpeedUps())
    assert ring.seconds(best) == ring.seconds(whole)  # a ring has a chunk per worker, whatever the parts


def test_mixed_precision_halves_what_is_sent_and_runs_where_it_is_asked_for_alone():
    made = job(3, layers=5)
    judge = Judge(subject(made, wire()), SpeedUps())
    known = known_passes()
    found = climb(judge, apart(made), [known[name] for name in DEFAULT])
    assert not found.mixed
    found = climb(judge, apart(made), [known["mixed_precision"]])
    assert found.mixed
    assert judge.look(found).nbytes.sum() == pytest.approx(sum(g.nbytes for g in made.gradients) / 2)
    laid = lay(made, found, [], 1e-5)
    assert laid.spent_s[0][-1] == pytest.approx((made.seconds + made.lag_s)[0][-1])  # the update is as it was


class Twice:
    """A user's pass: the first two buckets together."""

    name = "first_two"
    saves_memory = False

    def propose(self, seen):
        from search.tuner.moves import Move

        yield (Move(tensors=(0,)),)


class Nameless:
    saves_memory = False


def install(tmp_path, monkeypatch, target):
    info = tmp_path / "lab-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[trainspace.tuner_passes]\nlab = {target}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    known_passes.cache_clear()


@pytest.fixture
def fresh():
    yield
    known_passes.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_pass_of_another_package_is_found_by_its_entry_point_and_used(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "tests.search.tuner.test_passes:Twice")
    made = job(0, layers=4, silent=0.0)
    judge = Judge(subject(made, wire(rate=1e8)), SpeedUps(coarse=False))
    found = climb(judge, apart(made), [known_passes()["first_two"]])
    assert found.tensors.tolist() == [True] + [False] * (len(made.gradients) - 2)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("target", "says"),
    [("tests.search.tuner.test_passes:Nameless", "must have name, saves_memory and propose, but lacks name"),
     ("tests.search.tuner.test_passes:Absent", "cannot be loaded"),
     ("search.tuner.passes:OpFusion", "must have a name of its own, but 'op_fusion' is taken")],
)  # fmt: skip
def test_a_pass_that_cannot_be_used_is_refused_in_one_line(target, says, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, target)
    with pytest.raises(ValueError, match=says) as told:
        known_passes()
    assert "\n" not in str(told.value)
