"""Which block waits for whose buffers across the passes of a rank; within a pass, passes.py writes the same waits.

A rank has room for BUFFERS blocks' gradients that are reduced or sent to the host, and for as many blocks' activations
on their way to or from it. What a block leaves in a buffer is its own until the transfer has ended, whichever pass runs
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from estimator.detail.instances import Instances
from estimator.detail.script import Visit
from estimator.keep import BUFFERS
from estimator.schedule import Kind

__all__ = ["wait_for_buffers"]

_Place = tuple[int, Visit]
"""A pass and one of its blocks."""


def wait_for_buffers(made: Instances, passes: Sequence[Sequence[tuple[int, ...]]], *, beside: bool) -> None:
    """Adds these waits. `passes`: per rank and pass, its one or two instances, at once where `beside`."""
    for items in passes:
        forwards, gradients, every = list[_Place](), list[_Place](), list[_Place]()
        for parts in items:
            for instance in parts:
                visits = made.of(instance).visits
                for n, visit in enumerate(visits):
                    if n < BUFFERS:
                        _wait(made, (instance, visit), forwards, gradients, [] if beside and len(parts) == 2 else every)
                    mine = {Kind.F: forwards, Kind.BW: gradients, Kind.W: gradients}.get(made.kind[instance])
                    for visited in (every,) if mine is None else (every, mine):
                        visited.append((instance, visit))


def _wait(made: Instances, place: _Place, forwards: list[_Place], gradients: list[_Place], every: list[_Place]) -> None:
    """One block, after the blocks of each kind that the rank ran before it."""
    instance, visit = place
    kind = made.kind[instance]
    heads = made.global_ids(instance, visit.heads)
    if kind is Kind.F:
        made.link(_freed(made, forwards, "down"), heads)
    elif kind is not Kind.B and visit.reduce >= 0:
        made.link(_freed(made, gradients, "reduce"), heads)
        made.link(_freed(made, gradients, "down"), made.global_ids(instance, [visit.reduce]))
    elif kind is not Kind.B:
        made.link(_freed(made, gradients, "down"), heads)
    if kind is not Kind.F and visit.up >= 0 and len(every) >= BUFFERS and made.kind[every[-BUFFERS][0]] is Kind.F:
        made.link(_freed(made, every, "down"), made.global_ids(instance, [visit.up]))


def _freed(made: Instances, visited: list[_Place], what: str) -> list[int]:
    """The transfer that frees the buffer of the block BUFFERS before, if there is one."""
    if len(visited) < BUFFERS:
        return []
    instance, visit = visited[-BUFFERS]
    task = getattr(visit, what)
    return made.global_ids(instance, [task]) if task >= 0 else []
