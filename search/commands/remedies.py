"""What would make a configuration fit in memory: neighbours that change one choice, else several, each evaluated.

Model, chip, batch and numerics stay as they are; more chips are the last resort.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from estimator.build import build
from estimator.graph import BlockKind
from estimator.strategy import Fusion, Module, Recompute, RecomputeKind, Schedule, Strategy
from search.commands.point import Point

__all__ = ["Remedy", "modules_of", "remedies"]

MAX_CHANGES = 4
PAIRS = 2  # up to so many changes every combination is tried; beyond, only what takes the least memory so far
MAX_DOUBLINGS = 8
SHORT = 2  # tokens; which modules a model has does not depend on the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A changed strategy: what was changed, and what it takes then."""

    changes: tuple[str, ...]
    strategy: Strategy
    step_time_s: float
    device_memory_bytes: float
    fits: bool

    @property
    def change(self) -> str:
        """The changes as one text."""
        return ", ".join(self.changes)

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        names = ("change", "fits", "step_time_s", "device_memory_bytes")
        return {name: getattr(self, name) for name in names}


def remedies(point: Point, *, top: int = 3) -> list[Remedy]:
    """The fastest of those that fit with the fewest changes; else the closest, on more chips if it fits there."""
    tried = {point.strategy}
    level: list[tuple[tuple[str, ...], Strategy]] = [((), point.strategy)]
    closest: Remedy | None = None
    for number in range(1, MAX_CHANGES + 1):
        found = [remedy for before in level for remedy in _changed(point, *before, tried)]
        if fitting := _fastest(found):
            return fitting[:top]
        found.sort(key=lambda r: (r.device_memory_bytes, r.change))
        if not found or (closest is not None and found[0].device_memory_bytes >= closest.device_memory_bytes):
            break
        closest = found[0]
        level = [(r.changes, r.strategy) for r in (found if number < PAIRS else found[:1])]
    if closest is None:
        return []
    return _with_more_chips(point, closest)[:top] or [closest]


def _with_more_chips(point: Point, closest: Remedy) -> list[Remedy]:
    """What fits on the fewest chips, in doublings: the closest as it is, or with one more change."""
    for doublings in range(1, MAX_DOUBLINGS + 1):
        num_chips = point.system.num_chips * 2**doublings
        larger = replace(point, system=point.system.with_chips(num_chips))
        changes = (*closest.changes, f"num_chips {num_chips}")
        same = _try(larger, changes, closest.strategy)
        found = [*([same] if same else []), *_changed(larger, changes, closest.strategy, set())]
        if fitting := _fastest(found):
            return fitting
    return []


def _fastest(found: list[Remedy]) -> list[Remedy]:
    return sorted((r for r in found if r.fits), key=lambda r: (r.step_time_s, r.change))


def _changed(point: Point, before: tuple[str, ...], strategy: Strategy, tried: set[Strategy]) -> Iterator[Remedy]:
    """Neighbours of a strategy that are legal and new; of two changes to one choice the later one counts."""
    for change, other in neighbours(point, strategy):
        if other in tried:
            continue
        kept = tuple(text for text in before if text.split()[0] != change.split()[0])
        tried.add(other)
        if (remedy := _try(point, (*kept, change), other)) is not None:
            yield remedy


def _try(point: Point, changes: tuple[str, ...], strategy: Strategy) -> Remedy | None:
    try:
        result = point.evaluate(strategy)
    except ValueError:  # a rule forbids it here
        return None
    return Remedy(
        changes=changes,
        strategy=strategy,
        step_time_s=float(result.step_time_s),
        device_memory_bytes=float(result.device_memory_bytes),
        fits=bool(result.feasible),
    )


def neighbours(point: Point, s: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Strategies that differ in one choice and may take less memory. The batch and the numerics stay as they are."""
    yield from _recomputes(point, s)
    for stage in range(int(s.zero_stage) + 1, 4):
        yield f"zero_stage {stage}", replace(s, zero_stage=stage)
    if s.micro_batch > 1:
        yield f"micro_batch {int(s.micro_batch) // 2}", replace(s, micro_batch=int(s.micro_batch) // 2)
    if s.dp_replicate > 1:
        yield f"dp_replicate {int(s.dp_replicate) // 2}", replace(s, dp_replicate=int(s.dp_replicate) // 2)
    for part in ("states", "activations"):
        if getattr(s.offload, part) < 1:
            yield f"offload_{part} 1", replace(s, offload=replace(s.offload, **{part: 1}))
    yield f"tp {2 * int(s.tp)}", replace(s, tp=2 * int(s.tp), sequence_parallel=True)
    yield f"pp {2 * int(s.pp)}", replace(s, pp=2 * int(s.pp), layout=None, recompute_per_chunk=None)
    yield f"cp {2 * int(s.cp)}", replace(s, cp=2 * int(s.cp))
    yield f"ep {2 * int(s.ep)}", replace(s, ep=2 * int(s.ep))
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.ZB_H1):
        if s.schedule is not schedule and s.pp > 1:
            yield (
                f"schedule {schedule.value}",
                replace(s, schedule=schedule, vpp=1, layout=None, recompute_per_chunk=None),
            )
    for fusion in (Fusion.FLASH_ATTENTION, Fusion.FUSED_LOSS):
        if fusion not in s.fusion:
            yield f"fusion with {fusion.value}", replace(s, fusion=s.fusion | {fusion})


def _recomputes(point: Point, s: Strategy) -> Iterator[tuple[str, Strategy]]:
    """One module more, block recompute of one layer, half of them or all, and full."""
    if s.recompute.kind is RecomputeKind.FULL:
        return
    s = replace(s, recompute_per_chunk=None)
    if s.recompute.kind is not RecomputeKind.BLOCK:
        for module in sorted(modules_of(point) - s.recompute.modules, key=lambda m: m.value):
            wider = Recompute(kind=RecomputeKind.SELECTIVE, modules=s.recompute.modules | {module})
            yield f"recompute {wider}", replace(s, recompute=wider)
    chunk = -(-point.model.num_layers // int(s.pp * s.vpp))
    for layers in sorted({1, max(chunk // 2, 1), chunk}):
        if s.recompute.kind is not RecomputeKind.BLOCK or layers > s.recompute_layers:
            block = Recompute(kind=RecomputeKind.BLOCK)
            yield f"recompute block of {layers} layers", replace(s, recompute=block, recompute_layers=layers)
    yield "recompute full", replace(s, recompute=Recompute(kind=RecomputeKind.FULL), recompute_layers=0)


def modules_of(point: Point) -> frozenset[Module]:
    """Recompute modules that the model has."""
    blocks = build(point.model, SHORT).blocks
    names = {name for kind, b in blocks.items() if kind is not BlockKind.HEAD for op in b.ops for name in op.modules}
    return frozenset(module for module in Module if module.value in names)
