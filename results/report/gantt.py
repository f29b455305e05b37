"""Pipeline schedules as pictures: which pass each rank runs when, and what the fullest rank holds meanwhile.

PNG needs the `report` extra (matplotlib). Computes no times: an order and when its passes run are given.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from estimator.schedule import Kind, Order
from hardware.units import GIB
from results.colours import PASS_COLOURS
from results.files import write_bytes
from results.report.text import clip

__all__ = ["Lane", "alive", "save_gantt", "text_gantt"]

LETTERS = {Kind.F: "F", Kind.B: "B", Kind.W: "W", Kind.BW: "R", Kind.PAIR: "P"}
WORDS = {Kind.F: "F forward", Kind.B: "B input gradient", Kind.W: "W weight gradient", Kind.BW: "R full backward",
         Kind.PAIR: "P forward beside a backward"}  # fmt: skip
TEXT_WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One schedule: its order, seconds at which passes start and end by rank, and its fullest rank's activations."""

    title: str
    passes: Order
    start: Sequence[np.ndarray]
    end: Sequence[np.ndarray]
    worst: int
    peak_bytes: float

    @property
    def span(self) -> float:
        """Seconds until the last pass ends."""
        return max(float(rank[-1]) for rank in self.end)


def alive(lane: Lane) -> tuple[np.ndarray, np.ndarray]:
    """Moments [n] and activations of the worst rank from each on [n]: 1 at its fullest, chunks counted alike."""
    moments: list[tuple[float, int]] = []
    items = zip(lane.passes[lane.worst], lane.start[lane.worst], lane.end[lane.worst], strict=True)
    for item, start, end in items:
        if item.kind in {Kind.F, Kind.PAIR}:
            moments.append((float(start), 1))
        if item.kind in {Kind.W, Kind.BW, Kind.PAIR}:
            moments.append((float(end), -1))
    moments.sort()
    held = np.cumsum([change for _, change in moments])
    return np.array([at for at, _ in moments]), held / max(int(held.max()), 1)


def text_gantt(lane: Lane) -> list[str]:
    """A line a rank and a line of what the fullest one holds, for a terminal."""
    step = lane.span / TEXT_WIDTH
    middle = (np.arange(TEXT_WIDTH) + 0.5) * step
    lines = []
    for rank, items in enumerate(lane.passes):
        at = np.searchsorted(lane.start[rank], middle, side="right") - 1
        row = [
            LETTERS[items[n].kind] if n >= 0 and t < lane.end[rank][n] else "."
            for n, t in zip(at.tolist(), middle.tolist(), strict=True)
        ]
        lines.append(f"{rank:>4} {''.join(row)}")
    moments, held = alive(lane)
    tenths = [int(held[n] * 9 + 0.5) if n >= 0 else 0 for n in np.searchsorted(moments, middle, side="right") - 1]
    kinds = [kind for kind in Kind if any(item.kind is kind for items in lane.passes for item in items)]
    lines.append(f"held {''.join(map(str, tenths))}")
    lines.append(f"     {', '.join(WORDS[kind] for kind in kinds)}; held: ninths of the peak of rank {lane.worst}")
    return lines


def save_gantt(path: Path, lanes: Sequence[Lane], *, title: str = "") -> None:
    """Writes a PNG: time by rank for each schedule, on one axis of time, with activation bytes of its fullest rank."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError(f"{path}: pictures need matplotlib; pip install 'trainspace[report]'") from error
    ranks = max(len(lane.passes) for lane in lanes)
    tall = 0.7 + 0.13 * ranks
    figure = Figure(figsize=(14, 1.0 + len(lanes) * (tall + 1.1)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2 * len(lanes), 1, sharex=True, squeeze=False, height_ratios=[tall, 0.6] * len(lanes))
    most = max(lane.peak_bytes for lane in lanes) / GIB
    for lane, top, strip in zip(lanes, grid[::2, 0], grid[1::2, 0], strict=True):
        for kind, colour in PASS_COLOURS.items():
            boxes = [
                [(s, rank - 0.45), (e, rank - 0.45), (e, rank + 0.45), (s, rank + 0.45)]
                for rank, items in enumerate(lane.passes)
                for item, s, e in zip(items, lane.start[rank].tolist(), lane.end[rank].tolist(), strict=True)
                if item.kind is kind
            ]
            top.add_collection(PolyCollection(boxes, facecolors=colour, edgecolors="white", linewidths=0.3))
        top.set_ylim(len(lane.passes) - 0.5, -0.5)
        top.set_ylabel("rank", fontsize=11)
        top.set_title(clip(lane.title, 120), fontsize=12, loc="left")
        moments, held = alive(lane)
        strip.step(moments, held * lane.peak_bytes / GIB, where="post", color="#000000", linewidth=1.0)
        strip.fill_between(moments, held * lane.peak_bytes / GIB, step="post", color="#BBBBBB")
        strip.set_ylim(0.0, most * 1.05)
        strip.set_ylabel(f"GiB, rank {lane.worst}", fontsize=9)
    grid[0, 0].set_xlim(0.0, max(lane.span for lane in lanes))
    grid[-1, 0].set_xlabel("seconds of a step's passes; below each: activations of the fullest rank", fontsize=12)
    used = [
        kind for kind in PASS_COLOURS if any(x.kind is kind for lane in lanes for items in lane.passes for x in items)
    ]
    figure.legend(
        handles=[Patch(color=PASS_COLOURS[kind], label=WORDS[kind]) for kind in used], loc="outside upper right",
        ncols=len(used), fontsize=10,
    )  # fmt: skip
    figure.suptitle(clip(title, 90), fontsize=14, x=0.01, ha="left")
    sink = io.BytesIO()
    figure.savefig(sink, format="png")
    write_bytes(path, sink.getvalue())
