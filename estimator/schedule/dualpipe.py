"""Orders of DualPipe, one rank at a time: micro-batches enter at both ends, or return from the turn of a V."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from estimator.schedule.passes import Kind, Pass

__all__ = ["dualpipe", "dualpipe_v"]


def dualpipe(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """Micro-batches fed from both ends: DeepSeek-V3, arXiv:2412.19437, Fig. 5 and section 3.2.1.

    Micro-batches 0 .. m/2 - 1 flow from rank 0 to p - 1, the rest the other way. Phase 0 is the direction whose entry
    is nearer to this rank, phase 1 the other.
    """
    depth = min(rank, p - 1 - rank)
    firsts = (0, m // 2) if rank < p // 2 else (m // 2, 0)
    return _eight_steps(p // 2, depth, m // 2, (depth, p - 1 - depth), firsts)


def dualpipe_v(p: int, m: int, v: int, rank: int) -> Iterator[Pass]:
    """One half of DualPipe over 2p ranks: chunks i and 2p - 1 - i on rank i, whose weights no other rank holds.

    The way back of every micro-batch is the other direction ("cut in half", DeepSeek's DualPipe).
    """
    return _eight_steps(p, rank, m, (rank, 2 * p - 1 - rank), (0, 0))


def _eight_steps(half: int, depth: int, m: int, chunks: tuple[int, int], firsts: tuple[int, int]) -> Iterator[Pass]:
    """Passes of the rank `depth` from its end of `half` ranks: m micro-batches of each phase, from `firsts` on."""
    inner = half - 1 - depth
    forwards, backwards = [0, 0], [0, 0]
    owed: deque[Pass] = deque()  # weight gradients put off, oldest first

    def forward(phase: int) -> Pass:
        forwards[phase] += 1
        return Pass(Kind.F, chunks[phase], firsts[phase] + forwards[phase] - 1)

    def backward(phase: int, *, split: bool = False) -> Pass:
        backwards[phase] += 1
        item = Pass(Kind.B if split else Kind.BW, chunks[phase], firsts[phase] + backwards[phase] - 1)
        if split:
            owed.append(item._replace(kind=Kind.W))
        return item

    def pair(phase: int) -> Pass:
        ahead, back = forward(phase), backward(1 - phase)
        return Pass(Kind.PAIR, ahead.chunk, ahead.micro_batch, back.chunk, back.micro_batch)

    # Step 1: forwards of phase 0 until the first micro-batch of the other direction arrives
    for _ in range(2 * inner):
        yield forward(0)

    # Step 2: forwards of both phases in turn
    for _ in range(depth + 1):
        yield forward(0)
        yield forward(1)

    # Step 3: split backwards of phase 1, the weight gradient at once, then a forward of phase 1
    for _ in range(inner):
        yield backward(1, split=True)
        yield owed.popleft()
        yield forward(1)

    # Step 4 (main): overlapped pairs, forward 0 with backward 1, then forward 1 with backward 0
    for index in range(m - 2 * half + depth + 1):
        if index == 0 and inner == 0:  # the other middle rank waits for this forward, so it is not held up by a pair
            yield forward(0)
            yield backward(1)
        else:
            yield pair(0)
        yield pair(1)

    # Step 5: phase 0 has no forwards left: backward 1 alone, then forward 1 with backward 0
    for _ in range(inner):
        yield backward(1)
        yield pair(1)

    # Step 6: backwards of both phases in turn, the second half of them split
    for index in range(2 * (depth + 1)):
        yield backward(1 - index % 2, split=index > depth)

    # Step 7: an owed weight gradient, then a split backward of phase 0
    for _ in range(inner):
        yield owed.popleft()
        yield backward(0, split=True)

    # Step 8: the weight gradients still owed
    while owed:
        yield owed.popleft()
