"""Shared experts beside the all-to-all of the routed ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.cost.overlap import SLOWDOWN
from estimator.cost.price import price
from estimator.cost.table import Again, Base
from estimator.detail.step import replay_step
from estimator.graph import BlockKind
from estimator.op import OpKind, Phase
from estimator.precision import recipe
from estimator.strategy import Overlap, Strategy
from tests.estimator.cases import DEEPSEEK, FULL, MIXTRAL, WORK, again, base, block, compute_ops, h100, step

MOE = BlockKind.MOE
WIDE = replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, shared_ffn=4096))  # its shared experts hide a good part


def beside(on, **more):
    return Strategy(ep=16, shared_expert_overlap=on, **more)


def seconds(model, phase, *, out):
    """Of the shared experts' way in or out, in one phase."""
    b = block(model, MOE, Strategy(ep=16))
    mine = [op for op in compute_ops(b, phase) if op.name.startswith("shared.")]
    way = [op for op in mine if op.name.startswith("shared.down") is out]
    return sum(float(price(op, b, h100(64).chip, recipe("bf16")).seconds) for op in way)


@pytest.mark.parametrize(("phase", "column"), [(Phase.FORWARD, Base.F_EP0), (Phase.BACKWARD, Base.B_EP0)])
def test_each_way_hides_its_own_all_to_all(phase, column):
    """The two all-to-alls move the same bytes: each takes max(window + 0.15 t, t) with its window."""
    t = base(WIDE, MOE, column, beside(False)) / 2
    want = 0.0
    for out in (False, True):
        window = seconds(WIDE, phase, out=out)
        want += max(window + SLOWDOWN * t, t) - window
    assert base(WIDE, MOE, column, beside(True)) == pytest.approx(want, rel=1e-12)
    assert want < 2 * t


def test_more_shared_experts_hide_more_and_never_less_than_they_slow_down():
    exposed = []
    for ffn in (64, 512, 4096, 65536):
        model = replace(DEEPSEEK, moe=replace(DEEPSEEK.moe, shared_ffn=ffn))
        exposed.append(base(model, MOE, Base.F_EP0, beside(True)))
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[-1] == pytest.approx(SLOWDOWN * base(DEEPSEEK, MOE, Base.F_EP0, beside(False)), rel=1e-9)


def test_nothing_else_changes():
    for column in set(Base) - {Base.F_EP0, Base.B_EP0}:
        assert base(WIDE, MOE, column, beside(True)) == base(WIDE, MOE, column, beside(False)), column


def test_a_layer_that_runs_again_hides_its_traffic_again():
    plain, hidden = (again(WIDE, MOE, Again.R_EP0, beside(on), FULL) for on in (False, True))
    assert hidden < plain
    assert again(WIDE, MOE, Again.R_COMP, beside(True), FULL) == again(WIDE, MOE, Again.R_COMP, beside(False), FULL)


@pytest.mark.parametrize(("model", "ep"), [(MIXTRAL, 8), (DEEPSEEK, 1)], ids=["no shared experts", "ep 1"])
def test_without_shared_experts_or_traffic_it_has_no_effect(model, ep):
    off, on = (step(model, Strategy(ep=ep, shared_expert_overlap=flag), 16) for flag in (False, True))
    assert on.columns == off.columns


def test_traffic_hides_behind_another_micro_batch_or_behind_its_own_shared_experts_not_behind_both():
    both = beside(True, overlap=Overlap(ep=1))
    with pytest.raises(ValueError, match="^shared_expert_overlap: .* set shared_expert_overlap: false or overlap ep"):
        step(WIDE, both, 32)
    # Where one of the two has no effect, the other stands.
    assert step(MIXTRAL, replace(both, ep=8), 32).feasible
    assert step(WIDE, replace(both, ep=1), 32).columns == step(WIDE, Strategy(ep=1), 32).columns


@pytest.mark.parametrize("more", [{}, {"pp": 2}, {"recompute": FULL}], ids=["pp 1", "pp 2", "recompute"])
def test_a_replay_agrees(more):
    told = {on: replay_step(WIDE, beside(on, **more), h100(32), WORK) for on in (False, True)}
    assert told[True].step_time_s < told[False].step_time_s
    for replayed in told.values():
        assert replayed.error == pytest.approx(0.0, abs=0.02)  # starts of passes on neighbours differ a little


def test_weight_gradients_hide_nothing():
    marked = [
        op for op in block(WIDE, MOE, beside(True)).of_phase(Phase.WEIGHT_GRAD) if op.kind is not OpKind.COLLECTIVE
    ]
    assert marked
    assert base(WIDE, MOE, Base.W_COMP, beside(True)) == base(WIDE, MOE, Base.W_COMP, beside(False))
