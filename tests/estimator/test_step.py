"""evaluate: one strategy or a million, the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator import tables as tables_module
from estimator.compose import Net
from estimator.cost.table import Base
from estimator.graph import BlockKind
from estimator.model import MLASpec, ModelSpec, MoESpec
from estimator.result import COLUMNS
from estimator.step import evaluate
from estimator.strategy import ContextParallel, Fusion, Overlap, Recompute, Schedule, Strategy
from estimator.tables import TableBuilder
from estimator.workload import Workload
from hardware import catalog
from tests.estimator.cases import (
    DEEPSEEK,
    FULL,
    GPT,
    LLAMA,
    MIXTRAL,
    SEQ,
    TINY,
    UNFUSED,
    WORK,
    h100,
    published,
    step,
)

SIZES = {
    "tp": [1, 2, 4], "cp": [1, 2], "pp": [1, 2, 4], "ep": [1, 2, 4], "etp": [1, 2], "vpp": [1, 2],
    "micro_batch": [1, 2], "zero_stage": [0, 1, 2, 3], "bucket_bytes": [0, 1e6, 4e7], "recompute_layers": [0, 1, 3],
    "overlap_tp": [0, 1], "overlap_ep": [0, 1], "overlap_pp": [0, 1], "overlap_dp": [0, 1],
}  # fmt: skip
STRUCTURES = [
    Strategy(sequence_parallel=True),
    Strategy(sequence_parallel=True, schedule=Schedule.DUALPIPE, precision="fp8_block"),
    Strategy(sequence_parallel=True, schedule=Schedule.INTERLEAVED, recompute=FULL),
    Strategy(sequence_parallel=True, schedule=Schedule.ZB_H1, recompute=Recompute.parse(["layernorm", "mlp"])),
    Strategy(schedule=Schedule.GPIPE, fusion=UNFUSED, context_parallel=ContextParallel.ALL_GATHER),
    Strategy(recompute=Recompute.parse("block"), precision="fp8_block", sequence_parallel=True),
    Strategy(precision="fp8", context_parallel=ContextParallel.ULYSSES, fusion=frozenset(Fusion)),
]


def random_rows(structure: Strategy, n: int, seed: int) -> Strategy:
    rng = np.random.default_rng(seed)
    picked = {name: rng.choice(np.array(values, dtype=float), n) for name, values in SIZES.items()}
    if structure.schedule is not Schedule.INTERLEAVED:
        picked["vpp"] = np.ones(n)
    if str(structure.recompute) != "block":
        picked["recompute_layers"] = np.zeros(n)
    return structure.with_sizes(picked)


def row(strategy: Strategy, i: int) -> Strategy:
    return strategy.with_sizes({k: float(v[i]) for k, v in strategy.sizes().items() if isinstance(v, np.ndarray)})


def same(a: float, b: float) -> bool:
    return a == b or (np.isnan(a) and np.isnan(b))


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: f"{s.schedule.value}-{s.precision}-{s.recompute}")
@pytest.mark.parametrize("model", TINY, ids=lambda m: m.name)
def test_a_row_of_a_batch_is_the_scalar_bit_for_bit(model, structure):
    many = random_rows(structure, 300, seed=len(model.name))
    batch = step(model, many, 64)
    legal = [i for i, reason in enumerate(batch.reason) if reason in {"", "memory"}]
    assert legal or (structure.schedule is Schedule.INTERLEAVED)
    for i in legal[:25]:
        one = step(model, row(many, i), 64)
        assert (one.feasible, one.reason) == (batch.feasible[i], batch.reason[i])
        for c in COLUMNS:
            assert same(one.columns[c.name], batch.columns[c.name][i]), c.name


@pytest.mark.parametrize("structure", STRUCTURES[:4], ids=lambda s: f"{s.schedule.value}-{s.precision}")
def test_permuting_rows_permutes_results(structure):
    many = random_rows(structure, 400, seed=7)
    order = np.random.default_rng(8).permutation(400)
    moved = many.with_sizes({k: v[order] for k, v in many.sizes().items() if isinstance(v, np.ndarray)})
    plain, permuted = step(DEEPSEEK, many, 64), step(DEEPSEEK, moved, 64)
    assert permuted.reason == tuple(plain.reason[i] for i in order)
    for c in COLUMNS:
        np.testing.assert_array_equal(permuted.columns[c.name], plain.columns[c.name][order])


def test_a_million_rows_price_only_the_distinct_ones(monkeypatch):
    seen = []
    real = tables_module.price_table
    monkeypatch.setattr(
        tables_module, "price_table", lambda graph, s, *rest: seen.append(s.num_rows) or real(graph, s, *rest)
    )
    n = 1_000_000
    many = Strategy(
        tp=np.tile([1.0, 2.0, 4.0, 8.0], n // 4), zero_stage=np.repeat([0.0, 1.0], n // 2), sequence_parallel=True,
        overlap=Overlap(dp=np.tile([0.0] * 4 + [1.0] * 4, n // 8)), bucket_bytes=4e7,
    )  # fmt: skip
    result = step(LLAMA, many, 64)
    assert seen == [4]
    assert len(np.unique(result.step_time_s)) == 16
    assert result.step_time_s.shape == (n,)
    assert result.feasible.all()


def test_degenerate_sizes_work_everywhere():
    model = ModelSpec(name="one", num_layers=1, hidden=1, ffn=1, num_heads=1, num_kv_heads=1, head_dim=1, vocab=1,
                      vocab_multiple=1)  # fmt: skip
    mla = MLASpec(q_lora_rank=1, kv_lora_rank=1, qk_nope_head_dim=1, qk_rope_head_dim=1, v_head_dim=1)
    moe = MoESpec(num_experts=1, top_k=1, ffn=1, num_shared_experts=1, shared_ffn=1)
    everything = replace(model, mla=mla, moe=moe, num_mtp_layers=1, max_positions=1)
    for m in (model, everything, replace(everything, tied_embeddings=True, gated_mlp=False)):
        for precision in ("bf16", "fp8", "fp8_block"):
            for zero in range(4):
                s = Strategy(precision=precision, zero_stage=zero, recompute=FULL, overlap=Overlap(dp=1))
                result = evaluate(m, s, h100(1), Workload(seq=1, global_batch=1))
                assert np.isfinite(list(result.columns.values())).all()
                assert result.feasible
                assert result.step_time_s > 0
                assert all(result.columns[f"exposed_comm_{x}_s"] == 0 for x in ("tp", "cp", "ep", "pp"))
                assert result.exposed_comm_dp_s == pytest.approx(0, abs=1e-18)  # a difference of equal sums
                assert result.optimizer_comm_s == 0
                assert result.bubble_s == pytest.approx(0, abs=1e-18)


def test_a_gate_leaves_seconds_of_what_does_not_fit_unpriced():
    model, s = (
        published("llama3_70b"),
        Strategy(tp=np.array([1.0, 8.0]), pp=np.array([1.0, 8.0]), sequence_parallel=True),
    )
    gated, free = (step(model, s, 64, gate=gate) for gate in (True, False))
    assert gated.reason == free.reason == ("memory", "")
    for c in COLUMNS:
        a, b = gated.columns[c.name], free.columns[c.name]
        assert a[1] == b[1]
        assert not np.isnan(b).any()
        if c.unit in {"s", "1/s", "USD", "J", "TFLOP/s"} and c.name != "exposed_offload_s":
            assert np.isnan(a[0]), c.name
        if c.unit == "B":
            assert a[0] == b[0]


def test_what_a_model_leaves_out_is_told_first_among_the_assumptions():
    model = published("llama3_8b")
    plain, noted = (
        evaluate(replace(model, notes=notes), Strategy(), h100(1), Workload(seq=8, global_batch=1)).assumptions
        for notes in ((), ("the text part alone",))
    )
    assert noted == ("the text part alone", *plain)


def test_a_gated_scalar_that_does_not_fit_says_so():
    result = step(published("llama3_70b"), Strategy(), 64, gate=True)
    assert (result.feasible, result.reason) == (False, "memory")
    assert np.isnan(result.step_time_s)
    assert result.device_memory_bytes > h100(64).usable_hbm_bytes


def test_an_ungated_scalar_that_does_not_fit_is_priced_all_the_same():
    result = step(published("llama3_70b"), Strategy(), 64)
    assert (result.feasible, result.reason) == (False, "memory")
    assert result.step_time_s > 0


def equal_stages(monkeypatch):
    """Make embedding and head free and hops instant, so that stages are equal."""
    real = TableBuilder.tables

    def tables(self, *args):
        t = real(self, *args)
        base, again, nets = t.base.copy(), t.again.copy(), t.nets.copy()
        for k, kind in enumerate(self.graph.kinds):
            if not kind.is_layer:
                base[:, k, : Base.DENSE_PARAMS] = 0
                base[:, k, Base.TILE_S :] = 0
                again[:, :, k] = 0
        nets[:, [Net.HOP_PER_BYTE, Net.HOP_LATENCY]] = 0
        return tables_module.read_only(t._replace(base=base, again=again, nets=nets))

    monkeypatch.setattr(TableBuilder, "tables", tables)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_f_one_b_idles_p_minus_1_passes_on_equal_stages(monkeypatch, pp, recompute):
    """(p - 1)(F + B + W): Narayanan 2021, arXiv:2104.04473, section 2.2.1."""
    equal_stages(monkeypatch)
    result = step(LLAMA, Strategy(pp=pp, recompute=Recompute.parse(recompute)), 8)
    one = result.stages[0].forward_s + result.stages[0].backward_s
    m = WORK.global_batch // (8 // pp)
    assert result.bubble_s == pytest.approx((pp - 1) * one, abs=1e-12 * m * one)
    assert result.compute_s == pytest.approx(m * one, rel=1e-12)


def test_interleaving_divides_the_bubble_by_its_chunks(monkeypatch):
    equal_stages(monkeypatch)
    plain = step(LLAMA, Strategy(pp=4), 8)
    virtual = step(LLAMA, Strategy(pp=4, vpp=2, schedule=Schedule.INTERLEAVED), 8)
    assert virtual.bubble_s == pytest.approx(plain.bubble_s / 2, rel=1e-9)


def test_zero_bubble_h1_hides_weight_gradients_in_the_bubble(monkeypatch):
    """(p - 1)(F + B - W): Qi 2023, arXiv:2401.10241, section 2.1; B here is the input gradient's time."""
    equal_stages(monkeypatch)
    plain, split = (step(LLAMA, Strategy(pp=4, schedule=s), 8) for s in (Schedule.ONE_F_ONE_B, Schedule.ZB_H1))
    builder = TableBuilder(LLAMA, h100(8), WORK, Strategy(pp=4))
    builder.layout(Schedule.ONE_F_ONE_B, 4, 1)
    rows = {name: np.ones(1) for name in tables_module.ROW_SIZES}
    nets = {name: np.ones(1) for name in tables_module.NET_SIZES}
    dense = builder.graph.kinds.index(BlockKind.DENSE)
    w = 2 * float(builder.tables(rows, nets).base[0, dense, [Base.W_COMP, Base.W_HOST]].sum())
    assert plain.bubble_s - split.bubble_s == pytest.approx(3 * 2 * w, rel=1e-9)


def test_the_published_deepseek_layout_fits_and_is_within_a_quarter_of_19_9_seconds():
    """DeepSeek-V3, arXiv:2412.19437: 180 K H800 hours a trillion tokens, 2048 chips, 15360 sequences of 4096 tokens."""
    s = Strategy(
        pp=16, ep=64, schedule=Schedule.DUALPIPE, zero_stage=1, precision="fp8_block",
        recompute=Recompute.parse(["layernorm", "mla_up_proj"]), overlap=Overlap(ep=1, pp=1, dp=1),
    )  # fmt: skip
    system = catalog.cluster("dgx_h800", 2048)
    result = evaluate(published("deepseek_v3"), s, system, Workload(seq=4096, global_batch=15360))
    assert result.feasible
    assert abs(result.step_time_s / 19.9 - 1) < 0.25  # the tolerance; nothing is fitted to this row


@pytest.mark.parametrize("change", [
    {"tp": 4}, {"pp": 4}, {"cp": 2}, {"micro_batch": 2}, {"zero_stage": 3}, {"recompute": FULL},
    {"fusion": UNFUSED}, {"fusion": frozenset(Fusion)}, {"pp": 4, "schedule": Schedule.DUALPIPE},
])  # fmt: skip
def test_model_flops_do_not_depend_on_the_strategy(change):
    plain, other = step(LLAMA, Strategy(), 8), step(LLAMA, Strategy(**change), 8)
    assert other.mfu * other.step_time_s == pytest.approx(plain.mfu * plain.step_time_s, rel=1e-14)
    assert other.model_tflops_per_gpu * other.step_time_s == pytest.approx(
        plain.model_tflops_per_gpu * plain.step_time_s, rel=1e-14
    )


@given(st.sampled_from(TINY), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]),
       st.sampled_from(["none", "full", "mlp", "core_attn"]),
       st.sampled_from(["bf16", "fp8", "fp8_block"]))  # fmt: skip
def test_a_step_never_beats_the_peak_of_its_chips(model, tp, cp, pp, recompute, precision):
    s = Strategy(tp=tp, cp=cp, pp=pp, recompute=Recompute.parse(recompute), precision=precision, sequence_parallel=True)
    result = step(model, s, 32)
    assert 0 < result.mfu <= result.hfu < 1
    assert result.mfu < result.hfu or recompute not in {"full", "core_attn"}
    assert result.compute_s <= result.pipeline_s <= result.step_time_s


@pytest.mark.parametrize("recompute", ["full", "mlp", "core_attn"])
def test_recompute_counts_towards_hfu_alone(recompute):
    plain, more = step(LLAMA, Strategy(), 8), step(LLAMA, Strategy(recompute=Recompute.parse(recompute)), 8)
    assert plain.hfu == plain.mfu
    assert more.hfu > more.mfu


def test_full_recompute_runs_a_third_of_the_layers_flops_again():
    """Korthikanti 2022, arXiv:2205.05198, appendix: hardware over model FLOPs 4/3, less the head."""
    result = step(LLAMA, Strategy(recompute=FULL), 8)
    layers = 6 * (LLAMA.num_parameters() - 2 * LLAMA.vocab * LLAMA.hidden - (2 * 8 + 1) * LLAMA.hidden)
    attention = 3 * LLAMA.num_layers * SEQ * LLAMA.num_heads * 2 * LLAMA.head_dim
    model = layers + attention + 6 * LLAMA.vocab * LLAMA.hidden
    assert result.hfu / result.mfu == pytest.approx(1 + (layers + attention) / 3 / model, rel=1e-12)


@pytest.mark.parametrize("model", [LLAMA, GPT, MIXTRAL], ids=lambda m: m.name)
def test_a_larger_batch_takes_longer_and_gives_more_tokens_a_second(model):
    steps = [step(model, Strategy(pp=4), 8, Workload(seq=SEQ, global_batch=b)) for b in (8, 16, 32, 64)]
    assert [r.step_time_s for r in steps] == sorted(r.step_time_s for r in steps)
    assert [r.tokens_per_s for r in steps] == sorted(r.tokens_per_s for r in steps)


def test_columns_that_follow_the_step_say_so_truly():
    """`follows` is what a search prunes by."""
    many = random_rows(STRUCTURES[0], 500, seed=3)
    result = step(LLAMA, many, 64)
    keep = np.array([r in {"", "memory"} for r in result.reason])
    for c in COLUMNS:
        values = result.columns[c.name][keep]
        for name, column in (("step", result.step_time_s), ("memory", result.peak_memory_bytes)):
            if c.follows == name:
                ordered = values[np.argsort(column[keep], kind="stable")]
                steps = np.diff(ordered) * (-1 if c.better == "higher" else 1)
                assert (steps >= 0).all(), c.name
        if c.follows == "system":
            assert len(np.unique(values)) == 1


def test_an_attribute_that_is_no_column_is_an_error():
    with pytest.raises(AttributeError):
        _ = step(LLAMA, Strategy(), 8).speed


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("schedule", "1f1b", "Schedule"),
        ("recompute", "full", "Recompute.parse"),
        ("context_parallel", "ring", "ContextParallel"),
        ("overlap", 1, "Overlap"),
        ("fusion", frozenset({"flash_attention"}), "Fusion"),
    ],
)
def test_a_word_where_a_choice_belongs_is_told_what_makes_one(field, value, remedy):
    with pytest.raises(TypeError, match=remedy):
        Strategy(**{field: value})
