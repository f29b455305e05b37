"""Where data-parallel groups and pipeline neighbours lie on the machine."""

from dataclasses import replace

import numpy as np
import pytest

from estimator.compose import Net
from estimator.step import evaluate
from estimator.strategy import RankOrder, Schedule, Strategy
from estimator.tables import NET_SIZES, group_costs
from estimator.workload import Workload
from hardware.catalog import cluster
from hardware.link import Collective
from tests.estimator.cases import LLAMA, MIXTRAL

H100 = cluster("dgx_h100", 64)
WORK = Workload(seq=2048, global_batch=64)


def nets(order: RankOrder, **sizes: float) -> np.ndarray:
    whole = {
        "tp": 1.0,
        "cp": 1.0,
        "pp": 1.0,
        "ep": 1.0,
        "etp": 1.0,
        "dp": 1.0,
        "copies": 1.0,
        "dp_replicate": 1.0,
    } | sizes
    return group_costs(H100, False, order, {name: np.array([whole[name]]) for name in NET_SIZES})[0]


def test_pipeline_inside_data_parallel_keeps_hops_on_nvlink_and_sends_gradients_across_nodes() -> None:
    outside = nets(RankOrder.TP_CP_DP_PP, tp=2, pp=4, dp=8)
    inside = nets(RankOrder.TP_CP_PP_DP, tp=2, pp=4, dp=8)
    assert inside[Net.HOP_PER_BYTE] < outside[Net.HOP_PER_BYTE]
    assert inside[Net.DP_PER_BYTE] > outside[Net.DP_PER_BYTE]
    assert inside[Net.DP] == outside[Net.DP] == 8


def test_the_orders_are_one_where_there_is_no_pipeline_or_no_replica() -> None:
    for sizes in ({"tp": 4, "dp": 16}, {"tp": 8, "cp": 2, "pp": 4}):
        first, second = nets(RankOrder.TP_CP_DP_PP, **sizes), nets(RankOrder.TP_CP_PP_DP, **sizes)
        if "pp" not in sizes:
            first, second = first[: Net.HOP_PER_BYTE], second[: Net.HOP_PER_BYTE]  # no hop is taken
        assert first.tolist() == second.tolist()


def test_a_group_that_is_not_evenly_spaced_counts_its_members_per_node() -> None:
    """Context ranks are neighbours, replicas two stages apart: 0 1 and 4 5 of one node, then the next node."""
    odd = nets(RankOrder.TP_CP_PP_DP, cp=2, pp=2, dp=4)
    nic = H100.tiers[1].link.achieved_bytes_per_s(Collective.REDUCE_SCATTER)
    assert odd[Net.DP_PER_BYTE] == pytest.approx(7 / 8 / (4 * nic), rel=1e-14)


def test_the_order_of_ranks_changes_step_time_and_nothing_else() -> None:
    s = Strategy(tp=2, pp=4, zero_stage=1)
    first = evaluate(LLAMA, s, H100, WORK)
    second = evaluate(LLAMA, replace(s, rank_order=RankOrder.TP_CP_PP_DP), H100, WORK)
    assert first.step_time_s != second.step_time_s
    assert first.peak_memory_bytes == second.peak_memory_bytes
    assert first.compute_s == second.compute_s


def test_experts_stay_inside_tp_and_cp_when_the_pipeline_is_inside_dp() -> None:
    s = Strategy(pp=2, ep=4, rank_order=RankOrder.TP_CP_PP_DP)
    with pytest.raises(ValueError, match="rank_order: ranks in the order tp-cp-pp-dp keep experts inside"):
        evaluate(MIXTRAL, s, H100, WORK)


def test_both_copies_of_dualpipe_reduce_their_gradients_and_share_the_states() -> None:
    one = nets(RankOrder.TP_CP_DP_PP, pp=4, dp=16)
    two = nets(RankOrder.TP_CP_DP_PP, pp=4, dp=16, copies=2)
    assert (one[Net.DP], two[Net.DP]) == (16, 32)
    assert two[Net.DP_PER_BYTE] > one[Net.DP_PER_BYTE]
    alone = evaluate(LLAMA, Strategy(tp=16, pp=4, schedule=Schedule.DUALPIPE, zero_stage=1), H100, WORK)
    assert alone.exposed_comm_dp_s > 0  # at dp 1 the copies still meet
