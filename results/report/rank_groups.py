"""Which ranks share a group with one rank, and the nodes that they lie on, as a picture. Knows no prices.

Ranks are numbered as the row's rank order says, from the inside of the machine out; experts fold over the ranks of a
stage, without the pipeline. The page of a run does the same in its own language (page/ranks.js).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from results.colours import BLACK, LINE, RULE, STROKES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["GROUP_COLOURS", "draw_ranks", "groups_of", "reach"]

GROUP_COLOURS: Final[Mapping[str, str]] = {
    "dp": STROKES[4], "pp": STROKES[1], "ep": STROKES[2], "cp": STROKES[3], "tp": STROKES[5],
}  # fmt: skip
"""In the order in which they are drawn: a rank of several groups shows the innermost."""
_WIDE = 1.7  # of the picture, over its height


def groups_of(row: Mapping[str, Any], rank: int) -> dict[str, NDArray[np.int64]]:
    """The ranks of each group that one rank is in, itself among them.

    >>> row = {"tp": 2, "cp": 1, "dp": 2, "pp": 2, "ep": 4, "etp": 1, "rank_order": "tp-cp-dp-pp"}
    >>> {name: ranks.tolist() for name, ranks in groups_of(row, 5).items()}
    {'tp': [4, 5], 'cp': [5], 'dp': [5, 7], 'pp': [1, 5], 'ep': [4, 5, 6, 7]}
    """
    found, stride, pipeline = {}, 1, (1, 1)
    for name in str(row["rank_order"]).split("-"):
        size = int(row[name])
        found[name] = _members(rank, size, stride)
        pipeline = (size, stride) if name == "pp" else pipeline
        stride *= size
    size, inner = pipeline
    stage, place = rank // inner % size, rank // (inner * size) * inner + rank % inner  # among the ranks of its stage
    others = _members(place, int(row["ep"]), int(row["etp"]))
    return found | {"ep": others // inner * inner * size + stage * inner + others % inner}


def _members(rank: int, size: int, stride: int) -> NDArray[np.int64]:
    return rank - rank // stride % size * stride + stride * np.arange(size, dtype=np.int64)


def reach(ranks: NDArray[np.int64], tiers: Sequence[Mapping[str, Any]]) -> str:
    """The innermost tier of links that holds all ranks of a group; nothing where there is one rank alone."""
    if len(ranks) < 2:
        return ""
    inside = (t for t in tiers if t["span"] and ranks[0] // t["span"] == ranks[-1] // t["span"])
    return str(next(inside, tiers[-1])["name"])


def draw_ranks(axes: Axes, row: Mapping[str, Any], system: Mapping[str, Any], rank: int = 0) -> None:
    """Chips as squares, nodes as boxes around them, the groups of one rank in colour with the links that they reach."""
    from matplotlib.collections import PolyCollection

    total, node = math.prod(int(row[name]) for name in ("tp", "cp", "dp", "pp")), int(system["chips_per_node"])
    groups = groups_of(row, rank)
    colour = np.full(total, RULE, dtype=object)
    for name, hue in GROUP_COLOURS.items():
        if len(groups[name]) > 1:
            colour[groups[name]] = hue
    colour[rank] = BLACK
    corner, size, (across, down) = _corners(total, node)
    axes.add_collection(PolyCollection(_squares(corner, 0.9, 0.9), facecolors=colour.tolist()))
    first = corner[::node] - 0.15
    axes.add_collection(
        PolyCollection(_squares(first, across + 0.2, down + 0.2), facecolors="none", edgecolors=LINE, linewidths=0.8)
    )
    for name, hue in reversed(list(GROUP_COLOURS.items())):
        if len(ranks := groups[name]) > 1:
            nodes = len(np.unique(ranks // node))
            told = f"{name} {len(ranks)}, over {reach(ranks, system['tiers'])}"
            axes.scatter([], [], c=hue, marker="s", label=told + (f", {nodes} nodes" if nodes > 1 else ""))
    axes.set_xlim(-0.5, size[0])
    axes.set_ylim(size[1], -0.5)
    axes.set_aspect("equal")
    axes.set_axis_off()
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title=f"groups of rank {rank} (black)", loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3)


def _corners(total: int, node: int) -> tuple[NDArray[np.float64], tuple[float, float], tuple[int, int]]:
    """Where each chip stands, how large the picture is, and the chips of a node across and down: [total, 2]."""
    across = math.ceil(math.sqrt(node))
    while node % across:
        across += 1
    down = node // across
    nodes = -(-total // node)
    box = (across + 0.6, down + 0.6)
    per_line = max(1, min(nodes, round(math.sqrt(_WIDE * nodes * box[1] / box[0]))))
    rank = np.arange(total)
    place, chip = rank // node, rank % node
    corner = np.stack(
        [place % per_line * box[0] + chip % across, place // per_line * box[1] + chip // across], axis=1
    )  # fmt: skip
    return corner, (per_line * box[0], -(-nodes // per_line) * box[1]), (across, down)


def _squares(corner: NDArray[np.float64], width: float, height: float) -> list[NDArray[np.float64]]:
    """Four corners of each rectangle, [4, 2] each."""
    return list(corner[:, None, :] + np.array([[0, 0], [width, 0], [width, height], [0, height]]))
