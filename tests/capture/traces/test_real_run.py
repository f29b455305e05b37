"""A real job of two ranks over loopback: recorded while it trains, aligned and replayed to what it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from capture.align import align, moved
from capture.traces.dfg import build
from capture.traces.recognise import read_all
from capture.traces.replay import replay_trace
from capture.traces.what_if import Change, predict

WORLD, STEPS, WARM = 2, 12, 4
QUIET = 1.0  # processes that run or wait, per core: above, what is measured is the machine's other work


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The traces of both ranks of tests/capture/traces/trained.py."""
    folder = tmp_path_factory.mktemp("job")
    store = folder / "store"
    script = Path(__file__).with_name("trained.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(WORLD), str(store), str(folder), str(STEPS), str(WARM)],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    for process in ranks:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error[-2000:]
    return read_all([folder / f"rank{rank}.jsonl" for rank in range(WORLD)])


def test_a_job_that_just_ran_replays_to_the_iterations_that_it_took(job):
    dfg = build(moved(job, align(job, same_machine=False)))
    replayed = replay_trace(dfg)
    assert len(replayed.iterations) == STEPS - WARM
    assert abs(replayed.worst_error) < 0.02
    assert replay_trace(dfg.without_lags()).mean_error <= 0.0


def test_its_two_clocks_are_one(job):
    found = align(job, same_machine=False)
    assert found.low_s[1] <= found.offset_s[1] <= found.high_s[1]
    assert found.low_s[1] <= 0.0 <= found.high_s[1]  # the truth: one host's clock
    if os.getloadavg()[0] > QUIET * (os.cpu_count() or 1):
        pytest.skip("not a quiet machine")
    assert abs(found.offset_s[1]) < 1e-3


def test_the_same_job_synthesised_takes_about_as_long(job):
    dfg = build(job)
    found, took = predict(dfg, Change()).seconds, dfg.iteration_s()
    assert json.dumps(found.tolist())
    if os.getloadavg()[0] > QUIET * (os.cpu_count() or 1):
        pytest.skip("not a quiet machine")
    assert np.median(found) == pytest.approx(
        np.median(took), rel=0.25
    )  # twelve iterations of 20 ms, each with its own messages
