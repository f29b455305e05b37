"""A run from its space to its folder: the same front however it is carried out, and true whatever comes in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

import search.launch
from results.store import RunFolder
from search.launch import LaunchOptions, NothingFeasible, Update, launch
from search.objective import Constraint
from search.space import Keep, SearchOptions, Space, load_space
from search.sweep import Swept, fingerprint, is_compiled, prepare, sweep_plan
from tests.search.naive import candidates, front, space_of
from tests.search.small import MIDDLE, SMALL, swept
from tests.search.test_pool import command, descendants
from tests.search.watch import Watch

WHOLE = load_space("llama3_70b")  # 5,600 structures that a warm-up cannot rule out: a second of one core
UNBOUNDED = replace(
    SMALL["not bounded"],
    options=SearchOptions(block_size=2),
    axes={**SMALL["not bounded"].axes, "micro_batch": (1, 2, 4)},
)


def blocks_of(space: Space, size: int, **more: int) -> Space:
    return replace(space, options=replace(space.options, block_size=size, **more))


def carried_out(space: Space, out: Path, watch: Watch | None = None, **options: object) -> RunFolder:
    chosen: dict[str, Any] = {"pool": "inline", **options}
    return launch(space, LaunchOptions(out=out, **chosen), watch or Watch())


def front_bytes(run: RunFolder) -> bytes:
    return (run.path / "front.parquet").read_bytes()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Fronts of runs that nothing disturbs, as files."""
    folder = tmp_path_factory.mktemp("plain")
    spaces = {"bounded": WHOLE, "unbounded": UNBOUNDED}
    return {name: front_bytes(carried_out(space, folder / name)) for name, space in spaces.items()}


# The same front


@pytest.mark.parametrize("name", ["bounded", "unbounded"])
def test_the_front_is_the_same_file_for_any_block_size(plain, name, tmp_path):
    space = {"bounded": WHOLE, "unbounded": UNBOUNDED}[name]
    for size in (1000, 10**6) if name == "bounded" else (1, 5, 10**6):
        run = carried_out(blocks_of(space, size), tmp_path / str(size))
        assert front_bytes(run) == plain[name]


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", ["bounded", "unbounded"])
def test_the_front_is_the_same_file_for_any_number_of_workers(plain, cluster, name, num_workers, tmp_path):
    space = {"bounded": blocks_of(WHOLE, 300), "unbounded": UNBOUNDED}[name]
    watch = Watch()
    run = carried_out(space, tmp_path / "run", watch, pool="ray", workers=num_workers, address=cluster.address)
    assert front_bytes(run) == plain[name]
    assert run.manifest["workers"] == num_workers
    assert run.manifest["events"] == []
    assert len(watch.updates) > 10


def workers() -> list[int]:
    found = []
    for pid in sorted(descendants(os.getpid())):
        try:
            found += [pid] if command(pid).startswith("ray::SearchWorker") else []
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize("name", ["bounded", "unbounded"])
def test_a_killed_worker_changes_nothing_but_the_events(plain, cluster, name, tmp_path):
    space = {"bounded": blocks_of(WHOLE, 100), "unbounded": UNBOUNDED}[name]
    watch = Watch(4, lambda: os.kill(workers()[0], signal.SIGKILL))
    run = carried_out(space, tmp_path / "run", watch, pool="ray", workers=2, address=cluster.address)
    assert front_bytes(run) == plain[name]
    events = RunFolder.open(run.path).manifest["events"]
    assert [event["kind"] for event in events].count("crash") == 1
    assert all(set(event) == {"time_s", "kind", "text"} for event in events)


@pytest.mark.slow
def test_a_node_that_dies_changes_nothing_but_the_events(plain, cluster, tmp_path):
    node = cluster.add_node(num_cpus=1, object_store_memory=200 * 1024**2)
    cluster.wait_for_nodes()

    class AllAtWork(Watch):
        """Removes the node once the third worker has been there for some blocks."""

        num_seen = 0

        def update(self, state: Update) -> None:
            if self.num_seen < 20 and len(workers()) == 3:
                self.num_seen += 1
                if self.num_seen < 20:
                    return
                cluster.remove_node(node, allow_graceful=False)

    watch = AllAtWork()
    run = carried_out(blocks_of(WHOLE, 15), tmp_path / "run", watch, pool="ray", workers=3, address=cluster.address)
    assert watch.num_seen == 20
    assert front_bytes(run) == plain["bounded"]
    assert "crash" in [event["kind"] for event in run.manifest["events"]]


def test_crashes_are_remembered_even_if_the_run_is_interrupted(cluster, tmp_path):
    def stop() -> None:
        raise KeyboardInterrupt

    class Killed(Watch):
        def update(self, state: Update) -> None:
            super().update(state)
            if len(self.updates) == 4:
                os.kill(workers()[0], signal.SIGKILL)

    watch = Killed(40, stop)
    with pytest.raises(KeyboardInterrupt):
        carried_out(blocks_of(WHOLE, 100), tmp_path, watch, pool="ray", workers=2, address=cluster.address)
    manifest = RunFolder.open(tmp_path).manifest
    assert manifest["state"] == "interrupted"
    assert "crash" in [event["kind"] for event in manifest["events"]]


# What a run tells


def test_updates_begin_with_the_warm_up_and_end_with_everything(tmp_path):
    watch = Watch()
    run = carried_out(blocks_of(WHOLE, 500), tmp_path, watch)
    first, last = watch.updates[0], watch.updates[-1]
    assert first.seconds == 0
    assert 0 < first.candidates_done < first.legal
    assert last.candidates_done == last.legal == run.manifest["counts"]["legal"]
    assert last.structures_done == last.structures
    assert last.front_size == len(run.read_front())
    assert all(a.candidates_done <= b.candidates_done for a, b in zip(watch.updates, watch.updates[1:], strict=False))


@pytest.mark.parametrize(
    "objectives",
    [
        "{mfu_bf16: max, cost_usd_per_mtoken: min, device_memory_bytes: min, num_gpus: min}",
        "{tokens_per_s: max}",
        "{hfu: max, bubble_s: min, peak_memory_bytes: min}",
    ],
)
def test_the_best_of_every_objective_is_told(objectives, tmp_path):
    space = blocks_of(space_of(
        "tp: [1, 2, 4, 8], pp: [1, 2, 4], zero_stage: [0, 1, 3], recompute: [none, selective, full], "
        "micro_batch: [1, 2, 4], sequence_parallel: [true, false], cp: [1, 2, 4]",
        chips="[16, 32, 64]", batch=256, more=f"objectives: {objectives}\n",
    ), 2)  # fmt: skip
    watch = Watch()
    run = carried_out(space, tmp_path, watch)
    table = run.read_front()
    best = {o.column: (min if o.minimise else max)(table[o.column].tolist()) for o in space.objectives}
    assert watch.updates[-1].best == best
    assert all(set(update.best) <= set(best) for update in watch.updates)


def test_the_first_run_says_that_it_compiles(tmp_path, monkeypatch):
    assert not any("compil" in text for text in phases_of(tmp_path / "again"))
    monkeypatch.setattr(search.launch, "is_compiled", lambda: False)
    assert phases_of(tmp_path / "first")[0].endswith("compiling the sweep (first run only, two to three minutes)")


def phases_of(out: Path) -> list[str]:
    watch = Watch()
    carried_out(space_of("tp: [1, 2], zero_stage: 3"), out, watch)
    return watch.phases


def test_machine_code_on_disk_counts_as_compiled_and_an_empty_cache_does_not(tmp_path, root):
    swept(space_of("tp: [1, 2]"))  # leaves the code on disk
    assert is_compiled()
    ask = "import search.sweep, search.nest; print(search.sweep.is_compiled(), len(search.nest.sweep.signatures))"
    for cache, answer in (({}, "True 0"), ({"NUMBA_CACHE_DIR": str(tmp_path)}, "False 0")):
        environment = {**os.environ, "PYTHONPATH": str(root), **cache}
        told = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
        assert told.stdout.strip() == answer


# Options of a space


def test_a_space_that_keeps_all_stores_every_candidate_that_fits(tmp_path):
    space = replace(SMALL["tensor and context"], options=SearchOptions(keep=Keep.ALL))
    run = carried_out(space, tmp_path)
    fitting = [c for c in candidates(space) if c.fits]
    trials = f"'{run.path}/trials/*.parquet'"
    (told,) = duckdb.sql(f"select count(*), min(step_time_s), count(distinct id) from {trials}").fetchall()
    assert told == (len(fitting), min(c.values["step_time_s"] for c in fitting), len(fitting))
    (best,) = duckdb.sql(
        f"select count(*) from '{run.path}/front.parquet' f join {trials} t using (id) "
        "where f.step_time_s = t.step_time_s and f.recompute = t.recompute"
    ).fetchall()
    assert best == (len(run.read_front()),)


def test_too_much_to_keep_is_said_before_the_sweep(tmp_path):
    space = replace(WHOLE, options=SearchOptions(keep=Keep.ALL))
    watch = Watch()
    with pytest.raises(ValueError, match="all holds up to 1000000 legal candidates, but the space has 21749304"):
        carried_out(space, tmp_path, watch)
    assert watch.updates == []
    assert RunFolder.open(tmp_path).state == "failed"


def test_a_run_stops_after_as_many_candidates_as_it_may_price(tmp_path):
    full = carried_out(UNBOUNDED, tmp_path / "full").manifest["counts"]
    some = carried_out(blocks_of(UNBOUNDED, 1, max_candidates=10), tmp_path / "some")
    counts = some.manifest["counts"]
    assert 10 <= counts["priced"] < full["priced"]
    assert counts["legal"] == full["legal"]
    assert some.state == "done"
    assert "until 10 are priced" in some.manifest["sampler_reason"]
    assert len(some.read_front())


def test_a_space_of_one_point_has_a_front_of_one_and_starts_no_ray(tmp_path):
    run = carried_out(space_of("tp: 2, zero_stage: 1"), tmp_path, pool="ray")
    table = run.read_front()
    assert table["id"].tolist() == [0]
    assert table["tp"].tolist() == [2]
    counts = run.manifest["counts"]
    assert (counts["raw"], counts["legal"], counts["fits"], counts["front"]) == (1, 1, 1, 1)


def test_reference_points_are_shown_with_what_is_wrong_with_them(tmp_path):
    space = space_of(
        "tp: [1, 2], zero_stage: [1, 3]",
        system="[{cluster: dgx_h100, num_chips: 16}, {cluster: dgx_h100, num_chips: 12}]",
        batch=48,
        more="reference: {good: {zero_stage: 3}, large: {micro_batch: 3}, odd: {tp: 16, zero_stage: 1}}\n",
    )
    rows = list(carried_out(space, tmp_path).read_reference().rows())
    told = {(row["name"], row["num_gpus"] if row["feasible"] else row["reason"].split(":")[0]) for row in rows}
    assert [row["id"] for row in rows] == [-1] * 6
    assert ("good", 16.0) in told
    assert ("large", "memory") in told
    odd = [row["reason"] for row in rows if row["name"] == "odd"]
    assert any("num_chips (12) must be divisible by tp (16)" in reason for reason in odd)
    assert all(np.isfinite(row["step_time_s"]) for row in rows if row["reason"] in ("", "memory"))


def test_the_front_over_several_systems_is_one_front(tmp_path):
    space = SMALL["cost over chip counts"]
    table = carried_out(space, tmp_path).read_front()
    wanted = front(space, candidates(space))
    assert table["id"].tolist() == sorted(wanted)
    told = [tuple(row[o.column] for o in space.objectives) for row in table.rows()]
    assert told == [wanted[i] for i in sorted(wanted)]
    assert set(table["num_gpus"].tolist()) > {8.0}


def test_counts_of_a_run_add_up(tmp_path):
    run = carried_out(MIDDLE["experts"], tmp_path)
    counts = run.manifest["counts"]
    assert counts["raw"] == counts["legal"] + sum(n for rule, n in counts["by_rule"].items() if rule != "memory")
    assert counts["front"] == len(run.read_front()) <= counts["fits"]
    assert counts["pruned"]
    told = {row["rule"]: row["count"] for row in run.read_rejections().rows()}
    assert told == counts["by_rule"]


# Nothing feasible

TINY = "--set", "model=llama3_70b", "--set", "system={cluster: dgx_h100, num_chips: 8}"
NOTHING = {
    "memory": ("llama3_8b_small", TINY),
    "rules": ("llama3_8b_small", ("--set", "strategy.tp=[3, 5]", "--set", "constraints=[]")),
    "rules beside constraints": ("llama3_8b_small", ("--set", "workload.global_batch=1")),
    "no experts": ("llama3_8b_small", ("--set", "strategy.ep=[2, 4]")),
    "results": ("llama3_8b_small", ("--set", "constraints=['step_time_s < 0.001']")),
    "options": ("llama3_8b_small", ("--set", "constraints=['zero_stage == 3 and overlap_dp == 0 and tp < 0']")),
    "structures": ("llama3_8b_small", ("--set", "constraints=['tp > 64']")),
    "enumerated": ("llama3_8b_small", ("--set", "objectives=[hfu]", "--set", "constraints=['bubble_s > 1e6']")),
}


@pytest.mark.parametrize("name", NOTHING)
def test_where_nothing_is_feasible_it_is_3_with_reasons_and_a_readable_run(search, tmp_path, name):
    space, overrides = NOTHING[name]
    said = search("launch", space, *overrides, "--pool", "inline", "--out", "run")
    assert said.code == 3, said.err
    run = RunFolder.open(tmp_path / "run")
    counts = run.manifest["counts"]
    assert run.state == "done"
    assert len(run.read_front()) == 0
    assert counts["front"] == 0
    rejected = {row["rule"]: row for row in run.read_rejections().rows()}
    illegal = {"rules": "world", "rules beside constraints": "batch", "no experts": "experts"}
    reason = {"memory": "memory", **illegal}.get(name, "constraint")
    assert reason in rejected
    assert reason in said.out
    assert rejected[reason]["example"] or reason == "memory"
    if reason == "constraint":
        assert "loosen them" in " ".join(said.out.split())
    assert ("closest" in said.out) == (name not in illegal)
    for words in (("why", "run"), ("show", "run"), ("resume", "run", "--pool", "inline"), ("runs", ".")):
        assert search(*words).code in (0, 3), words


def test_nothing_feasible_names_the_run_and_the_reasons(tmp_path):
    space = replace(SMALL["only speed"], constraints=(Constraint.parse("step_time_s < 1e-6"),))
    with pytest.raises(NothingFeasible) as stopped:
        carried_out(space, tmp_path)
    fits = sum(c.fits for c in candidates(space))
    assert stopped.value.run == tmp_path
    assert stopped.value.reasons["constraint"] == fits
    assert [row["short_by_bytes"] for row in stopped.value.closest] == [0.0] * len(stopped.value.closest)


# Plans


def test_plans_of_other_prices_or_other_blocks_differ():
    space = SMALL["experts"]
    one = fingerprint(prepare(space))
    assert one == fingerprint(prepare(space))
    dearer = replace(space, workload=replace(space.workload, seq=8192))
    assert fingerprint(prepare(dearer)) != one
    assert fingerprint(prepare(space, prune=False)) != one
    assert isinstance(sweep_plan(prepare(space)), Swept)
