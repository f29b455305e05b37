"""Jobs with known truth, for alignment: messages between nodes whose clocks are off by up to 50 ms."""

from __future__ import annotations

import numpy as np

from capture.traces.bounds import Ends, Messages

WIRE_S, QUEUE_S, SKEW_S, JITTER_S = 1e-3, 200e-6, 300e-6, 2e-6
OFFSET_S = 0.05
SPAN_S = 20.0


def messages(num, pairs, *, seed=0, servers=0, per_machine=1):
    """What the clocks lack [R], and messages: around a ring, or with `servers` between them and all others.

    A message of one of two sizes starts when both ends are there, waits in a queue (exponential, mean 200 us), and
    takes its wire time and a little jitter. Both ends post at random. Nodes of a machine share its clock.
    """
    rng = np.random.default_rng(seed)
    k = np.arange(pairs)
    source, target = k % num, (k + 1) % num
    if servers:
        worker, server = rng.integers(servers, num, pairs), rng.integers(0, servers, pairs)
        push = rng.random(pairs) < 0.5
        source, target = np.where(push, worker, server), np.where(push, server, worker)
    large = k // num % 2
    when = np.sort(rng.uniform(0.0, SPAN_S, pairs))
    sent, posted = when + rng.exponential(SKEW_S, pairs), when + rng.exponential(SKEW_S, pairs)
    waits = rng.exponential(QUEUE_S, pairs) + np.abs(rng.normal(0.0, JITTER_S, pairs))
    end = np.maximum(sent, posted) + WIRE_S * (1.0 + 0.5 * large) + waits
    theta = np.repeat(rng.uniform(-OFFSET_S, OFFSET_S, num // per_machine), per_machine)
    theta -= theta[0]
    family = np.unique(np.stack([source, target, large], axis=1), axis=0, return_inverse=True)[1]
    return theta, Messages(
        source=source, target=target, family=np.ravel(family), nbytes=1e6 * (1.0 + 0.5 * large),
        sent_s=sent - theta[source], posted_s=posted - theta[target], end_s=end - theta[target],
    )  # fmt: skip


def no_ends(num):
    """No collectives."""
    return Ends(start_s=np.zeros((0, num)), end_s=np.zeros((0, num)))
