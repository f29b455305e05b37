"""A tuner's plan for a recorded job runs on a test bed against what others default to."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from capture.testbed.experiment import contest
from capture.testbed.network import no_network
from capture.testbed.setup import Setup
from capture.traces.records import Topology
from estimator.tuning import TunedPrecision, read_plan
from search.cli import main
from search.testbed_plans import contenders

pytestmark = pytest.mark.slow  # real jobs of two ranks
SMALL = Setup(model="cnn", steps=4, warm=2)
HOW = {"ranks": 2, "bits_per_s": 4e8, "rounds": 1}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    if (reason := no_network()) is not None:
        pytest.skip(f"needs root: {reason}")
    return contest({"as recorded": SMALL}, folder=tmp_path_factory.mktemp("recorded") / "runs", **HOW)


@pytest.fixture(scope="module")
def named(recorded):
    return {one.name: one for one in contenders(recorded.recorded, SMALL)}


@pytest.fixture(scope="module")
def run(named, tmp_path_factory):
    """The plans and DDP's default."""
    setups = {name: named[name].setup for name in ("tuned", "tuned, 16 bits", "DDP (25 MiB)")}
    return contest(setups, folder=tmp_path_factory.mktemp("contest") / "runs", **HOW)


def test_every_contender_sends_every_gradient_once(named):
    from capture.testbed.models import MODELS

    gradients = sorted(name for name, _ in MODELS["cnn"]().model.named_parameters())
    assert {"tuned", "tuned, 16 bits", "no fusion", "DDP (25 MiB)", "BytePS (server, 4 MB)"} <= named.keys()
    for one in named.values():
        buckets = one.setup.buckets
        if one.setup.plan:
            buckets = [bucket.tensors for bucket in read_plan("the plan", one.setup.plan).buckets]
        if buckets:
            assert sorted(name for bucket in buckets for name in bucket) == gradients
    assert [len(bucket) for bucket in named["no fusion"].setup.buckets] == [1] * len(gradients)
    assert len(named["DDP (25 MiB)"].setup.buckets) == 2  # the first is closed at 1 MiB
    assert named["BytePS (server, 4 MB)"].setup.topology is Topology.PARAMETER_SERVER


def test_no_default_is_predicted_to_beat_the_plan(named):
    best = min(one.predicted_s for one in named.values() if one.default and one.predicted_s is not None)
    assert named["tuned"].predicted_s <= best
    assert named["tuned, 16 bits"].predicted_s < named["tuned"].predicted_s
    assert read_plan("the plan", named["tuned, 16 bits"].setup.plan).precision is TunedPrecision.MIXED


def test_half_the_bits_take_half_the_time_of_a_slow_link(run):
    assert run.run_s["tuned, 16 bits"].item() < 0.75 * run.run_s["tuned"].item()


def test_the_plan_is_no_slower_than_ddp(run):
    if os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip("not a quiet machine")
    assert run.run_s["tuned"].item() < 1.02 * run.run_s["DDP (25 MiB)"].item()


def test_the_command_tells_who_won(recorded, run, named, monkeypatch, capsys):
    monkeypatch.setattr(
        "search.commands.trace_testbed.contest", lambda setups, **_: run if len(setups) > 1 else recorded
    )
    monkeypatch.setattr("search.commands.trace_testbed.contenders", lambda *_: [named[name] for name in run.run_s])
    assert main(["trace", "testbed", "--tune", "--rate", "400mbit", "--model", "cnn", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("cnn on 2 ranks at 400 Mbit/s, 1 rounds of 12 iterations\n")
    assert "against DDP (25 MiB)" in text
    assert main(["trace", "testbed", "--tune", "--model", "cnn", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best_default"] == "DDP (25 MiB)"
    gains = {case["name"]: case["against_best_default"] for case in told["cases"]}
    ours = np.median(run.run_s["tuned"]) / np.median(run.run_s["DDP (25 MiB)"]) - 1.0
    assert gains["tuned"] == pytest.approx(ours)
