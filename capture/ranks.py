"""Runs one function in several processes that can talk to each other: gloo on CPUs, NCCL on GPUs.

The first rank's answer is the answer. Knows nothing of what is run.
"""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

__all__ = ["BACKENDS", "agreed", "in_ranks"]

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
TIMEOUT_S = 120.0  # of a rank that waits for the others; an assumption
POLL_S = 0.5


def in_ranks(
    function: Callable[..., Any],
    *args: Any,  # noqa: ANN401 - whatever the function takes
    ranks: int,
    kind: str,
    threads: int,
    limit_s: float,  # noqa: ANN401
) -> Any:  # noqa: ANN401 - whatever the function gives
    """What `function(rank, *args)` gives on rank 0. ValueError where ranks die or are not done in time."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        workers = [
            context.Process(target=_rank, args=(function, args, rank, ranks, kind, threads, meeting, answers))
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        try:
            return _answer(workers, answers, limit_s)
        finally:
            for worker in workers:
                worker.join(timeout=POLL_S * 10)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


def agreed(rank: int | None, group: Any = None) -> Callable[[int], int]:  # noqa: ANN401 - of torch.distributed
    """Gives every rank the first one's number, and lets all start from there together."""
    if rank is None:
        return int

    import torch
    import torch.distributed as dist

    place = "cuda" if dist.get_backend() == "nccl" else "cpu"

    def agree(value: int) -> int:
        told = torch.tensor([value], device=place)
        dist.broadcast(told, src=0, group=group)
        return int(told.item())

    return agree


def _answer(workers: list[Any], answers: Any, limit_s: float) -> Any:  # noqa: ANN401 - of multiprocessing
    waited = 0.0
    while waited < limit_s:
        try:
            return answers.get(timeout=POLL_S)
        except Empty:
            waited += POLL_S
        dead = [i for i, worker in enumerate(workers) if worker.exitcode not in {None, 0}]
        if dead:
            raise ValueError(f"rank {dead[0]} of {len(workers)} died (its error stands above); measure with one rank")
    raise ValueError(f"{len(workers)} ranks must be done in {limit_s:.0f} s, but are not; give more --seconds")


def _rank(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int, kind: str, threads: int, meeting: str,
    answers: Any,  # noqa: ANN401 - a queue of multiprocessing
) -> None:  # fmt: skip
    import torch
    import torch.distributed as dist

    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(threads)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(BACKENDS[kind], init_method=meeting, rank=rank, world_size=ranks, timeout=timeout)
    answer = function(rank, *args)
    dist.barrier()
    if rank == 0:
        answers.put(answer)
    dist.destroy_process_group()
