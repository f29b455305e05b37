"""Claims about `search fit`: every answer is the best of all that was tried, found here by trying again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from estimator.strategy import Module, Recompute, RecomputeKind
from search.commands.fitting import SEQUENCE_STEP, fits_of
from search.commands.point import read_point

TIGHT = (
    "--set", "reference.fully_sharded.recompute=selective", "--set", "workload.global_batch=512",
)  # fmt: skip
TARGET = "llama3_8b_small:fully_sharded"


@pytest.fixture
def point():
    return read_point(TARGET, None, [TIGHT[1], TIGHT[3]])


def fits(point, **changes):
    strategy = replace(point.strategy, **{k: v for k, v in changes.items() if k not in {"seq", "num_chips"}})
    work = replace(point.workload, **{k: v for k, v in changes.items() if k == "seq"})
    system = point.system.with_chips(changes.get("num_chips", point.system.num_chips))
    other = replace(point, strategy=strategy, workload=work, system=system)
    try:
        return other.evaluate()
    except ValueError:
        return None


def test_the_largest_micro_batch_and_the_next(point):
    fit = fits_of(point, longest=SEQUENCE_STEP)[0]
    sizes = {n: fits(point, micro_batch=n) for n in range(1, 513)}
    legal = {n: result for n, result in sizes.items() if result is not None}
    assert fit.legal == len(legal)
    assert fit.value == max(n for n, result in legal.items() if result.feasible)
    beyond = [n for n, result in legal.items() if not result.feasible and n > fit.value]
    assert fit.next_value == min(beyond, default=None)


def test_the_longest_sequence_and_how_much_the_next_lacks(point):
    fit = fits_of(point, longest=40 * SEQUENCE_STEP)[1]
    lengths = {n: fits(point, seq=n) for n in range(SEQUENCE_STEP, 41 * SEQUENCE_STEP, SEQUENCE_STEP)}
    assert fit.value == max(n for n, result in lengths.items() if result and result.feasible)
    assert fit.value < 40 * SEQUENCE_STEP
    assert fit.device_memory_bytes == lengths[fit.value].device_memory_bytes
    assert fit.next_value == fit.value + SEQUENCE_STEP
    over = lengths[fit.next_value].device_memory_bytes - point.system.usable_hbm_bytes
    assert fit.next_over_bytes == pytest.approx(over)
    assert over > 0


def test_the_fewest_chips_keep_the_model_parallel_sizes(point):
    fit = fits_of(point, longest=SEQUENCE_STEP)[2]
    inner = int(point.strategy.tp * point.strategy.cp * point.strategy.pp)
    sizes = {inner * d: fits(point, num_chips=inner * d) for d in range(1, 513)}
    assert fit.value == min(n for n, result in sizes.items() if result and result.feasible)
    assert fit.num_gpus == fit.value


def test_the_cheapest_recompute_is_the_fastest_of_all_that_fit(point):
    fit = fits_of(point, longest=SEQUENCE_STEP)[3]
    modules = [Module.CORE_ATTENTION, Module.LAYERNORM, Module.MLP, Module.MLP_ACTIVATION]
    sets = [frozenset(m for i, m in enumerate(modules) if n >> i & 1) for n in range(1, 16)]
    options = [Recompute(), Recompute(kind=RecomputeKind.FULL)]
    options += [Recompute(kind=RecomputeKind.SELECTIVE, modules=chosen) for chosen in sets]
    results = [fits(point, recompute=choice) for choice in options]
    block = Recompute(kind=RecomputeKind.BLOCK)
    results += [fits(point, recompute=block, recompute_layers=n) for n in range(1, 33)]
    assert fit.tried == len(results)
    assert fit.step_time_s == min(float(r.step_time_s) for r in results if r and r.feasible)


def test_it_is_told_as_a_table_and_as_json(search):
    said = search("fit", TARGET, *TIGHT, "--longest", str(16 * SEQUENCE_STEP))
    assert said.code == 0
    for text in ("largest micro-batch", "longest sequence", "fewest chips", "cheapest recompute", "as it is: fits"):
        assert text in said.out
    assert max(map(len, said.out.splitlines())) <= 100
    data = json.loads(search("fit", TARGET, *TIGHT, "--longest", str(16 * SEQUENCE_STEP), "--json").out)
    assert set(data["fits"]) == {"micro_batch", "seq", "num_gpus", "recompute"}
    assert data["fits"]["seq"]["now"] == 8192


def test_where_nothing_fits_it_is_3_with_what_comes_closest(search):
    said = search(
        "fit", "deepseek_v3:published", "--set", "system.num_chips=8", "--set", "reference.published.pp=1",
        "--set", "reference.published.ep=8", "--set", "reference.published.schedule=1f1b",
        "--set", "reference.published.overlap={dp: 1}", "--set", "workload.global_batch=8", "--longest", "2048",
    )  # fmt: skip
    assert said.code == 3
    assert said.out.count("none fits") == 4
    assert "too much" in said.out
