"""Optimizers: what a parameter keeps, what an update moves and multiplies, and who has whole matrices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.compose import Net
from estimator.cost.table import Base
from estimator.cost.work import work
from estimator.detail.step import replay_step
from estimator.graph import BlockKind
from estimator.op import Axis, Component, Dim, Weight
from estimator.optimizers import ITERATIONS, is_matrix, iteration, more_state_bytes, state_bytes
from estimator.precision import recipe
from estimator.step import evaluate
from estimator.strategy import Offload, Optimizer, Overlap, Strategy
from estimator.tables import NET_SIZES, TableBuilder, constants_of
from tests.estimator.cases import DEEPSEEK, GPT, LLAMA, MIXTRAL, TINY, WORK, base, block, h100, published, step

ADAM, ADAM_8BIT, SGD, MUON = Optimizer
BF16 = recipe("bf16")
DENSE, MOE, EMBEDDING, HEAD = BlockKind.DENSE, BlockKind.MOE, BlockKind.EMBEDDING, BlockKind.HEAD


def by(optimizer, **more):
    return Strategy(optimizer=optimizer, **more)


def states(result):
    return sum(stage.memory["optimizer_states"] for stage in result.stages)


def test_state_bytes_of_a_parameter():
    """Master copy of four bytes and moments: two of four, two of one with a scale for 2048, one of four."""
    want = {ADAM: 12.0, ADAM_8BIT: 4 + 2 * (1 + 4 / 2048), SGD: 8.0, MUON: 8.0}
    assert {o: state_bytes(o, BF16) for o in Optimizer} == want
    assert state_bytes(ADAM, recipe("fp8_block")) == 8


def test_states_of_a_rank_are_those_of_its_parameters():
    got = {o: states(step(LLAMA, by(o), 16)) for o in Optimizer}
    params, table = LLAMA.num_parameters(), LLAMA.vocab * LLAMA.hidden
    norms = (2 * LLAMA.num_layers + 1) * LLAMA.hidden
    assert got[ADAM] == 12 * params
    assert got[SGD] == 8 * params
    # Rounding of scales that are no whole numbers.
    assert got[ADAM_8BIT] == pytest.approx((6 + 8 / 2048) * params + (6 - 8 / 2048) * table, rel=1e-12)
    assert got[MUON] == 8 * params + 4 * (2 * table + norms)


def test_muon_takes_matrices_and_leaves_tables_norms_and_biases_to_adam():
    names = {
        kind: {w.name for w in block(GPT, kind).weights if is_matrix(w)} for kind in (DENSE, EMBEDDING, HEAD)
    }  # fmt: skip
    assert names[EMBEDDING] == names[HEAD] == set()
    projections = {f"attention.{x}_proj.weight" for x in "qkvo"}
    assert names[DENSE] == projections | {"mlp.up_proj.weight", "mlp.down_proj.weight"}
    assert is_matrix(
        Weight("e", (Dim(8.0, Axis.EXPERTS), Dim(64.0, Axis.HIDDEN), Dim(32.0, Axis.EXPERT_FFN)), expert=True)
    )
    assert not is_matrix(Weight("b", (Dim(8.0, Axis.EXPERTS), Dim(32.0, Axis.EXPERT_FFN)), expert=True))


@pytest.mark.parametrize("expert", [False, True])
def test_a_step_of_newton_schulz_multiplies_three_times(expert):
    """4 a² b + 2 a³ for a x b with a <= b, whichever comes first."""
    a, b, count = 512.0, 2048.0, 16.0 if expert else 1.0
    lead = (Dim(count, Axis.EXPERTS),) if expert else ()
    for k, n in ((a, b), (b, a)):
        weight = Weight("w", (*lead, Dim(k, Axis.HIDDEN), Dim(n, Axis.FFN)), expert=expert)
        matrices, products = iteration(weight)
        assert matrices == count
        assert sum(work(op, block(LLAMA, DENSE), BF16).flops for op in products) == count * (4 * a * a * b + 2 * a**3)


def test_sizes_of_a_batch_orthogonalise_like_single_ones():
    sizes = np.array([256.0, 4096.0])
    _, products = iteration(Weight("w", (Dim(1024.0, Axis.HIDDEN), Dim(sizes, Axis.FFN))))
    for i, n in enumerate(sizes):
        _, alone = iteration(Weight("w", (Dim(1024.0, Axis.HIDDEN), Dim(float(n), Axis.FFN))))
        for together, one in zip(products, alone, strict=True):
            assert [np.broadcast_to(d.size, 2)[i] for d in together.dims] == [d.size for d in one.dims]


def test_rules_without_matrices_have_no_columns_of_their_own():
    columns = (Base.MORE_STATE_BYTES, Base.DENSE_UPDATE_S, Base.EXPERT_UPDATE_S, Base.MATRIX_PARAMS)
    for optimizer in (ADAM, SGD):
        assert all(base(DEEPSEEK, MOE, column, by(optimizer)) == 0 for column in columns)
    assert base(LLAMA, DENSE, Base.DENSE_UPDATE_S, by(ADAM_8BIT)) == 0
    assert base(LLAMA, EMBEDDING, Base.DENSE_UPDATE_S, by(ADAM_8BIT)) > 0
    assert more_state_bytes(ADAM_8BIT, BF16, block(LLAMA, HEAD).weights[-1], Component.HEAD) == 0


def test_a_rank_with_whole_states_orthogonalises_every_matrix_it_holds():
    """Against the same update with every column of Muon's taken out: momentum and master through memory."""
    result = step(LLAMA, by(MUON), 16)
    c = constants_of(h100(16), BF16, None, optimizer=MUON)
    layers = LLAMA.num_layers * base(LLAMA, DENSE, Base.DENSE_UPDATE_S, by(MUON))
    ends = sum(base(LLAMA, kind, Base.DENSE_UPDATE_S, by(MUON)) for kind in (EMBEDDING, HEAD))
    assert result.optimizer_s == pytest.approx(LLAMA.num_parameters() * c.update_s_per_param + layers + ends, rel=1e-12)
    assert layers > ITERATIONS * 3 * h100(16).chip.gemm_kernel_s * 7 * LLAMA.num_layers  # seven matrices a layer


def test_ranks_that_share_states_split_the_matrices_but_for_those_that_two_of_them_own():
    chips, s = 16, by(MUON, zero_stage=1)
    whole, shared = step(LLAMA, by(MUON), chips), step(LLAMA, s, chips)
    case = {name: np.ones(1) for name in NET_SIZES} | {"dp": np.array([float(chips)])}
    net = TableBuilder(LLAMA, h100(chips), WORK, s).nets(case)[0]
    matrices = LLAMA.num_layers * base(LLAMA, DENSE, Base.MATRIX_PARAMS, s)
    gather = 2 * matrices * net[Net.SHARD_PER_BYTE] + net[Net.SHARD_LATENCY] + net[Net.ESHARD_LATENCY]
    longest = base(LLAMA, DENSE, Base.DENSE_LONGEST_S, s)
    want = whole.optimizer_s / chips + (chips - 1) / chips * longest + gather
    assert shared.optimizer_s == pytest.approx(want, rel=1e-9)
    adam = step(LLAMA, by(ADAM, zero_stage=1), chips)
    assert shared.optimizer_comm_s == adam.optimizer_comm_s  # what comes back are weights, as ever


def test_tensor_parallel_ranks_orthogonalise_their_shards_by_themselves():
    split = {"tp": 4, "sequence_parallel": True}
    whole, shard = (base(LLAMA, DENSE, Base.DENSE_LONGEST_S, by(MUON, **kw)) for kw in ({}, split))
    assert shard < whole


def test_experts_are_orthogonalised_by_their_own_group():
    one, many = (base(MIXTRAL, MOE, Base.EXPERT_UPDATE_S, by(MUON, ep=ep)) for ep in (1, 8))
    assert one > many > 0
    assert base(MIXTRAL, MOE, Base.EXPERT_LONGEST_S, by(MUON, ep=8)) == pytest.approx(many / 3, rel=1e-12)


@pytest.mark.parametrize("optimizer", [ADAM_8BIT, SGD])
def test_lighter_states_are_updated_faster(optimizer):
    assert step(LLAMA, by(optimizer), 16).optimizer_s < step(LLAMA, by(ADAM), 16).optimizer_s
    assert states(step(LLAMA, by(optimizer), 16)) < states(step(LLAMA, by(ADAM), 16))


@pytest.mark.parametrize("optimizer", list(Optimizer))
@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_optimizers_change_the_update_and_nothing_else(model, optimizer):
    s = {"pp": 2, "zero_stage": 1, "overlap": Overlap(dp=1)}
    adam, other = step(model, by(ADAM, **s), 16), step(model, by(optimizer, **s), 16)
    for name in ("pipeline_s", "optimizer_comm_s", "compute_s"):
        assert adam.columns[name] == other.columns[name]


def test_muon_of_a_published_model_takes_little_of_its_step():
    """Moonlight's report finds Newton-Schulz below 1 % of forward and backward on its 16 B model (arXiv:2502.16982)."""
    model = published("mixtral_8x7b")
    s = by(MUON, pp=4, ep=8, zero_stage=1)
    work = replace(WORK, seq=4096, global_batch=1024)
    result = evaluate(model, s, h100(256), work)
    assert 0 < result.optimizer_s < 0.05 * result.step_time_s


def test_momentum_on_the_host_is_out_of_muons_reach():
    with pytest.raises(ValueError, match="optimizer: muon needs momentum on the chip"):
        step(LLAMA, by(MUON, offload=Offload(states=0.5)), 16)
    assert step(LLAMA, by(SGD, offload=Offload(states=0.5)), 16).step_time_s > 0


@pytest.mark.parametrize(("model", "more"), [
    (LLAMA, {"zero_stage": 1}), (DEEPSEEK, {"pp": 2, "ep": 4, "zero_stage": 1}), (LLAMA, {}),
])  # fmt: skip
def test_a_replay_updates_as_long_as_the_estimate(model, more):
    replayed = replay_step(model, by(MUON, **more), h100(16), WORK)
    assert replayed.error == pytest.approx(0.0, abs=0.02)  # as of the same step by Adam
