"""List scheduling: exact on graphs by hand and on one stream; bounded, and never against the data, on whole stages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from estimator.build import build
from estimator.cost.price import price
from estimator.dataflow import flow_of
from estimator.detail.traffic import Transfer
from estimator.detail.unroll import stage_of
from estimator.graph import BlockKind
from estimator.list_schedule import STREAMS, StageWork, list_schedule
from estimator.op import OpKind, Phase
from estimator.overlaps import overlaps
from estimator.passes import lower, recompute
from estimator.precision import recipe
from estimator.strategy import Fusion, Overlap, Recompute, Strategy
from estimator.tasks import Category, Device, Stream, Tasks
from estimator.timeline import Timeline, busy, exposed
from tests.estimator import kinds
from tests.estimator.cases import DEEPSEEK, GPT, LLAMA, MIXTRAL, SEQ, WORK, h100

BF16 = recipe("bf16")
SPLIT = Strategy(tp=4, sequence_parallel=True)
MOE = Strategy(ep=8, tp=2, sequence_parallel=True, fusion=frozenset(Fusion))
CASES = {
    "one chip": (LLAMA, Strategy()), "tp": (LLAMA, SPLIT), "no sequence parallelism": (GPT, Strategy(tp=2)),
    "ep": (MIXTRAL, MOE), "latent attention and mtp": (DEEPSEEK, MOE), "ring": (LLAMA, replace(SPLIT, cp=2)),
    "recurrence": (kinds.DELTA, Strategy(tp=2, ep=4, sequence_parallel=True)), "scan": (kinds.HYBRID, Strategy(tp=2)),
    "recompute": (LLAMA, replace(SPLIT, recompute=Recompute.parse("full"))),
    "some recompute": (DEEPSEEK, replace(MOE, recompute=Recompute.parse("layernorm+mlp_act+core_attn"))),
}  # fmt: skip


def stage(model, strategy, num=1, reduced=None):
    plain = lower(build(model, SEQ), strategy, BF16)
    graphs = {False: plain, True: recompute(plain, strategy.recompute)}
    return StageWork(graphs=graphs, blocks=tuple((kind, True) for kind in plain.sequence), strategy=strategy,
                     system=h100(64), recipe=BF16, num=num, reduced=reduced)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num", [1, 3])
def test_a_stage_ends_no_later_than_one_op_after_the_other_and_no_earlier_than_its_busiest_stream(case, num):
    timeline = list_schedule(stage(*CASES[case], num))
    tasks, lasts = timeline.tasks, timeline.end - timeline.start
    assert np.isfinite(timeline.end).all()
    streams = [lasts[tasks.stream == i].sum() for i in range(len(STREAMS))]
    assert max(streams) <= timeline.span_s * (1 + 1e-12)
    # Contention stretches what runs together, so the sum is of what tasks took, not of what they take alone.
    assert timeline.span_s <= lasts.sum() * (1 + 1e-12)
    state = busy(timeline)
    assert float(state.idle.sum()) <= 1e-9 * timeline.span_s  # with one stage, something always runs


@pytest.mark.parametrize("model", [LLAMA, GPT, MIXTRAL], ids=lambda m: m.name)
def test_on_one_chip_nothing_overlaps_and_every_op_runs_once(model):
    timeline = list_schedule(stage(model, Strategy()))
    graph = lower(build(model, SEQ), Strategy(), BF16)
    want = 0.0
    for kind in graph.sequence:
        b = graph.blocks[kind]
        want += sum(
            float(price(op, b, h100(64).chip, BF16).seconds) for op in b.ops if op.kind is not OpKind.COLLECTIVE
        )
    assert timeline.span_s == pytest.approx(want, rel=1e-12)  # a sum in another order
    assert overlaps(timeline) == ()


@pytest.mark.parametrize("case", CASES)
def test_every_op_waits_for_what_it_reads_and_brings_what_others_read(case):
    """Edges within a block: of forward by its tensors, of backward by theirs; none is missing, none goes back."""
    model, strategy = CASES[case]
    graph = recompute(lower(build(model, SEQ), strategy, BF16), strategy.recompute)
    for block in graph.blocks.values():
        flow = flow_of(block)
        assert sorted(flow.order) == list(range(len(block.ops)))
        place = {i: n for n, i in enumerate(flow.order)}
        assert all(place[j] < place[i] for i, waits in flow.waits.items() for j in waits)
        before = {i: set() for i in flow.order}
        for i in flow.order:
            before[i] = set(flow.waits[i]).union(*(before[j] for j in flow.waits[i]))
        made = {}
        for i in flow.order:
            op = block.ops[i]
            if op.phase is not Phase.FORWARD or op.kind is OpKind.COLLECTIVE:
                continue
            assert {made[name] for name in op.inputs if name in made} <= before[i], op.name
            made |= dict.fromkeys(op.outputs, i)
        gradients = {op.name: i for i, op in enumerate(block.ops) if op.phase is Phase.BACKWARD}
        readers = {}
        for op in block.of_phase(Phase.FORWARD):
            if op.kind is not OpKind.COLLECTIVE:
                for name in op.inputs:
                    readers.setdefault(name, []).append(op.name)
        for op in block.of_phase(Phase.FORWARD):
            if op.kind is OpKind.COLLECTIVE or f"{op.name}.grad" not in gradients:
                continue
            mine = gradients[f"{op.name}.grad"]
            behind = [f"{r}.grad" for out in op.outputs for r in readers.get(out, ())]
            want = {gradients[name] for name in behind if name in gradients}
            assert want <= before[mine], op.name


def waits_of(block, name):
    flow = flow_of(block)
    (i,) = [i for i, op in enumerate(block.ops) if op.name == name]
    return {block.ops[j].name for j in flow.waits[i]}


def test_traffic_stands_where_it_must():
    """Sequence parallelism: a gather before the products that read it, a reduction behind the one that made it."""
    block = lower(build(LLAMA, SEQ), SPLIT, BF16).blocks[BlockKind.DENSE]
    assert waits_of(block, "mlp.gate_proj.gather") == {"post_attention_norm"}
    assert "mlp.gate_proj.gather" in waits_of(block, "mlp.up_proj")
    assert waits_of(block, "mlp.down_proj.reduce") == {"mlp.down_proj"}
    assert "mlp.down_proj.reduce" in waits_of(block, "mlp.residual")
    assert waits_of(block, "mlp.down_proj.grad") == {"mlp.down_proj.reduce.grad"}
    assert waits_of(block, "mlp.gate_proj.gather.grad") == {"mlp.gate_proj.grad", "mlp.up_proj.grad"}
    assert "mlp.gate_proj.gather.grad1" in waits_of(block, "mlp.up_proj.weight_grad")
    assert "mlp.gate_proj.gather.grad1" not in waits_of(block, "mlp.up_proj.grad")
    assert waits_of(block, "post_attention_norm.grad") == {"mlp.gate_proj.gather.grad"}
    fused = lower(build(LLAMA, SEQ), replace(SPLIT, fusion=frozenset(Fusion)), BF16).blocks[BlockKind.DENSE]
    assert "attention.q_proj.gather" in waits_of(fused, "attention.q_proj+k_proj+v_proj")
    moe = lower(build(MIXTRAL, SEQ), MOE, BF16).blocks[BlockKind.MOE]
    assert waits_of(moe, "dispatch.all_to_all") == {"dispatch"}
    assert waits_of(moe, "combine.all_to_all") == {"experts.down"}
    assert "combine.all_to_all" in waits_of(moe, "combine")


def test_what_runs_again_waits_for_its_gradient():
    strategy = replace(SPLIT, recompute=Recompute.parse("full"))
    timeline = list_schedule(stage(LLAMA, strategy))
    tasks = timeline.tasks
    again = np.flatnonzero(tasks.category == list(Category).index(Category.RECOMPUTE))
    assert len(again)
    loss = [i for i in range(len(tasks)) if tasks.names[tasks.name[i]] == "loss.grad"]
    assert timeline.start[again].min() >= timeline.end[loss].max()


def test_a_second_micro_batch_hides_what_one_alone_exposes():
    shares = []
    for num in (1, 2):
        timeline = list_schedule(stage(LLAMA, SPLIT, num))
        bare = sum(float(s.sum()) for s in exposed(timeline).seconds.values())
        shares.append(bare / num)
    assert shares[1] < 0.5 * shares[0]


def test_gradients_are_reduced_while_backward_goes_on():
    def reduced(kind):
        return Transfer(1e-4, np.zeros(h100(64).num_tiers), 0.0)

    timeline = list_schedule(stage(LLAMA, Strategy(), reduced=reduced))
    (dp,) = overlaps(timeline)
    assert dp.category is Category.DP
    assert dp.total_s == pytest.approx(1e-4 * (LLAMA.num_layers + 2))
    assert 0 < dp.exposed_s <= 2e-4  # of the last block
    assert sum(dp.hidden_by.values()) == pytest.approx(dp.hidden_s)
    alone = list_schedule(stage(LLAMA, Strategy()))
    assert timeline.span_s <= alone.span_s + 2e-4


def test_stages_of_a_configuration_take_its_blocks_prices_and_hops():
    strategy = Strategy(tp=2, pp=4, sequence_parallel=True, zero_stage=1, overlap=Overlap(tp=1, dp=1))
    ends = []
    for rank in range(4):
        work = stage_of(LLAMA, strategy, h100(64), WORK, rank, 2)
        timeline = list_schedule(work)
        names = {timeline.tasks.names[n] for n in timeline.tasks.name}
        assert ("activation.receive" in names) == (rank > 0)
        assert ("activation.send" in names) == (rank < 3)
        assert ("loss" in names) == (rank == 3)
        assert ("embed" in names) == (rank == 0)
        assert "gradients.reduce" in names
        ends.append(timeline.span_s)
    assert ends[1] == pytest.approx(ends[2], rel=1e-9)  # equal stages
    with pytest.raises(ValueError, match="stage must be from 0 to 3, but got 4"):
        stage_of(LLAMA, strategy, h100(64), WORK, 4, 1)


def by_hand(seconds, streams, edges, names):
    lanes = [Stream(device=0, name=s, computes=s == "compute") for s in ("compute", "tp")]
    kinds_of = [Category.TP if s else Category.FORWARD for s in streams]
    tasks = Tasks.of(
        devices=[Device(name="d")], streams=lanes, stream=streams, seconds=seconds, edges=edges, names=names,
        category=kinds_of,
    )  # fmt: skip
    start = np.array([0.0, 1.0, 4.0, 0.5, 4.5])
    return Timeline(tasks=tasks, start=start, end=start + np.array(seconds), blame=np.full(5, -1), host_s=np.zeros(5))


def test_overlap_is_the_length_of_the_intersection():
    """Kernels a 0..1, b 1..3, c 4..6; transfers t 0.5..2.5 and u 4.5..8.5."""
    timeline = by_hand([1.0, 2.0, 2.0, 2.0, 4.0], [0, 0, 0, 1, 1], [], ["a", "b", "c", "t", "u"])
    found = {o.name: o for o in overlaps(timeline)}
    assert found["t"].hidden_by == {"b": 1.5, "a": 0.5}
    assert (found["t"].total_s, found["t"].hidden_s, found["t"].exposed_s) == (2.0, 2.0, 0.0)
    assert found["u"].hidden_by == {"c": 1.5}
    assert found["u"].exposed_s == 2.5
    assert [o.name for o in overlaps(timeline)] == ["u", "t"]
