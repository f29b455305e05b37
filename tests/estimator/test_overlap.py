"""Tensor-parallel collectives beside their GEMMs: who is paired with whom, in how many pieces, and what that takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator.cost.collective import collective
from estimator.cost.overlap import SLOWDOWN, Side, beside, partners, pieces, side
from estimator.cost.price import price
from estimator.cost.table import Again, Base
from estimator.graph import BlockKind
from estimator.op import OpKind, Phase, Traffic
from estimator.passes import recompute
from estimator.precision import recipe
from estimator.strategy import Chunks, Overlap, Recompute, Strategy
from tests.estimator.cases import DEEPSEEK, FULL, GPT, LLAMA, MIXTRAL, again, base, block, h100, lowered, named, step

SYSTEM, BF16 = h100(64), recipe("bf16")
TP8 = Strategy(tp=8, sequence_parallel=True)
ODD = Chunks(attention_in=1, attention_out=2, mlp_in=3, mlp_out=5)
QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


def cut(num, **more):
    return replace(TP8, tp_chunks=Chunks.parse(str(num)), **more)


def seconds(op, num=1):
    cost = collective(op.collective, SYSTEM, 8.0, 1.0)
    return cost.per_byte * op.payload + num * cost.latency_s


def gemm(b, name, num=1):
    op = named(b, name)
    rows, *others = op.dims
    piece = op.but(dims=(rows._replace(size=rows.size / num), *others))
    return num * price(piece, b, SYSTEM.chip, BF16).seconds


def in_pieces(b, name, num):
    """Pieces fill one another's waves; each reads its operands, all weights among them."""
    op = named(b, name)
    m, k, n = (d.size for d in op.dims)
    memory_s = (
        num * 2.0 * (m / num * k + k * n + m / num * n) / (SYSTEM.chip.hbm_bytes_per_s * SYSTEM.chip.hbm_efficiency)
    )
    return max(gemm(b, name), memory_s)


def test_a_collective_is_paired_with_the_gemms_that_read_it_or_make_its_input():
    found = partners(block(LLAMA, BlockKind.DENSE, TP8))
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    forward = {
        "attention.q_proj.gather": QKV, "attention.o_proj.reduce": ("attention.o_proj",),
        "mlp.gate_proj.gather": gate_up, "mlp.down_proj.reduce": ("mlp.down_proj",),
    }  # fmt: skip
    duals = {f"{name}.grad": tuple(f"{g}.grad" for g in gemms) for name, gemms in forward.items()}
    again = {f"{name}.grad1": duals[f"{name}.grad"] for name in forward if name.endswith("gather")}
    assert found == forward | duals | again


@pytest.mark.parametrize("model", [LLAMA, GPT, MIXTRAL, DEEPSEEK], ids=lambda m: m.name)
@pytest.mark.parametrize("strategy", [TP8, Strategy(tp=8)], ids=["scattered", "replicated"])
def test_every_split_gemm_has_a_collective_of_its_phase_and_no_other_op_has(model, strategy):
    for b in lowered(model, strategy).blocks.values():
        # The dual of a plain all-reduce is nothing, so that backward has GEMMs without a collective.
        for phase in (Phase.FORWARD, Phase.BACKWARD) if strategy.sequence_parallel else (Phase.FORWARD,):
            ops = list(b.of_phase(phase))
            paired = {name for op in ops for name in op.partners}
            split = {op.name for op in ops if op.kind is OpKind.MATMUL and _is_split(op)}
            assert paired == split
            assert all(op.kind is OpKind.COLLECTIVE for op in ops if op.partners)


def _is_split(op):
    return any(dim.axis.value in {"heads", "kv_heads", "ffn", "vocab"} for dim in op.dims)


def test_gathers_run_ahead_reductions_behind_and_what_nobody_waits_for_in_one_piece():
    b = block(LLAMA, BlockKind.DENSE, TP8)
    sides = {op.name: side(op) for op in b.ops if op.partners}
    ahead = {name for name, where in sides.items() if where is Side.AHEAD}
    whole = {name for name, where in sides.items() if where is Side.WHOLE}
    assert ahead == {"attention.q_proj.gather", "mlp.gate_proj.gather", "attention.o_proj.reduce.grad",
                     "mlp.down_proj.reduce.grad"}  # fmt: skip
    assert whole == {"attention.q_proj.gather.grad1", "mlp.gate_proj.gather.grad1"}


def test_pieces_follow_the_place_in_the_layer_in_both_directions():
    b = block(LLAMA, BlockKind.DENSE, TP8)
    told = {op.name: pieces(op, ODD) for op in b.ops if op.partners}
    assert told == {
        "attention.q_proj.gather": 1, "attention.q_proj.gather.grad": 1, "attention.q_proj.gather.grad1": 1,
        "attention.o_proj.reduce": 2, "attention.o_proj.reduce.grad": 2,
        "mlp.gate_proj.gather": 3, "mlp.gate_proj.gather.grad": 3, "mlp.gate_proj.gather.grad1": 1,
        "mlp.down_proj.reduce": 5, "mlp.down_proj.reduce.grad": 5,
    }  # fmt: skip


def test_shared_experts_count_as_an_mlp():
    b = block(DEEPSEEK, BlockKind.MOE, TP8)
    assert pieces(named(b, "shared.gate_proj.gather"), ODD) == 3
    assert pieces(named(b, "shared.down_proj.reduce"), ODD) == 5


@pytest.mark.parametrize("num", [2, 4, 8])
@pytest.mark.parametrize("seq", [512, 4096, 65536])
def test_a_pair_takes_one_piece_and_the_longer_of_its_halves(num, seq):
    b = block(LLAMA, BlockKind.DENSE, TP8, seq=seq)
    expected = 0.0
    for name, gemms in partners(b).items():
        if "grad" in name:
            continue
        t = seconds(named(b, name), num)
        whole, cut_s = sum(gemm(b, g) for g in gemms), sum(in_pieces(b, g, num) for g in gemms)
        if name.endswith("gather"):
            exposed = max(t / num - whole / 8, 0.0)  # beside the rows of this rank, one in eight
            expected += exposed + max(cut_s, t - exposed) - whole
        else:
            hidden = t - t / num
            expected += t / num + max(cut_s + SLOWDOWN * hidden, hidden) - whole
    assert base(LLAMA, BlockKind.DENSE, Base.F_TP1, cut(num), seq=seq) == pytest.approx(expected, rel=1e-9)


def test_backward_hides_the_second_gather_and_all_but_the_last_piece_of_the_reduction():
    num, seq = 4, 65536
    b = block(LLAMA, BlockKind.DENSE, TP8, seq=seq)
    expected = 0.0
    for first, again_ in (("attention.o_proj.reduce", ""), ("mlp.down_proj.reduce", ""),
                          ("attention.q_proj.gather", ".grad1"), ("mlp.gate_proj.gather", ".grad1")):  # fmt: skip
        t = seconds(named(b, f"{first}.grad"), num)
        hidden = t - t / num + (seconds(named(b, f"{first}{again_}")) if again_ else 0.0)
        gemms = partners(b)[f"{first}.grad"]
        whole, cut_s = sum(gemm(b, g) for g in gemms), sum(in_pieces(b, g, num) for g in gemms)
        ahead = not again_
        exposed = max(t / num - whole / 8, 0.0) if ahead else t / num
        hidden += t / num - exposed
        expected += exposed + max(cut_s + SLOWDOWN * hidden * (not ahead), hidden) - whole
    assert base(LLAMA, BlockKind.DENSE, Base.B_TP1, cut(num), seq=seq) == pytest.approx(expected, rel=1e-9)


def test_one_piece_hides_beside_the_rows_of_its_own_rank_alone():
    off, on = (base(LLAMA, BlockKind.DENSE, c, cut(1)) for c in (Base.F_TP0, Base.F_TP1))
    b = block(LLAMA, BlockKind.DENSE, TP8)
    gathers = {name: gemms for name, gemms in partners(b).items() if name.endswith("gather")}
    own = {name: sum(gemm(b, g) for g in gemms) / 8 for name, gemms in gathers.items()}
    assert off - on == pytest.approx(sum(min(seconds(named(b, name)), s) for name, s in own.items()), rel=1e-9)


def test_more_pieces_pay_their_latencies():
    few, many = (base(LLAMA, BlockKind.DENSE, Base.F_TP1, cut(n), seq=512) for n in (4, 16))
    b = block(LLAMA, BlockKind.DENSE, TP8, seq=512)
    latency = sum(seconds(op, 16) - seconds(op, 4) for op in b.of_phase(Phase.FORWARD) if op.partners)
    assert many - few > (1 - 1 / 16) * SLOWDOWN * latency > 0


def test_recompute_runs_its_collectives_in_the_same_pieces():
    forward = base(LLAMA, BlockKind.DENSE, Base.F_TP1, cut(2))
    assert again(LLAMA, BlockKind.DENSE, Again.R_TP1, cut(2), FULL) == forward


def test_a_collective_whose_gemms_are_of_another_phase_is_exposed():
    choice = Recompute.parse("mla_up_proj")
    b = recompute(lowered(DEEPSEEK, TP8), choice).blocks[BlockKind.MOE]
    told = [op.name for op in b.of_phase(Phase.RECOMPUTE) if op.partners]
    assert told == ["attention.q_b_proj.gather", "attention.kv_b_proj.gather"]
    gathers = sum(seconds(named(b, name)) for name in told)
    assert again(DEEPSEEK, BlockKind.MOE, Again.R_TP0, TP8, choice) == pytest.approx(gathers, rel=1e-12)


def test_without_tensor_parallelism_nothing_is_added():
    for column in (Base.F_TP0, Base.F_TP1, Base.B_TP0, Base.B_TP1):
        assert base(LLAMA, BlockKind.DENSE, column, Strategy(tp_chunks=ODD)) == 0.0


def test_chunks_change_nothing_where_traffic_is_not_overlapped():
    a, b = (step(LLAMA, s, 16) for s in (TP8, replace(TP8, tp_chunks=ODD)))
    assert a.columns == b.columns
    on = Overlap(tp=1)
    a, b = (step(LLAMA, replace(s, overlap=on), 16) for s in (TP8, replace(TP8, tp_chunks=ODD)))
    assert a.step_time_s != b.step_time_s
    assert a.peak_memory_bytes == b.peak_memory_bytes


def test_traffic_longer_than_its_window_is_what_remains():
    assert beside(2.0, 1.0) == pytest.approx(SLOWDOWN)
    assert beside(1.0, 3.0) == 2.0


def test_traffic_kinds_of_pairs_are_gathers_and_reductions():
    kinds = {op.collective for op in block(LLAMA, BlockKind.DENSE, TP8).ops if op.partners}
    assert kinds == {Traffic.ALL_GATHER, Traffic.REDUCE_SCATTER}
