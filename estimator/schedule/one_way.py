"""Orders whose micro-batches enter at one end, chunk j on rank j % p: one rank at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from estimator.schedule.passes import Kind, Pass

__all__ = ["breadth_first", "gpipe", "interleaved", "one_f_one_b", "side_by_side", "zb_h1", "zb_h2"]


def gpipe(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """All forwards, then all backwards: Huang 2019, arXiv:1811.06965."""
    yield from (Pass(Kind.F, rank, k) for k in range(m))
    yield from (Pass(Kind.BW, rank, k) for k in range(m))


def one_f_one_b(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """Warm-up of p - 1 - rank forwards, then one forward, one backward: Narayanan 2021, arXiv:2104.04473, Fig. 4."""
    warm_up = min(p - 1 - rank, m)
    yield from (Pass(Kind.F, rank, k) for k in range(warm_up))
    for k in range(m):
        if k + warm_up < m:
            yield Pass(Kind.F, rank, k + warm_up)
        yield Pass(Kind.BW, rank, k)


def interleaved(p: int, m: int, v: int, rank: int, group: int) -> Iterator[Pass]:
    """1F1B over v chunks a rank, `group` micro-batches a chunk at a time; a last, smaller group holds what is left.

    With groups of p: Narayanan 2021, arXiv:2104.04473, section 2.2. Larger ones are Megatron-Core's
    microbatch_group_size_per_vp_stage.
    """
    table = [
        (local, k)
        for start in range(0, m, group)
        for local in range(v)
        for k in range(start, min(start + group, m))
    ]  # fmt: skip

    def passes(kind: Kind, n: int) -> Pass:
        local, k = table[n]
        return Pass(kind, (local if kind is Kind.F else v - 1 - local) * p + rank, k)

    total = m * v
    warm_up = min(2 * (p - 1 - rank) + (v - 1) * group, total)
    yield from (passes(Kind.F, n) for n in range(warm_up))
    for n in range(total):
        if n + warm_up < total:
            yield passes(Kind.F, n + warm_up)
        yield passes(Kind.BW, n)


def breadth_first(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """All micro-batches of a chunk before the next, forward, then backward: Lamy-Poirier 2022, arXiv:2211.05953."""
    for chunk in range(rank, p * v, p):
        yield from (Pass(Kind.F, chunk, k) for k in range(m))
    for chunk in reversed(range(rank, p * v, p)):
        yield from (Pass(Kind.BW, chunk, k) for k in range(m))


def zb_h1(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """1F1B with the weight gradient put off by `rank` micro-batches: ZB-H1 of Qi 2023, arXiv:2401.10241, section 2.1.

    Rank i starts p - 1 - i forwards ahead and keeps i weight gradients back, so every rank holds p activations and the
    last rank's weight gradients fill the tail.
    """
    return _split(m, rank, p - 1 - rank, rank)


def zb_h2(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """Twice as far ahead and as late: ZB-H2 of Qi 2023, section 2.2. Every rank holds 2p - 1 activations.

    No rank waits for its first gradient, so where F = B = W none waits at all; the last still begins p - 1 forwards
    after the first, and ends as much later.
    """
    return _split(m, rank, 2 * (p - 1 - rank), 2 * rank)


def _split(m: int, chunk: int, ahead: int, owed: int) -> Iterator[Pass]:
    """One forward, one input gradient, one weight gradient: forwards `ahead` and weight gradients `owed` behind."""
    warm_up = min(ahead, m)
    yield from (Pass(Kind.F, chunk, k) for k in range(warm_up))
    for k in range(m):
        if k + warm_up < m:
            yield Pass(Kind.F, chunk, k + warm_up)
        yield Pass(Kind.B, chunk, k)
        if k >= owed:
            yield Pass(Kind.W, chunk, k - owed)
    yield from (Pass(Kind.W, chunk, k) for k in range(max(m - owed, 0), m))


def side_by_side(items: Sequence[Pass]) -> list[Pass]:
    """A rank's passes with each forward of the steady phase beside the backward that followed it.

    So two micro-batches hide each other's expert traffic, and one micro-batch more is in flight. (Megatron-Core warms
    up by one more forward for it.) Passes must be whole forwards and backwards.

    >>> [x.kind.name for x in side_by_side(list(one_f_one_b(1, 3, 1, 0)))]
    ['F', 'PAIR', 'PAIR', 'BW']
    """
    forwards = [item for item in items if item.kind is Kind.F]
    backwards = [item for item in items if item.kind is Kind.BW]
    assert len(forwards) + len(backwards) == len(items), "only whole forwards and backwards run side by side"
    ahead = next(n for n, item in enumerate(items) if item.kind is Kind.BW)
    pairs = [
        Pass(Kind.PAIR, f.chunk, f.micro_batch, b.chunk, b.micro_batch)
        for f, b in zip(forwards[ahead:], backwards, strict=False)
    ]
    return [*forwards[:ahead], *pairs, *backwards[len(pairs) :]]
