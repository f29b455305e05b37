"""An ordinary training script, alone or on several ranks, that knows nothing of recordings. Run by tests here.

Arguments: steps, and optionally RANK:STEP, where that rank kills itself, or RANK:STEP:error, where it raises.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist


def main() -> None:
    """One rank."""
    steps, _, end = sys.argv[1].partition("/")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    alone = "RANK" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    rank = 0 if alone else dist.get_rank()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    net = model if alone else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(int(steps)):
        optimizer.zero_grad()
        net(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        if end == f"{rank}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == f"{rank}:{step}:error":
            raise RuntimeError("the data ended")
    if not alone:
        dist.destroy_process_group()
    print("trained")


if __name__ == "__main__":
    main()
