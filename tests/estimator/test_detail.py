"""The replay of a step against its estimate: equal where nothing overlaps, close where it does, and where they part."""

from dataclasses import replace

import numpy as np
import pytest

import spaces
from estimator.detail import unroll as unrolling
from estimator.detail.step import replay_step
from estimator.detail.unroll import unroll
from estimator.model_io import load_model
from estimator.step import evaluate
from estimator.strategy import Module, Offload, Overlap, Recompute, RecomputeKind, Schedule, Strategy
from estimator.tasks import CATEGORIES, Category
from estimator.timeline import critical_path
from estimator.workload import Workload
from hardware.catalog import cluster
from tests.estimator.cases import DEEPSEEK, WORK, h100

DENSE, MOE = (load_model(name, [spaces.MODELS]) for name in ("llama3_8b", "mixtral_8x7b"))
FULL = Recompute(kind=RecomputeKind.FULL)
NORMS = Recompute(kind=RecomputeKind.SELECTIVE, modules=frozenset({Module.LAYERNORM, Module.MLP_ACTIVATION}))


def replayed(strategy, *, model=DENSE, chips=16, batch=32, seq=4096):
    return replay_step(model, strategy, cluster("dgx_h100", chips), Workload(seq=seq, global_batch=batch))


BLOCKING = [
    Strategy(),
    Strategy(zero_stage=1),
    Strategy(zero_stage=3, recompute=FULL),
    Strategy(tp=2, sequence_parallel=True, recompute=NORMS),
    Strategy(tp=4),
    Strategy(cp=2),
    Strategy(pp=4, schedule=Schedule.GPIPE),
    Strategy(pp=4),
    Strategy(pp=4, schedule=Schedule.ZB_H1),
    Strategy(pp=4, tp=2, sequence_parallel=True, zero_stage=2),
    Strategy(pp=2, recompute=Recompute(kind=RecomputeKind.BLOCK), recompute_layers=3),
    Strategy(pp=2, schedule=Schedule.DUALPIPE),
    *(Strategy(pp=4, schedule=s) for s in (Schedule.ZB_H2, Schedule.ZB_1P, Schedule.ZB_2P)),
    *(Strategy(pp=4, vpp=2, schedule=s) for s in (Schedule.V_MIN, Schedule.V_HALF, Schedule.DUALPIPE_V)),
    Strategy(pp=4, vpp=2, schedule=Schedule.BREADTH_FIRST),
    Strategy(pp=2, vpp=2, schedule=Schedule.INTERLEAVED, interleave_group=4),
]


@pytest.mark.parametrize(
    "strategy", BLOCKING, ids=lambda s: f"tp{s.tp}cp{s.cp}pp{s.pp}{s.schedule.value}z{s.zero_stage}"
)
def test_a_step_that_hides_nothing_replays_to_its_estimate(strategy):
    result = replayed(strategy)
    # What is left: a pass that waits for a neighbour also waits for its first launch, some microseconds.
    assert result.step_time_s == pytest.approx(result.estimate.step_time_s, rel=5e-4)


def test_the_rank_with_most_gradients_may_be_done_before_the_last():
    zb_v = Strategy(pp=4, vpp=2, schedule=Schedule.ZB_V)
    alone = replayed(zb_v, chips=4, batch=8)
    assert alone.step_time_s == pytest.approx(alone.estimate.step_time_s, rel=5e-4)
    # Both ends of the model are on rank 0, which ends first; the estimate adds its traffic to the end of the last.
    shared = replayed(zb_v)
    assert 0.98 < shared.step_time_s / shared.estimate.step_time_s < 1.0


@pytest.mark.parametrize("overlap", [Overlap(dp=1), Overlap(dp=1, pp=1), Overlap(tp=1, dp=1, pp=1)])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("pp", "vpp", "schedule"), [
    (1, 1, Schedule.ONE_F_ONE_B), (4, 1, Schedule.ONE_F_ONE_B), (4, 2, Schedule.INTERLEAVED), (2, 1, Schedule.DUALPIPE),
])  # fmt: skip
def test_overlap_replays_to_within_a_twentieth(overlap, zero_stage, pp, vpp, schedule):
    strategy = Strategy(
        tp=2, pp=pp, vpp=vpp, schedule=schedule, sequence_parallel=True, zero_stage=zero_stage, overlap=overlap
    )
    result = replayed(strategy, batch=64, seq=8192)
    assert abs(result.error) < 0.05  # what finalists are held to


@pytest.mark.parametrize("overlap", [Overlap(), Overlap(ep=1), Overlap(ep=1, dp=1)])
@pytest.mark.parametrize(("pp", "vpp", "schedule"), [
    (1, 1, Schedule.ONE_F_ONE_B), (4, 4, Schedule.INTERLEAVED), (4, 1, Schedule.DUALPIPE),
])  # fmt: skip
def test_expert_traffic_replays_to_within_a_twentieth(overlap, pp, vpp, schedule):
    strategy = Strategy(pp=pp, vpp=vpp, ep=8, schedule=schedule, zero_stage=1, overlap=overlap, recompute=FULL)
    assert abs(replayed(strategy, model=MOE, chips=64, batch=256).error) < 0.05


def test_expert_traffic_hides_in_pairs_of_passes_only():
    strategy = Strategy(pp=4, ep=8, schedule=Schedule.DUALPIPE, overlap=Overlap(ep=1))
    step = replayed(strategy, model=MOE, chips=64, batch=256)
    tasks, timeline = step.timeline.tasks, step.timeline
    is_compute = np.array([s.computes for s in tasks.streams])[tasks.stream]
    exchange = np.flatnonzero((tasks.category == CATEGORIES.index(Category.EP)) & (tasks.device == 0))
    kernels = np.flatnonzero(is_compute & (tasks.device == 0))
    in_first_pass = exchange[tasks.scope[exchange] == tasks.scope[exchange[0]]]
    beside = [
        ((timeline.start[kernels] < timeline.end[i]) & (timeline.end[kernels] > timeline.start[i])).any()
        for i in exchange
    ]
    assert not any(beside[: len(in_first_pass)])
    assert sum(beside) > len(beside) / 2


@pytest.mark.parametrize("strategy", [
    Strategy(), Strategy(recompute=FULL), Strategy(tp=4, sequence_parallel=True, recompute=NORMS), Strategy(pp=4),
    Strategy(pp=4, vpp=2, schedule=Schedule.INTERLEAVED), Strategy(pp=4, zero_stage=3, overlap=Overlap(dp=1)),
    Strategy(pp=4, schedule=Schedule.ZB_H1, recompute=FULL), Strategy(pp=4, schedule=Schedule.GPIPE, recompute=FULL),
])  # fmt: skip
def test_the_lifetimes_of_tensors_peak_where_memory_says(strategy):
    result = replayed(strategy)
    peak = max(result.peak_memory_bytes)
    # Op by op against the widest op of each block at once: a little below; above where a split backward's own
    # gradients meet those that wait for their weight gradients (ZB-H1).
    assert 0.93 < peak / result.estimate.peak_memory_bytes < 1.05


def test_nothing_is_left_in_memory_after_a_step():
    for strategy in (Strategy(pp=4, schedule=Schedule.ZB_H1, recompute=NORMS), Strategy(pp=2, zero_stage=3)):
        tasks = unroll(DENSE, strategy, cluster("dgx_h100", 16), Workload(seq=4096, global_batch=32))
        assert tasks.alloc_bytes.sum() == pytest.approx(tasks.free_bytes.sum(), rel=1e-12)


@pytest.mark.parametrize(("overlap", "rel"), [
    (Overlap(), 1e-9), (Overlap(tp=1, dp=1, pp=1), 1e-3),  # a bucket leaves at the end of the nearest task
])  # fmt: skip
def test_joined_kernels_change_the_number_of_tasks_and_not_the_time(overlap, rel, monkeypatch):
    strategy = Strategy(tp=2, pp=4, vpp=2, schedule=Schedule.INTERLEAVED, sequence_parallel=True, overlap=overlap)
    fine = replayed(strategy)
    monkeypatch.setattr(unrolling, "COARSE_ABOVE", 0)
    coarse = replayed(strategy)
    assert len(coarse.timeline.tasks) < 0.95 * len(fine.timeline.tasks)
    assert coarse.step_time_s == pytest.approx(fine.step_time_s, rel=rel)
    assert max(coarse.peak_memory_bytes) == pytest.approx(max(fine.peak_memory_bytes), rel=0.02)


def test_the_critical_path_of_a_step_sums_to_its_span():
    step = replayed(Strategy(tp=2, pp=4, sequence_parallel=True, zero_stage=1, overlap=Overlap(dp=1, pp=1)))
    assert sum(critical_path(step.timeline).seconds.values()) == pytest.approx(step.timeline.span_s, rel=1e-12)


def test_every_kernel_of_every_micro_batch_is_there():
    strategy = Strategy(pp=4, schedule=Schedule.ZB_H1)
    system, work = cluster("dgx_h100", 16), Workload(seq=4096, global_batch=32)
    tasks = unroll(DENSE, strategy, system, work)
    name = np.array(tasks.names)[tasks.name]
    num_layers_run = DENSE.num_layers * 32 // 4  # micro-batches of one data-parallel rank
    for op in ("attention.q_proj", "attention.core.grad", "mlp.down_proj.weight_grad"):
        assert (name == op).sum() == num_layers_run
    estimate = evaluate(DENSE, strategy, system, work)
    busiest = (tasks.category <= CATEGORIES.index(Category.BACKWARD)) & (tasks.device == estimate.finishing_rank)
    assert tasks.seconds[busiest].sum() == pytest.approx(estimate.compute_s, rel=1e-9)


def test_a_step_too_large_to_replay_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(unrolling, "MAX_TASKS", 1000)
    with pytest.raises(ValueError, match="must unroll to at most 1000 tasks, but 8 micro-batches make"):
        replayed(Strategy(pp=4))


def test_an_illegal_strategy_is_refused_with_its_rule():
    with pytest.raises(ValueError, match="must be divisible by tp"):
        replayed(Strategy(tp=3))


def test_layers_recomputed_by_chunk_and_a_bucket_of_the_experts_replay_to_their_estimate():
    block = Recompute(kind=RecomputeKind.BLOCK)
    uneven = Strategy(pp=4, recompute=block, recompute_per_chunk=(8, 5, 2, 0))
    result = replayed(uneven)
    assert result.step_time_s == pytest.approx(result.estimate.step_time_s, rel=5e-4)
    experts = Strategy(pp=2, ep=4, zero_stage=1, overlap=Overlap(dp=1), expert_bucket_bytes=10**9)
    result = replayed(experts, model=MOE, chips=16, batch=64)
    assert abs(result.error) < 0.05
    together = replayed(Strategy(pp=2, ep=4, zero_stage=1, overlap=Overlap(dp=1)), model=MOE, chips=16, batch=64)
    assert len(result.timeline.tasks) != len(together.timeline.tasks)


def test_tokens_are_looked_up_before_the_layer_that_predicts_further_ahead_reads_them():
    tasks = unroll(DEEPSEEK, Strategy(pp=2), h100(16), WORK)
    last = tasks.scopes.index("F0 chunk 1")
    names = [tasks.names[i] for i in tasks.name[tasks.scope == last]]
    starts = [names.index(name) for name in ("lm_head", "embed", "mtp.hidden_norm")]
    assert starts == sorted(starts)


FEW_BLOCKS = [
    (DENSE, Strategy(pp=4, layout=(0, 16, 16, 0))),
    (replace(DENSE, num_layers=4), Strategy(pp=4)),
    (replace(MOE, num_layers=8), Strategy(pp=8, tp=4, ep=2, sequence_parallel=True, schedule=Schedule.DUALPIPE)),
]


@pytest.mark.parametrize(("model", "strategy"), FEW_BLOCKS, ids=["no layers", "one layer", "one layer a direction"])
def test_chunks_of_few_blocks_fetch_weights_no_further_ahead_than_others(model, strategy):
    strategy = replace(strategy, zero_stage=3, overlap=Overlap(dp=1), recompute=FULL)
    result = replayed(strategy, model=model, chips=64, batch=128, seq=512)
    peaks = zip(result.peak_memory_bytes, result.estimate.stages, strict=True)
    assert max(peak / sum(stage.memory.values()) for peak, stage in peaks) < 1.1


KEPT = [
    Strategy(zero_stage=1, dp_replicate=2),
    Strategy(zero_stage=2, dp_replicate=2, overlap=Overlap(dp=1)),
    Strategy(pp=2, zero_stage=3, dp_replicate=2, overlap=Overlap(dp=1, pp=1)),
    Strategy(zero_stage=3, reshard_after_forward=0, overlap=Overlap(dp=1)),
    Strategy(zero_stage=3, prefetch_blocks=0, overlap=Overlap(dp=1)),
    Strategy(zero_stage=3, prefetch_blocks=3, overlap=Overlap(dp=1)),
    Strategy(pp=4, offload=Offload(activations=0.25)),
    Strategy(zero_stage=3, overlap=Overlap(dp=1), offload=Offload(parameters=1, gradients=1, states=1)),
    Strategy(pp=4, zero_stage=2, offload=Offload(gradients=0.5, states=0.5)),
]


@pytest.mark.parametrize("strategy", KEPT, ids=lambda s: f"pp{s.pp}z{s.zero_stage}r{s.dp_replicate}")
def test_what_is_sharded_gathered_or_offloaded_replays_to_within_a_twentieth(strategy):
    result = replayed(strategy)
    assert abs(result.error) < 0.05  # what finalists are held to
    tasks = result.timeline.tasks
    assert tasks.alloc_bytes.sum() == pytest.approx(tasks.free_bytes.sum(), rel=1e-12)


def test_offloaded_activations_leave_the_chip_in_a_replay_too():
    told = [replayed(Strategy(pp=4, offload=Offload(activations=x))) for x in (0, 1)]
    peaks = [max(result.peak_memory_bytes) for result in told]
    assert peaks[1] < peaks[0]
    # Where backward follows at once, two blocks of a rank's eight stay, which the estimate sends as well.
    assert peaks[1] == pytest.approx(told[1].estimate.peak_memory_bytes, rel=0.1)
    moved = told[1].timeline.tasks
    assert (moved.category == CATEGORIES.index(Category.OFFLOAD)).any()


def test_without_offload_a_device_has_no_streams_of_its_host():
    names = {stream.name for stream in unroll(DENSE, Strategy(), h100(16), Workload(seq=4096, global_batch=32)).streams}
    assert not names & {"down", "up", "host"}
