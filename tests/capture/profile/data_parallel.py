"""Sums tensors around a ring and trains a small model by every synchroniser, on each rank. Run by tests here.

Argument: a folder. Writes `rankN.json`, and recordings of the jobs that train.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from capture.profile import Synchroniser, apply_plan, comm_hook, profile
from capture.profile.recorder import Recorder
from capture.profile.ring import Ring
from capture.traces.records import Topology
from estimator.tuning import Outcome, PlanBucket, TuningPlan

STEPS, WIDTH = 6, 96
SERVERS = {
    "server": {"part_bytes": 20_000},
    "servers": {"part_bytes": [9_000, 30_000, 10_000], "servers": (0, 1), "priority": True},
}
SIZES, PARTS = (1, 2, 7, 1000, 1001), (64.0, float("inf"))


def sums(folder: Path, rank: int) -> dict[str, list[float]]:
    """Of whole numbers, which floats add exactly."""
    recorder = Recorder(
        folder / "sums" / f"rank{rank}.jsonl", {"rank": rank, "world": dist.get_world_size()}, warm_up=0
    )
    found = {}
    for bucket, (size, part) in enumerate((size, part) for size in SIZES for part in PARTS):
        flat = torch.arange(size, dtype=torch.float32) * (rank + 1)
        Ring(part_bytes=part).all_reduce(flat, bucket, recorder)
        found[f"{size} {part}"] = flat.tolist()
    recorder.end()
    recorder.close()
    return found


def model() -> torch.nn.Module:
    """The same on all ranks, by all means."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(3)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))


def trained(run: torch.nn.Module, inner: torch.nn.Module, folder: Path, rank: int) -> list[float]:
    """The weights after some steps."""
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    torch.manual_seed(rank)
    with profile(folder, machine=f"machine {rank}"):
        for _ in range(STEPS):
            optimizer.zero_grad()
            run(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in inner.parameters()]).tolist()


def plan(**more: object) -> TuningPlan:
    """Of the model above: two buckets, one in parts, a block computed again, two micro-batches."""
    outcome = Outcome(seconds=1.0, p10_s=1.0, p90_s=1.0)
    first = ("BW.3.bias", "BW.3.weight", "BW.2.0.bias", "BW.2.0.weight")
    second = ("BW.1.0.bias", "BW.1.0.weight", "BW.0.0.bias", "BW.0.0.weight")
    buckets = (PlanBucket(tensors=first, nbytes=1.0, part_bytes=10_000.0), PlanBucket(tensors=second, nbytes=1.0))
    return TuningPlan(graph="", workers=2, topology="ring", buckets=buckets, bucket_cap_mb=1.0, before=outcome,
                      after=outcome, recompute=("FW.1",), accumulate=2, **more)  # type: ignore[arg-type] # fmt: skip


def planned(folder: Path, rank: int) -> dict[str, object]:
    """The weights that a plan trains, and that DistributedDataParallel trains without one."""
    inner, other = model(), model()
    applied = apply_plan(inner, plan(fused_ops=(("FW.1.0", "FW.1.1"),)))
    assert applied.synchroniser is not None
    reference = torch.nn.parallel.DistributedDataParallel(other)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (inner, other)]
    torch.manual_seed(rank)
    batches = torch.randn(2 * STEPS, 8, WIDTH)
    with profile(folder / "plan", machine=f"machine {rank}"):
        for k, batch in enumerate(batches):
            with applied.micro_batch(k):
                (inner(batch).square().mean() / applied.accumulate).backward()
            if applied.updates(k):
                optimizers[0].step()
                optimizers[0].zero_grad()
    for k, batch in enumerate(batches):
        with contextlib.nullcontext() if k % 2 else reference.no_sync():
            (reference(batch).square().mean() / 2).backward()
        if k % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()
    applied.close()
    weights = [torch.cat([weight.detach().flatten() for weight in one.parameters()]).tolist() for one in (inner, other)]
    return {"plan": weights[0], "reference": weights[1], "not_applied": applied.not_applied}


def main() -> None:
    """One rank."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, object] = {"sums": sums(folder, rank)}
    ddp = torch.nn.parallel.DistributedDataParallel
    inner = model()
    found["ddp"] = trained(ddp(inner, bucket_cap_mb=0.04), inner, folder / "ddp", rank)
    inner = model()
    hooked = ddp(inner, bucket_cap_mb=0.04)
    hooked.register_comm_hook(*comm_hook(hooked, part_bytes=20_000))
    found["hook"] = trained(hooked, inner, folder / "hook", rank)
    inner = model()
    synchroniser = Synchroniser(inner, bucket_bytes=40_000, part_bytes=20_000)
    found["ring"] = trained(inner, inner, folder / "ring", rank)
    synchroniser.close()
    found |= planned(folder, rank)
    for name, options in SERVERS.items():
        inner = model()
        synchroniser = Synchroniser(inner, bucket_bytes=30_000, topology=Topology.PARAMETER_SERVER, **options)
        found[name] = trained(inner, inner, folder / name, rank)
        synchroniser.close()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
