"""Trains on one rank of a test bed and records it: `python -m capture.testbed.trainer SETUP FOLDER`.

SETUP: JSON of a `Setup`; which rank this is, says the environment, as torchrun does. One thread computes: with more,
the ranks of one machine would compute on each other's cores.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from capture.profile.plan import Applied, apply_plan
from capture.profile.profiler import profile
from capture.profile.synchroniser import filled
from capture.testbed.models import MODELS
from capture.testbed.setup import MIB, Setup
from estimator.tuning import Outcome, PlanBucket, TuningPlan, read_plan

__all__ = ["train"]


def train(setup: Setup, folder: Path) -> None:
    """The whole job of one rank, in a process group that is there."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trained = MODELS[setup.model]()
    applied = apply_plan(trained.model, planned(setup, trained.model), servers=range(setup.servers))
    optimizer = torch.optim.SGD(trained.model.parameters(), lr=1e-3, momentum=0.9)
    with profile(folder, warm_up=setup.warm, topology=setup.topology.value):
        for _ in range(setup.warm + setup.steps):
            for k in range(applied.accumulate):
                with applied.micro_batch(k), _apart(applied, setup):
                    (trained.loss(trained.model) / applied.accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
    applied.close()


def planned(setup: Setup, model: nn.Module) -> TuningPlan:
    """The setup's plan, or one that says what its other fields do."""
    if setup.plan:
        return read_plan("the plan", setup.plan)
    sizes = {name: float(p.numel() * p.element_size()) for name, p in model.named_parameters()}
    buckets = setup.buckets or filled(dict(model.named_parameters()), setup.bucket_bytes)
    part_bytes = None if setup.part_bytes == float("inf") else setup.part_bytes
    unknown = Outcome(seconds=0.0, p10_s=0.0, p90_s=0.0)
    return TuningPlan(
        graph="", workers=dist.get_world_size(), topology=setup.topology.value, recompute=setup.recompute,
        buckets=tuple(
            PlanBucket(tensors=tuple(names), nbytes=sum(sizes[name] for name in names), part_bytes=part_bytes)
            for names in buckets
        ),
        bucket_cap_mb=setup.bucket_bytes / MIB, before=unknown, after=unknown,
    )  # fmt: skip


def _apart(applied: Applied, setup: Setup) -> contextlib.AbstractContextManager[None]:
    """Gradients stay where they are made, where nothing is to be synchronised."""
    if setup.synchronise or applied.synchroniser is None:
        return contextlib.nullcontext()
    return applied.synchroniser.no_sync()


def main(setup: str, folder: str) -> None:
    """One rank, from its environment."""
    dist.init_process_group("gloo")
    train(Setup.of(setup), Path(folder))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
