"""Applies a tuner's plan (estimator/tuning.py) to a real model: buckets and parts, what is computed again, precision.

What torch can do is done: gradients travel in the plan's buckets and parts by our own ring or parameter server, modules
are checkpointed, gradients accumulate over micro-batches, computes run under autocast. Fused operations are applied
where `compile` asks for torch.compile. What is not applied is told, a line each. Refuses a plan for other tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from capture.profile.synchroniser import Synchroniser
from capture.traces.records import Topology
from estimator.tuning import PlanBucket, TunedPrecision, TuningPlan

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Applied", "apply_plan"]

OURS = {topology.value: topology for topology in (Topology.RING, Topology.PARAMETER_SERVER)}
MARKS = ("FW.", "BW.")  # how a recording names operations of modules and gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A model under a plan. synchroniser: None where one rank trains. not_applied: a line for what torch does without.

    The loop runs each micro-batch inside of `micro_batch(k)`, divides its loss by `accumulate`, and updates where
    `updates(k)` says so, k counting all micro-batches.
    """

    synchroniser: Synchroniser | None
    accumulate: int
    precision: TunedPrecision
    device: str
    not_applied: tuple[str, ...]

    @contextlib.contextmanager
    def micro_batch(self, k: int) -> Iterator[None]:
        """Forward and backward of micro-batch k: gradients travel after the last of an update."""
        import torch

        with contextlib.ExitStack() as stack:
            if self.precision is TunedPrecision.MIXED:
                stack.enter_context(torch.autocast(self.device, dtype=torch.bfloat16))
            if self.synchroniser is not None and not self.updates(k):
                stack.enter_context(self.synchroniser.no_sync())
            yield

    def updates(self, k: int) -> bool:
        """Whether the optimizer steps after micro-batch k."""
        return (k + 1) % self.accumulate == 0

    def close(self) -> None:
        """Ends what synchronises. All ranks do."""
        if self.synchroniser is not None:
            self.synchroniser.close()


def apply_plan(
    model: nn.Module, plan: TuningPlan, *, servers: Sequence[int] = (0,), compile: bool = False,
    group: Any = None,  # noqa: ANN401 - of torch
) -> Applied:  # fmt: skip
    """Changes the model as the plan says, and gives what its loop needs. All ranks do, after they have their devices.

    servers: ranks that serve, where gradients travel by a parameter server. compile: fuse what the plan fuses by
    torch.compile. ValueError where the plan is not for this model.
    """
    import torch.distributed as dist

    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    told = [tuple(_bare(name) for name in bucket.tensors) for bucket in plan.buckets]
    _renamed(plan, told).require_tensors(named, "the model")
    notes = _fuse(model, plan, compile=compile)
    _recompute(model, [_bare(name) for name in plan.recompute])
    parallel = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    world = dist.get_world_size(group) if parallel else 1
    if world != plan.workers:
        notes.append(f"the plan's seconds are of {plan.workers} workers, and {world} train here")
    synchroniser = None
    if parallel:
        if plan.topology not in OURS:
            notes.append(f"gradients travel by a ring: torch has no {plan.topology} of sends and receives here")
        synchroniser = Synchroniser(
            model, buckets=told, topology=OURS.get(plan.topology, Topology.RING), servers=servers, group=group,
            part_bytes=[bucket.part_bytes or float("inf") for bucket in plan.buckets],
            half=plan.precision is TunedPrecision.MIXED,
        )  # fmt: skip
    device = next(iter(named.values())).device.type
    return Applied(synchroniser=synchroniser, accumulate=plan.accumulate, precision=plan.precision, device=device,
                   not_applied=tuple(notes))  # fmt: skip


def _bare(name: str) -> str:
    """A module's or tensor's own name."""
    return next((name.removeprefix(mark) for mark in MARKS if name.startswith(mark)), name)


def _renamed(plan: TuningPlan, told: Sequence[tuple[str, ...]]) -> TuningPlan:
    from dataclasses import replace

    buckets = [PlanBucket(tensors=names, nbytes=b.nbytes) for names, b in zip(told, plan.buckets, strict=True)]
    return replace(plan, buckets=tuple(buckets))


def _recompute(model: nn.Module, names: Sequence[str]) -> None:
    """Modules whose activations are computed again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise ValueError(
                f"a plan must name modules of the model to compute again, but {name!r} is none; tune a recording of it"
            )
    for name in names:
        module: Any = modules[name]
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def _fuse(model: nn.Module, plan: TuningPlan, *, compile: bool) -> list[str]:
    """Compiles the smallest module around each fused group; gives what is left."""
    modules, left, done = dict(model.named_modules()), 0, set[str]()
    for group in plan.fused_ops:
        names = {_bare(name) for name in group}
        around = _around(sorted(names)) if names <= modules.keys() else None
        if not compile or around is None:
            left += 1
        elif around not in done:
            done.add(around)
            modules[around].compile()
    if not left:
        return []
    remedy = "they are not all forwards of modules" if compile else "pass compile=True for torch.compile"
    return [f"{left} of {len(plan.fused_ops)} groups of fused operations run apart: {remedy}"]


def _around(names: Sequence[str]) -> str:
    """The module that holds all of these: the longest prefix of whole names.

    >>> _around(["layers.0.norm", "layers.0.mlp.up"])
    'layers.0'
    """
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
