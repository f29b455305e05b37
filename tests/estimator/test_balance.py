"""The balance of pipeline chunks: no layout at all has a less busy busiest rank, within memory, on any placement."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator.balance import Shape, balance, prefix_of, rank_loads, shape_of, unlimited
from estimator.balance_costs import DENSE, EXPERT, KEPT, LIVE, NUM_BYTES, OWED, SAVED, WIDE, linear_costs
from estimator.balance_walk import Room
from estimator.layout import even_layers
from estimator.schedule import placement
from estimator.strategy import Schedule

V_SHAPE = np.array([[0, 7], [1, 6], [2, 5], [3, 4]])
PLACEMENTS = {
    "plain": placement(Schedule.ONE_F_ONE_B, 4),
    "two ranks": placement(Schedule.ZB_H1, 2),
    "both directions": placement(Schedule.DUALPIPE, 6),
    "two ranks, both directions": placement(Schedule.DUALPIPE, 2),
    "v": V_SHAPE,
}
CONSTANTS = unlimited(1).constants._replace(grad_bytes=2.0)
NUMBER = st.floats(0.1, 8.0).map(lambda x: round(x, 2))


@cache
def compositions(num_layers, num_chunks):
    """Every layout [N, C]: the first and the last chunk may be empty."""
    spare = num_layers - max(num_chunks - 2, 0)
    cuts = np.array(list(itertools.combinations_with_replacement(range(spare + 1), num_chunks - 1)))
    middle = np.array([0, *[1] * (num_chunks - 2), 0])
    return np.diff(cuts, axis=1, prepend=0, append=spare) + middle


def with_bytes(costs, kept, saved, live, ends):
    """Costs with memory: linear in the layers but for the widest block."""
    num = len(kept)
    nbytes = np.zeros((3, num + 1, num + 1, NUM_BYTES))
    for slot, a, b in itertools.product(range(3), range(num + 1), range(num + 1)):
        if a <= b:
            extra = ends[slot] if slot < 2 else 0.0
            x = nbytes[slot, a, b]
            x[KEPT], x[DENSE], x[EXPERT] = sum(kept[a:b]) + extra, sum(kept[a:b]) / 2 + extra, sum(saved[a:b]) / 3
            x[SAVED], x[OWED] = sum(saved[a:b]) + extra / 2, sum(kept[a:b]) / 5 + extra
            x[LIVE] = max([extra, *live[a:b]])
            x[WIDE] = max([extra, *kept[a:b]]) / 4
    return costs._replace(nbytes=nbytes)


def of_chunks(table, costs, layers):
    """What each chunk of layouts [..., C] has in a table."""
    ends = np.cumsum(layers, axis=-1)
    return table[costs.slot, ends - layers, ends]


def seconds_of(costs, chunks, layers):
    """Written down once more: what each rank runs."""
    return of_chunks(costs.seconds, costs, layers)[..., chunks].sum(axis=-1)


def bytes_of(costs, chunks, room, layers):
    """And what each rank holds."""
    x = of_chunks(costs.nbytes, costs, layers)[..., chunks, :]
    both = ((chunks == 0).any(axis=1) & (chunks == chunks.max()).any(axis=1)).astype(float)
    dense, expert = x[..., DENSE].sum(axis=-1) - both * room.shared[1], x[..., EXPERT].sum(axis=-1)
    staged = 2 * np.minimum(room.bucket, 2 * (dense + expert))
    late = (room.late[0][chunks] * x[..., SAVED] + room.late[1][chunks] * x[..., OWED]).sum(axis=-1)
    flying = np.maximum((room.flying[chunks] * x[..., SAVED]).sum(axis=-1), late) + x[..., LIVE].max(axis=-1)
    kept = x[..., KEPT].sum(axis=-1) - both * room.shared[0]
    return kept + x[..., WIDE].max(axis=-1) + staged + flying + room.fixed


@st.composite
def problems(draw, chunks):
    """Layers of up to three kinds in any order, ends that weigh, memory that differs from time."""
    num_chunks = int(chunks.max()) + 1
    num = draw(st.integers(num_chunks, num_chunks + 4))
    kinds = draw(st.lists(st.integers(0, 2), min_size=num, max_size=num))
    of_kind = draw(st.lists(st.tuples(NUMBER, NUMBER, NUMBER, NUMBER), min_size=3, max_size=3))
    seconds, kept, saved, live = (np.array([of_kind[k][i] for k in kinds]) for i in range(4))
    first, last, head, tail = (draw(NUMBER) for _ in range(4))
    costs = with_bytes(linear_costs(seconds, first, last, num_chunks, np.inf), kept, saved, live, (head, tail))
    flying = np.array(draw(st.lists(st.integers(1, 6), min_size=num_chunks, max_size=num_chunks)), dtype=float)
    bucket = draw(st.sampled_from([0.0, 3.0, 1e9]))
    shared = np.array([min(head, tail) / 2, min(head, tail) / 3])
    late = np.array([flying // 2, draw(st.sampled_from([0, 1, 5])) * flying])
    return costs, Room(np.inf, 2.5, bucket, 1, shared, flying, late, CONSTANTS)


def best_of(costs, chunks, room, limit):
    """(busiest, squares) of the best of all layouts, and the least memory that any takes."""
    every = compositions(len(costs.floor) - 1, int(chunks.max()) + 1)
    nbytes = bytes_of(costs, chunks, room, every).max(axis=-1)
    fits = every[nbytes <= limit]
    busiest = seconds_of(costs, chunks, fits).max(axis=-1)
    squares = (of_chunks(costs.seconds, costs, fits) ** 2).sum(axis=-1)
    best = (busiest.min(), squares[busiest <= busiest.min() * (1 + 1e-12)].min()) if len(fits) else None
    return best, nbytes.min()


@pytest.mark.parametrize("name", PLACEMENTS)
@settings(max_examples=30)
@given(data=st.data())
def test_no_layout_is_better_whatever_the_layers_and_the_memory(name, data):
    chunks = PLACEMENTS[name]
    costs, free = data.draw(problems(chunks))
    _, least = best_of(costs, chunks, free, np.inf)
    limit = data.draw(st.sampled_from([np.inf, 2.0 * least, 1.1 * least, 1.01 * least, least, 0.9 * least]))
    found = balance(costs, chunks, free._replace(limit=limit))
    layers = np.array(found.layers)
    assert layers.sum() == len(costs.floor) - 1
    assert found.fits == (limit > 0.99 * least)
    (busiest, squares), _ = best_of(costs, chunks, free, max(limit, least) * (1 + 1e-12))
    assert found.seconds == pytest.approx(busiest, rel=1e-11)
    assert (of_chunks(costs.seconds, costs, layers) ** 2).sum() == pytest.approx(squares, rel=1e-9)
    if np.isfinite(limit):
        assert found.nbytes == pytest.approx(bytes_of(costs, chunks, free, layers).max(), rel=1e-12)


@pytest.mark.parametrize(("p", "v"), [(2, 2), (2, 3), (3, 2), (4, 2)])
@settings(max_examples=30)
@given(data=st.data())
def test_interleaved_ranks_are_balanced_exactly_where_alike_layers_follow_a_prefix(p, v, data):
    chunks = placement(Schedule.INTERLEAVED, p, v)
    num = data.draw(st.integers(p * v, p * v + 5))
    prefix = data.draw(st.integers(0, min(3, num - 1)))
    odd, alike, first, last = (data.draw(NUMBER) for _ in range(4))
    seconds = np.array([odd] * prefix + [alike] * (num - prefix))
    costs = linear_costs(seconds, first, last, p * v, np.inf)
    found = balance(costs, chunks, unlimited(p * v), prefix)
    busiest = seconds_of(costs, chunks, compositions(num, p * v)).max(axis=1).min()
    assert sum(found.layers) == num
    assert found.seconds == pytest.approx(busiest, rel=1e-9)


@settings(max_examples=30)
@given(data=st.data())
def test_interleaved_ranks_keep_within_memory_and_come_closest_where_they_cannot(data):
    chunks = placement(Schedule.INTERLEAVED, 3, 2)
    costs, free = data.draw(problems(chunks))
    num = len(costs.floor) - 1
    costs = with_bytes(linear_costs(np.full(num, 2.0), 1.0, 3.0, 6, np.inf), *np.full((3, num), 1.5), (1.0, 2.0))
    free = free._replace(shared=np.zeros(2))
    even = bytes_of(costs, chunks, free, np.array(even_layers(num, 6))).max()
    limit = data.draw(st.sampled_from([1.2, 1.0, 0.95, 0.5])) * even
    found = balance(costs, chunks, free._replace(limit=limit))
    assert found.nbytes == pytest.approx(bytes_of(costs, chunks, free, np.array(found.layers)).max())
    assert found.fits == (found.nbytes <= limit * (1 + 1e-12))
    if limit >= even:
        assert found.fits
    else:
        assert found.nbytes <= even * (1 + 1e-12)


def test_alternating_layers_are_balanced_by_chunk_and_say_so():
    chunks = placement(Schedule.INTERLEAVED, 2, 2)
    seconds = np.array([1.0, 5.0] * 6)
    costs = with_bytes(linear_costs(seconds, 0.5, 7.0, 4, np.inf), *np.ones((3, 12)), (1.0, 1.0))
    found = balance(costs, chunks, unlimited(4), prefix_of([0, 1] * 6))
    assert found.shape is Shape.BY_CHUNK
    busiest = of_chunks(costs.seconds, costs, compositions(12, 4)).max(axis=1).min()
    assert of_chunks(costs.seconds, costs, np.array(found.layers)).max() == busiest
    room = Room(40.0, 0.0, 0.0, 1, np.zeros(2), np.array([4.0, 3.0, 2.0, 1.0]), np.zeros((2, 4)), CONSTANTS)
    limited = balance(costs, chunks, room, prefix_of([0, 1] * 6))
    assert limited.fits
    assert limited.nbytes == pytest.approx(bytes_of(costs, chunks, room, np.array(limited.layers)).max())
    assert not balance(costs, chunks, room._replace(limit=1.0), prefix_of([0, 1] * 6)).fits


def test_a_heavy_head_takes_layers_from_the_last_chunk_and_gives_them_to_later_ones():
    costs = linear_costs(np.ones(61), 0.1, 3.2, 16, np.inf)
    found = balance(costs, placement(Schedule.ONE_F_ONE_B, 16), unlimited(16))
    assert found.layers == (3, 3, *(4,) * 13, 3) or found.seconds == pytest.approx(4.2)
    assert found.layers == tuple(sorted(found.layers[:-1])) + (found.layers[-1],)


@pytest.mark.parametrize("name", PLACEMENTS)
@settings(max_examples=15)
@given(data=st.data())
def test_a_thrifty_layout_takes_least_of_those_with_an_equally_busy_rank(name, data):
    chunks = PLACEMENTS[name]
    costs, free = data.draw(problems(chunks))
    every = compositions(len(costs.floor) - 1, int(chunks.max()) + 1)
    busiest, nbytes = seconds_of(costs, chunks, every).max(axis=1), bytes_of(costs, chunks, free, every).max(axis=1)
    found = balance(costs, chunks, free._replace(limit=1e9), thrifty=True)
    assert found.seconds == pytest.approx(busiest.min(), rel=1e-11)
    assert found.nbytes == pytest.approx(nbytes[busiest <= busiest.min() * (1 + 1e-11)].min(), rel=1e-11)


def test_equal_layers_without_ends_are_spread_evenly():
    for p in (2, 3, 5, 8):
        found = balance(linear_costs(np.ones(8), 0.0, 0.0, p, np.inf), placement(Schedule.GPIPE, p), unlimited(p))
        assert max(found.layers) - min(found.layers) <= 1


def test_a_cut_that_the_even_layout_gives_loses_nothing():
    draw = np.random.default_rng(0)
    for name, chunks in PLACEMENTS.items():
        num_chunks = int(chunks.max()) + 1
        for _ in range(20):
            seconds, first, last = draw.uniform(0.5, 2.0, 14), *draw.uniform(0.0, 4.0, 2)
            whole = linear_costs(seconds, first, last, num_chunks, np.inf)
            even = np.array(even_layers(14, num_chunks))
            cut = rank_loads(whole, chunks, unlimited(num_chunks), even)[0].max()
            short = linear_costs(seconds, first, last, num_chunks, cut * (1 + 1e-9))
            assert balance(short, chunks, unlimited(num_chunks)) == balance(whole, chunks, unlimited(num_chunks)), name


def test_one_layer_less_than_chunks_leaves_an_end_empty():
    costs = linear_costs(np.ones(6), 0.5, 2.0, 8, np.inf)
    for chunks in (placement(Schedule.ONE_F_ONE_B, 8), V_SHAPE, placement(Schedule.INTERLEAVED, 4, 2)):
        assert balance(costs, chunks, unlimited(8)).layers == (0, 1, 1, 1, 1, 1, 1, 0)


def test_shapes_are_read_off_the_placement():
    assert shape_of(placement(Schedule.ONE_F_ONE_B, 4), 0) is Shape.ONE_EACH
    assert shape_of(placement(Schedule.DUALPIPE, 4), 0) is Shape.PAIRS
    assert shape_of(V_SHAPE, 0) is Shape.PAIRS
    assert shape_of(placement(Schedule.INTERLEAVED, 4, 3), 3) is Shape.ROUND_ROBIN
    assert shape_of(placement(Schedule.INTERLEAVED, 4, 3), 30) is Shape.BY_CHUNK
