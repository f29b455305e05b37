"""`search launch` and `search resume`: what they tell while they work, how they end, and that nothing is lost."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace

import pytest

from results.store import RunFolder
from search import replays
from search.commands import progress
from search.commands.progress import progress_line
from tests.search.conftest import SMALL

INLINE = ("--pool", "inline", "--replay", "0")
REPLAYED = ("--pool", "inline", "--replay", "1")
# hfu follows neither time nor memory, so nothing is pruned and the sweep has blocks to go through.
MANY_BLOCKS = ("--set", "objectives=[hfu, peak_memory_bytes]", "--set", "search.block_size=8")
TOO_LARGE = ("--set", "model=llama3_70b", "--set", "system={cluster: dgx_h100, num_chips: 8}")


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A state of a sweep."""

    structures_done: int = 1
    structures: int = 10
    candidates_done: int = 2_000
    legal: int = 10_000
    seconds: float = 2.0
    front_size: int = 7
    best: dict[str, float] = field(default_factory=lambda: {"step_time_s": 15.65})
    what: str = "candidates"


def slowed(step, strategy):
    """A replay that takes twice as long for the fastest point of the front: pure ZeRO-2."""
    return replace(step, step_time_s=step.step_time_s * (2 if strategy.zero_stage == 2 and strategy.tp == 1 else 1))


def front_of(path):
    table = RunFolder.open(path).read_front()
    return list(table.rows())


def test_launch_tells_what_it_understood_and_ends_with_the_front_and_what_to_type_next(search, tmp_path):
    said = search("launch", SMALL, *INLINE, "--out", "run")
    assert said.code == 0
    for text in (
        "8.0 B parameters",
        "64 x h100-80g-sxm",
        "76.5 GiB",
        "128 sequences of 8192 tokens",
        "2.3 K points",
        "tp * pp <= 16",
        "fully_sharded",
    ):
        assert text in said.err
    front = RunFolder.open(tmp_path / "run").read_front()
    for text in (
        "reference fully_sharded",
        "best step_time_s",
        "2.3 K points",
        f"{len(front)} on the front",
        "took: ",
        "search show run",
        "search plan run --tokens",
        "search why run",
        "search replay run",
    ):
        assert text in said.out
    best = front["id"][front["step_time_s"].argmin()]
    assert f"search estimate run:{best}" in said.out
    assert search("estimate", f"run:{best}").code == 0


def test_launch_shows_the_front_from_end_to_end(search, tmp_path, monkeypatch):
    monkeypatch.setattr("search.commands.launch.TOP", 6)
    said = search("launch", SMALL, *INLINE, "--out", "run")
    rows = sorted(front_of(tmp_path / "run"), key=lambda row: row["step_time_s"])
    shown = [int(line.split()[0]) for line in said.out.splitlines() if line[:6].strip().isdigit()]
    places = sorted([row["id"] for row in rows].index(number) for number in shown)
    assert len(shown) == 6
    assert (places[0], places[-1]) == (0, len(rows) - 1)
    assert max(b - a for a, b in zip(places, places[1:], strict=False)) <= 8
    assert f"6 of {len(rows)} points of the front" in said.out


def test_launch_as_json_prints_one_object_and_nothing_else(search, tmp_path):
    data = json.loads(search("launch", SMALL, *INLINE, "--out", "run", "--json").out)
    assert data.keys() == {"run", "state", "objectives", "counts", "seconds", "rows", "reference", "replays", "tuned"}
    assert data["state"] == "done"
    assert data["counts"].keys() >= {"raw", "legal", "fits", "priced", "front", "by_rule"}
    assert data["counts"]["front"] == len(data["rows"])
    assert {row["id"] for row in data["rows"]} == {row["id"] for row in front_of(tmp_path / "run")}


def test_launch_replays_the_finalists_and_shows_their_times_beside_the_estimate(search, tmp_path):
    said = search("launch", SMALL, *REPLAYED, "--out", "run")
    assert said.code == 0
    run = RunFolder.open(tmp_path / "run")
    rows = list(run.read_replays().rows())
    whys = {why for row in rows for why in row["why"].split(", ")}
    assert whys == {
        "best step_time_s",
        "best peak_memory_bytes",
        "knee",
        "next best step_time_s",
        "reference fully_sharded",
    }
    assert all((run.path / row["trace"]).is_file() for row in rows)
    assert run.manifest["seconds"]["replay"] > 0
    assert run.manifest["seconds"]["total"] > run.manifest["seconds"]["replay"]
    for row in rows:
        assert f"{row['replayed_step_time_s']:.4g} s" in said.out
    assert f"replaying 1 of {len(rows)}: " in said.err
    assert f"{len(rows)} finalists replayed" in said.out
    assert "search show run --tables replays" in said.out
    again = search("resume", "run")
    assert (again.code, again.out) == (0, said.out)


def test_launch_without_replay_leaves_none_behind(search, tmp_path):
    assert search("launch", SMALL, *INLINE, "--out", "run").code == 0
    run = RunFolder.open(tmp_path / "run")
    assert "replay" not in run.manifest["seconds"]
    assert not (run.path / "replays").exists()
    assert not (run.path / "replays.parquet").exists()
    assert run.is_whole()


def test_a_replay_that_is_interrupted_leaves_a_finished_run_and_search_replay_completes_it(
    search, tmp_path, monkeypatch
):
    whole = replays.replay_step
    done = []

    def interrupt(*args, **more):
        if done:
            raise KeyboardInterrupt
        done.append(args)
        return whole(*args, **more)

    monkeypatch.setattr(replays, "replay_step", interrupt)
    said = search("launch", SMALL, *REPLAYED, "--out", "run")
    assert (said.code, said.out) == (130, "")
    assert said.err.endswith("interrupted; the front is written; replay its finalists with: search replay run\n")
    run = RunFolder.open(tmp_path / "run")
    assert (run.state, len(run.read_replays()), len(run.read_front())) == ("done", 1, 25)
    assert run.manifest["seconds"]["replay"] > 0
    monkeypatch.setattr(replays, "replay_step", whole)
    assert search("replay", "run", "--top", "1").code == 0
    assert len(run.read_replays()) == 5


def test_a_finalist_that_cannot_be_replayed_is_a_note_and_not_the_end_of_the_run(search, tmp_path, monkeypatch):
    def refuse(*args, **more):
        raise ValueError("a step of 13,000,000 tasks is too large to replay")

    monkeypatch.setattr(replays, "replay_step", refuse)
    said = search("launch", SMALL, *REPLAYED, "--out", "run")
    assert said.code == 0
    rows = list(RunFolder.open(tmp_path / "run").read_replays().rows())
    assert {row["note"] for row in rows} == {"not replayed: a step of 13,000,000 tasks is too large to replay"}
    assert {row["rank_replayed"] for row in rows} == {0}
    assert "too large to replay" in said.out


def test_launch_flags_an_estimate_that_the_replay_contradicts_and_ranks_again(search, monkeypatch):
    whole = replays.replay_step
    monkeypatch.setattr(
        replays, "replay_step", lambda model, s, *rest, **more: slowed(whole(model, s, *rest, **more), s)
    )
    said = search("launch", SMALL, *REPLAYED, "--out", "run")
    told = " ".join(said.out.split())
    assert "! the estimate is off by more than 5%, trust the replay: 11 (" in told
    assert "ranking changed: by replay " in told
    first = told.partition("by replay ")[2].partition(",")[0]
    assert first != "11"
    assert told.partition("by estimate ")[2].startswith("11, ")


def test_a_configuration_has_a_front_of_one(search, tmp_path):
    text = (
        "model: llama3_8b\nsystem: dgx_h100\nworkload: {seq: 8192, global_batch: 512}\nstrategy: {tp: 8, zero_stage: 3}"
    )
    (tmp_path / "config.yaml").write_text(text)
    said = search("launch", "config.yaml", "--out", "run", "--json")
    (row,) = json.loads(said.out)["rows"]
    assert (said.code, row["strategy"]["tp"]) == (0, 8)
    assert row["step_time_s"] == json.loads(search("estimate", "config.yaml", "--json").out)["step_time_s"]


def test_an_illegal_reference_is_shown_with_its_rule_and_null_numbers(search):
    said = search("launch", SMALL, *INLINE, "--set", "reference.fully_sharded.tp=3", "--out", "run", "--json")
    (row,) = json.loads(said.out)["reference"]
    assert (said.code, row["feasible"], row["step_time_s"]) == (0, False, None)
    assert "must be divisible by tp (3)" in row["reason"]
    assert "must be divisible by tp (3)" in search("why", "run").out
    refused = search("estimate", "run:fully_sharded")
    assert (refused.code, refused.out) == (2, "")


@pytest.mark.parametrize("sampler", ["auto", "exhaustive"])
def test_a_sampler_is_accepted(search, sampler):
    assert search("launch", SMALL, *INLINE, "--sampler", sampler, "--out", "run").code == 0


def test_a_seed_is_stored(search, tmp_path):
    search("launch", SMALL, *INLINE, "--seed", "7", "--out", "run")
    assert RunFolder.open(tmp_path / "run").manifest["seed"] == 7


def test_where_nothing_fits_it_is_3_with_reasons_the_closest_and_a_remedy(search, tmp_path):
    words = ("launch", SMALL, *INLINE, *TOO_LARGE, "--set", "strategy.zero_stage=0")
    said = search(*words, "--out", "run")
    assert said.code == 3
    for text in ("nothing is feasible", "memory", "closest:", "what would make it fit", "num_chips"):
        assert text in said.out
    again = search("resume", "run")
    assert (again.code, again.out) == (3, said.out)
    data = json.loads(search(*words, "--json").out)
    assert data.keys() == {"run", "rows", "rejections", "closest", "remedies"}
    assert data["closest"]
    assert data["closest"][0]["short_by_bytes"] > 0
    assert "closest:" in search("why", "run").out


def test_an_interrupted_run_says_how_to_resume_and_ends_with_the_same_front(search, tmp_path, monkeypatch):
    words = ("launch", SMALL, *INLINE, *MANY_BLOCKS)
    assert search(*words, "--out", "whole").code == 0
    with monkeypatch.context() as patch:

        def interrupt(self, state):
            raise KeyboardInterrupt

        patch.setattr(progress.Lines, "update", interrupt)
        said = search(*words, "--out", "cut")
    assert (said.code, said.out) == (130, "")
    assert said.err.endswith("interrupted; go on with: search resume cut\n")
    assert RunFolder.open(tmp_path / "cut").state == "interrupted"
    assert search("resume", "cut", *INLINE).code == 0
    assert front_of(tmp_path / "cut") == front_of(tmp_path / "whole")


def test_an_interruption_before_there_is_a_run_is_130(search, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("search.commands.launch.launch", interrupt)
    said = search("launch", SMALL, *INLINE)
    assert said.code == 130
    assert said.err.endswith("search: interrupted\n")


def test_a_pool_that_cannot_start_is_bad_input(search, monkeypatch):
    from search.pool import PoolError

    def refuse(*args):
        raise PoolError("no Ray cluster answers at 'nowhere:1'")

    monkeypatch.setattr("search.commands.launch.launch", refuse)
    said = search("launch", SMALL)
    assert said.code == 2
    assert said.err.splitlines()[-1] == "search: no Ray cluster answers at 'nowhere:1'"


def test_a_run_that_is_done_is_shown_again_by_resume(search):
    first = search("launch", SMALL, *INLINE, "--out", "run")
    again = search("resume", "run")
    assert (again.code, again.out) == (0, first.out)


def test_progress_tells_share_rate_time_left_front_and_best():
    since = Reached(candidates_done=1_000, seconds=1.0)
    told = progress_line(Reached(), since)
    assert told == "20.0% of 10.0 K candidates, 1.0 K/s, 8.0 s left, front 7, best step_time_s 15.65 s"


def test_progress_tells_no_time_left_before_a_tenth_of_the_structures_is_done():
    since = Reached(candidates_done=1_000, seconds=1.0)
    assert " left" not in progress_line(Reached(structures_done=9, structures=100), since)
    assert "1.0 K/s, 8.0 s left" in progress_line(Reached(structures_done=10, structures=100), since)


def test_progress_beyond_what_was_asked_is_all_of_it():
    since = Reached(candidates_done=1_000, seconds=1.0)
    told = progress_line(Reached(legal=1_500), since)
    assert told == "100.0% of 1.5 K candidates, 1.0 K/s, 0.0 s left, front 7, best step_time_s 15.65 s"


def test_progress_knows_no_rate_before_anything_was_covered():
    assert progress_line(Reached(), Reached()).startswith("20.0% of 10.0 K candidates, front 7")
    assert progress_line(Reached(legal=0, candidates_done=0)).startswith("100.0% of 0 candidates, front 7")


def test_plain_progress_speaks_at_most_every_two_seconds(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines = progress.Lines()
    for now in (100.0, 101.9, 102.0, 103.0):  # noqa: B007 - the clock reads it
        lines.update(Reached())
    assert capsys.readouterr().err.count("\n") == 2


def test_a_terminal_gets_a_live_bar(search, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    said = search("launch", SMALL, *INLINE, *MANY_BLOCKS, "--out", "run")
    assert said.code == 0
    assert "search show run" in said.out
    assert "candidates" in said.err


@pytest.mark.parametrize("command", [["launch", "--sampler", "exhaustive"], ["estimate"], ["why"]], ids=str)
def test_an_axis_left_to_a_sampler_is_refused_in_one_line_and_nothing_is_written(search, tmp_path, command):
    said = search(*command, "llama3_70b", "--set", "strategy.tp_chunks=search", "--set", "reference={}")
    remedy = "'search' leaves it to a sampler: use --sampler nsga2, or give values"
    assert (said.code, said.out) == (2, "")
    assert said.err == f"search: llama3_70b: strategy.tp_chunks: {remedy}\n"
    assert list(tmp_path.iterdir()) == []
