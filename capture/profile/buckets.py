"""Buckets of DistributedDataParallel, seen by its communication hook: their copies, their collectives, their tensors.

A bucket's event is the collective as a whole: posted when the hook is called, ended when its future says so. When its
transfer began is found once all ranks' recordings are joined: not before the last rank had posted it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from capture.profile.recorder import Recorder, line

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import GradBucket

__all__ = ["NUMBERED", "Bucketed", "bare", "observe"]

NUMBERED = ',"id":%d'
Hook = Callable[[Any, Any], Any]


class Bucketed:
    """What is known of each bucket: the lines of its copy and its collective, and how often it went."""

    def __init__(self, recorder: Recorder, names: dict[int, str]) -> None:
        self.recorder, self.names = recorder, names
        self.texts: dict[tuple[int, int], tuple[str, str]] = {}
        self.last: dict[int, tuple[int, int]] = {}  # of each bucket: the iteration in which it went, and its round

    def copied(self, bucket: GradBucket) -> tuple[str, int, int]:
        """Marks that a bucket is filled: the line of its collective, how often it went before, the copy's number."""
        buffer, index = bucket.buffer(), bucket.index()
        nbytes = buffer.numel() * buffer.element_size()
        found = self.texts.get((index, nbytes))
        if found is None:
            copy = line(f"CAT.{index}", "BW", bucket=index, bytes=nbytes, tail=NUMBERED)
            whole = line(f"AR.{index}", "COMM", bucket=index, bytes=nbytes, tail=f',"tx":"b{index}|r%d"')
            found = self.texts[index, nbytes] = copy, whole
            for parameter in bucket.parameters():
                self.recorder.bucket_of[self.names[id(parameter)]] = index
        number = next(self.recorder.ids)
        self.recorder.mark(found[0], number)
        iteration, before = self.recorder.iteration, self.last.get(index, (-1, 0))
        self.last[index] = iteration, before[1] + 1 if before[0] == iteration else 0
        return found[1], self.last[index][1], number


def observe(model: Any, recorder: Recorder, names: dict[int, str]) -> None:  # noqa: ANN401 - a model of torch
    """Registers a hook that does what the model did without, and records it; a model that has a hook keeps it."""
    import torch.distributed as dist

    group = model.process_group
    world = dist.get_world_size(group)

    def reduce(_: object, bucket: GradBucket) -> Any:  # noqa: ANN401 - a future of torch
        return dist.all_reduce(bucket.buffer().div_(world), group=group, async_op=True).get_future()

    try:
        model.register_comm_hook(None, recorded(reduce, Bucketed(recorder, names)))
    except RuntimeError:  # it has one: torch takes one hook a model
        return


def recorded(hook: Hook, known: Bucketed) -> Hook:
    """A communication hook, and its events."""
    recorder = known.recorder

    def observed(state: object, bucket: GradBucket) -> Any:  # noqa: ANN401 - a future of torch
        (text, round, _), iteration = known.copied(bucket), recorder.iteration
        posted = recorder.clock()

        def done(future: torch.futures.Future[Any]) -> torch.Tensor:
            recorder.events.append((text, posted, recorder.clock(), iteration, round))
            value = future.value()
            tensor: torch.Tensor = value[0] if isinstance(value, list) else value
            return tensor

        return hook(state, bucket).then(done)

    return bare(observed)


def bare(hook: Hook) -> Hook:
    """The hook without annotations: torch compares them with its own classes, and ours are texts."""
    hook.__annotations__ = {}
    return hook
