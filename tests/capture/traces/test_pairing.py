"""What ranks did together is paired, or refused with the figure that disagrees."""

import copy
import dataclasses
import random

import pytest

from capture.traces.pairing import pair
from capture.traces.recognise import read_all
from capture.traces.records import Group
from tests.capture.traces.written import event, header, step, write

FORWARD = event("FW", "FW", 0, 2, it=0)


def job(tmp_path, *ranks):
    """Pairs traces, each given by its lines."""
    return pair(read_all([write(tmp_path / f"r{index}.jsonl", *lines) for index, lines in enumerate(ranks)]))


def steps(later_ms=0.0, num=20):
    return [line for it in range(num) for line in step(later_ms, it)]


def refusal(tmp_path, *ranks):
    with pytest.raises(ValueError, match=r"r\d\.jsonl") as caught:
        job(tmp_path, *ranks)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_ring_pairs_all_collectives_and_all_transfers(shared):
    found = pair(read_all(sorted((shared / "traces" / "fine_ring").glob("ring4_400mbit_rank*"))))
    assert (found.num_collectives, found.num_transfers, found.missing) == (30, 720, ())
    assert [(a.a, a.b, a.num_paired) for a in found.agreements] == [(0, 1, 30), (0, 2, 30), (0, 3, 30)]


def test_a_constant_difference_of_clocks_is_told_and_not_held_against_ranks(tmp_path):
    found = job(tmp_path, [header(0), *steps()], [header(1), *steps(50.0)])
    (agreement,) = found.agreements
    assert agreement.clock_s == pytest.approx(0.05, abs=1e-9)
    assert agreement.worst_s < 1e-9
    assert found.num_collectives == 20


def test_ends_that_scatter_more_than_collectives_take_are_refused_with_the_figure(tmp_path):
    draw = random.Random(1)
    scattered = [line for it in range(20) for line in step(draw.uniform(-4.0, 4.0), it)]
    scattered.sort(key=lambda line: line["end"])
    told = refusal(tmp_path, [header(0), *steps()], [header(1), *scattered])
    assert "ends matched by order differ by up to" in told
    assert "where a collective takes 3.0 ms" in told


def test_few_outliers_are_no_reason_to_refuse(tmp_path):
    late = copy.deepcopy(steps())
    late[-2]["end"] += 900_000
    (agreement,) = job(tmp_path, [header(0), *steps()], [header(1), *late]).agreements
    assert agreement.worst_s == pytest.approx(0.9e-3)


def test_one_rank_is_noticed_and_missing_ranks_are_told(tmp_path):
    found = job(tmp_path, [header(2, world=4), *steps()])
    assert found.missing == (0, 1, 3)
    assert "one rank" in found.notices[0]
    assert "3 of 4 ranks are missing (0, 1, 3)" in found.notices[1]


def test_ranks_of_different_jobs_are_refused(tmp_path):
    def told(*headers):
        return refusal(tmp_path, *([one, FORWARD] for one in headers))

    assert "its world is 4 against 2" in told(header(0), header(1, world=4))
    assert "its job is b against a" in told(header(0, job="a"), header(1, job="b"))
    groups = [[{"name": "dp", "ranks": ranks}] for ranks in ([0, 1], [0, 1, 2])]
    members = told(header(0, 3, groups=groups[0]), header(1, 3, groups=groups[1]))
    assert "process group 'dp' must have the members" in members
    assert "rank 0 must have one trace" in told(header(0), header(0))
    assert "rank must be below the world of 2" in told(header(0), header(2))


def test_groups_of_one_name_may_share_no_rank(tmp_path):
    groups = [[{"name": "tp", "ranks": ranks}] for ranks in ([0, 1], [2, 3])]
    ranks = ([header(rank, 4, groups=groups[rank // 2]), FORWARD] for rank in range(4))
    assert job(tmp_path, *ranks).num_collectives == 0


def test_a_group_that_does_not_tell_its_ranks_is_that_of_its_name_and_size(tmp_path):
    traces = read_all([write(tmp_path / f"r{rank}.jsonl", header(rank), *steps()) for rank in (0, 1)])
    untold = dataclasses.replace(traces[1], groups=(Group(name="world", size=2),))
    assert pair([traces[0], untold]).num_collectives == 20
    other = dataclasses.replace(traces[1], groups=(Group(name="world", size=3),))
    with pytest.raises(ValueError, match="has 3 ranks against ranks"):
        pair([traces[0], other])


def test_other_counts_sizes_and_names_of_collectives_are_refused(tmp_path):
    told = refusal(tmp_path, [header(0), *steps()], [header(1), *steps(num=19)])
    assert "must have as many collectives as in" in told
    assert "has 19 against 20" in told
    for key, value, says in (
        ("bytes", 1, "AR of 1 bytes against AR of 4096 bytes"),
        ("name", "AG", "but is AG of 4096"),
    ):
        other = copy.deepcopy(steps())
        other[2][key] = value
        assert says in refusal(tmp_path, [header(0), *steps()], [header(1), *other])


def transfer(cat, at=1.0, nbytes=64, tx="t"):
    return event(cat, cat, at, at + 1, tx=tx, peer=int(cat == "SEND"), bytes=nbytes, it=0)


def test_transfers_need_their_other_end(tmp_path):
    assert job(tmp_path, [header(0), transfer("SEND")], [header(1), transfer("RECV")]).num_transfers == 1
    assert "must have its other end on rank 1" in refusal(tmp_path, [header(0), transfer("SEND")], [header(1), FORWARD])
    told = refusal(tmp_path, [header(0), transfer("SEND")], [header(1), transfer("RECV", nbytes=65)])
    assert "but is of 64 against 65 bytes" in told
    assert job(tmp_path, [header(0, 3), transfer("SEND")], [header(2, 3), FORWARD]).num_transfers == 0


def test_a_transaction_that_two_ranks_send_is_refused(tmp_path):
    told = refusal(tmp_path, [header(0), transfer("SEND")], [header(1), {**transfer("SEND"), "peer": 0}])
    assert "SEND of transaction 'i0|t' must be the only one" in told
