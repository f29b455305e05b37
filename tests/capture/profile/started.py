"""Starts a script once per rank over loopback, and waits for all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 180.0  # of a machine that is overloaded; alone they take a tenth of it


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(**more):
    """What a rank needs to meet the others on this machine, one thread each."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def run_ranks(script, world, *args):
    """Runs the script on all ranks; its errors are the test's."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *map(str, args)],
            env=environment(RANK=str(r), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stderr=subprocess.PIPE, text=True,
        )
        for r in range(world)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world, "\n".join(error[-2000:] for error in errors)
