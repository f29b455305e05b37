"""Shared parameters from measured steps, and what they say of rows that were left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from estimator.step import evaluate
from hardware.catalog import chip_names
from search.configuration import configuration
from search.cores import Cores
from search.measured import Row, read_rows
from search.parameters import PARAMETERS, SHIPPED, SystemFactor, silicon_of, unfitted
from search.refit import refit
from search.validate import Folds, validate
from tests.search.measured_rows import cells, write

CHIPS = ("a100-80g-sxm", "h100-80g-sxm")
NODES = {"a100-80g-sxm": ("nvlink3-600", "ib-hdr-8x200g"), "h100-80g-sxm": ("nvlink4-900", "ib-ndr-8x400g")}


def _row(**changes):
    intra, inter = NODES[changes.get("gpu", CHIPS[0])]
    return Row(place="here", cells=cells(**{"intra_node": intra, "inter_node": inter, **changes}))


@dataclass(frozen=True)
class _Share:
    """A parameter of the seconds that `_seconds` says one cause takes."""

    name: str
    cause: str
    spread: float
    field: str
    chip: str = ""

    def touches(self, config):
        return not self.chip or config.system.chip.name == self.chip

    def scaled(self, config, factor):
        chip = config.system.chip
        changed = replace(chip, **{self.field: getattr(chip, self.field) * factor})
        return replace(config, system=replace(config.system, chip=changed))


def _seconds(_rows, configs):
    """Products take 10 layers' worth, launches a microsecond's worth of the sequence length."""
    return [
        c.model.num_layers * c.system.chip.gemm_slowdown + c.workload.seq * c.system.chip.launch_s * 1e3
        for c in configs
    ]


TOY = (
    _Share("products", "products", 0.3, "gemm_slowdown"),
    _Share("products of one", "products", 0.3, "gemm_slowdown", CHIPS[0]),
    _Share("launches", "launches", 0.5, "launch_s"),
)


def _toy(factors, **more):
    """24 rows that took what `_seconds` says with these factors."""
    rows = [
        configuration(_row(gpu=gpu, layers=str(layers), seq=str(seq)))
        for gpu in CHIPS
        for layers in (8, 16, 32, 64)
        for seq in (1024, 4096, 16384)
    ]
    truth = list(rows)
    for parameter, factor in zip(TOY, factors, strict=True):
        truth = [parameter.scaled(c, factor) if parameter.touches(c) else c for c in truth]
    return rows, np.array(_seconds([], truth))


def _fit(rows, measured, folds=None, kin=None):
    folds = folds or list(range(len(rows)))
    return refit(rows, measured, folds, kin or folds, TOY, _seconds, lambda _: None)


def test_factors_that_made_the_measured_seconds_are_found():
    rows, measured = _toy((1.1, 1.2, 0.8))
    found = _fit(rows, measured).factors
    assert found["products"] * found["products of one"] == pytest.approx(1.32, rel=0.01)  # the prior pulls a little
    assert found["products"] == pytest.approx(1.1, rel=0.01)
    assert found["launches"] == pytest.approx(0.8, rel=0.01)


def test_a_cause_that_no_row_shows_stays_at_one():
    rows, measured = _toy((1.1, 1.2, 0.8))
    others = [i for i, c in enumerate(rows) if c.system.chip.name != CHIPS[0]]
    found = _fit([rows[i] for i in others], measured[others]).factors
    assert found["products of one"] == 1.0
    assert found["products"] == pytest.approx(1.1, rel=0.01)


def test_a_row_that_is_ten_times_off_moves_nothing_much():
    rows, measured = _toy((1.1, 1.0, 1.0))
    measured[3] *= 10
    assert _fit(rows, measured).factors["products"] == pytest.approx(1.1, rel=0.02)


def test_what_a_fold_is_predicted_with_never_looks_at_its_own_seconds():
    rows, measured = _toy((1.1, 1.2, 0.8))
    folds = [c.system.chip.name for c in rows]
    before = _fit(rows, measured, folds).configs
    wrong = np.where(np.array(folds) == CHIPS[0], measured * 3, measured)
    after = _fit(rows, wrong, folds).configs
    for fold, one, other in zip(folds, before, after, strict=True):
        assert (one.system == other.system) is (fold == CHIPS[0])


def test_rows_without_a_measured_time_are_predicted_and_fitted_to_nothing():
    rows, measured = _toy((1.1, 1.2, 0.8))
    less = np.where(np.arange(len(rows)) % 5 == 0, np.nan, measured)
    folds, kin = list(range(len(rows))), list(range(len(rows)))
    kept = [i for i in range(len(rows)) if i % 5]
    few = _fit([rows[i] for i in kept], measured[kept], [folds[i] for i in kept], [kin[i] for i in kept])
    found = _fit(rows, less, folds, kin)
    assert found.factors == pytest.approx(few.factors, rel=1e-9)
    predicted = np.array(_seconds([], found.configs))
    assert predicted == pytest.approx(measured, rel=0.02)


def test_repeats_count_as_the_root_of_their_number():
    rows, measured = _toy((1.0, 1.0, 1.0))
    rows, measured = rows[:1] * 4 + rows[1:2], np.array([measured[0] * 1.05] * 4 + [measured[1]])
    once = _fit([rows[0], rows[0], rows[4]], measured[[0, 0, 4]], kin=["a", "b", "c"]).factors
    assert _fit(rows, measured, kin=["a", "a", "a", "a", "c"]).factors == pytest.approx(once, rel=1e-9)


def test_parameters_act_on_systems_alone_and_make_steps_longer():
    for changes in ({}, {"gpu": CHIPS[1], "precision": "fp8"}, {"gpu": CHIPS[1]}):
        config = configuration(_row(**changes))
        whole = evaluate(config.model, config.strategy, config.system, config.workload).step_time_s
        for parameter in PARAMETERS:
            scaled = parameter.scaled(config, 1.1)
            assert (scaled.model, scaled.strategy, scaled.workload) == (config.model, config.strategy, config.workload)
            longer = evaluate(scaled.model, scaled.strategy, scaled.system, scaled.workload).step_time_s
            assert whole <= longer <= 1.1 * whole


def test_a_silicon_has_its_own_factor_and_every_chip_a_shared_one():
    names = {p.name for p in PARAMETERS if isinstance(p, SystemFactor) and p.cause == "matrix products"}
    assert "matrix products" in names
    for name in ("a100-40g-sxm", "a100-80g-pcie", "h200-141g-sxm", "b200-180g-sxm", "gb200", "gb300", "b300-288g-sxm"):
        assert name in chip_names()
        silicon = silicon_of(
            configuration(Row(place="", cells=cells(gpu=name, intra_node="", inter_node=""))).system.chip
        )
        assert f"matrix products of {silicon}" in names


def test_faster_attention_stays_below_the_peak():
    config = configuration(_row())
    (shared,) = (p for p in PARAMETERS if p.name == "attention")
    chip = shared.scaled(config, 0.01).system.chip
    assert max(chip.attention_share(d) for d in (32, 64, 128, 192, 256)) == pytest.approx(1.0)


def test_cores_share_the_work_and_answer_in_order():
    configs = [configuration(_row(layers=str(layers))) for layers in (8, 16, 24)]
    illegal = replace(configs[0], strategy=replace(configs[0].strategy, tp=7))
    asked = [*configs, illegal]
    with Cores(1) as one, Cores(2) as two:
        alone, shared = (cores.step_seconds(range(4), asked) for cores in (one, two))
    assert alone[:3] == shared[:3] == sorted(alone[:3])
    assert np.isnan(alone[3])
    assert np.isnan(shared[3])


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory):
    """Rows of two models on one chip, of two families each, all a tenth slower than operators say."""
    path = tmp_path_factory.mktemp("rows") / "t.csv"
    rows = [
        cells(case_id=f"{layers}-{m}", layers=layers, micro_batch=m, family=f"of {m}", step_time_s="1")
        for layers in ("16", "32")
        for m in ("1", "2")
    ]
    configs = [unfitted(configuration(row)) for row in read_rows(write(path, *rows))]
    predicted = [float(evaluate(c.model, c.strategy, c.system, c.workload).step_time_s) for c in configs]
    slower = [row | {"step_time_s": repr(1.1 * p)} for row, p in zip(rows, predicted, strict=True)]
    return path, slower


def test_folds_start_from_what_operators_say_and_not_from_what_is_shipped():
    shipped = configuration(_row(framework="megatron-lm"))
    plain = unfitted(shipped)
    chip = plain.system.chip
    assert (dict(chip.step_gemm), chip.step_attention) == ({}, 1.0)
    assert chip.hbm_bytes_per_s == pytest.approx(shipped.system.chip.hbm_bytes_per_s * SHIPPED["memory traffic"])
    host = [c.system.software.dense_layer_s for c in (shipped, plain)]
    assert host[0] / host[1] == pytest.approx(SHIPPED["host time of layers"])
    assert {p.name for p in PARAMETERS} >= set(SHIPPED)


def test_left_out_rows_are_predicted_from_the_others(two_groups):
    path, rows = two_groups
    for folds in (Folds.GROUP, Folds.FAMILY):
        lines = []
        cases = validate(read_rows(write(path, *rows)), folds=folds, tell=lines.append)["cases"]
        assert all(abs(case["error"]) < 0.04 for case in cases)  # 9 % without
        assert "2 folds" in lines[-1]


def test_groups_do_not_depend_on_names(two_groups):
    path, rows = two_groups
    seconds = [c["predicted_step_time_s"] for c in validate(read_rows(write(path, *rows)), folds=Folds.GROUP)["cases"]]
    other = [row | {"model": str(i), "family": str(i % 3), "source": str(i)} for i, row in enumerate(rows)]
    again = validate(read_rows(write(path, *other)), folds=Folds.GROUP)["cases"]
    assert [c["predicted_step_time_s"] for c in again] == seconds


def test_the_command_line_takes_folds(search, two_groups):
    path, rows = two_groups
    write(path, *rows)
    said = search("validate", path, "--cross-validate", "group")
    assert said.code == 0
    assert "pricing 4 rows" in said.err
    assert search("validate", path, "--cross-validate", "source").code == 2
