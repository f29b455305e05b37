"""Two ranks that train over loopback while they are recorded: what they sum, what is told of it, what it replays to."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from capture.align import align, moved
from capture.profile import apply_plan
from capture.profile.probe import PINGS
from capture.profile.synchroniser import _Bucket
from capture.traces.common import common
from capture.traces.dfg import build
from capture.traces.pairing import pair
from capture.traces.recognise import read_all
from capture.traces.records import KINDS, Kind, Topology
from capture.traces.replay import replay_trace
from capture.traces.what_if import Change, link_of, measured_job, predict
from tests.capture.profile.data_parallel import PARTS, SIZES, STEPS, WIDTH, model, plan
from tests.capture.profile.started import run_ranks

WORLD, WARM = 2, 2
QUIET = 1.0  # processes that run or wait, per core: above, what is measured is the machine's other work
ALL = ("ddp", "hook", "ring", "server", "servers")
SHIFT_NS = 50_000_000


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder that data_parallel.py wrote."""
    folder = tmp_path_factory.mktemp("job")
    run_ranks("data_parallel.py", WORLD, folder)
    return folder


@pytest.fixture(scope="module")
def told(job):
    """What each rank found."""
    return [json.loads((job / f"rank{rank}.json").read_text()) for rank in range(WORLD)]


def traces(job, name):
    return read_all([job / name / f"rank{rank}.jsonl" for rank in range(WORLD)])


def lines(job, name, rank):
    return [json.loads(text) for text in (job / name / f"rank{rank}.jsonl").read_text().splitlines()]


def test_a_ring_gives_every_rank_the_exact_sum_whatever_size_and_parts(told):
    ranks = sum(range(1, WORLD + 1))
    for size in SIZES:
        for part in PARTS:
            for one in told:
                assert one["sums"][f"{size} {part}"] == [k * ranks for k in range(size)], (size, part)


def test_a_rank_sends_two_thirds_and_so_on_of_a_tensor_and_all_ranks_together_what_a_ring_must(job):
    sent = Counter()
    for rank in range(WORLD):
        for event in lines(job, "sums", rank)[1:]:
            if event["cat"] == "SEND":
                sent[event["bucket"]] += event["bytes"]
    sizes = [size for size in SIZES for _ in PARTS]
    assert sent == {bucket: 2 * (WORLD - 1) * 4 * size for bucket, size in enumerate(sizes)}
    even = [e for e in lines(job, "sums", 0)[1:] if e["cat"] == "SEND" and e["bucket"] == sizes.index(1000)]
    assert sum(event["bytes"] for event in even) == 2 * (WORLD - 1) / WORLD * 4000


def test_all_synchronisers_train_the_same_weights_on_all_ranks(told):
    for name in ALL:
        assert told[0][name] == told[1][name] == told[0]["ddp"], name  # of two ranks, sums have one order


def test_a_plan_trains_what_its_job_trains_without_one_in_its_own_buckets_and_parts(job, told):
    assert told[0]["plan"] == told[1]["plan"] == told[0]["reference"]
    header, *events = lines(job, "plan", 0)
    assert {header["bof"][name] for name in ("3.bias", "3.weight", "2.0.bias", "2.0.weight")} == {0}
    assert {header["bof"][name] for name in ("1.0.bias", "1.0.weight", "0.0.bias", "0.0.weight")} == {1}
    one = [event for event in events if event["it"] == WARM]
    sent = Counter(event["bucket"] for event in one if event["cat"] == "SEND")
    assert sent == {0: 4 * 2 * (WORLD - 1), 1: 2 * (WORLD - 1)}  # 37,636 bytes in parts of 10,000, once an update
    forward = Counter(event["name"] for event in one if event["name"].startswith(("FW", "BW.again")))
    assert forward["FW.1.0"] == forward["BW.again.1.0"] == 2
    assert forward["BW.again.0.0"] == 0
    assert told[0]["not_applied"] == [
        "1 of 1 groups of fused operations run apart: pass compile=True for torch.compile"
    ]


def test_a_plan_for_another_model_is_refused():
    strange = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="the model: a plan must be for the model it is applied to"):
        apply_plan(strange, plan())
    with pytest.raises(ValueError, match="'9' is none"):
        apply_plan(model(), replace(plan(), recompute=("9",)))


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own, while it loads its compiler
def test_fused_groups_are_compiled_where_asked_and_half_travels_at_half_the_bytes():
    one = model()
    applied = apply_plan(one, plan(fused_ops=(("FW.1.0", "FW.1.1"), ("UPD", "BW.3.bias"))), compile=True)
    assert one[1]._compiled_call_impl is not None
    assert one[0]._compiled_call_impl is None
    assert [note.partition(":")[0] for note in applied.not_applied] == [
        "1 of 2 groups of fused operations run apart", "the plan's seconds are of 2 workers, and 1 train here"
    ]  # fmt: skip
    named = dict(model().named_parameters())
    assert _Bucket(0, [*named], named, half=True).flat.nbytes * 2 == sum(p.nbytes for p in named.values())


@pytest.mark.parametrize("name", ALL)
def test_each_iteration_has_every_forward_gradient_copy_and_update_once(job, name):
    header, *events = lines(job, name, 0)
    linear = ("0.0", "1.0", "2.0", "3")
    gradients = {f"{layer}.{kind}": size for layer in linear[:3] for kind, size in (("weight", WIDTH), ("bias", 1))}
    gradients = {tensor: 4 * WIDTH * size for tensor, size in gradients.items()} | {"3.weight": 4 * WIDTH, "3.bias": 4}
    assert header["bof"].keys() == gradients.keys()
    buckets = Counter()
    for tensor, bucket in header["bof"].items():
        buckets[bucket] += gradients[tensor]
    for it in range(WARM, STEPS):
        mine = [event for event in events if event["it"] == it]
        forward = [event["name"] for event in mine if event["cat"] == "FW"]
        assert forward == [f"FW.{k}.{j}" for k in range(3) for j in range(2)] + ["FW.3", "FW.loss"]
        made = {event["tensor"]: event["bytes"] for event in mine if "tensor" in event}
        assert made == gradients
        copies = {event["bucket"]: event["bytes"] for event in mine if event["name"].startswith("CAT")}
        assert copies == buckets
        assert [event["cat"] for event in mine].count("UPD") == [event["cat"] for event in mine].count("ITER") == 1
    assert {event["it"] for event in events} == {-1, *range(WARM, STEPS)}


def test_transfers_of_a_bucket_carry_what_a_ring_must(job):
    for name in ("hook", "ring"):
        _, *events = lines(job, name, 0)
        copies = {(e["it"], e["bucket"]): e["bytes"] for e in events if e["name"].startswith("CAT")}
        sent = Counter()
        for event in events:
            if event["cat"] == "SEND" and event["it"] >= 0:
                sent[event["it"], event["bucket"]] += event["bytes"]
        assert set(sent) == set(copies)
        for key, nbytes in copies.items():
            assert abs(sent[key] - 2 * (WORLD - 1) / WORLD * nbytes) <= 8  # of an odd number one chunk is longer


def test_servers_get_each_part_once_from_every_other_worker_and_give_its_sum_to_all(job):
    parts = {"server": [2, 2, 2], "servers": [5, 2, 4]}
    for name in ("server", "servers"):
        ranks = [lines(job, name, rank) for rank in range(WORLD)]
        copies = {e["bucket"]: e["bytes"] for e in ranks[0][1:] if e["name"].startswith("CAT")}
        assert [*copies.values()] == [4 * (WIDTH * WIDTH + WIDTH) + extra for extra in (4 * WIDTH + 4, 0, 0)]
        for it in range(WARM, STEPS):
            mine = [[e for e in events[1:] if e["it"] == it] for events in ranks]
            for way in ("PUSH", "PULL"):
                sent = [e for events in mine for e in events if e["cat"] == "SEND" and e["name"].startswith(way)]
                come = [e for events in mine for e in events if e["cat"] == "RECV" and e["name"].startswith(way)]
                assert sorted(e["tx"] for e in sent) == sorted(e["tx"] for e in come) == sorted({e["tx"] for e in sent})
                assert sum(e["bytes"] for e in sent) == (WORLD - 1) * sum(copies.values())
            added = Counter(e["bucket"] for events in mine for e in events if e["cat"] == "RED")
            assert added == {bucket: WORLD * number for bucket, number in zip(copies, parts[name], strict=True)}


@pytest.mark.parametrize("name", ALL)
def test_clocks_that_differ_by_50_ms_are_found_and_the_job_replays_to_what_it_took(job, name):
    first, second = traces(job, name)
    off = replace(second, epoch_ns=second.epoch_ns + SHIFT_NS)
    found = align([first, off])
    truth = -SHIFT_NS / 1e9
    assert found.low_s[1] <= truth <= found.high_s[1]
    assert found.identifiable[1]
    replayed = replay_trace(build(moved([first, off], found)))
    assert len(replayed.iterations) == STEPS - WARM
    # As other jobs that just ran. Two servers' threads share a link, which serves one transfer at a time in a graph.
    assert abs(replayed.worst_error) < (0.3 if name == "servers" else 0.02)
    if os.getloadavg()[0] > QUIET * (os.cpu_count() or 1):
        pytest.skip("needs a quiet machine: offsets of microseconds")
    assert abs(found.offset_s[1] - truth) < 25e-6


@pytest.mark.parametrize("name", ALL)
def test_buckets_of_a_recording_can_be_cut_anew(job, name):
    dfg = build(traces(job, name))
    for number in dfg.iterations:
        one = measured_job(dfg, number)
        assert one.can_cut
        sizes = sorted(gradient.nbytes for gradient in one.job.gradients)
        assert sizes == sorted([4.0 * WIDTH * WIDTH] * 3 + [4.0 * WIDTH] * 4 + [4.0])
    assert np.all(predict(dfg, Change(bucket_bytes=1e9)).seconds > 0.0)
    serves = name.startswith("server")
    assert link_of(dfg)[1] is (Topology.PARAMETER_SERVER if serves else Topology.RING)


def test_iterations_that_some_rank_lacks_are_left_out_where_asked(job, tmp_path):
    paths = [tmp_path / f"rank{rank}.jsonl" for rank in range(WORLD)]
    for rank, path in enumerate(paths):
        texts = (job / "ring" / path.name).read_text().splitlines(keepends=True)
        last = f'"it":{STEPS - 1},' if rank else "nothing"
        path.write_text("".join(text for text in texts if last not in text))
    with pytest.raises(ValueError, match="must have its other end on rank 1"):
        pair(read_all(paths))
    left = common(read_all(paths))
    pings, whole = 4 * PINGS, pair(traces(job, "ring")).num_transfers
    kept = (whole - pings) * (STEPS - WARM - 1) // (STEPS - WARM)
    assert pair(left).num_transfers == pings + kept
    assert len(replay_trace(build(left)).iterations) == STEPS - WARM - 1
    assert left[0].notices == (f"{STEPS - WARM - 1} of {STEPS - WARM} iterations, those that all ranks have",)
    with pytest.raises(ValueError, match="must have an iteration in common, but rank 1 ended 0"):
        common([left[0], replace(left[1], iteration=np.full(len(left[1]), -1))])


def test_collectives_with_a_transaction_pair_by_it_and_not_by_their_ends(job):
    first, second = traces(job, "ddp")
    whole = np.flatnonzero(second.kind == KINDS.index(Kind.COLLECTIVE))
    late = second.end_s.copy()
    late[whole[::2]] += 1.0  # of a rank that was not scheduled
    assert pair([first, replace(second, end_s=late)]).num_collectives == len(whole)
    nameless = replace(second, end_s=late, transaction=np.where(np.isin(np.arange(len(late)), whole), -1, 0))
    with pytest.raises(ValueError, match="collectives must end when"):
        pair([first, nameless])
