"""Trains a small model on one of a few ranks over gloo and writes what it did as JSON lines. Run by test_real_run.py.

The gradients of each bucket go around in one SEND and one RECV per step of a ring, each with a transaction id, so that
a job of this package's fine form exists for real. Arguments: rank, world, store, folder, steps, steps to leave out.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

LAYERS, WIDTH, BATCH = 4, 256, 64


class Recorder:
    """Events of one rank, written at the end."""

    def __init__(self, rank: int, world: int, path: Path) -> None:
        self.path, self.lines, self.iteration = path, [], -1
        self.header = {"format": "trainspace.trace", "version": 1, "meta": {
            "rank": rank, "world": world, "mode": "ring", "job": "loopback"},
            "bof": {f"{k}.weight": LAYERS - 1 - k for k in range(LAYERS)}}  # fmt: skip

    def add(self, name: str, kind: str, start: int, **more: object) -> int:
        """An event that ends now."""
        end = time.time_ns()
        self.lines.append({"name": name, "cat": kind, "ts": start, "end": end, "it": self.iteration, **more})
        return end

    def write(self, skip: int) -> None:
        """All but the first iterations."""
        kept = [line for line in self.lines if line["it"] >= skip]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in [self.header, *kept]))


def ring(recorder: Recorder, rank: int, world: int, bucket: int, tensor: torch.Tensor) -> None:
    """The sum of all ranks' tensor, in 2 (n - 1) steps."""
    chunks = list(tensor.chunk(world))
    right, left = (rank + 1) % world, (rank - 1) % world
    for step in range(2 * (world - 1)):
        mine, theirs = (rank - step) % world, (rank - step - 1) % world
        inbox, start = torch.empty_like(chunks[theirs]), time.time_ns()
        sending = dist.isend(chunks[mine].clone(), right)
        posted = time.time_ns()
        receiving = dist.irecv(inbox, left)
        nbytes = chunks[mine].numel() * 4
        receiving.wait()
        recorder.add(f"RECV.{bucket}", "RECV", posted, tx=f"{left}>{rank}|b{bucket}|s{step}", peer=left, bucket=bucket,
                     bytes=nbytes, step=step)  # fmt: skip
        sending.wait()
        recorder.add(f"SEND.{bucket}", "SEND", start, tx=f"{rank}>{right}|b{bucket}|s{step}", peer=right, bucket=bucket,
                     bytes=nbytes, step=step)  # fmt: skip
        start = time.time_ns()
        if step < world - 1:
            chunks[theirs] += inbox
            recorder.add(f"RED.{bucket}", "RED", start, bucket=bucket, step=step)
        else:
            chunks[theirs].copy_(inbox)


def main() -> None:
    """One rank."""
    rank, world, store, folder, steps, skip = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    recorder = Recorder(int(rank), int(world), Path(folder, f"rank{rank}.jsonl"))
    for iteration in range(int(steps)):
        recorder.iteration = iteration
        begin = start = time.time_ns()
        x = torch.randn(BATCH, WIDTH)
        inputs = []
        for k, layer in enumerate(layers):
            inputs.append(x.detach().requires_grad_())
            x = torch.relu(layer(inputs[-1]))
            start = recorder.add(f"FW.{k}", "FW", start)
        outputs = x
        gradient = torch.ones_like(outputs) / outputs.numel()
        for k in reversed(range(LAYERS)):
            start = time.time_ns()
            layers[k].zero_grad()
            out = torch.relu(layers[k](inputs[k]))
            out.backward(gradient)
            gradient = inputs[k].grad
            recorder.add(f"BW.{k}", "BW", start, tensor=f"{k}.weight", bytes=4 * WIDTH * WIDTH)
        for bucket, k in enumerate(reversed(range(LAYERS))):
            ring(recorder, int(rank), int(world), bucket, layers[k].weight.grad.view(-1))
        start = time.time_ns()
        with torch.no_grad():
            for layer in layers:
                layer.weight -= 1e-3 * layer.weight.grad / int(world)
        recorder.add("UPD", "UPD", start)
        recorder.add("ITER", "ITER", begin)
    recorder.write(int(skip))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
