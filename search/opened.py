"""How each open axis is sampled: a few whole numbers, and the value that they make on a given structure.

Each value is legal where the structure is, or as good as none: a choice without effect becomes the default, so that
equal configurations are priced once. A new open axis is one entry of `OPENED`. Knows nothing of samplers or prices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from estimator.layout import even_layers
from estimator.schedule import placement
from estimator.strategy import Chunks, Fusion, LayoutRule, OwnFusion, Recompute, RecomputeKind, Strategy
from hardware.units import MB
from search.space import Space, SpaceError

__all__ = ["OPENED", "Free"]

Levels = tuple[int, ...]
Structure = Mapping[str, Any]

SHIFTS = (-2, -1, 0, 1, 2)
"""Layers of the first and of the last chunk against an even share: embedding, head and loss weigh one to two layers."""

LEFTOVERS, BALANCED = 4, 3
"""Where layers that do not divide go: as even_layers has it, to the front, or to the back; BALANCED: layout auto."""

EIGHTHS = 8
"""Recomputed share of a chunk's layers in eighths."""

PIECES = (1, 2, 4, 8)
BUCKETS = (None, 25 * MB, 50 * MB, 100 * MB, 200 * MB, 400 * MB, 800 * MB, 1600 * MB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """One axis by whole-number parameters: names with their numbers of levels, and what levels mean.

    `value` takes the space, the values of the structure by axis, and a level per parameter. `start`: the levels that
    are nearest to leaving the axis alone.
    """

    axis: str
    parameters: tuple[tuple[str, int], ...]
    start: Levels
    value: Callable[[Space, Structure, Levels], object]


def _layout(space: Space) -> Free:
    names = ("layout.first", "layout.last")
    middle = SHIFTS.index(0)
    return Free(
        axis="layout", parameters=(*((name, len(SHIFTS)) for name in names), ("layout.leftover", LEFTOVERS)),
        start=(middle, middle, 0), value=_layers_of,
    )  # fmt: skip


def _layers_of(space: Space, structure: Structure, levels: Levels) -> object:
    """Layers per chunk; None where they are those of an even layout, or where shifts leave an inner chunk empty."""
    total, num = space.model.num_layers, structure["pp"] * structure["vpp"]
    even = even_layers(total, num)
    if num == 1:
        return None
    if levels[2] == BALANCED:
        return LayoutRule.AUTO if structure["pp"] > 1 else None
    first, last = (max(total // num + SHIFTS[level], 0) for level in levels[:2])
    if num == 2:
        last = total - first
    rest = total - first - last
    if rest < num - 2 or last < 0:
        return None
    found = (first, *_spread(rest, num - 2, levels[2]), last)
    return None if found == even else found


def _spread(total: int, num: int, leftover: int) -> tuple[int, ...]:
    """Layers over the inner chunks."""
    if num == 0:
        return ()
    base, left = divmod(total, num)
    if leftover == 0:
        return even_layers(total, num)
    longer = range(left) if leftover == 1 else range(num - left, num)
    return tuple(base + (i in longer) for i in range(num))


def _fusion(space: Space) -> Free:
    """Each fusion by itself, off or on."""
    defaults = Strategy().fusion
    return Free(
        axis="fusion", parameters=tuple((f"fusion.{f.value}", 2) for f in (*Fusion, *space.fusion_rules)),
        start=tuple(int(f in defaults) for f in (*Fusion, *space.fusion_rules)), value=_fusion_set,
    )  # fmt: skip


def _fusion_set(space: Space, structure: Structure, levels: Levels) -> frozenset[Fusion | OwnFusion]:
    return frozenset(f for f, on in zip((*Fusion, *space.fusion_rules), levels, strict=True) if on)


def _per_chunk(space: Space) -> Free:
    """Off, or a share of each chunk's layers that goes linearly from the first rank to the last."""
    choices = (choice for choice in space.axes["recompute"] if isinstance(choice, Recompute))
    if all(choice.kind is not RecomputeKind.BLOCK for choice in choices):
        raise SpaceError(
            f"{space.name}: strategy.recompute_per_chunk: what chunks recompute is a block; got recompute without it; "
            "accepted block among the values of strategy.recompute"
        )
    shares = (("per_chunk.first", EIGHTHS + 1), ("per_chunk.last", EIGHTHS + 1))
    return Free(axis="recompute_per_chunk", parameters=(("per_chunk", 2), *shares), start=(0, 0, 0), value=_recomputed)


def _recomputed(space: Space, structure: Structure, levels: Levels) -> tuple[int, ...] | None:
    on, first, last = levels
    pp, vpp = structure["pp"], structure["vpp"]
    layout = structure["layout"]
    if not on or layout is LayoutRule.AUTO:  # which balances stages that recompute alike
        return None
    layers = layout if isinstance(layout, tuple) else even_layers(space.model.num_layers, pp * vpp)
    rank_of = {int(chunk): rank for rank, mine in reversed(list(enumerate(placement(structure["schedule"], pp, vpp))))
               for chunk in mine}  # fmt: skip
    shares = [first + (last - first) * rank_of[chunk] / max(pp - 1, 1) for chunk in range(pp * vpp)]
    found = tuple(round(share * n / EIGHTHS) for share, n in zip(shares, layers, strict=True))
    return found if any(found) else None


def _tp_chunks(space: Space) -> Free:
    """Pieces of each of the four collectives of a layer."""
    names = ("attention_in", "attention_out", "mlp_in", "mlp_out")
    default = Chunks()
    return Free(
        axis="tp_chunks", parameters=tuple((f"tp_chunks.{name}", len(PIECES)) for name in names),
        start=tuple(PIECES.index(getattr(default, name)) for name in names), value=_pieces,
    )  # fmt: skip


def _pieces(space: Space, structure: Structure, levels: Levels) -> Chunks:
    if structure["tp"] == 1:
        return Chunks()
    attention_in, attention_out, mlp_in, mlp_out = (PIECES[level] for level in levels)
    return Chunks(attention_in=attention_in, attention_out=attention_out, mlp_in=mlp_in, mlp_out=mlp_out)


def _expert_bucket(space: Space) -> Free:
    return Free(
        axis="expert_bucket_bytes", parameters=(("expert_bucket", len(BUCKETS)),), start=(0,), value=_bucket_bytes
    )


def _bucket_bytes(space: Space, structure: Structure, levels: Levels) -> int | None:
    found = BUCKETS[levels[0]] if space.model.moe is not None else None
    return None if found is None else int(found)


OPENED: dict[str, Callable[[Space], Free]] = {
    "layout": _layout,  # first: what chunks recompute depends on their layers
    "fusion": _fusion,
    "recompute_per_chunk": _per_chunk,
    "tp_chunks": _tp_chunks,
    "expert_bucket_bytes": _expert_bucket,
}
"""How each axis is sampled where a space leaves it open."""
