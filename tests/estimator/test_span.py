"""The fast forms against the simulated orders, which are the truth."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.program import has_program, program
from estimator.schedule import (
    Kind,
    Order,
    check_conditions,
    in_flight,
    order,
    owed,
    placement,
    side_by_side,
    simulate,
)
from estimator.schedule.rules import VEES
from estimator.span import alone_passes, in_flight_peak, owed_peak, pipeline_span
from estimator.span_codes import CODES
from estimator.strategy import Schedule

Shape = tuple[Schedule, int, int, int]
EXACT = 1e-9  # rounding of sums of some thousand terms
CLOSE = 0.02  # the promise of span.py where it extrapolates
# Where ranks wait for each other in every round: the promise of program.py. A path may take more than RETURN
# micro-batches to come back to its rank.
COUPLED = {Schedule.V_HALF: 0.03, Schedule.V_MIN: 0.05, Schedule.DUALPIPE_V: 0.02}
CHUNKS = {Schedule.INTERLEAVED: (1, 2, 4, 6), Schedule.BREADTH_FIRST: (1, 2, 3), **dict.fromkeys(VEES, (2,))}


def shapes(ranks: tuple[int, ...], most_chunks: int, most_passes: int) -> list[Shape]:
    """Legal (schedule, p, m, v): m below, at, and well above p."""
    found = []
    for schedule in Schedule:
        for p in ranks:
            for v in (v for v in CHUNKS.get(schedule, (1,)) if v <= most_chunks):
                many = {1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 2, 3 * p - 2, 4 * p, 8 * p, 256}
                # Programs are walked as they are up to 2 p + 4, and all alike beyond.
                for m in sorted({1, p + 1, 2 * p + 4, 2 * p + 5, 5 * p} if has_program(schedule, p) else many):
                    if 0 < m * p * v <= most_passes and check_conditions(schedule, p, m, v) is None:
                        found.append((schedule, p, m, v))
    return found


EQUAL = shapes((1, 2, 3, 5, 8, 16), 6, 4200)
UNEQUAL = shapes((1, 2, 3, 4, 7, 12), 3, 1200)


def error(shape: Shape, f: np.ndarray, b: np.ndarray, w: np.ndarray, hop: float) -> float:
    """Relative error of the fast form."""
    schedule, p, m, v = shape
    truth = simulate(order(schedule, p, m, v), f, b, w, hop).span
    return float(pipeline_span(schedule, f, b, w, hop, p, v, m, f, b)) / truth - 1


def close(shape: Shape) -> float:
    return COUPLED.get(shape[0], CLOSE)


def is_exact(shape: Shape, hop: float, *, stages: bool = False, passes: bool = False) -> bool:
    """Where span.py and program.py promise the simulated span: for equal `stages`, of equally long `passes`, or any."""
    schedule, p, m, _ = shape
    if has_program(schedule, p):
        coupled = schedule in {Schedule.V_HALF, Schedule.V_MIN}
        return m <= 2 * p + 4 or (passes if coupled else stages)
    if stages:
        return True
    return schedule is Schedule.GPIPE or (schedule is not Schedule.INTERLEAVED and (hop == 0.0 or m < p))


@pytest.mark.parametrize("shape", EQUAL, ids=str)
def test_equal_stages_are_exact(shape: Shape) -> None:
    num_chunks = shape[1] * shape[3]
    for b, w in ((1.0, 1.0), (2.3, 0.7)):
        times = (np.ones(num_chunks), np.full(num_chunks, b), np.full(num_chunks, w))
        assert abs(error(shape, *times, 0.0)) < (
            EXACT if is_exact(shape, 0.0, stages=True, passes=b == w) else close(shape)
        )
    assert abs(error(shape, *times, 0.15)) < close(shape)


@pytest.mark.parametrize("shape", UNEQUAL, ids=str)
def test_unequal_stages_are_exact_or_close(shape: Shape) -> None:
    draw = np.random.default_rng(list(shape[1:]))
    num_chunks = shape[1] * shape[3]
    for hop in (0.0, 0.2):
        f, b, w = draw.uniform(0.5, 2.0, (3, num_chunks))
        assert abs(error(shape, f, b, w, hop)) < (EXACT if is_exact(shape, hop) else close(shape))


@pytest.mark.parametrize("shape", UNEQUAL, ids=str)
def test_heavy_first_and_last_stages_are_exact_or_close(shape: Shape) -> None:
    draw = np.random.default_rng(list(shape[1:]))
    for hop in (0.0, 0.2):
        f = np.ones(shape[1] * shape[3])
        f[0], f[-1] = draw.uniform(1.0, 1.4), draw.uniform(1.0, 2.5)
        b, w = f * draw.uniform(1.0, 2.5), f * draw.uniform(0.5, 1.0)
        assert abs(error(shape, f, b, w, hop)) < (EXACT if is_exact(shape, hop) else close(shape))


@pytest.mark.parametrize("m", [4, 5, 6, 7])
def test_a_slow_first_stage_is_exact_with_few_micro_batches(m: int) -> None:
    f, b, w = np.ones((3, 4))
    f[0], b[0], f[3], b[3] = 3.0, 5.0, 0.2, 0.3
    assert abs(error((Schedule.ONE_F_ONE_B, 4, m, 1), f, b, w, 0.0)) < EXACT


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_span_never_falls_when_a_time_grows(data: st.DataObject) -> None:
    schedule, p, m, v = data.draw(st.sampled_from(EQUAL))
    seconds = st.floats(0.5, 2.0)
    even = data.draw(st.booleans())  # equal stages are where shortcuts begin and end
    draw = (
        (lambda: [data.draw(seconds)] * (p * v))
        if even
        else (lambda: data.draw(st.lists(seconds, min_size=p * v, max_size=p * v)))
    )
    times = np.array([draw() for _ in range(3)])
    hop = data.draw(st.sampled_from([0.0, 0.1, 0.2]))
    before = pipeline_span(schedule, *times, hop, p, v, m, *times[:2])
    growth, which = data.draw(st.floats(1e-6, 0.5)), data.draw(st.integers(0, 3 * p * v))
    if which == 3 * p * v:
        hop += growth
    else:
        times[which // (p * v), which % (p * v)] += growth
    assert pipeline_span(schedule, *times, hop, p, v, m, *times[:2]) >= before * (1 - 1e-11)


@pytest.mark.parametrize("shape", EQUAL, ids=str)
def test_activations_in_flight_are_those_of_the_order(shape: Shape) -> None:
    schedule, p, m, v = shape
    chunks = placement(schedule, p, v)
    out = np.zeros(chunks.shape, dtype=np.int64)
    in_flight_peak(CODES[schedule], p, v, m, program(schedule, p, v, m), out)
    assert out.tolist() == in_flight(order(schedule, p, m, v), chunks).tolist()


def test_every_schedule_has_a_code() -> None:
    assert sorted(CODES.values()) == list(range(len(Schedule)))
    assert set(CODES) == set(Schedule)


PAIRED = [
    *((Schedule.DUALPIPE_V, p, m, 2) for p, m in ((2, 4), (3, 7), (4, 22), (8, 40))),
    *((Schedule.DUALPIPE, p, m, 1) for p, m in ((2, 4), (4, 8), (4, 22), (8, 16), (8, 40))),
    *((Schedule.INTERLEAVED, p, m, v) for p, m, v in ((2, 4, 2), (4, 8, 2), (4, 16, 4), (8, 64, 2), (2, 32, 8))),
    *((Schedule.ONE_F_ONE_B, 1, m, 1) for m in (2, 3, 9)),
]


def in_pairs(schedule: Schedule, p: int, m: int, v: int) -> Order:
    passes = order(schedule, p, m, v)
    return passes if schedule in {Schedule.DUALPIPE, Schedule.DUALPIPE_V} else [side_by_side(items) for items in passes]


@pytest.mark.parametrize("shape", PAIRED, ids=str)
def test_passes_alone_are_those_of_the_order_without_a_partner(shape: Shape) -> None:
    schedule, p, m, v = shape
    chunks = placement(schedule, p, v)
    out = np.zeros((2, *chunks.shape))
    alone_passes(CODES[schedule], p, v, m, program(schedule, p, v, m), out)
    for kinds, counted in zip(((Kind.F,), (Kind.B, Kind.BW)), out, strict=True):
        for rank, items in enumerate(in_pairs(*shape)):
            alone = Counter(item.chunk for item in items if item.kind in kinds)
            assert [alone[chunk] for chunk in chunks[rank].tolist()] == counted[rank].tolist()


@pytest.mark.parametrize("shape", PAIRED, ids=str)
@pytest.mark.parametrize("hop", [0.0, 0.1])
def test_a_span_in_pairs_is_that_of_the_simulated_order(shape: Shape, hop: float) -> None:
    schedule, p, m, v = shape
    num_chunks = int(placement(schedule, p, v).max()) + 1
    f, b, w = np.full(num_chunks, 1.0), np.full(num_chunks, 1.2), np.full(num_chunks, 0.8)
    alone = (f + 0.4, b + 0.5)
    truth = simulate(in_pairs(*shape), f, b, w, hop, alone).span
    span = pipeline_span(schedule, f, b, w, hop, p, v, m, *alone)
    # Interleaved: the ring runs a pair as two passes in a row, of which the first gives its output early.
    assert span == pytest.approx(truth, rel=0.03 if schedule is Schedule.INTERLEAVED else COUPLED.get(schedule, 2e-3))
    if schedule is not Schedule.INTERLEAVED and hop == 0.0:
        assert span == pytest.approx(truth, rel=1e-12)
    assert span > pipeline_span(schedule, f, b, w, hop, p, v, m, f, b)


@pytest.mark.parametrize(("schedule", "p", "m"), [
    (Schedule.ZB_H1, 4, 8), (Schedule.ZB_H1, 8, 8), (Schedule.ZB_H1, 8, 3), (Schedule.ZB_H1, 2, 1),
    (Schedule.DUALPIPE, 2, 4), (Schedule.DUALPIPE, 4, 8), (Schedule.DUALPIPE, 8, 40), (Schedule.DUALPIPE_V, 4, 30),
    (Schedule.ZB_V, 4, 30), (Schedule.V_MIN, 6, 9), (Schedule.ZB_2P, 3, 40), (Schedule.BREADTH_FIRST, 3, 12),
])  # fmt: skip
def test_weight_gradients_owed_are_those_of_the_order(schedule: Schedule, p: int, m: int) -> None:
    v = 2 if schedule in {*VEES, Schedule.BREADTH_FIRST} else 1
    chunks = placement(schedule, p, v)
    out = np.zeros((2, *chunks.shape))
    owed_peak(CODES[schedule], p, m, program(schedule, p, v, m), out)
    assert out.tolist() == owed(order(schedule, p, m, v), chunks).tolist()
    for rank, items in enumerate(order(schedule, p, m, v)):
        flying, late = Counter[int](), Counter[int]()
        nothing = [0] * chunks.shape[1]
        most: tuple[int, list[int], list[int]] = (-1, nothing, nothing)
        for item in items:
            flying[item.chunk] += item.kind in {Kind.F, Kind.PAIR}
            back = item.back_chunk if item.kind is Kind.PAIR else item.chunk
            flying[back] -= item.kind in {Kind.B, Kind.BW, Kind.PAIR}
            late[back] += (item.kind is Kind.B) - (item.kind is Kind.W)
            if late.total() > max(most[0], 0):
                places = chunks[rank].tolist()
                most = (late.total(), [flying[j] for j in places], [late[j] for j in places])
        assert (out[0, rank].tolist(), out[1, rank].tolist()) == most[1:]
