"""The table of passes is the order that runs, and every graph goes through it the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.build import build
from estimator.imbalance import Routing
from estimator.op import Axis, OpKind, Phase
from estimator.passes import PASSES, Lowering, Stage, lower, recompute, run_to
from estimator.passes.shard import shard
from estimator.precision import recipe
from estimator.strategy import CudaGraph, Fusion, Recompute, Strategy
from tests.estimator.cases import DEEPSEEK, LLAMA, MIXTRAL, SEQ, WORK

NAMES = [p.name for p in PASSES]
RICH = Strategy(
    tp=2, cp=2, ep=4, etp=2, micro_batch=3, sequence_parallel=True, precision="fp8_block", fusion=frozenset(Fusion),
    recompute=Recompute.parse("layernorm+moe_act"), shared_expert_overlap=True, cuda_graph=CudaGraph.ATTENTION,
    redundant_experts=4,
)  # fmt: skip


def by(strategy=RICH, model=DEEPSEEK):
    skewed = Routing.of(model, replace(WORK, routing_skew=0.3)) if model.moe else Routing.of(model, WORK)
    return Lowering(strategy=strategy, recipe=recipe(strategy.precision), routing=skewed)


def test_the_order_is_split_fuse_optimise_analyse():
    assert [p.stage for p in PASSES] == sorted((p.stage for p in PASSES), key=list(Stage).index)
    splits = ["tp", "ep", "cp", "pp", "dp", "collectives"]
    assert [name for name in NAMES if name in splits] == splits
    behind = ["collectives", "zero", "offload", "fuse", "precision", "mtp", "shared_experts", "recompute", "flops",
              "roofline", "communication", "training"]  # fmt: skip
    assert [name for name in NAMES if name in behind] == behind
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("model", [LLAMA, MIXTRAL, DEEPSEEK], ids=lambda m: m.name)
def test_the_table_is_what_lowering_runs(model):
    graph, to = build(model, SEQ), by(model=model)
    if model is LLAMA:
        to = replace(to, strategy=replace(RICH, ep=1, etp=1, redundant_experts=0, shared_expert_overlap=False))
    whole = lower(graph, to.strategy, to.recipe, to.routing)
    assert run_to(graph, to, "cuda_graphs").blocks == whole.blocks
    assert run_to(graph, to, "recompute").blocks == recompute(whole, to.strategy.recompute).blocks
    assert run_to(graph, to, "training").blocks == run_to(graph, to, "recompute").blocks


def test_each_split_divides_what_it_says_and_leaves_the_others():
    graph, to = build(DEEPSEEK, SEQ), by()
    ones = {"tp": 1, "ep": 1, "etp": 1, "cp": 1, "micro_batch": 1}
    done = {}
    for name, sizes in (("tp", ("tp",)), ("ep", ("ep", "etp")), ("cp", ("cp",)), ("dp", ("micro_batch",))):
        done |= {size: getattr(RICH, size) for size in sizes}
        want = shard(graph, RICH.with_sizes({**ones, **done}))
        assert run_to(graph, to, name).blocks == want.blocks, name
    assert run_to(graph, to, "pp").blocks == run_to(graph, to, "cp").blocks


def test_every_pass_that_changes_ops_changes_some_and_others_change_none():
    graph, to = build(DEEPSEEK, SEQ), by()
    before = graph.blocks
    for p in PASSES:
        behind = run_to(graph, to, p.name).blocks
        assert (behind != before) == (p.run is not None), p.name
        assert (p.run is None) == bool(p.acts), p.name
        before = behind


def test_fusion_comes_behind_every_split():
    """Rules see the ops of a shard: nothing behind them divides a dim."""
    graph, to = build(LLAMA, SEQ), by(Strategy(tp=4, fusion=frozenset(Fusion)), LLAMA)
    fused = run_to(graph, to, "fuse")
    ffn = {d.size for b in fused.blocks.values() for op in b.ops for d in op.dims if d.axis is Axis.FFN}
    assert ffn == {LLAMA.ffn * 2 / 4, LLAMA.ffn / 4}  # gate and up in one; down
    assert not any(op.phase is not Phase.FORWARD for b in fused.blocks.values() for op in b.ops)
    assert any(op.kind is OpKind.COLLECTIVE for b in fused.blocks.values() for op in b.ops)


def test_a_pass_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="got 'fsue'; did you mean 'fuse'"):
        run_to(build(LLAMA, SEQ), by(), "fsue")
