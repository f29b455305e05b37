"""Starts a script on two ranks, as a launcher does: when one dies, the others are terminated. Run by tests here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.capture.profile.started import environment, free_port

WORLD = 2


def main() -> int:
    """The first exit code that is not 0."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("unedited.py")), *sys.argv[1:]],
            env=environment(RANK=str(r), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
        )
        for r in range(WORLD)
    ]
    pids = {process.pid: process for process in ranks}
    for _ in ranks:
        pid, status = os.wait()
        pids[pid].returncode = os.waitstatus_to_exitcode(status)
        if pids[pid].returncode != 0:
            for process in ranks:
                if process.returncode is None:
                    process.terminate()
    return next((1 for process in ranks if process.returncode != 0), 0)


if __name__ == "__main__":
    sys.exit(main())
