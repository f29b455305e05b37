"""Passes of one batch through the stages of a pipeline, micro-batch after micro-batch.

What a pass costs says passes.py; this lays its blocks over the stages. Knows nothing of a growing output or of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from estimator.cost.collective import point_to_point
from estimator.graph import BlockKind
from estimator.imbalance import Routing
from estimator.inference.deployment import Deployment
from estimator.inference.laws import replicas, routing_of
from estimator.inference.passes import PassPrice, priced_pass
from estimator.inference.workload import Requests, ServingPhase
from estimator.layout import Layout, layout_of
from estimator.model import ModelSpec
from estimator.strategy import Schedule
from hardware.system import SystemSpec

__all__ = ["STEP_HOST_S", "SUMMED", "Run", "decode_run", "run_of"]

STEP_HOST_S = 2e-4  # between two passes, to hand over tokens; assumption: what else the host does hides beside them
SUMMED = {"compute_s": "compute_s", "attention_s": "attention_s", "exposed_comm_tp_s": "tp_s",
          "exposed_comm_ep_s": "ep_s", "host_s": "host_s"}  # fmt: skip
"""Columns that are sums over blocks, and what they sum up."""
OF_CONTEXT = ("seconds", "compute_s", "attention_s")  # what attention of prompts beside adds to


class Run(NamedTuple):
    """One batch through the stages: seconds `[R]` each."""

    price: PassPrice
    layout: Layout
    micro_batches: int
    halves: int  # of a micro-batch that take turns
    once: np.ndarray  # one micro-batch through all stages
    slowest: np.ndarray  # its longest stage
    hop: float
    sums: Mapping[str, np.ndarray]  # columns of one micro-batch

    def pass_seconds(self, deployment: Deployment) -> np.ndarray:
        """From one decoded token of every sequence to the next."""
        hops = deployment.pp * self.hop if deployment.pp > 1 else 0.0  # the last one brings the token back
        return np.asarray(np.maximum(self.once + hops, self.micro_batches * self.slowest) + STEP_HOST_S)


def run_of(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests, phase: ServingPhase,
    sequences: int, lengths: tuple[float, ...], *, chunk: int = 0, drafted: ModelSpec | None = None,
) -> Run:  # fmt: skip
    """Of so many sequences on each replica, of prompts or behind caches of `lengths` tokens.

    `chunk`: tokens of prompts that ride in a pass of a replica. `drafted`: the model with the module that makes drafts.
    """
    m, pp = _micro_batches(sequences, deployment.pp), deployment.pp
    halves = 2 if deployment.overlap_ep and deployment.ep > 1 and sequences // m > 1 else 1
    each, beside = sequences / m / halves, chunk / m / halves
    routing = routing_of(model, requests)
    queries = 1 + deployment.drafts if phase is ServingPhase.DECODE else 1
    found = priced_pass(
        model, deployment, system, phase, sequences=each, contexts=lengths, overlap=halves > 1, queries=queries,
        beside=beside, routing=routing,
    )  # fmt: skip
    layout = layout_of(model, found.kinds, Schedule.ONE_F_ONE_B, pp, 1)
    seen = _seen(model, deployment, system, requests, routing) if chunk else {}

    def by_stage(name: str) -> np.ndarray:
        """Of one micro-batch [C, R]."""
        more = beside / requests.context if name in OF_CONTEXT else 0.0
        values = [np.broadcast_to(np.asarray(getattr(found.blocks[k], name)) + more * seen.get(k, 0.0), len(lengths))
                  for k in found.kinds]  # fmt: skip
        return np.asarray(layout.counts @ np.stack(values)) * halves

    stages = by_stage("seconds")
    stride = float(deployment.tp * replicas(deployment, system))
    hop = float(np.asarray(point_to_point(system, np.array([stride])).seconds(found.hop_bytes))[0]) if pp > 1 else 0.0
    run = Run(
        price=found, layout=layout, micro_batches=m, halves=halves, once=stages.sum(axis=0),
        slowest=stages.max(axis=0), hop=hop,
        sums={column: by_stage(name).sum(axis=0) for column, name in SUMMED.items()},
    )  # fmt: skip
    return run if drafted is None else _with_drafts(run, drafted, deployment, system, each, lengths, routing)


def decode_run(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests, lengths: tuple[float, ...],
    served: ModelSpec, *, chunk: int = 0,
) -> Run:  # fmt: skip
    """One token of every sequence, or with drafts several; `chunk` tokens of prompts beside them."""
    sequences = requests.batch // replicas(deployment, system)
    drafted = model if deployment.drafts else None
    return run_of(served, deployment, system, requests, ServingPhase.DECODE, sequences, lengths, chunk=chunk,
                  drafted=drafted)  # fmt: skip


def _micro_batches(sequences: int, pp: int) -> int:
    """Micro-batches of equal size: as many as stages where the sequences divide, else fewer."""
    return max(m for m in range(1, pp + 1) if sequences % m == 0)


def _seen(
    model: ModelSpec, deployment: Deployment, system: SystemSpec, requests: Requests, routing: Routing
) -> dict[BlockKind, float]:  # fmt: skip
    """Seconds of a block in which a whole prompt sees what stands before its tokens.

    Of all chunks together; ignores that a chunk reads the keys of those before it from the cache once more.
    """
    whole = priced_pass(model, deployment, system, ServingPhase.PREFILL, sequences=1.0,
                        contexts=(float(requests.context),), routing=routing)  # fmt: skip
    return {kind: float(np.max(block.context_s)) for kind, block in whole.blocks.items()}


def _with_drafts(
    run: Run, model: ModelSpec, deployment: Deployment, system: SystemSpec, sequences: float,
    lengths: tuple[float, ...], routing: Routing,
) -> Run:  # fmt: skip
    """A run whose last stage makes drafts one by one, each a pass of the prediction module for every sequence.

    All of its seconds count for the slowest stage as well, which is an upper bound.
    """
    found = priced_pass(model, deployment, system, ServingPhase.DECODE, sequences=sequences, contexts=lengths,
                        routing=routing)  # fmt: skip
    modules = found.sequence[found.sequence.index(BlockKind.HEAD) + 1 :]
    times = deployment.drafts / model.num_mtp_layers * run.halves

    def of(name: str) -> np.ndarray:
        values = [np.broadcast_to(np.asarray(getattr(found.blocks[k], name)), len(lengths)) for k in modules]
        return np.asarray(times * np.sum(values, axis=0))

    more = of("seconds")
    sums = {column: run.sums[column] + of(name) for column, name in SUMMED.items()}
    return run._replace(once=run.once + more, slowest=run.slowest + more, sums=sums)
