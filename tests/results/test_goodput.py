"""Claims about jobs that fail: limits by hand, a simulation as the oracle, and what Llama 3 tells of its run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.goodput import Reliability, goodput, interval_s, spares_needed, up_share, working_share

LLAMA3 = {"failures_per_s": 419 / (54 * 86400), "num_gpus": 16384, "num_nodes": 2048, "parameters": 405e9}


def test_the_interval_is_the_root_of_twice_the_checkpoint_times_the_mean_time_between_failures():
    assert interval_s(60.0, 3000.0) == 600.0
    assert interval_s(0.0, 3000.0) == 0.0


def test_what_never_fails_and_writes_nothing_works_all_the_time():
    assert working_share(100.0, 0.0, 600.0, np.inf) == 1.0
    assert working_share(90.0, 10.0, 600.0, np.inf) == 0.9


@given(st.floats(1.0, 100.0), st.floats(1e5, 1e8))
def test_rare_failures_cost_the_checkpoint_half_an_interval_and_a_restart(checkpoint, mtbf):
    """First order of Daly's formula: 1 - C/W - (W/2 + R)/M. rtol: the second order of the largest term."""
    work, restart = float(interval_s(checkpoint, mtbf)), 300.0
    loss = checkpoint / work + (work / 2.0 + restart) / mtbf
    assert 1.0 - working_share(work, checkpoint, restart, mtbf) == pytest.approx(loss, rel=3.0 * loss + 1e-9)


def test_a_simulated_job_agrees_with_the_formula():
    """Failures at exponential times, also in checkpoints and restarts; 40,000 intervals, error about 1 / 200."""
    rng = np.random.default_rng(7)
    work, checkpoint, restart, mtbf, num = 500.0, 40.0, 120.0, 2000.0, 40_000
    clock, next_failure, done = 0.0, rng.exponential(mtbf), 0
    while done < num:
        if clock + work + checkpoint <= next_failure:
            clock, done = clock + work + checkpoint, done + 1
            continue
        clock = next_failure
        next_failure = clock + rng.exponential(mtbf)
        while clock + restart > next_failure:  # it fails again while it restarts
            clock, next_failure = next_failure, next_failure + rng.exponential(mtbf)
        clock += restart
    assert num * work / clock == pytest.approx(float(working_share(work, checkpoint, restart, mtbf)), rel=0.015)


@given(st.floats(5.0, 200.0), st.floats(1e4, 1e6))
def test_no_other_interval_is_much_better_than_youngs(checkpoint, mtbf):
    young = float(interval_s(checkpoint, mtbf))
    tried = young * np.geomspace(0.05, 20.0, 400)
    best = float(working_share(tried, checkpoint, 600.0, mtbf).max())
    assert working_share(young, checkpoint, 600.0, mtbf) >= best * (1.0 - 0.5 * checkpoint / mtbf - 1e-9) - 0.002


def test_spares_are_the_poisson_quantile():
    for mean in (0.0, 0.1, 1.0, 6.0, 40.0):
        for target in (0.5, 0.99, 0.999):
            spares = spares_needed(mean / 3600.0, 3600.0, target)
            terms = [math.exp(-mean + k * math.log(mean or 1.0) - math.lgamma(k + 1)) for k in range(spares + 1)]
            told = terms if mean else [1.0]
            assert sum(told) >= target - 1e-12
            assert spares == 0 or sum(told[:-1]) < target
            assert float(up_share(mean / 3600.0, 3600.0, spares)) == pytest.approx(sum(told), rel=1e-12)


def test_llama_3_trains_more_than_nine_tenths_of_the_time():
    """arXiv:2407.21783, section 3.3.4: over 90 % effective training time, one interruption in about three hours."""
    found = goodput(Reliability(), step_time_s=[9.73], **LLAMA3)
    assert 0.9 < found.share[0] < 0.97
    assert found.mtbf_s[0] / 3600 == pytest.approx(3.1, abs=0.05)
    assert found.interval_s[0] % 9.73 == pytest.approx(0.0, abs=1e-9)


def test_a_worse_machine_is_never_better():
    base = goodput(Reliability(), step_time_s=[9.73], **LLAMA3).share[0]
    for worse in ("restart_s=1200", "node_write_bytes_per_s=2e8", "chip_failures_per_hour=1e-4",
                  "node_failures_per_hour=1e-4", "spare_nodes=0", "checkpoint_s=300"):  # fmt: skip
        assert goodput(Reliability.parse([worse]), step_time_s=[9.73], **LLAMA3).share[0] < base, worse


def test_without_failures_all_time_counts():
    found = goodput(Reliability(), failures_per_s=[0.0], num_gpus=8, num_nodes=1, step_time_s=[1.0], parameters=1e9)
    assert (found.share[0], found.spare_nodes[0], found.interval_s[0]) == (1.0, 0.0, math.inf)


def test_a_row_does_not_depend_on_the_others():
    rates, steps = np.array([1e-5, 1e-4, 0.0, 1e-3]), np.array([1.0, 20.0, 5.0, 300.0])
    whole = goodput(Reliability(), failures_per_s=rates, num_gpus=64, num_nodes=8, step_time_s=steps, parameters=1e9)
    for i in range(4):
        alone = goodput(
            Reliability(), failures_per_s=rates[[i]], num_gpus=64, num_nodes=8, step_time_s=steps[[i]], parameters=1e9
        )
        assert alone.share[0] == whole.share[i]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["restart_s"], "takes KEY=VALUE or off"), (["restarts=3"], "keys: chip_failures_per_hour"),
        (["restart_s=soon"], "must be a number"), (["spare_nodes=2.5"], "must be a whole number"),
        (["repair_s=-1"], "at least 0"), (["repair_s=nan"], "at least 0"), (["broken_share=1.5"], "at most 1"),
        (["up_target=1"], "below 1"), (["node_write_bytes_per_s=0"], "above 0"),
    ],
)  # fmt: skip
def test_options_that_mean_nothing_are_refused_by_name(words, told):
    with pytest.raises(ValueError, match=told):
        Reliability.parse(words)


def test_rates_beyond_any_cluster_are_refused():
    with pytest.raises(ValueError, match="at most 700 nodes may be in repair at once"):
        goodput(Reliability.parse(["chip_failures_per_hour=1"]), step_time_s=[9.73], **LLAMA3)
