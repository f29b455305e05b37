"""What begins and ends a replayed step: who waits for gradients and for new weights."""

from __future__ import annotations

import numpy as np

import spaces
from estimator.detail.unroll import unroll
from estimator.model_io import load_model
from estimator.strategy import Overlap, Schedule, Strategy
from estimator.workload import Workload
from hardware.catalog import cluster

LLAMA = load_model("llama3_8b", [spaces.MODELS])
BUCKET = 10**9


def unrolled(**choices):
    strategy = Strategy(zero_stage=1, overlap=Overlap(dp=1), bucket_bytes=BUCKET, **choices)
    return unroll(LLAMA, strategy, cluster("dgx_h100", 16), Workload(seq=4096, global_batch=32))


def called(tasks, name):
    return np.flatnonzero(np.array(tasks.names)[tasks.name] == name)


def test_first_forwards_wait_for_their_weights_and_reductions_for_the_last_backwards():
    tasks = unrolled(pp=2)
    for gather in called(tasks, "weights.gather"):
        readers = tasks.after[tasks.before == gather]
        assert len(readers)
        assert (tasks.micro_batch[readers] == 0).all()
        assert (tasks.device[readers] == tasks.device[gather]).all()
    last = tasks.micro_batch.max()
    for reduce in called(tasks, "gradients.reduce"):
        assert (tasks.micro_batch[tasks.before[tasks.after == reduce]] == last).all()


def test_gradients_of_a_chunk_on_two_ranks_wait_for_both():
    tasks = unrolled(pp=4, schedule=Schedule.DUALPIPE)
    for reduce in called(tasks, "gradients.reduce"):
        makers = tasks.device[tasks.before[tasks.after == reduce]]
        mine = int(tasks.device[reduce])
        assert set(makers.tolist()) == {mine, 3 - mine}
