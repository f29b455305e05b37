"""Which operations a trace shows where not all fit: those of the first, some middle and the last micro-batches.

What belongs to no micro-batch (optimizer, gradients) is always shown; where that alone is too much, its beginning.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

__all__ = ["ALL", "choose"]

ALL = "all"


def choose(micro_batch: np.ndarray, cost: np.ndarray, ran: np.ndarray, room: float) -> tuple[np.ndarray, str]:
    """Which tasks [N] to show, and what they are in words.

    micro_batch [N]: -1 where none; cost [N] bytes of their slices; ran [R]: those that ran, in order of time.
    """
    kept = np.ones(len(cost), dtype=np.bool_)
    if cost.sum() <= room:
        return kept, ALL
    kept = micro_batch < 0
    left = room - cost[kept].sum()
    if left < 0:  # what is of no micro-batch fills it alone
        return _earliest(cost, ran, room)
    num = int(micro_batch.max()) + 1
    by_number = np.bincount(micro_batch[~kept], weights=cost[~kept], minlength=num)
    taken: list[int] = []
    for number in _by_interest(num):
        left -= by_number[number]
        if left < 0:
            break
        taken.append(number)
    kept |= np.isin(micro_batch, taken)
    told = _ranges(sorted(taken)) if taken else "none"
    return kept, f"of micro-batches {told} of {num}; of the others passes only"


def _earliest(cost: np.ndarray, ran: np.ndarray, room: float) -> tuple[np.ndarray, str]:
    """The tasks `ran` (in order of time) that fit before the first that does not."""
    kept = np.zeros(len(cost), dtype=np.bool_)
    held = int(np.searchsorted(np.cumsum(cost[ran]), room, side="right"))
    kept[ran[:held]] = True
    return kept, f"the first {held} of {len(ran)}; of the others passes only"


def _by_interest(num: int) -> Iterator[int]:
    """Micro-batches: the first, one of the middle, the last, then their neighbours, and so on."""
    middle = [(num // 2 + (step + 1) // 2 * (1 if step % 2 else -1)) for step in range(num)]
    seen: set[int] = set()
    for i in range(num):
        for number in (i, middle[i], num - 1 - i):
            if 0 <= number < num and number not in seen:
                seen.add(number)
                yield number


def _ranges(numbers: list[int]) -> str:
    """Whole numbers in order as ranges.

    >>> _ranges([0, 1, 2, 7, 9, 10])
    '0-2, 7, 9-10'
    """
    starts = [n for n in numbers if n - 1 not in set(numbers)]
    ends = [n for n in numbers if n + 1 not in set(numbers)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
