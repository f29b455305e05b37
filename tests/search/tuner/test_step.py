"""A finalist refined on its replayed step: never slower, never overfull, and back into `search replay` and `launch`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from estimator.detail.step import replay_step
from estimator.strategy import Fusion
from search.cli import main
from search.space import load_space
from search.tuner import step
from search.tuner.step import changes, refine


@pytest.fixture(scope="module")
def space():
    return load_space("llama3_8b_small")


@pytest.fixture(scope="module")
def point(space):
    """Its reference, with buckets far too small and nothing fused but attention."""
    strategy = space.references["fully_sharded"]
    return replace(
        strategy, overlap=replace(strategy.overlap, dp=1), fusion=frozenset({Fusion.FLASH_ATTENTION}),
        bucket_bytes=20_000_000,
    )  # fmt: skip


def test_a_refined_step_is_faster_by_its_replay_and_only_by_what_it_says(space, point):
    (system,) = space.systems
    found = refine(space.model, point, system, space.workload)
    again = replay_step(space.model, found.after, system, space.workload)
    assert found.after_s == again.step_time_s
    assert found.before_s == replay_step(space.model, point, system, space.workload).step_time_s
    assert found.gain > 0.005
    assert not again.overfull
    told = changes(found)
    assert "strategy.fusion" in told
    kept = {f for f in point.__slots__ if f not in ("fusion", "bucket_bytes", "expert_bucket_bytes", "tp_chunks")}
    assert all(getattr(found.after, name) == getattr(point, name) for name in kept)
    twice = refine(space.model, found.after, system, space.workload)
    assert twice.gain == pytest.approx(0.0, abs=2e-3)  # what is refined has little left


def test_what_is_slower_by_its_replay_is_never_taken(space, point, monkeypatch):
    (system,) = space.systems
    monkeypatch.setattr(step._Refiner, "_replayed", lambda self, strategy: 1.0 if strategy is point else 2.0)
    found = refine(space.model, point, system, space.workload)
    assert found.after == point
    assert found.gain == 0.0


def test_what_cannot_be_replayed_is_refused(space, point):
    (system,) = space.systems
    with pytest.raises(ValueError, match="must unroll to at most 10 tasks"):
        refine(space.model, point, system, space.workload, max_tasks=10)


def test_replay_tells_what_refining_gains_and_how_to_price_it(capsys):
    words = ["replay", "llama3_8b_small", "--reference", "fully_sharded", "--no-trace", "--tune"]
    assert main([*words, "--json"]) == 0
    tuned = json.loads(capsys.readouterr().out)["tuned"]
    assert tuned["after_s"] < tuned["before_s"]
    sets = [word for key, value in tuned["changes"].items() for word in ("--set", f"{key}={value}")]
    assert main(["estimate", "llama3_8b_small", "--reference", "fully_sharded", *sets, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] < tuned["before_s"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "tuned fully_sharded: " in out
    assert "search estimate llama3_8b_small --reference fully_sharded --set " in out


def test_a_launch_refines_its_finalists_and_keeps_what_they_gained(tmp_path, capsys):
    run = tmp_path / "run"
    words = ["launch", "llama3_8b_small", "--pool", "inline", "--replay", "1", "--tune", "--out", str(run)]
    assert main([*words, "--json"]) == 0
    tuned = json.loads(capsys.readouterr().out)["tuned"]
    assert 1 <= len(tuned) <= 3
    assert all(row["after_s"] <= row["before_s"] for row in tuned)
    assert json.loads((run / "manifest.json").read_text())["tuned"] == tuned


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launch", "llama3_8b_small", "--tune", "--replay", "0"], "--replay 0 replays none"),
        (["launch", "llama3_8b_small", "llama3_70b", "--tune"], "--tune refines the finalists of one space, but 2"),
        (["launch", "llama3_70b_decode", "--tune"], "answers requests; leave it out"),
    ],
)
def test_tuning_where_it_means_nothing_is_refused(words, says, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
