"""Host time of software: a layer lasts at least as long as it is launched, and a replay says the same."""

from dataclasses import replace

import pytest

import spaces
from estimator.cost.host import launch_seconds
from estimator.cost.table import Base
from estimator.detail.step import replay_step
from estimator.graph import BlockKind
from estimator.model_io import load_model
from estimator.step import evaluate
from estimator.strategy import CudaGraph, Overlap, Strategy
from estimator.tables import TableBuilder
from estimator.workload import Workload
from hardware.catalog import cluster
from hardware.software import SoftwareSpec

MIXTRAL = load_model("mixtral_8x7b", [spaces.MODELS])
LLAMA = load_model("llama3_8b", [spaces.MODELS])
SLOW = SoftwareSpec(name="slow", dense_layer_s=0.5, routed_layer_s=1.0)
H100 = cluster("dgx_h100", 8)
WORK = Workload(seq=256, global_batch=8)
ONE = dict.fromkeys(("tp", "cp", "ep", "etp", "micro_batch"), 1.0)


def builder(model, system, **options):
    return TableBuilder(model, system, WORK, Strategy(**options))


def waits(model, kind, system, **options):
    """Seconds of forward, backward and weight gradients of a layer, the host's included."""
    made = builder(model, system, **options)
    row = made.prices({name: [size] for name, size in ONE.items()}).base[0, made.graph.kinds.index(kind)]
    columns = (Base.F_COMP, Base.F_HOST, Base.B_COMP, Base.B_HOST, Base.W_COMP, Base.W_HOST)
    return sum(float(row[column]) for column in columns)


@pytest.mark.parametrize(("model", "kind", "layer"), [(LLAMA, BlockKind.DENSE, 0.5), (MIXTRAL, BlockKind.MOE, 1.0)])
def test_a_layer_takes_what_its_software_says(model, kind, layer):
    # Kernels of so few tokens take milliseconds: every pass waits for its launches.
    assert waits(model, kind, H100.running(SLOW)) == pytest.approx(layer, rel=1e-12)


def test_what_is_captured_costs_the_host_nothing():
    slow = H100.running(SLOW)
    whole, half = (
        waits(LLAMA, BlockKind.DENSE, slow, cuda_graph=scope) for scope in (CudaGraph.LAYER, CudaGraph.ATTENTION)
    )
    assert whole < half < waits(LLAMA, BlockKind.DENSE, slow)


def test_traffic_is_waited_for_meanwhile():
    """Of a step that is launched more slowly than it runs, slower links change little: its ends."""
    slow = H100.running(SLOW)
    links = [replace(t, link=replace(t.link, bytes_per_s=t.link.bytes_per_s / 2)) for t in slow.tiers]
    s = Strategy(tp=8, sequence_parallel=True)
    fast, throttled = (
        float(evaluate(LLAMA, s, system, WORK).step_time_s) for system in (slow, replace(slow, tiers=tuple(links)))
    )
    bare = float(evaluate(LLAMA, s, H100, WORK).step_time_s)
    assert throttled == pytest.approx(fast, rel=1e-3)
    assert fast > 10 * bare


def test_embedding_and_head_are_no_layers():
    made = builder(LLAMA, H100.running(SLOW))
    seconds = {kind: launch_seconds(block, H100.running(SLOW)) for kind, block in made.graph.blocks.items()}
    assert seconds[BlockKind.HEAD] == seconds[BlockKind.EMBEDDING] == H100.chip.launch_s < seconds[BlockKind.DENSE]


@pytest.mark.parametrize(
    "strategy", [Strategy(), Strategy(tp=2), Strategy(pp=4), Strategy(tp=2, overlap=Overlap(dp=1))]
)
def test_a_replay_waits_for_the_host_as_long(strategy):
    result = replay_step(LLAMA, strategy, H100.running(SLOW), WORK)
    # The host runs ahead from one pass into the next, which the estimate does not let it.
    assert result.step_time_s == pytest.approx(result.estimate.step_time_s, rel=0.02)
