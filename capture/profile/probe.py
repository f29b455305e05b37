"""Ping-pongs between the first rank and each other one: what clocks of machines are aligned by (docs/traces.md).

A ping and its pong are transfers of one number, recorded as such outside of any iteration: `search trace align` bounds
offsets by the fastest of them. All ranks take part together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from capture.profile.recorder import Recorder, line

if TYPE_CHECKING:
    import torch

__all__ = ["PINGS", "ping_pong"]

PINGS = 300
OUTSIDE = -1
TAG = 7_001


def ping_pong(recorder: Recorder, group: Any, when: str, *, pings: int = PINGS) -> None:  # noqa: ANN401 - of torch
    """Exchanges one number with the first rank `pings` times; the first with each rank in turn."""
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    number = torch.zeros(1, dtype=torch.int64)
    for peer in range(1, world):
        if rank not in (0, peer):
            continue
        other, text = peer - rank, _Texts(when, rank, peer - rank)
        for k in range(pings):
            if rank == 0:
                _send(recorder, number, other, group, text.sends, k)
            _receive(recorder, number, other, group, text.receives, k)
            if rank != 0:
                _send(recorder, number, other, group, text.sends, k)


class _Texts:
    """Lines of both ways between two ranks; the number of a ping is the gap."""

    def __init__(self, when: str, rank: int, other: int) -> None:
        self.sends = _text("SEND", other, f"{when}|{rank}>{other}|%d")
        self.receives = _text("RECV", other, f"{when}|{other}>{rank}|%d")


def _text(cat: str, peer: int, tx: str) -> str:
    return line(f"{cat}.clock", cat, peer=peer, bytes=8, tail=f',"tx":"{tx}"')


def _send(recorder: Recorder, number: torch.Tensor, peer: int, group: Any, text: str, k: int) -> None:  # noqa: ANN401
    import torch.distributed as dist

    start = recorder.clock()
    dist.send(number, peer, group=group, tag=TAG)
    recorder.events.append((text, start, recorder.clock(), OUTSIDE, k))


def _receive(recorder: Recorder, number: torch.Tensor, peer: int, group: Any, text: str, k: int) -> None:  # noqa: ANN401
    import torch.distributed as dist

    start = recorder.clock()
    dist.recv(number, peer, group=group, tag=TAG)
    recorder.events.append((text, start, recorder.clock(), OUTSIDE, k))
