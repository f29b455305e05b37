"""Small jobs for tuners: random, with what fusing saves and what is kept."""

from __future__ import annotations

import numpy as np

from capture.traces.records import Topology
from capture.traces.synthesise import Gradient, Job, Link, Wire
from estimator.tasks import Category
from estimator.tuning import graph_mark
from search.tuner.decisions import Decisions, apart
from search.tuner.subject import MANY, UNKNOWN, Subject

WHOLE = float("inf")


def job(seed=0, *, layers=4, workers=4, copies=False, alike=True, silent=0.3, sent=1.0):
    """Forward and backward of some layers and the update; a few backward computes make no gradient, some make two."""
    rng = np.random.default_rng(seed)
    names = [f"FW.b{k}.x" for k in range(layers)] + [f"BW.b{k}.x" for k in reversed(range(layers))] + ["UPD"]
    kinds = [Category.FORWARD] * layers + [Category.BACKWARD] * layers + [Category.OPTIMIZER]
    rows = 1 if alike else workers
    seconds = rng.uniform(1e-3, 5e-3, (rows, len(names)))
    gradients = []
    for k in range(layers):
        op = layers + k
        for part in range(1 if rng.random() < 0.7 else 2):
            if rng.random() > silent or k == layers - 1:
                gradients.append(Gradient(name=f"w{k}.{part}", nbytes=float(sent * rng.uniform(1e5, 2e7)), op=op))
    made = np.zeros(len(names))
    np.add.at(made, [g.op for g in gradients], [g.nbytes for g in gradients])
    kept = rng.uniform(1e6, 1e7, layers)
    saves = np.minimum(rng.uniform(0.0, 2e-3, len(names)), 0.9 * seconds.min())
    saves[[layers - 1, 2 * layers - 1, 2 * layers]] = np.nan
    return Job(
        names=tuple(names), category=tuple(kinds), seconds=np.tile(seconds, (workers // rows, 1)),
        lag_s=np.tile(rng.uniform(0.0, 1e-4, (rows, len(names))), (workers // rows, 1)),
        release_s=np.zeros(workers), waits=2 * layers, gradients=tuple(gradients),
        copy_s_per_byte=1e-10 if copies else 0.0, keeps=np.concatenate([kept, made[layers:]]),
        frees=np.concatenate([np.zeros(layers), kept[::-1], [made.sum()]]), base_bytes=1e6, saves_s=saves,
    )  # fmt: skip


def wire(topology=Topology.RING, *, servers=1, rate=2e9):
    lanes = MANY if topology is Topology.PARAMETER_SERVER else 1
    return Wire(topology=topology, link=Link(bytes_per_s=rate, latency_s=1e-4), servers=servers, lanes=lanes)


def subject(made, over):
    return Subject(
        name="small", jobs=(made,), wire=over, start=apart(made), delays=(UNKNOWN,), launch_s=1e-5,
        mark=graph_mark(made.names, [(g.name, g.nbytes) for g in made.gradients]),
    )  # fmt: skip


def drawn(made, seed, **more):
    """Random decisions."""
    rng = np.random.default_rng(seed)
    return Decisions(
        ops=rng.random(len(made.names) - 1) < 0.5, tensors=rng.random(len(made.gradients) - 1) < 0.5, **more
    )
