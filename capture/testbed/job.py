"""Runs one job on a test bed: a rank per namespace, each recorded into a file of its own. Predicts nothing.

What a job is, is a `Setup`; each rank gets it as JSON (trainer.py). Refuses to go on where a rank fails, and says which
and why; the others are ended then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import capture
from capture.testbed.network import INTERFACE, Network
from capture.testbed.setup import Setup
from capture.traces.recognise import read_all
from capture.traces.records import RankTrace

__all__ = ["Run", "run"]

PORT = "29500"
PATIENCE_S = 120.0
GLANCE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a job's ranks recorded. load: processes that ran or waited beside, per core, before and behind."""

    setup: Setup
    bits_per_s: float
    traces: tuple[RankTrace, ...]
    load: tuple[float, float]


def run(network: Network, setup: Setup, folder: Path, *, patience_s: float = PATIENCE_S) -> Run:
    """Trains on all ranks at once and reads what they recorded. ValueError where a rank fails."""
    folder.mkdir(parents=True)
    before = os.getloadavg()[0] / (os.cpu_count() or 1)
    env = os.environ | {
        "MASTER_ADDR": network.address(0), "MASTER_PORT": PORT, "WORLD_SIZE": str(network.ranks),
        "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(capture.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, "-m", "capture.testbed.trainer", setup.text(), str(folder)]
    processes = []
    with _logs(folder, network.ranks) as logs:
        try:
            for rank, log in enumerate(logs):
                processes.append(network.start(rank, command, env=env | {"RANK": str(rank)}, stdout=log, stderr=log))
            _await(processes, folder, patience_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return Run(
        setup=setup, bits_per_s=network.bits_per_s,
        traces=tuple(read_all([folder / f"rank{rank}.jsonl" for rank in range(network.ranks)])),
        load=(before, os.getloadavg()[0] / (os.cpu_count() or 1)),
    )  # fmt: skip


@contextmanager
def _logs(folder: Path, ranks: int) -> Iterator[list[IO[bytes]]]:
    """A file for what each rank says."""
    with ExitStack() as stack:
        yield [stack.enter_context((folder / f"rank{rank}.log").open("wb")) for rank in range(ranks)]


def _await(processes: Sequence[subprocess.Popen[bytes]], folder: Path, patience_s: float) -> None:
    """Until all have ended; ValueError with the last words of the first that failed, or of one that goes on."""
    until = time.monotonic() + patience_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
        if failed or time.monotonic() > until:
            break
        time.sleep(GLANCE_S)
    for rank, process in enumerate(processes):
        if process.poll() not in (None, 0):
            raise ValueError(f"all ranks of a test bed must end well, but rank {rank} ended with {process.returncode}: "
                             f"{_last_words(folder, rank)}; all that it said stays with --keep, in "
                             f"{folder.parent.name}/{folder.name}/rank{rank}.log")  # fmt: skip
    if any(process.poll() is None for process in processes):
        raise ValueError(f"ranks of a test bed must end within {patience_s:.0f} s, but go on; give fewer steps")


def _last_words(folder: Path, rank: int) -> str:
    lines = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
