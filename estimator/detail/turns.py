"""In which order two passes side by side launch their kernels: one computes while the other waits for its transfer.

A plan made ahead, as a framework writes it down; the replay then says what it takes.
"""

from __future__ import annotations

from estimator.detail.script import Lane, Script
from estimator.tasks import Shield

__all__ = ["Turn", "turns"]

Turn = tuple[int, int, int]
"""Which of the two passes, and its first and last kernel of this turn."""


def turns(passes: tuple[Script, Script]) -> list[Turn]:
    """Greedy: of the passes that can compute, the one with more seconds left does, kernel by kernel.

    Each pass is taken as a chain of kernels and of the transfers that its partner is to hide; both share one stream for
    those. Neglects that transfers slow kernels down.
    """
    chains = [_chain(script) for script in passes]
    left = [sum(seconds for _, seconds, _ in chain) for chain in chains]
    at, ready = [0, 0], [0.0, 0.0]
    now = wire = 0.0
    done: list[Turn] = []
    while any(at[k] < len(chains[k]) for k in (0, 1)):
        waiting = [k for k in (0, 1) if at[k] < len(chains[k])]
        sending = [k for k in waiting if not chains[k][at[k]][2]]
        if sending:  # leaves at once, and holds only its own pass up
            k = min(sending, key=lambda k: ready[k])
            wire = ready[k] = max(wire, ready[k]) + chains[k][at[k]][1]
        else:
            able = [k for k in waiting if ready[k] <= now]
            if not able:
                now = min(ready[k] for k in waiting)
                continue
            k = max(able, key=lambda k: left[k])
            task, seconds, _ = chains[k][at[k]]
            now = ready[k] = now + seconds
            if done and done[-1][0] == k:
                done[-1] = (k, done[-1][1], task)
            else:
                done.append((k, task, task))
        left[k] -= chains[k][at[k]][1]
        at[k] += 1
    return done


def _chain(script: Script) -> list[tuple[int, float, bool]]:
    """Kernels and partner's transfers of a script in order: (task, seconds, is it a kernel)."""
    return [
        (task, script.seconds[task], script.lane[task] == Lane.COMPUTE)
        for task in range(len(script))
        if script.lane[task] == Lane.COMPUTE or script.shield[task] is Shield.PARTNER
    ]
