"""A study that is cut short goes on where it stopped; what damages its journal costs one line, or is refused in one."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import optuna
import pytest

from results.store import RunFolder
from search import choice
from search.launch import LaunchOptions, launch, resume
from search.space import load_space, parse_space
from search.study_run import BATCH
from tests.search.small import SMALL
from tests.search.test_pool import descendants, wait_until_gone
from tests.search.test_resume import WAIT_S, start
from tests.search.watch import Watch

INLINE = LaunchOptions(pool="inline")
TRIALS = 8 * BATCH
SETTINGS = ("search.sampler=nsga2", f"search.trials={TRIALS}")
VALUES = b'{"op_code": 6, "worker_id": "x", "trial_id": 0, "state": 1, "values": ["x"]}'
FILES = ("front.parquet", "trials/part-000000.parquet")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The study that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return launch(load_space("llama3_70b", SETTINGS), replace(INLINE, out=out), Watch())


def interrupted(out, at=4):
    """A study of this process that stops itself after a round."""

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(load_space("llama3_70b", SETTINGS), replace(INLINE, out=out), Watch(at, stop))
    return out


def journal(run):
    return run / "journal" / "study.log"


def tables(path):
    return [(path / file).read_bytes() for file in FILES]


def launched(out, *more):
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return start("launch", "llama3_70b", *settings, "--out", out, *more, pause_at=4)


def test_a_killed_study_resumes_to_what_it_would_have_found(whole, tmp_path):
    run = tmp_path / "run"
    with launched(run, "--pool", "inline") as process:
        process.kill()
    before = journal(run).read_bytes()
    assert RunFolder.open(run).state == "interrupted"
    resumed = resume(run, INLINE, Watch())
    assert tables(run) == tables(whole.path)
    assert journal(run).read_bytes().startswith(before)
    assert resumed.manifest["study"]["evaluated"] == whole.manifest["study"]["evaluated"]
    assert resumed.manifest["counts"] == whole.manifest["counts"]


def test_ctrl_c_ends_a_study_with_130_and_it_resumes(whole, tmp_path):
    run = tmp_path / "run"
    with launched(run, "--pool", "inline") as process:
        below = descendants(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (130, "")
    assert f"search resume {run}" in err
    assert "Traceback" not in err
    assert wait_until_gone(below) == set()
    resume(run, INLINE, Watch())
    assert tables(run) == tables(whole.path)


@pytest.mark.slow
def test_a_study_killed_on_ray_resumes_inline_to_the_same(whole, tmp_path):
    run = tmp_path / "run"
    with launched(run, "--workers", "2") as process:
        process.kill()
    resume(run, INLINE, Watch())
    assert tables(run) == tables(whole.path)


@pytest.mark.parametrize("cut", [1, 30, "half"])
def test_a_journal_cut_in_its_last_line_keeps_the_tail_aside_and_goes_on(tmp_path, cut):
    run = interrupted(tmp_path / "run")
    content = journal(run).read_bytes()
    *lines, last = content.splitlines(keepends=True)
    missing = len(last) // 2 if cut == "half" else cut
    journal(run).write_bytes(content[:-missing])
    watch = Watch()
    resumed = resume(run, INLINE, watch)
    told = [phase for phase in watch.phases if "study.log" in phase]
    assert len(told) == 1
    assert "\n" not in told[0]
    assert (run / "journal" / "study.log.cut-1").read_bytes() == last[:-missing]
    assert journal(run).read_bytes().startswith(b"".join(lines))
    assert resumed.state == "done"
    assert resumed.manifest["study"]["evaluated"] >= TRIALS
    assert [event["text"] for event in resumed.manifest["events"] if event["kind"] == "journal"] == told


def test_a_study_whose_rounds_lost_a_line_prices_those_again(whole, tmp_path):
    run = interrupted(tmp_path / "run")
    rounds = run / "journal" / "blocks.jsonl"
    content = rounds.read_bytes()
    rounds.write_bytes(content[: content[:-1].rfind(b"\n") + 20])
    resumed = resume(run, INLINE, Watch())
    front, wanted = resumed.read_front(), whole.read_front()
    assert front["id"].tolist() == wanted["id"].tolist()


@pytest.mark.parametrize("key", ["asked", "seconds", "results"])
def test_a_round_without_its_content_is_refused_in_one_line_that_names_it(search, tmp_path, key):
    run = tmp_path / "run"
    interrupted(run)
    rounds = run / "journal" / "blocks.jsonl"
    lines = rounds.read_text().splitlines(keepends=True)
    record = json.loads(lines[1])
    del record[key]
    rounds.write_text("".join([lines[0], json.dumps(record) + "\n", *lines[2:]]))
    said = search("resume", run, "--pool", "inline")
    assert said.code == 2
    assert f"blocks.jsonl:2: a round must be whole, but this one is damaged (KeyError: '{key}')" in said.err


def test_a_round_that_stands_twice_in_a_journal_counts_once(whole, tmp_path):
    run = tmp_path / "run"
    interrupted(run)
    rounds = run / "journal" / "blocks.jsonl"
    rounds.write_bytes(rounds.read_bytes() + rounds.read_bytes().splitlines(keepends=True)[1])
    resumed = resume(run, INLINE, Watch())
    assert tables(run) == tables(whole.path)
    assert resumed.manifest["counts"] == whole.manifest["counts"]


@pytest.mark.parametrize(
    "damage", [b"{", b"not JSON", b"[]", b'{"op_code": 99}', b'{"op_code": 5, "worker_id": "x"}', VALUES]
)
def test_a_journal_damaged_elsewhere_is_refused_in_one_line_and_left_alone(search, tmp_path, damage):
    run = interrupted(tmp_path / "run")
    lines = journal(run).read_bytes().split(b"\n")
    journal(run).write_bytes(b"\n".join([*lines[:5], damage, *lines[6:]]))
    before = journal(run).read_bytes()
    said = search("resume", run, "--pool", "inline")
    assert said.code == 2
    assert "study.log" in said.err.splitlines()[-1]
    assert journal(run).read_bytes() == before


def test_a_study_of_another_space_is_refused_in_one_line(search, tmp_path):
    run, other = interrupted(tmp_path / "run"), tmp_path / "other"
    space = load_space("llama3_70b", [*SETTINGS, "workload.global_batch=1024"])
    with pytest.raises(KeyboardInterrupt):
        launch(space, replace(INLINE, out=other), Watch(2, lambda: (_ for _ in ()).throw(KeyboardInterrupt)))
    journal(run).write_bytes(journal(other).read_bytes())
    before = journal(run).read_bytes()
    said = search("resume", run, "--pool", "inline")
    assert said.code == 2
    assert "another space" in said.err.splitlines()[-1]
    assert journal(run).read_bytes() == before


def test_a_study_of_another_name_is_refused_in_one_line(search, tmp_path):
    run = interrupted(tmp_path / "run")
    journal(run).write_text(journal(run).read_text().replace('"study_name": "llama3_70b"', '"study_name": "x"'))
    said = search("resume", run, "--pool", "inline")
    assert said.code == 2
    assert "must hold the study 'llama3_70b'" in said.err.splitlines()[-1]


def test_resuming_a_study_that_is_done_does_nothing(whole):
    before = journal(whole.path).read_bytes()
    resume(whole.path, INLINE, Watch())
    assert journal(whole.path).read_bytes() == before


def test_a_dashboard_opens_the_journal_of_a_run(whole):
    backend = optuna.storages.journal.JournalFileBackend(str(journal(whole.path)))
    study = optuna.load_study(study_name="llama3_70b", storage=optuna.storages.JournalStorage(backend))
    assert study.user_attrs.keys() == {"space"}
    assert len(study.best_trials) >= whole.manifest["counts"]["front"]
    assert all(trial.state.is_finished() for trial in study.get_trials(deepcopy=False))


def test_a_warm_start_tries_a_former_front_first_and_says_what_it_took(whole, tmp_path):
    space = load_space("llama3_70b", [*SETTINGS, "strategy.tp=[4, 8]"])
    watch = Watch()
    run = launch(space, replace(INLINE, out=tmp_path / "warm", warm=whole.path), watch)
    front = whole.read_front()
    legal = int((front["tp"] >= 4).sum())
    warm = run.manifest["study"]["warm"]
    assert (warm["taken"], warm["not_taken"]) == (legal, len(front) - legal)
    assert 0 < legal < len(front)
    assert any(f"{legal} points of its front taken" in phase for phase in watch.phases)
    found = run.read_front()
    best = front.where(front["tp"] >= 4)
    assert found["step_time_s"].min() <= best["step_time_s"].min()


def test_a_warm_start_of_an_exact_search_is_refused(search, whole, tmp_path):
    said = search("launch", "llama3_8b_small", "--warm", whole.path, "--pool", "inline", "--out", tmp_path / "run")
    assert said.code == 2
    assert "--warm" in said.err.splitlines()[-1]


def test_flags_reach_the_study(search, tmp_path):
    run = tmp_path / "run"
    said = search("launch", "llama3_70b", "--sampler", "random", "--trials", "20", "--seconds", "1000", "--seed", "3",
                  "--pool", "inline", "--out", run)  # fmt: skip
    assert said.code == 0
    manifest = RunFolder.open(run).manifest
    assert (manifest["sampler"], manifest["seed"]) == ("random", 3)
    assert 20 <= manifest["study"]["evaluated"] < 20 + BATCH
    assert "sampled because asked for" in " ".join(said.out.split())


@pytest.mark.parametrize("sampler", ["gp", "qmc"])
def test_a_sampler_without_its_libraries_is_refused_before_a_run_begins(search, tmp_path, monkeypatch, sampler):
    find = choice.importlib.util.find_spec
    monkeypatch.setattr(choice.importlib.util, "find_spec", lambda name: None if name == "scipy" else find(name))
    said = search("launch", "llama3_70b", "--sampler", sampler, "--pool", "inline", "--out", tmp_path / "run")
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "needs scipy" in said.err
    assert not (tmp_path / "run").exists()


def test_an_open_axis_is_refused_by_the_exact_sweep_before_a_run_begins(search, tmp_path):
    asked = ("--set", "strategy.fusion=search", "--sampler", "exhaustive")
    said = search("launch", "llama3_70b", *asked, "--pool", "inline", "--out", tmp_path / "run")
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "--sampler nsga2" in said.err
    assert not (tmp_path / "run").exists()


def test_blocks_left_to_a_sampler_without_block_recompute_are_refused_before_a_run_begins(search, tmp_path):
    asked = ("--set", "strategy.recompute_per_chunk=search", "--out", tmp_path / "run")
    said = search("launch", "llama3_8b_small", "--pool", "inline", *asked)
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "accepted block among the values of strategy.recompute" in said.err
    assert not (tmp_path / "run").exists()


def test_show_prints_hypervolume_against_time(search, whole, tmp_path):
    said = search("show", whole.path, "--top", "1")
    assert said.code == 0
    assert "100.00%" in [line for line in said.out.splitlines() if "%" in line][-1]
    exact = tmp_path / "exact"
    search("launch", "llama3_70b", "--pool", "inline", "--out", exact)
    shown = json.loads(search("show", whole.path, "--exact", exact, "--json").out)["hypervolume"]
    shares = [point["share"] for point in shown]
    assert shares == sorted(shares)
    assert 0.95 < shares[-1] < 1.0
    assert [point["trials"] for point in shown][-1] == whole.manifest["study"]["evaluated"]
    assert search("show", exact, "--exact", whole.path).code == 2


def test_hypervolumes_of_two_questions_are_not_compared(search, whole, tmp_path):
    other = tmp_path / "other"
    search("launch", "llama3_8b_small", "--pool", "inline", "--replay", "0", "--out", other)
    said = search("show", whole.path, "--exact", other)
    assert (said.code, said.out, len(said.err.splitlines())) == (2, "", 1)
    assert "has another model; give a run of llama3_70b" in said.err


def test_what_a_study_tried_is_not_called_its_front(search, whole):
    assert search("show", whole.path, "--tables", "trials", "--top", "3").out.endswith("points that were tried\n")


def test_the_small_spaces_are_what_they_were(tmp_path):
    """A study asks for no more than a space has."""
    space = parse_space(SMALL["only speed"].resolved_yaml())
    run = launch(replace(space, options=replace(space.options, sampler=choice.DEFAULT)),
                 replace(INLINE, out=tmp_path / "run"), Watch())  # fmt: skip
    assert run.manifest["study"]["ended"] == "every configuration is priced"
