"""Cases of `search bench` about measured traces: how fast clocks are aligned and a synthesised job is replayed."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from capture.align import solve
from capture.traces.bounds import Ends, Messages
from capture.traces.model_jobs import resnet50
from capture.traces.records import Topology
from capture.traces.synthesise import Link, Wire, buckets, synthesise
from estimator.replay import replay

__all__ = ["align_s", "trace_replay_events_per_s"]

NUM_NODES, NUM_MESSAGES = 128, 20_000
WIRE_S, QUEUE_S, OFFSET_S = 1e-3, 200e-6, 0.05
NUM_WORKERS, BUCKET_BYTES = 128, 4e6
NUM_RUNS = 5


def align_s() -> float:
    """Offsets of 128 nodes around a ring from 20,000 messages with queueing, imports done."""
    observed = _messages()
    nothing = Ends(start_s=np.zeros((0, NUM_NODES)), end_s=np.zeros((0, NUM_NODES)))
    return median(_seconds(observed, nothing) for _ in range(NUM_RUNS))


def _messages() -> Messages:
    """Each starts when both ends are there and queues beside its wire time; clocks are off by up to 50 ms."""
    rng, k = np.random.default_rng(0), np.arange(NUM_MESSAGES)
    source, target = k % NUM_NODES, (k + 1) % NUM_NODES
    begin = np.sort(rng.uniform(0.0, 20.0, NUM_MESSAGES))
    sent, posted = (begin + rng.exponential(1.5 * QUEUE_S, NUM_MESSAGES) for _ in range(2))
    end = np.maximum(sent, posted) + WIRE_S + rng.exponential(QUEUE_S, NUM_MESSAGES)
    lacks = rng.uniform(-OFFSET_S, OFFSET_S, NUM_NODES)
    return Messages(
        source=source, target=target, family=source, nbytes=np.full(NUM_MESSAGES, 1e6), sent_s=sent - lacks[source],
        posted_s=posted - lacks[target], end_s=end - lacks[target],
    )  # fmt: skip


def _seconds(observed: Messages, nothing: Ends) -> float:
    start = time.perf_counter()
    solve(tuple(range(NUM_NODES)), observed, nothing, [None] * NUM_NODES)
    return time.perf_counter() - start


def trace_replay_events_per_s() -> float:
    """Operations a second of a ResNet-50-sized job on a ring of 128 workers, 632 thousand in all: the best of a few."""
    job = resnet50(workers=NUM_WORKERS)
    wire = Wire(topology=Topology.RING, link=Link(bytes_per_s=12.5e9, latency_s=5e-6))
    made = synthesise(job, buckets(job.gradients, BUCKET_BYTES), wire)
    replay(made.tasks, ready=made.ready)
    best = float("inf")
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        replay(made.tasks, ready=made.ready)
        best = min(best, time.perf_counter() - start)
    return len(made.tasks) / best
