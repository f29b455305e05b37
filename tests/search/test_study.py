"""Studies: what they sample, what they are told, and that the front of what they tried is exact."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import optuna
import pytest

from estimator.step import evaluate
from estimator.strategy import Chunks
from results.pareto import non_dominated
from results.schema import strategy_at
from search import choice, free, meshes, study_run
from search.choice import choose
from search.dimensions import Dimensions
from search.free import grid_size
from search.launch import LaunchOptions, NothingFeasible, launch
from search.pricer import Pricer
from search.space import Sampler, load_space, parse_space
from search.study import STARTUP
from search.study_launch import STARTS
from search.study_run import BATCH
from tests.search.naive import space_of
from tests.search.small import SMALL, swept
from tests.search.watch import Watch

INLINE = LaunchOptions(pool="inline")
EVERY = ["every schedule", "latent attention and prediction", "constraints", "two systems", "not bounded",
         "cost over chip counts", "maximised", "rank orders"]  # fmt: skip
TIGHT = load_space("llama3_70b", ["system.num_chips=64", "workload.global_batch=64", "strategy.cp=1",
                                  "strategy.zero_stage=[0, 1]", "strategy.schedule=[1f1b]"])  # fmt: skip
OPEN = """\
name: open
model: llama3_8b
system: {cluster: dgx_h100, num_chips: 16}
workload: {seq: 4096, global_batch: 32}
strategy:
  tp: [1, 2]
  pp: [2, 4]
  vpp: [1, 2]
  schedule: [1f1b, interleaved]
  sequence_parallel: true
  recompute: [none, block]
  recompute_layers: [1, 2]
  recompute_per_chunk: search
  layout: search
  tp_chunks: search
  expert_bucket_bytes: search
  fusion: search
  zero_stage: [0, 1, 3]
  overlap: {tp: [0, 1], dp: [0, 1]}
"""


def sampled(space, sampler=Sampler.RANDOM, **options):
    return replace(space, options=replace(space.options, sampler=sampler, **options))


def studied(space, out, sampler=Sampler.RANDOM, launch_options=INLINE, **options):
    return launch(sampled(space, sampler, **options), replace(launch_options, out=out), Watch())


def front_of(run, space):
    front = run.read_front()
    columns = [front[o.column].tolist() for o in space.objectives]
    return dict(zip(front["id"].tolist(), zip(*columns, strict=True), strict=True))


def journalled(run):
    """The study, opened as optuna-dashboard does."""
    storage = optuna.storages.JournalStorage(
        optuna.storages.journal.JournalFileBackend(str(run.path / "journal" / "study.log"))
    )
    return optuna.load_study(study_name=run.manifest["name"], storage=storage)


@pytest.mark.parametrize("name", EVERY)
def test_a_study_that_visits_every_structure_finds_the_exact_front(name, tmp_path):
    space = SMALL[name]
    run = studied(space, tmp_path / "run", trials=100_000)
    assert run.manifest["study"]["ended"] == "every configuration is priced"
    assert front_of(run, space) == swept(space)


def test_a_study_prices_each_configuration_once_and_counts_it_once(tmp_path, monkeypatch):
    priced = []
    price = Pricer.price
    monkeypatch.setattr(Pricer, "price", lambda self, code: priced.append(code) or price(self, code))
    run = studied(SMALL["every schedule"], tmp_path / "run", trials=100_000)
    study = run.manifest["study"]
    assert len(priced) == len(set(priced)) == study["evaluated"]
    assert study["trials"] > study["evaluated"]
    told = journalled(run).get_trials(deepcopy=False)
    assert len(told) >= study["trials"]


def test_counts_are_of_what_was_examined(tmp_path):
    space = load_space("llama3_70b")
    run = studied(space, tmp_path / "run", trials=3 * BATCH)
    counts = run.manifest["counts"]
    assert counts["raw"] == space.raw_size
    assert 0 < counts["front"] <= counts["priced"] <= counts["fits"] <= counts["legal"] == counts["examined"]
    assert counts["legal"] < 22_000_000 / 50


@pytest.mark.parametrize("sampler", [Sampler.NSGA2, Sampler.RANDOM])
def test_the_front_is_the_front_of_every_option_under_what_was_sampled(sampler, tmp_path):
    space = load_space("llama3_70b")
    run = studied(space, tmp_path / "run", sampler, trials=4 * BATCH)
    dims = Dimensions.of(space)
    trials = [t for t in journalled(run).get_trials(deepcopy=False) if t.values]
    codes = {dims.code(trial.params) for trial in trials}
    index = np.array(sorted(dims.structure(code) for code in codes))
    own = [Pricer(dims).price(code) for code in codes]
    ids = np.concatenate([p.ids for p in own if p.is_feasible])
    values = np.concatenate([np.stack([p.columns[o.column] for o in space.objectives], axis=1)
                             for p in own if p.is_feasible])  # fmt: skip
    keep = non_dominated(values, ids)
    assert front_of(run, space) == {int(ids[k]): tuple(values[k].tolist()) for k in keep}
    assert len(index) == run.manifest["study"]["evaluated"]


def test_the_study_is_told_every_point_of_the_front(tmp_path):
    space = load_space("llama3_70b")
    run = studied(space, tmp_path / "run", Sampler.NSGA2, trials=4 * BATCH)
    told = {trial.user_attrs["id"]: tuple(trial.values) for trial in journalled(run).get_trials(deepcopy=False)
            if trial.values}  # fmt: skip
    front = front_of(run, space)
    assert {key: told[key] for key in front} == front
    assert set(run.read_trials()["id"].tolist()) == set(told)


def test_what_does_not_fit_is_told_with_real_objectives_and_by_how_much_it_does_not(tmp_path, monkeypatch):
    # Lower corners keep nearly all of these out of the box: let them in.
    monkeypatch.setattr(meshes, "_may_fit", lambda plan: np.arange(len(plan.enumeration.structures)))
    run = studied(TIGHT, tmp_path / "run", trials=100_000)
    rows = {row["id"]: row for row in run.read_trials().rows()}
    trials = journalled(run).get_trials(deepcopy=False)
    short = [trial for trial in trials if trial.constraints["memory"] > 0]
    assert short
    assert len(short) < len(trials)
    assert all(math.isfinite(value) for trial in trials for value in trial.values)
    for trial in short:
        row = rows[trial.user_attrs["id"]]
        assert (row["feasible"], row["reason"]) == (False, "memory")
        point = evaluate(TIGHT.model, strategy_at(row), TIGHT.system, TIGHT.workload)
        assert not point.feasible
        assert trial.values == [float(point.columns[o.column]) for o in TIGHT.objectives]
        need = float(point.columns["device_memory_bytes"]) / TIGHT.system.usable_hbm_bytes
        assert trial.constraints["memory"] == pytest.approx(need - 1.0, rel=1e-12)
    assert all(trial.constraints["memory"] > 0 for trial in short)


def test_what_constraints_refuse_is_told_as_refused(tmp_path):
    space = SMALL["constraints"]
    run = studied(space, tmp_path / "run", trials=100_000)
    trials = journalled(run).get_trials(deepcopy=False)
    assert all("constraints" in trial.constraints for trial in trials)
    refused = {row["id"] for row in run.read_trials().rows() if row["reason"] == "constraint"}
    assert {t.user_attrs["id"] for t in trials if t.constraints["constraints"] > 0} == refused


def test_where_nothing_fits_a_study_says_what_comes_closest(tmp_path):
    space = space_of("tp: [1, 2], zero_stage: [0, 1]", model="deepseek", chips="8", batch=8)
    with pytest.raises(NothingFeasible) as stop:
        studied(sampled(space), tmp_path / "run", trials=100)
    assert set(stop.value.reasons) == {"memory"}
    assert stop.value.closest[0]["short_by_bytes"] > 0
    assert "less on each chip" in stop.value.closest[0]["remedy"]


def test_where_no_structure_is_legal_a_study_ends(tmp_path):
    space = space_of("tp: [3, 5]")
    with pytest.raises(NothingFeasible):
        studied(sampled(space), tmp_path / "run", trials=100)


@pytest.mark.parametrize("sampler", [Sampler.NSGA2, Sampler.NSGA3, Sampler.TPE, Sampler.RANDOM, Sampler.QMC])
def test_every_sampler_runs_and_the_same_seed_finds_the_same(sampler, tmp_path):
    if sampler is Sampler.QMC:
        pytest.importorskip("scipy")
    space = load_space("llama3_70b")
    first, again, other = (
        studied(space, tmp_path / name, sampler, INLINE if seed == 0 else replace(INLINE, seed=seed), trials=5 * BATCH)
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert first.manifest["sampler"] == sampler.value
    files = ("front.parquet", "trials/part-000000.parquet")
    assert [(first.path / f).read_bytes() for f in files] == [(again.path / f).read_bytes() for f in files]
    assert [t.params for t in journalled(first).get_trials()] == [t.params for t in journalled(again).get_trials()]
    assert [t.params for t in journalled(first).get_trials()] != [t.params for t in journalled(other).get_trials()]


def test_a_gaussian_process_runs(tmp_path, monkeypatch):
    """Rounds of two: each proposal of the process takes it a second."""
    pytest.importorskip("scipy")
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # its matrices are tiny, and threads that wait for each other take the machine
    monkeypatch.setattr(study_run, "BATCH", 2)
    space = load_space("llama3_8b_small")
    num_starts = len(Dimensions.of(space).starts(STARTS))
    run = studied(space, tmp_path / "run", Sampler.GP, trials=num_starts + 3)
    torch.set_num_threads(before)
    assert run.manifest["study"]["trials"] > num_starts >= STARTUP
    assert front_of(run, space)


@pytest.mark.slow
def test_the_front_is_the_same_inline_and_for_one_and_two_workers(tmp_path):
    space = load_space("llama3_70b")
    fronts = []
    for name, options in (("inline", INLINE), ("one", LaunchOptions(workers=1)), ("two", LaunchOptions(workers=2))):
        run = studied(space, tmp_path / name, Sampler.NSGA2, options, trials=6 * BATCH)
        fronts.append((run.path / "front.parquet").read_bytes())
    assert fronts[0] == fronts[1] == fronts[2]


def test_open_axes_are_sampled_and_every_row_is_what_the_estimator_says(tmp_path):
    space = parse_space(OPEN)
    run = studied(space, tmp_path / "run", Sampler.AUTO, trials=6 * BATCH)
    assert run.manifest["sampler"] == "nsga2"
    rows = list(run.read_trials().rows())
    for axis in ("layout", "tp_chunks", "recompute_per_chunk", "fusion"):
        assert len({row[axis] for row in rows}) > 1, axis
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        point = evaluate(space.model, strategy_at(row), space.system, space.workload)
        assert row["step_time_s"] == float(point.columns["step_time_s"])
        assert row["peak_memory_bytes"] == float(point.columns["peak_memory_bytes"])
    assert "examined" in run.manifest["counts"]


def test_open_axes_only_add_to_what_the_closed_space_has(tmp_path):
    text = OPEN.replace("recompute_per_chunk: search", "").replace("fusion: search", "").replace("layout: search", "")
    closed = parse_space(text.replace("tp_chunks: search", "").replace("expert_bucket_bytes: search", ""))
    space = parse_space(text)
    run = studied(space, tmp_path / "run", Sampler.RANDOM, trials=300)
    found = list(front_of(run, space).values())
    for point in swept(closed).values():
        assert any(all(a <= b for a, b in zip(mine, point, strict=True)) for mine in found)


def test_a_choice_without_effect_is_priced_once():
    dims = Dimensions.of(parse_space(OPEN))
    names = [name for name in dims.parameters if name.startswith("tp_chunks.")]
    assert len(names) == 4
    base = dims.parameters_of(dims.starts(1)[0])
    for mesh in range(len(dims.meshes)):
        a, b = ({**base, "mesh": mesh, **dict.fromkeys(names, level)} for level in (0, 3))
        tp = dims.narrowed(dims.code(a)).axes["tp"][0]
        assert (dims.canonical(dims.code(a)) == dims.canonical(dims.code(b))) is (tp == 1)
        chunks = dims.narrowed(dims.code(b)).axes["tp_chunks"][0]
        assert chunks == (Chunks() if tp == 1 else Chunks(attention_in=8, attention_out=8, mlp_in=8, mlp_out=8))


@pytest.mark.parametrize(
    "space", [load_space("llama3_70b"), parse_space(OPEN), SMALL["two systems"]], ids=lambda s: s.name
)
def test_every_point_of_the_box_is_legal_and_codes_lead_back_to_themselves(space):
    dims = Dimensions.of(space)
    rng = np.random.default_rng(0)
    pricer = Pricer(dims)
    for number in range(100):
        corner = number % 3 if number < 9 else None
        point = {
            name: (rng.random() if corner is None else corner / 2) if not n
            else int(rng.integers(n)) if corner is None else corner * (n - 1) // 2
            for name, n in dims.parameters.items()
        }  # fmt: skip
        code = dims.code(point)
        assert dims.code(dims.parameters_of(code)) == code
        assert all(len(values) == 1 for name, values in dims.narrowed(code).axes.items() if name in ("tp", "schedule"))
        if number < 30:
            assert len(pricer.price(code).ids)


def test_meshes_come_in_layers_of_their_lower_corners():
    dims = Dimensions.of(load_space("llama3_70b"))
    lows = np.array([
        dims.plan.lows[dims.meshes.structures[a:b]].min(axis=0)
        for a, b in zip(dims.meshes.first, dims.meshes.first[1:], strict=False)
    ])  # fmt: skip
    assert 1 < len(lows) < 100
    for i in range(len(lows)):
        assert not any((lows[j] <= lows[i]).all() and (lows[j] < lows[i]).any() for j in range(i + 1, len(lows)))


def test_auto_sweeps_what_it_can_and_says_why_it_samples():
    assert choose(load_space("llama3_70b")).sampler is Sampler.EXHAUSTIVE
    opened = choose(parse_space(OPEN))
    assert opened.sampler is Sampler.NSGA2
    assert "strategy.fusion is open" in opened.reason
    wide = load_space("llama3_70b", ["strategy.recompute_layers={range: [1, 80000]}",
                                     "strategy.bucket_bytes={range: [1, 90000]}",
                                     "strategy.micro_batch={range: [1, 1000]}"])  # fmt: skip
    assert "2^62" in choose(wide).reason


def test_auto_samples_where_too_many_would_be_priced_one_by_one(monkeypatch):
    space = SMALL["not bounded"]
    assert choose(space).sampler is Sampler.EXHAUSTIVE
    monkeypatch.setattr(choice, "MAX_ENUMERATED", 10)
    chosen = choose(space)
    assert chosen.sampler is Sampler.NSGA2
    assert "bubble_s" in chosen.reason
    monkeypatch.setattr(choice, "MAX_SWEPT_GRID", 10)
    assert "the grid of structures" in choose(load_space("llama3_70b")).reason


def test_a_space_too_large_to_survey_is_sampled_with_its_longest_harmless_axis_free(tmp_path, monkeypatch):
    space = load_space("llama3_8b_small")
    alone = space.axes["fusion"][0]
    sets = (alone, *(frozenset({fusion}) for fusion in sorted(alone, key=lambda f: f.value)))
    space = replace(space, axes={**space.axes, "fusion": sets})
    monkeypatch.setattr(free, "MAX_GRID", grid_size(space))
    dims = Dimensions.of(space)
    assert [f.axis for f in dims.free] == ["fusion"]
    run = studied(space, tmp_path / "run", trials=100_000)
    assert run.manifest["study"]["ended"] == "every configuration is priced"
    assert set(front_of(run, space).values()) == set(swept(space).values())


def test_structures_too_many_to_survey_are_refused_before_a_run_is_begun(monkeypatch):
    wide = load_space("llama3_70b", ["strategy.vpp={range: [1, 4000]}", "strategy.micro_batch={range: [1, 4000]}"])
    with pytest.raises(ValueError, match=r"at most 100.0 M points, but it has .*; shorten vpp \(4000 values\), micro"):
        choice.check_searchable(wide)
    with pytest.raises(ValueError, match="llama3_70b: a sampler needs a grid"):
        choice.check_searchable(replace(wide, options=replace(wide.options, sampler=Sampler.TPE)))
    monkeypatch.setattr(choice, "MAX_SWEPT_GRID", 10**15)
    choice.check_searchable(wide)


def test_a_study_ends_after_its_seconds(tmp_path):
    run = studied(load_space("llama3_70b"), tmp_path / "run", seconds=1)
    assert run.manifest["study"]["ended"] == "1 s have passed"


def test_seconds_and_trials_bound_a_study_together(tmp_path):
    run = studied(load_space("llama3_70b"), tmp_path / "run", seconds=1000, trials=20)
    assert 20 <= run.manifest["study"]["evaluated"] < 20 + BATCH
