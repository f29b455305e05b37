# ruff: noqa: ANN001, ANN201, ANN202 - jitted kernels: numba types their arguments from the call
# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False
"""The loop behind replay.py: which task runs when, event by event, over arrays. Checks nothing.

Letters as in tasks.py: N tasks, E edges, S streams, D devices, L links. Time moves from one event to the next: a task
ends, a launch is through (its task starts), a task that is held back until a given second is let go. Everything of one
instant is one *turn*: first all its events, then every idle stream takes the first task of its queue, then the rates of
the devices where something began or ended are renewed. Zero seconds end in a further turn of the same instant.

Two heaps. Events lie in a binary heap with a place per stream (its task's end or start) and per held task, so that a
new rate moves an event instead of leaving a stale one behind: it never outgrows S + N. The tasks that wait for a stream
form a pairing heap (Fredman et al. 1986) in two arrays over tasks, `child` and `sibling`, by (ready, index): a queue in
order of arrival that also has an order within an instant, at O(1) to enter and O(log) at worst to leave.

Rounding. A task whose rate stays 1 ends at start + seconds to the bit. A rate that changes turns the rest of the work,
never below zero, into a new end; no comparison of work left decides whether a task is done, only its event does, and
every event ends, starts or lets go one task. So the loop ends.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from estimator.jit import kernel, njit

__all__ = ["LEAST_RATE", "run", "successors"]

LEAST_RATE: Final = 0.1
"""Compute never falls below this share of its speed, however much the transfers beside it take (an assumption)."""

NONE: Final = -1


@njit(cache=True)
def successors(before, after, runs):
    """Edges between tasks that run, by the task they leave, their ends in order: first [N + 1], to, waits_for [N].

    Two counting sorts, by `after` and then by `before`.
    """
    n = len(runs)
    waits_for = np.zeros(n, np.int64)
    first = np.zeros(n + 1, np.int64)
    for e in range(len(before)):
        if runs[before[e]] and runs[after[e]]:
            waits_for[after[e]] += 1
            first[before[e] + 1] += 1
    place = np.empty(n, np.int64)
    kept = 0
    for i in range(n):
        place[i] = kept
        kept += waits_for[i]
        first[i + 1] += first[i]
    by_end = np.empty(kept, np.int64)
    for e in range(len(before)):
        if runs[before[e]] and runs[after[e]]:
            by_end[place[after[e]]] = e
            place[after[e]] += 1
    to = np.empty(kept, np.int64)
    place[:] = first[:n]
    for k in range(kept):
        e = by_end[k]
        to[place[before[e]]] = after[e]
        place[before[e]] += 1
    return first, to, waits_for


# ------------------------------------------------------------------------------------ the heap of events, by (time, id)


@kernel
def _up(heap, place, when, k):
    """Move the event at place k towards the root until its parent is no later."""
    x = heap[k]
    while k > 0:
        parent = (k - 1) >> 1
        y = heap[parent]
        if when[y] < when[x] or (when[y] == when[x] and y < x):
            break
        heap[k] = y
        place[y] = k
        k = parent
    heap[k] = x
    place[x] = k


@kernel
def _down(heap, place, when, size, k):
    """Move the event at place k away from the root until no child is earlier."""
    x = heap[k]
    while True:
        c = 2 * k + 1
        if c >= size:
            break
        y = heap[c]
        if c + 1 < size:
            z = heap[c + 1]
            if when[z] < when[y] or (when[z] == when[y] and z < y):
                c += 1
                y = z
        if when[x] < when[y] or (when[x] == when[y] and x < y):
            break
        heap[k] = y
        place[y] = k
        k = c
    heap[k] = x
    place[x] = k


# -------------------------------------------------------------------- queues of waiting tasks, each by (ready, index)


@kernel
def _join(child, sibling, since, a, b):
    """The root of two queues; either may be empty."""
    if a == NONE:
        return b
    if b == NONE:
        return a
    if since[b] < since[a] or (since[b] == since[a] and b < a):
        a, b = b, a
    sibling[b] = child[a]
    child[a] = b
    return a


@kernel
def _without_first(child, sibling, since, root):
    """The root of a queue whose first task left; that task is as new."""
    pairs = NONE
    a = child[root]
    child[root] = NONE
    while a != NONE:
        b = sibling[a]
        following = NONE if b == NONE else sibling[b]
        a = _join(child, sibling, since, a, b)
        sibling[a] = pairs
        pairs = a
        a = following
    root = NONE
    while pairs != NONE:
        following = sibling[pairs]
        sibling[pairs] = NONE
        root = _join(child, sibling, since, root, pairs)
        pairs = following
    return root


# ----------------------------------------------------------------------------------------------------------- the replay


@njit(cache=True)
def run(
    stream, seconds, launch_s, gates, takes, loads, weighs, owner, computes, first_stream, streams_of,
    first, to, waits_for, runs, ready,
):  # fmt: skip
    """start, end, blame, host_s [N] and how many tasks ended. `waits_for` is used up.

    weighs [N]: the task takes compute or loads a link, so its coming and going changes rates. owner, computes [S];
    streams_of: the streams by device, those of d from first_stream[d] on. first, to, waits_for: `successors`.
    """
    n, num_streams, num_devices, num_links = len(seconds), len(owner), len(first_stream) - 1, loads.shape[1]
    start, end = np.full(n, np.nan), np.full(n, np.nan)
    blame, host_s = np.full(n, NONE), np.zeros(n)
    since = np.zeros(n)  # when the task became ready
    child, sibling = np.full(n, NONE), np.full(n, NONE)
    queue, task, last = np.full(num_streams, NONE), np.full(num_streams, NONE), np.full(num_streams, NONE)
    launching, seen = np.zeros(num_streams, np.bool_), np.zeros(num_streams, np.bool_)
    left, at, rate = np.zeros(num_streams), np.zeros(num_streams), np.ones(num_streams)
    touched = np.empty(num_streams, np.int64)  # streams that may take a task in this turn
    host, weight = np.zeros(num_devices), np.zeros(num_devices, np.int64)  # host clock; tasks running that weigh
    stale, changed = np.zeros(num_devices, np.bool_), np.empty(num_devices, np.int64)  # devices to give new rates
    total = np.zeros(num_links)

    held = False
    for i in range(n):
        held = held or ready[i] > 0.0
    room = num_streams + (n if held else 0)
    heap, place, when = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room)
    size, num_touched, num_changed, done = 0, 0, 0, 0
    now = 0.0

    for i in range(n):
        if not runs[i] or waits_for[i] > 0:
            continue
        if ready[i] > 0.0:
            when[num_streams + i] = ready[i]
            heap[size] = num_streams + i
            size += 1
            _up(heap, place, when, size - 1)
        else:
            s = stream[i]
            queue[s] = _join(child, sibling, since, queue[s], i)
            if not seen[s]:
                seen[s] = True
                touched[num_touched] = s
                num_touched += 1

    while True:
        # Idle streams take their next task, all in order of (ready, index): the order of launches on a device
        taken = NONE
        for k in range(num_touched):
            s = touched[k]
            seen[s] = False
            i = queue[s]
            if task[s] == NONE and i != NONE:
                queue[s] = _without_first(child, sibling, since, i)
                taken = _join(child, sibling, since, taken, i)
        num_touched = 0
        while taken != NONE:
            i = taken
            taken = _without_first(child, sibling, since, i)
            s = stream[i]
            d = owner[s]
            task[s] = i
            if last[s] != NONE and end[last[s]] > since[i]:
                blame[i] = last[s]
            launched = now
            if launch_s[i] > 0.0:
                if gates[i] and since[i] > host[d]:
                    host[d] = since[i]
                host[d] += launch_s[i]
                launched = host[d]
            if launched > now:
                host_s[i] = launched - now
                launching[s] = True
                when[s] = launched
            else:
                start[i] = now
                left[s] = seconds[i]
                at[s] = now
                rate[s] = 1.0
                when[s] = now + seconds[i]
                weight[d] += weighs[i]
                if weight[d] > 0 and not stale[d]:
                    stale[d] = True
                    changed[num_changed] = d
                    num_changed += 1
            heap[size] = s
            size += 1
            _up(heap, place, when, size - 1)

        # New rates where something that weighs began or ended, or began beside it
        for k in range(num_changed):
            d = changed[k]
            stale[d] = False
            share = 0.0
            total[:] = 0.0
            for x in range(first_stream[d], first_stream[d + 1]):
                s = streams_of[x]
                i = task[s]
                if i == NONE or launching[s] or not weighs[i]:
                    continue
                if not computes[s]:
                    share += takes[i]
                for m in range(num_links):
                    total[m] += loads[i, m]
            for x in range(first_stream[d], first_stream[d + 1]):
                s = streams_of[x]
                i = task[s]
                if i == NONE or launching[s]:
                    continue
                if computes[s]:
                    new = max(LEAST_RATE, 1.0 - share)
                else:
                    most = 1.0
                    for m in range(num_links):
                        if loads[i, m] > 0.0 and total[m] > most:
                            most = total[m]
                    new = 1.0 / most
                if new != rate[s]:
                    left[s] = max(0.0, left[s] - (now - at[s]) * rate[s])
                    at[s] = now
                    rate[s] = new
                    when[s] = now + left[s] / new
                    _up(heap, place, when, place[s])
                    _down(heap, place, when, size, place[s])
        num_changed = 0

        # All events of the next instant
        if size == 0:
            break
        now = when[heap[0]]
        while size > 0 and when[heap[0]] == now:
            s = heap[0]
            size -= 1
            if size > 0:
                heap[0] = heap[size]
                _down(heap, place, when, size, 0)
            if s >= num_streams:
                i = s - num_streams
                since[i] = now
                s = stream[i]
                queue[s] = _join(child, sibling, since, queue[s], i)
                if not seen[s]:
                    seen[s] = True
                    touched[num_touched] = s
                    num_touched += 1
                continue
            i = task[s]
            d = owner[s]
            if launching[s]:
                launching[s] = False
                start[i] = now
                left[s] = seconds[i]
                at[s] = now
                rate[s] = 1.0
                when[s] = now + seconds[i]
                weight[d] += weighs[i]
                heap[size] = s
                size += 1
                _up(heap, place, when, size - 1)
            else:
                end[i] = now
                done += 1
                weight[d] -= weighs[i]
                task[s] = NONE
                last[s] = i
                if not seen[s]:
                    seen[s] = True
                    touched[num_touched] = s
                    num_touched += 1
                for e in range(first[i], first[i + 1]):
                    j = to[e]
                    waits_for[j] -= 1
                    if waits_for[j] > 0:
                        continue
                    if ready[j] > now:
                        when[num_streams + j] = ready[j]
                        heap[size] = num_streams + j
                        size += 1
                        _up(heap, place, when, size - 1)
                        continue
                    blame[j] = i
                    since[j] = now
                    q = stream[j]
                    queue[q] = _join(child, sibling, since, queue[q], j)
                    if not seen[q]:
                        seen[q] = True
                        touched[num_touched] = q
                        num_touched += 1
            if (weighs[i] or weight[d] > 0) and not stale[d]:
                stale[d] = True
                changed[num_changed] = d
                num_changed += 1
    return start, end, blame, host_s, done
