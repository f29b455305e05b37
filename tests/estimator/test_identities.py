"""The identities that estimator/result.py publishes, over random strategies."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from estimator.result import COLUMNS, column
from estimator.schedule.rules import VEES
from estimator.step import evaluate
from estimator.strategy import Overlap, Recompute, Schedule, Strategy
from estimator.tables import model_flops_per_token
from estimator.workload import Workload
from hardware.dtype import DType
from tests.estimator.cases import DEEPSEEK, FULL, LLAMA, SEQ, TINY, WORK, h100, step
from tests.estimator.test_step import STRUCTURES, random_rows

EXPOSED = ("tp", "cp", "ep", "pp", "dp")


def legal_rows(model, structure, n=400, seed=11):
    result = step(model, random_rows(structure, n, seed), 64)
    keep = np.array([reason in {"", "memory"} for reason in result.reason])
    return {name: np.asarray(values)[keep] for name, values in result.columns.items()}


@pytest.fixture(scope="module", params=[(m, s) for m in TINY for s in STRUCTURES[:6]],
                ids=lambda p: f"{p[0].name}-{p[1].schedule.value}-{p[1].precision}-{p[1].recompute}")  # fmt: skip
def rows(request):
    found = legal_rows(*request.param)
    assert len(found["step_time_s"])
    return found


def test_step_time_is_pipeline_optimizer_and_the_rest(rows):
    parts = ("pipeline_s", "optimizer_s", "optimizer_comm_s", "fixed_host_s", "jitter_s")
    np.testing.assert_allclose(sum(rows[p] for p in parts), rows["step_time_s"], rtol=1e-13)


def test_pipeline_is_compute_exposed_traffic_host_and_bubble(rows):
    parts = ["compute_s", "exposed_offload_s", "exposed_host_s", "bubble_s", *(f"exposed_comm_{x}_s" for x in EXPOSED)]
    np.testing.assert_allclose(sum(rows[p] for p in parts), rows["pipeline_s"], rtol=1e-13)


def test_compute_is_forward_backward_and_recompute(rows):
    total = rows["forward_s"] + rows["backward_s"] + rows["recompute_s"]
    np.testing.assert_allclose(total, rows["compute_s"], rtol=1e-15)


def test_no_part_is_negative(rows):
    """A bubble is what is left of a sum: it may round below zero."""
    for c in COLUMNS:
        assert (rows[c.name] >= -1e-12 * rows["step_time_s"]).all(), c.name


def test_shares_of_prices_add_up(rows):
    total = sum(rows[f"price_share_{s}"] for s in ("measured", "tile", "roofline"))
    np.testing.assert_allclose(total, 1.0, rtol=1e-15)


def test_price_shares_are_of_the_seconds_of_compute():
    """Measured and roofline seconds of the finishing rank are its compute: all products' curves were measured."""
    result = step(LLAMA, Strategy(recompute=FULL), 8)
    assert result.price_share_measured + result.price_share_roofline == pytest.approx(1, rel=1e-15)
    assert 0.5 < result.price_share_measured < 1
    assert step(LLAMA, Strategy(precision="fp16"), 8).price_share_tile > 0.4  # assumed to run as bf16 does


def test_rates_follow_from_step_time(rows):
    step_s = rows["step_time_s"]
    tokens = WORK.tokens
    np.testing.assert_allclose(rows["tokens_per_s"], tokens / step_s, rtol=1e-15)
    np.testing.assert_allclose(rows["tokens_per_s_per_gpu"] * 64, tokens / step_s, rtol=1e-15)
    system = h100(64)
    cost = 64 * system.chip.price_usd_per_hour / 3600 * step_s / tokens * 1e6
    np.testing.assert_allclose(rows["cost_usd_per_mtoken"], cost, rtol=1e-14)
    # Chip, host and network; 8 ports of 400 Gb/s a node at 0.27 W a Gb/s; a building that adds a fifth.
    watts = 64 * (700 + 575 + 0.27 * 400) * 1.2
    np.testing.assert_allclose(rows["energy_j_per_token"], watts * step_s / tokens, rtol=1e-14)
    kwh_per_mtoken = rows["energy_j_per_token"] * 1e6 / 3.6e6
    np.testing.assert_allclose(rows["co2_kg_per_mtoken"], kwh_per_mtoken * 0.473, rtol=1e-14)


def test_electricity_paid_apart_adds_to_the_price_and_to_nothing_else():
    mine = replace(h100(64).site, electricity_usd_per_kwh=0.1)
    work, system = Workload(seq=SEQ, global_batch=64), h100(64)
    rented = evaluate(LLAMA, Strategy(), system, work)
    owned = evaluate(LLAMA, Strategy(), replace(system, site=mine, price_usd_per_hour=0.0), work)
    paid = owned.energy_j_per_token * 1e6 / 3.6e6 * 0.1
    assert owned.cost_usd_per_mtoken == pytest.approx(paid, rel=1e-14)
    changed = {name for name, value in owned.columns.items() if value != rented.columns[name]}
    assert changed == {"cost_usd_per_mtoken"}


def test_a_cleaner_grid_and_a_leaner_building_change_what_they_should():
    system, work = h100(64), Workload(seq=SEQ, global_batch=64)
    usual = evaluate(LLAMA, Strategy(), system, work)
    green = evaluate(LLAMA, Strategy(), replace(system, site=replace(system.site, grid_kg_co2_per_kwh=0.0473)), work)
    lean = evaluate(LLAMA, Strategy(), replace(system, site=replace(system.site, pue=1.0)), work)
    assert usual.co2_kg_per_mtoken == pytest.approx(10 * green.co2_kg_per_mtoken, rel=1e-14)
    assert green.energy_j_per_token == usual.energy_j_per_token
    assert usual.energy_j_per_token == pytest.approx(1.2 * lean.energy_j_per_token, rel=1e-14)
    assert usual.co2_kg_per_mtoken == pytest.approx(1.2 * lean.co2_kg_per_mtoken, rel=1e-14)


def test_memory_counters_are_ordered(rows):
    assert (rows["peak_memory_bytes"] < rows["reserved_memory_bytes"]).all()
    assert (rows["reserved_memory_bytes"] < rows["device_memory_bytes"]).all()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", DType.BF16), ("fp8", DType.FP8), ("fp8_block", DType.FP8)])
def test_mfu_is_model_flops_over_the_peak_of_the_recipes_products(precision, dtype):
    result, chip = step(LLAMA, Strategy(precision=precision), 8), h100(8).chip
    achieved = model_flops_per_token(LLAMA, SEQ) * WORK.tokens / 8 / result.step_time_s
    assert result.mfu == pytest.approx(achieved / chip.peak(dtype), rel=1e-14)
    assert result.mfu_bf16 == pytest.approx(achieved / chip.peak(DType.BF16), rel=1e-14)
    assert result.model_tflops_per_gpu == pytest.approx(achieved / 1e12, rel=1e-14)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_stages_of_a_scalar_are_the_ranks_of_its_pipeline(schedule):
    vpp = 2 if schedule in {Schedule.INTERLEAVED, Schedule.BREADTH_FIRST, *VEES} else 1
    result = step(LLAMA, Strategy(pp=4, vpp=vpp, schedule=schedule), 8)
    assert [s.rank for s in result.stages] == [0, 1, 2, 3]
    copies = 2 if schedule is Schedule.DUALPIPE else 1
    assert sum(sum(s.layers) for s in result.stages) == copies * LLAMA.num_layers
    assert 0 <= result.finishing_rank < 4


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.DUALPIPE])
def test_the_finishing_ranks_busy_seconds_are_its_stages(schedule):
    vpp = 2 if schedule in {Schedule.INTERLEAVED, Schedule.BREADTH_FIRST, *VEES} else 1
    result = step(LLAMA, Strategy(pp=4, vpp=vpp, schedule=schedule), 8)
    stage = result.stages[result.finishing_rank]
    m = WORK.global_batch / 2 / (2 if schedule is Schedule.DUALPIPE else 1)
    named = (
        result.compute_s
        + result.exposed_host_s
        + sum(result.columns[f"exposed_comm_{x}_s"] for x in ("tp", "cp", "ep", "pp"))
    )
    assert named == pytest.approx(m * (stage.forward_s + stage.backward_s), rel=1e-12)


def test_a_dictionary_of_a_result_is_plain_json():
    s = Strategy(pp=2, ep=4, recompute=Recompute.parse(["layernorm"]), overlap=Overlap(dp=1))
    result = step(DEEPSEEK, s, 8)
    plain = json.loads(json.dumps(result.as_dict()))
    assert plain["step_time_s"] == result.step_time_s
    assert plain["exposed_comm_s"] == {x: result.columns[f"exposed_comm_{x}_s"] for x in EXPOSED}
    assert plain["price_sources"].keys() == {"measured", "tile", "roofline"}
    assert plain["feasible"] is True
    assert len(plain["stages"]) == 2


def test_a_columns_name_finds_it_and_a_wrong_one_lists_the_known():
    assert column("mfu").unit == "1"
    with pytest.raises(ValueError, match="unknown column 'speed'; have .*step_time_s"):
        column("speed")
