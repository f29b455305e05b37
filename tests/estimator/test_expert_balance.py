"""The pass that makes a rank the fullest of its expert group: which sizes it changes, by how much, and which not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.build import build
from estimator.compose import Net
from estimator.cost.collective import nested
from estimator.cost.table import Again, Base, price_table
from estimator.detail.step import replay_step
from estimator.graph import BlockKind
from estimator.imbalance import Routing
from estimator.op import Axis, Group, OpKind, Traffic
from estimator.passes import lower
from estimator.passes.balance import balance
from estimator.passes.shard import shard
from estimator.precision import recipe
from estimator.step import evaluate
from estimator.strategy import RankOrder, Recompute, Strategy
from estimator.tables import NET_SIZES, group_costs, twinned_share
from tests.estimator.cases import DEEPSEEK, FULL, MIXTRAL, SEQ, WORK, h100, published, step

SKEWED = replace(WORK, routing_skew=0.6)
ROUTING = Routing.of(DEEPSEEK, SKEWED)
S = Strategy(ep=8)
LOAD = ROUTING.load_factor(8)
BF16 = recipe("bf16")


def lowered(s=S, routing=ROUTING):
    return lower(build(DEEPSEEK, SEQ), s, BF16, routing)


def test_balanced_routing_without_copies_leaves_the_graph_as_it_is():
    graph = shard(build(DEEPSEEK, SEQ), S)
    assert balance(graph, S, Routing()) is graph


def test_only_rows_of_experts_grow_under_skew():
    even, uneven = lowered(routing=Routing()), lowered()
    assert LOAD > 1.2
    for kind, block in even.blocks.items():
        for a, b in zip(block.ops, uneven.blocks[kind].ops, strict=True):
            expected = [d.size * (LOAD if d.axis is Axis.ROUTED else 1.0) for d in a.dims]
            assert [d.size for d in b.dims] == pytest.approx(expected, rel=1e-15)
            assert b.payload == pytest.approx(
                a.payload * (LOAD if a.group in {Group.EP, Group.ETP} else 1.0), rel=1e-12
            )
            assert [w.elements for w in b.weights] == [w.elements for w in a.weights]
        for name, tensor in block.tensors.items():
            grows = any(d.axis is Axis.ROUTED for d in tensor.dims)
            other = uneven.blocks[kind].tensors[name]
            assert other.elements == pytest.approx(tensor.elements * (LOAD if grows else 1.0), rel=1e-12)


def test_a_rank_holds_its_share_of_the_copies():
    plain, copied = lowered(), lowered(replace(S, redundant_experts=8))
    for a, b in zip(plain.blocks[BlockKind.MOE].ops, copied.blocks[BlockKind.MOE].ops, strict=True):
        if a.kind is OpKind.GROUPED_MATMUL:
            assert (a.dims[0].size, b.dims[0].size) == (2.0, 3.0)  # 16 experts and 8 copies on 8 ranks
            assert [w.elements for w in b.weights] == [1.5 * w.elements for w in a.weights]


def test_what_runs_again_counts_the_flops_of_the_mean_rank():
    def flops(routing):
        prices = price_table(lowered(routing=routing), S, h100(16), BF16, (FULL,))
        return prices.again[0, 0, prices.kinds.index(BlockKind.MOE), Again.FLOPS]

    assert flops(ROUTING) == pytest.approx(flops(Routing()), rel=1e-12)
    even, uneven = (step(DEEPSEEK, Strategy(ep=8, recompute=FULL), 16, work) for work in (WORK, SKEWED))
    assert uneven.hfu * uneven.step_time_s == pytest.approx(even.hfu * even.step_time_s, rel=1e-12)


def test_saved_rows_and_buffers_are_those_of_the_fullest_rank():
    """What grows by the load is what the experts keep: with all of it recomputed, only the buffers grow."""
    moe = Recompute.parse(["moe"])
    for choice, grows in ((Recompute(), True), (moe, False)):
        even, uneven = (step(DEEPSEEK, replace(S, recompute=choice), 16, work) for work in (WORK, SKEWED))
        a, b = even.stages[0].memory, uneven.stages[0].memory
        assert (b["activations"] > a["activations"]) is grows
        assert b["exchange_buffers"] == pytest.approx(a["exchange_buffers"] * LOAD, rel=1e-12)
        assert b["weights"] == a["weights"]


def test_rows_of_a_batch_are_scalars_bit_for_bit():
    sizes = {"ep": np.array([1.0, 8.0, 4.0, 16.0, 2.0]), "micro_batch": np.array([1.0, 2.0, 1.0, 1.0, 4.0])}
    s = Strategy(redundant_experts=16)
    batch = evaluate(DEEPSEEK, s.with_sizes(sizes), h100(16), SKEWED)
    for i in range(5):
        one = evaluate(DEEPSEEK, s.with_sizes({n: float(v[i]) for n, v in sizes.items()}), h100(16), SKEWED)
        assert {n: v[i] for n, v in batch.columns.items()} == one.columns


def test_copies_of_an_expert_sum_their_gradients_over_their_ep_group():
    """16 experts and 8 copies: two thirds of the slots have a twin, half of the ep group away."""
    system, twinned = h100(64), twinned_share(DEEPSEEK, replace(S, redundant_experts=8))
    assert twinned == pytest.approx(2 / 3, rel=1e-15)
    n = dict.fromkeys(NET_SIZES, np.array([1.0])) | {"ep": np.array([8.0]), "dp": np.array([64.0])}
    plain, copied = (group_costs(system, True, RankOrder.TP_CP_DP_PP, n, share)[0] for share in (0.0, twinned))
    alone, both = (nested(Traffic.REDUCE_SCATTER, system, groups) for groups in (
        [(8.0, 8.0)], [(2.0, 4.0), (8.0, 8.0)]))  # fmt: skip
    assert plain[Net.EDP_PER_BYTE] == pytest.approx(float(alone.per_byte), rel=1e-12)
    expected = float(alone.per_byte) / 3 + float(both.per_byte) * 2 / 3
    assert copied[Net.EDP_PER_BYTE] == pytest.approx(expected, rel=1e-12)
    assert copied[Net.EDP_LATENCY] == pytest.approx(float(alone.latency_s + both.latency_s), rel=1e-12)
    shards = (Net.ESHARD_PER_BYTE, Net.ESHARD_LATENCY)  # ZeRO's, here the same ranks
    assert copied[list(shards)].tolist() == copied[[Net.EDP_PER_BYTE, Net.EDP_LATENCY]].tolist()
    others = [i for i in Net if not i.name.startswith(("EDP_", "ESHARD_"))]
    assert copied[others].tolist() == plain[others].tolist()


def test_weights_of_copies_are_priced_like_those_of_experts():
    prices = {r: price_table(lowered(replace(S, redundant_experts=r)), S, h100(16), BF16, ()) for r in (0, 8)}
    columns = (Base.EXPERT_PARAMS, Base.EXPERT_WEIGHT_BYTES)
    moe = prices[0].kinds.index(BlockKind.MOE)
    assert prices[8].base[0, moe, columns].tolist() == (1.5 * prices[0].base[0, moe, columns]).tolist()
    dense = (Base.DENSE_PARAMS, Base.DENSE_WEIGHT_BYTES)
    assert prices[8].base[0, moe, dense].tolist() == prices[0].base[0, moe, dense].tolist()


@pytest.mark.parametrize("copies", [0, 8])
@pytest.mark.parametrize("s", [
    Strategy(ep=8), Strategy(ep=8, pp=2, zero_stage=1), Strategy(tp=8, ep=8, sequence_parallel=True),
], ids=["ep", "pp", "no data parallelism"])  # fmt: skip
def test_a_replay_has_the_same_sizes(s, copies):
    s, model = replace(s, redundant_experts=copies), published("mixtral_8x7b")
    chips = 8 if s.tp == 8 else 16
    even, uneven = (replay_step(model, s, h100(chips), work) for work in (WORK, SKEWED))
    for result in (even, uneven):
        # Nothing overlaps: what is left is the first launches of passes, some microseconds (tests/.../test_detail.py).
        assert result.step_time_s == pytest.approx(result.estimate.step_time_s, rel=5e-4)
    assert uneven.step_time_s > 1.01 * even.step_time_s


def test_mixtral_under_skew_waits_for_its_hottest_expert():
    """Eight experts on eight ranks: the all-to-all of the fullest rank takes its load times as long, latency aside."""
    even, uneven = step(MIXTRAL, S, 8), step(MIXTRAL, S, 8, SKEWED)
    load = Routing.of(MIXTRAL, SKEWED).load_factor(8)
    assert 1.5 < load < 3
    assert 1 < uneven.exposed_comm_ep_s / even.exposed_comm_ep_s < load
