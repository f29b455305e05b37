"""Orders over two chunks a rank in a V: rank i runs chunks i and 2p - 1 - i, so both ends of the model are on rank 0.

ZB-V: Qi 2023, arXiv:2401.10241, section 6. V-Half and V-Min: Qi 2024, arXiv:2405.15362, section 3, which makes a
schedule by repeating a *building block*, the passes of one micro-batch, every six units of time (two forwards, two
input gradients, two weight gradients, equally long). What a rank holds is how long its activations live over six.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final

from estimator.schedule.passes import Kind, Order, Pass
from estimator.schedule.searched import with_weight_gradients

__all__ = ["v_half", "v_min", "zb_v"]

INTERVAL: Final = 6
"""Units of time from one micro-batch to the next: F, B and W of two chunks."""


def zb_v(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """No rank waits between its first and its last pass where F = B = W; every rank holds 2p chunks.

    The warm-up is the same for any m: passes of micro-batches beyond m are left out.
    """
    near, far = rank, 2 * p - 1 - rank
    done = dict.fromkeys(((kind, chunk) for kind in (Kind.F, Kind.B, Kind.W) for chunk in (near, far)), 0)
    total = max(m, 2 * p - 1)

    def run(kind: Kind, chunk: int) -> Iterator[Pass]:
        micro_batch = done[kind, chunk]
        done[kind, chunk] += 1
        if micro_batch < m:
            yield Pass(kind, chunk, micro_batch)

    # Forwards until the first micro-batch is back from the turn, then of both chunks until its gradient arrives
    for _ in range(2 * (p - rank) - 1):
        yield from run(Kind.F, near)
    for _ in range(rank):
        yield from run(Kind.F, far)
        yield from run(Kind.F, near)
    for _ in range(p - rank):
        for kind in (Kind.F, Kind.B, Kind.W):
            yield from run(kind, far)

    # Steady: forward, input gradient and weight gradient of each chunk in turn
    while done[Kind.F, far] < total:
        if done[Kind.F, near] < total:
            yield from run(Kind.F, near)
        yield from run(Kind.B, near)
        yield from run(Kind.W, near)
        for kind in (Kind.F, Kind.B, Kind.W):
            yield from run(kind, far)

    # Input gradients first: other ranks wait for them; then what is owed
    for _ in range(rank):
        yield from run(Kind.B, near)
        yield from run(Kind.B, far)
    for _ in range(p - rank):
        yield from run(Kind.B, near)
        yield from run(Kind.W, near)
    for chunk in (far, near):
        while done[Kind.W, chunk] < done[Kind.B, chunk]:
            yield from run(Kind.W, chunk)


def v_min(p: int, m: int) -> Order:
    """Every pass follows its neighbour's at once: the least that a V can hold, about p / 3."""
    return _repeated(p, m, (1, 1, 1, 1), 2 * ((p + 4) // 3))


def v_half(p: int, m: int) -> Order:
    """Half of what 1F1B holds: forwards descend and gradients ascend at half that pace."""
    return _repeated(p, m, (1, 2, 1, 2), 2 * ((p + 2) // 2))


def _repeated(p: int, m: int, pace: tuple[int, int, int, int], most: int) -> Order:
    """The building block of `pace` for every micro-batch, squeezed: weight gradients where a rank would wait.

    `pace`: units between neighbours of F down, F up, B down, B up. `most`: chunks that a rank may hold.
    """
    starts = _building_block(p, pace)
    kinds = ((Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0))
    main: Order = []
    for rank in range(p):
        chunks = (rank, 2 * p - 1 - rank)
        timed = [
            (starts[part][rank] + INTERVAL * k, Pass(kind, chunks[local], k))
            for part, (kind, local) in enumerate(kinds)
            for k in range(m)
        ]
        main.append([item for _, item in sorted(timed, key=lambda one: one[0])])
    return with_weight_gradients(main, 2 * p, most)


def _building_block(p: int, pace: tuple[int, int, int, int]) -> list[list[int]]:
    """When each rank starts F of its first chunk, F and B of its second, B of its first: [4][p] units.

    Passes follow their inputs as soon as no two of a rank fall on the same unit of the interval.
    """
    down_f, up_f, down_b, up_b = pace

    def block(wait_f: int, turn: int, wait_b: int) -> list[list[int]]:
        first = [down_f * i for i in range(p)]
        second = [first[-1] + 1 + wait_f + up_f * (p - 1 - i) for i in range(p)]
        third = [second[0] + 1 + turn + down_b * i for i in range(p)]
        fourth = [third[-1] + 1 + wait_b + up_b * (p - 1 - i) for i in range(p)]
        return [first, second, third, fourth]

    waits = sorted(product(range(INTERVAL), repeat=3), key=sum)
    blocks = (block(*wait) for wait in waits)
    return next(
        made for made in blocks if all(len({t % INTERVAL for t in rank}) == 4 for rank in zip(*made, strict=True))
    )
