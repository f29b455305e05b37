"""Plans of a tuner: written and read back to the bit, damaged and foreign ones refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.tuning import Outcome, PlanBucket, TunedPrecision, TuningPlan, graph_mark, plan_text, read_plan

AMOUNTS = st.floats(min_value=1e-9, max_value=1e15)
NAMES = st.text(min_size=1, max_size=8)


def plan(**more):
    """Two buckets, a fused pair, a module computed again."""
    return TuningPlan(
        graph="0123456789abcdef", workers=16, topology="ring",
        buckets=(PlanBucket(tensors=("b", "a"), nbytes=0.1 + 0.2), PlanBucket(tensors=("c",), nbytes=5e6,
                 part_bytes=4e6)), bucket_cap_mb=25.0, fused_ops=(("BW.b", "BW.a"),), recompute=("0",),
        before=Outcome(seconds=0.3, p10_s=0.29, p90_s=0.31, peak_bytes=1e9),
        after=Outcome(seconds=0.2, p10_s=0.2, p90_s=0.2), driver="alg1", assumptions=("launches take 5 us",),
    ) if not more else replace(plan(), **more)  # fmt: skip


@st.composite
def plans(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=9, unique=True))
    cut = draw(st.integers(0, len(names) - 1))
    held = [part for part in (names[:cut], names[cut:]) if part]
    low, mid, high = sorted(draw(st.lists(AMOUNTS, min_size=3, max_size=3)))
    outcome = Outcome(seconds=mid, p10_s=low, p90_s=high, peak_bytes=draw(st.none() | AMOUNTS))
    return plan(
        buckets=tuple(
            PlanBucket(tensors=tuple(part), nbytes=draw(AMOUNTS), part_bytes=draw(st.none() | AMOUNTS)) for part in held
        ), after=outcome, before=outcome, precision=draw(st.sampled_from(TunedPrecision)),
        accumulate=draw(st.integers(1, 64)), recompute=tuple(names[:cut]), bucket_cap_mb=draw(AMOUNTS),
        fused_ops=(tuple(names),) if len(names) > 1 else (),
    )  # fmt: skip


@given(plans())
def test_a_plan_reads_back_to_the_bit(one):
    assert read_plan("plan.json", plan_text(one)) == one


def test_the_mark_is_of_names_order_and_bytes():
    ops, tensors = ["FW", "BW.a", "BW.b"], [("a", 4.0), ("b", 8.0)]
    mark = graph_mark(ops, tensors)
    assert mark == graph_mark(iter(ops), iter(tensors))
    assert len({mark, graph_mark(ops[::-1], tensors), graph_mark(ops, tensors[::-1]), graph_mark(ops, [("a", 4.0)]),
                graph_mark(ops, [("a", 4.0), ("b", 9.0)]), graph_mark([*ops, "UPD"], tensors)}) == 6  # fmt: skip


def test_a_plan_for_another_graph_is_refused_in_one_line():
    plan().require_graph("0123456789abcdef")
    with pytest.raises(ValueError, match=r"^job.dfg: a plan must be for the graph .* is for 0123456789abcdef") as told:
        plan().require_graph("f" * 16, "job.dfg")
    assert "\n" not in str(told.value)


def test_a_plan_for_another_model_is_refused_by_the_first_tensor_that_differs():
    plan().require_tensors(["c", "a", "b"])
    with pytest.raises(ValueError, match="'d' that the model has and the plan has not"):
        plan().require_tensors(["a", "b", "c", "d"])
    with pytest.raises(ValueError, match="'c' that the plan has and the model has not"):
        plan().require_tensors(["a", "b"])


def test_the_gain_is_the_share_by_which_an_iteration_gets_shorter():
    assert plan().gain == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "other"}, "plan.json: format must be 'trainspace-plan', but got 'other'"),
        ({"version": 2}, "version must be 1, but got 2; tune the job again"),
        ({"more": 1}, "more is not a key"),
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"precision": "fp4"}, "precision must be one of as_recorded, mixed, but got 'fp4'"),
        ({"bucket_cap_mb": -1}, "bucket_cap_mb must be a number of at least 0"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be more than 0"),
        ({"recompute": ["a", "a"]}, "a module must stand in one place in recompute, but 'a' stands in two"),
        ({"fused_ops": [["a"]]}, "a group of fused_ops must have at least two operations"),
        ({"fused_ops": [["a", "b"], ["b", "c"]]}, "an operation must stand in one group"),
        ({"buckets": [{"tensors": [], "nbytes": 1, "part_bytes": None}]}, "a bucket must hold at least one tensor"),
        ({"buckets": [{"tensors": ["a"], "nbytes": 0, "part_bytes": None}]}, "nbytes of a bucket must be more than 0"),
        ({"buckets": [{"tensors": ["a"], "nbytes": 1}]}, "buckets.0: part_bytes is required"),
        ({"buckets": [{"tensors": ["a", "a"], "nbytes": 1, "part_bytes": 1}]}, "a tensor must stand in one bucket"),
        ({"after": {"seconds": 1, "p10_s": 2, "p90_s": 3, "peak_bytes": 0}}, "p10_s <= seconds <= p90_s must hold"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_line(change, says):
    text = json.dumps({**json.loads(plan_text(plan())), **change})
    with pytest.raises(ValueError, match="^plan.json: ") as told:
        read_plan("plan.json", text)
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_every_key_is_needed():
    whole = json.loads(plan_text(plan()))
    for key in whole:
        rest = {k: v for k, v in whole.items() if k != key}
        with pytest.raises(ValueError, match=rf"plan.json: .*{key}"):
            read_plan("plan.json", json.dumps(rest))
