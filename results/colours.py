"""The colours of every picture: parts of a model, passes of a schedule, families of rows. One table each, no other.

Okabe and Ito 2008, "Color Universal Design", told apart with any common colour vision; sixteen parts need nine more
colours, chosen so that any two of them stay apart in normal vision and in full protanopia, deuteranopia and tritanopia
(Machado 2009, doi:10.1109/TVCG.2009.113; a test holds them to that). Names stand beside colours wherever there is room.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from estimator.part import Part
from estimator.schedule import Kind

__all__ = ["BLACK", "DISTINCT", "ITEM_COLOURS", "LINE", "MANY", "PART_COLOURS", "PASS_COLOURS", "RULE", "STROKES",
           "TRACE_NAMES", "on"]  # fmt: skip

BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442",
)  # fmt: skip
VIOLET, PLUM, MINT, PINE, MOSS, AQUA, INDIGO, GRAPE, ORCHID = (
    "#821CEF", "#5C2348", "#C5F4BA", "#304919", "#94B361", "#3BF5E9", "#3E1EA0", "#4A206D", "#B850F5",
)  # fmt: skip
BLACK: Final = "#000000"

DISTINCT: Final = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, BLACK)
"""For up to eight groups that have no colour of their own, in this order."""
STROKES: Final = (*DISTINCT[:6], "#5B4A00", BLACK)
"""The same for lines on white, on which yellow is lost: dark brown in its place."""
MANY: Final = (*DISTINCT[:-1], VIOLET, PLUM, MOSS, AQUA, INDIGO, PINE, ORCHID, MINT, GRAPE)
"""The same for more."""

RULE: Final = "#DDDDDD"
"""Lines behind a picture."""
LINE: Final = "#888888"
"""Lines that say something."""

PART_COLOURS: Final[Mapping[Part, str]] = {
    Part.EMBEDDING: VIOLET, Part.ATTENTION: BLUE, Part.ROTARY: SKY, Part.LINEAR_ATTENTION: AQUA, Part.SCAN: INDIGO,
    Part.INDEXER: MOSS, Part.MLP: ORANGE, Part.ROUTER: PURPLE, Part.EXPERTS: VERMILION, Part.SHARED_EXPERTS: YELLOW,
    Part.NORM: GREEN, Part.RESIDUAL: MINT, Part.HYPER: PINE, Part.HEAD: PLUM, Part.MTP: ORCHID,
    Part.COMMUNICATION: GRAPE,
}  # fmt: skip

PASS_COLOURS: Final[Mapping[Kind, str]] = {
    Kind.F: SKY, Kind.B: ORANGE, Kind.W: GREEN, Kind.BW: VERMILION, Kind.PAIR: PURPLE,
}  # fmt: skip

ITEM_COLOURS: Final[Mapping[str, str]] = {
    "weights": BLUE, "gradients": ORANGE, "optimizer_states": GREEN, "gathered_weights": PURPLE, "activations": SKY,
    "working_set": VERMILION, "buckets": YELLOW, "exchange_buffers": VIOLET, "workspace": PLUM, "logits": MOSS,
}  # fmt: skip
"""Of what fills a chip's memory."""

TRACE_NAMES: Final[Mapping[Part, str]] = {
    Part.EMBEDDING: "detailed_memory_dump", Part.ATTENTION: "thread_state_runnable", Part.ROTARY: "rail_response",
    Part.LINEAR_ATTENTION: "vsync_highlight_color", Part.SCAN: "light_memory_dump", Part.INDEXER: "olive",
    Part.MLP: "rail_animation", Part.ROUTER: "heap_dump_object_type", Part.EXPERTS: "terrible",
    Part.SHARED_EXPERTS: "yellow", Part.NORM: "good", Part.RESIDUAL: "rail_idle", Part.HYPER: "black",
    Part.HEAD: "thread_state_iowait", Part.MTP: "rail_load", Part.COMMUNICATION: "grey",
}  # fmt: skip
"""The nearest names of the fixed list that chrome://tracing takes (its color_scheme.html); Perfetto's viewer colours by
the name of a slice and takes none."""

MIDDLE = 0.179  # relative luminance on which black and white text have equal contrast (WCAG 2.2)


def on(fill: str) -> str:
    """The colour of text that is read on a fill.

    >>> on("#F0E442"), on("#0072B2")
    ('#000000', '#FFFFFF')
    """
    levels = (int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in levels]
    luminance = sum(share * x for share, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return BLACK if luminance > MIDDLE else "#FFFFFF"
