"""Offload: what lies on the host leaves the chip, and costs what its link and its memory cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.batch import Out, Rows, compose_rows
from estimator.compose import Net, Tables
from estimator.cost.table import Again, Base
from estimator.memory import ITEMS
from estimator.span import CODES
from estimator.step import evaluate
from estimator.strategy import Offload, Overlap, Schedule, Strategy
from estimator.tables import NET_SIZES, ROW_SIZES, TableBuilder
from tests.estimator.cases import DEEPSEEK, FULL, LLAMA, MIXTRAL, TINY, WORK, h100, step
from tests.estimator.test_step import STRUCTURES, random_rows, row, same

HOST = h100(8).chip
PARTS = ("activations", "parameters", "gradients", "states")


def slow(**factors: float):
    """16 H100 whose host is slower by a factor."""
    chip = replace(HOST, **{name: getattr(HOST, name) / factor for name, factor in factors.items()})
    return replace(h100(16), chip=chip)


def items(result) -> dict[str, float]:
    return result.stages[0].memory


@pytest.mark.parametrize(("part", "item"), [("activations", "activations"), ("parameters", "weights"),
                                            ("gradients", "gradients"), ("states", "optimizer_states")])  # fmt: skip
def test_a_share_on_the_host_leaves_the_chip_but_for_two_blocks(part, item):
    plain = step(LLAMA, Strategy(zero_stage=3), 16)
    half = step(LLAMA, Strategy(zero_stage=3, offload=Offload(**{part: 0.5})), 16)
    block = 2 * (items(plain)[item] / 2 - items(half)[item]) / -1
    if part == "states":
        assert items(half)[item] == items(plain)[item] / 2
    else:
        assert 0 < block < items(plain)[item]
    assert all(items(half)[other] == items(plain)[other] for other in items(plain) if other != item)
    hosted = half.host_memory_bytes
    assert hosted >= items(plain)[item] / 2 * (1 - 1e-12)
    assert plain.host_memory_bytes == 0


def test_activations_come_and_go_at_the_speed_of_the_link():
    """On a slow link a pass takes what its transfers take; the first fetch runs beside the last store."""
    system = slow(host_bytes_per_s=1000)
    s = Strategy(pp=2, overlap=Overlap(pp=1))
    plain = evaluate(LLAMA, s, system, WORK)
    all_of_them = evaluate(LLAMA, replace(s, offload=Offload(activations=1)), system, WORK)
    each = items(plain)["activations"] / 2 / system.chip.host_bytes_per_s  # two micro-batches in flight on rank 0
    blocks = LLAMA.num_layers / 2 + 1
    assert all_of_them.stages[0].forward_s == pytest.approx(each, rel=1e-12)
    first = (each - plain.stages[0].backward_s) / blocks
    assert all_of_them.stages[0].backward_s == pytest.approx(each - first, rel=1e-12)
    assert all_of_them.exposed_offload_s > 0.5 * all_of_them.step_time_s


def test_a_fast_link_hides_what_it_moves():
    system = slow(host_bytes_per_s=1e-6)
    plain, offloaded = (evaluate(LLAMA, Strategy(offload=Offload(activations=x)), system, WORK) for x in (0, 1))
    assert offloaded.step_time_s == plain.step_time_s
    assert offloaded.peak_memory_bytes < plain.peak_memory_bytes


def test_parameters_come_up_for_each_pass():
    system = slow(host_bytes_per_s=1000)
    s = Strategy(zero_stage=3, offload=Offload(parameters=1))
    result, plain = evaluate(LLAMA, s, system, WORK), evaluate(LLAMA, Strategy(zero_stage=3), system, WORK)
    up = items(plain)["weights"] / system.chip.host_bytes_per_s  # a shard: it is gathered on the chips
    assert result.stages[0].forward_s == pytest.approx(up, rel=1e-12)
    assert result.stages[0].backward_s == pytest.approx(up, rel=1e-12)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZB_H1])
def test_gradients_go_down_from_backward_on_and_are_added_up_in_the_hosts_memory(schedule):
    """On a slow link each pass takes a third of it; those of the last two of five blocks may go beside other passes."""
    s = Strategy(pp=2, zero_stage=2, schedule=schedule, overlap=Overlap(pp=1))
    for host, seconds in (({"host_bytes_per_s": 1000}, lambda c: 1 / c.host_bytes_per_s),
                          ({"host_memory_bytes_per_s": 1000}, lambda c: 3 / c.host_memory_bytes_per_s)):  # fmt: skip
        system = slow(**host)
        result = evaluate(LLAMA, replace(s, offload=Offload(gradients=1)), system, WORK)
        plain = evaluate(LLAMA, s, system, WORK)
        down = items(plain)["gradients"] * seconds(system.chip)
        told = result.stages[0].forward_s, result.stages[0].backward_s
        if schedule is Schedule.ONE_F_ONE_B:
            assert told == pytest.approx((down / 3, down * 2 / 3), rel=1e-12)
        else:
            assert told[0] == pytest.approx(down / 5, rel=1e-12)
            assert down * 4 / 5 < told[1] < down * 4 / 5 + plain.stages[0].backward_s


def test_states_on_the_host_are_updated_there():
    """The slowest of the two updates and the two directions of the link (arXiv:2101.06840, section 4)."""
    system = slow(host_memory_bytes_per_s=1000)
    plain = evaluate(LLAMA, Strategy(zero_stage=1), system, WORK)
    half, whole = (evaluate(LLAMA, Strategy(zero_stage=1, offload=Offload(states=x)), system, WORK) for x in (0.5, 1))
    chip = system.chip
    ratio = chip.hbm_bytes_per_s * chip.hbm_efficiency / chip.host_memory_bytes_per_s
    assert whole.optimizer_s == pytest.approx(plain.optimizer_s * ratio, rel=1e-12)
    assert half.optimizer_s == pytest.approx(whole.optimizer_s / 2, rel=1e-12)
    # Gradients go down (4 bytes) while weights come up (2 bytes): a slow link takes the former.
    linked = slow(host_bytes_per_s=1e5)
    told = evaluate(LLAMA, Strategy(zero_stage=1, offload=Offload(states=1)), linked, WORK)
    shard = LLAMA.num_parameters() / 16
    assert told.optimizer_s == pytest.approx(shard * 4 / linked.chip.host_bytes_per_s, rel=1e-12)
    both = evaluate(LLAMA, Strategy(zero_stage=2, offload=Offload(states=1, gradients=1)), linked, WORK)
    assert both.optimizer_s == pytest.approx(shard * 2 / linked.chip.host_bytes_per_s, rel=1e-12)


def test_sums_that_others_wait_for_come_up_again():
    linked = slow(host_bytes_per_s=1e5)
    offload = Offload(gradients=1)
    one, two = (evaluate(LLAMA, Strategy(zero_stage=z, offload=offload), linked, WORK) for z in (1, 2))
    grads = LLAMA.num_parameters() * 4 / linked.chip.host_bytes_per_s
    shard = LLAMA.num_parameters() / 16 * 4 / linked.chip.host_bytes_per_s
    update = evaluate(LLAMA, Strategy(zero_stage=1), linked, WORK).optimizer_s
    assert one.optimizer_s == pytest.approx(grads + update, rel=1e-12)
    assert two.optimizer_s == pytest.approx(shard, rel=1e-12)


def test_a_host_that_is_too_small_is_told_apart():
    small = slow(host_memory_bytes=1e5)
    plain, offloaded = (evaluate(LLAMA, Strategy(offload=Offload(states=x)), small, WORK) for x in (0, 1))
    assert plain.feasible
    assert (offloaded.feasible, offloaded.reason) == (False, "host_memory")
    assert offloaded.host_memory_bytes > small.chip.host_memory_bytes
    gated = evaluate(LLAMA, Strategy(offload=Offload(states=1)), small, WORK, gate=True)
    assert np.isnan(gated.step_time_s)
    assert gated.host_memory_bytes == offloaded.host_memory_bytes


def test_an_unknown_host_refuses():
    unknown = replace(h100(16), chip=replace(HOST, host_bytes_per_s=0.0))
    with pytest.raises(ValueError, match="offload: .*host"):
        evaluate(LLAMA, Strategy(offload=Offload(states=0.5)), unknown, WORK)


def mixed(structure: Strategy, n: int, seed: int) -> Strategy:
    """Random rows of a structure under random HSDP, FSDP and offload."""
    rng = np.random.default_rng(seed)
    more = {"dp_replicate": [1, 1, 2, 4], "reshard_after_forward": [0, 1], "prefetch_blocks": [0, 1, 2, 9]}
    more |= {f"offload_{part}": [0, 0.25, 1] for part in PARTS}
    picked = {name: rng.choice(np.array(values, dtype=float), n) for name, values in more.items()}
    return random_rows(structure, n, seed).with_sizes(picked)


@pytest.mark.parametrize("structure", STRUCTURES[:4], ids=lambda s: s.schedule.value)
@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK], ids=lambda m: m.name)
def test_rows_are_scalars_and_the_identities_hold(model, structure):
    many = mixed(structure, 300, seed=5)
    batch = step(model, many, 64)
    legal = [i for i, reason in enumerate(batch.reason) if reason in {"", "memory", "host_memory"}]
    for i in legal[:20]:
        one = step(model, row(many, i), 64)
        assert all(same(one.columns[name], values[i]) for name, values in batch.columns.items())
        for stage in one.stages:
            assert min(stage.memory.values()) >= -1e-6  # bytes; differences of 1e9 round at 1e-7
        fullest = max(sum(stage.memory.values()) for stage in one.stages)
        assert fullest == pytest.approx(one.peak_memory_bytes, rel=1e-14)
    told = {name: np.asarray(values)[legal] for name, values in batch.columns.items()}
    parts = ["compute_s", "exposed_offload_s", "exposed_host_s", "bubble_s"]
    parts += [f"exposed_comm_{what}_s" for what in ("tp", "cp", "ep", "pp", "dp")]
    np.testing.assert_allclose(sum(told[p] for p in parts), told["pipeline_s"], rtol=1e-13)
    assert (told["exposed_offload_s"] >= 0).all()
    assert (told["exposed_offload_s"] > 0).any()


@given(st.sampled_from(STRUCTURES[:5]), st.sampled_from(TINY), st.integers(0, 10_000), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_price_makes_a_step_shorter_or_smaller_by_growing(structure, model, seed, in_nets):
    """What bounds rest on. Seconds of a pass may hide gradients of the last one: overlap of dp is left off."""
    rng = np.random.default_rng(seed)
    tables, rows = composed(structure, model, rng)
    before, after = told(tables, rows), None
    if in_nets:
        column = int(rng.choice([n for n in Net if n not in {Net.DP, Net.EDP, Net.SHARDS, Net.ESHARDS}]))
        grown = tables._replace(nets=times(tables.nets, column))
    elif rng.random() < 0.6:
        grown = tables._replace(base=times(tables.base, int(rng.choice(Base))))
    else:
        column = int(rng.choice([n for n in Again if n is not Again.LOGITS_BYTES]))  # a part of another
        grown = tables._replace(again=times(tables.again, column))
    after = told(grown, rows)
    slack = 1 + 1e-13  # the same sums in another order
    assert (after[:, Out.STEP_TIME_S] * slack >= before[:, Out.STEP_TIME_S]).all()
    assert (after[:, Out.PEAK_MEMORY_BYTES] * slack >= before[:, Out.PEAK_MEMORY_BYTES]).all()


def times(table: np.ndarray, column: int) -> np.ndarray:
    grown = table.copy()
    grown[..., column] *= 1.5
    grown.setflags(write=False)
    return grown


def composed(structure: Strategy, model, rng: np.random.Generator) -> tuple[Tables, Rows]:
    """40 candidates of one mesh under every kind of keeping."""
    pp, vpp = {Schedule.INTERLEAVED: (2, 2)}.get(structure.schedule, (2, 1))
    builder = TableBuilder(model, h100(64), WORK, structure, (structure.recompute,), has_blocks=False)
    layout = builder.layout(structure.schedule, pp, vpp)
    sizes = {"tp": 2.0, "cp": 1.0, "pp": float(pp), "ep": 1.0, "etp": 1.0, "micro_batch": 1.0, "dp": 16.0,
             "copies": 2.0 if structure.schedule is Schedule.DUALPIPE else 1.0, "dp_replicate": 4.0}  # fmt: skip
    one = {name: np.array([size]) for name, size in sizes.items()}
    tables = builder.tables({n: one[n] for n in ROW_SIZES}, {n: one[n] for n in NET_SIZES})
    n = 40
    zeros = np.zeros(n, dtype=np.int64)
    rows = Rows(
        row=zeros, net=zeros, layout=zeros + layout, program=zeros, schedule=zeros + CODES[structure.schedule],
        pp=zeros + pp,
        vpp=zeros + vpp, num_micro_batches=zeros + 4, choice=zeros, layers=zeros,
        overlap_tp=rng.integers(0, 2, n), overlap_ep=zeros, overlap_pp=rng.integers(0, 2, n), overlap_dp=zeros,
        zero=rng.integers(0, 4, n), reshard=rng.integers(0, 2, n), prefetch=rng.integers(0, 4, n) * 1.0,
        offload=rng.choice([0.0, 0.0, 0.3, 1.0], (n, 4)), bucket=np.zeros(n),
    )  # fmt: skip
    return tables, rows


def told(tables: Tables, rows: Rows) -> np.ndarray:
    out = np.empty((len(rows.row), len(Out)))
    compose_rows(tables, rows, False, out, np.zeros((rows.pp[-1], len(ITEMS))), np.zeros((tables.class_of.size, 3)))
    return out


def test_overlap_of_traffic_and_offload_share_one_pass():
    """The link to the host and the network are apart: a pass waits for the longer."""
    system = slow(host_bytes_per_s=3)
    s = Strategy(zero_stage=3, recompute=FULL, overlap=Overlap(dp=1), offload=Offload(activations=1, parameters=1))
    result = evaluate(MIXTRAL, s, system, WORK)
    bare = evaluate(MIXTRAL, replace(s, offload=Offload()), system, WORK)
    assert bare.step_time_s <= result.step_time_s
    assert result.exposed_comm_dp_s == pytest.approx(bare.exposed_comm_dp_s, rel=1e-9)
