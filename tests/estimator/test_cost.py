"""Prices of single ops: the tile model, the roofline, and the bounds that no price may cross."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.cost.overlap import SLOWDOWN
from estimator.cost.price import BACKENDS, MEMORY_TRAFFIC, Confidence, Roofline, TileModel, price
from estimator.cost.table import Again, Base
from estimator.cost.work import work
from estimator.graph import Block, BlockKind
from estimator.op import Axis, Component, Dim, Op, OpKind, Phase
from estimator.precision import RECIPES, recipe
from estimator.strategy import ContextParallel, Strategy
from hardware import catalog
from tests.estimator.cases import DEEPSEEK, FULL, LLAMA, MIXTRAL, TINY, again, base, block, h100, lowered, named

CHIPS = [catalog.chip(name) for name in catalog.chip_names()]
H100 = catalog.chip("h100-80g-sxm")
BF16 = recipe("bf16")
EMPTY = Block(kind=BlockKind.DENSE, ops=(), tensors={}, input="")
sizes = st.integers(1, 20_000).map(float)


def gemm(m, k, n, groups=None):
    dims = tuple(Dim(float(x), Axis.HIDDEN) for x in ((m, k, n) if groups is None else (groups, groups * m, k, n)))
    kind = OpKind.MATMUL if groups is None else OpKind.GROUPED_MATMUL
    return Op(name="gemm", kind=kind, component=Component.MLP, dims=dims)


def seconds(op, chip=H100, r=BF16):
    return price(op, EMPTY, chip, r)


@given(sizes, sizes, sizes, st.sampled_from([c for c in CHIPS if BF16.gemm in c.matrix_flops_per_s]))
def test_a_matrix_product_is_never_above_peak_nor_above_bandwidth(m, k, n, chip):
    p = seconds(gemm(m, k, n), chip)
    assert p.seconds >= 2 * m * k * n / chip.peak(BF16.gemm)
    assert p.seconds >= 2 * (m * k + k * n + m * n) / chip.hbm_bytes_per_s


@given(sizes, sizes, sizes, st.integers(0, 2), st.integers(1, 500))
def test_a_matrix_product_takes_no_less_time_when_any_size_grows(m, k, n, which, by):
    larger = [m, k, n]
    larger[which] += by
    assert seconds(gemm(*larger)).seconds >= seconds(gemm(m, k, n)).seconds


@given(st.integers(1, 64), sizes, sizes, sizes)
def test_grouped_products_take_no_less_time_with_more_groups_and_more_than_one_product(groups, m, k, n):
    one = seconds(gemm(m, k, n, groups)).compute_s
    assert seconds(gemm(m, k, n, groups + 1)).compute_s >= one
    assert seconds(gemm(m, k, n, 1)).compute_s == pytest.approx(TileModel.GROUPED * seconds(gemm(m, k, n)).compute_s)


def test_a_large_product_takes_whole_waves_of_tiles():
    """4096^3 on 132 multiprocessors: 1024 tiles in 8 waves, each tile 2 * 128^2 * (4096 + ramp) FLOPs."""
    rate = H100.peak(BF16.gemm) * H100.gemm_efficiency[BF16.gemm] / 132
    want = math.ceil(1024 / 132) * 2 * 128**2 * (4096 + H100.ramp_k(BF16.gemm)) * H100.gemm_overhead(BF16.gemm) / rate
    assert seconds(gemm(4096, 4096, 4096)).compute_s == pytest.approx(want, rel=1e-14)


def test_one_tile_more_than_a_wave_costs_a_wave():
    full, more = gemm(128, 8192, 128 * 132), gemm(128, 8192, 128 * 132 + 1)
    assert seconds(more).compute_s == pytest.approx(2 * seconds(full).compute_s, rel=1e-14)


def test_few_tiles_split_k_at_most_four_ways():
    half, quarter, tiny = (gemm(128, 8192, 128 * tiles) for tiles in (66, 33, 1))
    full = seconds(gemm(128, 8192, 128 * 132)).compute_s
    assert seconds(half).compute_s == pytest.approx(full / 2, rel=1e-14)
    assert seconds(quarter).compute_s == pytest.approx(full / 4, rel=1e-14)
    assert seconds(tiny).compute_s == seconds(quarter).compute_s


def test_a_price_is_the_slower_of_arithmetic_and_memory_and_a_kernels_ramp():
    p = seconds(gemm(1, 8192, 8192))
    assert p.seconds == max(p.compute_s, p.memory_s) + H100.gemm_kernel_s
    assert p.memory_s == 2 * (8192 + 8192**2 + 8192) / (H100.hbm_bytes_per_s * H100.hbm_efficiency)


@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
@pytest.mark.parametrize("precision", sorted(RECIPES))
def test_no_op_of_any_model_beats_the_roofline(model, precision):
    r = recipe(precision)
    chip = next(c for c in map(catalog.chip, ("h800-80g-sxm", "b200-180g-sxm", "mi300x-192g")) if c.offers(r.gemm))
    for b in lowered(model, Strategy(precision=precision)).blocks.values():
        for op in (op for op in b.ops if op.kind is not OpKind.COLLECTIVE):
            p, amount = price(op, b, chip, r), work(op, b, r)
            engine = chip.peak(amount.dtype) if amount.matrix else chip.vector_flops_per_s[amount.dtype]
            assert p.seconds >= amount.flops / engine
            assert p.seconds >= amount.nbytes / chip.hbm_bytes_per_s


def test_streaming_ops_move_their_tensors_and_what_kernels_move_besides():
    b = block(LLAMA, BlockKind.DENSE)
    p = price(named(b, "attention.residual"), b, H100, BF16)
    three = 3 * 2048 * LLAMA.hidden * 2
    assert p.memory_s == pytest.approx(three * MEMORY_TRAFFIC / (H100.hbm_bytes_per_s * H100.hbm_efficiency), rel=1e-14)


def attention_flops(seq, heads, head_dim):
    return seq * seq * heads * 2 * head_dim  # the causal half of two products


def test_attention_without_measurements_runs_at_one_share_of_peak():
    b = block(LLAMA, BlockKind.DENSE, seq=8192)
    chip = catalog.chip("mi300x")
    p = price(named(b, "attention.core"), b, chip, BF16)
    flops = attention_flops(8192, LLAMA.num_heads, LLAMA.head_dim)
    assert (p.source, p.compute_s) == (
        "roofline",
        flops * chip.step_attention / (chip.peak(BF16.attention) * chip.attention_efficiency),
    )


def test_measured_attention_pays_a_ramp_for_every_row_and_waits_for_the_longest_tile():
    b, heads, dim = block(LLAMA, BlockKind.DENSE, seq=8192), LLAMA.num_heads, LLAMA.head_dim
    flops = attention_flops(8192, heads, dim) + 4 * dim * 8192 * heads * H100.attention_ramp_keys
    flops += 4 * dim * 128 * 8192 * 132 * H100.attention_tail
    p = price(named(b, "attention.core"), b, H100, BF16)
    rate = H100.peak(BF16.attention) * H100.attention_share(dim) / H100.step_attention
    assert p.compute_s == pytest.approx(flops / rate, rel=1e-14)
    assert p.seconds == p.compute_s + H100.attention_kernel_s


def test_measured_backward_of_attention_takes_what_it_was_measured_to_take():
    b = block(LLAMA, BlockKind.DENSE, seq=8192)
    (backward,) = (op for op in b.of_phase(Phase.BACKWARD) if op.kind is OpKind.ATTENTION)
    slower = replace(H100, attention_backward=1.5)
    usual, longer = (price(backward, b, chip, BF16).compute_s for chip in (H100, slower))
    assert longer == pytest.approx(1.5 * usual, rel=1e-14)
    forward = named(b, "attention.core")
    assert price(forward, b, slower, BF16).compute_s == price(forward, b, H100, BF16).compute_s


def test_attention_gets_nearer_to_its_share_of_peak_with_longer_sequences_and_more_heads():
    def share(seq, tp=1):
        b = block(LLAMA, BlockKind.DENSE, Strategy(tp=tp), seq=seq)
        p = price(named(b, "attention.core"), b, H100, BF16)
        return p.work.flops / (p.seconds * H100.peak(BF16.attention))

    shares = [share(2.0**e) for e in range(10, 18)]
    most = H100.attention_share(LLAMA.head_dim) / H100.step_attention
    assert shares == sorted(shares)
    assert 0.97 * most < shares[-1] < most  # a ramp of 380 keys in 131,072
    assert share(4096.0, tp=8) < share(4096.0)


def test_other_head_dims_reach_their_own_share_with_straight_lines_in_between():
    at = [H100.attention_share(dim) for dim in (32, 64, 96, 128, 192, 256, 512)]
    assert at[0] == at[1] == H100.attention_efficiency * H100.attention_head_dims[64]
    assert at[2] == pytest.approx((at[1] + at[3]) / 2)
    assert at[5] == at[6] == H100.attention_efficiency * H100.attention_head_dims[256]


def test_every_price_says_who_gave_it():
    b = block(LLAMA, BlockKind.DENSE)
    up, core, norm = (named(b, name) for name in ("mlp.up_proj", "attention.core", "input_norm"))
    assert [price(op, b, H100, BF16).source for op in (up, core, norm)] == ["measured", "measured", "roofline"]
    # No fp16 products of an H100 were measured, none of any chip like it, and nothing of a TPU.
    assert price(up, b, H100, recipe("fp16")).source == "tile"
    for name in ("h800-80g-sxm", "tpu-v5p"):
        sources = [price(op, b, catalog.chip(name), BF16).source for op in (up, core, norm)]
        assert sources == ["tile", "roofline", "roofline"]
    parts = [base(LLAMA, BlockKind.DENSE, c) for c in (Base.TILE_S, Base.MEASURED_S, Base.ROOFLINE_S)]
    whole = sum(base(LLAMA, BlockKind.DENSE, c) for c in (Base.F_COMP, Base.B_COMP, Base.W_COMP))
    assert sum(parts) == pytest.approx(whole, rel=1e-12)  # the same prices in another order


def test_the_backend_of_highest_priority_that_covers_an_op_answers():
    class Table:
        name, priority, confidence, whole = "measured", 200, Confidence.HIGH, False

        def covers(self, op, chip):
            return op.kind is OpKind.NORM

        def compute_seconds(self, op, amount, chip, r):
            return 42.0

    b = block(LLAMA, BlockKind.DENSE)
    chain = sorted([*BACKENDS, Table()], key=lambda x: -x.priority)
    assert price(named(b, "input_norm"), b, H100, BF16, chain).seconds == 42.0 + H100.kernel_s
    assert price(named(b, "mlp.up_proj"), b, H100, BF16, chain).source == "measured"
    assert price(named(b, "mlp.up_proj"), b, H100, BF16, [Roofline()]).source == "roofline"


def test_a_layer_is_the_sum_of_its_ops():
    b = block(MIXTRAL, BlockKind.MOE)
    prices = [price(op, b, H100, BF16).seconds for op in b.of_phase(Phase.FORWARD) if op.kind is not OpKind.COLLECTIVE]
    assert base(MIXTRAL, BlockKind.MOE, Base.F_COMP) == pytest.approx(sum(prices), rel=1e-12)
    assert again(MIXTRAL, BlockKind.MOE, Again.R_COMP, choice=FULL) == base(MIXTRAL, BlockKind.MOE, Base.F_COMP)


def test_the_device_waits_for_the_host_where_kernels_are_short():
    slow = h100(64)
    slow = replace(slow, chip=replace(slow.chip, launch_s=20e-6))  # of a host that takes longer than any kernel here
    short = base(LLAMA, BlockKind.DENSE, Base.F_HOST, seq=1, system=slow)
    num = sum(op.kind is not OpKind.COLLECTIVE for op in block(LLAMA, BlockKind.DENSE, seq=1).of_phase(Phase.FORWARD))
    compute = base(LLAMA, BlockKind.DENSE, Base.F_COMP, seq=1)
    assert short == pytest.approx(num * 20e-6 - compute, rel=1e-12)
    assert base(LLAMA, BlockKind.DENSE, Base.F_HOST, seq=65536) == 0


def test_expert_traffic_beside_compute_costs_at_least_the_share_of_the_chip_it_takes():
    s = Strategy(ep=8)
    off, on = (base(DEEPSEEK, BlockKind.MOE, c, s) for c in (Base.F_EP0, Base.F_EP1))
    assert SLOWDOWN * off <= on < off


def test_a_ring_hides_under_attention_and_an_all_gather_does_not():
    ring, gathered = (
        base(LLAMA, BlockKind.DENSE, Base.F_CP, Strategy(cp=2, context_parallel=c), seq=131072)
        for c in (ContextParallel.RING, ContextParallel.ALL_GATHER)
    )
    assert ring == 0 < gathered


def test_more_ranks_never_add_compute_to_a_layer():
    times = [base(LLAMA, BlockKind.DENSE, Base.F_COMP, Strategy(tp=tp, sequence_parallel=True)) for tp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_a_faster_chip_is_faster():
    h100_s, b200_s = (
        base(LLAMA, BlockKind.DENSE, Base.F_COMP, system=s) for s in (h100(8), catalog.cluster("dgx_b200", 8))
    )
    assert b200_s < h100_s
