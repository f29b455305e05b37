"""Averages gradients of data-parallel ranks, bucket by bucket while the backward pass runs, by a topology of ours.

The buckets may be a list of parameter names, or a size as DistributedDataParallel has; a bucket is one flat tensor,
handed over once its last gradient is there and all buckets before it have been, so that all ranks agree on the order.
When the backward pass returns, every gradient is the mean of all ranks', a view of its bucket. `comm_hook` gives the
same topologies to DistributedDataParallel, which keeps its own buckets.

Refuses buckets that leave a parameter out, name one twice, or mix dtypes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from capture.profile.buckets import NUMBERED, Bucketed, bare
from capture.profile.communicator import communicator
from capture.profile.hooks import names_of
from capture.profile.recorder import current, line
from capture.profile.ring import PartBytes
from capture.traces.records import Topology

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch._C._distributed_c10d import GradBucket

__all__ = ["BUCKET_BYTES", "Synchroniser", "comm_hook", "filled"]

BUCKET_BYTES = 25 * 1024**2
"""As DistributedDataParallel's default."""


class Synchroniser:
    """Averages the gradients of `model`. All ranks make one with the same arguments; rank 0's weights go to all.

    buckets: names of parameters, in the order in which buckets are sent; otherwise filled in reverse order of the
    model's parameters, closed once they hold `bucket_bytes`. part_bytes: what is sent at once of a
    bucket, of all or of each. servers, priority: of a parameter server (server.py). half: gradients
    travel as bfloat16.
    """

    def __init__(
        self, model: nn.Module, *, buckets: Sequence[Sequence[str]] | None = None, bucket_bytes: float = BUCKET_BYTES,
        topology: Topology = Topology.RING, part_bytes: PartBytes = float("inf"), servers: Sequence[int] = (0,),
        priority: bool = False, half: bool = False, group: Any = None,  # noqa: ANN401
    ) -> None:  # fmt: skip
        import torch.distributed as dist

        self.world = dist.get_world_size(group)
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names = checked(buckets, self.named) if buckets is not None else filled(self.named, bucket_bytes)
        self.buckets = [_Bucket(k, names, self.named, half=half) for k, names in enumerate(self.names)]
        self.enabled, self.sent, self.round, self.waiting = True, 0, 0, False
        self.iteration = -1
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), src=dist.get_process_group_ranks(group or dist.group.WORLD)[0], group=group)
        self.topology = topology
        self.communicator = communicator(topology, group, part_bytes=part_bytes, servers=servers, priority=priority)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(_Ready(self, bucket))
            for bucket in self.buckets
            for parameter in bucket.parameters
        ]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients inside of the block stay the rank's own: of all micro-batches but the last."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def close(self) -> None:
        """Takes the hooks off and ends the thread."""
        for handle in self.handles:
            handle.remove()
        self.communicator.close()

    def ready(self, bucket: _Bucket) -> None:
        """A gradient of the bucket is there. Buckets that are full go, in order."""
        if not self.enabled:
            return
        if not self.waiting:
            self._begin()
        bucket.missing -= 1
        while self.sent < len(self.buckets) and self.buckets[self.sent].missing <= 0:
            self._send(self.buckets[self.sent])

    def _begin(self) -> None:
        """The first gradient of a backward pass; at its end, all are waited for."""
        from torch.autograd import Variable

        recorder = current()
        iteration = -1 if recorder is None else recorder.iteration
        self.round = self.round + 1 if iteration == self.iteration else 0
        self.iteration, self.waiting, self.sent = iteration, True, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
        Variable._execution_engine.queue_callback(self._finish)

    def _send(self, bucket: _Bucket) -> None:
        self.sent += 1
        recorder, number = current(), 0
        bucket.fill(1.0 / self.world)
        if recorder is not None:
            recorder.bucket_of.update(dict.fromkeys(bucket.names, bucket.index))
            recorder.meta["topology"] = self.topology.value
            number = next(recorder.ids)
            recorder.mark(bucket.copies, number)
        bucket.done.clear()
        self.communicator.submit(bucket.flat, bucket.index, recorder, self.round, number, bucket.reduced)

    def _finish(self) -> None:
        """The backward pass is over: what had no gradient counts as zero, as all ranks must send the same."""
        while self.sent < len(self.buckets):
            self._send(self.buckets[self.sent])
        for bucket in self.buckets:
            bucket.wait()
        self.waiting = False


class _Ready:
    """Called by torch once a gradient is there."""

    __slots__ = ("bucket", "synchroniser")

    def __init__(self, synchroniser: Synchroniser, bucket: _Bucket) -> None:
        self.synchroniser, self.bucket = synchroniser, bucket

    def __call__(self, _: object) -> None:
        """Counts it."""
        self.synchroniser.ready(self.bucket)


class _Bucket:
    """Parameters whose gradients travel in one flat tensor; views of it are their gradients afterwards."""

    def __init__(self, index: int, names: Sequence[str], named: dict[str, nn.Parameter], *, half: bool) -> None:
        import torch

        self.index, self.names = index, list(names)
        self.parameters = [named[name] for name in names]
        first = self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.zeros(sum(sizes), dtype=torch.bfloat16 if half else first.dtype, device=first.device)
        self.views = [view.view_as(p) for view, p in zip(self.flat.split(sizes), self.parameters, strict=True)]
        self.copies = line(
            f"CAT.{index}", "BW", bucket=index, bytes=self.flat.numel() * self.flat.element_size(), tail=NUMBERED
        )
        self.missing = len(names)
        self.done = threading.Event()
        self.error: BaseException | None = None

    def fill(self, scale: float) -> None:
        """Gradients times `scale`, into the flat tensor."""
        import torch

        with torch.no_grad():
            for view, parameter in zip(self.views, self.parameters, strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    torch.mul(parameter.grad, scale, out=view)

    def reduced(self, error: BaseException | None) -> None:
        """Called by the communicator."""
        self.error = error
        self.done.set()

    def wait(self) -> None:
        """Until the means are there; then they are the gradients, or are copied where these are of another dtype."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if view.dtype == parameter.dtype:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.to(parameter.dtype)
            else:
                parameter.grad.copy_(view)


def checked(buckets: Sequence[Sequence[str]], named: dict[str, nn.Parameter]) -> list[list[str]]:
    """The buckets as told, if they hold each trainable parameter once, and one dtype each."""
    told = [name for bucket in buckets for name in bucket]
    for wrong, law in (
        (sorted(set(told) - named.keys()), "must be parameters of the model that are trained"),
        (sorted(named.keys() - set(told)), "must hold every parameter that is trained, but lack"),
        (sorted({name for name in told if told.count(name) > 1}), "must hold a parameter once"),
    ):
        if wrong:
            raise ValueError(
                f"names in buckets {law}: {', '.join(wrong[:4])}; make the buckets from this model's names"
            )
    for bucket in buckets:
        if len({named[name].dtype for name in bucket}) > 1:
            raise ValueError(f"a bucket must have one dtype, but that of {bucket[0]} mixes some; split it by dtype")
    return [list(bucket) for bucket in buckets if bucket]


def filled(named: dict[str, nn.Parameter], bucket_bytes: float) -> list[list[str]]:
    """Buckets in reverse order of the parameters, closed once they hold `bucket_bytes`, each of one dtype."""
    buckets: list[list[str]] = []
    held = bucket_bytes
    for name, parameter in reversed(named.items()):
        if held >= bucket_bytes or named[buckets[-1][0]].dtype != parameter.dtype:
            buckets.append([])
            held = 0.0
        buckets[-1].append(name)
        held += parameter.numel() * parameter.element_size()
    return buckets


def comm_hook(
    model: Any, *, topology: Topology = Topology.RING, part_bytes: PartBytes = float("inf"),  # noqa: ANN401 - of torch
    servers: Sequence[int] = (0,), priority: bool = False,
) -> tuple[None, Any]:  # fmt: skip
    """What `register_comm_hook` of a DistributedDataParallel takes: its buckets go by a topology of ours."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size(model.process_group)
    group = model.process_group
    runs = communicator(topology, group, part_bytes=part_bytes, servers=servers, priority=priority)
    names, known = names_of(model.module), dict[int, Bucketed]()

    def reduce(_: object, bucket: GradBucket) -> Any:  # noqa: ANN401 - a future of torch
        recorder, index = current(), bucket.index()
        flat = bucket.buffer().mul_(1.0 / world)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        round = number = 0
        if recorder is not None:
            recorder.meta["topology"] = topology.value
            _, round, number = known.setdefault(id(recorder), Bucketed(recorder, names)).copied(bucket)

        def then(error: BaseException | None) -> None:
            if error is None:
                future.set_result(flat)
            else:
                future.set_exception(error)  # type: ignore[arg-type]

        runs.submit(flat, index, recorder, round, number, then)
        return future

    return None, bare(reduce)
