"""A job that trains behind limited links is recorded, aligned, replayed, predicted and run."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from capture.profile.memory import allocated
from capture.testbed.experiment import cases, experiment, replayed, shifted
from capture.testbed.job import run
from capture.testbed.network import no_network
from capture.testbed.setup import BLOCKS, MIB, Setup
from capture.traces.dfg import build
from capture.traces.records import Topology
from capture.traces.what_if import link_of
from search.cli import main

pytestmark = pytest.mark.slow  # real jobs of two ranks
SMALL = Setup(model="cnn", steps=4, warm=2)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Two ranks, the job as recorded and with its gradients in one bucket."""
    if (reason := no_network()) is not None:
        pytest.skip(f"needs root: {reason}")
    folder = tmp_path_factory.mktemp("testbed")
    chosen = [case for case in cases(SMALL, 1e9) if case.name in ("as recorded", "buckets of 25 MiB")]
    told = []
    found = experiment(
        SMALL, ranks=2, bits_per_s=1e9, folder=folder / "runs", rounds=1, chosen=chosen, tell=told.append
    )
    return found, folder / "runs" / "round0", told


def test_all_that_was_asked_for_ran_and_was_predicted(report):
    found, folder, told = report
    assert [one.case.name for one in found.outcomes] == ["as recorded", "buckets of 25 MiB"]
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1", "2"]
    assert told == ["round0: alone", "round0: as recorded", "round0: buckets of 25 MiB"]
    for one in found.outcomes:
        assert 0.02 < one.run_s.item() < 5.0
        assert abs(one.error) < 0.5  # whatever else this machine does


def test_a_bucket_that_leaves_last_takes_the_longer_and_the_prediction_knows(report):
    together, apart = report[0].outcomes[1], report[0].outcomes[0]
    assert together.predicted_s > apart.predicted_s
    bytes_each_way = 21.8e6
    assert together.run_s.item() > bytes_each_way * 8 / 1e9  # no link carries more than its rate


def test_what_was_not_recorded_is_predicted_to_within_a_tenth(report, quiet):
    assert abs(report[0].worst_error) < 0.10


def test_clocks_that_are_put_off_are_found_again_and_the_job_replays_to_what_it_took(report):
    same = report[0].replayed
    assert same.clock_s < 1e-3
    assert abs(same.aligned_error) < 0.005
    assert abs(same.off_error) > 5 * abs(same.aligned_error)


def test_the_replay_holds_as_much_as_the_allocator_had_handed_out(report):
    if allocated() is None:
        pytest.skip("not a GPU, nor a C library that tells what it has allocated")
    assert abs(report[0].replayed.memory_error) < 0.05  # what was to be reached


def test_what_the_trace_says_of_the_link_is_what_it_was_limited_to(pair, tmp_path, quiet):
    found = run(pair, SMALL, tmp_path / "run")
    link = link_of(build(found.traces, hosts=False))[0]
    assert 8 * link.bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_a_rank_that_fails_ends_the_job_with_its_last_words(pair, tmp_path):
    with pytest.raises(
        ValueError, match=r"rank [01] ended with 1: .*KeyError: 'nothing'; .* with --keep, in .*/run/rank[01].log"
    ):
        run(pair, replace(SMALL, model="nothing"), tmp_path / "run")


def test_a_job_that_goes_on_too_long_is_ended(pair, tmp_path):
    with pytest.raises(ValueError, match=r"must end within 0 s, but go on; give fewer steps"):
        run(pair, SMALL, tmp_path / "run", patience_s=0.0)


def test_cases_differ_from_the_job_as_their_change_says():
    base = Setup(model="transformer")
    first, *others = cases(base, 1e9)
    assert first.setup == base
    assert first.bits_per_s == 1e9
    assert all(case.setup != base or case.bits_per_s != 1e9 for case in others)
    for case in others:
        assert case.bits_per_s == case.change.bandwidth * 1e9
        assert (case.change.bucket_bytes or 4 * MIB) == case.setup.bucket_bytes
        assert (case.change.recompute or ()) == case.setup.recompute
        assert (case.change.topology or Topology.RING) == case.setup.topology


def test_a_setup_is_told_to_ranks_as_it_is():
    setup = Setup(model="cnn", part_bytes=math.inf, recompute=BLOCKS["cnn"], synchronise=False)
    assert Setup.of(setup.text()) == setup


def test_blocks_are_modules_of_the_models_that_repeat():
    from capture.testbed.models import MODELS

    for name, blocks in BLOCKS.items():
        model = MODELS[name]().model
        kinds = [type(dict(model.named_children())[block]) for block in blocks]
        assert len(set(kinds)) == 1
        assert sum(parameter.numel() for parameter in model.parameters()) < 6e6


def test_clocks_are_put_off_by_what_is_told(shared):
    from tests.capture.traces.made import fine

    traces = fine(shared, "ring4_400mbit", 4)
    off = shifted(traces, [0.0, 0.05, -0.05, 0.0])
    assert [b.epoch_ns - a.epoch_ns for a, b in zip(traces, off, strict=True)] == [0, 50_000_000, -50_000_000, 0]
    found = replayed(traces)
    assert abs(found.aligned_error) < 1e-3
    assert abs(found.off_error) > 0.05
    assert found.clock_s < 1e-4


def test_without_root_the_command_says_so_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["trace", "testbed"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip() == "search: network namespaces need root, but this is user 1000; run it as root"


@pytest.mark.parametrize("rate", ["fast", "0mbit", "1000gbit", "gbit"])
def test_a_rate_that_is_none_is_refused(rate, capsys):
    assert main(["trace", "testbed", "--rate", rate]) == 2
    assert f"must be 1mbit to 100gbit, such as 400mbit, but got {rate!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "1"], "--ranks must be at least 2, for one has nothing to synchronise, but is 1"),
        (["--keep", "."], "--keep must name a new or empty folder, but . is not; give another"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(options, words, may_network, capsys):
    assert main(["trace", "testbed", *options]) == 2
    assert capsys.readouterr().err.strip() == f"search: {words}"


def test_the_command_tells_what_it_found(report, monkeypatch, capsys):
    monkeypatch.setattr("search.commands.trace_testbed.experiment", lambda *_, **__: report[0])
    assert main(["trace", "testbed", "--model", "cnn"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("cnn on 2 ranks at 1000 Mbit/s, 1 rounds of 4 iterations\n")
    assert "buckets of 25 MiB" in text
    assert main(["trace", "testbed", "--model", "cnn", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["worst_error"] == pytest.approx(report[0].worst_error)
    assert told["cases"][1]["run_s"] == report[0].outcomes[1].run_s.tolist()
    assert np.isfinite(told["replay"]["aligned_error"])
