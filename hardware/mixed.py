"""States a system of segments: clusters of different chips that share one pipeline, and the link between them."""

from __future__ import annotations

from hardware._errors import reject
from hardware.link import LinkSpec
from hardware.system import UNBOUNDED, SystemSpec, Tier

__all__ = ["mixed", "roomiest"]

APPROXIMATIONS = (
    "gradient traffic and parameter update are those of the slowest segment on every stage",
    "every hop between stages takes as long as the longest one, the one between segments included",
    "memory counts what a chip has less than the roomiest as used",
)
"""What the estimate of a mixed pipeline simplifies, always towards more time or less room. Told with every result."""


def mixed(name: str, segments: tuple[SystemSpec, ...], link: LinkSpec | None = None) -> SystemSpec:
    """Join clusters, each of one chip, in the order in which a pipeline runs through them.

    `link` is a chip's share of what joins them; None: the slower of their outermost links.
    """
    if len(segments) < 2:
        reject(f"{name}: a mixed system has at least two segments", len(segments), "name the cluster itself")
    if any(segment.segments for segment in segments):
        reject(f"{name}: a segment is one cluster of equal chips", "a mixed one", "list its segments here")
    assumed = [f"segment {s.name}: {text}" for s in segments for text in s.assumptions]
    if link is None:
        outermost = [segment.tiers[-1].link for segment in segments]
        link = min(outermost, key=lambda wire: wire.achieved_bytes_per_s())
        assumed.append(f"segments are joined by the slower of their outermost links, {link.name}")
    best = roomiest(segments)
    return SystemSpec(
        name=name, chip=best.chip, num_chips=sum(segment.num_chips for segment in segments), headroom=best.headroom,
        tiers=(Tier(name=link.name, span=UNBOUNDED, link=link),), chips_per_node=best.chips_per_node,
        assumptions=(*assumed, *APPROXIMATIONS), segments=segments,
    )  # fmt: skip


def roomiest(segments: tuple[SystemSpec, ...]) -> SystemSpec:
    """The segment whose chips leave most to the allocator: the one that memory is counted against."""
    return max(segments, key=lambda segment: segment.usable_hbm_bytes - segment.chip.context_bytes)
