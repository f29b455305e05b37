"""Ring all-reduce by sends and receives, each of which is recorded with its own start, end and transaction.

n ranks, a flat tensor in n chunks. In n - 1 steps every rank passes a chunk on and adds what comes: then each has one
chunk's sum. In n - 1 more steps the sums go around. A rank sends 2 (n - 1) / n of the tensor's bytes where chunks are
equal (Patarasuk and Yuan 2009). Tensors larger than a part go around part by part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capture.profile.recorder import Recorder, line

if TYPE_CHECKING:
    import torch

__all__ = ["PartBytes", "Ring", "parts_of_tensor"]

TAG = 8_000

PartBytes = float | Sequence[float]
"""What is sent at once of a bucket: of all, or of each by its number."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What goes out to the right, where what comes from the left is kept, and what it is added to, if anything."""

    out: torch.Tensor
    into: torch.Tensor
    onto: torch.Tensor | None
    send: str
    recv: str
    reduce: str


class Ring:
    """All-reduces flat tensors around the ranks of a group. Steps of a tensor are laid out once."""

    def __init__(self, group: Any = None, *, part_bytes: PartBytes = float("inf")) -> None:  # noqa: ANN401 - of torch
        import torch.distributed as dist

        self.group, self.part_bytes = group, part_bytes
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.left, self.right = ranks[(self.rank - 1) % self.world], ranks[(self.rank + 1) % self.world]
        self.me = ranks[self.rank]
        self.laid: dict[tuple[int, int, int], list[_Step]] = {}

    def all_reduce(self, flat: torch.Tensor, bucket: int, recorder: Recorder | None = None, round: int = 0) -> None:
        """Replaces a flat tensor by the sum of all ranks', in place. round: how often this bucket went before.

        All ranks reduce the same buckets in the same order. A tensor of fewer elements than ranks has empty chunks,
        which do not travel.
        """
        iteration = -1 if recorder is None else recorder.iteration
        for step in self._steps(flat, bucket):
            begin = 0 if recorder is None else recorder.clock()
            receiving = self._receive(step, bucket)
            sending = self._send(step, bucket)
            if receiving is not None:
                receiving.wait()
            come = 0 if recorder is None else recorder.clock()
            if step.onto is not None:
                step.onto.add_(step.into)
            added = 0 if recorder is None else recorder.clock()
            if sending is not None:
                sending.wait()
            if recorder is None:
                continue
            tell = recorder.events.append
            if receiving is not None:
                tell((step.recv, begin, come, iteration, round))
                if step.onto is not None:
                    tell((step.reduce, come, added, iteration))
            if sending is not None:
                tell((step.send, begin, recorder.clock(), iteration, round))

    def _receive(self, step: _Step, bucket: int) -> Any:  # noqa: ANN401 - a work of torch
        import torch.distributed as dist

        return dist.irecv(step.into, self.left, self.group, TAG + bucket) if step.into.numel() else None

    def _send(self, step: _Step, bucket: int) -> Any:  # noqa: ANN401 - a work of torch
        import torch.distributed as dist

        return dist.isend(step.out, self.right, self.group, TAG + bucket) if step.out.numel() else None

    def _steps(self, flat: torch.Tensor, bucket: int) -> list[_Step]:
        key = bucket, flat.data_ptr(), flat.numel()
        if key not in self.laid:
            self.laid[key] = [
                step
                for number, part in enumerate(parts_of_tensor(flat, self.part_bytes, bucket))
                for step in self._part(part, bucket, number)
            ]
        return self.laid[key]

    def _part(self, part: torch.Tensor, bucket: int, number: int) -> list[_Step]:
        """Steps of a part, numbered on from those of the parts before it."""
        import torch

        n, rank = self.world, self.rank
        chunks = list(part.tensor_split(n))
        inbox = torch.empty_like(chunks[0])
        steps = []
        for k in range(2 * (n - 1)):
            mine, theirs = (rank - k) % n, (rank - k - 1) % n
            reduces = k < n - 1
            into = inbox[: chunks[theirs].numel()] if reduces else chunks[theirs]
            texts = self._texts(bucket, number * 2 * (n - 1) + k, mine, theirs, chunks)
            steps.append(_Step(chunks[mine], into, chunks[theirs] if reduces else None, *texts))
        return steps

    def _texts(
        self, bucket: int, step: int, mine: int, theirs: int, chunks: list[torch.Tensor]
    ) -> tuple[str, str, str]:
        def text(cat: str, source: int, target: int, chunk: int) -> str:
            nbytes = chunks[chunk].numel() * chunks[chunk].element_size()
            tx = f"{source}>{target}|b{bucket}|c{chunk}|s{step}|r%d"
            peer = target if cat == "SEND" else source
            return line(f"{cat}.{bucket}", cat, peer=peer, bucket=bucket, step=step, bytes=nbytes, tail=f',"tx":"{tx}"')

        reduce = line(f"RED.{bucket}", "RED", bucket=bucket, step=step)
        return text("SEND", self.me, self.right, mine), text("RECV", self.left, self.me, theirs), reduce


def parts_of_tensor(flat: torch.Tensor, part_bytes: PartBytes, bucket: int) -> list[torch.Tensor]:
    """A bucket's flat tensor cut into parts of at most these bytes, as equal as can be."""
    most = part_bytes[bucket] if isinstance(part_bytes, Sequence) else part_bytes
    count = max(1, -int(-(flat.numel() * flat.element_size()) // most))
    return list(flat.tensor_split(min(count, max(flat.numel(), 1))))
