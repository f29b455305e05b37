"""Layout auto: what it comes to for one configuration, held against every layout through evaluate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.auto_layout import configured_layouts, pipeline_of
from estimator.build import build
from estimator.layout import even_layers
from estimator.step import evaluate, with_layout
from estimator.strategy import LayoutRule, Overlap, Recompute, Schedule, Strategy
from tests.estimator.cases import DEEPSEEK, GPT, LLAMA, MIXTRAL, SEQ, WORK, h100
from tests.estimator.test_balance import compositions

AUTO = LayoutRule.AUTO
BASE = Strategy(pp=4, layout=AUTO, zero_stage=1, overlap=Overlap(dp=1), bucket_bytes=10_000_000)
CASES = {
    "plain": (LLAMA, BASE),
    "tied ends, blocking sends": (GPT, replace(BASE, schedule=Schedule.ZB_H1, zero_stage=0)),
    "experts and prediction": (DEEPSEEK, replace(BASE, ep=4, expert_bucket_bytes=2_000_000)),
    "both directions": (DEEPSEEK, replace(BASE, schedule=Schedule.DUALPIPE, ep=4, overlap=Overlap(ep=1, pp=1, dp=1))),
    "tied, both directions": (GPT, replace(BASE, schedule=Schedule.DUALPIPE)),
    "everything sharded": (MIXTRAL, replace(BASE, ep=2, zero_stage=3)),
    "blocks": (DEEPSEEK, replace(BASE, recompute=Recompute.parse("block"), recompute_layers=1)),
    "full recompute, all at once": (LLAMA, replace(BASE, schedule=Schedule.GPIPE, recompute=Recompute.parse("full"))),
    "interleaved": (DEEPSEEK, replace(BASE, pp=2, vpp=2, schedule=Schedule.INTERLEAVED, ep=2)),
}


def every(model, strategy, system):
    """Busiest seconds and device bytes of every layout, by evaluate."""
    out = []
    for layers in compositions(model.num_layers, strategy.pp * strategy.vpp):
        result = evaluate(model, replace(strategy, layout=tuple(layers.tolist())), system, WORK)
        out.append((max(s.forward_s + s.backward_s for s in result.stages), result.device_memory_bytes))
    return np.array(out)


def of(model, strategy, layers, system):
    result = evaluate(model, replace(strategy, layout=layers), system, WORK)
    return max(s.forward_s + s.backward_s for s in result.stages), result


@pytest.mark.parametrize("name", CASES)
def test_no_layout_of_a_configuration_has_a_less_busy_rank_within_memory(name):
    model, strategy = CASES[name]
    system = h100(16)
    seconds, nbytes = every(model, strategy, system).T
    assert len(np.unique(nbytes)) > 5
    for share in (1.0, 0.5, 0.1):
        limit = np.quantile(nbytes, share) * (1 + 1e-6)
        chip = replace(system.chip, hbm_bytes=system.chip.hbm_bytes * limit / system.usable_hbm_bytes)
        tight = replace(system, chip=chip)
        told = [of(model, strategy, layers, tight) for layers in configured_layouts(model, strategy, tight, WORK)]
        assert told[0][1].feasible
        if strategy.schedule is Schedule.INTERLEAVED and share < 1.0:
            continue  # memory of chunks as even as they go
        least = seconds[nbytes <= limit].min()
        assert told[0][0] == pytest.approx(least, rel=1e-9)
        if strategy.schedule is not Schedule.INTERLEAVED:
            smallest = nbytes[seconds <= least * (1 + 1e-9)].min()
            as_fast = [result.device_memory_bytes for busiest, result in told if busiest <= least * (1 + 1e-9)]
            assert min(as_fast) == pytest.approx(smallest, rel=1e-9)


@pytest.mark.parametrize("name", ["plain", "both directions", "experts and prediction"])
def test_where_nothing_fits_the_layout_that_comes_closest_is_told(name):
    model, strategy = CASES[name]
    system = h100(16)
    _, nbytes = every(model, strategy, system).T
    chip = replace(system.chip, hbm_bytes=system.chip.hbm_bytes * nbytes.min() * 0.99 / system.usable_hbm_bytes)
    tight = replace(system, chip=chip)
    result = evaluate(model, strategy, tight, WORK)
    assert (result.feasible, result.reason) == (False, "memory")
    assert result.device_memory_bytes == pytest.approx(nbytes.min(), rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_auto_is_priced_as_the_layout_that_it_comes_to_and_never_slower_than_even(name):
    model, strategy = CASES[name]
    system = h100(16)
    settled = with_layout(model, strategy, system, WORK)
    told = evaluate(model, strategy, system, WORK)
    assert settled.layout is None or isinstance(settled.layout, tuple)
    assert told == evaluate(model, settled, system, WORK)
    assert told.step_time_s <= evaluate(model, replace(strategy, layout=None), system, WORK).step_time_s


def test_rows_of_a_batch_are_balanced_one_by_one():
    system = h100(16)
    batch = replace(BASE, pp=np.array([2.0, 1.0, 4.0]), micro_batch=np.array([1.0, 1.0, 2.0]))
    told = evaluate(DEEPSEEK, replace(batch, ep=1), system, WORK)
    assert told.reason == ("", "auto_layout", "")
    assert told.feasible.tolist() == [True, False, True]
    for i, (pp, micro_batch) in enumerate(((2, 1), (1, 1), (4, 2))):
        if pp > 1:
            one = evaluate(DEEPSEEK, replace(BASE, pp=pp, micro_batch=micro_batch), system, WORK)
            assert {name: column[i] for name, column in told.columns.items()} == one.columns


def test_seconds_alone_give_the_layout_of_an_unlimited_configuration_without_options():
    """What a sweep takes: the ends weigh what their blocks do."""
    kinds = build(DEEPSEEK, SEQ).kinds
    seconds = tuple(float(1 + i) for i in range(len(kinds)))
    for schedule, pp, vpp in ((Schedule.ONE_F_ONE_B, 4, 1), (Schedule.DUALPIPE, 4, 1), (Schedule.INTERLEAVED, 2, 2)):
        layers = pipeline_of(DEEPSEEK, kinds, schedule, pp, vpp).layers(seconds)
        assert sum(layers) == DEEPSEEK.num_layers
        assert layers[-1] == 0  # head, MTP and its layer weigh more than the rest of a chunk
        assert layers != even_layers(8, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pp": 1}, r"auto_layout: layout auto balances the stages of a pipeline \(pp 1\)"),
        ({"pp": 16}, r"layers: layers \(8\) must fill pp \* vpp = 16 \* 1 chunks"),
        ({"layout": (3, 3, 1)}, r"= 4 \* 1 chunks, .*; the layout has 3 chunks with 7 layers in all"),
        ({"layout": (2, 2, 2, 3)}, r"layers \(8\) must fill .*; the layout has 4 chunks with 9 layers in all"),
        ({"recompute": Recompute.parse("block"), "recompute_per_chunk": (1, 0, 0, 0)}, "recompute alike"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as error:
        evaluate(LLAMA, replace(BASE, **change), h100(16), WORK)
    assert "\n" not in str(error.value)
