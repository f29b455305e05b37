"""Reductions of input gradients beside weight gradients: what software hides by itself, and where it cannot."""

from dataclasses import replace

import pytest

from estimator.cost.overlap import SLOWDOWN
from estimator.cost.table import Base
from estimator.detail.step import replay_step
from estimator.graph import BlockKind
from estimator.step import evaluate
from estimator.strategy import Overlap, Schedule, Strategy
from estimator.tables import TableBuilder
from estimator.workload import Workload
from hardware.software import SoftwareSpec
from tests.estimator.cases import DEEPSEEK, GPT, LLAMA, MIXTRAL, block, h100, named
from tests.estimator.test_overlap import gemm, seconds

ASYNC = SoftwareSpec(name="asynchronous", async_tensor_parallel=True)
PLAIN = h100(64)
SYSTEM = PLAIN.running(ASYNC)
WORK = Workload(seq=4096, global_batch=64)
SCATTERED, REPLICATED = Strategy(tp=8, sequence_parallel=True), Strategy(tp=8)
INTO = ("attention.q_proj.gather", "mlp.gate_proj.gather")


def row(model, kind, system, strategy):
    made = TableBuilder(model, system, WORK, strategy)
    sizes = {"tp": [8.0], "cp": [1.0], "ep": [1.0], "etp": [1.0], "micro_batch": [1.0]}
    return made.prices(sizes).base[0, made.graph.kinds.index(kind)], made


def hidden(window, traffic):
    return traffic - (max(window + SLOWDOWN * traffic, traffic) - window)


@pytest.mark.parametrize("strategy", [SCATTERED, REPLICATED], ids=["scattered", "replicated"])
def test_reductions_hide_behind_weight_gradients_and_second_gathers_behind_input_gradients(strategy):
    told, _ = row(LLAMA, BlockKind.DENSE, SYSTEM, strategy)
    bare, _ = row(LLAMA, BlockKind.DENSE, PLAIN, strategy)
    b = block(LLAMA, BlockKind.DENSE, strategy, seq=WORK.seq)
    beside_weights = gathers = 0.0
    for name in INTO:
        reduction = named(b, f"{name}.grad")
        inputs = [gemm(b, g) for g in reduction.partners]
        weights = [gemm(b, g.replace(".grad", ".weight_grad")) for g in reduction.partners]
        beside_weights += hidden(sum(weights), seconds(reduction))
        if strategy.sequence_parallel:
            gathers += hidden(sum(inputs), seconds(named(b, f"{name}.grad1")))
    assert beside_weights > 0
    assert told[Base.B_BESIDE_W] == pytest.approx(-beside_weights, rel=1e-9)
    assert told[Base.B_TP0] == pytest.approx(bare[Base.B_TP0] - gathers, rel=1e-9)
    others = [c for c in Base if c not in {Base.B_TP0, Base.B_BESIDE_W}]
    assert told[others].tolist() == bare[others].tolist()
    assert bare[Base.B_BESIDE_W] == 0


@pytest.mark.parametrize("strategy", [Strategy(tp=8, sequence_parallel=True, overlap=Overlap(tp=1)), Strategy(cp=8)])
def test_where_traffic_is_cut_up_already_or_there_is_none_nothing_changes(strategy):
    a, b = (evaluate(LLAMA, strategy, system, WORK) for system in (SYSTEM, PLAIN))
    assert a.columns == b.columns


@pytest.mark.parametrize("model", [LLAMA, GPT, MIXTRAL, DEEPSEEK], ids=lambda m: m.name)
def test_a_step_is_shorter_by_what_is_hidden_and_says_so_where_it_went(model):
    strategy = Strategy(tp=8, sequence_parallel=True, pp=2)
    a, b = (evaluate(model, strategy, system, WORK) for system in (SYSTEM, PLAIN))
    assert a.step_time_s < b.step_time_s
    assert a.exposed_comm_tp_s < b.exposed_comm_tp_s
    assert a.backward_s == b.backward_s


def test_weight_gradients_in_a_pass_of_their_own_hide_no_reduction():
    """REPLICATED has no second gather, so that nothing is left to hide."""
    apart = replace(REPLICATED, pp=4, schedule=Schedule.ZB_H1)
    a, b = (evaluate(LLAMA, apart, system, WORK) for system in (SYSTEM, PLAIN))
    assert a.columns == b.columns
    whole = replace(REPLICATED, pp=4)
    assert evaluate(LLAMA, whole, SYSTEM, WORK).step_time_s < evaluate(LLAMA, whole, PLAIN, WORK).step_time_s


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZB_H1], ids=lambda s: s.value)
@pytest.mark.parametrize("strategy", [SCATTERED, REPLICATED], ids=["scattered", "replicated"])
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=lambda m: m.name)
def test_a_replay_hides_as_much(model, strategy, schedule):
    s = replace(strategy, pp=2, schedule=schedule)
    found = replay_step(model, s, SYSTEM, WORK)
    bare = replay_step(model, s, PLAIN, WORK)
    saved = bare.step_time_s - found.step_time_s
    assert saved == pytest.approx(bare.estimate.step_time_s - found.estimate.step_time_s, rel=0.02, abs=1e-6)


def test_a_backward_that_its_host_launches_more_slowly_than_it_runs_gains_nothing():
    slow = replace(ASYNC, dense_layer_s=0.5)
    told, _ = row(LLAMA, BlockKind.DENSE, PLAIN.running(slow), SCATTERED)
    bare, _ = row(LLAMA, BlockKind.DENSE, PLAIN.running(replace(slow, async_tensor_parallel=False)), SCATTERED)
    assert told[Base.B_BESIDE_W] == pytest.approx(0.0, abs=1e-12)
    assert told.tolist() == pytest.approx(bare.tolist(), rel=1e-12)
